/* barycenter.c - POT's iteration for the unbalanced barycenter of k histograms, and its rule for the end.
 *
 *     u_s = (A_s / K v_s)^fi,  q = (sum_s w_s (K^T u_s)^(1 - fi))^(1 / (1 - fi)),  v_s = (q / K^T u_s)^fi
 *
 * on logarithms, with fi = 1 the balanced one: log q = sum_s w_s log K^T u_s.  Both products of a histogram are one
 * row_pass over the K that all share; where its sums could underflow they are log_matmul's.  Source: Chizat, Peyre,
 * Schmitzer, Vialard 2018.  The same iteration for many weightings, and debiased: mapuot/api/barycenter.py.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "barycenter.h"

enum { MOST_LOG = 300 }; /* log u relative to K: beyond it a sum of scales leaves float64's range */

typedef struct {
    mapuot_barycenter_run *run;
    mapuot_pool *pool;
    const barycenter_kernels *kernels;
    mapuot_state *states; /* k, and behind them pointers to them */
    mapuot_state **each;
    double *log_s; /* k x n: log K^T u */
    double *table; /* 2 x n x k: log v and log K v with the histograms in columns, for log_matmul */
    void *memory;
} work;

/* a state of row_pass for each histogram: KL rows without a column side; 0 without memory */
static int prepare(work *w)
{
    const mapuot_barycenter_run *run = w->run;
    const int64_t k = run->k, n = run->n, np = padded(n);
    const int64_t each = 7 * np + np + SCALARS, shared = 2 * np, threads = mapuot_pool_threads(w->pool);
    const int64_t partial = threads > 1 ? threads * (np + SCALARS) : 0;
    const size_t doubles = (size_t)(k * each + shared + partial + 3 * k * n);
    double *at = NULL;
    w->states = calloc((size_t)k, sizeof *w->states + sizeof *w->each);
    if (!w->states || posix_memalign(&w->memory, 64, doubles * sizeof(double)) != 0) {
        free(w->states);
        return 0;
    }
    w->each = (mapuot_state **)(w->states + k);
    at = memset(w->memory, 0, doubles * sizeof(double));
    double *fi = at, *rho = at + np, *sums = at + shared;
    for (int64_t i = 0; i < n; i++)
        fi[i] = run->fi;
    at += shared + partial;
    for (int64_t s = 0; s < k; s++, at += each) {
        double *absorbed = at + np, *base = at + 2 * np;
        mapuot_state *state = w->each[s] = w->states + s;
        *state = (mapuot_state){.m = n, .n = n, .ld = run->ld, .dtype = MAPUOT_F64, .partial = sums};
        state->limits = (mapuot_limits){.reg = 1.0, .inv_reg = 1.0};
        state->kernel = (void *)(uintptr_t)run->kernel; /* row_pass does not write it */
        state->rows = (mapuot_side){.len = n, .penalty = MAPUOT_KL, .fi = fi, .rho = rho, .weight = at};
        memcpy(at, run->A + s * n, (size_t)n * sizeof(double));
        for (int64_t i = 0; i < n; i++) {
            absorbed[i] = at[i] > 0.0 ? run->low : INFINITY;
            base[i] = at[i] > 0.0 ? run->fi * log(at[i]) - (1.0 - run->fi) * run->low : 0.0;
        }
        state->rows.absorbed = absorbed;
        state->rows.base = base;
        state->rows.log_scale = at + 3 * np;
        state->rows.scale = at + 4 * np;
        state->rows.marginal = at + 5 * np;
        state->cols.scale = at + 6 * np;
        state->sums = at + 7 * np;
    }
    w->log_s = at;
    w->table = at + k * n;
    return 1;
}

/* u and log K^T u of all histograms by a pass over K; 0 where one of the products may have underflowed */
static int by_pass(const work *w)
{
    mapuot_barycenter_run *run = w->run;
    const int64_t n = run->n;
    double low, high;
    for (int64_t s = 0; s < run->k; s++) {
        w->kernels->range(n, run->log_v + s * n, &low, &high);
        if (!(high - low + run->spread < run->safe))
            return 0;
        w->states[s].progress.shift = -high;
        w->kernels->scales(n, run->log_v + s * n, high, w->states[s].cols.scale);
        memset(w->states[s].sums, 0, (size_t)(padded(n) + SCALARS) * sizeof(double));
    }
    if (mapuot_pool_threads(w->pool) == 1)
        w->kernels->pass(w->each, (int)run->k);
    else
        for (int64_t s = 0; s < run->k; s++)
            mapuot_row_pass(w->pool, w->states + s);
    for (int64_t s = 0; s < run->k; s++) {
        mapuot_state *state = w->states + s;
        double *log_u = run->log_u + s * n;
        for (int64_t i = 0; i < n; i++)
            log_u[i] = state->rows.absorbed[i] < INFINITY ? state->rows.log_scale[i] : -INFINITY;
        w->kernels->range(n, log_u, &low, &high);
        if (!(high - low + run->spread < run->safe && fabs(high) < MOST_LOG))
            return 0;
        for (int64_t i = 0; i < n; i++)
            log_u[i] += run->low + state->progress.shift;
        w->kernels->logs(n, state->sums, state->progress.shift, w->log_s + s * n);
    }
    return 1;
}

/* u and log K^T u of all histograms by sums that cannot underflow */
static int by_logs(const work *w)
{
    const mapuot_barycenter_run *run = w->run;
    const int64_t n = run->n, k = run->k;
    double *columns = w->table, *log_kv = w->table + n * k;
    for (int64_t s = 0; s < k; s++)
        for (int64_t j = 0; j < n; j++)
            columns[j * k + s] = run->log_v[s * n + j];
    int status = mapuot_log_matmul(w->pool, 1, n, n, k, MAPUOT_F64, run->log_kernel, columns, 0, 0, log_kv, NULL);
    for (int64_t s = 0; s < k; s++)
        for (int64_t i = 0; i < n; i++) {
            const double a = run->A[s * n + i];
            run->log_u[s * n + i] = a > 0.0 ? run->fi * (log(a) - log_kv[i * k + s]) : -INFINITY;
        }
    if (status == MAPUOT_RUNNING)
        status = mapuot_log_matmul(w->pool, 1, k, n, n, MAPUOT_F64, run->log_u, run->log_kernel, 0, 0, w->log_s, NULL);
    return status;
}

int mapuot_barycenter(mapuot_pool *pool, mapuot_barycenter_run *run, int64_t count)
{
    work w = {.run = run, .pool = pool, .kernels = mapuot_active_kernels()->barycenter};
    int status = MAPUOT_RUNNING;
    if (!prepare(&w))
        return MAPUOT_NO_MEMORY;
    for (int64_t k = 0; k < count && status == MAPUOT_RUNNING; k++) {
        if (!by_pass(&w))
            status = run->log_kernel ? by_logs(&w) : MAPUOT_ABSORB;
        if (status != MAPUOT_RUNNING)
            break;
        const double err = w.kernels->columns(run, w.log_s);
        if (run->made % run->every == 0) {
            run->err[run->looks++] = err;
            status = err < run->stop && run->made >= run->least ? MAPUOT_CONVERGED : status;
        }
        run->made++;
    }
    free(w.memory);
    free(w.states);
    return status;
}
