/* check_passes.h - row_pass, its products and prox, narrow_pass, plan_pass and the sweeps of finish_pass, for every penalty;
 * passes in other orders, and by workers of other speeds, against those as they are.
 */
#pragma once
#include "check_buffers.h"

enum { MIXED_RHO = MAPUOT_RANGE + 1, SIDE_KINDS }; /* KL with some rho infinite has no vector form */
enum { WIDE, NARROW, IN_PLACE, PARTS, FORMS };

static void new_side(mapuot_side *side, int64_t len, int64_t size, int kind, double reg, size_t skew) {
    const mapuot_penalty penalty = kind == MIXED_RHO ? MAPUOT_KL : (mapuot_penalty)kind;
    double *weight = vector(size, skew), *rho = vector(size, skew), *absorbed = vector(size, skew);
    double *upper = vector(size, skew), *fi = vector(size, skew), *base = vector(size, skew);
    *side = (mapuot_side){.len = len, .penalty = penalty, .weight = weight, .rho = rho, .absorbed = absorbed};
    side->log_scale = vector(size, skew);
    side->scale = vector(size, skew);
    side->marginal = vector(size, skew);
    if (kind == MAPUOT_RANGE) side->upper = upper;
    if (kind <= MAPUOT_BALANCED) {
        side->fi = fi;
        side->base = base;
    }
    for (int64_t i = 0; i < size; i++) {
        const int out = i >= len || i % 5 == 3;
        weight[i] = out ? 0.0 : uniform(0.1, 2.0);
        rho[i] = i >= len ? 1.0 : kind == MAPUOT_RANGE ? uniform(0.5, 0.9) : uniform(0.1, 3.0);
        if (kind == MAPUOT_BALANCED || (kind == MIXED_RHO && i % 2)) rho[i] = i >= len ? 1.0 : INFINITY;
        upper[i] = uniform(1.0, 1.5);
        absorbed[i] = out ? INFINITY : uniform(-2, 2);
        fi[i] = isinf(rho[i]) ? 1.0 : rho[i] / (rho[i] + reg);
        base[i] = out ? (i >= len ? 0.0 : -INFINITY) : fi[i] * log(weight[i]) - (1 - fi[i]) * absorbed[i];
        side->log_scale[i] = out ? 0.0 : uniform(-1, 1);
        side->scale[i] = out ? 0.0 : exp(side->log_scale[i] - absorbed[i]);
        side->marginal[i] = 0.0;
    }
}

static mapuot_state new_state(int64_t m, int64_t n, mapuot_dtype dtype, int rows, int cols, int anderson_depth,
                              int threads) {
    const int64_t np = padded(n);
    mapuot_state state = {.m = m, .n = n, .ld = np + 16 * (m % 2), .dtype = dtype};
    state.limits = (mapuot_limits){
        .reg = 0.25, .inv_reg = 4.0, .fi_rows = 0.8, .rate_cols = 0.25, .tol = -1, .tol_gap = -1, .missed = 1};
    state.progress = (mapuot_progress){.shift = 0.7, .best_dual = -INFINITY, .best_error = INFINITY, .passes = m + n};
    new_side(&state.rows, m, m, rows, state.limits.reg, 8);
    new_side(&state.cols, n, np, cols, state.limits.reg, 0);
    state.kernel = guarded((size_t)(m * state.ld) * width[dtype], 0);
    for (int64_t k = 0; k < m * state.ld; k++) {
        const int64_t i = k / state.ld, j = k % state.ld;
        if (j < np) /* every seventh row is dead */
            store(state.kernel, dtype, k, j >= n || i % 7 == 5 ? 0.0 : uniform(0.01, 1));
    }
    state.sums = vector(np + SCALARS, 0);
    state.partial = vector(threads * (np + SCALARS), 0);
    state.work = vector(3 * np, 0);
    state.history = vector(mapuot_history(anderson_depth, n), 0);
    for (int64_t k = 0; k < 3 * np; k++) state.work[k] = 0.0;
    for (int64_t k = 0; k < (2 * anderson_depth + 2) * np; k++) state.history[k] = uniform(-1, 1);
    state.limits.anderson_depth = anderson_depth;
    return state;
}

static int has_form(mapuot_dtype dtype, int form) {
    return form != NARROW || mapuot_active_kernels()->dtype[dtype]->narrow_pass != NULL;
}

