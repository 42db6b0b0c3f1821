// Mirrors src_c/finish_tmpl.c for one problem of a batch, up to the first sweep over its columns: one block, KL or
// balanced sides with one rho each.  The words and formulas are those of finish_pass.cuh.
//
// A problem's columns are COLUMN_KINDS vectors of ld numbers, thread j of the first HOLDERS warps has column j,
// j + 32 HOLDERS, ..; these warps do the scalar work each for itself, on the same numbers, so that it costs no meeting
// of the block.
// Loops over columns are not unrolled: a pass whose code outgrows the instruction cache waits for its code.
// Options: THREADS, COST (of M: 0 float64, 1 float32).
#ifndef BATCH_CUH
#define BATCH_CUH
#include "prox.cuh"

#if COST == 0
typedef double cost;
#else
typedef float cost;
#endif
#define DEPTH 5 // most Anderson differences
#define WARPS (THREADS / 32)
#define HOLDERS (WARPS < 4 ? WARPS : 4) // warps that may have columns: the first ones
#define LOG2E 1.4426950408889634
#define LN2 0.6931471805599453
#define SCALE_LIMIT 1e100 // a scale beyond it: K is rebuilt
#define DEAD_SUM 1e-290   // a sum below it: no mass is in reach

enum {
    WEIGHT,   // b, 0: left out
    LOG_B,    // log b; 0 where left out
    ABSORBED, // e
    X,        // log v of the pass
    Q,        // b e^(-k x)
    IMAGE,    // last G(x)
    LAST,     // last G(x) - x
    NEW_G,    // G(x) and G(x) - x of the pass, before its translation
    NEW_F,
    MARGINAL,
    DF,
    DG = DF + DEPTH,
    COLUMN_KINDS = DG + DEPTH
};
// what the first sweep sums; LOSS: gap, balanced |s - b|_1; WORTH: sum b e^(-k G), balanced sum b x
enum { LOSS, WORTH, SUM_F, SUM_P, SUM_PP, SUM_PF, SUM_DOT, SUM_RHS = SUM_DOT + DEPTH, SUMS = SUM_RHS + DEPTH };

struct Report {
    double gap, error, dual, mass, passes, status;
};

// A batch; every member is 8 bytes wide, as in the numpy record BATCH of backends/cuda/batch.py.
struct Batch {
    int64_t m, n;
    const cost *M;
    int64_t M_problem, M_row, M_col; // strides in entries, M_problem = 0: one cost
    const double *A, *B;             // p x m, p x n
    double *x;                       // p x n: log v to start from; batch_narrow moves it on
    double *log_u, *r, *log_v, *s;   // p x m, p x m, p x n, p x n: the certified iterate
    Report *report;                  // p
    double *columns, *row_absorbed;  // of problems larger than a block: p x COLUMN_KINDS x n, p x m
    double *v, *u, *row_sums, *sums; // p x n, p x m; K v, p x m; K^T u, p x n
    double *row_scalar;              // p
    struct Standing *standing;       // p
    int64_t product, memory, count;  // reference a b^T or ones; Anderson differences; passes of each problem at most
    double reg, inv_reg, k1, k2;     // k = reg / rho, 0: balanced
    double fi1, fi2, rho1, rho2;     // fi = 1 / (1 + k); rho 0: balanced
    double lam_rate, mu_rate, tol, tol_gap, narrow_floor;
    double low, safe;            // smallest M / reg; safe 1: K needs no absorbed potentials at the start
    double rounding, unresolved; // of the exponents of the plan; times it the plan error that no gap resolves
};

// How far the iteration is; a copy for each warp.
struct Standing {
    double shift, best_dual, best_error, progress_dual, since_best, since_build, passes;
    double depth, head, have, extrapolated;
    double mass_a, mass_b, weight; // weight: sum b e^(-k x), between launches
    double gram[DEPTH * DEPTH], ones[DEPTH];
};

