// Mirrors src_c/finish_tmpl.c and the scalar work of src_c/solver.c: the O(n) half of a pass, one thread a column.
//
// With k = reg / rho, everything on logarithms; the numbers are the meetings of all blocks that lie between:
//   1 marginal    lam from A = mass and B = sum b e^(-k log v);  s = v K^T u, q = b e^(-k log v)
//     prox        gap = rho q h(log s/q), G(x) = log v' = fi log(b / K^T u);  all sums at once:
//                 F = G - x + c with c = fi mu not yet known, so that <F, .> = <G - x, .> + c <1, .>
//   2 difference  every block: mu, dual value, guard, status, Anderson's weights gamma
//     advance     x = G - sum gamma dG, put back into the domain of the dual, v = e^x, B of the new x
// Sources: Sejourne, Vialard, Peyre 2022 (translation); Walker, Ni 2011 (Anderson, type II).
#ifndef FINISH_PASS_CUH
#define FINISH_PASS_CUH
#include "prox.cuh"

enum {
    SUM_GAP,
    SUM_HARD,
    SUM_DUAL,
    SUM_NEXT,
    SUM_DEAD,
    SUM_ONES,
    SUM_F,
    SUM_P,
    SUM_PP,
    SUM_PF,
    SUM_DOT,
    SUM_RHS = SUM_DOT + MEMORY,
    MAX_F = SUM_RHS + MEMORY,
    MAX_MINUS,
    USED // of VALUES
};
#define STRIP 64    // columns whose values are summed at once
#define JOINERS 128 // threads that join the scalars of all blocks

// lam = (log A - log B) / (fi1 k1 + k2): u *= e^(fi1 lam), v *= e^-lam; the shift takes u's part.
struct Translation {
    double lam, off, kappa;
};

struct Finish {
    double value[USED * STRIP];
    double total[VALUES];
    double join[JOINERS / 32][SCALARS];
    double row[SCALARS];
    double next[16][2];
    Translation move;
    Progress p;
    Trace trace;
};

// One column as its thread holds it through a pass; what does not depend on the pass's sums is loaded before them.
struct Column {
    int j; // -1: this thread has none
    double absorbed, b, rho, log_b, k, fi;
    double x, v, image, last; // log v and v of the pass; the last image and residual
    double f, G;              // residual and image of the pass
    double d[MEMORY];         // dF, later dG
};

// Where a block keeps the vectors of the iteration: one copy for all, or its own.
__device__ __forceinline__ int64_t own_copy(const State &S) { return S.solo ? blockIdx.x * S.ld : 0; }

// Where the pass puts its column sums, and where this block leaves its scalars for it
__device__ __forceinline__ double *sums_of(const State &S, int turn) { return S.sums + turn % 3 * S.ld; }

__device__ __forceinline__ double *scalars_of(const State &S, int turn)
{
    return S.scalars + turn % 2 * (S.parts > BLOCKS ? S.parts : BLOCKS) * SCALARS;
}

// Columns a thread has to do
__device__ __forceinline__ int column_rounds(const State &S)
{
    return ((int)S.share + (int)blockDim.x - 1) / (int)blockDim.x;
}

// This thread's column of those of block `part`, in that round
__device__ __forceinline__ int column_of(const State &S, int part, int round)
{
    const int share = (int)S.share, at = threadIdx.x + round * blockDim.x;
    const int j = part * share + at;
    return part < S.parts && at < share && j < S.n ? j : -1;
}

// Threads of a block that hold columns, a multiple of 32
__device__ __forceinline__ int column_threads(const State &S)
{
    return S.share < blockDim.x ? (int)S.share : (int)blockDim.x;
}

__device__ __forceinline__ void load_differences(const State &S, const double *from, int depth, Column &c)
{
    const double *at = from + own_copy(S) * MEMORY + c.j;
#pragma unroll
    for (int i = 0; i < MEMORY; i++, at += S.n)
        c.d[i] = i < depth ? *at : 0;
}

