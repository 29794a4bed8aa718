/* A user of the CUDA driver in C: the ways by which programs come by its functions.
 *
 * Each case is run under krex. It fails with a message. That the interposer is there is seen from
 * the library in which an address lies.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int status;

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, dlerror()); \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

/* Whether an address lies in a library of this name. */
static int is_in(void *address, const char *name) {
  Dl_info info;
  CHECK(dladdr(address, &info));
  return strstr(info.dli_fname, name) != NULL;
}

#define WRAPPED(address) is_in((void *)(address), "libkrex_preload")

static void *driver(void) {
  void *handle = dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(handle);
  return handle;
}

/* Makes the primary context current, through a handle; returns some memory. */
static uint64_t begin(void *handle) {
  void *context;
  uint64_t memory;
  CHECK(((status(*)(unsigned))dlsym(handle, "cuInit"))(0) == 0);
  CHECK(((status(*)(void **, int))dlsym(handle, "cuDevicePrimaryCtxRetain"))(&context, 0) == 0);
  CHECK(((status(*)(void *))dlsym(handle, "cuCtxSetCurrent"))(context) == 0);
  CHECK(((status(*)(uint64_t *, size_t))dlsym(handle, "cuMemAlloc_v2"))(&memory, 4096) == 0);
  return memory;
}

typedef status (*memset_function)(uint64_t, unsigned char, size_t);

/* dlsym with a handle, also for a name that begins like the driver's. */
static void by_handle(void) {
  void *handle = driver();
  memset_function set = (memset_function)dlsym(handle, "cuMemsetD8_v2");
  CHECK(set && WRAPPED(set));
  CHECK(is_in(dlsym(handle, "cuInit"), "libcuda"));
  CHECK(set(begin(handle), 1, 16) == 0);
  CHECK(dlsym(handle, "cuMemsetD8_v9") == NULL && dlerror() != NULL);
  CHECK(dlsym(handle, "cudnnCreate") == NULL && strstr(dlerror(), "cudnnCreate"));
  CHECK(dlsym(handle, "cu") == NULL && dlsym(handle, "c") == NULL && dlsym(handle, "") == NULL);
}

/* dlsym without one, once the driver is there for all. */
static void by_default(void) {
  CHECK(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL));
  void *set = dlsym(RTLD_DEFAULT, "cuMemsetD8_v2");
  CHECK(set && WRAPPED(set));
  CHECK(((memset_function)set)(begin(RTLD_DEFAULT), 1, 16) == 0);
}

/* RTLD_NEXT counts from the caller: this program, not the interposer. */
static void by_next(void) {
  void *real = dlsym(RTLD_NEXT, "write");
  CHECK(real && is_in(real, "libc"));
  CHECK(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL));
  void *set = dlsym(RTLD_NEXT, "cuMemsetD8_v2");
  CHECK(set && WRAPPED(set));
}

/* Names that no table knows are the driver's own. */
static void unknown(void) {
  void *handle = driver();
  CHECK(is_in(dlsym(handle, "cuDeviceGetCount"), "libcuda"));
  CHECK(is_in(dlsym(RTLD_DEFAULT, "malloc"), "libc"));
  CHECK(is_in(dlsym(RTLD_NEXT, "malloc"), "libc"));
}

/* Without a driver nothing is there, and the message is the C library's. */
static void absent(void) {
  CHECK(dlsym(RTLD_DEFAULT, "cuMemsetD8_v2") == NULL);
  const char *message = dlerror();
  CHECK(message && strstr(message, "cuMemsetD8_v2"));
  CHECK(dlerror() == NULL);
}

/* The wrappers go on after the program has closed the library. */
static void reload(void) {
  void *handle = driver();
  memset_function set = (memset_function)dlsym(handle, "cuMemsetD8_v2");
  uint64_t memory = begin(handle);
  CHECK(dlclose(handle) == 0);
  CHECK(set(memory, 1, 16) == 0);
  handle = driver();
  CHECK((void *)set == dlsym(handle, "cuMemsetD8_v2"));
  CHECK(set(memory, 1, 16) == 0);
}

typedef status (*resolve_function)(const char *, void **, int, uint64_t, int *);

/* Versions and variants, by cuGetProcAddress alone. */
static void resolver(void) {
  void *handle = driver();
  resolve_function first = (resolve_function)dlsym(handle, "cuGetProcAddress_v2");
  CHECK(first && WRAPPED(first));
  uint64_t memory = begin(handle);
  resolve_function resolve;
  CHECK(first("cuGetProcAddress", (void **)&resolve, 12000, 0, NULL) == 0 && resolve == first);
  struct {
    const char *name;
    int version;
    uint64_t flags;
    const char *expected;
  } cases[] = {
      {"cuMemsetD8", 3020, 0, "cuMemsetD8_v2"},
      {"cuMemsetD8", 12000, 1, "cuMemsetD8_v2"},
      {"cuMemsetD8", 12000, 2, "cuMemsetD8_v2_ptds"},
      {"cuLaunchKernel", 12000, 2, "cuLaunchKernel_ptsz"},
      {"cuMemcpyBatchAsync", 12080, 0, "cuMemcpyBatchAsync"},
      {"cuMemcpyBatchAsync", 13000, 0, "cuMemcpyBatchAsync_v2"},
      {"cuGraphInstantiate", 12000, 0, "cuGraphInstantiateWithFlags"},
      {"cuGraphInstantiate", 11000, 0, "cuGraphInstantiate_v2"},
      {"cuStreamBeginCapture", 12000, 2, "cuStreamBeginCapture_v2_ptsz"},
      {"cuMemAlloc", 12000, 2, "cuMemAlloc_v2"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    void *found = NULL;
    CHECK(resolve(cases[i].name, &found, cases[i].version, cases[i].flags, NULL) == 0);
    CHECK(found == dlsym(handle, cases[i].expected) && WRAPPED(found));
  }
  void *found = NULL;
  CHECK(resolve("cuInit", &found, 2000, 0, NULL) == 0 && is_in(found, "libcuda"));
  /* One that is none is no error, and has no address. */
  CHECK(resolve("cuNoSuchThing", &found, 12000, 0, NULL) == 0 && found == NULL);
  CHECK(resolve("cuMemsetD8", &found, 12000, 0, NULL) == 0);
  CHECK(((memset_function)found)(memory, 1, 16) == 0);
  CHECK(resolve(NULL, &found, 12000, 0, NULL) != 0 && resolve("cuInit", NULL, 2000, 0, NULL) != 0);
}

int main(int count, char **words) {
  CHECK(count == 2);
  const struct {
    const char *name;
    void (*run)(void);
  } cases[] = {{"handle", by_handle}, {"default", by_default}, {"next", by_next},
               {"unknown", unknown},  {"absent", absent},      {"reload", reload},
               {"resolver", resolver}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    if (strcmp(cases[i].name, words[1]) == 0) {
      cases[i].run();
      printf("%s ok\n", words[1]);
      return 0;
    }
  }
  return 2;
}
