/* A libnvidia-ml for the unmodified nvidia-ml-py. Every call reads the load from the file NVML_STUB, one line per GPU:
   "utilisation memory_used_mb memory_total_mb processes mps_clients error". Every query of a GPU returns its error if
   it is not 0; 15 is NVML_ERROR_GPU_IS_LOST. The handle of a GPU is its index plus 1. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_GPUS 16
static struct { int util, used, total, processes, mps, error; } loads[MAX_GPUS];

static int read_loads(void) { /* the number of GPUs, or -1 */
  FILE *file = fopen(getenv("NVML_STUB"), "r");
  if (!file) return -1;
  int n = 0;
  while (n < MAX_GPUS && fscanf(file, "%d %d %d %d %d %d", &loads[n].util, &loads[n].used, &loads[n].total,
                                &loads[n].processes, &loads[n].mps, &loads[n].error) == 6)
    n++;
  fclose(file);
  return n;
}
static int read_load(void *device) {
  int index = (int)(intptr_t)device - 1;
  return index < read_loads() ? loads[index].error : 999;
}
#define now loads[(intptr_t)device - 1]

typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;

int nvmlInit_v2(void) { return getenv("NVML_STUB") ? 0 : 9; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "stub error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
  int n = read_loads();
  *count = n < 0 ? 0 : n;
  return n < 0 ? 999 : 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(intptr_t)(index + 1);
  return (int)index < read_loads() ? 0 : 2;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *out) {
  int code = read_load(device);
  out->gpu = now.util;
  out->memory = 0;
  return code;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *out) {
  int code = read_load(device);
  out->total = (unsigned long long)now.total << 20;
  out->used = (unsigned long long)now.used << 20;
  out->free = out->total - out->used;
  return code;
}
static int list(int n, unsigned first, unsigned *count, process *out) {
  if ((int)*count < n) {
    *count = n;
    return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
  }
  for (int i = 0; i < n; i++) out[i] = (process){first + i, 1 << 20, 0, 0};
  *count = n;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *out) {
  int code = read_load(device);
  return code ? code : list(now.processes, 100, count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, process *out) {
  int code = read_load(device);
  return code ? code : list(now.mps, 500, count, out);
}
