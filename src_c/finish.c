/* finish.c - finish_pass, the O(n) half of a pass: the scalar work between its four sweeps (finish_tmpl.c), Anderson's
 * small system, the certificate and the stopping rule.
 *
 * It goes in steps, since processes that share the columns have to sum what each sweep found.
 * Twins: backends/reference.py, src_cuda/finish_pass.cuh.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

#define SCALE_LIMIT 1e150 /* sums of u or v beyond it: rebuild K before anything overflows */
#define MOST_SCALE 1e300  /* the vectors' exp ends at 8e307: a scaling beyond it is clipped */
#define MOST_LOST 1e-3    /* relative mass hidden by a K that has been outgrown: the pass is repeated on a fresh one */
#define LEAST_MASS 1e-290 /* the marginals of a plan below it lose their digits at DBL_MIN */
enum { STALL_PASSES = 250, NARROW_PATIENCE = 20, PARALLEL_SWEEP = 16384, MAX_THREADS = 1024 };

_Static_assert(sizeof((mapuot_finish *)0)->sums == (SWEEP_OUT + SCALARS) * sizeof(double), "mapuot_finish");
_Static_assert(sizeof((mapuot_sweep *)0)->gamma == MAX_MEMORY * sizeof(double), "mapuot_sweep");

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
    if (!state->translate || k1 + k2 == 0.0 || !(mass > 0.0 && mass <= DBL_MAX))
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
static double plan_error(double d) { return d <= 0.0 ? 0.0 : d / 3 + sqrt(2 * d + d * d / 9); }

/* has the certificate stood still for long? slow progress of the dual adds up until it counts */
static int stalled(mapuot_state *state, const mapuot_stats *stats)
{
    state->since_best++;
    if (stats->error < state->best_error * (1 - 1e-3) ||
        stats->dual > state->progress_dual + 1e-9 * fabs(stats->dual)) {
        state->best_error = fmin(state->best_error, stats->error);
        state->progress_dual = fmax(state->progress_dual, stats->dual);
        state->since_best = 0;
    }
    return state->since_best >= STALL_PASSES;
}

static double largest_scale(const mapuot_finish *finish)
{
    return fmax(finish->row_scalars[ROW_SCALE], finish->scale_v);
}

static int clipped(double scale) { return !(scale < MOST_SCALE); }

/* points in use dead, mass hidden, or a scaling clipped, for want of a fresh K; passes: how many were made on it
 * before */
static int outgrown(const mapuot_state *state, const mapuot_stats *stats, double scale, int64_t passes)
{
    return passes > 0 && (stats->dead > state->dead || clipped(scale) > state->clipped || stats->lost > MOST_LOST);
}

/* plan error by the rounding of K: its entries are rounded once, those of the plan in place in every pass again */
static double storage_error(const mapuot_state *state, int64_t passes)
{
    return state->exact ? 0.0 : 3 * state->storage_error * (double)(state->in_place ? 1 + passes : 1);
}

/* next_v: the sum of the v that the next pass starts from */
static mapuot_status judge(mapuot_state *state, const mapuot_stats *stats, double scale, double next_v)
{
    const int lost = outgrown(state, stats, scale, state->since_absorb - 1);
    const int small_gap = stats->dual > -INFINITY && stats->gap <= state->tol_gap * fabs(stats->dual);
    const int done = !lost && (stats->error <= state->tol || small_gap);
    const double storage = storage_error(state, state->since_absorb - 1);
    const int fresh = state->since_absorb == 1, left = next_v > SCALE_LIMIT || next_v < 1 / SCALE_LIMIT;
    if (stats->rejected)
        return left || lost ? MAPUOT_ABSORB : MAPUOT_RUNNING; /* what the next pass starts from is finite */
    if (isnan(stats->mass) || (isnan(stats->dual) && stats->mass <= DBL_MAX))
        return MAPUOT_NOT_FINITE;
    if (stats->mass < LEAST_MASS)
        return fresh ? MAPUOT_UNDERFLOW : MAPUOT_ABSORB;
    if (stalled(state, stats) && !done)
        return stats->mass > DBL_MAX ? MAPUOT_NOT_FINITE : stats->dead > 0.0 ? MAPUOT_UNDERFLOW : MAPUOT_STALLED;
    if (left && !(done && fresh))
        return MAPUOT_ABSORB; /* the next v has left the range of this K */
    if (stats->mass > DBL_MAX)
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
    if (state->narrow &&
        (done || stats->error <= state->narrow_floor || state->since_best >= NARROW_PATIENCE || scale > NARROW_LIMIT)) {
        state->narrow = 0; /* only a pass in float64 certifies */
        state->best_dual = -INFINITY;
    }
    if (fresh) { /* what a fresh K leaves dead or clipped stays so */
        state->dead = stats->dead;
        state->clipped = clipped(scale);
    } else if (stats->lost > state->flush_tol || scale > SCALE_LIMIT)
        return MAPUOT_ABSORB;
    return MAPUOT_RUNNING;
}

