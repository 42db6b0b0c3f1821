/* solver.c - the pass as a whole: row_pass over the pool, the scalar work between the sweeps of finish_pass,
 * Anderson's small system, the certificate and the stopping rule.
 *
 * One pass is row_pass (O(mn), reads K once) and finish_pass (O(n)).  Twins: backends/reference.py, src_cuda/.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

#define SCALE_LIMIT 1e150 /* sums of u or v beyond it: rebuild K before anything overflows */
#define NARROW_LIMIT 1e20 /* and beyond it, or below its inverse, float32 runs are not safe */
enum { STALL_PASSES = 250, NARROW_PATIENCE = 20, PARALLEL_SWEEP = 16384, MAX_THREADS = 1024 };

int mapuot_scalars(void) { return SCALARS; }

const char *mapuot_status_text(int status)
{
    switch (status) {
    case MAPUOT_RUNNING:
        return "running";
    case MAPUOT_CONVERGED:
        return "converged";
    case MAPUOT_ABSORB:
        return "absorb";
    case MAPUOT_STALLED:
        return "stalled";
    case MAPUOT_NOT_FINITE:
        return "not finite";
    case MAPUOT_NO_MEMORY:
        return "out of memory";
    default:
        return "bad argument";
    }
}

/* ---- row_pass ---- */

static int64_t sums_len(const mapuot_state *state) { return padded(state->n) + SCALARS; }

static mapuot_matrix rows_of(mapuot_matrix M, int64_t i)
{
    const int64_t width = M.dtype == MAPUOT_F64 ? 8 : 4;
    M.data = M.data ? (const char *)M.data + i * M.row_stride * width : NULL;
    return M;
}

/* the rows from i on */
static mapuot_side rows_from(mapuot_side rows, int64_t i)
{
    rows.weight += i;
    rows.rho += i;
    rows.absorbed += i;
    rows.log_scale += i;
    rows.scale += i;
    rows.marginal += i;
    if (rows.upper)
        rows.upper += i;
    if (rows.fi) {
        rows.fi += i;
        rows.base += i;
    }
    return rows;
}

/* row_pass on rows of K that are made from M in float64 and used at once */
static void exact_rows(const mapuot_state *state, double *tile, int64_t i0, int64_t i1, double *sums)
{
    const dtype_kernels *k = &mapuot_active_kernels()->dtype[MAPUOT_F64];
    stream_args args = {.n = state->n, .inv_reg = 1.0 / state->reg, .beta = state->beta, .out = tile, .ld = state->ld};
    mapuot_state part = *state;
    part.dtype = MAPUOT_F64;
    part.kernel = tile;
    for (int64_t i = i0; i < i1; i += TILE) {
        args.m = part.m = i1 - i < TILE ? i1 - i : TILE;
        args.M = rows_of(state->M, i);
        args.c = rows_of(state->c, i);
        args.alpha = state->alpha + i;
        part.rows = rows_from(state->rows, i);
        k->build_kernel(&args, 0, part.m);
        k->row_pass(&part, 0, part.m, sums);
    }
}

static void rows_task(void *context, int thread, int threads)
{
    const mapuot_state *state = context;
    const dtype_kernels *k = &mapuot_active_kernels()->dtype[state->dtype];
    const pass_fn pass = state->in_place ? k->plan_pass : state->narrow ? k->narrow_pass : k->row_pass;
    const int64_t i0 = first_row(state->m, thread, threads), i1 = first_row(state->m, thread + 1, threads);
    double *sums = threads == 1 ? state->sums : state->partial + thread * sums_len(state);
    memset(sums, 0, (size_t)sums_len(state) * sizeof(double));
    if (state->exact)
        exact_rows(state, state->tile + thread * TILE * state->ld, i0, i1, sums);
    else
        pass(state, i0, i1, sums);
}

/* sums = the threads' sums in order, so that the result does not depend on timing */
static void reduce_task(void *context, int thread, int threads)
{
    const mapuot_state *state = context;
    const int64_t len = sums_len(state), lines = (len + 7) / 8;
    const int64_t j0 = lines * thread / threads * 8, j1 = lines * (thread + 1) / threads * 8;
    for (int64_t j = j0; j < j1 && j < len; j++) {
        double sum = 0.0;
        for (int t = 0; t < threads; t++)
            sum += state->partial[t * len + j];
        state->sums[j] = sum;
    }
}

