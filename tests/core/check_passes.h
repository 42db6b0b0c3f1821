/* check_passes.h - row_pass, its products and prox, narrow_pass and plan_pass against plain long double loops and, for every
 * penalty, the scalar prox of common/penalty.h, which test_penalties.py holds to its definition; the sweeps of finish_pass
 * against their scalar twins.
 */
#ifndef CHECK_PASSES_H
#define CHECK_PASSES_H
#include "check_buffers.h"
#include "common/column.h"

enum { MIXED_RHO = MAPUOT_RANGE + 1, SIDE_KINDS }; /* KL with some rho infinite has no vector form */
enum { WIDE, NARROW, IN_PLACE, PARTS, FORMS };

static void new_side(mapuot_side *side, int64_t len, int64_t size, int kind, double reg, size_t skew)
{
    const mapuot_penalty penalty = kind == MIXED_RHO ? MAPUOT_KL : (mapuot_penalty)kind;
    double *weight = vector(size, skew), *rho = vector(size, skew), *absorbed = vector(size, skew);
    double *upper = vector(size, skew), *fi = vector(size, skew), *base = vector(size, skew);
    *side = (mapuot_side){.len = len, .penalty = penalty, .weight = weight, .rho = rho, .absorbed = absorbed};
    side->log_scale = vector(size, skew);
    side->scale = vector(size, skew);
    side->marginal = vector(size, skew);
    if (kind == MAPUOT_RANGE)
        side->upper = upper;
    if (kind <= MAPUOT_BALANCED) {
        side->fi = fi;
        side->base = base;
    }
    for (int64_t i = 0; i < size; i++) {
        const int out = i >= len || i % 5 == 3;
        weight[i] = out ? 0.0 : uniform(0.1, 2.0);
        rho[i] = i >= len ? 1.0 : kind == MAPUOT_RANGE ? uniform(0.5, 0.9) : uniform(0.1, 3.0);
        if (kind == MAPUOT_BALANCED || (kind == MIXED_RHO && i % 2))
            rho[i] = i >= len ? 1.0 : INFINITY;
        upper[i] = uniform(1.0, 1.5);
        absorbed[i] = out ? INFINITY : uniform(-2, 2);
        fi[i] = isinf(rho[i]) ? 1.0 : rho[i] / (rho[i] + reg);
        base[i] = out ? (i >= len ? 0.0 : -INFINITY) : fi[i] * log(weight[i]) - (1 - fi[i]) * absorbed[i];
        side->log_scale[i] = out ? 0.0 : uniform(-1, 1);
        side->scale[i] = out ? 0.0 : exp(side->log_scale[i] - absorbed[i]);
        side->marginal[i] = 0.0;
    }
}

static mapuot_state new_state(int64_t m, int64_t n, mapuot_dtype dtype, int rows, int cols, int memory, int threads)
{
    const int64_t np = padded(n);
    mapuot_state state = {.m = m, .n = n, .ld = np + 16 * (m % 2), .dtype = dtype};
    state.limits =
        (mapuot_limits){.reg = 0.25, .inv_reg = 4.0, .fi_rows = 0.8, .rate_cols = 0.25, .tol = -1, .tol_gap = -1};
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
    state.history = vector(mapuot_history(memory, n), 0);
    for (int64_t k = 0; k < 3 * np; k++)
        state.work[k] = 0.0;
    for (int64_t k = 0; k < (2 * memory + 2) * np; k++)
        state.history[k] = uniform(-1, 1);
    state.limits.memory = memory;
    return state;
}

/* one row, given its kernel sum s; adds to the expected row scalars */
static double expect_row(const mapuot_state *state, int64_t i, double s, double rtol, double *scalars)
{
    const mapuot_side *rows = &state->rows;
    const double d = rows->absorbed[i], t = rows->weight[i], rho = rows->rho[i], reg = state->limits.reg;
    const double upper = rows->upper ? rows->upper[i] : 0.0, log_s = log(s) - d - state->progress.shift;
    const int out = isinf(d), dead = !out && s < DBL_MIN, penalty = (int)rows->penalty;
    double log_u = out || dead ? 0.0 : prox_log(penalty, log_s, t, log(t), rho, upper, reg);
    double u = out || dead ? 0.0 : exp(log_u - d - state->progress.shift);
    expect("u", i, rows->scale[i], u, rtol, 0);
    expect("r", i, rows->marginal[i], u * s, rtol, 0);
    if (u > 0)
        expect("log u", i, rows->log_scale[i], log_u - d - state->progress.shift, 0, rtol);
    scalars[ROW_SCALE] += u;
    scalars[ROW_DEAD] += dead;
    scalars[ROW_DUAL] += u > 0 ? dual_term(penalty, reg * log_u, t, rho, upper) : 0.0;
    if (dead && rows->fi && rows->penalty == MAPUOT_KL) /* no mass leaves: the price is as high as it may be */
        scalars[ROW_DUAL] += rho * t;
    return u;
}