/* the sums of the in-place pass are column marginals: K^T u = s / v */
static void marginals_to_sums(mapuot_state *state)
{
    for (int64_t j = 0; j < state->n; j++)
        state->sums[j] = state->cols.scale[j] > 0.0 ? state->sums[j] / state->cols.scale[j] : 0.0;
}

/* step 0: s = v K^T u, and what the translation needs */
static void finish_marginal(mapuot_pool *pool, mapuot_state *state, mapuot_finish *finish)
{
    *finish = (mapuot_finish){.args = {.slot = -1, .sum_factor = 1.0, .q_factor = 1.0}, .shift = state->shift};
    if (state->in_place)
        marginals_to_sums(state);
    state->row_offset = 0.0;
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweep_marginal, 0, finish->sums);
    memcpy(finish->sums + SWEEP_OUT, state->sums + padded(state->n), sizeof finish->row_scalars);
}

/* step 1: translation, gap, G */
static void finish_prox(mapuot_pool *pool, mapuot_state *state, mapuot_finish *finish, mapuot_stats *stats)
{
    const double mass = finish->sums[SUM_MASS], *rows = finish->row_scalars;
    memcpy(finish->row_scalars, finish->sums + SWEEP_OUT, sizeof finish->row_scalars);
    memset(finish->sums + SWEEP_OUT, 0, sizeof finish->row_scalars);
    finish->mass = mass;
    finish->scale_v = finish->sums[SUM_SCALE];
    *stats = (mapuot_stats){.dead = finish->sums[SUM_DEAD] + rows[ROW_DEAD]};
    /* entries of K below flush, and u below DBL_MIN: LEAST_MASS stands for so many of these */
    stats->lost = ((state->exact ? DBL_MIN : state->flush) * rows[ROW_SCALE] + LEAST_MASS) * finish->scale_v / mass;
    translate(state, mass, finish->sums[SUM_WEIGHT], &finish->args);
    stats->mass = mass * finish->args.sum_factor;
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweep_prox, 0, finish->sums);
}

static void certify(const mapuot_state *state, const mapuot_finish *finish, mapuot_stats *stats)
{
    const double *sums = finish->sums, mass = finish->mass;
    const double allowed = state->tol_gap >= 0 ? state->tol_gap : fmax(state->tol, 0.0);
    /* rows: rho (sum a - mass), or <f, a> with sum a = mass */
    stats->dual = finish->row_scalars[ROW_DUAL] + sums[SUM_DUAL] + state->dual_constant - state->reg * stats->mass;
    if (state->translate)
        stats->dual += isinf(state->rho_u) ? state->reg * finish->args.lam * mass : state->rho_u * (mass - stats->mass);
    const double scale = largest_scale(finish);
    const int lost = outgrown(state, stats, scale, state->since_absorb);
    if (stats->dead > state->dead || lost)
        stats->dual = -INFINITY; /* a row that is in use counted as unreached: this is no dual value */
    stats->gap = sums[SUM_HARD] > allowed * stats->mass ? INFINITY : sums[SUM_GAP];
    stats->error = plan_error(sums[SUM_GAP] / stats->mass / state->reg) + sums[SUM_HARD] / stats->mass +
                   storage_error(state, state->since_absorb) + state->exponent_error + stats->lost +
                   4.5e-16 * fabs(state->shift); /* log u and log v hold it: 4 roundings */
    if (lost || isnan(stats->error) || clipped(scale))
        stats->gap = stats->error = INFINITY; /* u is no prox then */
}

