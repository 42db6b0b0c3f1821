// Mirrors src_c/finish_tmpl.c: the work of finish_pass on one column; finish_pass.cuh explains it.
#include "common/column.h"
#include "state.cuh"

enum {
    SUM_GAP,
    SUM_HARD,
    SUM_DUAL,
    SUM_NEXT,
    SUM_MISFIT = SUM_NEXT, // shares a place with SUM_NEXT: penalties with kinks have no translation
    SUM_DEAD,
    SUM_ONES,
    SUM_F,
    SUM_P,
    SUM_PP,
    SUM_PF,
    MAX_F,
    MAX_MINUS,
    SUM_DOT, // a column's own values end here; the others are products with its differences
    SUM_RHS = SUM_DOT + ANDERSON_DEPTH,
    USED = SUM_RHS + ANDERSON_DEPTH // number of values in use, at most VALUES
};

#define STRIP (VALUES == 32 ? 64 : 32) // columns summed at once: 11 and 13 KB of values
#define TEAM (512 / VALUES)            // threads that sum one value
#define JOINERS 128                    // threads that join the scalars of all blocks
#define LINE (512 / PARTNERS)          // columns that a block processes at once

// lam = (log A - log B) / (fi1 k1 + k2): u *= e^(fi1 lam), v *= e^-lam. The shift takes lam, so that x stays; the
// remaining part of log u is off = (fi1 - 1) lam, and kappa = e^off.
struct Translation {
    double lam, off, kappa;
};

struct Finish {
    alignas(128) double value[(USED + COARSE) * STRIP > STAGE ? (USED + COARSE) * STRIP : STAGE];
    int label[STRIP];
    double mean[CLUSTERS], last_mean[CLUSTERS], left[CLUSTERS],
        correction[CLUSTERS]; // R F and the numbers derived from it
    double total[VALUES];
    double join[JOINERS / 32][SCALARS];
    double row[SCALARS];
    double next[16][2];
    Translation move;
    Progress p;
    mapuot_stats stats;
};

// One column as its thread holds it through a pass; data independent of the pass's sums is loaded before them.
struct Column : mapuot_column {
    int j;                     // -1: this thread has no column
    int held;                  // the column of its differences, its own or its partner's; -1: none
    int label;                 // its cluster; -1: no correction of steps
    double share;              // its share of its cluster's column sums
    double image, last;        // the last image and residual
    double f, G;               // residual and image of the pass
    double d[OWN_DIFFERENCES]; // dF, later dG
};

// The index of this thread among a column's partners; the first has the column itself.
FN int partner() { return (int)threadIdx.x / LINE; }

// Offset of the block's vectors of the iteration: one copy for all blocks, or its own.
FN int64_t own_copy(const State &S) { return S.solo ? blockIdx.x * S.ld : 0; }

// The buffer of the pass's column sums, and of this block's scalars for it
FN double *sums_of(const State &S, int turn) { return S.sums + turn % 3 * S.ld; }

FN double *scalars_of(const State &S, int turn) {
    return S.scalars + turn % 2 * (S.parts > BLOCKS ? S.parts : BLOCKS) * SCALARS;
}

// Return the buffer where the blocks post their sums over columns.
FN double *partial_of(const State &S, int turn) { return S.partial + turn % 2 * S.parts * POSTS; }

// Number of columns of a thread
FN int column_rounds(const State &S) { return ((int)S.share + LINE - 1) / LINE; }

// The column of block `part` that this thread, or its partner, has in that round; -1: none
FN int column_of(const State &S, int part, int round) {
    const int share = (int)S.share, at = (int)threadIdx.x % LINE + round * LINE;
    const int j = part * share + at;
    return part < S.parts && at < share && j < S.n ? j : -1;
}

// Threads of a block that hold columns, a multiple of 32
FN int column_threads(const State &S) { return S.share < LINE ? (int)S.share : LINE; }

FN void load_differences(const State &S, const double *from, int depth, Column &c) {
    const int first = partner() * OWN_DIFFERENCES, count = c.held >= 0 ? depth - first : 0;
    const double *at = from + own_copy(S) * ANDERSON_DEPTH + first * S.n + c.held;
    UNROLLED (int i = 0; i < OWN_DIFFERENCES; i++, at += S.n) c.d[i] = i < count ? *at : 0;
}

FN mapuot_column column_at(const State &S, int64_t own, int64_t j) {
    const double upper = !KL_COLS && S.cols.penalty == MAPUOT_RANGE ? S.cols.upper[j] : 0;
    return {S.cols.absorbed[j], S.cols.weight[j], S.cols.log_weight[j], S.cols.rho[j],     upper,
            S.cols.rate[j],     S.cols.fi[j],     S.x_next[own + j],    S.v_scale[own + j]};
}

FN void load_column(const State &S, const Finish &F, int part, int round, Column &c) {
    const int64_t own = own_copy(S);
    const int held = c.held = column_of(S, part, round), depth = F.p.have > 0 ? (int)F.p.depth : 0;
    const int j = c.j = partner() == 0 ? held : -1;
    c.absorbed = INF;
    c.weight = c.f = c.G = c.x = c.share = 0;
    c.label = -1;
    load_differences(S, S.dF, depth, c);
    if (j < 0) return;
    (mapuot_column &)c = column_at(S, own, j);
    c.image = S.image[own + j];
    c.last = S.residual[own + j];
    if (COARSE && F.p.coarse > 0) {
        c.label = (int)S.coarse.label[j];
        c.share = S.coarse.share[j];
    }
}

FN void load_images(const State &S, const Finish &F, Column &c) {
    load_differences(S, S.dG, F.p.have > 0 ? (int)F.p.depth : 0, c);
}