/* sums of one pass over the rows; returns the sum of u */
static double sum_rows(mapuot_pool *pool, mapuot_state *state)
{
    pool_run(pool, rows_task, state);
    if (mapuot_pool_threads(pool) > 1)
        pool_run(pool, reduce_task, state);
    return state->sums[padded(state->n) + ROW_SCALE];
}

static int in_range(double x) { return x <= NARROW_LIMIT && x >= 1 / NARROW_LIMIT; }

/* v in float32; 0 where it comes too near the ends of that range */
static int narrow_scale(const mapuot_state *state)
{
    double largest = 0.0;
    for (int64_t j = 0; j < padded(state->n); j++) {
        largest = fmax(largest, state->cols.scale[j]);
        state->narrow_v[j] = (float)state->cols.scale[j];
    }
    return in_range(largest);
}

int mapuot_row_pass(mapuot_pool *pool, mapuot_state *state)
{
    const dtype_kernels *k = &mapuot_active_kernels()->dtype[state->dtype];
    mapuot_state wide = *state;
    if ((state->in_place && !k->plan_pass) || (state->narrow && !k->narrow_pass))
        return MAPUOT_BAD_ARGUMENT;
    if (state->narrow && narrow_scale(state) && in_range(sum_rows(pool, state)))
        return MAPUOT_RUNNING;
    wide.narrow = 0;
    sum_rows(pool, &wide);
    return MAPUOT_RUNNING;
}

/* ---- finish_pass ---- */

typedef struct {
    const mapuot_state *state;
    const sweep_args *args;
    sweep_fn sweep;
    double out[MAX_THREADS][SWEEP_OUT];
} sweep_job;

static void sweep_task(void *context, int thread, int threads)
{
    sweep_job *job = context;
    const int64_t blocks = padded(job->state->n) / PAD;
    double out[SWEEP_OUT] = {0};
    job->sweep(job->state, job->args, blocks * thread / threads * PAD, blocks * (thread + 1) / threads * PAD, out);
    memcpy(job->out[thread], out, sizeof out);
}

/* one sweep over all columns; residual says that out[0] is a maximum */
static void run_sweep(mapuot_pool *pool, const mapuot_state *state, const sweep_args *args, sweep_fn sweep,
                      int residual, double *out)
{
    const int64_t np = padded(state->n);
    const int threads = mapuot_pool_threads(pool);
    memset(out, 0, SWEEP_OUT * sizeof(double));
    if (np < PARALLEL_SWEEP || threads == 1 || threads > MAX_THREADS) {
        sweep(state, args, 0, np, out);
        return;
    }
    sweep_job job = {.state = state, .args = args, .sweep = sweep};
    pool_run(pool, sweep_task, &job);
    for (int t = 0; t < threads; t++)
        for (int k = 0; k < SWEEP_OUT; k++)
            out[k] = k == 0 && residual ? fmax(out[k], job.out[t][k]) : out[k] + job.out[t][k];
}

/* solve A x = b, n <= MAX_MEMORY, symmetric positive definite after the ridge: Cholesky */
static void solve_small(int n, double A[MAX_MEMORY][MAX_MEMORY], double *x)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j <= i; j++) {
            double sum = A[i][j];
            for (int k = 0; k < j; k++)
                sum -= A[i][k] * A[j][k];
            A[i][j] = i == j ? sqrt(fmax(sum, DBL_MIN)) : sum / A[j][j];
        }
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i; k++)
            x[i] -= A[i][k] * x[k];
        x[i] /= A[i][i];
    }
    for (int i = n - 1; i >= 0; i--) {
        for (int k = i + 1; k < n; k++)
            x[i] -= A[k][i] * x[k];
        x[i] /= A[i][i];
    }
}

/* gamma = argmin |F - sum gamma_i dF_i|: normal equations, columns normalised, ridge 1e-10 */
static void anderson_weights(mapuot_state *state, const double *dot, const double *rhs, sweep_args *args)
{
    double A[MAX_MEMORY][MAX_MEMORY], scale[MAX_MEMORY];
    const int n = args->depth, slot = args->slot;
    for (int i = 0; i < n; i++)
        state->gram[8 * i + slot] = state->gram[8 * slot + i] = dot[i];
    for (int i = 0; i < n; i++)
        scale[i] = 1.0 / sqrt(fmax(state->gram[9 * i], DBL_MIN));
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++)
            A[i][j] = state->gram[8 * i + j] * scale[i] * scale[j] + (i == j ? 1e-10 : 0.0);
        args->gamma[i] = rhs[i] * scale[i];
    }
    solve_small(n, A, args->gamma);
    for (int i = 0; i < n; i++)
        args->gamma[i] *= scale[i];
}

