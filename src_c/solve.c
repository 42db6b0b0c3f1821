/* solve.c - plain problems in one foreign call, from their arrays to their certificates: range of M, the stages that
 * Python lists, K and its absorptions, passes, potentials, plan. One thread solves a problem; the threads of the pool
 * share the problems.
 *
 * Twins: ascend/loop.py (run) and backends/workspace.py (absorb), which solve all other problems by the same passes. A
 * problem that needs more than this file has, or has a faulty argument, is left to them from its beginning.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { SIDE_VECTORS = 8, OUT_OF_PASSES = MAPUOT_RUNNING };

/* one problem under way */
typedef struct {
    const mapuot_task *task; /* a copy with m and n of this problem */
    mapuot_problem *problem;
    mapuot_pool *serial;
    double *costs, *columns, *rows, *moved; /* for points: their cost matrix, and workspace of the slopes */
    mapuot_matrix M;
    mapuot_state state;
    double *alpha, *beta;
    double *log_v;  /* the start at the next reg, n */
    double *x;      /* log v + shift, n */
    double *plan_v; /* n */
    double *vectors;
    int64_t vectors_len;
    mapuot_newton newton;
    double *room;            /* mapuot_meet_room */
    int64_t certified;       /* number of passes when Newton's step last certified one */
    int meets;               /* 1: columns are hard, and Newton's step certifies the last stage */
    mapuot_stats recent[64]; /* used if the task has no trace */
} attempt;

static const mapuot_matrix ONES = {0};

static void *take(char **at, int64_t bytes) {
    void *place = *at;
    *at += (bytes + 63) / 64 * 64;
    return place;
}

static int64_t vectors_len(const mapuot_task *task) {
    const int64_t mp = padded(task->m), np = padded(task->n);
    return np + SCALARS + 3 * np + mapuot_history(task->terms.anderson_depth, task->n) + SIDE_VECTORS * (mp + np) + np +
           PAD;
}

/* Place all arrays of an attempt from scratch on. Returns the number of bytes used. */
static int64_t lay_out(const mapuot_task *task, attempt *t, char *scratch) {
    char *at = scratch;
    const int64_t m = task->m, n = task->n, width = entry_bytes(task->terms.dtype), ld = mapuot_leading(n, width);
    mapuot_state *state = &t->state;
    state->kernel = take(&at, m * ld * width);
    state->tile = take(&at, TILE * ld * 8);
    t->vectors = take(&at, vectors_len(task) * 8);
    t->alpha = take(&at, m * 8);
    t->beta = take(&at, n * 8);
    t->log_v = take(&at, n * 8);
    t->x = take(&at, n * 8);
    t->plan_v = take(&at, n * 8);
    t->room = take(&at, mapuot_meet_room(m, n) * 8);
    if (task->M.points.d) {
        const int64_t most = m > n ? m : n, d = task->M.points.d + 1;
        t->costs = take(&at, m * n * 8);
        t->columns = take(&at, d * padded(n) * 8);
        t->rows = take(&at, d * m * 8);
        t->moved = take(&at, d * padded(most) * 8);
    }
    return at - scratch;
}

int64_t mapuot_solve_bytes(const mapuot_task *task) {
    attempt t;
    static char origin[1]; /* only differences of addresses are formed */
    return lay_out(task, &t, origin);
}

/* ---- the arguments ---- */

/* The columns of y - from, coordinate by coordinate, with zeros behind n. */
static void turn(const attempt *t, const double *y, const double *from, double *columns) {
    const int64_t n = t->task->n, np = padded(n), d = t->task->M.points.d;
    for (int64_t k = 0; k < d; k++)
        for (int64_t j = 0; j < np; j++) columns[k * np + j] = j < n ? y[j * d + k] - (from ? from[k] : 0.0) : 0.0;
}

/* The matrix M of a problem in memory; for points it is computed. */
static void take_matrix(attempt *t) {
    const mapuot_task *task = t->task;
    t->M = task->M;
    t->M.data = t->problem->M;
    if (!task->M.points.d) return;
    mapuot_matrix made = task->M;
    turn(t, t->problem->y, NULL, t->columns);
    made.points.x = t->problem->x;
    made.points.y = t->columns;
    made.points.ld = padded(task->n);
    mapuot_costs(t->serial, task->m, task->n, made, t->costs);
    t->M = (mapuot_matrix){.data = t->costs, .row_stride = task->n, .col_stride = 1, .dtype = MAPUOT_F64};
}

