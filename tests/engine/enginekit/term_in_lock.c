/* Preloaded into an engine: after SIGUSR1, the main thread sends itself SIGTERM just before it unlocks its Nth mutex. A signal from
   outside hits this moment once in thousands of tries. N is in TERM_AT_UNLOCK. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int (*real_unlock)(pthread_mutex_t *);
static volatile sig_atomic_t armed;
static int left;

static void arm(int signal) {
    (void) signal;
    armed = 1;
}

__attribute__((constructor)) static void prepare(void) {
    const char * at = getenv("TERM_AT_UNLOCK");
    left        = at ? atoi(at) : 0;
    real_unlock = (int (*)(pthread_mutex_t *)) dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    signal(SIGUSR1, arm);
}

int pthread_mutex_unlock(pthread_mutex_t * mutex) {
    if (armed && left > 0 && syscall(SYS_gettid) == getpid() && --left == 0) {
        raise(SIGTERM);
    }
    return real_unlock(mutex);
}
