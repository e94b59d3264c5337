/* Stands in for the GPU driver's libnvidia-ml: the file named by NVML_FILE has a line "UUID TOTAL FREE" per GPU,
   or the word "broken" (calls fail) or "silent" (calls do not return while it says so). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct memory { unsigned long long total, free, used; };
struct gpu { char uuid[96]; unsigned long long total, free; };

static int begun;

static int gpus(struct gpu * found, int limit) {
    for (;;) {
        FILE * file = fopen(getenv("NVML_FILE"), "r");
        int    n = 0;
        char   line[256];
        if (!file) {
            return -1;
        }
        while (n < limit && fgets(line, sizeof(line), file)) {
            if (sscanf(line, "%95s %llu %llu", found[n].uuid, &found[n].total, &found[n].free) < 1) {
                break;
            }
            n++;
        }
        fclose(file);
        if (n == 0 || strcmp(found[0].uuid, "silent") != 0) {
            return n > 0 && strcmp(found[0].uuid, "broken") == 0 ? -1 : n;
        }
        usleep(10000);
    }
}

int nvmlInit_v2(void) {
    begun = 1;
    return 0;
}

const char * nvmlErrorString(int code) {
    return code == 15 ? "GPU is lost" : "Unknown Error";
}

int nvmlDeviceGetCount_v2(unsigned int * count) {
    struct gpu found[16];
    int        n = gpus(found, 16);
    if (!begun) {
        return 1; /* NVML_ERROR_UNINITIALIZED */
    }
    if (n < 0) {
        return 15; /* NVML_ERROR_GPU_IS_LOST */
    }
    *count = (unsigned int) n;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void ** handle) {
    *handle = (void *) (size_t) (index + 1);
    return 0;
}

int nvmlDeviceGetUUID(void * handle, char * uuid, unsigned int length) {
    struct gpu found[16];
    int        n = gpus(found, 16), index = (int) (size_t) handle - 1;
    if (index < 0 || index >= n) {
        return 2; /* NVML_ERROR_INVALID_ARGUMENT */
    }
    snprintf(uuid, length, "%s", found[index].uuid);
    return 0;
}

int nvmlDeviceGetMemoryInfo(void * handle, struct memory * memory) {
    struct gpu found[16];
    int        n = gpus(found, 16), index = (int) (size_t) handle - 1;
    if (index < 0 || index >= n) {
        return 2;
    }
    memory->total = found[index].total;
    memory->free  = found[index].free;
    memory->used  = memory->total - memory->free;
    return 0;
}