static int is_marginal(int64_t len, const double *weight, double mass) {
    int good = mass > 0.0 && mass < INFINITY;
    for (int64_t k = 0; k < len; k++) good &= weight[k] >= 0.0;
    return good;
}

/* Are rows and columns the same problem? */
static int is_symmetric(const attempt *t) {
    const mapuot_task *task = t->task;
    const mapuot_problem *p = t->problem;
    const int64_t n = task->n;
    return task->m == n && task->terms.rho_rows == task->terms.rho_cols &&
           memcmp(p->a, p->b, (size_t)n * sizeof(double)) == 0 && mapuot_is_symmetric(t->serial, n, t->M);
}

static int is_plain(attempt *t) {
    const mapuot_task *task = t->task;
    mapuot_problem *p = t->problem;
    const double reg = task->terms.reg;
    double range[4];
    if (!is_marginal(task->m, p->a, p->mass_a) || !is_marginal(task->n, p->b, p->mass_b)) return 0;
    if (!(p->mass_a * p->mass_b < INFINITY)) return 0;
    if (task->terms.largest_rho == 0.0 && fabs(p->mass_a - p->mass_b) > task->mass_tolerance * p->mass_a) return 0;
    if (mapuot_extrema(t->serial, task->m, task->n, t->M, range) != MAPUOT_RUNNING || range[2] > 0.0) return 0;
    p->low = range[0];
    p->high = range[1];
    const int64_t compared = p->forbidden;
    p->forbidden = range[3] > 0.0;
    if (p->forbidden && !compared && task->terms.largest_rho == 0.0) return 0;
    p->symmetric = task->stages->symmetric && is_symmetric(t);
    return isfinite(p->low / reg) && isfinite(p->high / reg) && isfinite((p->high - p->low) / reg);
}

/* ---- absorb ---- */