static int has_form(mapuot_dtype dtype, int form)
{
    return form != NARROW || mapuot_active_kernels()->dtype[dtype]->narrow_pass != NULL;
}

static void run_pass(mapuot_pool *pool, mapuot_state *state, int form)
{
    if (form != PARTS) {
        mapuot_row_pass(pool, state);
        return;
    }
    mapuot_row_dots(pool, state);
    mapuot_row_prox(pool, state);
}

/* tiles of every height, plain and piped, upwards and downwards: the sums agree, plain and piped bit for bit */
static void check_ways(mapuot_state *state, mapuot_pool *pool)
{
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
            for (int64_t j = 0; j < len; j++)
                expect("piped against plain", j, state->sums[j], plain[j], 0, 0);
        }
    free(plain);
}

/* rows shared by speed, the last worker a slow one that makes its pass twice: the same u, and sums but for their order */
static void check_shares(mapuot_state *state, mapuot_pool *pool)
{
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
        for (int t = 0; t < threads && turn > 1; t++) /* before, their own: none, then that of one pass */
            shares[t].pace = t < threads - 1 ? 1.0 : turn;
        mapuot_row_pass(pool, state);
        for (int t = 0; t < threads; t++)
            rows += shares[t].rows;
        expect("rows of all workers", turn, (double)rows, (double)m, 0, 0);
        if (turn > 1 && threads > 1 && tiles >= 8)
            expect("first row of a slow worker", turn, (double)shares[threads - 1].first,
                   (double)ranged * (threads - 1) / (threads - 1 + 1.0 / turn), 0, TILE);
        for (int64_t j = 0; j < len; j++)
            expect("sums of uneven shares", j, state->sums[j], even[j], rtol,
                   j == np + ROW_DUAL ? rtol * (double)m : 0);
        for (int64_t i = 0; i < m; i++)
            expect("u of uneven shares", i, state->rows.scale[i], even[len + i], 0, 0);
    }
    mapuot_pool_slow(pool, threads - 1, 1);
    state->shares = NULL;
    free(even);
}

static void check_pass(int64_t m, int64_t n, mapuot_dtype dtype, int kind, int form, mapuot_pool *pool)
{
    const int64_t np = padded(n), cells = m * (np + 16);
    const int from = buffer_count, in_place = form == IN_PLACE;
    const double step = in_place ? 3 * rounding[dtype] : 0, rtol = form == NARROW ? 3e-6 : 1e-12 + 2 * step;
    mapuot_state state = new_state(m, n, dtype, kind, MAPUOT_KL, 1, mapuot_pool_threads(pool));
    double *before = vector(cells, 0), *u_old = vector(m, 0), scalars[SCALARS] = {0};
    long double *sums = calloc((size_t)np, sizeof *sums);
    state.limits.in_place = in_place;
    state.progress.narrow = form == NARROW;
    state.narrow_v = guarded((size_t)np * sizeof(float), 0);
    state.run = guarded((size_t)(np * mapuot_pool_threads(pool)) * sizeof(float), 0);
    memset(state.run, 0, (size_t)(np * mapuot_pool_threads(pool)) * sizeof(float));
    state.tile_rows = 2 << (m + n) % 3;
    state.piped = (int)(m % 2);
    for (int64_t k = 0; k < m * state.ld; k++)
        before[k] = stored(state.kernel, dtype, k);
    for (int64_t j = 0; j < np; j++)
        state.history[j] = j < n ? uniform(0.5, 2.0) : 0.0;
    memcpy(u_old, state.rows.scale, (size_t)m * sizeof(double));
    if (form < IN_PLACE) {
        check_ways(&state, pool);
        check_shares(&state, pool);
    }
    run_pass(pool, &state, form);
    for (int64_t i = 0; i < m; i++) {
        const double *factor = in_place ? state.history : state.cols.scale;
        long double s = 0;
        for (int64_t j = 0; j < n; j++)
            s += (long double)before[i * state.ld + j] * factor[j];
        if (in_place)
            s = u_old[i] > 0 ? s / u_old[i] : 0;
        double u = expect_row(&state, i, (double)s, rtol, scalars), grown = u_old[i] > 0 ? u / u_old[i] : 0.0;
        for (int64_t j = 0; j < state.ld; j++) {
            double p = before[i * state.ld + j], q = in_place && j < np ? p * factor[j] * grown : p;
            double got = stored(state.kernel, dtype, i * state.ld + j);
            sums[j < np ? j : 0] += j < np ? (in_place ? q : (long double)u * p) : 0;
            if (j < np)
                expect(in_place ? "P" : "K", i * n + j, got, q, in_place ? 1e-12 + step : 0, 0);
            else
                expect("untouched behind the row", j, isnan(got), 1, 0, 0);
        }
    }
    for (int64_t j = 0; j < np; j++)
        expect(in_place ? "s" : "K^T u", j, state.sums[j], form == PARTS ? 0.0 : (double)sums[j], rtol, 0);
    expect("dual of the rows", 0, state.sums[np + ROW_DUAL], scalars[ROW_DUAL], 0, rtol * 10 * (double)m);
    expect("sum of u", 0, state.sums[np + ROW_SCALE], scalars[ROW_SCALE], rtol, 0);
    expect("dead rows", 0, state.sums[np + ROW_DEAD], scalars[ROW_DEAD], 0, 0);
    free(sums);
    release(from);
}