/* step 2: the certificate; the guard, then the differences of a step that it lets pass: none that lowers the dual, and
 * none on an outgrown K, whose image would lose what was won */
static void finish_difference(mapuot_pool *pool, mapuot_state *state, mapuot_finish *finish, mapuot_stats *stats)
{
    const int64_t np = padded(state->n);
    const double slack =
        state->narrow ? 3e-7 * state->reg * stats->mass : 1e-13 * fabs(state->best_dual) + 2e-15 * state->dual_scale;
    certify(state, finish, stats);
    finish->args.mu = translate_next(state, stats->mass, finish->sums[SUM_NEXT]);
    const int lower = state->extrapolated && !(stats->dual >= state->best_dual - slack);
    stats->rejected = lower || outgrown(state, stats, largest_scale(finish), state->since_absorb);
    if (stats->rejected) { /* from the last image, or from the same v on a fresh K */
        memcpy(state->work + 2 * np, lower ? state->history + np : state->work, (size_t)np * sizeof(double));
        memset(finish->sums, 0, SWEEP_OUT * sizeof(double));
        return;
    }
    state->best_dual = state->extrapolated ? fmax(state->best_dual, stats->dual) : stats->dual;
    if (state->memory > 0 && state->head >= 0) {
        finish->args.slot = state->head % state->memory;
        state->depth += state->depth < state->memory;
    }
    finish->args.depth = state->depth;
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweep_difference, 1, finish->sums);
}

/* step 3: x = G, extrapolated where the guard allowed it */
static void finish_advance(mapuot_pool *pool, mapuot_state *state, mapuot_finish *finish, mapuot_stats *stats)
{
    if (stats->rejected) {
        stats->residual = INFINITY;
        state->depth = state->extrapolated = 0;
        state->head = -1;
    } else {
        stats->residual = finish->sums[MAX_RESIDUAL];
        if (finish->args.slot >= 0)
            anderson_weights(state, finish->sums + SUM_DOT, finish->sums + SUM_RHS, &finish->args);
        state->head = state->memory > 0 ? (state->head + 1) % state->memory : -1;
        state->extrapolated = finish->args.depth > 0;
    }
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweep_advance, 0, finish->sums);
}

int mapuot_finish_step(mapuot_pool *pool, mapuot_state *state, mapuot_finish *finish, mapuot_stats *stats, int step)
{
    if (step == 0)
        finish_marginal(pool, state, finish);
    else if (step == 1)
        finish_prox(pool, state, finish, stats);
    else if (step == 2)
        finish_difference(pool, state, finish, stats);
    else if (step == 3)
        finish_advance(pool, state, finish, stats);
    if (step < 4)
        return MAPUOT_RUNNING;
    if (stats->rejected && !isfinite(state->shift))
        state->shift = finish->shift;
    state->passes++;
    state->since_absorb++;
    stats->status = judge(state, stats, largest_scale(finish), finish->sums[SUM_ADVANCED]);
    if (stats->status == MAPUOT_NOT_FINITE || stats->status == MAPUOT_UNDERFLOW)
        stats->error = INFINITY;
    return stats->status;
}

int mapuot_finish_pass(mapuot_pool *pool, mapuot_state *state, mapuot_stats *stats)
{
    mapuot_finish finish;
    int status = MAPUOT_RUNNING;
    for (int step = 0; step <= 4; step++)
        status = mapuot_finish_step(pool, state, &finish, stats, step);
    return status;
}
