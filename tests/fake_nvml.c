/* A stand-in for NVIDIA's management library, for tests: libnvidia-ml.so.1.
 *
 * What it says stands in the file $KREX_FAKE_NVML, read anew at each call, one directive a line:
 *
 *   gpu UUID NAME      a GPU, with the next index (_ stands for a blank in its name)
 *   part UUID          a part (MIG) of the last one
 *   lost INDEX         every call about this GPU fails: it is lost
 *   init STATUS        nvmlInit fails with this status
 *   clock MHZ          the SM clock
 *   events MASK        the clock-event reasons
 *   process PID        a compute process, on every GPU
 *   hang FUNCTION      this function never returns
 *   fail FUNCTION N    this function fails with status N
 *
 * Each call appends the function's name, its time (CLOCK_MONOTONIC, in ns), and the process to
 * $KREX_FAKE_NVML.log.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, LOST = 15 };
enum { MOST = 16 };

struct process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

struct gpu {
    char uuid[96], name[96], parts[MOST][96];
    unsigned part_count;
    int lost;
};

static struct gpu gpus[MOST];
static unsigned gpu_count, process_count, clock_mhz;
static unsigned pids[MOST];
static unsigned long long events;
/* Handles are addresses in here: 100 * index for a GPU, plus 1 and its place for a part. */
static char handles[100 * MOST];

/* Reads the file, and does to `function` what it says. */
static int enter(const char *function) {
    const char *path = getenv("KREX_FAKE_NVML");
    char line[512], name[256], log[512];
    int status = OK, failed;
    gpu_count = process_count = clock_mhz = 0;
    events = 0;
    if (path == NULL) return OK;
    snprintf(log, sizeof log, "%s.log", path);
    FILE *file = fopen(log, "a");
    if (file != NULL) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        long long time = now.tv_sec * 1000000000LL + now.tv_nsec;
        fprintf(file, "%s %lld %d\n", function, time, (int)getpid());
        fclose(file);
    }
    file = fopen(path, "r");
    if (file == NULL) return OK;
    while (fgets(line, sizeof line, file) != NULL) {
        struct gpu *gpu = &gpus[gpu_count % MOST], *last = gpu_count > 0 ? gpu - 1 : gpus;
        unsigned number;
        if (sscanf(line, "gpu %95s %95s", gpu->uuid, gpu->name) == 2) {
            for (char *c = gpu->name; *c != 0; c++)
                if (*c == '_') *c = ' ';
            gpu->part_count = gpu->lost = 0;
            gpu_count++;
        } else if (sscanf(line, "part %95s", last->parts[last->part_count % MOST]) == 1) {
            last->part_count++;
        } else if (sscanf(line, "lost %u", &number) == 1 && number < MOST) {
            gpus[number].lost = 1;
        } else if (sscanf(line, "process %u", &number) == 1) {
            pids[process_count++ % MOST] = number;
        } else if (sscanf(line, "clock %u", &clock_mhz) == 1) {
        } else if (sscanf(line, "events %llx", &events) == 1) {
        } else if (sscanf(line, "init %d", &failed) == 1) {
            if (strncmp(function, "nvmlInit", 8) == 0) status = failed;
        } else if (sscanf(line, "fail %255s %d", name, &failed) == 2) {
            if (strcmp(name, function) == 0) status = failed;
        } else if (sscanf(line, "hang %255s", name) == 1 && strcmp(name, function) == 0) {
            fclose(file);
            for (;;) pause();
        }
    }
    fclose(file);
    return status;
}

static unsigned place_of(void *handle) { return (unsigned)((char *)handle - handles); }

/* The same for a call about a device. */
static int enter_with(const char *function, void *device, struct gpu **gpu) {
    int status = enter(function);
    if (device == NULL || place_of(device) / 100 >= gpu_count) return INVALID;
    *gpu = &gpus[place_of(device) / 100];
    return (*gpu)->lost ? LOST : status;
}

int nvmlInit_v2(void) { return enter("nvmlInit_v2"); }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, enter("nvmlInitWithFlags"); }
int nvmlShutdown(void) { return enter("nvmlShutdown"); }

const char *nvmlErrorString(int status) {
    return status == LOST ? "GPU is lost" : status == 9 ? "Driver Not Loaded" : "Some Error";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int status = enter("nvmlDeviceGetCount_v2");
    *count = gpu_count;
    return status;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    int status = enter("nvmlDeviceGetHandleByIndex_v2");
    if (index >= gpu_count) return INVALID;
    if (gpus[index].lost) return LOST;
    *device = handles + 100 * index;
    return status;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int status = enter("nvmlDeviceGetHandleByUUID");
    for (unsigned index = 0; index < gpu_count; index++) {
        if (strcmp(uuid, gpus[index].uuid) == 0) {
            *device = handles + 100 * index;
            return gpus[index].lost ? LOST : status;
        }
        for (unsigned part = 0; part < gpus[index].part_count; part++)
            if (strcmp(uuid, gpus[index].parts[part]) == 0) {
                *device = handles + 100 * index + 1 + part;
                return status;
            }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetUUID", device, &gpu);
    if (status != OK) return status;
    unsigned part = place_of(device) % 100;
    snprintf(text, length, "%s", part == 0 ? gpu->uuid : gpu->parts[part - 1]);
    return OK;
}

int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetName", device, &gpu);
    if (status == OK) snprintf(text, length, "%s", gpu->name);
    return status;
}

int nvmlDeviceGetIndex(void *device, unsigned *index) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetIndex", device, &gpu);
    *index = place_of(device) / 100;
    return status;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetMigMode", device, &gpu);
    if (status == OK) *current = *pending = gpu->part_count > 0;
    return status;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetMaxMigDeviceCount", device, &gpu);
    *count = 7;
    return status;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetMigDeviceHandleByIndex", device, &gpu);
    if (status == OK && index >= gpu->part_count) return NOT_FOUND;
    *part = (char *)device + 1 + index;
    return status;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *part, void **device) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part, &gpu);
    *device = handles + place_of(part) / 100 * 100;
    return status;
}

int nvmlDeviceGetClockInfo(void *device, unsigned kind, unsigned *mhz) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetClockInfo", device, &gpu);
    if (kind != 1 || place_of(device) % 100 != 0) return NOT_SUPPORTED;
    *mhz = clock_mhz;
    return status;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *mask) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetCurrentClocksEventReasons", device, &gpu);
    if (place_of(device) % 100 != 0) return NOT_SUPPORTED;
    *mask = events;
    return status;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *list) {
    struct gpu *gpu;
    int status = enter_with("nvmlDeviceGetComputeRunningProcesses_v3", device, &gpu);
    if (status != OK) return status;
    if (*count < process_count) {
        *count = process_count;
        return SMALL;
    }
    for (unsigned index = 0; index < process_count; index++)
        list[index] = (struct process){.pid = pids[index]};
    *count = process_count;
    return OK;
}
