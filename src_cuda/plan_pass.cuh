// Mirrors src_c/kernels_tmpl.c (plan_pass): the pass of arXiv 2412.11079 in place, with the scalings carried.
//
// The buffer is the plan, read once and written once a pass: P_ij *= v_j / (the v_j it holds), s_i = sum_j P_ij over
// the u_i it holds, u = prox(s), P_ij *= u_i / (the u_i it holds).  The column sums of P are divided by v, so that
// finish_pass finds K^T u as after row_pass.  In plan_pass a block covers a row: up to 512 CPT columns.  plan_rows and
// plan_columns take any width, as the two kernels of the paper: P is read twice.
#ifndef PLAN_PASS_CUH
#define PLAN_PASS_CUH
#include "row_pass.cuh"

__device__ __forceinline__ void unpack(const uint4 &w, double (&p)[CHUNK])
{
    const real *x = (const real *)&w;
#pragma unroll
    for (int e = 0; e < CHUNK; e++)
        p[e] = x[e];
}

__device__ __forceinline__ uint4 pack(const double (&p)[CHUNK])
{
    uint4 w;
    real *x = (real *)&w;
#pragma unroll
    for (int e = 0; e < CHUNK; e++)
        x[e] = (real)p[e];
    return w;
}

// One row: scaled by the columns' ratio, its sum, then by its own; acc gathers the columns of the new plan.
__device__ __forceinline__ void plan_row(const State &S, int i, double shift, double (*part)[GW], double *row,
                                         const double (&ratio)[CPT], double (&acc)[CPT])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4 *P = (uint4 *)(S.kernel + i * S.ld) + threadIdx.x;
    const double old = S.u_scale[i];
    uint4 w[VPT];
    double s = 0;
#pragma unroll
    for (int c = 0; c < VPT; c++) {
        double p[CHUNK];
        w[c] = (c * GT + threadIdx.x) * CHUNK < (int)S.ld ? P[c * GT] : make_uint4(0, 0, 0, 0);
        unpack(w[c], p);
#pragma unroll
        for (int e = 0; e < CHUNK; e++)
            s = fma(p[e], ratio[c * CHUNK + e], s);
    }
    s = warp_sum(s);
    if (lane == 0)
        part[i & 1][warp] = s;
    __syncthreads();
    s = warp_sum(lane < GW ? part[i & 1][lane] : 0) / (old > 0 ? old : 1);
    const double u = row_scale(S, i, S.point[i], s, shift, threadIdx.x == 0, row);
    const double factor = old > 0 ? u / old : 0;
#pragma unroll
    for (int c = 0; c < VPT; c++) {
        double p[CHUNK];
        unpack(w[c], p);
#pragma unroll
        for (int e = 0; e < CHUNK; e++) {
            p[e] *= ratio[c * CHUNK + e] * factor;
            acc[c * CHUNK + e] += p[e];
        }
        if ((c * GT + threadIdx.x) * CHUNK < (int)S.ld)
            P[c * GT] = pack(p);
    }
}

extern "C" __global__ void __launch_bounds__(GT) plan_pass(const __grid_constant__ State S, int parity)
{
    __shared__ double part[2][GW];
    __shared__ RowSums row[R];
    const int turn = (int)S.progress[parity].turn;
    if (S.progress[parity].status != MAPUOT_RUNNING)
        return;
    for (int q = threadIdx.x; q < R * NEXT_B; q += GT)
        row[0][q] = 0;
    __syncthreads();
    double ratio[CPT], acc[CPT];
#pragma unroll
    for (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * GT + threadIdx.x) * CHUNK + c % CHUNK;
        ratio[c] = j < S.ld ? S.ratio[j] : 0;
        acc[c] = 0;
    }
    const double shift = S.progress[parity].shift;
    for (int i = (int)(S.m * blockIdx.x / gridDim.x); i < S.m * (blockIdx.x + 1) / gridDim.x; i++)
        plan_row(S, i, shift, part, row[0], ratio, acc);
