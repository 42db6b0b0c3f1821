// Mirrors src_c/stream_tmpl.c: one read of M for whatever needs the plan or the cost but not K.
//
// The entry (i, j) is c_ij exp(alpha_i + beta_j - M_ij / reg), exponent in float64, made in tiles of 32 x 32 from M in
// any strides: the unit stride is read first, through shared memory where it runs down the rows.  Sums and maxima are
// along the rows; the caller swaps the strides for those along the columns.  out has gridDim.y slabs, one per part of
// the columns, joined by the caller.  Options: STORE (of K or P), COST (of M: 0 float64, 1 float32), REFERENCE (of c,
// alike), MASKED (1: c is multiplied by a mask).
#include "common.cuh"
#include "common/mask.h"

#if COST == 0
typedef double cost;
#else
typedef float cost;
#endif
#if REFERENCE == 0
typedef double share;
#else
typedef float share;
#endif
#ifndef MASKED
#define MASKED 0
#endif
#define SIDE 32
#define STEP 8 // threads are 32 x 8: each has SIDE / STEP rows of a tile

struct View {
    int64_t m, n;
    const cost *M;
    const share *c;
    int64_t M_row, M_col, c_row, c_col;
    const double *alpha, *beta;
    double inv_reg;
    mapuot_mask mask;
};

struct Tile {
    double x[SIDE][SIDE + 1];
};

// This thread's way through a matrix: entry k of its tile at column j0 is from[j0 col + k step].  turned: the unit
// stride runs down the rows, so that it is read along these and exchanged through shared memory.
template <typename T> struct Way {
    const T *from;
    int64_t col, step;
    bool turned;

    __device__ __forceinline__ Way(const T *A, int64_t row, int64_t col, int64_t i0) : from(A), col(col)
    {
        const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
        turned = col != 1 && row < col;
        from += turned ? (i0 + tx) * row + ty * col : (i0 + ty) * row + tx * col;
        step = STEP * (turned ? col : row);
    }
};

// value[k] = A[i0 + ty + STEP k, j0 + tx], `missing` outside
template <typename T>
__device__ __forceinline__ void read_tile(const View &V, const Way<T> &way, int64_t i0, int64_t j0, double missing,
                                          Tile &tile, double (&value)[SIDE / STEP])
{
    const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
    const T *at = way.from + j0 * way.col;
#pragma unroll
    for (int k = 0; k < SIDE / STEP; k++, at += way.step) {
        const int64_t i = i0 + (way.turned ? tx : ty + STEP * k), j = j0 + (way.turned ? ty + STEP * k : tx);
        value[k] = i < V.m && j < V.n ? (double)*at : missing;
    }
    if (!way.turned)
        return;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SIDE / STEP; k++)
        tile.x[ty + STEP * k][tx] = value[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < SIDE / STEP; k++)
        value[k] = tile.x[tx][ty + STEP * k];
}

// The rows i0 to i0 + SIDE of the exponents, tile by tile
struct Exponents {
    Way<cost> M;
    Way<share> c;
    double alpha[SIDE / STEP]; // of this thread's rows, -inf outside

    __device__ __forceinline__ Exponents(const View &V, int64_t i0)
        : M(V.M, V.M_row, V.M_col, i0), c(V.c, V.c_row, V.c_col, i0)
    {
#pragma unroll
        for (int k = 0; k < SIDE / STEP; k++) {
            const int64_t i = i0 + threadIdx.x / 32 + STEP * k;
            alpha[k] = i < V.m ? V.alpha[i] : -INF;
        }
    }

