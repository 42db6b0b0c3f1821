// The words of the kernels: FN marks a function, which is inlined; a loop of few steps is UNROLLED, all of them written
// out, and one is ROLLED where code that outgrows the instruction cache would be waited for.  "#pragma option" gives an
// option the value that it has where the launch gives none (mapuot/backends/cuda/kernels.py).
#define FN __device__ __forceinline__
#define UNROLLED(...) _Pragma("unroll") for (__VA_ARGS__)
#define ROLLED(...) _Pragma("unroll 1") for (__VA_ARGS__)
