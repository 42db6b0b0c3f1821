/* finish_tmpl.c - the O(n) half of a pass, in four sweeps over the columns; compiled once per instruction set.
 *
 * finish.c runs them in order and does the scalar work between them.  With k = reg / rho, x = log v + shift:
 *     marginal    s = v K^T u, b e^(-k x)                               -> translation lam, q = b e^(-k log v)
 *     prox        gap = rho q h(log s/q), G(x) = log v' = fi log(b / K^T u) + shift   -> dual value, translation mu
 *     difference  F = G(x) - x and Anderson's dF, dG                    -> weights gamma
 *     advance     x = G - sum gamma dG, put back into the domain of the dual, v = e^(x - e)
 * Sources: Sejourne, Vialard, Peyre 2022 (translation); Walker, Ni 2011 (Anderson, type II).
 * Columns of penalties without a vector form, and of KL sides with some balanced points, go through common/column.h,
 * which the CUDA core uses for all columns. Oracle: mapuot/backends/reference.py.
 */
#include "kernels.h"
#include "common/column.h"
#include "kl.h"
#include "prox_rows.h"

/* The prox of rows with given s in rows.marginal. The row scalars go behind the column sums. */
static void row_prox(const mapuot_state *state, int64_t i0, int64_t i1, double *sums) {
    enum { ROWS = 4 };
    for (int64_t i = i0; i < i1; i += ROWS) {
        double s[TILE] = {0};
        const int count = i1 - i < ROWS ? (int)(i1 - i) : ROWS;
        memcpy(s, state->rows.marginal + i, (size_t)count * sizeof(double));
        prox_rows(state, i, count, s, sums + padded(state->n));
    }
}

#define BIG 1e300 /* a column with absorbed below it is not left out */

/* b e^t where e^t alone may overflow: v_exp ends at e^709, but b = 1e-36 may need q = 1e-11 */
ALWAYS_INLINE vd times_power(vd b, vd t) {
    const vd half = v_exp(v_mul(t, v_set(0.5)));
    return v_mul(v_mul(b, half), half);
}

static void sweep_marginal(const mapuot_state *state, const sweep_args *args, int64_t j0, int64_t j1, double *out) {
    const mapuot_side *cols = &state->cols;
    const int64_t np = padded(state->n);
    double *log_sum = state->work + np, *q_out = state->work + 2 * np;
    const int soft = cols->fi && cols->penalty == MAPUOT_KL;
    vd mass = v_set(0), weight = v_set(0), scale = v_set(0), dead = v_set(0);
    for (int64_t j = j0; j < j1; j += VL) {
        vd sum = v_load(state->sums + j), v = v_load(cols->scale + j), q = v_load(cols->weight + j);
        vd s = v_mul(v, sum), floor = v_set(DBL_MIN);
        vd is_dead = v_if_less(sum, floor, v_set(1), v_set(0));
        dead = v_add(dead, v_if_less(v_load(cols->absorbed + j), v_set(BIG), is_dead, v_set(0)));
        if (soft) { /* b e^(-k (x - base)) */
            vd k = v_div(v_set(-state->limits.reg), v_load(cols->rho + j));
            q = times_power(q, v_mul(k, v_sub(v_load(cols->log_scale + j), v_set(args->base))));
        }
        v_store(log_sum + j, v_log(v_max(sum, floor)));
        v_store(q_out + j, q);
        v_store(cols->marginal + j, s);
        mass = v_add(mass, s);
        weight = v_add(weight, q);
        scale = v_add(scale, v);
    }
    out[SUM_MASS] += v_sum(mass);
    out[SUM_WEIGHT] += v_sum(weight);
    out[SUM_SCALE] += v_sum(scale);
    out[SUM_DEAD] += v_sum(dead);
}