    // x = alpha_i + beta_j - M_ij / reg (-inf outside), M_ij and c_ij (1 without c) times the mask
    __device__ __forceinline__ void read(const View &V, int64_t i0, int64_t j0, Tile &tile, double (&x)[SIDE / STEP],
                                         double (&shares)[SIDE / STEP], double (&costs)[SIDE / STEP]) const
    {
        const int64_t j = j0 + threadIdx.x % 32;
        const double beta = j < V.n ? V.beta[j] : -INF;
        read_tile(V, M, i0, j0, INF, tile, costs);
#pragma unroll
        for (int k = 0; k < SIDE / STEP; k++)
            shares[k] = 1;
        if (V.c)
            read_tile(V, c, i0, j0, 0, tile, shares);
#if MASKED
#pragma unroll
        for (int k = 0; k < SIDE / STEP; k++)
            shares[k] *= mask_weight(&V.mask, i0 + threadIdx.x / 32 + STEP * k, j);
#endif
#pragma unroll
        for (int k = 0; k < SIDE / STEP; k++)
            x[k] = alpha[k] + beta - costs[k] * V.inv_reg;
    }
};

// c e^x, also where c is 0 and e^x beyond all numbers
__device__ __forceinline__ double weighed(double c, double x) { return c > 0 ? c * exp(x) : 0; }

// The column tiles of slab blockIdx.y
#define FOR_TILES(j0)                                                                                                  \
    const int64_t tiles = (V.n + SIDE - 1) / SIDE;                                                                     \
    for (int64_t j0 = tiles * blockIdx.y / gridDim.y * SIDE, end = tiles * (blockIdx.y + 1) / gridDim.y * SIDE;        \
         j0 < end; j0 += SIDE)

#define RESIDENT (MASKED ? 3 : 4) // blocks of a multiprocessor: a mask takes registers
// K (entries below `flush` are zero; columns n .. ld too) or, with flush = 0, the plan.
extern "C" __global__ void __launch_bounds__(256, RESIDENT)
    build_kernel(const __grid_constant__ View V, real *out, int64_t ld, double flush)
{
    __shared__ Tile tile;
    const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
    const int64_t i0 = (int64_t)blockIdx.x * SIDE, tiles = (ld + SIDE - 1) / SIDE;
    const Exponents rows(V, i0);
    real *to = out + (i0 + ty) * ld;
    for (int64_t t = tiles * blockIdx.y / gridDim.y; t < tiles * (blockIdx.y + 1) / gridDim.y; t++) {
        double x[SIDE / STEP], c[SIDE / STEP], M[SIDE / STEP];
        rows.read(V, i0, t * SIDE, tile, x, c, M);
        const int64_t j = t * SIDE + tx;
#pragma unroll
        for (int k = 0; k < SIDE / STEP; k++) {
            const double p = c[k] * exp(x[k]);
            if (i0 + ty + STEP * k < V.m && j < ld)
                to[STEP * k * ld + j] = stored(p >= flush ? p : 0);
        }
    }
}

// out_i = max_j log(entry)
extern "C" __global__ void __launch_bounds__(256) row_max(const __grid_constant__ View V, double *out)
{
    __shared__ Tile tile;
    const int ty = threadIdx.x / 32;
    const int64_t i0 = (int64_t)blockIdx.x * SIDE;
    const Exponents rows(V, i0);
    double top[SIDE / STEP];
#pragma unroll
    for (int k = 0; k < SIDE / STEP; k++)
        top[k] = -INF;
    FOR_TILES(j0)
    {
        double x[SIDE / STEP], c[SIDE / STEP], M[SIDE / STEP];
        rows.read(V, i0, j0, tile, x, c, M);
#pragma unroll
        for (int k = 0; k < SIDE / STEP; k++)
            top[k] = fmax(top[k], V.c || MASKED ? x[k] + log(c[k]) : x[k]);
    }
#pragma unroll
    for (int k = 0; k < SIDE / STEP; k++) {
        const double high = warp_max(top[k]);
        const int64_t i = i0 + ty + STEP * k;
        if (threadIdx.x % 32 == 0 && i < V.m)
            out[blockIdx.y * V.m + i] = high;
    }
}