/* what sweep_prox made of KL or balanced columns, against the scalar rule that the CUDA core and other penalties use */
static void check_columns(const mapuot_state *state, const sweep_args *args, const double *found)
{
    const mapuot_side *cols = &state->cols;
    const int64_t np = padded(state->n);
    const double reg = state->limits.reg;
    double gap = 0, hard = 0, dual = 0, next = 0;
    for (int64_t j = 0; j < state->n; j++) {
        const double b = cols->weight[j], rho = cols->rho[j], k = reg / rho, sum = state->sums[j];
        const mapuot_column c = {cols->absorbed[j], b, log(b), rho, 0, k, 1 / (1 + k), cols->log_scale[j],
                                 cols->scale[j]};
        if (isinf(c.absorbed))
            continue;
        const mapuot_column_out want =
            column_values((int)cols->penalty, &c, sum, log(fmax(sum, TINY)), state->progress.shift, args->offset, reg);
        expect("image of a column", j, state->work[2 * np + j], want.image, 1e-13, 1e-13);
        expect("marginal of a column", j, cols->marginal[j], want.marginal, 1e-13, 0);
        gap += want.gap;
        hard += want.hard;
        dual += want.dual;
        next += want.next;
    }
    expect("gap of columns", 0, found[SUM_GAP], gap, 1e-12, 1e-13);
    expect("hard columns", 0, found[SUM_HARD], hard, 1e-12, 1e-13);
    expect("dual of columns", 0, found[SUM_DUAL], dual, 1e-12, 1e-13);
    expect("image's b e^(-k G)", 0, found[SUM_NEXT], next, 1e-12, 1e-13);
}

/* the four sweeps in order, cut in two at a random place, against the scalar ones on the same numbers */
static void check_sweeps(int64_t n, int kind, const char *isa)
{
    const int64_t np = padded(n), cut = np / PAD / 2 * PAD;
    const int from = buffer_count, memory = MAX_MEMORY;
    const uint64_t start = seed;
    mapuot_state state[2];
    double out[2][4][SWEEP_OUT] = {{{0}}};
    sweep_args args = {.offset = -0.05, .common = 0.2, .slot = n % 3 ? 1 : -1, .gamma = {0.5, -0.2, 0.1}};
    args.depth = 2 + n % (MAX_MEMORY - 1);
    args.kappa = exp(args.offset);
    args.base = 0.7; /* the shift: columns here differ in rho, so no one factor takes q there */
    args.q_factor = 1;
    for (int k = 0; k < 2; k++) {
        mapuot_set_isa(k ? isa : "scalar");
        const sweep_kernels *table = mapuot_active_kernels()->sweeps;
        const sweep_fn sweeps[] = {table->marginal, table->prox, table->difference, table->advance};
        seed = start;
        state[k] = new_state(1, n, MAPUOT_F64, MAPUOT_KL, kind, memory, 1);
        state[k].limits.in_place = n % 2;
        for (int64_t j = 0; j < np; j++)
            state[k].sums[j] = j >= n || j % 11 == 7 ? 0.0 : uniform(0.1, 2);
        for (int q = 0; q < 4; q++) {
            sweeps[q](&state[k], &args, 0, cut, out[k][q]);
            sweeps[q](&state[k], &args, cut, np, out[k][q]);
            if (q == 1 && state[k].cols.fi)
                check_columns(&state[k], &args, out[k][q]);
        }
    }
    for (int q = 0; q < 4; q++)
        for (int i = 0; i < SWEEP_OUT; i++)
            expect("sweep result", 100 * q + i, out[1][q][i], out[0][q][i], 1e-12, 1e-13);
    for (int64_t j = 0; j < 3 * np; j++)
        expect("sweep: work", j, state[1].work[j], state[0].work[j], 1e-13, 1e-13);
    for (int64_t j = 0; j < (2 * memory + 2) * np; j++)
        expect("sweep: history", j, state[1].history[j], state[0].history[j], 1e-12, 1e-13);
    for (int64_t j = 0; j < np; j++) {
        expect("sweep: log v", j, state[1].cols.log_scale[j], state[0].cols.log_scale[j], 1e-13, 1e-13);
        expect("sweep: v", j, state[1].cols.scale[j], state[0].cols.scale[j], 1e-12, 0);
        expect("sweep: s", j, state[1].cols.marginal[j], state[0].cols.marginal[j], 1e-13, 0);
        expect("left out", j, isinf(state[1].cols.absorbed[j]) && state[1].cols.scale[j] != 0, 0, 0, 0);
    }
    release(from);
}
#endif
