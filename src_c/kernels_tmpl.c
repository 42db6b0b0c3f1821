/* kernels_tmpl.c - the O(mn) kernels that depend on how K is stored; compiled once per instruction set and dtype.
 *
 * row_pass is the fused read-only pass: a tile of R rows is read from memory for its sums s = K v, u = prox(s) follows,
 * and the tile, still in cache, is read again for the column sums K^T u; the next tile is prefetched meanwhile.
 * narrow_pass is the same with short float32 runs, twice as fast out of cache; its answers are certified by row_pass.
 * row_dots and row_sums are its halves, where the rows go on in other processes and s is summed over them between the two.
 * plan_pass is the single pass of arXiv 2412.11079 with the scalings carried: the buffer is the plan.
 * Contract and glossary: kernels.h.  Twins: src_cuda/row_pass.cu, src_cuda/plan_pass.cu, backends/reference.py.
 */
#include "kernels.h"
#include "prox_rows.h"
#include "vec.h"
#include "entries.h"

enum { LINE = 64 / sizeof(real) < 16 ? 64 / sizeof(real) : 16 }; /* columns a step: a cache line of K */
enum { L1_TILE = 32 << 10, TILE_BYTES = 128 << 10 }; /* tiles that stay in L1; the largest one of TILE rows */

