/* barycenter.c - the passes of a barycenter with soft sides, for few points, in one foreign call: NumPy takes .2 ms a
 * pass for its calls alone, as long as this file for 10 passes at n = 50.
 *
 * Twins: find, translated and guess of mapuot/ascend/barycenters.py, and Ascent of mapuot/ascend/passes.py, which make
 * all other passes and certify the plans that are left here. Formulas: docs/mathematics.md, "Barycenters".
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "left.h"
#include "marginals.h"

#define LEAST_SUM 1e-250 /* products below DBL_MIN are flushed, and do not count in a sum above this */
enum { ROWS = 16 };      /* rows of K at a time */
#define NOTHING (-1e300) /* log u of a row without mass, during passes */

typedef struct {
    mapuot_barycenter *x;
    int64_t size; /* p n */
    double rate, fi, power;
    double *state, *image, *residual, *last_image, *last_residual, *weight, *left, *share, *q, *moved, *grown, *last_q;
    double *vector, *zero, *B, *value, *factor, *move, *matrix, *dF, *dG;
    double mass, dual, terms;
    int64_t made; /* differences, in all */
} barycenter;

static double *place(double **at, int64_t count) {
    double *here = *at;
    *at += padded(count);
    return here;
}

static int64_t lay_out(const mapuot_barycenter *x, barycenter *t, double *room) {
    double *at = room;
    const int64_t p = x->p, n = x->n, size = p * n;
    double **const large[] = {&t->state,         &t->image,  &t->residual, &t->last_image,
                              &t->last_residual, &t->weight, &t->left,     &t->share};
    for (size_t k = 0; k < sizeof large / sizeof *large; k++) *large[k] = place(&at, size);
    double **const points[] = {&t->q, &t->moved, &t->grown, &t->vector, &t->last_q, &t->zero};
    for (size_t k = 0; k < sizeof points / sizeof *points; k++) *points[k] = place(&at, n);
    t->B = place(&at, p);
    t->value = place(&at, p);
    t->factor = place(&at, p);
    t->move = place(&at, p);
    t->matrix = place(&at, p * p);
    t->dF = place(&at, MAX_DEPTH * size);
    t->dG = place(&at, MAX_DEPTH * size);
    return at - room;
}

int64_t mapuot_barycenter_room(const mapuot_barycenter *x) {
    barycenter t;
    static double origin[1]; /* only differences of addresses are formed */
    return lay_out(x, &t, origin);
}

/* vector = e^(x - top). Returns top, the largest x */
static double exp_below(const barycenter *t, const double *x, double *vector) {
    double size = 0;
    return mapuot_active_kernels()->marginals->factors(t->x->n, x, t->zero, t->zero, 0, vector, &size);
}

/* out = log sums + shift. Returns 0 if a sum is too small. Entries of K and of a vector are at most 1, so none is too
 * large. */
static int logarithms(const barycenter *t, const double *sums, double shift, double *out) {
    int good = isfinite(shift);
    for (int64_t j = 0; j < t->x->n; j++) good &= sums[j] > LEAST_SUM;
    if (good) mapuot_active_kernels()->left->logs(t->x->n, sums, t->zero, shift, out);
    return good;
}

/* out = K x, or K^T x, for all histograms: K is read once, by rows that stay in a cache. */
static void multiply(const barycenter *t, int turned, const double *x, double *out) {
    const left_kernels *kernels = mapuot_active_kernels()->left;
    const int64_t n = t->x->n, ld = t->x->ld;
    if (turned) memset(out, 0, (size_t)t->size * sizeof(double));
    for (int64_t i = 0; i < n; i += ROWS) {
        const int64_t rows = n - i < ROWS ? n - i : ROWS;
        const double *K = t->x->kernel + i * ld;
        for (int64_t from = 0; from < t->size; from += n)
            if (turned) kernels->sweep(rows, n, ld, K, NULL, x + from + i, NULL, out + from);
            else kernels->sweep(rows, n, ld, K, x + from, NULL, out + from + i, NULL);
    }
}

