// Mirrors src_c/solver.c (mapuot_iterate) for devices without bulk copies, sm_70+, and for rows wider than a cluster.
//
// The row half of a pass is row_pass (K read once; rows of up to 512 CPT columns), or row_sums, join_rows and
// column_sums (K read twice, any width); finish.cu has the other.  A kernel reads half `parity` of progress, and finish
// writes the other half. Once the status is not MAPUOT_RUNNING, all kernels return at once.
// Options: POINTS 1: the sums are over computed entries (points.cuh); kernels of float32 passes (POINTS_NARROW
// 1) and of float64 passes return at once if it is the other's turn. SPARSE 1: K has stored pairs only (sparse.cuh).
// IN_PLACE 1: the buffer is the plan (arXiv 2412.11079), read and written in a pass: P_ij *= v_j / (the v_j it holds),
// s_i = sum_j P_ij over the u_i it holds, u = prox(s), P_ij *= u_i / (the u_i it holds); its column sums over v are K^T
// u.
#define PERSISTENT 0
#pragma option MASKED 0
#include "row_pass.cuh"
#include "finish_pass.cuh"
#include "stopped.cuh"

// Add up the parts of a sum, which lie one behind the other
FN double slabs(const double *out, int64_t i, int64_t count, int parts) {
    double total = 0;
    for (int p = 0; p < parts && i < count; p++) total += out[p * count + i];
    return total;
}
#if POINTS
#include "points.cuh"
#endif
#if SPARSE
#include "sparse.cuh"
#endif

// The factor of a column's entries: v or, IN_PLACE, v over the v that the plan holds
FN double column_factor(const State &S, int64_t j) { return IN_PLACE ? S.ratio[j] : WIDEN * S.v_scale[j]; }

// The factor of row i's entries: u = prox(s) or, IN_PLACE, u over the u that the plan holds, `held`;
// sum: over the row, of the entries times their columns' factors
FN double row_factor(const State &S, int i, Point point, double sum, double held, double shift, bool mine,
                     double *row) {
    if (S.limits.symmetric) return WIDEN * same_scale(S, i, sum, mine, row);
    if (!IN_PLACE) return WIDEN * row_scale(S, i, point, sum, shift, mine, row);
    const double u = row_scale(S, i, point, sum / (held > 0 ? held : 1), shift, mine, row);
    return held > 0 ? u / held : 0;
}

// acc: the sum over some rows of a column, of K u or of the new plan
FN void add_sum(const State &S, int turn, int64_t j, double acc) {
    if (!IN_PLACE) atomicAdd(sums_of(S, turn) + j, acc);
    else if (S.v_scale[j] > 0) atomicAdd(sums_of(S, turn) + j, acc / S.v_scale[j]);
}

// acc_j += u P_ij, and, IN_PLACE, store these entries
FN void rescale(double (&p)[CHUNK], const double *factor, double u, double *acc, real *to) {
    uint4 word;
    UNROLLED (int e = 0; e < CHUNK; e++) {
        acc[e] += p[e] *= factor[e] * u;
        ((real *)&word)[e] = (real)p[e];
    }
    *(uint4 *)to = word;
}

// u = prox(s), a row a thread, from the parts of its sum; narrow_u, if given: u in float32 for float32 sums; ratio, if
// given: of float64 sums to float32 ones
extern "C" __global__ void __launch_bounds__(256)
    join_rows(const __grid_constant__ State S, int parity, const double *out, int parts, float *narrow_u,
              const double *ratio) {
    if (stopped(S, parity) || S.m == 0) return;
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, at = i < S.m ? i : S.m - 1;
    RowSums row = {};
    const Progress &p = S.progress[parity];
    const double held = IN_PLACE ? S.u_scale[at] : 1;
    const double s = slabs(out, i, S.m, parts) * (ratio ? ratio[at] : 1);
    const double u = row_factor(S, (int)i, S.point[at], s, held, p.shift, true, row);
    if (narrow_u && i < S.m) narrow_u[i] = (float)u;
    if (IN_PLACE && i < S.m) S.u_scale[S.m + i] = u;
    UNROLLED (int q = 0; q < NEXT_B; q++) {
        const double sum = warp_sum(row[q]);
        if (threadIdx.x % 32 == 0) atomicAdd(scalars_of(S, (int)p.turn) + q, sum);
    }
}

// Sums over the block of R values: every lane gets the sum of row lane / LANES.
FN double block_sums(double (&s)[R], double *part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const double mine = warp_sums<R>(s, lane);
    if (lane % LANES == 0) part[(lane / LANES) * GW + warp] = mine;
    __syncthreads();
    double total = 0;
    for (int k = lane % LANES; k < GW; k += LANES) total += part[(lane / LANES) * GW + k];
    return warp_sum<LANES>(total);
}

