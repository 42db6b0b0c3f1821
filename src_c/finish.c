/* finish.c - finish_pass, the O(n) half of a pass: four sweeps over the columns (finish_tmpl.c), and between them the
 * decisions of common/rules.h and Anderson's small system.
 *
 * It is split into steps, since processes that share the columns have to sum the results of each sweep.
 * Twin: src_cuda/dense/finish_pass.cuh; oracle: mapuot/backends/reference.py.
 */
#include <string.h>

#include "common/column.h"
#include "common/rules.h"
#include "kernels.h"

enum { PARALLEL_SWEEP = 16384, MAX_THREADS = 1024 };

/* finish_pass between its steps */
typedef struct {
    double sums[SWEEP_OUT]; /* sums over the columns from the last sweep */
    sweep_args args;
    double row_scalars[SCALARS];
    double mass, scale_v, lam, before; /* mass and scale_v before the translation, lam, and the shift before it */
} finish_state;
_Static_assert(sizeof((mapuot_sweep *)0)->gamma == MAX_DEPTH * sizeof(double), "mapuot_sweep");

typedef struct {
    const mapuot_state *state;
    const sweep_args *args;
    sweep_fn sweep;
    double out[MAX_THREADS][SWEEP_OUT];
} sweep_job;

static void sweep_task(void *context, int thread, int threads) {
    sweep_job *job = context;
    const int64_t blocks = padded(job->state->n) / PAD;
    double out[SWEEP_OUT] = {0};
    job->sweep(job->state, job->args, blocks * thread / threads * PAD, blocks * (thread + 1) / threads * PAD, out);
    memcpy(job->out[thread], out, sizeof out);
}

/* A sweep by all threads. It is a function of its own, since compilers that guard the stack touch every page of `job`
 * in each call. */
static __attribute__((noinline)) void share_sweep(mapuot_pool *pool, const mapuot_state *state, const sweep_args *args,
                                                  sweep_fn sweep, int residual, double *out) {
    sweep_job job = {.state = state, .args = args, .sweep = sweep};
    pool_run(pool, sweep_task, &job);
    for (int t = 0; t < mapuot_pool_threads(pool); t++)
        for (int k = 0; k < SWEEP_OUT; k++)
            out[k] = k == 0 && residual ? fmax(out[k], job.out[t][k]) : out[k] + job.out[t][k];
}

/* Make one sweep over all columns. In the residual sweep out[0] is a maximum, not a sum. */
static void run_sweep(mapuot_pool *pool, const mapuot_state *state, const sweep_args *args, sweep_fn sweep,
                      int residual, double *out) {
    const int64_t np = padded(state->n);
    const int threads = mapuot_pool_threads(pool);
    memset(out, 0, SWEEP_OUT * sizeof(double));
    if (np < PARALLEL_SWEEP || threads == 1 || threads > MAX_THREADS) sweep(state, args, 0, np, out);
    else share_sweep(pool, state, args, sweep, residual, out);
}

/* solve A x = b, n <= MAX_DEPTH, symmetric positive definite after the ridge: Cholesky */
static void solve_small(int n, double A[MAX_DEPTH][MAX_DEPTH], double *x) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j <= i; j++) {
            double sum = A[i][j];
            for (int k = 0; k < j; k++) sum -= A[i][k] * A[j][k];
            A[i][j] = i == j ? sqrt(fmax(sum, DBL_MIN)) : sum / A[j][j];
        }
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i; k++) x[i] -= A[i][k] * x[k];
        x[i] /= A[i][i];
    }
    for (int i = n - 1; i >= 0; i--) {
        for (int k = i + 1; k < n; k++) x[i] -= A[k][i] * x[k];
        x[i] /= A[i][i];
    }
}

void anderson_weights(int n, int64_t ld, const double *gram, const double *rhs, double *gamma) {
    double A[MAX_DEPTH][MAX_DEPTH], scale[MAX_DEPTH];
    for (int i = 0; i < n; i++) scale[i] = 1.0 / sqrt(fmax(gram[i * ld + i], DBL_MIN));
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++) A[i][j] = gram[i * ld + j] * scale[i] * scale[j] + (i == j ? RIDGE : 0.0);
        gamma[i] = rhs[i] * scale[i];
    }
    solve_small(n, A, gamma);
    for (int i = 0; i < n; i++) gamma[i] *= scale[i];
}

/* Anderson's weights of a state: add the products of the last difference to the Gram matrix and solve. */
static void state_weights(mapuot_state *state, const double *dot, const double *rhs, sweep_args *args) {
    const int64_t n = args->depth, slot = args->slot, anderson_depth = state->limits.anderson_depth;
    double *gram = state->history + (2 * anderson_depth + 2) * padded(state->n);
    for (int64_t i = 0; i < n; i++) gram[i * anderson_depth + slot] = gram[slot * anderson_depth + i] = dot[i];
    anderson_weights((int)n, anderson_depth, gram, rhs, args->gamma);
}

