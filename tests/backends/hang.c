/* Preloaded into an engine: while the file named by HANG_FILE exists, what its first word names goes wrong.
   "decode"  a decode call waits for a device that does not answer (seen from outside: it runs and runs)
   "clock"   the engine's clock stands still, so that whatever it waits for by the clock never comes
   "disk"    writing a slot to disk takes as long as the file is there */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int hangs(const char * what) {
    const char * path = getenv("HANG_FILE");
    char         word[16] = {0};
    int          fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) {
        return 0;
    }
    ssize_t n = read(fd, word, sizeof(word) - 1);
    close(fd);
    return n > 0 && strcmp(word, what) == 0;
}

static void wait_while(const char * what) {
    while (hangs(what)) {
        usleep(20000);
    }
}

void llama_synchronize(void * ctx) {
    static void (*real)(void *);
    if (!real) {
        real = (void (*)(void *)) dlsym(RTLD_NEXT, "llama_synchronize");
    }
    wait_while("decode");
    real(ctx);
}

int64_t ggml_time_us(void) {
    static int64_t (*real)(void);
    static volatile int64_t stands;
    if (!real) {
        real = (int64_t (*)(void)) dlsym(RTLD_NEXT, "ggml_time_us");
    }
    if (!hangs("clock")) {
        stands = 0;
        return real();
    }
    if (!stands) {
        stands = real();
    }
    return stands;
}

size_t llama_state_seq_save_file(void * ctx, const char * path, int32_t seq, const int32_t * tokens, size_t n) {
    static size_t (*real)(void *, const char *, int32_t, const int32_t *, size_t);
    if (!real) {
        real = (size_t (*)(void *, const char *, int32_t, const int32_t *, size_t)) dlsym(RTLD_NEXT, "llama_state_seq_save_file");
    }
    wait_while("disk");
    return real(ctx, path, seq, tokens, n);
}