// The pass in one read: a tile is in registers for its row sums and for the column sums.
extern "C" __global__ void __launch_bounds__(GT) row_pass(const __grid_constant__ State S, int parity) {
    __shared__ double part[2][R * GW];
    __shared__ RowSums row[R];
    if (stopped(S, parity)) return;
    const int turn = (int)S.progress[parity].turn;
    for (int q = threadIdx.x; q < R * NEXT_B; q += GT) row[0][q] = 0;
    __syncthreads();
    const int64_t tiles = (S.m + R - 1) / R, end = tiles * (blockIdx.x + 1) / gridDim.x;
    const int lane = threadIdx.x % 32;
    double v[CPT], acc[CPT];
    UNROLLED (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * GT + threadIdx.x) * CHUNK + c % CHUNK;
        v[c] = j < S.ld ? column_factor(S, j) : 0;
        acc[c] = 0;
    }
    for (int64_t t = tiles * blockIdx.x / gridDim.x, k = 0; t < end; t++, k++) {
        const int64_t i = t * R + lane / LANES, at = i < S.m ? i : S.m - 1;
        const int rows = R == 1 || S.m - t * R >= R ? R : (int)(S.m - t * R);
        real *from = S.kernel + (int64_t)((int)t * R) * S.ld;
        const Point point = S.point[at];
        const double held = IN_PLACE ? S.u_scale[at] : 1;
        Entries tile;
        double s[R];
        tile.open((const unsigned char *)from, (int)S.ld, threadIdx.x, rows);
        tile_dots(tile, threadIdx.x, v, s);
        const double total = block_sums(s, part[k & 1]);
        const bool mine = threadIdx.x < 32 && lane % LANES == 0;
        const double u = row_factor(S, (int)i, point, total, held, S.progress[parity].shift, mine, row[lane / LANES]);
#if IN_PLACE
        UNROLLED (int q = 0; q < R; q++) {
            const double uq = __shfl_sync(FULL, u, q * LANES);
            UNROLLED (int c = 0; c < VPT; c++) {
                double p[CHUNK];
                tile.get(threadIdx.x, q, c, p);
                if (q < rows && tile.has(threadIdx.x, c))
                    rescale(p, v + c * CHUNK, uq, acc + c * CHUNK, from + q * S.ld + (c * GT + threadIdx.x) * CHUNK);
            }
        }
#else
        add_tile(tile, threadIdx.x, u, acc);
#endif
    }
    UNROLLED (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * GT + threadIdx.x) * CHUNK + c % CHUNK;
        if (j < S.ld) add_sum(S, turn, j, acc[c]);
    }
    __syncthreads();
    if (threadIdx.x >= NEXT_B) return;
    double total = 0;
    for (int q = 0; q < R; q++) total += row[q][threadIdx.x];
    atomicAdd(scalars_of(S, turn) + threadIdx.x, total);
}

// Wide rows, first read: the part of their sums from slab blockIdx.y of the columns, R rows a block at a time.
extern "C" __global__ void __launch_bounds__(GT) row_sums(const __grid_constant__ State S, int parity, double *out) {
    __shared__ double part[2][R * GW];
    if (stopped(S, parity)) return;
    const int64_t chunks = S.ld / CHUNK, first = chunks * blockIdx.y / gridDim.y;
    const int64_t end = chunks * (blockIdx.y + 1) / gridDim.y;
    const int lane = threadIdx.x % 32;
    int k = 0;
    for (int64_t t = blockIdx.x; t * R < S.m; t += gridDim.x, k ^= 1) {
        const real *row[R]; // beyond m the last row is repeated; its sums are not used
        double s[R] = {};
        UNROLLED (int q = 0; q < R; q++) row[q] = S.kernel + (t * R + q < S.m ? t * R + q : S.m - 1) * S.ld;
        for (int64_t j = (first + threadIdx.x) * CHUNK; j < end * CHUNK; j += GT * CHUNK) {
            uint4 w[R];
            double v[CHUNK];
            UNROLLED (int q = 0; q < R; q++) w[q] = __ldg((const uint4 *)(row[q] + j));
            UNROLLED (int e = 0; e < CHUNK; e++) v[e] = column_factor(S, j + e);
            UNROLLED (int q = 0; q < R; q++) {
                double x[CHUNK];
                widen(w[q], x);
                UNROLLED (int e = 0; e < CHUNK; e++) s[q] = fma(x[e], v[e], s[q]);
            }
        }
        const double total = block_sums(s, part[k]);
        const int64_t i = t * R + lane / LANES;
        if (threadIdx.x < 32 && lane % LANES == 0 && i < S.m) out[blockIdx.y * S.m + i] = total;
    }
}

// Wide rows, second read: the column sums over the rows of slab blockIdx.y, R rows at a time; a thread owns one chunk
// of columns.
extern "C" __global__ void __launch_bounds__(GT) column_sums(const __grid_constant__ State S, int parity) {
    const int64_t j = ((int64_t)blockIdx.x * GT + threadIdx.x) * CHUNK;
    if (stopped(S, parity) || j >= S.ld) return;
    const double *factor = S.u_scale + IN_PLACE * S.m;
    const int64_t end = S.m * (blockIdx.y + 1) / gridDim.y;
    double acc[CHUNK] = {};
    double v[CHUNK]; // factors for a plan in place
    UNROLLED (int e = 0; IN_PLACE && e < CHUNK; e++) v[e] = column_factor(S, j + e);
    for (int64_t i = S.m * blockIdx.y / gridDim.y; i < end; i += R) {
        uint4 w[R];
        UNROLLED (int q = 0; q < R; q++) w[q] = *(const uint4 *)(S.kernel + (i + q < end ? i + q : end - 1) * S.ld + j);
        UNROLLED (int q = 0; q < R; q++) {
            double x[CHUNK];
            if (i + q >= end) break;
            widen(w[q], x);
            const double u = WIDEN * factor[i + q];
            if (IN_PLACE) rescale(x, v, factor[i + q], acc, S.kernel + (i + q) * S.ld + j);
            UNROLLED (int e = 0; !IN_PLACE && e < CHUNK; e++) acc[e] = fma(u, x[e], acc[e]);
        }
    }
    const int turn = (int)S.progress[parity].turn;
    UNROLLED (int e = 0; e < CHUNK; e++) add_sum(S, turn, j + e, acc[e]);
}