/* lam = (log A - log B) / (fi1 reg/rho1 + reg/rho2): the best common translation of (f, g) */
static void translate(mapuot_state *state, double mass, double weight, sweep_args *args)
{
    const double k1 = state->reg / state->rho_u, k2 = state->reg / state->rho_v, fi1 = 1.0 / (1.0 + k1);
    args->sum_factor = args->q_factor = 1.0;
    if (!state->translate || k1 + k2 == 0.0)
        return;
    args->lam = (log(mass) - log(weight)) / (fi1 * k1 + k2);
    args->off = (fi1 - 1.0) * args->lam;
    args->sum_factor = exp(args->off);
    args->q_factor = exp(k2 * args->lam);
    state->shift += args->lam;
    state->row_offset = args->off;
}

/* mu = (log B' - log A') / (reg/rho1 + fi2 reg/rho2), put on log v with the factor fi2 */
static double translate_next(const mapuot_state *state, double mass, double next)
{
    const double k1 = state->reg / state->rho_u, k2 = state->reg / state->rho_v, fi2 = 1.0 / (1.0 + k2);
    if (!state->translate || k1 + k2 == 0.0)
        return 0.0;
    return fi2 * (log(next) - log(mass)) / (k1 + fi2 * k2);
}

/* |P - P*|_1 / mass from d = gap / (reg mass) >= KL(P* | P) / mass: |p - q|_1^2 <= (2/3 |p| + 4/3 |q|) KL(p | q) */
static double plan_error(double d) { return d > 0.0 ? d / 3 + sqrt(2 * d + d * d / 9) : 0.0; }

/* next_v: the sum of the v that the next pass starts from */
static mapuot_status judge(mapuot_state *state, const mapuot_stats *stats, double scale_u, double scale_v,
                           double next_v)
{
    const int lost_points = stats->dead > state->dead && state->since_absorb > 1; /* dead for want of a fresh K */
    const int done = !lost_points && (stats->error <= state->tol || stats->gap <= state->tol_gap * fabs(stats->dual));
    const double storage = state->exact ? 0.0 : 3 * state->storage_error;
    if (next_v > SCALE_LIMIT || next_v < 1 / SCALE_LIMIT)
        return MAPUOT_ABSORB; /* the next v has left the range of this K */
    if (stats->rejected)
        return MAPUOT_RUNNING; /* the last image, from which the next pass starts, is finite */
    if (!isfinite(stats->mass) || isnan(stats->dual) || !(stats->mass > 0.0))
        return MAPUOT_NOT_FINITE;
    if (done && !state->narrow)
        return MAPUOT_CONVERGED;
    /* K as stored is solved to half of what its rounding costs, and that is too much: go on without it */
    if (!done && storage >= state->tol / 4 && stats->error - storage <= fmax(state->tol, storage) / 2 && state->tile) {
        state->exact = 1;
        state->narrow = 0;
        state->best_dual = -INFINITY;
        return MAPUOT_RUNNING;
    }
    state->since_best++;
    if (stats->error < state->best_error * (1 - 1e-3) ||
        stats->dual > state->progress_dual + 1e-9 * fabs(stats->dual)) { /* slow progress adds up until it counts */
        state->best_error = fmin(state->best_error, stats->error);
        state->progress_dual = fmax(state->progress_dual, stats->dual);
        state->since_best = 0;
    }
    if (state->narrow && (done || stats->error <= state->narrow_floor || state->since_best >= NARROW_PATIENCE ||
                          fmax(scale_u, scale_v) > NARROW_LIMIT)) {
        state->narrow = 0; /* only a pass in float64 certifies */
        state->best_dual = -INFINITY;
    }
    if (state->since_absorb == 1)
        state->dead = stats->dead; /* what a fresh K leaves dead stays so */
    else if (stats->lost > state->flush_tol || lost_points || fmax(scale_u, scale_v) > SCALE_LIMIT)
        return MAPUOT_ABSORB;
    return state->since_best >= STALL_PASSES ? MAPUOT_STALLED : MAPUOT_RUNNING;
}

/* the sums of the in-place pass are column marginals: K^T u = s / v */
static void marginals_to_sums(mapuot_state *state)
{
    for (int64_t j = 0; j < state->n; j++)
        state->sums[j] = state->cols.scale[j] > 0.0 ? state->sums[j] / state->cols.scale[j] : 0.0;
}

