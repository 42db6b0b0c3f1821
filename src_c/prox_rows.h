/* prox_rows.h - u = prox(s) for a tile of rows, with the row scalars of the certificate: shared by the passes over one
 * problem (kernels_tmpl.c) and over many (batch_tmpl.c).  KL and balanced rows in vectors, the rest through prox.h.
 */
#ifndef MAPUOT_PROX_ROWS_H
#define MAPUOT_PROX_ROWS_H
#include "kernels.h"
#include "prox.h"
#include "vec.h"

/* log scale = base - (1 - fi) shift - fi log s: KL and balanced, for TILE rows at once */
ALWAYS_INLINE void prox_tile(const mapuot_state *state, const mapuot_side *rows, int64_t i, const double *s,
                             double *scalars)
{
    const vd zero = v_set(0), one = v_set(1), tiny = v_set(DBL_MIN), shift = v_set(state->shift);
    vd dual = zero, scale = zero, dead = zero;
    for (int64_t k = 0; k < TILE; k += VL) {
        vd sum = v_load(s + k), fi = v_load(rows->fi + i + k), d = v_load(rows->absorbed + i + k);
        vd a = v_load(rows->weight + i + k);
        vd x = v_fnma(fi, v_log(v_max(sum, tiny)), v_load(rows->base + i + k));
        x = v_fnma(v_sub(one, fi), shift, x);
        vd in = v_if_less(d, v_set(DBL_MAX), one, zero), live = v_if_less(sum, tiny, zero, in);
        vd u = v_mul(v_exp(x), live), r = v_mul(u, sum);
        if (rows->penalty == MAPUOT_KL) /* rho (a - r): r = a e^(-f / rho) is exact after the prox */
            dual = v_fma(v_mul(v_load(rows->rho + i + k), in), v_sub(a, r), dual);
        else
            dual = v_fma(v_mul(a, v_set(state->reg)), v_if_less(zero, live, v_add(v_add(x, d), shift), zero), dual);
        scale = v_add(scale, u);
        dead = v_add(dead, v_sub(in, live));
        v_store(rows->scale + i + k, u);
        v_store(rows->log_scale + i + k, x);
        v_store(rows->marginal + i + k, r);
    }
    scalars[ROW_DUAL] += v_sum(dual);
    scalars[ROW_SCALE] += v_sum(scale);
    scalars[ROW_DEAD] += v_sum(dead);
}

/* fewer rows than a tile: the same on padded copies */
ALWAYS_INLINE void prox_rest(const mapuot_state *state, int64_t i, int count, const double *s, double *scalars)
{
    enum { FIELDS = 8 };
    const mapuot_side *rows = &state->rows;
    double copy[FIELDS][TILE] = {{0}}, sums[TILE] = {0};
    const double *in[] = {rows->weight, rows->rho, rows->absorbed, rows->fi, rows->base};
    double *out[] = {rows->log_scale, rows->scale, rows->marginal};
    mapuot_side part = *rows;
    for (int f = 0; f < 5; f++)
        memcpy(copy[f], in[f] + i, sizeof(double) * (size_t)count);
    for (int k = count; k < TILE; k++)
        copy[2][k] = INFINITY;
    memcpy(sums, s, sizeof(double) * (size_t)count);
    part.weight = copy[0];
    part.rho = copy[1];
    part.absorbed = copy[2];
    part.fi = copy[3];
    part.base = copy[4];
    part.log_scale = copy[5];
    part.scale = copy[6];
    part.marginal = copy[7];
    prox_tile(state, &part, 0, sums, scalars);
    for (int f = 0; f < 3; f++)
        memcpy(out[f] + i, copy[5 + f], sizeof(double) * (size_t)count);
}

static void prox_scalar(const mapuot_state *state, int64_t i, int count, const double *s, double *scalars)
{
    const mapuot_side *rows = &state->rows;
    for (int k = 0; k < count; k++, i++) {
        double d = rows->absorbed[i];
        int out = d == INFINITY, dead = !out && !(s[k] >= DBL_MIN);
        double log_u = out || dead ? 0.0 : prox_log(rows, i, log(s[k]) - d - state->shift, state->reg);
        double log_scale = log_u - d - state->shift, u = out || dead ? 0.0 : exp(log_scale);
        rows->scale[i] = u;
        rows->log_scale[i] = out ? 0.0 : log_scale;
        rows->marginal[i] = u * s[k];
        scalars[ROW_SCALE] += u;
        scalars[ROW_DEAD] += dead;
        scalars[ROW_DUAL] += out || dead ? 0.0 : dual_term(rows, i, state->reg * log_u);
    }
}

ALWAYS_INLINE void prox_rows(const mapuot_state *state, int64_t i, int count, const double *s, double *scalars)
{
    if (state->rows.fi && count == TILE)
        prox_tile(state, &state->rows, i, s, scalars);
    else if (state->rows.fi)
        prox_rest(state, i, count, s, scalars);
    else
        prox_scalar(state, i, count, s, scalars);
}
#endif
