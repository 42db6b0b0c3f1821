// One problem of a batch, up to the first sweep over its columns: one block, KL or balanced sides with one rho each.
// The words and formulas are as in finish_pass.cuh; common/{column,rules}.h decide for a column and for a pass.
//
// A problem's columns are COLUMN_KINDS vectors of ld numbers, thread j of the first HOLDERS warps has column j,
// j + 32 HOLDERS, .. Each of these warps does the scalar work for itself on the same numbers, so that no meeting
// of the block is needed.
// Loops over columns are not unrolled: code that outgrows the instruction cache slows every pass.
// Options: THREADS, COST (type of M: 0 float64, 1 float32), ONE_POTENTIAL (1: rows and columns are the same problem,
// log u is log v, and K v is K^T u, without a shift between them).
#ifndef ANDERSON_DEPTH
#define ANDERSON_DEPTH 12 // differences of float64 passes: as many as fit 64 KB of shared memory
#endif
#pragma option ONE_POTENTIAL 0
#define FAR_FN FN // inlined: a call would spill the registers of the sweep
#include "anderson.cuh"
#include "common/column.h"

#define WARPS (THREADS / 32)
#ifndef HOLDERS
#define HOLDERS (WARPS < 4 ? WARPS : 4) // the first warps, which may have columns
#endif
#define OWN_PRODUCTS ((ANDERSON_DEPTH + WARPS - 1) / WARPS) // differences of a warp
#define DEAD_SUM 1e-290                                     // with a smaller sum no mass is in reach

enum {
    WEIGHT,   // b, 0: left out
    LOG_B,    // log b; 0 where left out
    ABSORBED, // e
    X,        // log v + shift of the pass
    Q,        // b e^(-k x)
    IMAGE,    // last G(x)
    LAST,     // last G(x) - x
    NEW_G,    // G(x) and G(x) - x of the pass, before its translation
    NEW_F,
    MARGINAL,
    DF,
    DG = DF + ANDERSON_DEPTH,
    COLUMN_KINDS = DG + ANDERSON_DEPTH
};
// sums of the first sweep; LOSS: gap, balanced |s - b|_1; WORTH: sum b e^(-k G), balanced the dual terms; LOGS: sizes
// of the absorbed part of log v and of the rest, times b
enum { LOSS, WORTH, SUM_F, SUM_P, SUM_PP, SUM_PF, LOGS, SUMS = 8 };

struct Report : mapuot_stats {
    double passes;
};

// A batch; every member is 8 bytes wide: mapuot/backends/records.py reads the record from this text.
struct Batch {
    int64_t m, n;
    const cost *M;
    int64_t M_problem, M_row, M_col; // strides in entries, M_problem = 0: one cost
    const double *A, *B;             // p x m, p x n
    double *x;                       // p x n: log v at the start; batch_narrow overwrites it
    double *log_u, *r, *log_v, *s;   // p x m, p x m, p x n, p x n: the certified iterate
    Report *report;                  // p
    double *columns, *row_absorbed;  // of problems larger than a block: p x COLUMN_KINDS x n, p x m
    double *v, *u, *row_sums, *sums; // p x n, p x m; K v, p x m; K^T u, p x n
    double *row_scalar;              // p
    struct Standing *standing;       // p
    mapuot_limits limits;            // dual_scale and dual_constant are each problem's own
    int64_t product, count;          // reference a b^T or ones; passes of each problem at most
    double k1, fi2;                  // k = reg / rho of the rows, 0: balanced; fi = 1 / (1 + k) of the columns
    double low, safe;                // smallest M / reg; safe 1: K needs no absorbed potentials at the start
    double rounding;                 // relative rounding of a potential / reg
    // of batch_made.cu:
    const float *M_narrow;             // p x m x n: M less its smallest entry
    const double *points_x, *points_y; // points of all problems, one point after another
    const int64_t *places, *order;     // p x 4: first row, rows, first column, columns; the problems' order
    const double *factors;             // p: of the costs between points; null: 1
    int64_t dim, narrow, coarse; // coordinates of a point; 1: float32 passes come first; 1: passes only give a start
    double scale, ratio;         // scale of the metric; ratio of this reg to the requested one, which comes next
};

// The progress of the iteration; each warp has a copy.
struct Standing : mapuot_progress {
    double mass_a, mass_b, weight; // weight: sum b e^(-k x), between launches
    double gram[ANDERSON_DEPTH * ANDERSON_DEPTH], ones[ANDERSON_DEPTH], gamma[ANDERSON_DEPTH];
};