/* The translation of the pass: the shift, and the factors that the sweeps need. */
static void translate(mapuot_state *state, finish_state *finish, double weight) {
    const mapuot_limits *limits = &state->limits;
    mapuot_progress *p = &state->progress;
    finish->before = p->shift;
    finish->lam = p->lam = translation(limits, log_ratio_of(finish->mass, weight), p->shift);
    p->shift += finish->lam;
    p->offset = finish->args.offset = left_of_rows(limits, finish->lam);
    p->kappa = finish->args.kappa = exp(p->offset);
    finish->args.q_factor = exp(limits->rate_cols * (p->shift - finish->args.base));
}

static double largest_scale(const finish_state *finish) {
    return fmax(finish->row_scalars[ROW_SCALE], finish->scale_v);
}

/* The sums of the in-place pass are column marginals: K^T u = s / v. */
static void marginals_to_sums(mapuot_state *state) {
    for (int64_t j = 0; j < state->n; j++)
        state->sums[j] = state->cols.scale[j] > 0.0 ? state->sums[j] / state->cols.scale[j] : 0.0;
}

/* step 0: s = v K^T u, and the sums for the translation */
static void finish_marginal(mapuot_pool *pool, mapuot_state *state, finish_state *finish) {
    *finish = (finish_state){.args = {.slot = -1, .kappa = 1.0, .q_factor = 1.0}};
    finish->args.base = state->limits.lam_rate > 0 ? 0.0 : state->progress.shift;
    memcpy(finish->row_scalars, state->sums + padded(state->n), sizeof finish->row_scalars);
    if (state->limits.in_place) marginals_to_sums(state);
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweeps->marginal, 0, finish->sums);
}

static int is_safe(double x) { return x > 1e-290 && x < 1e290; }

/* If e^(-k x) or e^(k shift) leaves float64, compute q = b e^(-k log v) directly: as their product it was 0 for a q of
 * 1e-39, e^657 times e^-744. */
static void find_asked(mapuot_pool *pool, mapuot_state *state, finish_state *finish) {
    if (!(state->limits.lam_rate > 0) || (is_safe(finish->sums[SUM_WEIGHT]) && is_safe(finish->args.q_factor))) return;
    finish->args.base = state->progress.shift;
    finish->args.q_factor = 1.0;
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweeps->marginal, 0, finish->sums);
}

/* One potential l = log u = log v: the rows are as far from their optimum as the columns, and G lies between l and
 * prox(s). */
static void average(mapuot_state *state, finish_state *finish) {
    const mapuot_side *rows = &state->rows, *cols = &state->cols;
    const double *x = state->work;
    double *image = state->work + 2 * padded(state->n), *row = finish->row_scalars;
    for (int64_t j = 0; j < state->n; j++) {
        const double k = cols->penalty <= MAPUOT_BALANCED ? state->limits.reg / cols->rho[j] : 0.0;
        image[j] = x[j] + own_part(1.0 / (1.0 + k)) * (image[j] - x[j]);
    }
    for (int64_t i = 0, j = state->before; i < state->m; i++, j++) {
        rows->log_scale[i] = cols->absorbed[j] < INFINITY ? x[j] - cols->absorbed[j] : 0.0;
        rows->scale[i] = cols->scale[j];
        rows->marginal[i] = cols->marginal[j];
    }
    row[ROW_DUAL] = finish->sums[SUM_DUAL];
    finish->sums[SUM_GAP] *= 2.0;
    finish->sums[SUM_HARD] *= 2.0;
}

/* step 1: translation, gap, G */
static void finish_prox(mapuot_pool *pool, mapuot_state *state, finish_state *finish, mapuot_stats *stats) {
    const double *rows = finish->row_scalars;
    finish->mass = finish->sums[SUM_MASS];
    finish->scale_v = finish->sums[SUM_SCALE];
    if (state->limits.symmetric) { /* the scalars of the rows equal the columns' */
        finish->row_scalars[ROW_SCALE] = finish->scale_v;
        finish->row_scalars[ROW_DEAD] = finish->sums[SUM_DEAD];
    }
    translate(state, finish, finish->sums[SUM_WEIGHT]);
    *stats = (mapuot_stats){.dead = finish->sums[SUM_DEAD] + rows[ROW_DEAD]};
    stats->mass = finish->mass * finish->args.kappa;
    stats->lost = lost_mass(&state->limits, rows[ROW_SCALE], finish->scale_v, finish->mass);
    find_asked(pool, state, finish);
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweeps->prox, 0, finish->sums);
    if (state->limits.symmetric) average(state, finish);
}

/* The dual value as summed. A translation also changes the terms of the rows. With one rho they are rho (sum a - mass),
 * which must not be computed from the mass before the translation; balanced rows gain reg lam sum a. */