/* out = log(K e^logs), or log(K^T e^logs). Returns 0 if a sum is too small */
static int log_products(const barycenter *t, int turned, const double *logs, double *out) {
    const int64_t p = t->x->p, n = t->x->n;
    double *vectors = t->left, *sums = t->weight, *top = t->move;
    int good = 1;
    for (int64_t s = 0; s < p; s++) top[s] = exp_below(t, logs + s * n, vectors + s * n);
    multiply(t, turned, vectors, sums);
    for (int64_t s = 0; s < p && good; s++) good = logarithms(t, sums + s * n, top[s] - t->x->low, out + s * n);
    return good;
}

/* log u and log K^T u */
static int potentials(const barycenter *t) {
    const mapuot_barycenter *x = t->x;
    if (!log_products(t, 0, t->state, x->log_u)) return 0;
    for (int64_t k = 0; k < t->size; k++)
        x->log_u[k] = x->mass[k] > 0 ? t->fi * (x->log_mass[k] - x->log_u[k]) : NOTHING;
    return log_products(t, 1, x->log_u, x->log_s);
}

/* log q, the power mean of the columns of log_s, and each histogram's share of it */
static void power_mean(const barycenter *t) {
    const mapuot_barycenter *x = t->x;
    for (int64_t j = 0; j < x->n; j++) {
        double top = -INFINITY, less = 0;
        for (int64_t s = 0; s < x->p; s++) top = x->log_s[s * x->n + j] > top ? x->log_s[s * x->n + j] : top;
        for (int64_t s = 0; s < x->p; s++) {
            const double grown = expm1(t->power * (x->log_s[s * x->n + j] - top));
            less += x->weight[s] * grown;
            t->share[s * x->n + j] = x->weight[s] * (1 + grown);
        }
        x->log_q[j] = top + log1p(less) / t->power;
        for (int64_t s = 0; s < x->p; s++) t->share[s * x->n + j] /= 1 + less;
    }
}

/* B_s = w_s |A_s u_s^(-reg / rho)|, and the dual value of each histogram, w_s rho (|A_s| - B_s / w_s) */
static void amounts(const barycenter *t) {
    const mapuot_barycenter *x = t->x;
    for (int64_t s = 0, from = 0; s < x->p; s++, from += x->n) {
        for (int64_t i = 0; i < x->n; i++) t->vector[i] = x->mass[from + i] > 0 ? x->log_u[from + i] : 0;
        const mapuot_worth sums = mapuot_active_kernels()->marginals->worth(x->n, x->log_mass + from, x->mass + from,
                                                                            t->vector, NULL, x->rho, x->reg);
        t->B[s] = x->weight[s] * sums.amount;
        t->value[s] = x->weight[s] * sums.value;
    }
}

/* Add each[s], or `by` if that is NULL, to log u and log s of histogram s. */
static void translate(const barycenter *t, const double *each, double by) {
    const mapuot_barycenter *x = t->x;
    for (int64_t s = 0; s < x->p; s++) {
        const double more = each ? each[s] : by, change = expm1(-t->rate * more);
        for (int64_t k = s * x->n; k < (s + 1) * x->n; k++) {
            x->log_u[k] += more;
            x->log_s[k] += more;
        }
        t->value[s] -= x->rho * t->B[s] * change;
        t->B[s] += t->B[s] * change;
    }
}

/* Solve (matrix) move = move by Cholesky's method. Returns 0 if the matrix is not positive definite. */
static int solve(int64_t p, double *matrix, double *move) {
    for (int64_t i = 0; i < p; i++) {
        for (int64_t j = 0; j <= i; j++) {
            double sum = matrix[i * p + j];
            for (int64_t k = 0; k < j; k++) sum -= matrix[i * p + k] * matrix[j * p + k];
            if (i == j && !(sum > 0)) return 0;
            matrix[i * p + j] = i == j ? sqrt(sum) : sum / matrix[j * p + j];
        }
        for (int64_t k = 0; k < i; k++) move[i] -= matrix[i * p + k] * move[k];
        move[i] /= matrix[i * p + i];
    }
    for (int64_t i = p - 1; i >= 0; i--) {
        for (int64_t k = i + 1; k < p; k++) move[i] -= matrix[k * p + i] * move[k];
        move[i] /= matrix[i * p + i];
    }
    return 1;
}

