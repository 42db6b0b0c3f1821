// Mirrors src_c/solver.c (mapuot_iterate) for devices without bulk copies, sm_70+, and for rows wider than a cluster.
//
// A pass is row_pass or plan_pass (K read once; rows of up to 512 CPT columns), or row_sums, join_rows and column_sums, or
// plan_rows and plan_columns (K read twice, any width), then finish_first, finish_join, finish_second: kernel
// boundaries are the meetings.  A kernel reads half `parity` of progress, and finish_join writes the other half; once
// the status is not MAPUOT_RUNNING, all pass by.  Option POINTS 1: the sums are of entries that are made (points.cuh), and
// kernels of float32 passes (POINTS_NARROW 1) and of float64 ones pass by where it is the other's turn.  SPARSE 1: K has
// stored pairs only (sparse.cuh).
#define PERSISTENT 0
#ifndef POINTS
#define POINTS 0
#endif
#ifndef MASKED
#define MASKED 0
#endif
#include "row_pass.cuh"
#include "finish_pass.cuh"

__device__ __forceinline__ bool stopped(const State &S, int parity)
{
#if POINTS
    if (POINTS_NARROW != (S.progress[parity].narrow > 0))
        return true;
#endif
    return S.progress[parity].status != MAPUOT_RUNNING;
}

// The parts of a sum, which lie one behind the other
__device__ __forceinline__ double slabs(const double *out, int64_t i, int64_t count, int parts)
{
    double total = 0;
    for (int p = 0; p < parts && i < count; p++)
        total += out[p * count + i];
    return total;
}
#if POINTS
#include "points.cuh"
#endif
#if SPARSE
#include "sparse.cuh"
#endif

// u = prox(s), a row a thread; narrow_u, where given: in float32 for sums in it
extern "C" __global__ void __launch_bounds__(256)
    join_rows(const __grid_constant__ State S, int parity, const double *out, int parts, float *narrow_u)
{
    if (stopped(S, parity) || S.m == 0)
        return;
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    RowSums row = {};
    const Progress &p = S.progress[parity];
    const double u =
        row_scale(S, (int)i, S.point[i < S.m ? i : S.m - 1], slabs(out, i, S.m, parts), p.shift, true, row);
    if (narrow_u && i < S.m)
        narrow_u[i] = (float)u;
#pragma unroll
    for (int q = 0; q < NEXT_B; q++) {
        const double sum = warp_sum(row[q]);
        if (threadIdx.x % 32 == 0)
            atomicAdd(scalars_of(S, (int)p.turn) + q, sum);
    }
}

// Sums over the block of R values: every lane gets the sum of row lane / LANES.
__device__ __forceinline__ double block_sums(double (&s)[R], double *part)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const double mine = warp_sums<R>(s, lane);
    if (lane % LANES == 0)
        part[(lane / LANES) * GW + warp] = mine;
    __syncthreads();
    double total = 0;
    for (int k = lane % LANES; k < GW; k += LANES)
        total += part[(lane / LANES) * GW + k];
#pragma unroll
    for (int bit = LANES / 2; bit > 0; bit /= 2)
        total += __shfl_xor_sync(FULL, total, bit);
    return total;
}

// The row scalars of the block, added to those of the other blocks
__device__ __forceinline__ void flush_rows(const State &S, const RowSums *row, int turn)
{
    __syncthreads();
    if (threadIdx.x >= NEXT_B)
        return;
    double total = 0;
    for (int q = 0; q < R; q++)
        total += row[q][threadIdx.x];
    atomicAdd(scalars_of(S, turn) + threadIdx.x, total);
}

#include "plan_pass.cuh"

// This thread's words of the rows from t R on, zeros beyond the edges of K
__device__ __forceinline__ void load_tile(const State &S, int64_t t, uint4 (&w)[R][VPT])
{
#pragma unroll
    for (int q = 0; q < R; q++) {
        const real *from = S.kernel + (t * R + q) * S.ld + threadIdx.x * CHUNK;
#pragma unroll
        for (int c = 0; c < VPT; c++) {
            const bool there = (c * GT + threadIdx.x) * CHUNK < (int)S.ld && t * R + q < S.m;
            w[q][c] = there ? __ldg((const uint4 *)(from + c * GT * CHUNK)) : make_uint4(0, 0, 0, 0);
        }
    }
}

// use(c, K_ij) for the entries of one row, c counting this thread's columns
template <typename Use> __device__ __forceinline__ void each_entry(const uint4 (&w)[VPT], Use use)
{
#pragma unroll
    for (int c = 0; c < VPT; c++) {
        double x[CHUNK];
        widen(w[c], x);
#pragma unroll
        for (int e = 0; e < CHUNK; e++)
            use(c * CHUNK + e, x[e]);
    }
}

