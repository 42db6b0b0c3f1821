/* prox_rows.h - u = prox(s) for a tile of rows, with the row scalars of the certificate; used by passes over one
 * problem (kernels_tmpl.c) and over many (batch_tmpl.c). KL and balanced rows are vectorised, the others use
 * common/penalty.h. s is read up to a multiple of VL: the numbers behind count must be finite.
 */
#pragma once
#include "kernels.h"
#include "common/penalty.h"
#include "vec.h"

/* log scale = base - (1 - fi) shift - fi log s for KL and balanced: the first count rows from i, at most VL */
ALWAYS_INLINE void prox_part(const mapuot_state *state, int64_t i, int count, vd sum, double *scalars) {
    const mapuot_side *rows = &state->rows;
    const vd zero = v_set(0), one = v_set(1), tiny = v_set(DBL_MIN), shift = v_set(state->progress.shift);
    vd fi = v_load_part(rows->fi + i, count, zero), a = v_load_part(rows->weight + i, count, zero);
    vd d = v_load_part(rows->absorbed + i, count, v_set(INFINITY)), base = v_load_part(rows->base + i, count, zero);
    sum = v_if_less(sum, v_set(DBL_MAX), sum, zero); /* a sum that overflowed is as unusable as one that vanished */
    vd x = v_fnma(v_sub(one, fi), shift, v_fnma(fi, v_log(v_max(sum, tiny)), base));
    vd in = v_if_less(d, v_set(DBL_MAX), one, zero), live = v_if_less(sum, tiny, zero, in);
    vd u = v_mul(v_exp(x), live), r = v_mul(u, sum), dual;
    if (rows->penalty == MAPUOT_KL) /* rho (a - r): r = a e^(-f / rho) is exact after the prox */
        dual = v_mul(v_mul(v_load_part(rows->rho + i, count, zero), in), v_sub(a, r));
    else dual = v_mul(v_mul(a, v_set(state->limits.reg)), v_if_less(zero, live, v_add(v_add(x, d), shift), zero));
    v_store_part(rows->scale + i, u, count);
    v_store_part(rows->log_scale + i, x, count);
    v_store_part(rows->marginal + i, r, count);
    scalars[ROW_DUAL] += v_sum(dual);
    scalars[ROW_SCALE] += v_sum(u);
    scalars[ROW_DEAD] += v_sum(v_sub(in, live));
}

static void prox_scalar(const mapuot_state *state, int64_t i, int count, const double *s, double *scalars) {
    const mapuot_side *rows = &state->rows;
    const double reg = state->limits.reg, shift = state->progress.shift;
    const int penalty = (int)rows->penalty;
    for (int k = 0; k < count; k++, i++) {
        const double d = rows->absorbed[i], t = rows->weight[i], rho = rows->rho[i],
                     upper = rows->upper ? rows->upper[i] : 0.0;
        const double sum = s[k] <= DBL_MAX ? s[k] : 0.0; /* as in prox_part */
        const int out = d == INFINITY, dead = !out && !(sum >= TINY);
        const double log_u = out || dead ? 0.0 : prox_log(penalty, log(sum) - d - shift, t, log(t), rho, upper, reg);
        const double log_scale = log_u - d - shift, u = out || dead ? 0.0 : exp(log_scale);
        rows->scale[i] = u;
        rows->log_scale[i] = out ? 0.0 : log_scale;
        rows->marginal[i] = u * sum;
        scalars[ROW_SCALE] += u;
        scalars[ROW_DEAD] += dead;
        scalars[ROW_DUAL] += out || dead ? 0.0 : dual_term(penalty, reg * log_u, t, rho, upper);
    }
}

ALWAYS_INLINE void prox_rows(const mapuot_state *state, int64_t i, const int count, const double *s, double *scalars) {
    if (state->rows.factor) {
        for (int k = 0; k < count; k++) state->rows.scale[i + k] = state->rows.factor[i + k] * s[k];
        return;
    }
    if (!state->rows.fi) {
        prox_scalar(state, i, count, s, scalars);
        return;
    }
    UNROLLED (int k = 0; k < count; k += VL) prox_part(state, i + k, count - k, v_load(s + k), scalars);
}