/* The step of Newton's method in the translations of all histograms. Returns 0 if there is none. */
static int newton(const barycenter *t) {
    const mapuot_barycenter *x = t->x;
    const int64_t p = x->p, n = x->n;
    double total = 0, least = INFINITY, lack = 0;
    for (int64_t s = 0; s < p; s++) total += t->B[s];
    for (int64_t s = 0; s < p; s++) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++) sum += t->share[s * n + j] * t->q[j];
        t->move[s] = fabs(t->B[s] - sum) <= 32 * DBL_EPSILON * t->B[s] ? 0 : t->B[s] - sum;
        lack = fmax(lack, fabs(t->move[s]));
        const double diagonal = t->rate * t->B[s] + t->power * sum;
        least = fmin(least, diagonal);
        for (int64_t r = 0; r <= s; r++) {
            double product = 0;
            for (int64_t j = 0; j < n; j++) product += t->share[s * n + j] * t->q[j] * t->share[r * n + j];
            t->matrix[s * p + r] = (1 - t->power) * product + (r == s ? diagonal : 0);
        }
    }
    if (!(lack > 0) || !(least > 4 * DBL_EPSILON * total) || !solve(p, t->matrix, t->move)) return 0;
    for (int64_t s = 0; s < p; s++)
        if (!(fabs(t->power * t->move[s]) < 1)) return 0;
    return 1;
}

/* Find the translations that raise the dual value, and q. Returns 0 if a number is not finite. */
static int translated(const barycenter *t) {
    const mapuot_barycenter *x = t->x;
    const int64_t p = x->p, n = x->n;
    power_mean(t);
    amounts(t);
    const double top = exp_below(t, x->log_q, t->q);
    double sum = 0, total = 0;
    for (int64_t j = 0; j < n; j++) sum += t->q[j];
    for (int64_t s = 0; s < p; s++) total += t->B[s];
    if (!(sum > 0 && sum < INFINITY && total > 0 && total < INFINITY)) return 0;
    const double common = (log(total / sum) - top) / (1 + t->rate);
    translate(t, NULL, common);
    for (int64_t j = 0; j < n; j++) t->q[j] = exp(x->log_q[j] += common);
    if (!newton(t)) return 1;
    double gained = 0, paid = 0;
    for (int64_t s = 0; s < p; s++) {
        gained -= x->rho * t->B[s] * expm1(-t->rate * t->move[s]);
        t->factor[s] = expm1(t->power * t->move[s]);
    }
    for (int64_t j = 0; j < n; j++) {
        double grown = 0;
        for (int64_t s = 0; s < p; s++) grown += t->factor[s] * t->share[s * n + j];
        t->grown[j] = 1 + grown;
        t->moved[j] = log1p(grown) / t->power;
        t->vector[j] = exp(x->log_q[j] + t->moved[j]);
        paid += x->reg * (t->vector[j] - t->q[j]);
    }
    if (!(gained >= paid)) return 1;
    for (int64_t j = 0; j < n; j++) {
        for (int64_t s = 0; s < p; s++) t->share[s * n + j] *= (1 + t->factor[s]) / t->grown[j];
        x->log_q[j] += t->moved[j];
    }
    translate(t, t->move, 0);
    memcpy(t->q, t->vector, (size_t)n * sizeof(double));
    return 1;
}

/* Make a pass from the state: its plan, dual value and mass. Returns 0 if it leaves the range of K. */
static int find(barycenter *t) {
    const mapuot_barycenter *x = t->x;
    if (!potentials(t) || !translated(t)) return 0;
    t->mass = t->dual = t->terms = 0;
    for (int64_t j = 0; j < x->n; j++) t->mass += t->q[j];
    for (int64_t s = 0; s < x->p; s++) {
        t->dual += t->value[s];
        t->terms += fabs(t->value[s]);
    }
    t->dual -= x->reg * t->mass;
    t->terms += x->reg * t->mass;
    return isfinite(t->dual) && t->mass * fmin(x->reg, 1) > DBL_MIN && isfinite(t->mass * fmax(x->reg, 1));
}