// The fused pass: a tile is in registers for its row sums and for the column sums.
extern "C" __global__ void __launch_bounds__(GT) row_pass(const __grid_constant__ State S, int parity)
{
    __shared__ double part[2][R * GW];
    __shared__ RowSums row[R];
    if (stopped(S, parity))
        return;
    const int turn = (int)S.progress[parity].turn;
    for (int q = threadIdx.x; q < R * NEXT_B; q += GT)
        row[0][q] = 0;
    __syncthreads();
    const int64_t tiles = (S.m + R - 1) / R, end = tiles * (blockIdx.x + 1) / gridDim.x;
    const int lane = threadIdx.x % 32;
    double v[CPT], acc[CPT];
#pragma unroll
    for (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * GT + threadIdx.x) * CHUNK + c % CHUNK;
        v[c] = j < S.ld ? WIDEN * S.v_scale[j] : 0;
        acc[c] = 0;
    }
    for (int64_t t = tiles * blockIdx.x / gridDim.x, k = 0; t < end; t++, k++) {
        const int64_t i = t * R + lane / LANES;
        const Point point = S.point[i < S.m ? i : S.m - 1];
        uint4 w[R][VPT];
        double s[R];
        load_tile(S, t, w);
#pragma unroll
        for (int q = 0; q < R; q++) {
            s[q] = 0;
            each_entry(w[q], [&](int c, double k) { s[q] = fma(k, v[c], s[q]); });
        }
        const double total = block_sums(s, part[k & 1]);
        const bool mine = threadIdx.x < 32 && lane % LANES == 0;
        const double shift = S.progress[parity].shift;
        const double u = WIDEN * row_scale(S, i, point, total, shift, mine, row[lane / LANES]);
#pragma unroll
        for (int q = 0; q < R; q++) {
            const double uq = __shfl_sync(FULL, u, q * LANES);
            each_entry(w[q], [&](int c, double k) { acc[c] = fma(uq, k, acc[c]); });
        }
    }
#pragma unroll
    for (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * GT + threadIdx.x) * CHUNK + c % CHUNK;
        if (j < S.ld)
            atomicAdd(sums_of(S, turn) + j, acc[c]);
    }
    flush_rows(S, row, turn);
}

// Wide rows, first read: the part of s = K v that slab blockIdx.y of the columns makes, R rows a block at a time.
extern "C" __global__ void __launch_bounds__(GT) row_sums(const __grid_constant__ State S, int parity, double *out)
{
    __shared__ double part[2][R * GW];
    if (stopped(S, parity))
        return;
    const int64_t chunks = S.ld / CHUNK, first = chunks * blockIdx.y / gridDim.y;
    const int64_t end = chunks * (blockIdx.y + 1) / gridDim.y;
    const int lane = threadIdx.x % 32;
    int k = 0;
    for (int64_t t = blockIdx.x; t * R < S.m; t += gridDim.x, k ^= 1) {
        const real *row[R]; // those beyond m are the last one, whose sums nobody takes
        double s[R] = {};
#pragma unroll
        for (int q = 0; q < R; q++)
            row[q] = S.kernel + (t * R + q < S.m ? t * R + q : S.m - 1) * S.ld;
        for (int64_t j = (first + threadIdx.x) * CHUNK; j < end * CHUNK; j += GT * CHUNK) {
            uint4 w[R];
            double v[CHUNK];
#pragma unroll
            for (int q = 0; q < R; q++)
                w[q] = __ldg((const uint4 *)(row[q] + j));
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
                v[e] = WIDEN * S.v_scale[j + e];
#pragma unroll
            for (int q = 0; q < R; q++) {
                double x[CHUNK];
                widen(w[q], x);
#pragma unroll
                for (int e = 0; e < CHUNK; e++)
                    s[q] = fma(x[e], v[e], s[q]);
            }
        }
        const double total = block_sums(s, part[k]);
        const int64_t i = t * R + lane / LANES;
        if (threadIdx.x < 32 && lane % LANES == 0 && i < S.m)
            out[blockIdx.y * S.m + i] = total;
    }
}

