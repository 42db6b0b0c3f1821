/* newton.c - Newton's step towards hard columns: a bound for a plan that misses them, and a better start for the next
 * pass.
 *
 * A pass meets its rows and misses hard columns by b - s. Its plan P is optimal for its own column masses; its distance
 * from the plan for the masses b depends on how columns exchange mass. Let q be the marginal that a potential asks for
 * (b where hard, b e^(-g / rho) for KL), fi = rho / (rho + reg), k = reg / rho and D = s + k q. Newton's step (x, y) of
 * (log u, log v)
 *     x = -(fi / r) P y,     S y = D y - P^T ((fi / r) o P y) = q - s
 * is found by conjugate gradients. P' = P o (1 + x_i + y_j) has the marginals asked for, up to the residual, hence
 *     gap(P)   <= reg y S y / (2 (1 - w)),           w = max |x_i + y_j|, k |x_i|, k |y_j|,
 *     gap(P'') <= reg w^2 y S y / (8 (1 - w)),       P'' = P o e^(x_i + y_j), and the plan of a pass from its log v.
 * The residual moves the plan by at most 2 min(m, n) times its size; another bound uses its energy:
 * docs/mathematics.md, "Hard marginals".
 * One potential (u = v): S y = D y + P y = q - s, both sides miss the same, and w = 2 max |y|.
 * Many marginals: S y = D y + sum_l P_kl y_l = q - s at the points of all, and w is the sum of the largest |y| of each.
 * All vectors but the potentials are relative to the plan's mass: squares of masses of 1e-160 would underflow to 0, as
 * if nothing were missed.
 * The caller computes the products, by reverse communication, so that this file serves every kind of problem. */
#include <math.h>
#include <string.h>

#include "common/rules.h"
#include "kernels.h"

#define MOST_W 0.9   /* largest w of a step that certifies */
#define HOPELESS 2.0 /* with a larger w, end before the equations are solved */
#define ENOUGH 0.1   /* stop when the residual counts less than this fraction of the error after the step */
/* many marginals: safety factor, since the error of the residual is divided by the least curvature found so far */
#define SAFETY 2.0
#define SINGULAR 1e-14 /* curvature relative to D of a direction that no plan can follow, or of rounding */
#define LONGEST 1.0    /* largest change of log v by a step that does not certify */
#define MOST_STEPS 60
#define UNREACHED 0.1    /* largest share of tol for hard columns with masses that underflow */
#define PASSES_BETWEEN 8 /* passes between two steps if the first was too far off to be solved */

/* If all rows and columns are hard, ask the columns for as much mass as the rows have in each part of M: rounding may
 * separate the two masses, and no plan can meet both. Returns the difference. */
static double even_out(mapuot_newton *w, const double *weight, const int32_t *part, int64_t parts) {
    double *have = w->t, *ask = w->d, apart = 0.0;
    if (parts > w->n) return 0.0;
    memset(have, 0, (size_t)parts * sizeof(double));
    memset(ask, 0, (size_t)parts * sizeof(double));
    for (int64_t j = 0; j < w->n; j++)
        if (w->marginal[j] > 0.0) {
            have[part ? part[j] : 0] += w->marginal[j];
            ask[part ? part[j] : 0] += weight[j];
        }
    for (int64_t j = 0; j < w->n; j++)
        if (w->marginal[j] > 0.0) w->asked[j] = weight[j] * (have[part ? part[j] : 0] / ask[part ? part[j] : 0]);
    for (int64_t k = 0; k < parts; k++) apart += fabs(have[k] - ask[k]);
    return apart;
}

/* The next direction: residual / D, conjugate to the last one. w->size: the residual in the norm of 1 / D. */
static void direct(mapuot_newton *w) {
    double size = 0.0;
    for (int64_t j = 0; j < w->n; j++) size += w->left[j] * (w->left[j] / w->diagonal[j]);
    const double ratio = w->products > 0 ? size / w->size : 0.0;
    for (int64_t j = 0; j < w->n; j++) w->d[j] = w->left[j] / w->diagonal[j] + ratio * w->d[j];
    w->ratios[w->products] = ratio;
    w->size = size;
}