__device__ __forceinline__ void load_column(const State &S, const Finish &F, int part, int round, Column &c)
{
    const int64_t own = own_copy(S);
    const int j = c.j = column_of(S, part, round), depth = F.p.have > 0 ? (int)F.p.depth : 0;
    c.absorbed = INF;
    c.b = c.f = c.G = c.x = 0;
    if (j < 0)
        return;
    c.absorbed = S.cols.absorbed[j];
    c.b = S.cols.weight[j];
    c.rho = S.cols.rho[j];
    c.log_b = S.cols.log_weight[j];
    c.k = S.cols.rate[j];
    c.fi = S.cols.fi[j];
    c.x = S.x_next[own + j];
    c.v = S.v_scale[own + j];
    c.image = S.image[own + j];
    c.last = S.residual[own + j];
    load_differences(S, S.dF, depth, c);
}

__device__ __forceinline__ void load_images(const State &S, const Finish &F, Column &c)
{
    if (c.j >= 0)
        load_differences(S, S.dG, F.p.have > 0 ? (int)F.p.depth : 0, c);
}

// Sum of the scalars of `count` blocks, in a fixed order; rows: the row scalars if they are not among them.
__device__ __forceinline__ void join_scalars(Finish &F, const double *scalars, int count, const double *rows)
{
    const int q = threadIdx.x % 8, lane = threadIdx.x % 32;
    if (threadIdx.x < JOINERS) {
        double sum = 0;
        const int first = threadIdx.x / 8;
        const double *at = scalars + SCALARS * first + (q < SCALARS ? q : 0);
#pragma unroll 1
        for (int k = first; k < count; k += 9 * JOINERS / 8, at += SCALARS * 9 * JOINERS / 8)
#pragma unroll
            for (int i = 0; i < 9; i++)
                sum += k + i * JOINERS / 8 < count ? __ldcg(at + i * SCALARS * JOINERS / 8) : 0;
        if (rows && q < NEXT_B)
            sum = threadIdx.x < 8 ? __ldcg(rows + q) : 0;
        sum += __shfl_xor_sync(FULL, sum, 8);
        sum += __shfl_xor_sync(FULL, sum, 16);
        if (lane < SCALARS)
            F.join[threadIdx.x / 32][lane] = sum;
    }
    __syncthreads();
    if (threadIdx.x < SCALARS)
        F.row[threadIdx.x] =
            (F.join[0][threadIdx.x] + F.join[1][threadIdx.x]) + (F.join[2][threadIdx.x] + F.join[3][threadIdx.x]);
}

// all but kappa, with the logarithm of `sum` beside
__device__ __forceinline__ Translation half_translation(const State &S, const Finish &F, double sum, double &log_sum)
{
    const double(*x)[SCALARS] = F.join;
    const double mass = (x[0][ROW_MASS] + x[1][ROW_MASS]) + (x[2][ROW_MASS] + x[3][ROW_MASS]);
    const double B = (x[0][NEXT_B] + x[1][NEXT_B]) + (x[2][NEXT_B] + x[3][NEXT_B]);
    const double2 logs = far_logs(mass * inverse(B), sum);
    const double lam = S.lam_rate > 0 ? S.lam_rate * logs.x : 0;
    log_sum = logs.y;
    return {lam, S.fi_rows * lam, 1};
}

__device__ __forceinline__ Translation translation(const State &S, const Finish &F)
{
    double unused;
    Translation t = half_translation(S, F, 1, unused);
    t.kappa = far_exp(t.off - t.lam);
    return t;
}

// One column: its certificate and its image, into out[SUM_GAP .. SUM_DEAD].
__device__ __forceinline__ void certify_column(const State &S, const Finish &F, Translation &t, double sum, Column &c,
                                               double *out)
{
    double log_sum;
    t = half_translation(S, F, sum, log_sum);
    const double shift = F.p.shift + t.off, e = c.absorbed, b = c.b, rho = c.rho;
    const int kind = KL_COLS ? (int)KL : (int)S.cols.kind;
    const double x = c.x - t.lam, log_s = log_sum - e + shift, image = c.fi * (c.log_b - log_s);
    const double3 values = far_exps(-c.k * x, -c.k * image, t.off - t.lam);
    const double s = c.v * sum * (t.kappa = values.z);
    double G = x;
    if (isfinite(e)) {
        if (kind <= BALANCED) {
            const bool hard = isinf(rho);
            const double q = b * values.x, d = x + log_s - c.log_b + c.k * x;
            G = image;
            out[SUM_GAP] = hard ? 0 : rho * (sum >= TINY ? kl_gap(q, s, d) : q);
            out[SUM_DUAL] = hard ? S.reg * b * x : rho * (b - q);
            out[SUM_HARD] = hard ? fabs(s - b) : 0;
            out[SUM_NEXT] = b * values.y;
        } else {
            const double upper = kind == RANGE ? S.cols.upper[c.j] : 0, g = S.reg * x;
            G = prox(kind, log_s, b, c.log_b, rho, upper, S.reg);
            out[SUM_GAP] = gap_term(kind, g, s, b, rho, upper);
            out[SUM_DUAL] = dual_term(kind, g, b, rho, upper);
            out[SUM_HARD] = violation(kind, s, b, rho, upper);
        }
        if (!(sum >= TINY)) { // dead in this pass: it keeps its x
            out[SUM_DEAD] = sum == sum;
            out[SUM_NEXT] = 0;
            G = x;
        }
        c.f = G - x;
    }
    c.G = G;
    c.x = x;
    if (S.solo && blockIdx.x > 0)
        return;
    S.x[c.j] = x;
    S.s[c.j] = isfinite(e) ? s : 0;
}

