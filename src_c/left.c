/* left.c - sums and updates over W, the array that one marginal of a kernel leaves for all others (an array or a
 * triangle of marginals, mapuot/marginals/blocks.py): sums for the certificate, and turns: each axis takes its
 * best factor for the others. One sweep of W gives the sums of all axes: from the last axis on, each axis is multiplied
 * by its factor and summed over. Vectors: left_tmpl.c.
 */
#include <math.h>
#include <string.h>

#include "left.h"
#include "marginals.h"

enum { SHARED_ENTRIES = 1 << 17 }; /* least entries of W to share its rows among threads */

/* number of points of the axes before k */
static int64_t before(const mapuot_left *left, int64_t k) {
    int64_t count = 0;
    for (int64_t m = 0; m < k; m++) count += left->size[m];
    return count;
}

static int64_t entries(const mapuot_left *left, int64_t k) {
    int64_t count = 1;
    for (int64_t m = 0; m < k; m++) count *= left->size[m];
    return count;
}

void mapuot_product(int64_t axes, const int64_t *size, const double *factor, double flush, double *v) {
    const left_kernels *kernels = mapuot_active_kernels()->left;
    int64_t count = 1;
    v[0] = 1.0;
    for (int64_t m = 0; m < axes; m++) {
        kernels->products(count, size[m], flush, factor, v);
        factor += size[m];
        count *= size[m];
    }
}

typedef struct {
    const left_kernels *kernels;
    int64_t rows, n;
    const double *V, *x, *w;
    double *dots, *partial;
} sweep_job;

static void sweep_task(void *context, int thread, int threads) {
    const sweep_job *job = context;
    const int64_t first = job->rows * thread / threads, rows = job->rows * (thread + 1) / threads - first;
    double *sums = job->partial + thread * job->n;
    memset(sums, 0, (size_t)job->n * sizeof(double));
    job->kernels->sweep(rows, job->n, job->n, job->V + first * job->n, job->x, job->w ? job->w + first : NULL,
                        job->dots ? job->dots + first : NULL, sums);
}

static void sweep(const mapuot_left *left, int64_t rows, int64_t n, const double *V, const double *x, const double *w,
                  double *dots, double *sums) {
    const sweep_job job = {mapuot_active_kernels()->left, rows, n, V, x, w, dots, left->partial};
    const int threads = left->pool && V == left->W && rows * n > SHARED_ENTRIES ? mapuot_pool_threads(left->pool) : 1;
    if (threads > 1) pool_run(left->pool, sweep_task, (void *)&job);
    if (w) memset(sums, 0, (size_t)n * sizeof(double));
    if (threads == 1) job.kernels->sweep(rows, n, n, V, x, w, dots, sums);
    for (int t = 0; w && threads > 1 && t < threads; t++)
        for (int64_t j = 0; j < n; j++) sums[j] += left->partial[t * n + j];
}

/* the sums of axis k, or of all axes up to k = 0 */
static void contract(const mapuot_left *left, int64_t k, int all) {
    const double *V = left->W;
    double *dots = left->work, *weights = dots + entries(left, left->axes - 1);
    int64_t m = left->axes - 1, rows = entries(left, m);
    for (; m > 0 && m >= k; rows /= left->size[--m]) {
        const int sum = all || m == k, go_on = all || m > k;
        const double *x = left->factor + before(left, m);
        if (sum) mapuot_product(m, left->size, left->factor, left->flush, weights);
        sweep(left, rows, left->size[m], V, go_on ? x : NULL, sum ? weights : NULL, dots, left->sums + before(left, m));
        V = dots;
    }
    if (k == 0) memcpy(left->sums, V, (size_t)left->size[0] * sizeof(double));
}

/* log_s of axis k from its sums, if these are in range */
static int take_logs(mapuot_left *left, int64_t k) {
    const int64_t at = before(left, k), n = left->size[k];
    double more = left->base, least = left->least > TINY ? left->least : TINY;
    for (int64_t m = 0; m < left->axes; m++) more += m == k ? 0 : left->top[m];
    for (int64_t j = at; j < at + n; j++)
        if (!(left->sums[j] >= least && left->sums[j] < INFINITY)) return MAPUOT_ABSORB;
    mapuot_active_kernels()->left->logs(n, left->sums + at, left->shift + at, more, left->log_s + at);
    return isfinite(more) ? MAPUOT_RUNNING : MAPUOT_ABSORB;
}

static int take_factor(mapuot_left *left, int64_t k) {
    const int64_t at = before(left, k);
    double size = 0;
    left->top[k] = mapuot_active_kernels()->marginals->factors(left->size[k], left->log_weight + at, left->log_u + at,
                                                               left->shift + at, left->flush, left->factor + at, &size);
    return isfinite(left->top[k]) ? MAPUOT_RUNNING : MAPUOT_ABSORB;
}

/* log mass of the plan from the sums of axis k */
static void take_mass(mapuot_left *left, int64_t k) {
    const int64_t at = before(left, k), n = left->size[k];
    double mass;
    mapuot_active_kernels()->left->sweep(1, n, n, left->factor + at, left->sums + at, NULL, &mass, NULL);
    left->log_mass = log(mass) + left->base;
    for (int64_t m = 0; m < left->axes; m++) left->log_mass += left->top[m];
}

int mapuot_left_factors(mapuot_left *left) {
    int status = MAPUOT_RUNNING;
    for (int64_t k = 0; k < left->axes && status == MAPUOT_RUNNING; k++) status = take_factor(left, k);
    return status;
}

int mapuot_left_read(mapuot_left *left) {
    int status = MAPUOT_RUNNING;
    if (left->W) contract(left, 0, 1);
    for (int64_t k = 0; k < left->axes && status == MAPUOT_RUNNING; k++) status = take_logs(left, k);
    if (status == MAPUOT_RUNNING) take_mass(left, 0);
    return status;
}

int mapuot_left_turn(mapuot_left *left, int64_t first, int64_t end, int32_t given) {
    for (int64_t k = first; k < end; k++) {
        const int64_t at = before(left, k), n = left->size[k];
        if (!(left->fi[k] > 0)) continue;
        if (!given) contract(left, k, 0);
        given = 0;
        if (take_logs(left, k) != MAPUOT_RUNNING) return MAPUOT_ABSORB;
        for (int64_t j = at; j < at + n; j++) left->log_u[j] = -left->fi[k] * left->log_s[j];
        if (take_factor(left, k) != MAPUOT_RUNNING) return MAPUOT_ABSORB;
        take_mass(left, k);
    }
    return MAPUOT_RUNNING;
}
