/* kernels_tmpl.c - the O(mn) kernels that depend on how K is stored; compiled once per instruction set and dtype.
 *
 * row_pass is the fused read-only pass: a tile of R rows is read from memory for its sums s = K v, u = prox(s) follows,
 * and the tile, still in cache, is read again for the column sums K^T u; the next tile is prefetched meanwhile.
 * plan_pass is the single pass of arXiv 2412.11079 with the scalings carried: the buffer is the plan.
 * Contract and glossary: kernels.h.  Twins: src_cuda/row_pass.cu, src_cuda/plan_pass.cu, backends/reference.py.
 */
#include "kernels.h"
#include "prox.h"
#include "vec.h"
#include "entries.h"

enum { LINE = 64 / sizeof(real) < 16 ? 64 / sizeof(real) : 16 }; /* columns a step: a cache line of K */

/* s_r = K_r . v for R rows; the lines of the next tile's first half are requested on the way */
ALWAYS_INLINE void tile_dots(const real *K, int64_t ld, int64_t np, const double *v, double *s, const real *next, const int R)
{
    vd sum[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        sum[r] = v_set(0.0);
    for (int64_t j = 0; j < np; j += LINE) {
        if (next) {
            UNROLL
            for (int r = 0; r < (R + 1) / 2; r++)
                __builtin_prefetch(next + r * ld + j, 0, 2);
        }
        UNROLL
        for (int q = 0; q < LINE; q += VL) {
            vd vj = v_load(v + j + q);
            UNROLL
            for (int r = 0; r < R; r++)
                sum[r] = v_fma(v_load_real(K + r * ld + j + q), vj, sum[r]);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        s[r] = v_sum(sum[r]);
}

/* sums += u_r K_r over R rows; the second half of the next tile is requested on the way */
ALWAYS_INLINE void tile_sums(const real *K, int64_t ld, int64_t np, const double *u, double *sums, const real *next, const int R)
{
    vd scale[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        scale[r] = v_set(u[r]);
    for (int64_t j = 0; j < np; j += LINE) {
        if (next) {
            UNROLL
            for (int r = (R + 1) / 2; r < R; r++)
                __builtin_prefetch(next + r * ld + j, 0, 2);
        }
        UNROLL
        for (int q = 0; q < LINE; q += VL) {
            vd sum = v_load(sums + j + q);
            UNROLL
            for (int r = 0; r < R; r++)
                sum = v_fma(v_load_real(K + r * ld + j + q), scale[r], sum);
            v_store(sums + j + q, sum);
        }
    }
}

/* log scale = base - (1 - fi) shift - fi log s: KL and balanced, VL rows at once */
static void prox_vector(const mapuot_state *state, int64_t i, int count, const double *s, double *scalars)
{
    const mapuot_side *rows = &state->rows;
    double sums[TILE] = {0}, base[TILE] = {0}, fi[TILE] = {0}, log_scale[TILE], scale[TILE];
    memcpy(sums, s, sizeof(double) * (size_t)count);
    memcpy(base, rows->base + i, sizeof(double) * (size_t)count);
    memcpy(fi, rows->fi + i, sizeof(double) * (size_t)count);
    for (int k = 0; k < TILE; k += VL) {
        vd f = v_load(fi + k);
        vd x = v_fnma(f, v_log(v_max(v_load(sums + k), v_set(DBL_MIN))), v_load(base + k));
        x = v_fnma(v_sub(v_set(1.0), f), v_set(state->shift), x);
        v_store(log_scale + k, x);
        v_store(scale + k, v_exp(x));
    }
    for (int k = 0; k < count; k++) {
        int out = rows->absorbed[i + k] == INFINITY, dead = !out && !(s[k] >= DBL_MIN);
        double u = out || dead ? 0.0 : scale[k], r = u * s[k], a = rows->weight[i + k];
        rows->scale[i + k] = u;
        rows->log_scale[i + k] = log_scale[k];
        rows->marginal[i + k] = r;
        scalars[ROW_SCALE] += u;
        scalars[ROW_DEAD] += dead;
        if (rows->penalty == MAPUOT_KL) /* rho (a - r): r = a e^(-f / rho) is exact after the prox */
            scalars[ROW_DUAL] += out ? 0.0 : rows->rho[i + k] * (a - r);
        else if (a > 0.0 && !out && !dead)
            scalars[ROW_DUAL] += state->reg * a * (log_scale[k] + rows->absorbed[i + k] + state->shift);
    }
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
    if (state->rows.fi)
        prox_vector(state, i, count, s, scalars);
    else
        prox_scalar(state, i, count, s, scalars);
}

ALWAYS_INLINE void row_tile(const mapuot_state *state, int64_t i, double *sums, const real *next, const int R)
{
    const int64_t np = padded(state->n), ld = state->ld;
    const real *K = (const real *)state->kernel + i * ld;
    double s[TILE];
    tile_dots(K, ld, np, state->cols.scale, s, next, R);
    prox_rows(state, i, R, s, sums + np);
    tile_sums(K, ld, np, state->rows.scale + i, sums, next, R);
}

/* tiles of R rows from i0 to i1, upwards or downwards, then the rows left over one by one */
ALWAYS_INLINE void row_tiles(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, const int R)
{
    const int64_t count = (i1 - i0) / R;
    const int down = (int)(state->passes & 1);
    const real *K = (const real *)state->kernel;
    for (int64_t t = 0; t < count; t++) {
        int64_t i = i0 + (down ? count - 1 - t : t) * R;
        const real *next = t + 1 < count ? K + (down ? i - R : i + R) * state->ld : NULL;
        row_tile(state, i, sums, next, R);
    }
    for (int64_t i = i0 + count * R; i < i1; i++)
        row_tile(state, i, sums, NULL, 1);
}

void KERNEL(row_pass)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    const int64_t row_bytes = padded(state->n) * (int64_t)sizeof(real), tile_bytes = 512 * 1024;
    if (8 * row_bytes <= tile_bytes)
        row_tiles(state, i0, i1, sums, 8);
    else if (4 * row_bytes <= tile_bytes)
        row_tiles(state, i0, i1, sums, 4);
    else
        row_tiles(state, i0, i1, sums, 2);
}

void KERNEL(build_kernel)(const stream_args *args, int64_t i0, int64_t i1)
{
    double entry[BLOCK];
    const int64_t np = padded(args->n);
    for (int64_t i = i0; i < i1; i += TILE)
        for (int64_t j = 0; j < args->n; j += BLOCK)
            for (int64_t r = i; r < i1 && r < i + TILE; r++) {
                int64_t count = args->n - j < BLOCK ? args->n - j : BLOCK;
                real *K = (real *)args->out + r * args->ld + j;
                entries(args, r, j, count, REAL_MIN_LOG, REAL_NARROW, entry);
                int64_t wide = j + count == args->n ? np - j : count; /* zeros behind the row */
                for (int64_t k = count; k < wide; k++)
                    entry[k] = 0.0;
                if (args->nontemporal)
                    for (int64_t k = 0; k < wide; k += VL)
                        v_stream_real(K + k, v_load(entry + k));
                else
                    for (int64_t k = 0; k < wide; k += VL)
                        v_store_real(K + k, v_load(entry + k));
            }
}

#ifndef MAPUOT_DTYPE_BF16

/* P_r *= ratio, s_r = sum P_r: the first half of the in-place pass */
ALWAYS_INLINE void plan_dots(real *P, int64_t ld, int64_t np, const double *ratio, double *s, const int R)
{
    vd sum[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        sum[r] = v_set(0.0);
    for (int64_t j = 0; j < np; j += VL) {
        vd f = v_load(ratio + j);
        UNROLL
        for (int r = 0; r < R; r++) {
            vd p = v_mul(v_load_real(P + r * ld + j), f);
            v_store_real(P + r * ld + j, p);
            sum[r] = v_add(sum[r], p);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        s[r] = v_sum(sum[r]);
}

/* P_r *= u_new / u_old, sums += P_r: the second half */
ALWAYS_INLINE void plan_sums(real *P, int64_t ld, int64_t np, const double *factor, double *sums, const int R)
{
    vd scale[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        scale[r] = v_set(factor[r]);
    for (int64_t j = 0; j < np; j += VL) {
        vd sum = v_load(sums + j);
        UNROLL
        for (int r = 0; r < R; r++) {
            vd p = v_mul(v_load_real(P + r * ld + j), scale[r]);
            v_store_real(P + r * ld + j, p);
            sum = v_add(sum, p);
        }
        v_store(sums + j, sum);
    }
}

ALWAYS_INLINE void plan_tile(const mapuot_state *state, int64_t i, double *sums, const int R)
{
    const int64_t np = padded(state->n), ld = state->ld;
    real *P = (real *)state->kernel + i * ld;
    double s[TILE], old[TILE], factor[TILE], *u = state->rows.scale + i;
    plan_dots(P, ld, np, state->history, s, R);
    for (int r = 0; r < R; r++) {
        old[r] = u[r];
        s[r] = old[r] > 0.0 ? s[r] / old[r] : 0.0; /* K v */
    }
    prox_rows(state, i, R, s, sums + np);
    for (int r = 0; r < R; r++)
        factor[r] = old[r] > 0.0 ? u[r] / old[r] : 0.0;
    plan_sums(P, ld, np, factor, sums, R);
}

/* on entry history[j] = v_j / (the v_j that the plan holds), rows.scale the u that it holds */
void KERNEL(plan_pass)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    int64_t i = i0;
    for (; i + 4 <= i1; i += 4)
        plan_tile(state, i, sums, 4);
    for (; i < i1; i++)
        plan_tile(state, i, sums, 1);
}

void KERNEL(form_plan)(const stream_args *args, int64_t i0, int64_t i1)
{
    double entry[BLOCK];
    for (int64_t i = i0; i < i1; i += TILE)
        for (int64_t j = 0; j < args->n; j += BLOCK)
            for (int64_t r = i; r < i1 && r < i + TILE; r++) {
                int64_t count = args->n - j < BLOCK ? args->n - j : BLOCK, whole = count / VL * VL;
                real *P = (real *)args->out + r * args->ld + j;
                entries(args, r, j, count, REAL_MIN_LOG, 0, entry);
                if (args->nontemporal && (uintptr_t)P % 64 == 0)
                    for (int64_t k = 0; k < whole; k += VL)
                        v_stream_real(P + k, v_load(entry + k));
                else
                    for (int64_t k = 0; k < whole; k += VL)
                        v_store_real(P + k, v_load(entry + k));
                for (int64_t k = whole; k < count; k++)
                    P[k] = (real)entry[k];
            }
}
#endif