double mapuot_newton_error(double apart, double bound) { return apart + bound * (1 + 2 * apart); }

/* Is an eigenvalue of the tridiagonal matrix of the conjugate gradients (Lanczos) below x? */
static int is_below(const mapuot_newton *w, double x) {
    double pivot = 1.0;
    for (int64_t k = 0; k < w->products; k++) {
        const double a = 1.0 / w->steps_made[k] + (k ? w->ratios[k] / w->steps_made[k - 1] : 0.0);
        const double c = k ? w->ratios[k] / (w->steps_made[k - 1] * w->steps_made[k - 1]) : 0.0;
        pivot = a - x - (k ? c / pivot : 0.0);
        if (!(pivot > 0.0)) return 1;
    }
    return 0;
}

/* The least curvature of S relative to D met by the directions so far, from below, to 5 %. */
static double least_curvature(const mapuot_newton *w) {
    double high = w->curvature, low = high;
    while (low > SINGULAR && is_below(w, low)) high = low, low *= 0.5;
    while (high > 1.05 * low) {
        const double x = sqrt(low * high);
        if (is_below(w, x)) high = x;
        else low = x;
    }
    return low;
}

typedef struct {
    double far;    /* max y - min y: x is minus a mean of y */
    double soft;   /* max k |y| */
    double left;   /* sum of |residual|, relative to the plan's mass */
    double rest;   /* max |residual| / D, times the largest k above 1 */
    double along;  /* y times the residual: 0 up to rounding */
    double energy; /* y S y */
} look;

/* max |sum_k y_k| over all choices of one point from each marginal */
static double farthest(const mapuot_newton *w) {
    double lowest = 0.0, highest = 0.0;
    for (int64_t k = 0; k < w->marginals; k++) {
        double low = INFINITY, high = -INFINITY;
        for (int64_t j = w->start[k]; j < w->start[k + 1]; j++) {
            low = w->marginal[j] > 0.0 ? fmin(low, w->y[j]) : low;
            high = w->marginal[j] > 0.0 ? fmax(high, w->y[j]) : high;
        }
        lowest += low;
        highest += high;
    }
    return fmax(highest, -lowest);
}

static look look_at(const mapuot_newton *w) {
    look at = {0};
    double rate = 1.0, low = w->hard_rows ? INFINITY : 0.0, high = w->hard_rows ? -INFINITY : 0.0;
    for (int64_t j = 0; j < w->n; j++) {
        if (!(w->marginal[j] > 0.0)) continue;
        low = fmin(low, w->y[j]);
        high = fmax(high, w->y[j]);
        at.soft = fmax(at.soft, w->rate[j] * fabs(w->y[j]));
        at.left += fabs(w->left[j]);
        at.rest = fmax(at.rest, fabs(w->left[j]) / w->diagonal[j]);
        at.along += w->y[j] * w->left[j];
        rate = fmax(rate, w->rate[j]);
        at.energy += w->y[j] * (w->asked[j] - w->left[j]);
    }
    at.far = w->marginals ? farthest(w) * fmax(1.0, w->widest) : w->symmetric ? 2.0 * fmax(high, -low) : high - low;
    at.rest *= rate;
    if (w->symmetric) at.left *= 2.0, at.energy *= 2.0;
    return at;
}

/* Neither plan is good enough: go on with passes, unless that was tried often enough. */
static int leave_open(mapuot_newton *w, double most) {
    for (int64_t j = 0; j < w->n; j++) w->y[j] = fmax(-LONGEST, fmin(LONGEST, w->y[j]));
    w->wait = most <= MOST_W ? 1 : PASSES_BETWEEN;
    const int spent = w->budget > 0 && w->all_products >= w->budget;
    return w->tried++ < MOST_STEPS && !spent ? MAPUOT_OPEN : MAPUOT_GIVES_UP;
}

/* The mass that the residual moves, relative to the plan's mass: along paths, or for many marginals by its energy and
 * an estimate of the least curvature. */
static double moved_by_rest(mapuot_newton *w, const look *at, double sides, double noise, int singular) {
    if (!w->marginals) return w->paths * (at->left + noise);
    const int spent = w->size <= noise * noise; /* the residual is rounding */
    if (!(spent ? w->products > 0 : w->products > 1 && !singular)) return INFINITY;
    w->curvature = least_curvature(w);
    return SAFETY * sqrt((sides * w->size + noise * noise) / w->curvature);
}