/* log v of the plan, the changes of the state and of q, and weights. Returns the guess of the plan's error */
static double imagine(barycenter *t) {
    mapuot_barycenter *x = t->x;
    double squares = 0, changed = 0, residual = 0;
    for (int64_t j = 0; j < x->n; j++) {
        changed += fabs(t->q[j] - t->last_q[j]);
        t->last_q[j] = t->q[j];
    }
    for (int64_t from = 0; from < t->size; from += x->n)
        for (int64_t j = 0, k = from; j < x->n; j++, k++) {
            const double y = t->fi * (x->log_q[j] - x->log_s[k]), change = y - t->state[k];
            x->log_v[k] = t->image[k] = y;
            t->residual[k] = change;
            t->weight[k] = t->share[k] * t->q[j]; /* the columns of the plan */
            squares += t->weight[k] * change * change;
            residual = fabs(change) > residual ? fabs(change) : residual;
        }
    x->change = changed / t->mass;
    x->residual = residual;
    return mapuot_plan_error(0.5 * x->rho * squares / (t->fi * t->fi) / (x->reg * t->mass));
}

/* The next state: Anderson's step, or the image without history. Returns 1 for a step. */
static int extrapolate(barycenter *t, int begun) {
    const size_t bytes = (size_t)t->size * sizeof(double);
    const int64_t slot = t->made % MAX_DEPTH * t->size;
    double gram[MAX_DEPTH * MAX_DEPTH], right[MAX_DEPTH], gamma[MAX_DEPTH];
    for (int64_t k = 0; k < t->size && begun; k++) {
        t->dF[slot + k] = t->residual[k] - t->last_residual[k];
        t->dG[slot + k] = t->image[k] - t->last_image[k];
    }
    t->made += begun;
    memcpy(t->last_residual, t->residual, bytes);
    memcpy(t->last_image, t->image, bytes);
    memcpy(t->state, t->image, bytes);
    if (!t->made) return 0;
    const int64_t count = t->made < MAX_DEPTH ? t->made : MAX_DEPTH;
    mapuot_anderson_products(1, &t->size, count, t->dF, t->residual, t->weight, gram, right);
    mapuot_anderson_weights(1, count, gram, right, gamma);
    mapuot_anderson_combined(1, &t->size, count, gamma, t->dF, t->dG, t->residual, t->image, t->state, t->left);
    return 1;
}

static int passes(barycenter *t) {
    mapuot_barycenter *x = t->x;
    const size_t bytes = (size_t)t->size * sizeof(double);
    mapuot_limits limits = {.reg = x->reg};
    mapuot_progress progress = {.best_dual = -INFINITY};
    mapuot_stats stats = {0};
    int begun = 0, stepped = 0, dropped = 0;
    for (x->made = 0; x->made < x->most || dropped;) { /* a dropped step is no pass: rarely one more */
        if (!find(t)) return MAPUOT_ABSORB;
        x->made += 1;
        progress.extrapolated = stepped;
        limits.dual_scale = t->terms;
        stats.dual = t->dual;
        stats.mass = t->mass;
        mapuot_settle(&limits, &progress, &stats);
        if (stats.rejected > 0) {
            memcpy(t->state, t->last_image, bytes);
            begun = stepped = 0;
            dropped = 1;
            t->made = 0;
            continue;
        }
        dropped = 0;
        const double guess = imagine(t);
        if (!isfinite(guess)) return MAPUOT_ABSORB;
        if (guess <= x->tol) return MAPUOT_CONVERGED;
        stepped = extrapolate(t, begun);
        begun = 1;
    }
    return MAPUOT_RUNNING;
}

int mapuot_barycenter_passes(mapuot_barycenter *x, double *room) {
    barycenter t = {.x = x, .size = x->p * x->n, .rate = x->reg / x->rho};
    t.fi = 1 / (1 + t.rate);
    t.power = t.rate * t.fi;
    lay_out(x, &t, room);
    memcpy(t.state, x->log_v, (size_t)t.size * sizeof(double));
    memset(t.last_q, 0, (size_t)x->n * sizeof(double));
    memset(t.zero, 0, (size_t)x->n * sizeof(double));
    const int status = passes(&t);
    if (status == MAPUOT_ABSORB || !log_products(&t, 0, x->log_v, x->log_kv)) return MAPUOT_ABSORB;
    for (int64_t k = 0; k < t.size; k++)
        if (!(x->mass[k] > 0)) x->log_u[k] = -INFINITY;
    return status;
}