/* Columns without a vector form. A side without a common rho has no translation, and then k and next are unused. */
static void prox_each(const mapuot_state *state, const sweep_args *args, int64_t j0, int64_t j1, double *out) {
    const mapuot_side *cols = &state->cols;
    const int64_t np = padded(state->n);
    const double reg = state->limits.reg;
    double *x_out = state->work, *log_sum = x_out + np, *image = log_sum + np;
    for (int64_t j = j0; j < j1; j++) {
        const double rho = cols->rho[j], k = reg / rho, b = cols->weight[j];
        x_out[j] = image[j] = cols->log_scale[j];
        if (cols->absorbed[j] == INFINITY) continue;
        const mapuot_column c = {
            cols->absorbed[j], b, log(b), rho, cols->upper ? cols->upper[j] : 0.0, k, 1 / (1 + k), cols->log_scale[j],
            cols->scale[j]};
        const mapuot_column_out found =
            column_values((int)cols->penalty, &c, state->sums[j], log_sum[j], state->progress.shift, args->offset, reg);
        image[j] = found.image;
        cols->marginal[j] = found.marginal;
        out[SUM_GAP] += found.gap;
        out[SUM_HARD] += found.hard;
        out[SUM_DUAL] += found.dual;
        out[SUM_NEXT] += found.next;
        out[SUM_MISFIT] += found.misfit;
    }
}

static void sweep_prox(const mapuot_state *state, const sweep_args *args, int64_t j0, int64_t j1, double *out) {
    const mapuot_side *cols = &state->cols;
    const int64_t np = padded(state->n);
    double *x_out = state->work, *log_sum = x_out + np, *image = log_sum + np;
    const int soft = cols->penalty == MAPUOT_KL, several = state->parts > 1;
    const vd zero = v_set(0), one = v_set(1), shift = v_set(state->progress.shift);
    vd gap = zero, hard = zero, dual = zero, next = zero;
    if (!cols->fi) {
        prox_each(state, args, j0, j1, out);
        return;
    }
    for (int64_t j = j0; j < j1; j += VL) {
        vd e = v_load(cols->absorbed + j), b = v_load(cols->weight + j), fi = v_load(cols->fi + j);
        vd x = v_if_less(e, v_set(BIG), v_load(cols->log_scale + j), zero), log_v = v_sub(x, shift);
        vd d = v_if_less(e, v_set(BIG), e, zero), base = v_if_less(e, v_set(BIG), v_load(cols->base + j), zero);
        vd log_s = v_add(v_load(log_sum + j), v_set(args->offset));
        vd s = v_mul(v_load(cols->marginal + j), v_set(args->kappa));
        /* G = fi (log b - log K^T u) + shift = base + e - fi log sum + (1 - fi) shift */
        vd G = v_fma(v_sub(one, fi), shift, v_fnma(fi, log_s, v_add(base, d)));
        G = v_if_less(v_load(state->sums + j), v_set(DBL_MIN), x, G);
        G = v_if_less(e, v_set(BIG), G, zero);
        vd wanted = b; /* b e^(-k log v') */
        if (soft) {
            vd rho = v_load(cols->rho + j), k = v_div(v_set(state->limits.reg), rho);
            vd q = v_mul(v_load(image + j), v_set(args->q_factor));
            /* t = log(s / q) = (x - e) + log sum - (log b - k log v), log b = (1 + k) base + k e */
            vd log_b = v_add(base, v_mul(k, v_add(base, d)));
            vd t = v_sub(v_fma(k, log_v, v_add(v_sub(x, d), log_s)), log_b);
            gap = v_add(gap, v_if_less(e, v_set(BIG), v_mul(rho, v_kl_gap(q, s, t)), zero));
            dual = v_add(dual, v_if_less(e, v_set(BIG), v_mul(rho, v_sub(b, q)), zero));
            wanted = times_power(b, v_mul(k, v_sub(shift, G)));
        } else {
            hard = v_add(hard, v_max(v_sub(s, b), v_sub(b, s)));
            dual = v_fma(v_mul(b, v_set(state->limits.reg)), log_v, dual);
        }
        next = v_add(next, wanted);
        if (several) v_store(log_sum + j, wanted);
        v_store(x_out + j, x);
        v_store(image + j, G);
        v_store(cols->marginal + j, s);
    }
    out[SUM_GAP] += v_sum(gap);
    out[SUM_HARD] += v_sum(hard);
    out[SUM_DUAL] += v_sum(dual);
    out[SUM_NEXT] += v_sum(next);
}

enum { TOGETHER = 8 }; /* differences with sums in registers: from memory a small batch takes a third longer */