#pragma unroll
    for (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * GT + threadIdx.x) * CHUNK + c % CHUNK;
        if (j < S.ld && S.v_scale[j] > 0)
            atomicAdd(sums_of(S, turn) + j, acc[c] / S.v_scale[j]);
    }
    flush_rows(S, row, turn);
}

// First kernel: row sums, u, and u over the u that the plan holds (the second half of u_scale); R rows a block at a time.
extern "C" __global__ void __launch_bounds__(GT) plan_rows(const __grid_constant__ State S, int parity)
{
    __shared__ double part[2][R * GW];
    __shared__ RowSums row[R];
    if (stopped(S, parity))
        return;
    const int turn = (int)S.progress[parity].turn, lane = threadIdx.x % 32;
    const double shift = S.progress[parity].shift;
    for (int q = threadIdx.x; q < R * NEXT_B; q += GT)
        row[0][q] = 0;
    __syncthreads();
    int k = 0;
    for (int64_t t = blockIdx.x; t * R < S.m; t += gridDim.x, k ^= 1) {
        const int64_t i = t * R + lane / LANES, at = i < S.m ? i : S.m - 1;
        const double old = S.u_scale[at];
        double s[R] = {};
        for (int64_t j = threadIdx.x * CHUNK; j < S.ld; j += GT * CHUNK)
#pragma unroll
            for (int q = 0; q < R; q++) {
                double p[CHUNK];
                if (t * R + q >= S.m)
                    continue;
                unpack(__ldg((const uint4 *)(S.kernel + (t * R + q) * S.ld + j)), p);
#pragma unroll
                for (int e = 0; e < CHUNK; e++)
                    s[q] = fma(p[e], S.ratio[j + e], s[q]);
            }
        const double total = block_sums(s, part[k]) / (old > 0 ? old : 1);
        const bool mine = threadIdx.x < 32 && lane % LANES == 0;
        const double u = row_scale(S, (int)i, S.point[at], total, shift, mine, row[lane / LANES]);
        if (mine && i < S.m)
            S.u_scale[S.m + i] = old > 0 ? u / old : 0;
    }
    flush_rows(S, row, turn);
}

// Second kernel: the new plan and its column sums over the rows of slab blockIdx.y; a thread owns one chunk of columns.
extern "C" __global__ void __launch_bounds__(GT) plan_columns(const __grid_constant__ State S, int parity)
{
    const int64_t j = ((int64_t)blockIdx.x * GT + threadIdx.x) * CHUNK;
    if (stopped(S, parity) || j >= S.ld)
        return;
    const double *factor = S.u_scale + S.m;
    const int64_t end = S.m * (blockIdx.y + 1) / gridDim.y;
    double ratio[CHUNK], acc[CHUNK] = {};
#pragma unroll
    for (int e = 0; e < CHUNK; e++)
        ratio[e] = S.ratio[j + e];
    for (int64_t i = S.m * blockIdx.y / gridDim.y; i < end; i += R) {
        uint4 w[R];
#pragma unroll
        for (int q = 0; q < R; q++)
            w[q] = i + q < end ? *(const uint4 *)(S.kernel + (i + q) * S.ld + j) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int q = 0; q < R; q++) {
            double p[CHUNK];
            if (i + q >= end)
                break;
            unpack(w[q], p);
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
                acc[e] += p[e] *= ratio[e] * factor[i + q];
            *(uint4 *)(S.kernel + (i + q) * S.ld + j) = pack(p);
        }
    }
    const int turn = (int)S.progress[parity].turn;
#pragma unroll
    for (int e = 0; e < CHUNK; e++)
        if (S.v_scale[j + e] > 0)
            atomicAdd(sums_of(S, turn) + j + e, acc[e] / S.v_scale[j + e]);
}
#endif