// Two sums, or two maxima (never NaN)
__device__ __forceinline__ double joined(int q, double x, double y)
{
    return q == MAX_F || q == MAX_MINUS ? (x > y ? x : y) : x + y;
}

// Sweep 1, one column: certificate, image, and what Anderson sums, into value.
__device__ __forceinline__ void column_values(const State &S, Finish &F, double sum, Column &c, double (&value)[USED])
{
    const bool in = c.j >= 0 && isfinite(c.absorbed), before = F.p.have > 0;
    Translation t;
    if (c.j >= 0)
        certify_column(S, F, t, sum, c, value);
    else if (threadIdx.x == 0) // a block without columns
        t = translation(S, F);
    if (threadIdx.x == 0)
        F.move = t;
    const double p = in && before ? c.f - c.last : 0, bp = c.b * p, bf = c.b * c.f;
    if (!in)
        return;
    value[SUM_ONES] = c.b;
    value[SUM_F] = bf;
    value[SUM_P] = bp;
    value[SUM_PP] = bp * p;
    value[SUM_PF] = bp * c.f;
#pragma unroll
    for (int i = 0; i < MEMORY; i++) {
        value[SUM_DOT + i] = c.d[i] * bp;
        value[SUM_RHS + i] = c.d[i] * bf;
    }
    value[MAX_F] = c.f;
    value[MAX_MINUS] = -c.f;
}

// Half a warp sums one value over the block's columns; its first thread returns `total` and them.  512 threads.
__device__ __forceinline__ double strip_values(const State &S, Finish &F, const double (&value)[USED], double total)
{
    const int q = threadIdx.x / 16, lane = threadIdx.x % 16;
    for (int first = 0; first < column_threads(S); first += STRIP) {
        const int at = (int)threadIdx.x - first;
        __syncthreads();
        if (at >= 0 && at < STRIP)
#pragma unroll
            for (int i = 0; i < USED; i++)
                F.value[i * STRIP + at] = value[i];
        __syncthreads();
        if (q < USED)
#pragma unroll
            for (int i = 0; i < STRIP; i += 16)
                total = joined(q, total, F.value[q * STRIP + i + lane]);
    }
    return total;
}

// Sweep 1, this thread's columns of those of the block; the block's sums go to `to`.
template <typename Next>
__device__ __forceinline__ void column_sweep(const State &S, Finish &F, int rounds, Column &c, double *to, Next next)
{
    const int q = threadIdx.x / 16;
    double total = q == MAX_F || q == MAX_MINUS ? -1e38 : 0;
    for (int round = 0; round < rounds; round++) {
        double value[USED] = {};
        value[MAX_F] = value[MAX_MINUS] = -1e38;
        const double sum = next(round);
        if ((int)threadIdx.x < column_threads(S))
            column_values(S, F, sum, c, value);
        if (rounds > 1 && c.j >= 0) {
            S.work[c.j] = c.f;
            S.work[S.n + c.j] = c.G;
        }
        total = strip_values(S, F, value, total);
    }
#pragma unroll
    for (int bit = 8; bit > 0; bit /= 2)
        total = joined(q, total, __shfl_xor_sync(FULL, total, bit));
    if (threadIdx.x % 16 == 0 && q < USED)
        to[q] = total;
}