/* Compute the bounds of this plan and of the plan after the step, and decide if the equations are solved far enough.
 * With soft rows S >= least D bounds the effect of the residual through S^-1, in energy and point by point. */
static int judge_step(mapuot_newton *w, int singular) {
    const look at = look_at(w);
    const double sides = w->symmetric ? 2.0 : 1.0;
    const double share = w->marginals ? w->rounding : sums_rounding((double)w->m);
    const double noise = sides * share, most = fmax(at.far, at.soft), tail = (at.rest + share) / w->least;
    const double hidden = 1.0 + noise / fmax(w->missed, noise / 16.0);
    const double rest = moved_by_rest(w, &at, sides, noise, singular);
    const double more = (sides * w->size + share * noise) / w->least, gap = 0.5 * at.energy,
                 after = most * most * gap / 4.0;
    double here = INFINITY, step = INFINITY;
    int solved = w->size <= share * noise;
    if (most <= MOST_W && at.energy < INFINITY) {
        const double over = 1.0 / (1.0 - most);
        here = plan_error(gap * over) + rest;
        step = plan_error(after * over) + rest;
        solved |= fmin(rest, plan_error(0.5 * more * over)) <= ENOUGH * plan_error(after * over);
    }
    if (most + tail <= MOST_W && at.energy < INFINITY) {
        const double over = 1.0 / (1.0 - most - tail), both = sqrt(after) + sqrt(0.5 * more);
        here = fmin(here, plan_error((gap + fabs(at.along) + 0.5 * more) * over));
        step = fmin(step, plan_error(both * both * over));
    }
    w->error = mapuot_newton_error(w->apart, fmin(w->most, here * hidden));
    w->after = step * hidden;
    if (w->error <= w->tol) return MAPUOT_HOLDS;
    if (mapuot_newton_error(w->apart, w->after) <= w->tol) return MAPUOT_HOLDS_AFTER;
    if (singular || solved || most > HOPELESS || w->products >= MAPUOT_MOST_PRODUCTS || !(at.energy < INFINITY) ||
        (w->budget > 0 && w->all_products >= w->budget))
        return leave_open(w, most);
    return MAPUOT_ASKS;
}

/* The bound of the pass itself, y = 0: it suffices where columns miss tol / paths, as after steps with a
 * factorisation. */
static int judge_pass(mapuot_newton *w) {
    const int64_t tried = w->tried;
    const int verdict = judge_step(w, 0);
    if (verdict == MAPUOT_HOLDS || verdict == MAPUOT_GIVES_UP) return verdict;
    w->tried = tried;
    return MAPUOT_ASKS;
}