static void run_pass(mapuot_pool *pool, mapuot_state *state, int form) {
    if (form != PARTS) {
        mapuot_row_pass(pool, state);
        return;
    }
    mapuot_row_dots(pool, state);
    mapuot_row_prox(pool, state);
}

/* tiles of every height, plain and piped, upwards and downwards: the sums agree, plain and piped bit for bit */
static void check_ways(mapuot_state *state, mapuot_pool *pool) {
    const int64_t len = padded(state->n) + SCALARS;
    double *plain = calloc((size_t)len, sizeof *plain);
    for (int down = 0; down < 2; down++, state->progress.passes++)
        for (int rows = 2; rows <= TILE; rows *= 2) {
            state->tile_rows = rows;
            state->piped = 0;
            mapuot_row_pass(pool, state);
            memcpy(plain, state->sums, (size_t)len * sizeof *plain);
            state->piped = 1;
            mapuot_row_pass(pool, state);
            for (int64_t j = 0; j < len; j++) expect("piped against plain", j, state->sums[j], plain[j], 0, 0);
        }
    free(plain);
}

/* rows shared by speed, the last worker a slow one that makes its pass twice: the same u, and sums but for their order */
static void check_shares(mapuot_state *state, mapuot_pool *pool) {
    const int threads = mapuot_pool_threads(pool);
    const int64_t np = padded(state->n), len = np + SCALARS, m = state->m, tiles = (m + TILE - 1) / TILE;
    const int64_t ranged = (tiles - tiles / 8) * TILE;
    const double rtol = state->progress.narrow ? 1e-6 : 1e-14;
    mapuot_share shares[8] = {{0}};
    double *even = calloc((size_t)(len + m), sizeof *even);
    mapuot_row_pass(pool, state);
    memcpy(even, state->sums, (size_t)len * sizeof *even);
    memcpy(even + len, state->rows.scale, (size_t)m * sizeof *even);
    state->shares = shares;
    mapuot_pool_slow(pool, threads - 1, 2);
    for (int turn = 0; turn < 4; turn++, state->progress.passes++) {
        int64_t rows = 0;
        for (int t = 0; t < threads && turn > 1; t++) /* first run: no measured pace; second: the pace of one pass */
            shares[t].pace = t < threads - 1 ? 1.0 : turn;
        mapuot_row_pass(pool, state);
        for (int t = 0; t < threads; t++) rows += shares[t].rows;
        expect("rows of all workers", turn, (double)rows, (double)m, 0, 0);
        if (turn > 1 && threads > 1 && tiles >= 8)
            expect("first row of a slow worker", turn, (double)shares[threads - 1].first,
                   (double)ranged * (threads - 1) / (threads - 1 + 1.0 / turn), 0, TILE);
        for (int64_t j = 0; j < len; j++)
            expect("sums of uneven shares", j, state->sums[j], even[j], rtol,
                   j == np + ROW_DUAL ? rtol * (double)m : 0);
        for (int64_t i = 0; i < m; i++) expect("u of uneven shares", i, state->rows.scale[i], even[len + i], 0, 0);
    }
    mapuot_pool_slow(pool, threads - 1, 1);
    state->shares = NULL;
    free(even);
}

/* a pass of one form; narrow sums of vectors are compared with wide ones of scalar kernels, which have no others */
static void run_rows(int64_t m, int64_t n, int kind, int form, mapuot_pool *pool) {
    const mapuot_dtype dtype = (mapuot_dtype)(form / FORMS);
    const int64_t np = padded(n), threads = mapuot_pool_threads(pool);
    const double entries = 3 * rounding[dtype] + 1e-12;
    const double rtol = form % FORMS == NARROW ? 3e-6 : form % FORMS == IN_PLACE ? 1e-12 + 2 * entries : 1e-12;
    mapuot_state state = new_state(m, n, dtype, kind, MAPUOT_KL, 1, (int)threads);
    form = has_form(dtype, form % FORMS) ? form % FORMS : WIDE;
    state.limits.in_place = form == IN_PLACE;
    state.progress.narrow = form == NARROW;
    state.narrow_v = written(guarded((size_t)np * sizeof(float), 0), NOTES, 0, 0);
    state.run = written(guarded((size_t)(np * threads) * sizeof(float), 0), NOTES, 0, 0);
    memset(state.run, 0, (size_t)(np * threads) * sizeof(float));
    state.tile_rows = 2 << (m + n) % 3;
    state.piped = (int)(m % 2);
    for (int64_t j = 0; j < np; j++) state.history[j] = j < n ? uniform(0.5, 2.0) : 0.0;
    written(state.partial, NOTES, 0, 0);
    written(state.sums, MAPUOT_F64, rtol, 10 * rtol * (double)m);
    written(state.rows.scale, MAPUOT_F64, rtol, 0);
    written(state.rows.marginal, MAPUOT_F64, rtol, 0);
    written(state.rows.log_scale, MAPUOT_F64, 0, rtol);
    if (form == IN_PLACE) written(state.kernel, dtype, entries, 0);
    if (form < IN_PLACE) {
        check_ways(&state, pool);
        check_shares(&state, pool);
    }
    run_pass(pool, &state, form);
}

