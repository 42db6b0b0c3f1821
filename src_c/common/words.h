/* words.h - the few definitions that differ between C11 and CUDA C++ (NVRTC, and its emulation on the CPU), so that the
 * rules of a pass have one text. FN marks a function. All arithmetic is float64. */
#pragma once

#ifdef __cplusplus
#include "common.cuh" /* src_cuda/common.cuh defines the types, FN, INF and TINY */
#ifndef FAR_FN
#define FAR_FN __device__ __noinline__ /* code that runs once a pass waits for its instructions: keep it small */
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