struct Work {
    double row[WARPS], next[WARPS]; // row: parts of sum r or sum a (log u - shift); next: of sum b e^(-k x)
    double part[HOLDERS][SUMS];     // parts of each warp
    double sums[HOLDERS][SUMS];     // totals, one copy for each warp
    double dot[ANDERSON_DEPTH],
        rhs[ANDERSON_DEPTH]; // products of the held differences with the change of f, and with f
    Standing standing[HOLDERS];
    Report report;
};

// The translation of a pass, as in finish_pass.cuh; grow: factor from b e^(-k x) to b e^(-k log v); mass, weight:
// before the translation
struct Move {
    double lam, off, kappa, grow, mass, weight;
};

FN int column_warps(int n) { return n < 32 * HOLDERS ? (n + 31) / 32 : HOLDERS; }

FN double total(const double *parts, int count) {
    double sum = 0;
    ROLLED (int w = 0; w < count; w++) sum += parts[w];
    return sum;
}

// Share one number of each warp with every thread; scratch: WARPS numbers.
FN void meet(double x, double *scratch) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
}

// The sum of x over the block, for every thread.
FN double block_sum(double x, double *scratch) {
    meet(warp_sum(x), scratch);
    return total(scratch, WARPS);
}

FN double block_max(double x, double *scratch) {
    meet(warp_max(x), scratch);
    double top = -INF;
    for (int w = 0; w < WARPS; w++) top = fmax(top, scratch[w]);
    return top;
}

// Load weights and log v of problem `problem`, and set each warp's standing before the first pass; all threads.
FN void open_columns(const Batch &S, Work &W, int64_t problem, double *col, int ld) {
    const int lane = threadIdx.x % 32;
    double a = 0, b = 0;
    ROLLED (int i = threadIdx.x; i < (int)S.m; i += THREADS) a += S.A[problem * S.m + i];
    ROLLED (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
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
    for (int q = lane; warp < HOLDERS && q < (int)(sizeof(Standing) / 8); q += 32) ((double *)&p)[q] = 0;
    __syncwarp();
    if (lane == 0 && warp < HOLDERS) {
        p.best_dual = p.progress_dual = -INF;
        p.best_error = INF;
        p.passes = (int64_t)S.report[problem].passes;
        p.mass_a = a;
        p.mass_b = b;
    }
    __syncthreads();
}

// Compute v relative to K of a column and add b e^(-k x). Returns true if v leaves the range of this K.
FN bool scale_column(const Batch &S, double *col, int ld, double *v, int j, double x, double &weight) {
    const double w = col[WEIGHT * ld + j];
    const double scale = w > 0 ? exp(x - col[ABSORBED * ld + j]) : 0;
    col[X * ld + j] = x;
    weight += col[Q * ld + j] = S.limits.rate_cols > 0 ? w * exp(-S.limits.rate_cols * x) : w;
    v[j] = scale;
    return !(scale < S.limits.scale_limit);
}

FN void join_next(Work &W, double sum) {
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) W.next[threadIdx.x / 32] = sum;
}

// The shift that makes the largest v 1, then v and q of every column; all threads, after K was made.
FN void start_columns(const Batch &S, Work &W, double *col, int ld, double *v) {
    double top = -INF, sum = 0;
    ROLLED (int j = threadIdx.x; j < (int)S.n; j += THREADS)
        if (col[WEIGHT * ld + j] > 0) top = fmax(top, col[X * ld + j] - col[ABSORBED * ld + j]);
    top = ONE_POTENTIAL ? 0 : block_max(top, W.next);
    __syncthreads();
    ROLLED (int j = threadIdx.x; j < (int)S.n; j += THREADS) scale_column(S, col, ld, v, j, col[X * ld + j] - top, sum);
    join_next(W, sum);
    if (threadIdx.x % 32 == 0 && threadIdx.x < 32 * HOLDERS) {
        W.standing[threadIdx.x / 32].shift -= top;
        W.standing[threadIdx.x / 32].since_absorb = 0;
    }
    __syncthreads();
}

// u of a row relative to K, log u = fi (log a - log s) - (1 - fi) (d + shift), or log_v with one potential;
// a = 0: left out. Sets `odd` if K is outgrown.
FN double row_scale(const Batch &S, double a, double log_a, double d, double s, double shift, double log_v,
                    double &log_u, bool &odd) {
    if (!(a > 0)) return 0;
    odd |= !(s > DEAD_SUM);
    log_u = ONE_POTENTIAL ? log_v : S.limits.fi_rows * (log_a - log(s)) - (1 - S.limits.fi_rows) * (d + shift);
    const double u = exp(log_u);
    odd |= !(u < S.limits.scale_limit);
    return u;
}

