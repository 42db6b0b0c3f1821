/* kernels_tmpl.c - the O(mn) kernels that depend on how K is stored; compiled once per instruction set and dtype.
 *
 * row_pass is the fused read-only pass: a tile of R rows is read from memory for its sums s = K v, u = prox(s) follows,
 * and the tile, still in cache, is read again for the column sums K^T u; the next tile is prefetched meanwhile.
 * narrow_pass is the same with short float32 runs, twice as fast out of cache; its answers are certified by row_pass.
 * plan_pass is the single pass of arXiv 2412.11079 with the scalings carried: the buffer is the plan.
 * Contract and glossary: kernels.h.  Twins: src_cuda/row_pass.cu, src_cuda/plan_pass.cu, backends/reference.py.
 */
#include "kernels.h"
#include "prox_rows.h"
#include "vec.h"
#include "entries.h"

enum { LINE = 64 / sizeof(real) < 16 ? 64 / sizeof(real) : 16 }; /* columns a step: a cache line of K */

enum { AHEAD = 4 }; /* lines of the next tile requested for each column line of tile_sums */

/* s_r = K_r . v for R rows */
ALWAYS_INLINE void tile_dots(const real *K, int64_t ld, int64_t np, const double *v, double *s, const int R)
{
    vd sum[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        sum[r] = v_set(0.0);
    for (int64_t j = 0; j < np; j += LINE) {
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

/* the part of the next tile that belongs to column j: while tile_sums works out of cache, memory must not idle */
ALWAYS_INLINE void request(const real *next, int64_t j)
{
    UNROLL
    for (int q = 0; q < AHEAD; q++)
        __builtin_prefetch(next + AHEAD * j + q * LINE, 0, 2);
}

/* sums += u_r K_r over R rows */
ALWAYS_INLINE void tile_sums(const real *K, int64_t ld, int64_t np, const double *u, double *sums, const real *next, const int R)
{
    vd scale[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        scale[r] = v_set(u[r]);
    for (int64_t j = 0; j < np; j += LINE) {
        if (next)
            request(next, j);
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

#ifndef MAPUOT_DTYPE_F64
enum { RUN = 512 }; /* columns summed in float32 before the lanes go to float64 */

/* tile_dots in float32 runs, for narrow K and v */
ALWAYS_INLINE void narrow_dots(const real *K, int64_t ld, int64_t np, const float *v, double *s, const int R)
{
    vd total[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        total[r] = v_set(0.0);
    for (int64_t j0 = 0; j0 < np; j0 += RUN) {
        const int64_t j1 = j0 + RUN < np ? j0 + RUN : np;
        vf sum[TILE];
        UNROLL
        for (int r = 0; r < R; r++)
            sum[r] = f_set(0.0f);
        for (int64_t j = j0; j < j1; j += FL) {
            vf vj = f_load(v + j);
            UNROLL
            for (int r = 0; r < R; r++)
                sum[r] = f_fma(f_load_real(K + r * ld + j), vj, sum[r]);
        }
        UNROLL
        for (int r = 0; r < R; r++)
            total[r] = v_add(total[r], f_fold(sum[r]));
    }
    UNROLL
    for (int r = 0; r < R; r++)
        s[r] = v_sum(total[r]);
}

/* tile_sums with the R rows added in float32, the tiles in float64 */
ALWAYS_INLINE void narrow_sums(const real *K, int64_t ld, int64_t np, const double *u, double *sums, const real *next, const int R)
{
    vf scale[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        scale[r] = f_set((float)u[r]);
    for (int64_t j = 0; j < np; j += LINE) {
        if (next)
            request(next, j);
        UNROLL
        for (int q = 0; q < LINE; q += FL) {
            vf sum = f_set(0.0f);
            UNROLL
            for (int r = 0; r < R; r++)
                sum = f_fma(f_load_real(K + r * ld + j + q), scale[r], sum);
            f_add_to(sums + j + q, sum);
        }
    }
}
#endif

ALWAYS_INLINE void row_tile(const mapuot_state *state, int64_t i, double *sums, const real *next, const int R, const int narrow)
{
    const int64_t np = padded(state->n), ld = state->ld;
    const real *K = (const real *)state->kernel + i * ld;
    double s[TILE];
#ifndef MAPUOT_DTYPE_F64
    if (narrow) {
        narrow_dots(K, ld, np, state->narrow_v, s, R);
        prox_rows(state, i, R, s, sums + np);
        narrow_sums(K, ld, np, state->rows.scale + i, sums, next, R);
        return;
    }
#endif
    (void)narrow;
    tile_dots(K, ld, np, state->cols.scale, s, R);
    prox_rows(state, i, R, s, sums + np);
    tile_sums(K, ld, np, state->rows.scale + i, sums, next, R);
}

/* tiles of R rows from i0 to i1, upwards or downwards, then the rows left over one by one; every other pass goes
 * downwards, since the rows read last are those that the caches still hold */
ALWAYS_INLINE void row_tiles(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, const int R, const int narrow)
{
    const int64_t count = (i1 - i0) / R;
    const int down = (int)(state->passes & 1);
    const real *K = (const real *)state->kernel;
    for (int64_t t = 0; t < count; t++) {
        int64_t i = i0 + (down ? count - 1 - t : t) * R;
        const real *next = R < TILE || t + 1 == count ? NULL : K + (down ? i - R : i + R) * state->ld;
        row_tile(state, i, sums, next, R, narrow);
    }
    for (int64_t i = i0 + count * R; i < i1; i++)
        row_tile(state, i, sums, NULL, 1, narrow);
}

ALWAYS_INLINE void row_range(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, const int narrow)
{
    const int64_t row_bytes = padded(state->n) * (int64_t)sizeof(real), tile_bytes = 768 * 1024;
    if (TILE * row_bytes <= tile_bytes)
        row_tiles(state, i0, i1, sums, TILE, narrow);
    else if (4 * row_bytes <= tile_bytes)
        row_tiles(state, i0, i1, sums, 4, narrow);
    else
        row_tiles(state, i0, i1, sums, 2, narrow);
}

void KERNEL(row_pass)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    row_range(state, i0, i1, sums, 0);
}

#ifndef MAPUOT_DTYPE_F64
void KERNEL(narrow_pass)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    row_range(state, i0, i1, sums, 1);
}
#endif

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