// The partial values of all blocks, joined by every block in the same order; 512 threads.
__device__ __forceinline__ void finish_totals(const State &S, Finish &F)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = (int)S.parts;
    double total = lane == MAX_F || lane == MAX_MINUS ? -1e38 : 0;
#pragma unroll 1
    for (int first = warp; first < parts; first += 16 * 9)
#pragma unroll
        for (int i = 0; i < 9; i++) {
            const int q = first + 16 * i;
            if (q < parts)
                total = joined(lane, total, __ldcg(S.partial + q * VALUES + lane));
        }
    F.value[warp * (VALUES + 1) + lane] = total;
    __syncthreads();
    const int q = threadIdx.x / 16;
    double x = F.value[threadIdx.x % 16 * (VALUES + 1) + q];
#pragma unroll
    for (int bit = 8; bit > 0; bit /= 2)
        x = joined(q, x, __shfl_xor_sync(FULL, x, bit));
    if (threadIdx.x % 16 == 0)
        F.total[q] = x;
}

#include "finish_scalars.cuh"

// Sweep 2, one column: differences, the next x and v, and what the next pass needs of them.
__device__ __forceinline__ void advance_column(const State &S, const Progress &p, Column &c, double &B, double &scale)
{
    const int64_t own = own_copy(S), at = own + c.j, old = own * MEMORY + c.j;
    const int slot = (int)p.slot, depth = (int)p.depth;
    const double f = c.f + p.common, G = c.G + p.common;
    double x = c.image;
    if (!isfinite(c.absorbed))
        return;
    if (p.step < 2) {
        if (slot >= 0) {
            S.dF[old + slot * S.n] = f - c.last;
            S.dG[old + slot * S.n] = G - x;
        }
        double y = G;
#pragma unroll
        for (int i = 0; i < MEMORY; i++)
            if (i < depth && p.step > 0)
                y -= p.gamma[i] * (i == slot ? G - x : c.d[i]);
        S.residual[at] = f;
        S.image[at] = G;
        x = y;
    }
    if (!KL_COLS && S.cols.kind == TV) // |g| <= rho: beneath it the dual is -inf, above it flat
        x = clip(x, -c.rho * S.inv_reg, c.rho * S.inv_reg);
    const double y = x - c.absorbed + p.shift;
    const double2 values = far_exps(y < BOUND ? y : y == y ? BOUND : y, -S.rate_cols * x);
    const double v = values.x;
    if (S.ratio)
        S.ratio[c.j] = c.v > 0 ? v / c.v : 0;
    S.narrow_v[at] = (float)v;
    S.x_next[at] = x;
    S.v_scale[at] = v;
    B += c.b * values.y;
    scale += v;
}

// F.next holds the warps' sums of B and v.
__device__ __forceinline__ void next_sums(Finish &F, double B, double scale)
{
    double value[2] = {B, scale};
    const int lane = threadIdx.x % 32;
    const double total = warp_sums<2>(value, lane);
    if (lane % 16 == 0)
        F.next[threadIdx.x / 32][lane / 16] = total;
}

// The block's sums of B (first half of the first warp) and v (second half)
__device__ __forceinline__ double next_total(const State &S, const Finish &F)
{
    const int warp = threadIdx.x % 16;
    double total = warp < column_threads(S) / 32 ? F.next[warp][threadIdx.x / 16 % 2] : 0;
#pragma unroll
    for (int bit = 8; bit > 0; bit /= 2)
        total += __shfl_xor_sync(FULL, total, bit);
    return total;
}

// total = what the blocks left in the row half: K^T u, then the row scalars; to be summed over several devices.
extern "C" __global__ void __launch_bounds__(256) gather_sums(const __grid_constant__ State S, int blocks, int parity)
{
    const int turn = (int)S.progress[parity].turn;
    const int64_t j = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (j < S.n) {
        double sum = 0;
#if ORDERED
        for (int q = 0; q < blocks / CLUSTER; q++)
            sum += ((const num *)S.slab)[q * S.ld + j];
#else
        sum = ((const num *)sums_of(S, turn))[j];
#endif
        S.total[j] = sum;
    }
    if (blockIdx.x == 0) {
        __shared__ Finish F;
        join_scalars(F, scalars_of(S, turn), blocks, nullptr);
        if (threadIdx.x < NEXT_B)
            S.total[S.ld + threadIdx.x] = F.row[threadIdx.x];
    }
}
#endif
