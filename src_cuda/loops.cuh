// Loops of few steps, all of them written out, and loops that are not, since a pass waits for code that outgrows the
// instruction cache.
#ifndef LOOPS_CUH
#define LOOPS_CUH
#define UNROLLED(...) _Pragma("unroll") for (__VA_ARGS__)
#define ROLLED(...) _Pragma("unroll 1") for (__VA_ARGS__)
#endif
