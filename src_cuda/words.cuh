// The macros of the kernels: FN marks an inlined function. An UNROLLED loop has few steps, all written
// out. A loop is ROLLED if its code would outgrow the instruction cache. "#pragma option" gives an
// option its value if the launch gives none (mapuot/backends/cuda/kernels.py).
#define FN __device__ __forceinline__
#define UNROLLED(...) _Pragma("unroll") for (__VA_ARGS__)
#define ROLLED(...) _Pragma("unroll 1") for (__VA_ARGS__)