static int by_size(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

/* x = log v + shift, 0 where that is not finite. Returns the shift, which keeps a common part of thousands out of v. */
static double shifted(attempt *t) {
    const int64_t n = t->task->n;
    const double *b = t->problem->b;
    int64_t used = 0;
    double largest = 0.0, shift = 0.0;
    for (int64_t j = 0; j < n; j++)
        if (b[j] > 0.0 && isfinite(t->log_v[j])) {
            largest = fmax(largest, fabs(t->log_v[j]));
            t->x[used++] = t->log_v[j];
        }
    if (largest > t->task->far && !t->state.limits.symmetric) {
        qsort(t->x, (size_t)used, sizeof(double), by_size);
        const double centre = 0.5 * (t->x[(used - 1) / 2] + t->x[used / 2]);
        shift = fabs(centre) > t->task->far ? -centre : 0.0;
    }
    for (int64_t j = 0; j < n; j++) t->x[j] = b[j] > 0.0 && isfinite(t->log_v[j]) ? t->log_v[j] + shift : 0.0;
    return shift;
}

/* Choose alpha and beta so that K is at most 1 and each row and column in use has an entry at or near 1. Returns 0 if a
 * point is dead. */
static int choose_scaling(attempt *t) {
    const mapuot_task *task = t->task;
    const mapuot_problem *p = t->problem;
    const double reg = t->state.limits.reg;
    double reach = 0.0;
    for (int64_t j = 0; j < task->n; j++) {
        t->x[j] = isnan(t->x[j]) ? 0.0 : t->x[j];
        reach = fmax(reach, fabs(t->x[j]));
        t->plan_v[j] = p->b[j] > 0.0 ? t->x[j] + p->log_b[j] : -INFINITY;
        t->beta[j] = 0.0;
    }
    const int safe = reach <= task->far && (p->high - p->low) / reg + reach <= task->safe_range && !p->forbidden;
    for (int64_t i = 0; i < task->m; i++) t->alpha[i] = safe ? p->low / reg : p->a[i] > 0.0 ? 0.0 : -INFINITY;
    if (!safe && mapuot_balance(t->serial, task->m, task->n, t->M, ONES, reg, t->plan_v, t->alpha, t->beta) < 0)
        return 0;
    int alive = 1;
    for (int64_t i = 0; i < task->m; i++) {
        alive &= !(p->a[i] > 0.0) || t->alpha[i] < INFINITY;
        t->alpha[i] = p->a[i] > 0.0 ? t->alpha[i] : -INFINITY;
    }
    for (int64_t j = 0; j < task->n; j++) {
        alive &= !(p->b[j] > 0.0) || t->beta[j] > -INFINITY;
        t->beta[j] = !(p->b[j] > 0.0) ? -INFINITY : safe ? 0.0 : t->plan_v[j] - t->beta[j];
    }
    for (int64_t j = 0; j < task->n && t->state.limits.symmetric; j++)
        t->alpha[j] = t->beta[j] = 0.5 * (t->alpha[j] + t->beta[j]);
    return alive;
}

static double largest_finite(int64_t len, const double *x) {
    double largest = 0.0;
    for (int64_t k = 0; k < len; k++) largest = isfinite(x[k]) ? fmax(largest, fabs(x[k])) : largest;
    return largest;
}

void mapuot_set_side(mapuot_side *side, const double *weight, const double *log_weight) {
    double *used = (double *)side->weight, *base = (double *)side->base;
    const double *d = side->absorbed, *fi = side->fi;
    for (int64_t k = 0; k < side->len; k++) {
        const int in = d[k] < INFINITY;
        used[k] = in ? weight[k] : 0.0;
        if (base) base[k] = in ? fi[k] * log_weight[k] - (1.0 - fi[k]) * d[k] : 0.0;
    }
}

void mapuot_set_scale(mapuot_state *state) {
    for (int64_t j = 0; j < state->n; j++)
        state->cols.scale[j] = exp(state->cols.log_scale[j] - state->cols.absorbed[j]);
}

static void set_side(mapuot_side *side, const double *weight, const double *log_weight, const double *exponent) {
    double *absorbed = (double *)side->absorbed;
    for (int64_t k = 0; k < side->len; k++) absorbed[k] = weight[k] > 0.0 ? exponent[k] - log_weight[k] : INFINITY;
    mapuot_set_side(side, weight, log_weight);
}

/* max |log t| of the weights that count (problem/problem.py, largest_log) */
static double largest_log(int64_t len, const double *log_weight) {
    double top = -INFINITY, largest = 0.0;
    for (int64_t k = 0; k < len; k++) top = fmax(top, log_weight[k]);
    for (int64_t k = 0; k < len; k++)
        largest = log_weight[k] > top - 46.0 ? fmax(largest, fabs(log_weight[k])) : largest;
    return largest;
}

/* May rounding exceed tol only because of points far from all others, which take part in no plan? Workspace.exponents
 * (backends/workspace.py) then examines the problem. */
enum { FAR_APART = 2400 }; /* nats; as in problem/problem.py */
static int is_far(const mapuot_limits *limits, double largest_rho, double range_over_reg) {
    return largest_rho > 0.0 && range_over_reg > FAR_APART && limits->exponent_error > 0.1 * limits->tol;
}

/* Build K around x = log v + shift. */
static int absorb(attempt *t) {
    const mapuot_task *task = t->task;
    const mapuot_problem *p = t->problem;
    mapuot_state *state = &t->state;
    const double reg = state->limits.reg;
    if (!choose_scaling(t)) return MAPUOT_BAD_ARGUMENT;
    const double largest = largest_finite(task->m, t->alpha) + largest_finite(task->n, t->beta) +
                           largest_log(task->m, p->log_a) + largest_log(task->n, p->log_b);
    const double paid = fmin((p->high - p->low) / reg, largest + fabs(p->low) / reg + task->vanishing);
    state->limits.exponent_error = task->exponent_rounding * (paid + largest) + task->cost_error / reg;
    if (is_far(&state->limits, task->terms.largest_rho, (p->high - p->low) / reg)) return MAPUOT_BAD_ARGUMENT;
    mapuot_build_kernel(t->serial, task->m, task->n, t->M, ONES, reg, t->alpha, t->beta,
                        state->limits.symmetric ? task->n : 0, state->dtype, state->kernel, state->ld);
    set_side(&state->rows, p->a, p->log_a, t->alpha);
    set_side(&state->cols, p->b, p->log_b, t->beta);
    for (int64_t j = 0; j < task->n; j++) state->cols.log_scale[j] = p->b[j] > 0.0 ? t->x[j] : 0.0;
    mapuot_set_scale(state);
    state->progress.since_absorb = 0;
    return MAPUOT_RUNNING;
}

/* ---- passes ---- */

static void place_side(mapuot_side *side, int64_t len, int64_t filled, double rho, double reg, double **at) {
    const int64_t step = padded(len);
    double *v[SIDE_VECTORS];
    for (int k = 0; k < SIDE_VECTORS; k++, *at += step) v[k] = *at;
    *side = (mapuot_side){.len = len,
                          .penalty = rho < INFINITY ? MAPUOT_KL : MAPUOT_BALANCED,
                          .weight = v[0],
                          .rho = v[1],
                          .absorbed = v[2],
                          .fi = v[3],
                          .base = v[4],
                          .log_scale = v[5],
                          .scale = v[6],
                          .marginal = v[7]};
    for (int64_t k = 0; k < filled; k++) {
        v[1][k] = k < len ? rho : 1.0;
        v[2][k] = INFINITY;
        v[3][k] = k < len && rho < INFINITY ? rho / (rho + reg) : 1.0;
    }
}

/* Set the state before its first pass at this reg and tol. */
static void begin(attempt *t, double reg, double tol, int64_t symmetric) {
    const mapuot_task *task = t->task;
    const mapuot_problem *p = t->problem;
    mapuot_state *state = &t->state;
    const int64_t np = padded(task->n), narrow = task->terms.dtype != MAPUOT_F64;
    void *kernel = state->kernel, *tile = state->tile;
    mapuot_terms terms = task->terms;
    terms.reg = reg;
    terms.tol = tol;
    terms.symmetric = symmetric;
    memset(state, 0, sizeof *state);
    memset(t->vectors, 0, (size_t)vectors_len(task) * sizeof(double));
    mapuot_limits_of(&terms, &state->limits);
    state->m = task->m;
    state->n = task->n;
    state->dtype = terms.dtype;
    state->ld = mapuot_leading(task->n, entry_bytes(terms.dtype));
    state->kernel = kernel;
    state->tile = tile;
    state->M = t->M;
    state->alpha = t->alpha;
    state->beta = t->beta;
    double *at = t->vectors, rho_rows = terms.rho_rows, rho_cols = terms.rho_cols;
    state->sums = at;
    state->work = at += np + PAD;
    state->history = at += 3 * np;
    at += mapuot_history(terms.anderson_depth, task->n);
    state->narrow_v = (float *)at;
    state->run = (float *)(at += np / 2);
    at += np / 2;
    place_side(&state->rows, task->m, task->m, rho_rows, reg, &at);
    place_side(&state->cols, task->n, np, rho_cols, reg, &at);
    state->limits.scale_limit = task->scale_limit;
    state->limits.most_scale = task->most_scale;
    state->limits.dual_constant = reg * (p->mass_a * p->mass_b);
    state->limits.dual_scale =
        (rho_rows < INFINITY ? rho_rows * p->mass_a : 0.0) + (rho_cols < INFINITY ? rho_cols * p->mass_b : 0.0);
    state->limits.row_weight = p->mass_a;
    state->progress = (mapuot_progress){
        .best_dual = -INFINITY, .progress_dual = -INFINITY, .best_error = INFINITY, .kappa = 1.0, .narrow = narrow};
}

/* At most count passes; p->last describes the last one. */
static int iterate(attempt *t, int64_t count) {
    mapuot_problem *p = t->problem;
    const int64_t room = sizeof t->recent / sizeof *t->recent;
    mapuot_stats *stats = t->task->trace ? t->task->trace + p->made : t->recent;
    int64_t made = 0;
    count = t->task->trace || count < room ? count : room;
    const int status = mapuot_iterate(t->serial, &t->state, count > 1 ? count : 1, stats, &made);
    p->made += made;
    p->last = stats[made - 1];
    return status;
}

/* Newton's step from the last pass, and the pass after it if it makes one. */
static int meet(attempt *t, int64_t limit) {
    mapuot_problem *p = t->problem;
    mapuot_stats two[2] = {p->last};
    int64_t made = 0;
    const int waits = t->newton.wait > 1;
    const int status = mapuot_meet(t->serial, &t->state, &t->newton, t->room, limit - p->made, two, &made);
    if (t->task->trace) memcpy(t->task->trace + p->made - 1, two, (size_t)(1 + made) * sizeof *two);
    p->made += made;
    p->last = two[made];
    t->certified = waits ? t->certified : p->made;
    return status;
}

/* The next log v becomes x, around which K is built. */
static void go_on(attempt *t) { memcpy(t->x, t->state.cols.log_scale, (size_t)t->task->n * sizeof(double)); }

/* Pass at this reg until tol is reached, starting from log_v and ending in log_v. Returns OUT_OF_PASSES at the
 * limit. */
static int run(attempt *t, double reg, double tol, int64_t limit, int64_t symmetric) {
    mapuot_problem *p = t->problem;
    t->newton = (mapuot_newton){.all_products = t->newton.all_products, .budget = t->task->hard_passes};
    begin(t, reg, tol, symmetric);
    t->state.progress.shift = shifted(t);
    int status = absorb(t);
    while (status == MAPUOT_RUNNING) {
        status = iterate(t, limit - p->made);
        status = status == MAPUOT_CONVERGED && t->meets ? meet(t, limit) : status;
        if ((status == MAPUOT_RUNNING || status == MAPUOT_ABSORB) && p->made >= limit) break;
        if (status == MAPUOT_ABSORB) {
            go_on(t);
            status = absorb(t);
        }
    }
    if (status >= 0 && p->last.rejected > 0) { /* a dropped step is no answer: go back to the image before it */
        if (status == MAPUOT_ABSORB) {
            go_on(t);
            status = absorb(t);
        }
        if (status >= 0) /* if columns are hard, that pass has yet to be certified */
            status = iterate(t, 1) == MAPUOT_CONVERGED && !t->meets ? MAPUOT_CONVERGED : OUT_OF_PASSES;
    }
    if (t->meets && t->certified < p->made &&
        (status == MAPUOT_ABSORB || status == OUT_OF_PASSES)) { /* certify the last pass */
        t->newton.wait = 0;
        status = meet(t, p->made) == MAPUOT_CONVERGED ? MAPUOT_CONVERGED : OUT_OF_PASSES;
    }
    for (int64_t j = 0; j < t->task->n; j++)
        t->log_v[j] = p->b[j] > 0.0 ? t->state.cols.log_scale[j] - t->state.progress.shift : -INFINITY;
    return status == MAPUOT_ABSORB ? OUT_OF_PASSES : status;
}

static void scale(int64_t len, double *x, double factor) {
    for (int64_t k = 0; k < len; k++) x[k] = x[k] * factor;
}

/* ---- larger regs ---- */

enum { LINES = 16, MOST_FAR = 4096, FEW = 8 };

/* Find the points where the cumulated mass passes odd multiples of total / (2 LINES). */
static void heavy(int64_t len, const double *weight, int64_t *at) {
    double total = 0.0, passed = weight[0];
    for (int64_t k = 0; k < len; k++) total += weight[k];
    for (int64_t line = 0, k = 0; line < LINES; at[line++] = k)
        while (k < len - 1 && passed < ((double)line + 0.5) / LINES * total) passed += weight[++k];
}

/* The second largest cost of point i to the heavy points `at` of the other side. */
static double second_largest(const mapuot_matrix *M, int64_t i, int64_t step, const int64_t *at, int64_t along) {
    double first = -INFINITY, second = -INFINITY;
    for (int line = 0; line < LINES; line++) {
        const int64_t k = i * step + at[line] * along;
        const double cost = M->dtype == MAPUOT_F64 ? ((const double *)M->data)[k] : ((const float *)M->data)[k];
        if (!isfinite(cost)) continue;
        second = fmax(second, fmin(first, cost));
        first = fmax(first, cost);
    }
    return second;
}

/* The second_largest cost of the farthest of `len` points after leaving out a few; INFINITY if there are too few
 * points. */
static double farthest(const mapuot_matrix *M, int64_t len, int64_t step, const int64_t *at, int64_t along) {
    const int64_t each = (len + MOST_FAR - 1) / MOST_FAR, count = (len + each - 1) / each;
    const int64_t few = (count / 64 < 2 ? count / 64 : 2) + count / 1000;
    double top[FEW];
    for (int q = 0; q < FEW; q++) top[q] = -INFINITY;
    for (int64_t i = 0; few && i < len; i += each) {
        double cost = second_largest(M, i, step, at, along);
        for (int64_t q = 0; q <= few; q++) {
            const double lower = fmin(top[q], cost);
            top[q] = fmax(top[q], cost);
            cost = lower;
        }
    }
    return few ? top[few] : INFINITY;
}

/* The part of M's range that matters: Problem.extent of mapuot/problem/problem.py. */
static double extent(const attempt *t) {
    const mapuot_problem *p = t->problem;
    const mapuot_matrix *M = &t->M;
    int64_t rows[LINES], cols[LINES];
    heavy(t->task->m, p->a, rows);
    heavy(t->task->n, p->b, cols);
    const double far = fmax(farthest(M, t->task->m, M->row_stride, cols, M->col_stride),
                            farthest(M, t->task->n, M->col_stride, rows, M->row_stride));
    return fmin(p->high - p->low, 2.0 * (far - p->low));
}

/* Return the number of passes at the end of a stage: later a factorisation is faster. */
static int64_t patient(const attempt *t, int64_t most) {
    const int64_t last = t->problem->made + t->task->hard_passes;
    return t->task->hard_passes > 0 && last < most ? last : most;
}

/* Carry out the stages of the task. */
static int carry_out(attempt *t) {
    const mapuot_task *task = t->task;
    const mapuot_stage *own = task->stages + task->count - 1;
    t->newton = (mapuot_newton){0}; /* it holds data of the thread's previous problem */
    t->certified = 0;
    const double reg = task->terms.reg, whole = (t->problem->high - t->problem->low) / reg;
    const int hard = isinf(task->terms.rho_rows) && isinf(task->terms.rho_cols);
    const double range_over_reg = task->count > 1 && whole > own[-1].range_over_reg && !hard ? extent(t) / reg : whole;
    t->problem->symmetric = t->problem->symmetric && t->problem->made < task->stages->most;
    if (t->problem->symmetric) own = task->stages;
    for (const mapuot_stage *stage = task->stages; stage < own && !t->problem->start; stage++) {
        if (stage->symmetric || !(range_over_reg > stage->range_over_reg) || t->problem->made >= stage->most) continue;
        t->problem->larger += 1;
        t->meets = hard;
        scale(task->n, t->log_v, 1.0 / stage->reg);
        if (run(t, reg * stage->reg, hard ? stage->balanced_tol : stage->tol, patient(t, stage->most), 0) < 0)
            return MAPUOT_BAD_ARGUMENT;
        scale(task->n, t->log_v, stage->reg);
    }
    t->meets = isinf(task->terms.rho_cols);
    const int64_t most = patient(t, own->most);
    const int status = run(t, reg, own->tol, most, own->symmetric);
    t->problem->products = t->newton.all_products;
    return status == OUT_OF_PASSES && most < task->max_passes ? MAPUOT_STALLED : status;
}

/* ---- the answer ---- */

static int tell(attempt *t) {
    const mapuot_task *task = t->task;
    mapuot_problem *p = t->problem;
    const mapuot_side *rows = &t->state.rows, *cols = &t->state.cols;
    const mapuot_progress *now = &t->state.progress;
    for (int64_t i = 0; i < task->m; i++) {
        p->log_u[i] = p->a[i] > 0.0 ? rows->log_scale[i] + rows->absorbed[i] + now->shift + now->offset : -INFINITY;
        p->row_marginal[i] = rows->marginal[i] * now->kappa;
        p->alpha[i] = p->a[i] > 0.0 ? p->log_u[i] + p->log_a[i] : -INFINITY;
    }
    for (int64_t j = 0; j < task->n; j++) {
        p->log_v[j] = p->b[j] > 0.0 ? t->state.work[j] - now->shift : -INFINITY;
        p->col_marginal[j] = cols->marginal[j];
        p->beta[j] = p->b[j] > 0.0 ? p->log_v[j] + p->log_b[j] : -INFINITY;
    }
    if (!p->plan) return MAPUOT_RUNNING;
    return mapuot_form_plan(t->serial, task->m, task->n, t->M, ONES, task->terms.reg, p->alpha, p->beta, task->M.dtype,
                            p->plan, task->n);
}

static void solve_one(attempt *t, mapuot_problem *problem) {
    const mapuot_task *task = t->task;
    problem->status = MAPUOT_BAD_ARGUMENT;
    take_matrix(t);
    if (!is_plain(t)) return;
    if (problem->start) memcpy(t->log_v, problem->start, (size_t)task->n * sizeof(double));
    else memset(t->log_v, 0, (size_t)task->n * sizeof(double));
    problem->larger = 0;
    problem->status = carry_out(t);
    const int told = problem->status == MAPUOT_CONVERGED || problem->status == OUT_OF_PASSES;
    if ((told || problem->status == MAPUOT_STALLED) && tell(t) < 0) problem->status = MAPUOT_BAD_ARGUMENT;
}

/* 2 scale (r_i x_i - sum_j P_ij y_j), and the same for columns. Points are taken relative to the mean of x, so that few
 * digits cancel. */
static void slopes_of_one(attempt *t, mapuot_problem *p) {
    const mapuot_task *task = t->task;
    const int64_t m = task->m, n = task->n, np = padded(n), d = task->M.points.d, e = d + 1;
    const double twice = 2.0 * task->M.points.scale, reg = task->terms.reg;
    double *mean = t->moved; /* its storage is reused by the products */
    take_matrix(t);
    memset(mean, 0, (size_t)d * sizeof(double));
    for (int64_t i = 0; i < m; i++)
        for (int64_t k = 0; k < d; k++) mean[k] += p->x[i * d + k] / (double)m;
    turn(t, p->y, mean, t->columns);
    for (int64_t j = 0; j < np; j++) t->columns[d * np + j] = j < n;
    for (int64_t i = 0; i < m; i++)
        for (int64_t k = 0; k < e; k++) t->rows[i * e + k] = k < d ? p->x[i * d + k] - mean[k] : 1.0;
    if (p->x_slope) {
        p->status = mapuot_apply(t->serial, m, n, t->M, ONES, reg, p->alpha, p->beta, e, t->columns, t->moved);
        for (int64_t i = 0; i < m; i++)
            for (int64_t k = 0; k < d; k++)
                p->x_slope[i * d + k] = twice * (t->moved[i * e + d] * t->rows[i * e + k] - t->moved[i * e + k]);
    }
    if (p->y_slope) {
        p->status = mapuot_apply_transpose(t->serial, m, n, t->M, ONES, reg, p->alpha, p->beta, e, t->rows, t->moved);
        for (int64_t j = 0; j < n; j++)
            for (int64_t k = 0; k < d; k++)
                p->y_slope[j * d + k] = twice * (t->moved[d * np + j] * t->columns[k * np + j] - t->moved[k * np + j]);
    }
}

/* ---- many ---- */

typedef struct {
    const mapuot_task *task;
    mapuot_problem *problems;
    void (*work)(attempt *, mapuot_problem *);
    mapuot_pool *serial;
    char *scratch;
    int64_t p, bytes;
    atomic_llong next;
} solve_job;

static void solve_task(void *context, int thread, int threads) {
    solve_job *job = context;
    mapuot_task own = *job->task;
    attempt t = {.task = &own, .serial = job->serial};
    (void)threads;
    lay_out(job->task, &t, job->scratch + thread * job->bytes);
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->p;) {
        t.problem = job->problems + i;
        own.m = t.problem->m;
        own.n = t.problem->n;
        own.terms = t.problem->terms ? *t.problem->terms : job->task->terms;
        own.hard_passes = t.problem->terms ? t.problem->hard_passes : job->task->hard_passes;
        job->work(&t, t.problem);
    }
}