struct Work {
    double row[WARPS], next[WARPS]; // parts of the row scalar, sum r or sum a (log u - shift), and of sum b e^(-k x)
    double part[HOLDERS][SUMS];
    Standing standing[HOLDERS];
    Report report;
};

// The translation of a pass: log u += off, log v -= lam, the plan times kappa, q times grow
struct Move {
    double lam, off, kappa, log_kappa, grow, mass, weight;
};

__device__ __forceinline__ int column_warps(int n) { return n < 32 * HOLDERS ? (n + 31) / 32 : HOLDERS; }

__device__ __forceinline__ double total(const double *parts, int count)
{
    double sum = 0;
#pragma unroll 1
    for (int w = 0; w < count; w++)
        sum += parts[w];
    return sum;
}

// What each warp found, to every thread; scratch: WARPS numbers.
__device__ __forceinline__ void meet(double x, double *scratch)
{
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
}

// The sum of x over the block, for every thread.
__device__ __forceinline__ double block_sum(double x, double *scratch)
{
    meet(warp_sum(x), scratch);
    return total(scratch, WARPS);
}

__device__ __forceinline__ double block_max(double x, double *scratch)
{
    meet(warp_max(x), scratch);
    double top = -INF;
    for (int w = 0; w < WARPS; w++)
        top = fmax(top, scratch[w]);
    return top;
}

// Weights and log v of problem `problem`; all threads.  The standing of every warp is that before the first pass.
__device__ __forceinline__ void open_columns(const Batch &S, Work &W, int64_t problem, double *col, int ld)
{
    const int lane = threadIdx.x % 32;
    double a = 0, b = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < (int)S.m; i += THREADS)
        a += S.A[problem * S.m + i];
#pragma unroll 1
    for (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        const double w = S.B[problem * S.n + j];
        col[WEIGHT * ld + j] = w;
        col[LOG_B * ld + j] = w > 0 ? log(w) : 0;
        col[X * ld + j] = w > 0 ? S.x[problem * S.n + j] : 0;
        b += w;
    }
    a = block_sum(a, W.row);
    b = block_sum(b, W.row);
    const int warp = threadIdx.x / 32;
    Standing &p = W.standing[warp < HOLDERS ? warp : 0];
    for (int q = lane; warp < HOLDERS && q < (int)(sizeof(Standing) / 8); q += 32)
        ((double *)&p)[q] = 0;
    __syncwarp();
    if (lane == 0 && warp < HOLDERS) {
        p.best_dual = p.progress_dual = -INF;
        p.best_error = INF;
        p.passes = S.report[problem].passes;
        p.mass_a = a;
        p.mass_b = b;
    }
    __syncthreads();
}

// v relative to K of a column, q = b e^(-k x); true where v leaves the range of this K.
__device__ __forceinline__ bool scale_column(const Batch &S, double *col, int ld, double *v, int j, double x,
                                             double shift)
{
    const double w = col[WEIGHT * ld + j];
    const double scale = w > 0 ? exp(x - col[ABSORBED * ld + j] + shift) : 0;
    col[X * ld + j] = x;
    col[Q * ld + j] = S.k2 > 0 ? w * exp(-S.k2 * x) : w;
    v[j] = scale;
    return !(scale < SCALE_LIMIT);
}

__device__ __forceinline__ void join_next(Work &W, double sum)
{
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        W.next[threadIdx.x / 32] = sum;
}

// The shift that makes the largest v 1, then v and q of every column; all threads, after K was made.
__device__ __forceinline__ void start_columns(const Batch &S, Work &W, double *col, int ld, double *v)
{
    double top = -INF, sum = 0;
#pragma unroll 1
    for (int j = threadIdx.x; j < (int)S.n; j += THREADS)
        if (col[WEIGHT * ld + j] > 0)
            top = fmax(top, col[X * ld + j] - col[ABSORBED * ld + j]);
    top = block_max(top, W.next);
    __syncthreads();
#pragma unroll 1
    for (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        scale_column(S, col, ld, v, j, col[X * ld + j], -top);
        sum += col[Q * ld + j];
    }
    join_next(W, sum);
    if (threadIdx.x % 32 == 0 && threadIdx.x < 32 * HOLDERS) {
        W.standing[threadIdx.x / 32].shift = -top;
        W.standing[threadIdx.x / 32].since_build = 0;
    }
    __syncthreads();
}

