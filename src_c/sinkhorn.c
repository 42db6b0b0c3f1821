/* sinkhorn.c - the iterations that POT names, with POT's rule for their end: the change of u and v, every iteration or
 * every tenth, of one problem or of several that stop together.
 *
 * An iteration is one pass of the solver without acceleration; after k of them POT holds (u_k, v_k), where the pass
 * certifies (u_k, v_(k - 1)): log v is the next one.  Zeros, absorption and the translation are the solver's own.
 * Oracle: `one_iteration` in mapuot/pot/iterate.py, which other backends run.
 */
#include <math.h>
#include <string.h>

#include "kernels.h"

/* The pass leaves (u e^mu, v): log v = fi2 (log b - log K^T u) + fi2 mu at every column, read here at the heaviest,
 * with log K^T u = log(col marginal) - old log v. */
static double row_shift(const mapuot_state *state)
{
    const mapuot_side *cols = &state->cols;
    const double shift = state->progress.shift;
    int64_t best = -1;
    for (int64_t j = 0; state->limits.lam_rate > 0 && j < state->n; j++)
        if (cols->absorbed[j] < INFINITY && cols->marginal[j] > 0.0 &&
            (best < 0 || cols->weight[j] > cols->weight[best]))
            best = j;
    if (best < 0)
        return 0.0;
    const double log_v = cols->log_scale[best] - shift, old = state->work[best] - shift;
    const double mu = log_v / cols->fi[best] - (log(cols->weight[best]) - log(cols->marginal[best]) + old);
    return isfinite(mu) ? mu : 0.0;
}

/* (log u_k, log v_k) after a pass, -inf where a point is left out */
static void take(const mapuot_state *state, double *log_u, double *log_v)
{
    const mapuot_side *rows = &state->rows, *cols = &state->cols;
    const double up = state->progress.shift + state->progress.offset - row_shift(state);
    for (int64_t i = 0; i < state->m; i++)
        log_u[i] = rows->absorbed[i] < INFINITY ? rows->log_scale[i] + rows->absorbed[i] + up : -INFINITY;
    for (int64_t j = 0; j < state->n; j++)
        log_v[j] = cols->absorbed[j] < INFINITY ? cols->log_scale[j] - state->progress.shift : -INFINITY;
}

/* max|x - x'| / max(max x, max x', 1) of x = e^a, x' = e^b, without overflow */
static double relative_change(int64_t len, const double *a, const double *b)
{
    double top = 0.0, change = 0.0;
    for (int64_t k = 0; k < len; k++) {
        top = a[k] < INFINITY ? fmax(top, a[k]) : top;
        top = b[k] < INFINITY ? fmax(top, b[k]) : top;
    }
    for (int64_t k = 0; k < len; k++) {
        const double high = fmax(a[k], b[k]), d = high - fmin(a[k], b[k]);
        if (d > change && high < INFINITY) /* 1 - e^-d <= d: the others cannot be the largest */
            change = fmax(change, exp(high - top) * -expm1(-d));
    }
    return change;
}

/* what all problems have made becomes the state; POT's err where this iteration is looked at */
static void advance(int64_t m, int64_t n, int64_t p, mapuot_sinkhorn_run *run)
{
    if (run->made % run->every == 0) {
        const double err_u = relative_change(p * m, run->next_u, run->log_u);
        const double err_v = run->only_u ? err_u : relative_change(p * n, run->next_v, run->log_v);
        run->err[run->looks++] = 0.5 * (err_u + err_v);
    }
    memcpy(run->log_u, run->next_u, (size_t)(p * m) * sizeof(double));
    memcpy(run->log_v, run->next_v, (size_t)(p * n) * sizeof(double));
    memset(run->done, 0, (size_t)p * sizeof(int32_t));
    run->made++;
}

/* one pass of every problem that has not made this iteration; a pass that only showed K to be outgrown is repeated */
static int one_iteration(mapuot_pool *pool, int64_t p, mapuot_state *const *states, mapuot_sinkhorn_run *run,
                         mapuot_stats *stats)
{
    int outgrown = 0;
    for (int64_t q = 0; q < p; q++) {
        if (run->done[q])
            continue;
        int status = mapuot_row_pass(pool, states[q]);
        if (status == MAPUOT_RUNNING)
            status = mapuot_finish_pass(pool, states[q], stats + q);
        if (status < 0 || status == MAPUOT_NOT_FINITE)
            return status;
        if (!states[q]->progress.narrow) /* POT knows no stall, but float32 passes must give way */
            states[q]->progress.since_best = 0;
        run->absorb[q] = status == MAPUOT_ABSORB;
        outgrown |= run->absorb[q] && stats[q].rejected > 0;
        if (run->absorb[q] && stats[q].rejected > 0)
            continue;
        take(states[q], run->next_u + q * states[q]->m, run->next_v + q * states[q]->n);
        run->done[q] = 1;
    }
    return outgrown ? MAPUOT_ABSORB : MAPUOT_RUNNING;
}

int mapuot_sinkhorn(mapuot_pool *pool, int64_t p, mapuot_state *const *states, mapuot_sinkhorn_run *run, int64_t count)
{
    const int64_t first = run->made;
    for (int64_t k = 0; k < count; k++) {
        int status = one_iteration(pool, p, states, run, run->stats + (run->made - first) * p);
        if (status != MAPUOT_RUNNING)
            return status;
        advance(states[0]->m, states[0]->n, p, run);
        if (run->looks && run->err[run->looks - 1] < run->stop)
            return MAPUOT_CONVERGED;
        for (int64_t q = 0; q < p; q++)
            if (run->absorb[q])
                return MAPUOT_ABSORB;
    }
    return MAPUOT_RUNNING;
}