/* K v of a symmetric K with no number before the line of a row's diagonal, upwards and downwards, against plain loops */
static void check_half(int64_t n, mapuot_dtype dtype, int form, mapuot_pool *pool) {
    const int from = buffer_count;
    const int64_t np = padded(n), runs = np * mapuot_pool_threads(pool);
    mapuot_state state = new_state(n, n, dtype, MAPUOT_KL, MAPUOT_KL, 1, mapuot_pool_threads(pool));
    state.limits.symmetric = 1;
    state.progress.narrow = has_form(dtype, form) && form == NARROW;
    state.narrow_v = guarded((size_t)np * sizeof(float), 0);
    state.run = memset(guarded((size_t)runs * sizeof(float), 0), 0, (size_t)runs * sizeof(float));
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++)
            store(state.kernel, dtype, i * state.ld + j,
                  j < i / PAD * PAD ? NAN : stored(state.kernel, dtype, j * state.ld + i));
    for (int down = 0; down < 2; down++, state.progress.passes++) {
        mapuot_row_pass(pool, &state);
        for (int64_t i = 0; i < n; i++) {
            double s = 0.0;
            for (int64_t j = 0; j < n; j++)
                s += stored(state.kernel, dtype, i < j ? i * state.ld + j : j * state.ld + i) * state.cols.scale[j];
            expect("half of K v", i, state.sums[i], s, state.progress.narrow ? 3e-6 : 1e-12, 0);
        }
    }
    release(from);
}

/* the four sweeps in order, cut in two at a random place */
static void run_sweeps(int64_t m, int64_t n, int kind, int form, mapuot_pool *pool) {
    const int64_t np = padded(n), cut = np / PAD / 2 * PAD;
    const sweep_kernels *table = mapuot_active_kernels()->sweeps;
    const sweep_fn sweeps[] = {table->marginal, table->prox, table->difference, table->advance};
    sweep_args args = {.offset = -0.05, .common = 0.2, .slot = n % 3 ? 1 : -1, .gamma = {0.5, -0.2, 0.1}};
    double *out = written(vector(4 * SWEEP_OUT, 0), MAPUOT_F64, 1e-12, 1e-13);
    args.depth = 2 + n % (MAX_DEPTH - 1);
    args.kappa = exp(args.offset);
    args.base = 0.7; /* the shift. The columns differ in rho: no common factor can shift q. */
    args.q_factor = 1;
    mapuot_state state = new_state(m, n, MAPUOT_F64, MAPUOT_KL, kind, MAX_DEPTH, mapuot_pool_threads(pool));
    state.limits.in_place = form;
    double *const numbers[] = {state.work, state.history, state.cols.log_scale, state.cols.scale, state.cols.marginal};
    for (int k = 0; k < 5; k++) written(numbers[k], MAPUOT_F64, 1e-12, k < 3 ? 1e-13 : 0);
    for (int64_t j = 0; j < np; j++) state.sums[j] = j >= n || j % 11 == 7 ? 0.0 : uniform(0.1, 2);
    memset(out, 0, 4 * SWEEP_OUT * sizeof *out);
    for (int q = 0; q < 4; q++) {
        sweeps[q](&state, &args, 0, cut, out + q * SWEEP_OUT);
        sweeps[q](&state, &args, cut, np, out + q * SWEEP_OUT);
    }
    for (int64_t j = 0; j < np; j++)
        expect("left out", j, isinf(state.cols.absorbed[j]) && state.cols.scale[j] != 0, 0, 0, 0);
}
