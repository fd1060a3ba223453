/* A libnvidia-ml with one GPU, for the unmodified nvidia-ml-py. Every call reads the load from the file NVML_STUB:
   "utilisation memory_used_mb memory_total_mb processes mps_clients error". Every query returns the error if it is not
   0; 15 is NVML_ERROR_GPU_IS_LOST. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct { int util, used, total, processes, mps, error; } now;

static int read_load(void) {
  FILE *file = fopen(getenv("NVML_STUB"), "r");
  if (!file) return 999;
  int n = fscanf(file, "%d %d %d %d %d %d", &now.util, &now.used, &now.total, &now.processes, &now.mps, &now.error);
  fclose(file);
  return n == 6 ? now.error : 999;
}

typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;

int nvmlInit_v2(void) { return getenv("NVML_STUB") ? 0 : 9; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "stub error"; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)1;
  return index == 0 ? 0 : 2;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *out) {
  int code = read_load();
  out->gpu = now.util;
  out->memory = 0;
  return code;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *out) {
  int code = read_load();
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
  int code = read_load();
  return code ? code : list(now.processes, 100, count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, process *out) {
  int code = read_load();
  return code ? code : list(now.mps, 500, count, out);
}