int mapuot_newton_begin(mapuot_newton *w, const double *weight, const double *rho, const double *log_v,
                        const int32_t *part, int64_t parts) {
    const double sides = w->symmetric ? 2.0 : 1.0;
    int all = 1;
    double mass = 0.0, asked = 0.0, hard = 0.0, unreached = 0.0;
    for (int64_t j = 0; j < w->n; j++) {
        const int is_hard = isinf(rho[j]) && weight[j] > 0.0;
        w->rate[j] = is_hard ? 0.0 : w->reg / rho[j];
        w->asked[j] = is_hard || !(weight[j] > 0.0) ? weight[j] : weight[j] * exp(-w->rate[j] * log_v[j]);
        mass += w->marginal[j];
        hard += is_hard ? fabs(weight[j] - w->marginal[j]) : 0.0;
        asked += weight[j];
        all &= is_hard || !(weight[j] > 0.0);
        unreached += is_hard && !(w->marginal[j] > 0.0) ? weight[j] : 0.0;
    }
    mass /= w->marginals ? (double)w->marginals : 1.0;
    asked /= w->marginals ? (double)w->marginals : 1.0;
    w->mass = mass;
    w->missed = 0.0;
    w->products = 0;
    w->curvature = sides;
    w->apart = fmax(w->found - sides * hard / mass, 0.0);
    if (all && w->hard_rows && !w->symmetric) w->apart += even_out(w, weight, part, part ? parts : 1) / mass;
    for (int64_t j = 0; j < w->n; j++) {
        const double s = w->marginal[j], q = w->asked[j];
        const int in = s > 0.0 && q > 0.0;
        w->left[j] = w->asked[j] = in ? (q - s) / mass : 0.0;
        w->diagonal[j] = in ? s / mass + w->rate[j] * (q / mass) : 1.0;
        w->rate[j] = in ? w->rate[j] : 0.0;
        w->y[j] = w->d[j] = 0.0; /* the memory is uninitialised: 0 times NaN is NaN */
        w->missed += sides * fabs(w->left[j]);
    }
    w->most = all ? 1.0 + asked / mass : INFINITY; /* |P| + |P*| */
    w->paths = (all && w->hard_rows ? 1.0 : 2.0) * fmin((double)w->m, (double)w->n);
    const double lost = 2.0 * w->paths * (unreached / mass); /* by plans of the other columns alone */
    const int reached = unreached == 0.0 || (lost <= UNREACHED * w->tol && !w->symmetric && !w->marginals);
    w->apart += reached ? lost : 0.0;
    w->error = w->found < INFINITY ? mapuot_newton_error(w->apart, w->most) : w->found;
    w->after = INFINITY;
    direct(w);
    w->first = w->size;
    if (!(mass > 0.0) || !(w->found < INFINITY) || !(w->size < INFINITY) || !reached) return MAPUOT_GIVES_UP;
    if (w->size > 0.0) return w->rough > 0.0 || w->marginals ? MAPUOT_ASKS : judge_pass(w);
    w->error = w->found + lost;
    return w->error <= w->tol ? MAPUOT_HOLDS : MAPUOT_GIVES_UP;
}

int mapuot_newton_next(mapuot_newton *w) {
    double along = 0.0, plain = 0.0;
    for (int64_t j = 0; j < w->n; j++) {
        const double Dd = w->diagonal[j] * w->d[j];
        w->t[j] = w->marginal[j] > 0.0 ? Dd - w->t[j] / w->mass : 0.0;
        along += w->d[j] * w->t[j];
        plain += w->d[j] * Dd;
    }
    const int rough = w->rough > 0.0, curved = along > SINGULAR * plain;
    if (!curved) return rough ? MAPUOT_OPEN : judge_step(w, 1);
    const double step = w->size / along;
    for (int64_t j = 0; j < w->n; j++) {
        w->y[j] += step * w->d[j];
        w->left[j] -= step * w->t[j];
    }
    w->steps_made[w->products++] = step;
    w->all_products += 1;
    direct(w);
    if (!rough) return judge_step(w, 0);
    const int most = w->enough < MAPUOT_MOST_PRODUCTS ? (int)w->enough : MAPUOT_MOST_PRODUCTS;
    return w->size <= w->rough * w->rough * w->first || w->products >= most ? MAPUOT_OPEN : MAPUOT_ASKS;
}

/* ---- products by passes over the K of a state ---- */

int64_t mapuot_newton_room(int64_t n) { return 7 * padded(n) + 2 * (MAPUOT_MOST_PRODUCTS + PAD); }

void mapuot_newton_place(mapuot_newton *w, int64_t n, double *room) {
    double **vectors[] = {&w->asked, &w->diagonal, &w->rate, &w->left, &w->y, &w->d, &w->t};
    for (int k = 0; k < 7; k++, room += padded(n)) *vectors[k] = room;
    w->steps_made = room;
    w->ratios = room + MAPUOT_MOST_PRODUCTS + PAD;
}

void mapuot_newton_factors(const mapuot_state *state, double *factor, double *v) {
    const mapuot_side *rows = &state->rows, *cols = &state->cols;
    for (int64_t i = 0; i < state->m && !state->limits.symmetric;
         i++) { /* (fi / r) u kappa u: P^T ((fi / r) o P d) is v K^T (factor o K (v d)) */
        const double r = rows->marginal[i], u = rows->scale[i], fi = 1.0 / (1.0 + state->limits.reg / rows->rho[i]);
        const double found = state->progress.kappa * fi * u * (u / r);
        factor[i] = !(r > TINY) ? 0.0 : isnormal(found) ? found : NAN; /* 0 would drop a row that ties columns */
    }
    memset(v, 0, (size_t)padded(state->n) * sizeof(double));
    for (int64_t j = 0; j < state->n; j++)
        v[j] = cols->absorbed[j] < INFINITY ? exp(state->work[j] - cols->absorbed[j]) : 0.0;
}

