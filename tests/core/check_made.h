/* check_made.h - passes that make rows from M, tile by tile (MADE), have the same bits as passes over the K that
 * build_kernel wrote from this M (STORED); also passes over stored pairs.
 */
#pragma once
#include "check_passes.h"
#include "check_streams.h"

/* sums, then scale and marginal of the rows */
static void keep_rows(const mapuot_state *state, double *out) {
    const int64_t len = padded(state->n) + SCALARS, m = state->m;
    memcpy(out, state->sums, (size_t)len * sizeof(double));
    memcpy(out + len, state->rows.scale, (size_t)m * sizeof(double));
    memcpy(out + len + m, state->rows.marginal, (size_t)m * sizeof(double));
}

static void check_made(int64_t m, int64_t n, int layout, int kind, mapuot_pool *pool) {
    const int from = buffer_count, threads = mapuot_pool_threads(pool);
    const int64_t len = padded(n) + SCALARS + 2 * m;
    const problem p = new_problem(m, n, layout % PAIRS);
    mapuot_state stored = new_state(m, n, MAPUOT_F64, kind, MAPUOT_KL, 1, threads), made;
    double *want = vector(len, 0), *got = vector(len, 0);
    stored.limits.reg = p.reg;
    stored.limits.inv_reg = 1 / p.reg;
    mapuot_build_kernel(pool, m, n, p.M, p.c, p.reg, p.alpha, p.beta, 0, MAPUOT_F64, stored.kernel, stored.ld);
    made = stored;
    made.dtype = MAPUOT_F32; /* any storage type will do: no K is stored */
    made.kernel = NULL;
    made.exact = 1;
    made.M = p.M;
    made.c = p.c;
    made.alpha = p.alpha;
    made.beta = p.beta;
    made.tile = vector(threads * TILE * made.ld, 0);
    for (int turn = 0; turn < 4; turn++) {
        const int form = turn < 3 ? WIDE : PARTS;
        stored.tile_rows = made.tile_rows = 2 << turn % 3;
        stored.progress.passes = made.progress.passes = turn + m;
        run_pass(pool, &stored, form);
        keep_rows(&stored, want);
        run_pass(pool, &made, form);
        keep_rows(&made, got);
        for (int64_t k = 0; k < len; k++)
            expect(form == WIDE ? "made against stored" : "made against stored, in parts", k, got[k], want[k], 0, 0);
    }
    release(from);
}

/* a pass over the K of stored pairs, and the products of its rows */
static void run_pairs(int64_t m, int64_t n, int kind, int form, mapuot_pool *pool) {
    const mapuot_dtype dtype = (mapuot_dtype)(form % 2);
    const int64_t len = padded(n) + SCALARS + 2 * m;
    const problem p = new_problem(m, n, PAIRS + (int)(m % 2));
    const double rtol = 1e-12 + 2 * rounding[dtype] + narrow[dtype];
    mapuot_state state = new_state(m, n, dtype, kind, MAPUOT_KL, 1, mapuot_pool_threads(pool));
    double *out = written(vector(2 * len, 0), MAPUOT_F64, 10 * rtol, 10 * rtol * (double)m);
    double *const notes[] = {state.sums, state.partial, state.rows.scale, state.rows.log_scale, state.rows.marginal};
    for (int k = 0; k < 5; k++) written(notes[k], NOTES, 0, 0);
    state.kernel = written(guarded((size_t)entries_of(&p, 0) * width[dtype], width[dtype]), dtype, rtol, 2.5e-38);
    state.M = p.M;
    mapuot_build_kernel(pool, m, n, p.M, p.c, p.reg, p.alpha, p.beta, 0, dtype, state.kernel, 0);
    mapuot_row_pass(pool, &state);
    keep_rows(&state, out);
    mapuot_row_dots(pool, &state);
    keep_rows(&state, out + len);
}