FN bool is_safe(double x) { return x > 1e-290 && x < 1e290; }

FN Move find_move(const Batch &S, const Work &W) {
    Move move;
    move.mass = S.k1 > 0 || ONE_POTENTIAL ? total(W.row, WARPS) : W.standing[0].mass_a;
    move.weight = total(W.next, column_warps((int)S.n));
    move.lam = translation(&S.limits, log_ratio_of(move.mass, move.weight), W.standing[0].shift);
    move.off = left_of_rows(&S.limits, move.lam);
    move.kappa = exp(move.off);
    move.grow = exp(S.limits.rate_cols * (W.standing[0].shift + move.lam));
    return move;
}

// Sweep 1: marginal, gap, G(x), f = G(x) - x and their sums; true if a column is dead. sum_of(j): K^T u of column j.
template <typename Sum>
FN bool first_sweep(const Batch &S, Work &W, double *col, int ld, const double *v, const Move &move, Sum sum_of) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Standing &p = W.standing[warp];
    const double shift = p.shift + move.lam, k2 = S.limits.rate_cols;
    bool odd =
        k2 > 0 && !(is_safe(move.weight) && is_safe(move.grow)); // an underflow to 0: the exact product may be in range
    double value[SUMS];
    UNROLLED (int q = 0; q < SUMS; q++) value[q] = 0;
    ROLLED (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        const double sum = sum_of(j), w = col[WEIGHT * ld + j], x = col[X * ld + j];
        if (!(w > 0)) continue;
        odd |= !(sum > DEAD_SUM);
        const mapuot_column c = {
            col[ABSORBED * ld + j], w, col[LOG_B * ld + j], k2 > 0 ? S.limits.rho_cols : INF, 0, k2, S.fi2, x, v[j]};
        value[LOGS] += w * (fabs(c.absorbed) + fabs(x - c.absorbed));
        const double log_sum = log(sum), image = kl_image(&c, log_sum, shift, move.off);
        const double next = k2 > 0 ? w * exp(-k2 * (image - shift)) : w, q = col[Q * ld + j] * move.grow;
        const mapuot_column_out out =
            kl_column(&c, sum, log_sum, shift, move.off, S.limits.reg, image, q, next, move.kappa);
        const double G = ONE_POTENTIAL ? x + own_part(S.fi2) * (out.image - x) : out.image, f = G - x,
                     P = f - col[LAST * ld + j];
        value[LOSS] += out.gap + out.hard;
        value[WORTH] += k2 > 0 ? out.next : out.dual;
        col[NEW_G * ld + j] = G;
        col[NEW_F * ld + j] = f;
        col[MARGINAL * ld + j] = out.marginal;
        const double wf = w * f, wP = w * P;
        value[SUM_F] += wf;
        value[SUM_P] += wP;
        value[SUM_PP] += wP * P;
        value[SUM_PF] += wP * f;
    }
    const double sum = warp_sums<SUMS>(value, lane);
    if (lane % (32 / SUMS) == 0) W.part[warp][lane / (32 / SUMS)] = sum;
    return odd;
}

// The number of held differences that the next step is orthogonal to, beside the newest; read before the standing
// changes.
FN int held(const Work &W) { return W.standing[0].have > 0 ? (int)W.standing[0].depth : 0; }

// Products of the held differences with f and its change P, b-weighted, a warp each; all threads, after the first
// sweep.
FN void find_products(const Batch &S, Work &W, const double *col, int ld, int depth) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double part[OWN_PRODUCTS][2];
    UNROLLED (int q = 0; q < OWN_PRODUCTS; q++) part[q][0] = part[q][1] = 0;
    ROLLED (int j = lane; j < (int)S.n && warp < depth; j += 32) {
        const double w = col[WEIGHT * ld + j];
        if (!(w > 0)) continue;
        const double f = col[NEW_F * ld + j], wf = w * f, wP = w * (f - col[LAST * ld + j]);
        UNROLLED (int q = 0; q < OWN_PRODUCTS; q++)
            if (warp + q * WARPS < depth) {
                const double d = col[(DF + warp + q * WARPS) * ld + j];
                part[q][0] += wP * d;
                part[q][1] += wf * d;
            }
    }
    UNROLLED (int q = 0; q < OWN_PRODUCTS; q++) {
        const int i = warp + q * WARPS;
        const double sum = warp_sums<2>(part[q], lane);
        if (i < depth && lane % 16 == 0) (lane == 0 ? W.dot : W.rhs)[i] = sum;
    }
}
