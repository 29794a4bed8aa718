// The CUDA runtime: static (the default), -cudart shared, or --default-stream per-thread.
#include <cstdio>
#include <cstdlib>

__global__ void twice(float *x) { x[threadIdx.x] *= 2; }

static void ok(cudaError_t result) {
  if (result != cudaSuccess) {
    fprintf(stderr, "%s\n", cudaGetErrorString(result));
    exit(1);
  }
}

int main() {
  float *x, h[256];
  int c;
  ok(cudaMalloc(&x, sizeof h));
  for (float &v : h)
    v = 1;
  // The first launch loads the code.
  twice<<<1, 256>>>(x);
  ok(cudaMemcpy(x, h, sizeof h, cudaMemcpyHostToDevice));
  ok(cudaDeviceSynchronize());
  puts("ready");
  fflush(stdout);
  while ((c = getchar()) != EOF && c != '\n')
    ;
  for (int i = 0; i < 5; i++)
    twice<<<1, 256>>>(x);
  ok(cudaMemcpy(h, x, sizeof h, cudaMemcpyDeviceToHost));
  ok(cudaDeviceSynchronize());
  if (h[17] != 32)
    return 1;
  puts("submitted 6");
  fflush(stdout);
  while (getchar() != EOF)
    ;
  return 0;
}