static int for_each(mapuot_pool *pool, const mapuot_task *task, int64_t p, mapuot_problem *problems, void *scratch,
                    void (*work)(attempt *, mapuot_problem *)) {
    const int alone = mapuot_pool_threads(pool) == 1;
    solve_job job = {
        .task = task, .problems = problems, .work = work, .serial = alone ? pool : mapuot_pool_new(1, 1), .p = p};
    if (!job.serial) return MAPUOT_NO_MEMORY;
    job.scratch = scratch;
    job.bytes = mapuot_solve_bytes(task);
    atomic_init(&job.next, 0);
    pool_run(pool, solve_task, &job);
    if (!alone) mapuot_pool_free(job.serial);
    return MAPUOT_RUNNING;
}

int mapuot_solve(mapuot_pool *pool, const mapuot_task *task, int64_t p, mapuot_problem *problems, void *scratch) {
    return for_each(pool, task, p, problems, scratch, solve_one);
}

int mapuot_slopes(mapuot_pool *pool, const mapuot_task *task, int64_t p, mapuot_problem *problems, void *scratch) {
    for_each(pool, task, p, problems, scratch, slopes_of_one);
    for (int64_t i = 0; i < p; i++)
        if (problems[i].status < 0) return (int)problems[i].status;
    return MAPUOT_RUNNING;
}
