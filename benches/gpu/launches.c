// Times calls of the driver through one function pointer or another: the loop is here, so that what
// is added to a call of two microseconds is seen.
#include <stdint.h>
#include <time.h>

typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void *, void **, void **);
typedef int (*Copy)(uint64_t, uint64_t, uint64_t, void *);
typedef int (*GraphLaunch)(void *, void *);

static uint64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

// Each returns the nanoseconds that `count` calls took, or 0 if one of them failed.

uint64_t time_launches(Launch launch, void *function, void *stream, int count) {
  int failed = 0;
  uint64_t start = now();
  for (int i = 0; i < count; i++)
    failed |= launch(function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
  uint64_t end = now();
  return failed ? 0 : end - start;
}

uint64_t time_copies(Copy copy, uint64_t to, uint64_t from, uint64_t size, void *stream,
                     int count) {
  int failed = 0;
  uint64_t start = now();
  for (int i = 0; i < count; i++)
    failed |= copy(to, from, size, stream);
  uint64_t end = now();
  return failed ? 0 : end - start;
}

uint64_t time_graphs(GraphLaunch launch, void *graph, void *stream, int count) {
  int failed = 0;
  uint64_t start = now();
  for (int i = 0; i < count; i++)
    failed |= launch(graph, stream);
  uint64_t end = now();
  return failed ? 0 : end - start;
}