// The translation without kappa, and beside it the logarithm of `sum`
FN Translation half_translation(const State &S, const Finish &F, double sum, double &log_sum) {
    const double(*x)[SCALARS] = F.join;
    const double mass = (x[0][ROW_MASS] + x[1][ROW_MASS]) + (x[2][ROW_MASS] + x[3][ROW_MASS]);
    const double B = (x[0][NEXT_B] + x[1][NEXT_B]) + (x[2][NEXT_B] + x[3][NEXT_B]);
    const double2 logs = far_logs(mass * inverse(B), sum);
    const double lam = translation(&S.limits, logs.x, F.p.shift);
    log_sum = logs.y;
    return {lam, left_of_rows(&S.limits, lam), 1};
}

FN Translation whole_translation(const State &S, const Finish &F) {
    double unused;
    Translation t = half_translation(S, F, 1, unused);
    t.kappa = far_exp(t.off);
    return t;
}

// One column: its certificate and its image, into out[SUM_GAP .. SUM_DEAD].
FN void certify_column(const State &S, const Finish &F, Translation &t, double sum, Column &c, double *out) {
    double log_sum;
    t = half_translation(S, F, sum, log_sum);
    const int penalty = KL_COLS ? (int)MAPUOT_KL : (int)S.cols.penalty;
    const mapuot_column_out found = column_values(penalty, &c, sum, log_sum, F.p.shift + t.lam, t.off, S.limits.reg);
    t.kappa = found.kappa;
    const bool in = isfinite(c.absorbed);
    const double fi = penalty <= MAPUOT_BALANCED ? c.fi : 1;
    c.G = !in ? c.x : S.limits.symmetric ? c.x + own_part(fi) * (found.image - c.x) : found.image;
    if (SPARSE && S.apart.count > 0) c.G += S.apart.move[S.apart.part[c.j]];
    if (in) {
        out[SUM_GAP] = found.gap;
        out[SUM_DUAL] = found.dual;
        out[SUM_HARD] = found.hard;
        out[SUM_NEXT] = KL_COLS || !(S.limits.path > 0) ? found.next : found.misfit;
        out[SUM_DEAD] = !(sum >= TINY) && sum == sum; // dead in this pass
        c.f = c.G - c.x;
    }
    if (S.solo && blockIdx.x > 0) return;
    S.x[c.j] = c.x - (F.p.shift + t.lam);
    S.s[c.j] = in ? found.marginal : 0;
}

// Sweep 1, one column: certificate, image, and its own values.
FN void column_values(const State &S, Finish &F, double sum, Column &c, double (&value)[SUM_DOT]) {
    const bool in = c.j >= 0 && isfinite(c.absorbed), before = F.p.have > 0;
    Translation t;
    if (c.j >= 0) certify_column(S, F, t, sum, c, value);
    else if (threadIdx.x == 0) // a block without columns
        t = whole_translation(S, F);
    if (threadIdx.x == 0) F.move = t;
    const double p = in && before ? c.f - c.last : 0, bp = c.weight * p, bf = c.weight * c.f;
    if (!in) return;
    value[SUM_ONES] = c.weight;
    value[SUM_F] = bf;
    value[SUM_P] = bp;
    value[SUM_PP] = bp * p;
    value[SUM_PF] = bp * c.f;
    value[MAX_F] = c.f;
    value[MAX_MINUS] = -c.f;
}

// sum gamma dG over the differences in memory, all but the newest; returned to the column's own thread
FN double held_step(Finish &F, const Column &c) {
    const int first = partner() * OWN_DIFFERENCES, slot = (int)F.p.slot, depth = F.p.step == 1 ? (int)F.p.depth : 0;
    double step = 0;
    UNROLLED (int i = 0; i < OWN_DIFFERENCES; i++)
        if (first + i < depth && first + i != slot) step = fma(F.p.gamma[first + i], c.d[i], step);
    if (PARTNERS == 1) return step;
    __syncthreads();
    F.value[threadIdx.x] = step;
    __syncthreads();
    for (int q = 1; q < PARTNERS && partner() == 0; q++) step += F.value[q * LINE + threadIdx.x];
    return step;
}

// Sweep 2, one column: differences, the next x and the data of the column for the next pass. Returns the next v.
FN double advance_column(const State &S, const Finish &F, const Column &c, double step, double &B, double &scale) {
    const Progress &p = F.p;
    const int64_t own = own_copy(S), at = own + c.j, old = own * ANDERSON_DEPTH + c.j;
    const int slot = (int)p.slot;
    const double f = c.f + p.common, G = c.G + p.common;
    double x = c.image;
    if (p.step < 2) {
        if (slot >= 0) {
            S.dF[old + slot * S.n] = f - c.last;
            S.dG[old + slot * S.n] = G - x;
        }
        S.residual[at] = f;
        S.image[at] = G;
        x = p.step > 0 ? G - step - p.gamma[slot] * (G - x) : G;
        if (COARSE && p.coarse > 0) x += F.correction[c.label];
    }
    if (!KL_COLS && S.cols.penalty == MAPUOT_TV) // |g| <= rho: beneath it the dual is -inf, above it flat
        x = clip(x, p.shift - c.rho * S.limits.inv_reg, p.shift + c.rho * S.limits.inv_reg);
    const double y = x - c.absorbed;
    const double2 values = far_exps(y < BOUND ? y : y == y ? BOUND : y, -S.limits.rate_cols * x);
    const double v = values.x;
    if (S.ratio) S.ratio[c.j] = c.v > 0 ? v / c.v : 0;
    S.narrow_v[at] = (float)v;
    S.x_next[at] = x;
    S.v_scale[at] = v;
    B += c.weight * values.y;
    scale += v;
    return v;
}
