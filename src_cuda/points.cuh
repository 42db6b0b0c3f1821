// Mirrors src_c/narrow_points.h and src_c/points.h: the sums of a pass over costs between points, made and never stored.
//
//     s_i = sum_j K_ij w_j,   K_ij = 2^(to_i + from_j - c_ij)  (POINTS_NARROW 1, float32)  or  exp(to_i + from_j - c_ij / reg)
//
// of the rows with w = v, then of the columns with w = u: two evaluations a pass, in sums of their own order, where one
// that serves both would have to hold 220 KB of a strip of rows in flight on every multiprocessor.  A thread has RT of the
// points that get sums; those summed over come 8 at a time, the same for all threads, by loads of 16 bytes.  Float32 sums
// run over 64 points, beyond them in float64.  out has gridDim.y slabs, one a part of the points summed over.
// KEPT 1: pairs are skipped, a warp's points lie in one box of `unit`, and it sums over the runs of that box.
// Options: POINTS 1, POINTS_NARROW, KEPT, FORM (a mapuot_narrow_form; not narrow: a mapuot_metric), DIM (d up to 4, 0 beyond),
// MASKED (1: entries are multiplied by a mask, whose rows are the points that get sums).
#ifndef POINTS_CUH
#define POINTS_CUH
#include "common/mask.h"

#ifndef KEPT
#define KEPT 0
#endif
#if POINTS_NARROW
typedef float coord;
#define RT 4
#else
typedef double coord;
#define RT 2
#endif
#define FROM 8  // points summed over at a time
#define SHORT 8 // times as many are summed in coord before they go to float64
#if MASKED
#define SHARE(q, e) (coord) mask_weight(&mask, at[q], b *FROM + (e))
#else
#define SHARE(q, e) 1
#endif
#define HALF_PI_SQUARED 2.4674011002723395

__device__ __forceinline__ float power_of(float t)
{
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    return e;
}

__device__ __forceinline__ double power_of(double t) { return exp(t); }

// 8 numbers that all threads of the block read alike
__device__ __forceinline__ void take(const coord *from, coord (&to)[FROM])
{
    const uint4 *at = (const uint4 *)from;
#pragma unroll
    for (int q = 0; q < FROM * (int)sizeof(coord) / 16; q++) {
        const uint4 w = __ldg(at + q);
#if POINTS_NARROW
        to[4 * q] = __uint_as_float(w.x), to[4 * q + 1] = __uint_as_float(w.y);
        to[4 * q + 2] = __uint_as_float(w.z), to[4 * q + 3] = __uint_as_float(w.w);
#else
        to[2 * q] = __hiloint2double(w.y, w.x), to[2 * q + 1] = __hiloint2double(w.w, w.z);
#endif
    }
}

// what one coordinate adds
__device__ __forceinline__ coord grown(coord sum, coord x, coord y)
{
    const coord t = x - y;
#if POINTS_NARROW
    return FORM == 1 ? fmaf(x, y, sum) : FORM == 3 ? sum + fabsf(t) : fmaf(t, t, sum);
#else
    return FORM == 2 ? sum + fabs(t) : fma(t, t, sum);
#endif
}

// the exponent, from the sum over the coordinates
__device__ __forceinline__ coord exponent_of(coord known, coord sum, coord factor)
{
#if POINTS_NARROW
    (void)factor;
    return FORM == 1 ? known + sum : known - (FORM == 2 ? sqrtf(sum) : sum);
#else
    if (FORM == 3)
        return sum < HALF_PI_SQUARED ? known + 2 * factor * log(cos(sqrt(sum))) : -INF;
    return known - factor * (FORM == 1 ? sqrt(sum) : sum);
#endif
}

extern "C" __global__ void __launch_bounds__(256, MASKED ? 1 : 2)
    point_sums(const __grid_constant__ State S, int parity, const coord *to, int64_t to_ld, const coord *to_log,
               const coord *from, const coord *from_log, const double *weight, double *out, int64_t count,
               int64_t others, int64_t d, double factor, const int64_t *first, const int *run, int64_t unit,
               const __grid_constant__ mapuot_mask mask)
{
    if (stopped(S, parity))
        return;
    const int64_t own_warp = (int64_t)blockIdx.x * 256 * RT + threadIdx.x / 32 * 32 * RT,
                  i0 = own_warp + threadIdx.x % 32;
    const int64_t blocks = (others + FROM - 1) / FROM;
    coord own[RT], x[RT][DIM + 1];
    double total[RT];
    int64_t at[RT];
#pragma unroll
    for (int q = 0; q < RT; q++) {
        at[q] = i0 + q * 32 < count ? i0 + q * 32 : count - 1;
        own[q] = to_log[at[q]];
        total[q] = 0;
#pragma unroll
        for (int k = 0; k < DIM; k++)
            x[q][k] = to[k * to_ld + at[q]];
    }
#if KEPT
    const int64_t box = (own_warp < count ? own_warp : count - 1) / unit;
    for (int64_t k = first[box] + blockIdx.y; k < first[box + 1]; k += gridDim.y) {
        int b = run[2 * k] / FROM;
        const int end = run[2 * k + 1] / FROM < blocks ? run[2 * k + 1] / FROM : (int)blocks;
#else
    {
        int64_t b = blocks * blockIdx.y / gridDim.y;
        const int64_t end = blocks * (blockIdx.y + 1) / gridDim.y;
#endif
        while (b < end) {
            coord acc[RT] = {};
            for (const int64_t stop = b + SHORT < end ? b + SHORT : end; b < stop; b++) {
                coord sum[RT][FROM] = {}, y[FROM], w[FROM];
#pragma unroll
                for (int k = 0; k < DIM; k++) {
                    take(from + (b * d + k) * FROM, y);
#pragma unroll
                    for (int q = 0; q < RT; q++)
#pragma unroll
                        for (int e = 0; e < FROM; e++)
                            sum[q][e] = grown(sum[q][e], x[q][k], y[e]);
                }
                for (int64_t k = DIM; k < d; k++) {
                    take(from + (b * d + k) * FROM, y);
#pragma unroll
                    for (int q = 0; q < RT; q++) {
                        const coord xk = to[k * to_ld + at[q]];
#pragma unroll
                        for (int e = 0; e < FROM; e++)
                            sum[q][e] = grown(sum[q][e], xk, y[e]);
                    }
                }
                take(from_log + b * FROM, y);
#pragma unroll
                for (int e = 0; e < FROM; e++)
                    w[e] = b * FROM + e < others ? (coord)__ldg(weight + b * FROM + e) : 0;
#pragma unroll
                for (int q = 0; q < RT; q++)
#pragma unroll
                    for (int e = 0; e < FROM; e++)
                        acc[q] += w[e] * power_of(exponent_of(own[q] + y[e], sum[q][e], (coord)factor)) * SHARE(q, e);
            }
#pragma unroll
            for (int q = 0; q < RT; q++)
                total[q] += acc[q];
        }
    }
#pragma unroll
    for (int q = 0; q < RT; q++)
        if (i0 + q * 32 < count)
            out[blockIdx.y * count + i0 + q * 32] = total[q];
}

// K^T u, a column a thread
extern "C" __global__ void __launch_bounds__(256)
    point_columns(const __grid_constant__ State S, int parity, const double *out, int parts)
{
    const int64_t j = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (!stopped(S, parity) && j < S.n)
        sums_of(S, (int)S.progress[parity].turn)[j] = slabs(out, j, S.n, parts);
}
#endif