/* s_r = K_r . v for R rows, written up to a multiple of VL; 4 rows in two chains each */
ALWAYS_INLINE void tile_dots(const real *K, int64_t ld, int64_t np, const double *v, double *s, const int R)
{
    const int chains = R == 4 && 2 * VL <= PAD ? 2 : 1;
    vd sum[2][TILE];
    UNROLL
    for (int r = 0; r < 2 * R; r++)
        sum[r / R][r % R] = v_set(0.0);
    for (int64_t j = 0; j < np; j += LINE) {
        UNROLL
        for (int q = 0; q < LINE; q += VL) {
            vd vj = v_load(v + j + q), *chain = sum[q / VL % chains];
            UNROLL
            for (int r = 0; r < R; r++)
                chain[r] = v_fma(v_load_real(K + r * ld + j + q), vj, chain[r]);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        sum[0][r] = v_add(sum[0][r], sum[1][r]);
    UNROLL
    for (int r = 0; r < R; r += VL)
        v_store(s + r, v_sum_each(sum[0] + r, R - r));
}

/* half of the next tile, line by line, while the sums work out of cache: memory must not idle */
ALWAYS_INLINE void request(const real *next, int64_t k, const int R)
{
    UNROLL
    for (int q = 0; q < R / 2; q += 64 / (LINE * (int)sizeof(real)))
        __builtin_prefetch(next + R / 2 * k + q * LINE, 0, 2);
}

/* what prox_part needs of the rows from i on */
ALWAYS_INLINE void request_rows(const mapuot_side *rows, int64_t i)
{
    const double *read[] = {rows->fi, rows->base, rows->absorbed, rows->weight, rows->rho};
    const double *written[] = {rows->scale, rows->log_scale, rows->marginal};
    UNROLL
    for (int f = 0; f < 5; f++)
        if (read[f])
            __builtin_prefetch(read[f] + i, 0, 3);
    UNROLL
    for (int f = 0; f < 3; f++)
        __builtin_prefetch(written[f] + i, 1, 3);
}

/* sums += u_r K_r over R rows; backwards where the tile is larger than L1: what was read last is still in it */
ALWAYS_INLINE void tile_sums(const real *K, int64_t ld, int64_t np, const double *u, double *sums, const real *next,
                             int backwards, const int R)
{
    vd scale[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        scale[r] = v_set(u[r]);
    const int64_t step = backwards ? -LINE : LINE;
    for (int64_t k = 0, j = backwards ? np - LINE : 0; k < np; k += LINE, j += step) {
        if (next)
            request(next, k, R);
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
/* RUN columns a chain, RUN_ROWS rows: what is summed in float32 before it goes to float64.
 * RUN_COLUMNS: the widest row whose column sums wait in a buffer on the stack */
enum { RUN = 512, RUN_ROWS = 64, RUN_COLUMNS = 16384 };

/* tile_dots in float32 runs, for narrow K and v */
ALWAYS_INLINE void narrow_dots(const real *K, int64_t ld, int64_t np, const float *v, double *s, const int R)
{
    const int chains = R == 4 ? 2 : 1;
    vd total[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        total[r] = v_set(0.0);
    for (int64_t j0 = 0; j0 < np; j0 += RUN * chains) {
        const int64_t j1 = j0 + RUN * chains < np ? j0 + RUN * chains : np;
        vf sum[2][TILE];
        UNROLL
        for (int r = 0; r < 2 * R; r++)
            sum[r / R][r % R] = f_set(0.0f);
        int64_t j = j0;
        for (; j + chains * FL <= j1; j += chains * FL)
            UNROLL
        for (int r = 0; r < chains * R; r++)
            sum[r / R][r % R] =
                f_fma(f_load_real(K + r % R * ld + j + r / R * FL), f_load(v + j + r / R * FL), sum[r / R][r % R]);
        for (; j < j1; j += FL)
            UNROLL
        for (int r = 0; r < R; r++)
            sum[0][r] = f_fma(f_load_real(K + r * ld + j), f_load(v + j), sum[0][r]);
        UNROLL
        for (int r = 0; r < R; r++)
            total[r] = v_add(total[r], f_fold(chains == 2 ? f_add(sum[0][r], sum[1][r]) : sum[0][r]));
    }
    UNROLL
    for (int r = 0; r < R; r += VL)
        v_store(s + r, v_sum_each(total + r, R - r));
}

/* run += u_r K_r over R rows in float32; unless keep, what has run up goes to sums in float64. run may be NULL */
ALWAYS_INLINE void narrow_sums(const real *K, int64_t ld, int64_t np, const double *u, double *sums, const real *next,
                               int backwards, float *run, const int keep, const int R)
{
    vf scale[TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        scale[r] = f_set((float)u[r]);
    const int64_t step = backwards ? -LINE : LINE;
    for (int64_t k = 0, j = backwards ? np - LINE : 0; k < np; k += LINE, j += step) {
        if (next)
            request(next, k, R);
        UNROLL
        for (int q = 0; q < LINE; q += FL) {
            vf sum = run ? f_load(run + j + q) : f_set(0.0f);
            UNROLL
            for (int r = 0; r < R; r++)
                sum = f_fma(f_load_real(K + r * ld + j + q), scale[r], sum);
            if (!keep)
                f_add_to(sums + j + q, sum);
            if (run)
                f_store(run + j + q, keep ? sum : f_set(0.0f));
        }
    }
}

/* row_tile in float32 runs; flush: the last tile of a run */
ALWAYS_INLINE void narrow_tile(const mapuot_state *state, int64_t i, double *sums, const real *next, float *run,
                               int flush, const int R)
{
    const int64_t np = padded(state->n), ld = state->ld;
    const int backwards = R * np * (int64_t)sizeof(real) > L1_TILE;
    const real *K = (const real *)state->kernel + i * ld;
    const double *u = state->rows.scale + i;
    double s[TILE];
    narrow_dots(K, ld, np, state->narrow_v, s, R);
    prox_rows(state, i, R, s, sums + np);
    if (!run)
        narrow_sums(K, ld, np, u, sums, next, backwards, NULL, 0, R);
    else if (flush)
        narrow_sums(K, ld, np, u, sums, next, backwards, run, 0, R);
    else
        narrow_sums(K, ld, np, u, sums, next, backwards, run, 1, R);
}
#endif

ALWAYS_INLINE void row_tile(const mapuot_state *state, int64_t i, double *sums, const real *next, const int R)
{
    const int64_t np = padded(state->n), ld = state->ld;
    const real *K = (const real *)state->kernel + i * ld;
    double s[TILE];
    tile_dots(K, ld, np, state->cols.scale, s, R);
    prox_rows(state, i, R, s, sums + np);
    tile_sums(K, ld, np, state->rows.scale + i, sums, next, R * np * (int64_t)sizeof(real) > L1_TILE, R);
}

/* tiles of R rows from i0 to i1, upwards or downwards, then the rows left over one by one; every other pass goes
 * downwards, since the rows read last are those that the caches still hold */
ALWAYS_INLINE void row_tiles(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, float *run, const int R,
                             const int narrow)
{
    const int64_t count = (i1 - i0) / R;
    const int down = (int)(state->passes & 1);
    const real *K = (const real *)state->kernel;
    (void)run, (void)narrow; /* K in float64 has no narrow pass */
    for (int64_t t = 0; t < count; t++) {
        const int64_t i = i0 + (down ? count - 1 - t : t) * R, i_next = down ? i - R : i + R;
        const real *next = t + 1 == count ? NULL : K + i_next * state->ld;
        if (next)
            request_rows(&state->rows, i_next);
#ifndef MAPUOT_DTYPE_F64
        if (narrow) {
            narrow_tile(state, i, sums, next, run, (t + 1) % (RUN_ROWS / R) == 0 || !next, R);
            continue;
        }
#endif
        row_tile(state, i, sums, next, R);
    }
    for (int64_t i = i0 + count * R; i < i1; i++) {
#ifndef MAPUOT_DTYPE_F64
        if (narrow) {
            narrow_tile(state, i, sums, NULL, NULL, 1, 1);
            continue;
        }
#endif
        row_tile(state, i, sums, NULL, 1);
    }
}

/* 8 rows cut the traffic of v and sums, 4 leave more of a long row in cache */
ALWAYS_INLINE void row_range(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, float *run,
                             const int narrow)
{
    if (TILE * padded(state->n) * (int64_t)sizeof(real) <= TILE_BYTES)
        row_tiles(state, i0, i1, sums, run, TILE, narrow);
    else
        row_tiles(state, i0, i1, sums, run, TILE / 2, narrow);
}

void KERNEL(row_pass)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    row_range(state, i0, i1, sums, NULL, 0);
}

#ifndef MAPUOT_DTYPE_F64
void KERNEL(narrow_pass)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    _Alignas(64) float run[RUN_COLUMNS];
    const int64_t np = padded(state->n);
    if (np <= RUN_COLUMNS)
        memset(run, 0, (size_t)np * sizeof(float));
    row_range(state, i0, i1, sums, np <= RUN_COLUMNS ? run : NULL, 1);
}
#endif

ALWAYS_INLINE void dots_tile(const mapuot_state *state, int64_t i, const int R)
{
    double s[TILE];
    tile_dots((const real *)state->kernel + i * state->ld, state->ld, padded(state->n), state->cols.scale, s, R);
    memcpy(state->rows.marginal + i, s, R * sizeof(double));
}

ALWAYS_INLINE void sums_tile(const mapuot_state *state, int64_t i, double *sums, const int R)
{
    const int64_t np = padded(state->n);
    double s[TILE] = {0};
    memcpy(s, state->rows.marginal + i, R * sizeof(double));
    prox_rows(state, i, R, s, sums + np);
    tile_sums((const real *)state->kernel + i * state->ld, state->ld, np, state->rows.scale + i, sums, NULL, 0, R);
}

void KERNEL(row_dots)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    int64_t i = i0;
    (void)sums;
    for (; i + 4 <= i1; i += 4)
        dots_tile(state, i, 4);
    for (; i < i1; i++)
        dots_tile(state, i, 1);
}

void KERNEL(row_sums)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums)
{
    int64_t i = i0;
    for (; i + 4 <= i1; i += 4)
        sums_tile(state, i, sums, 4);
    for (; i < i1; i++)
        sums_tile(state, i, sums, 1);
}

/* past the caches where K or the plan is larger than they are */
ALWAYS_INLINE void write_block(real *out, const double *entry, int64_t count, int nontemporal)
{
    int64_t k = 0;
    if (nontemporal && (uintptr_t)out % 64 == 0)
        for (; k + VL <= count; k += VL)
            v_stream_real(out + k, v_load(entry + k));
    for (; k + VL <= count; k += VL)
        v_store_real(out + k, v_load(entry + k));
    for (; k < count; k++)
        out[k] = (real)entry[k];
}

void KERNEL(build_kernel)(const stream_args *args, int64_t i0, int64_t i1)
{
    _Alignas(64) double entry[BLOCK];
    const int64_t np = padded(args->n);
    const int64_t rows = args->M.col_stride == 1 ? 1 : TILE; /* whole rows where M has them */
    for (int64_t i = i0; i < i1; i += rows)
        for (int64_t j = 0; j < args->n; j += BLOCK)
            for (int64_t r = i; r < i1 && r < i + rows; r++) {
                int64_t count = args->n - j < BLOCK ? args->n - j : BLOCK;
                entries(args, r, j, count, REAL_MIN_LOG, REAL_NARROW, entry);
                for (; j + count < np && count < BLOCK; count++) /* zeros behind the row */
                    entry[count] = 0.0;
                write_block((real *)args->out + r * args->ld + j, entry, count, args->nontemporal);
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
    double s[TILE] = {0}, old[TILE], factor[TILE], *u = state->rows.scale + i;
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
    _Alignas(64) double entry[BLOCK];
    const int64_t rows = args->M.col_stride == 1 ? 1 : TILE; /* whole rows where M has them */
    for (int64_t i = i0; i < i1; i += rows)
        for (int64_t j = 0; j < args->n; j += BLOCK)
            for (int64_t r = i; r < i1 && r < i + rows; r++) {
                int64_t count = args->n - j < BLOCK ? args->n - j : BLOCK;
                entries(args, r, j, count, REAL_MIN_LOG, 0, entry);
                write_block((real *)args->out + r * args->ld + j, entry, count, args->nontemporal);
            }
}
#endif