// u of a row relative to K, log u = fi (log a - log s) - (1 - fi) (d + shift); a = 0: left out.  `odd`: K does not do.
__device__ __forceinline__ double row_scale(const Batch &S, double a, double log_a, double d, double s, double shift,
                                            double &log_u, bool &odd)
{
    if (!(a > 0))
        return 0;
    odd |= !(s > DEAD_SUM);
    log_u = S.fi1 * (log_a - log(s)) - (1 - S.fi1) * (d + shift);
    const double u = exp(log_u);
    odd |= !(u < SCALE_LIMIT);
    return u;
}

__device__ __forceinline__ Move translation(const Batch &S, const Work &W)
{
    const int warps = column_warps((int)S.n);
    const double fi = S.fi1;
    Move move;
    move.mass = S.k1 > 0 ? total(W.row, WARPS) : W.standing[0].mass_a;
    move.weight = total(W.next, warps);
    move.lam = S.lam_rate > 0 ? S.lam_rate * (log(move.mass) - log(move.weight)) : 0;
    move.off = fi * move.lam;
    move.log_kappa = (fi - 1) * move.lam;
    move.kappa = S.lam_rate > 0 ? exp(move.log_kappa) : 1;
    move.grow = S.lam_rate > 0 && S.k2 > 0 ? exp(S.k2 * move.lam) : 1;
    return move;
}

// Sweep 1: marginal, gap, G(x) and what Anderson needs; true where a column is dead.  sum_of(j): K^T u of column j.
template <typename Sum>
__device__ __forceinline__ bool first_sweep(const Batch &S, Work &W, double *col, int ld, const double *v,
                                            const Move &move, Sum sum_of)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Standing &p = W.standing[warp];
    const double fi = S.fi2, shift = p.shift + move.off;
    const int depth = p.have > 0 ? (int)p.depth : 0;
    bool odd = false;
    double value[SUMS];
#pragma unroll
    for (int q = 0; q < SUMS; q++)
        value[q] = 0;
#pragma unroll 1
    for (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        const double sum = sum_of(j);
        const double w = col[WEIGHT * ld + j];
        if (!(w > 0))
            continue;
        odd |= !(sum > DEAD_SUM);
        const double log_s = log(sum), e = col[ABSORBED * ld + j], x = col[X * ld + j] - move.lam;
        const double log_b = col[LOG_B * ld + j], s = v[j] * sum * move.kappa;
        const double G = fi * (log_b - log_s + e - shift), f = G - x, P = f - col[LAST * ld + j];
        if (S.k2 > 0) { // t = log(s / q)
            const double q = col[Q * ld + j] * move.grow;
            const double t = (x - e + shift) + log_s - (log_b - S.k2 * x);
            value[LOSS] += kl_gap(q, s, t);
            value[WORTH] += w * exp(-S.k2 * G);
        } else {
            value[LOSS] += fabs(s - w);
            value[WORTH] += w * x;
        }
        col[NEW_G * ld + j] = G;
        col[NEW_F * ld + j] = f;
        col[MARGINAL * ld + j] = s;
        const double wf = w * f, wP = w * P;
        value[SUM_F] += wf;
        value[SUM_P] += wP;
        value[SUM_PP] += wP * P;
        value[SUM_PF] += wP * f;
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (i < depth) {
                const double d = col[(DF + i) * ld + j];
                value[SUM_DOT + i] += wP * d;
                value[SUM_RHS + i] += wf * d;
            }
    }
    const double sum = warp_sums<SUMS>(value, lane);
    if (lane % (32 / SUMS) == 0)
        W.part[warp][lane / (32 / SUMS)] = sum;
    return odd;
}
#endif
