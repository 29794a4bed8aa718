/* A driver that does next to nothing, as libcuda.so.1, for what no well-behaved one does: it calls
 * its own exported functions, blocks where a thread can be cancelled, and is jumped out of.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef int status;
typedef void *handle;

/* How often each was reached. */
int outer_calls, inner_calls;
/* Where to jump back to. */
static jmp_buf *jump;

status cuInit(unsigned flags) { return flags != 0; }
status cuCtxGetCurrent(handle *context) { *context = (handle)0x1000; return 0; }
status cuCtxSetCurrent(handle context) { (void)context; return 0; }
status cuCtxGetDevice(int *device) { *device = 0; return 0; }
status cuCtxSynchronize(void) { return 0; }
status cuDeviceGetName(char *name, int size, int device) {
  (void)device;
  strncpy(name, "fake", size);
  return 0;
}
status cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  memset(uuid, 0xfa + device, 16);
  return 0;
}
status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  (void)device;
  *flags = 0;
  *active = 1;
  return 0;
}
status cuDevicePrimaryCtxRetain(handle *context, int device) {
  (void)device;
  *context = (handle)0x1000;
  return 0;
}
status cuEventCreate(handle *event, unsigned flags) { (void)flags; *event = (handle)0x2000; return 0; }
status cuEventDestroy_v2(handle event) { (void)event; return 0; }
status cuEventQuery(handle event) { (void)event; return 0; }
status cuEventRecord(handle event, handle stream) { (void)event; (void)stream; return 0; }
status cuEventRecord_ptsz(handle event, handle stream) { (void)event; (void)stream; return 0; }
status cuStreamQuery(handle stream) { (void)stream; return 0; }
status cuStreamGetCtx(handle stream, handle *context) { (void)stream; *context = (handle)0x1000; return 0; }
status cuStreamGetFlags(handle stream, unsigned *flags) { (void)stream; *flags = 1; return 0; }
status cuStreamIsCapturing(handle stream, int *state) { (void)stream; *state = 0; return 0; }
status cuStreamIsCapturing_ptsz(handle stream, int *state) { (void)stream; *state = 0; return 0; }
status cuThreadExchangeStreamCaptureMode(int *mode) { *mode = 0; return 0; }

status cuMemsetD32_v2(uint64_t memory, unsigned value, size_t count) {
  (void)memory; (void)value; (void)count;
  inner_calls++;
  return 0;
}

/* By the name that it exports, so that the interposer's is called. */
status cuMemsetD8_v2(uint64_t memory, unsigned char value, size_t count) {
  outer_calls++;
  return cuMemsetD32_v2(memory, value, count / 4);
}

status cuMemsetD16_v2(uint64_t memory, unsigned short value, size_t count) {
  (void)memory; (void)value; (void)count;
  outer_calls++;
  return 0;
}

/* The same function by a name that nobody can put another in the place of. */
extern __typeof__(cuMemsetD16_v2) own_memset
    __attribute__((alias("cuMemsetD16_v2"), visibility("hidden")));

/* One that is not exported at all. */
static status own_copy(uint64_t to, uint64_t from, size_t count, handle stream) {
  (void)to; (void)from; (void)count; (void)stream;
  outer_calls++;
  return 0;
}

status cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                           int *found) {
  (void)version; (void)flags; (void)found;
  *function = NULL;
  if (!strcmp(symbol, "cuMemsetD16")) *function = (void *)own_memset;
  if (!strcmp(symbol, "cuMemcpyDtoDAsync")) *function = (void *)own_copy;
  if (!strcmp(symbol, "cuLaunchSomethingNew")) *function = (void *)own_copy;
  return 0;
}

status cuMemcpyDtoH_v2(void *to, uint64_t from, size_t count) {
  (void)to; (void)from; (void)count;
  for (;;) pause();
}

status cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t count) {
  (void)to; (void)from; (void)count;
  if (jump) longjmp(*jump, 1);
  return 0;
}

/* What tests call: jumps out of the driver, through whatever lies around its function. */
int jump_out(void) {
  jmp_buf here;
  jump = &here;
  if (setjmp(here)) {
    jump = NULL;
    return 1;
  }
  return cuMemcpyHtoD_v2(0, NULL, 0);
}

static void *copy_for_ever(void *unused) {
  char to[16];
  cuMemcpyDtoH_v2(to, 0, sizeof to);
  return unused;
}

/* Cancels a thread that is inside of the driver. */
int cancel_one(void) {
  pthread_t thread;
  void *result;
  if (pthread_create(&thread, NULL, copy_for_ever, NULL)) return 0;
  usleep(100000);
  return pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 &&
         result == PTHREAD_CANCELED;
}