// Wide rows, second read: sums += K^T u over the rows of slab blockIdx.y; a thread owns one chunk of columns.
extern "C" __global__ void __launch_bounds__(GT) column_sums(const __grid_constant__ State S, int parity)
{
    if (stopped(S, parity))
        return;
    const int turn = (int)S.progress[parity].turn;
    const int64_t j = ((int64_t)blockIdx.x * GT + threadIdx.x) * CHUNK;
    if (j >= S.ld)
        return;
    double acc[CHUNK] = {};
#pragma unroll 4
    for (int64_t i = S.m * blockIdx.y / gridDim.y; i < S.m * (blockIdx.y + 1) / gridDim.y; i++) {
        double x[CHUNK];
        const double u = WIDEN * S.u_scale[i];
        widen(__ldg((const uint4 *)(S.kernel + i * S.ld + j)), x);
#pragma unroll
        for (int e = 0; e < CHUNK; e++)
            acc[e] = fma(u, x[e], acc[e]);
    }
#pragma unroll
    for (int e = 0; e < CHUNK; e++)
        atomicAdd(sums_of(S, turn) + j + e, acc[e]);
}

// from: null, or S.total where the sums of several devices are
__device__ __forceinline__ void finish_open(const State &S, Finish &F, int parity, const double *from)
{
    copy_record(&F.p, S.progress + parity);
    __syncthreads();
    join_scalars(F, scalars_of(S, (int)F.p.turn), (int)S.parts, from ? from + S.ld : nullptr);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(512)
    finish_first(const __grid_constant__ State S, int parity, const double *from)
{
    __shared__ Finish F;
    Column c;
    if (stopped(S, parity))
        return;
    finish_open(S, F, parity, from);
    const int turn = (int)F.p.turn, rounds = column_rounds(S);
    const double *sums = from ? from : sums_of(S, turn);
    double mean;
    const double total = column_sweep(S, F, rounds, c, mean, [&](int round) {
        load_column(S, F, blockIdx.x, round, c);
        return c.j < 0 ? 0 : sums[c.j];
    });
    double *partial = S.partial + (int64_t)blockIdx.x * POSTS;
    if (threadIdx.x % TEAM == 0 && threadIdx.x / TEAM < USED)
        partial[threadIdx.x / TEAM] = total;
    if (COARSE && threadIdx.x % TEAM == 0)
        partial[VALUES + threadIdx.x / TEAM] = mean;
    if (rounds == 1 && c.j >= 0) {
        S.work[c.j] = c.f;
        S.work[S.n + c.j] = c.G;
    }
    if (blockIdx.x == 0 && threadIdx.x < SCALARS)
        scalars_of(S, turn + 1)[threadIdx.x] = 0;
}

extern "C" __global__ void __launch_bounds__(512)
    finish_join(const __grid_constant__ State S, int parity, const double *from)
{
    __shared__ Finish F;
    if (stopped(S, parity)) {
        copy_record(S.progress + 1 - parity, S.progress + parity);
        return;
    }
    finish_open(S, F, parity, from);
    if (threadIdx.x == 0)
        F.move = whole_translation(S, F);
    const bool corrected = COARSE && F.p.coarse > 0;
    if (corrected && threadIdx.x < CLUSTERS)
        F.last_mean[threadIdx.x] = S.coarse.mean[threadIdx.x];
    finish_totals(S, F, S.partial);
    finish_scalars(S, F);
    verdict(S, F, true);
    __syncthreads();
    if (corrected && threadIdx.x < CLUSTERS) {
        S.coarse.mean[threadIdx.x] = F.last_mean[threadIdx.x];
        S.coarse.step[threadIdx.x] = F.correction[threadIdx.x];
    }
    copy_record(S.progress + 1 - parity, &F.p);
}

extern "C" __global__ void __launch_bounds__(512) finish_second(const __grid_constant__ State S, int parity)
{
    __shared__ Finish F;
    Column c;
    double B = 0, scale = 0;
    if (stopped(S, parity))
        return;
    const int turn = (int)S.progress[parity].turn;
    copy_record(&F.p, S.progress + 1 - parity);
    __syncthreads();
    if (COARSE && F.p.coarse > 0 && threadIdx.x < CLUSTERS)
        F.correction[threadIdx.x] = S.coarse.step[threadIdx.x];
    __syncthreads();
    for (int round = 0; round < column_rounds(S); round++) {
        load_column(S, F, blockIdx.x, round, c);
        load_images(S, F, c);
        if (c.j >= 0) {
            c.f = S.work[c.j];
            c.G = S.work[S.n + c.j];
            sums_of(S, turn + 2)[c.j] = 0;
        }
        const double step = held_step(F, c);
        if (F.p.step < 3 && c.j >= 0 && isfinite(c.absorbed))
            advance_column(S, F, c, step, B, scale);
    }
    if ((int)threadIdx.x < column_threads(S))
        next_sums(F, B, scale);
    __syncthreads();
    if (threadIdx.x < 32) { // joined in a fixed order: ranks must find the same bits
        const double total = next_total(S, F);
        if (threadIdx.x % 16 == 0)
            scalars_of(S, turn + 1)[blockIdx.x * SCALARS + NEXT_B + threadIdx.x / 16] = total;
    }
}