int64_t mapuot_meet_room(int64_t m, int64_t n) { return mapuot_newton_room(n) + padded(m) + 3 * padded(n) + PAD; }

int mapuot_newton_solve(mapuot_pool *pool, const mapuot_state *state, mapuot_newton *w, double *room) {
    const int64_t n = state->n, np = padded(n);
    const mapuot_side *cols = &state->cols;
    double *v = room, *vd = v + np, *log_v = vd + np, *factor = log_v + np;
    mapuot_state own = *state;
    mapuot_newton_place(w, n, factor + padded(state->m) + PAD);
    w->m = state->m;
    w->n = n;
    w->reg = state->limits.reg;
    w->symmetric = state->limits.symmetric;
    w->hard_rows = isinf(state->rows.rho[0]);
    w->least = w->symmetric ? 0.0 : 1.0 / (1.0 + state->rows.rho[0] / state->limits.reg);
    w->marginal = cols->marginal;
    mapuot_newton_factors(state, factor, v);
    memset(vd, 0, (size_t)np * sizeof(double));
    for (int64_t j = 0; j < n; j++) log_v[j] = state->work[j] - state->progress.shift;
    own.rows.factor = factor;
    own.rows.marginal = w->symmetric ? factor : own.rows.marginal; /* this pass writes K v here */
    own.cols.scale = vd;
    own.progress.narrow = 0;
    own.coarse.labelled = 0;
    int verdict = mapuot_newton_begin(w, cols->weight, cols->rho, log_v, NULL, 1);
    while (verdict == MAPUOT_ASKS) {
        for (int64_t j = 0; j < n; j++) vd[j] = v[j] * w->d[j];
        if (mapuot_row_pass(pool, &own) < 0) return MAPUOT_GIVES_UP;
        for (int64_t j = 0; j < n; j++) w->t[j] = (w->symmetric ? -v[j] : v[j]) * own.sums[j];
        verdict = mapuot_newton_next(w);
    }
    return verdict;
}

/* Continue the state from log v + y. */
static void move_on(mapuot_state *state, const mapuot_newton *w) {
    for (int64_t j = 0; j < state->n; j++) state->cols.log_scale[j] = state->work[j] + w->y[j];
    mapuot_set_scale(state);
    forget(&state->progress);
    state->progress.since_absorb = 1;
}

int mapuot_meet(mapuot_pool *pool, mapuot_state *state, mapuot_newton *w, double *room, int64_t passes_left,
                mapuot_stats *stats, int64_t *made) {
    *made = 0;
    stats->status = (double)(state->progress.status = MAPUOT_RUNNING);
    const int known = has_value(&state->limits, &state->progress, stats); /* this is enough: go no further */
    if (w->wait-- > 1 && !known) return MAPUOT_RUNNING;
    w->found = stats->error;
    w->tol = state->limits.tol;
    int verdict = mapuot_newton_solve(pool, state, w, room);
    stats->error = w->error;
    if (verdict == MAPUOT_HOLDS || known) stats->status = MAPUOT_CONVERGED;
    else if (verdict == MAPUOT_GIVES_UP) stats->status = MAPUOT_STALLED;
    else if (passes_left > 0) move_on(state, w);
    if (verdict == MAPUOT_HOLDS_AFTER && passes_left > 0 && !known) {
        const int status = mapuot_iterate(pool, state, 1, stats + 1, made);
        if (status != MAPUOT_CONVERGED && status != MAPUOT_RUNNING) return status;
        stats += 1;
        stats->error = mapuot_newton_error(stats->error, w->after);
        stats->status = is_enough(&state->limits, &state->progress, stats) ? MAPUOT_CONVERGED : MAPUOT_RUNNING;
    }
    state->progress.status = (int64_t)stats->status;
    return (int)stats->status;
}