// out_i = sum_j P_ij, cost_i = sum_j P_ij M_ij
extern "C" __global__ void __launch_bounds__(256)
    plan_sums(const __grid_constant__ View V, double *out, double *cost_out)
{
    __shared__ Tile tile;
    const int ty = threadIdx.x / 32;
    const int64_t i0 = (int64_t)blockIdx.x * SIDE;
    const Exponents rows(V, i0);
    double sum[SIDE / STEP] = {}, paid[SIDE / STEP] = {};
    FOR_TILES(j0)
    {
        double x[SIDE / STEP], c[SIDE / STEP], M[SIDE / STEP];
        rows.read(V, i0, j0, tile, x, c, M);
#pragma unroll
        for (int k = 0; k < SIDE / STEP; k++) {
            const double p = weighed(c[k], x[k]);
            sum[k] += p;
            paid[k] += p > 0 ? p * M[k] : 0;
        }
    }
#pragma unroll
    for (int k = 0; k < SIDE / STEP; k++) {
        const double s = warp_sum(sum[k]), w = warp_sum(paid[k]);
        const int64_t i = i0 + ty + STEP * k;
        if (threadIdx.x % 32 == 0 && i < V.m)
            out[blockIdx.y * V.m + i] = s, cost_out[blockIdx.y * V.m + i] = w;
    }
}

// out_i,x = sum_j P_ij X_jx for the COLUMNS columns of X from x0 on; X is n x d, out m x d
#define COLUMNS 4
extern "C" __global__ void __launch_bounds__(256)
    apply(const __grid_constant__ View V, const double *X, int64_t d, int64_t x0, double *out)
{
    __shared__ Tile tile;
    const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
    const int64_t i0 = (int64_t)blockIdx.x * SIDE;
    const Exponents rows(V, i0);
    double sum[SIDE / STEP][COLUMNS] = {};
    FOR_TILES(j0)
    {
        double x[SIDE / STEP], c[SIDE / STEP], M[SIDE / STEP];
        rows.read(V, i0, j0, tile, x, c, M);
        const int64_t j = j0 + tx;
#pragma unroll
        for (int q = 0; q < COLUMNS; q++) {
            const double y = j < V.n && x0 + q < d ? X[j * d + x0 + q] : 0;
#pragma unroll
            for (int k = 0; k < SIDE / STEP; k++) {
                if (q == 0)
                    x[k] = weighed(c[k], x[k]);
                sum[k][q] = fma(x[k], y, sum[k][q]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < SIDE / STEP; k++)
#pragma unroll
        for (int q = 0; q < COLUMNS; q++) {
            const double s = warp_sum(sum[k][q]);
            const int64_t i = i0 + ty + STEP * k;
            if (tx == 0 && i < V.m && x0 + q < d)
                out[(blockIdx.y * V.m + i) * d + x0 + q] = s;
        }
}

// out, 4 numbers a block: min and max over finite entries, number of NaN or -inf, number of +inf
extern "C" __global__ void __launch_bounds__(256) extrema(const __grid_constant__ View V, double *out)
{
    __shared__ Tile tile;
    __shared__ double part[8][4];
    const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
    const int64_t i0 = (int64_t)blockIdx.x * SIDE;
    const Way<cost> way(V.M, V.M_row, V.M_col, i0);
    double low = INF, high = -INF, bad = 0, infinite = 0;
    FOR_TILES(j0)
    {
        double M[SIDE / STEP];
        read_tile(V, way, i0, j0, 0, tile, M);
#pragma unroll
        for (int k = 0; k < SIDE / STEP; k++) {
            if (i0 + ty + STEP * k >= V.m || j0 + tx >= V.n)
                continue;
            bad += isnan(M[k]) || M[k] == -INF;
            infinite += M[k] == INF;
            if (isfinite(M[k]))
                low = fmin(low, M[k]), high = fmax(high, M[k]);
        }
    }
    low = -warp_max(-low), high = warp_max(high), bad = warp_sum(bad), infinite = warp_sum(infinite);
    if (tx == 0)
        part[ty][0] = low, part[ty][1] = high, part[ty][2] = bad, part[ty][3] = infinite;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int w = 1; w < 8; w++) {
        low = fmin(low, part[w][0]), high = fmax(high, part[w][1]);
        bad += part[w][2], infinite += part[w][3];
    }
    double *at = out + 4 * (blockIdx.y * (int64_t)gridDim.x + blockIdx.x);
    at[0] = low, at[1] = high, at[2] = bad, at[3] = infinite;
}