/* The weighted products <dF_i, dF_slot> and <dF_i, F> of count differences from `first` on. */
ALWAYS_INLINE void difference_sums(const mapuot_state *state, const double *F, const double *dF, int64_t slot,
                                   int64_t first, int64_t count, int64_t j0, int64_t j1, double *out) {
    const int64_t np = padded(state->n);
    vd dot[TOGETHER], rhs[TOGETHER];
    UNROLLED (int i = 0; i < TOGETHER; i++) dot[i] = rhs[i] = v_set(0);
    for (int64_t j = j0; j < j1; j += VL) {
        const vd w = v_load(state->cols.weight + j), f = v_load(F + j), newest = v_load(dF + slot * np + j);
        UNROLLED (int i = 0; i < TOGETHER; i++)
            if (i < count) {
                const vd weighted = v_mul(w, v_load(dF + (first + i) * np + j));
                dot[i] = v_fma(weighted, newest, dot[i]);
                rhs[i] = v_fma(weighted, f, rhs[i]);
            }
    }
    UNROLLED (int i = 0; i < TOGETHER; i++)
        if (i < count) {
            out[SUM_DOT + first + i] += v_sum(dot[i]);
            out[SUM_RHS + first + i] += v_sum(rhs[i]);
        }
}

static void sweep_difference(const mapuot_state *state, const sweep_args *args, int64_t j0, int64_t j1, double *out) {
    const mapuot_side *cols = &state->cols;
    const int64_t np = padded(state->n);
    const double *x = state->work;
    double *image = state->work + 2 * np, *F_last = state->history, *G_last = F_last + np;
    double *dF = F_last + 2 * np, *dG = dF + state->limits.anderson_depth * np;
    const vd zero = v_set(0), mu = v_set(args->common);
    vd largest = zero;
    for (int64_t j = j0; j < j1; j += VL) {
        vd G = v_if_less(v_load(cols->absorbed + j), v_set(BIG), v_add(v_load(image + j), mu), zero);
        vd F = v_sub(G, v_load(x + j));
        v_store(image + j, G);
        largest = v_max(largest, v_max(F, v_sub(zero, F)));
        if (state->limits.anderson_depth == 0) continue;
        if (args->slot >= 0) {
            v_store(dF + args->slot * np + j, v_sub(F, v_load(F_last + j)));
            v_store(dG + args->slot * np + j, v_sub(G, v_load(G_last + j)));
        }
        v_store(F_last + j, F);
        v_store(G_last + j, G);
    }
    double lane[VL];
    v_store(lane, largest);
    for (int q = 0; q < VL; q++) out[MAX_RESIDUAL] = lane[q] > out[MAX_RESIDUAL] ? lane[q] : out[MAX_RESIDUAL];
    for (int64_t i = 0; args->slot >= 0 && i < args->depth; i += TOGETHER)
        difference_sums(state, F_last, dF, args->slot, i, args->depth - i, j0, j1, out);
}

static void sweep_advance(const mapuot_state *state, const sweep_args *args, int64_t j0, int64_t j1, double *out) {
    const mapuot_side *cols = &state->cols;
    const int64_t np = padded(state->n);
    const double *image = state->work + 2 * np, *dG = state->history + (2 + state->limits.anderson_depth) * np;
    const int bounded = cols->penalty == MAPUOT_TV; /* |g| <= rho: below, the dual is -inf, above, flat */
    const vd zero = v_set(0), shift = v_set(state->progress.shift), rate = v_set(1.0 / state->limits.reg);
    vd scale = zero;
    for (int64_t j = j0; j < j1; j += VL) {
        vd x = v_load(image + j), e = v_load(cols->absorbed + j);
        for (int i = 0; i < args->depth; i++) x = v_fnma(v_set(args->gamma[i]), v_load(dG + i * np + j), x);
        if (bounded) {
            vd bound = v_mul(v_load(cols->rho + j), rate);
            x = v_min(v_max(x, v_sub(shift, bound)), v_add(shift, bound));
        }
        vd v = v_if_less(e, v_set(BIG), v_exp(v_sub(x, e)), zero);
        if (state->limits.in_place) { /* factors of the plan's columns in the next pass */
            vd old = v_load(cols->scale + j), ratio = v_div(v, v_max(old, v_set(DBL_MIN)));
            v_store(state->history + j, v_if_less(zero, old, ratio, zero));
        }
        v_store(cols->log_scale + j, x);
        v_store(cols->scale + j, v);
        scale = v_add(scale, v);
    }
    out[SUM_ADVANCED] += v_sum(scale);
}

const sweep_kernels ISA_OP(sweeps) = {row_prox, sweep_marginal, sweep_prox, sweep_difference, sweep_advance};