static double dual_value(const mapuot_state *state, const finish_state *finish, double mass) {
    const mapuot_limits *limits = &state->limits;
    double rows = finish->row_scalars[ROW_DUAL];
    if (limits->lam_rate > 0 && limits->rho_rows > 0) rows = limits->rho_rows * (limits->row_weight - mass);
    else if (limits->lam_rate > 0) rows += limits->reg * finish->lam * limits->row_weight;
    return rows + finish->sums[SUM_DUAL] + limits->dual_constant - limits->reg * mass;
}

/* Translate the image in every part of M by the masses there. No pair connects a part with another one, so each is a
 * problem of its own. sweep_prox has put b e^(-k log v') where log K^T u was. */
static void translate_parts(mapuot_state *state) {
    const int64_t np = padded(state->n), count = state->parts;
    const double *next = state->work + np;
    double *image = state->work + 2 * np, *mass = state->part_sums, *weight = mass + count;
    memset(mass, 0, (size_t)(2 * count) * sizeof(double));
    for (int64_t j = 0; j < state->n; j++) {
        mass[state->part[j]] += state->cols.marginal[j];
        weight[state->part[j]] += next[j];
    }
    for (int64_t k = 0; k < count; k++) mass[k] = next_translation(&state->limits, log_ratio_of(weight[k], mass[k]));
    for (int64_t j = 0; j < state->n; j++) image[j] += mass[state->part[j]];
}

/* step 2: guard and certificate, then the differences for a step that the guard accepts. On an outgrown K there is no
 * step: its image would lose the progress made. */
static void finish_difference(mapuot_pool *pool, mapuot_state *state, finish_state *finish, mapuot_stats *stats) {
    const mapuot_limits *limits = &state->limits;
    mapuot_progress *p = &state->progress;
    const int64_t np = padded(state->n);
    const double scale = largest_scale(finish);
    stats->dual = dual_value(state, finish, stats->mass);
    if (outgrown(limits, p, stats, scale)) repeat(p, stats);
    else settle(limits, p, stats);
    certify(limits, p, stats, finish->sums[SUM_GAP], finish->sums[SUM_HARD], finish->sums[SUM_MISFIT], scale);
    finish->args.common = next_translation(limits, log_ratio_of(finish->sums[SUM_NEXT], stats->mass));
    if (stats->rejected > 0) { /* go on from the last image, or from the same v on a fresh K */
        const double *from = p->step == MAPUOT_GO_BACK ? state->history + np : state->work;
        memcpy(state->work + 2 * np, from, (size_t)np * sizeof(double));
        memset(finish->sums, 0, SWEEP_OUT * sizeof(double));
        return;
    }
    if (state->parts > 1) {
        translate_parts(state);
        finish->args.common = 0.0;
    }
    finish->args.slot = p->slot;
    finish->args.depth = p->step == MAPUOT_EXTRAPOLATE ? p->depth : 0;
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweeps->difference, 1, finish->sums);
}

/* step 3: x = G, extrapolated where the guard allowed it */
static void finish_advance(mapuot_pool *pool, mapuot_state *state, finish_state *finish, mapuot_stats *stats) {
    stats->residual = stats->rejected > 0 ? INFINITY : finish->sums[MAX_RESIDUAL];
    if (finish->args.depth > 0) state_weights(state, finish->sums + SUM_DOT, finish->sums + SUM_RHS, &finish->args);
    if (state->progress.coarse && !(stats->rejected > 0)) coarse_correct(pool, state, &finish->args);
    run_sweep(pool, state, &finish->args, mapuot_active_kernels()->sweeps->advance, 0, finish->sums);
}

/* step 4: the status */
static int finish_judge(mapuot_state *state, finish_state *finish, mapuot_stats *stats) {
    mapuot_limits *limits = &state->limits;
    mapuot_progress *p = &state->progress;
    if (stats->rejected > 0 && !isfinite(p->shift)) p->shift = finish->before;
    judge(limits, p, stats, largest_scale(finish), finish->sums[SUM_ADVANCED]);
    const int coarse = p->status == MAPUOT_COARSE, made = makes_rows(state) && !(p->narrow > 0);
    if (coarse || (made && !state->exact)) { /* from here on every pass recomputes K from M in float64 */
        state->exact = 1;
        limits->finer = 0;
        limits->storage_error = 0.0;
        limits->flush = TINY;
        widen_passes(p);
        stats->status = (double)(p->status = coarse ? MAPUOT_RUNNING : p->status);
    }
    return (int)p->status;
}

int mapuot_finish_pass(mapuot_pool *pool, mapuot_state *state, mapuot_stats *stats) {
    finish_state finish;
    finish_marginal(pool, state, &finish);
    finish_prox(pool, state, &finish, stats);
    finish_difference(pool, state, &finish, stats);
    finish_advance(pool, state, &finish, stats);
    return finish_judge(state, &finish, stats);
}
