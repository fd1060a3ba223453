/* A libnvidia-ml with two GPUs and their processes, for the unmodified nvidia-ml-py. Every call reads the file
   NVML_STUB: lines "gpu pid sm_percent memory_mb mps timestamp_us". */
#include <stdio.h>
#include <stdlib.h>

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;
typedef struct { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; } sample;
static struct { int gpu, pid, sm, memory, mps; unsigned long long time; } row[64];

static int read_rows(void) {
  FILE *file = fopen(getenv("NVML_STUB"), "r");
  int n = 0;
  if (!file) return 0;
  while (n < 64 && fscanf(file, "%d %d %d %d %d %llu", &row[n].gpu, &row[n].pid, &row[n].sm, &row[n].memory,
                          &row[n].mps, &row[n].time) == 6) n++;
  fclose(file);
  return n;
}

int nvmlInit_v2(void) { return getenv("NVML_STUB") ? 0 : 9; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "stub error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(size_t)(index + 1);
  return index < 2 ? 0 : 2;
}

static int list(void *device, int mps, unsigned *count, process *out) {
  int n = read_rows(), found = 0;
  for (int i = 0; i < n; i++)
    if (row[i].gpu + 1 == (int)(size_t)device && row[i].mps == mps) {
      if (out && found < (int)*count) out[found] = (process){row[i].pid, (unsigned long long)row[i].memory << 20, 0, 0};
      found++;
    }
  int code = found > (int)*count ? 7 : 0; /* NVML_ERROR_INSUFFICIENT_SIZE */
  *count = found;
  return code;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *out) {
  return list(device, 0, count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, process *out) {
  return list(device, 1, count, out);
}

int nvmlDeviceGetProcessUtilization(void *device, sample *out, unsigned *count, unsigned long long seen) {
  int n = read_rows(), found = 0;
  for (int i = 0; i < n; i++)
    if (row[i].gpu + 1 == (int)(size_t)device && row[i].time > seen) {
      if (out && found < (int)*count) out[found] = (sample){row[i].pid, row[i].time, row[i].sm, 0, 0, 0};
      found++;
    }
  if (!found) return 6; /* NVML_ERROR_NOT_FOUND */
  int code = found > (int)*count ? 7 : 0;
  *count = found;
  return code;
}
