/* words.h - the few words in which C11 and CUDA C++ (NVRTC, and the emulation of it on the CPU) differ, so that the rules
 * of a pass beside this file are stated once for all of them.  FN marks a function; all arithmetic is float64. */
#pragma once

#ifdef __cplusplus
#include "common.cuh" /* src_cuda: the types, FN, INF and TINY */
#ifndef FAR_FN
#define FAR_FN __device__ __noinline__ /* instructions that run once a pass wait for their fetch: they must be few */
#endif
#define OVER(x) inverse(x) /* 1 / x, x > 0: a division takes a hundred instructions */
#else
#include <float.h>
#include <math.h>
#include <stdint.h>
#define FN static inline
#define FAR_FN static inline
#define OVER(x) (1.0 / (x))
#define INF ((double)INFINITY)
#define TINY DBL_MIN /* a sum of K v or K^T u below it is dead */
#endif

typedef struct {
    double x, y, z;
} mapuot_three;

/* three exponentials at once: their instructions overlap */
FAR_FN mapuot_three exponentials(double x, double y, double z) {
    const mapuot_three out = {exp(x), exp(y), exp(z)};
    return out;
}