/* x = G, extrapolated where the guard allows it; sets the residual; returns the sum of the next v */
static double step(mapuot_pool *pool, mapuot_state *state, sweep_args *args, mapuot_stats *stats)
{
    const mapuot_kernels *kernels = mapuot_active_kernels();
    const int64_t np = padded(state->n);
    const double slack =
        state->narrow ? 3e-7 * state->reg * stats->mass : 1e-13 * fabs(state->best_dual) + 2e-15 * state->dual_scale;
    double out[SWEEP_OUT];
    if (state->extrapolated && !(stats->dual >= state->best_dual - slack)) {
        memcpy(state->work + 2 * np, state->history + np, (size_t)np * sizeof(double));
        state->depth = 0;
        state->head = -1;
        state->extrapolated = 0;
        stats->rejected = 1;
        stats->residual = INFINITY;
    } else {
        state->best_dual = state->extrapolated ? fmax(state->best_dual, stats->dual) : stats->dual;
        if (state->memory > 0 && state->head >= 0) {
            args->slot = state->head % state->memory;
            state->depth += state->depth < state->memory;
        }
        args->depth = state->depth;
        run_sweep(pool, state, args, kernels->sweep_difference, 1, out);
        stats->residual = out[MAX_RESIDUAL];
        if (args->slot >= 0)
            anderson_weights(state, out + SUM_DOT, out + SUM_RHS, args);
        state->head = state->memory > 0 ? (state->head + 1) % state->memory : -1;
        state->extrapolated = args->depth > 0;
    }
    run_sweep(pool, state, args, kernels->sweep_advance, 0, out);
    return out[SUM_ADVANCED];
}

int mapuot_finish_pass(mapuot_pool *pool, mapuot_state *state, mapuot_stats *stats)
{
    const mapuot_kernels *kernels = mapuot_active_kernels();
    const double *scalars = state->sums + padded(state->n), shift = state->shift;
    sweep_args args = {.slot = -1, .sum_factor = 1.0, .q_factor = 1.0};
    double out[SWEEP_OUT], mass, scale_v, next_v;
    memset(stats, 0, sizeof *stats);
    if (state->in_place)
        marginals_to_sums(state);
    state->row_offset = 0.0;

    run_sweep(pool, state, &args, kernels->sweep_marginal, 0, out);
    mass = out[SUM_MASS];
    scale_v = out[SUM_SCALE];
    stats->dead = out[SUM_DEAD] + scalars[ROW_DEAD];
    stats->lost = (state->exact ? DBL_MIN : state->flush) * scalars[ROW_SCALE] * scale_v / mass;
    translate(state, mass, out[SUM_WEIGHT], &args);

    run_sweep(pool, state, &args, kernels->sweep_prox, 0, out);
    stats->mass = mass * args.sum_factor;
    /* rows: rho (sum a - mass), or <f, a> with sum a = mass */
    stats->dual = scalars[ROW_DUAL] + out[SUM_DUAL] + state->dual_constant - state->reg * stats->mass;
    if (state->translate)
        stats->dual += isinf(state->rho_u) ? state->reg * args.lam * mass : state->rho_u * (mass - stats->mass);
    if (stats->dead > state->dead)
        stats->dual = -INFINITY; /* a row that is in use counted as unreached: this is no dual value */
    stats->gap = out[SUM_GAP];
    stats->error = plan_error(out[SUM_GAP] / (state->reg * stats->mass)) + out[SUM_HARD] / stats->mass +
                   (state->exact ? 0.0 : 3 * state->storage_error) + stats->lost;
    args.mu = translate_next(state, stats->mass, out[SUM_NEXT]);

    next_v = step(pool, state, &args, stats);
    if (stats->rejected && !isfinite(state->shift))
        state->shift = shift;
    state->passes++;
    state->since_absorb++;
    stats->status = judge(state, stats, scalars[ROW_SCALE], scale_v, next_v);
    return stats->status;
}

int mapuot_iterate(mapuot_pool *pool, mapuot_state *state, int64_t count, mapuot_stats *stats, int64_t *made)
{
    int status = MAPUOT_RUNNING;
    for (*made = 0; *made < count && status == MAPUOT_RUNNING; ++*made) {
        status = mapuot_row_pass(pool, state);
        if (status == MAPUOT_RUNNING)
            status = mapuot_finish_pass(pool, state, stats + *made);
    }
    return status;
}
