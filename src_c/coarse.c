/* coarse.c - clusters for the coarse correction (coarse_tmpl.c), the call that builds its matrix, and the order of
 * points in boxes. */
#include <math.h>

#include "kernels.h"

/* Points far from all others get clusters of their own if they are at most 1 / FAR_SHARE of the points of a cluster, up
 * to MOST_ALONE clusters: heavy tails have hundreds of such points, and the other points need clusters, too. */
enum { FAR_SHARE = 8, MOST_ALONE = 4 };

typedef struct {
    const mapuot_state *state;
    const sweep_args *args;
    int part;
} coarse_job;

static void coarse_task(void *context, int thread, int threads) {
    const coarse_job *job = context;
    mapuot_active_kernels()->coarse->part(job->state, job->args, job->part, thread, threads);
}

static void share_part(mapuot_pool *pool, const mapuot_state *state, const sweep_args *args, int part) {
    coarse_job job = {state, args, part};
    pool_run(pool, coarse_task, &job);
}

/* Factorise the matrix of the labelled passes of all processes. From the next pass on steps are corrected. */
int mapuot_coarse_matrix(mapuot_pool *pool, mapuot_state *state, double fi) {
    mapuot_coarse *coarse = &state->coarse;
    const int64_t k = coarse->clusters;
    double total = 0.0;
    for (int64_t I = 0; I < k; I++) total += coarse->mass[I];
    for (int64_t I = 0; I < k; I++) coarse->part[I] = coarse->mass[I] / total;
    coarse->fi = fi;
    share_part(pool, state, NULL, COARSE_WEIGH);
    share_part(pool, state, NULL, COARSE_PRODUCTS);
    mapuot_active_kernels()->coarse->factor(state);
    state->progress.coarse = total > 0.0 && isfinite(total) && isfinite(coarse->matrix[k * k - 1]);
    return MAPUOT_RUNNING;
}

void coarse_correct(mapuot_pool *pool, const mapuot_state *state, const sweep_args *args) {
    share_part(pool, state, args, COARSE_GATHER);
    mapuot_active_kernels()->coarse->solve(state, mapuot_pool_threads(pool));
    share_part(pool, state, args, COARSE_SPREAD);
}

typedef struct {
    int64_t width;
    const double *X; /* points x width */
    int64_t *order, *label;
} points;

/* Return the coordinate with the largest range over these points. */
static int64_t widest(const points *of, int64_t from, int64_t to) {
    int64_t found = 0;
    double most = -1.0;
    for (int64_t k = 0; k < of->width; k++) {
        double low = of->X[of->order[from] * of->width + k], high = low;
        for (int64_t i = from + 1; i < to; i++) {
            const double x = of->X[of->order[i] * of->width + k];
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
        if (high - low > most) most = high - low, found = k;
    }
    return found;
}

/* Order the points so that no point before the middle is above it in column k: Hoare's selection. */
static void select(const points *of, int64_t from, int64_t to, int64_t middle, int64_t k) {
    const double *X = of->X + k;
    int64_t *order = of->order, low = from, high = to - 1;
    while (low < high) {
        const double pivot = X[order[low + (high - low) / 2] * of->width];
        int64_t i = low, j = high;
        while (i <= j) {
            while (X[order[i] * of->width] < pivot) i++;
            while (X[order[j] * of->width] > pivot) j--;
            if (i <= j) {
                const int64_t other = order[i];
                order[i++] = order[j];
                order[j--] = other;
            }
        }
        low = middle >= i ? i : low;
        high = middle <= j ? j : high;
        if (middle > j && middle < i) return;
    }
}

/* The number of points before the middle of the range in column k, if these or the rest are few and far from all
 * others: within the others' clusters they would be moved like them. Else 0. */
static int64_t far_ones(const points *of, int64_t from, int64_t to, int64_t count, int64_t k) {
    double low = INFINITY, high = -INFINITY;
    int64_t before = 0, few;
    for (int64_t i = from; i < to; i++) {
        const double x = of->X[of->order[i] * of->width + k];
        low = fmin(low, x), high = fmax(high, x);
    }
    for (int64_t i = from; i < to; i++) before += of->X[of->order[i] * of->width + k] <= 0.5 * low + 0.5 * high;
    few = before < to - from - before ? before : to - from - before;
    return low < high && few * count * FAR_SHARE <= to - from ? before : 0;
}

static void halve(const points *of, int64_t from, int64_t to, int64_t first, int64_t count) {
    if (count > 1 && to - from > 1) {
        const int64_t middle = from + (to - from) * (count / 2) / count;
        select(of, from, to, middle, widest(of, from, to));
        halve(of, from, middle, first, count / 2);
        halve(of, middle, to, first + count / 2, count - count / 2);
        return;
    }
    for (int64_t i = from; i < to; i++) of->label[of->order[i]] = first;
}

int mapuot_split(int64_t m, int64_t width, const double *X, int64_t count, int64_t *order, int64_t *label) {
    const points all = {width, X, order, label};
    int64_t from = 0, to = m, first = 0;
    for (int64_t i = 0; i < m; i++) order[i] = i;
    for (; first < MOST_ALONE && first < count - 1 && to - from > 1; first++) {
        const int64_t k = widest(&all, from, to), before = far_ones(&all, from, to, count - first, k);
        if (before == 0) break;
        select(&all, from, to, from + before, k);
        if (2 * before < to - from) {
            halve(&all, from, from + before, first, 1);
            from += before;
        } else {
            halve(&all, from + before, to, first, 1);
            to = from + before;
        }
    }
    halve(&all, from, to, first, count - first);
    return MAPUOT_RUNNING;
}

/* The middle of a range in whole units, or in halves of a unit if the range is at most one: any power of 2 of
 * neighbours lie together. */
static int64_t middle_of(const points *of, int64_t from, int64_t to, int64_t *unit) {
    while (*unit > 1 && to - from <= *unit) *unit /= 2;
    if (to - from <= 1) return to;
    const int64_t units = (to - from + *unit - 1) / *unit, middle = from + units / 2 * *unit;
    select(of, from, to, middle, widest(of, from, to));
    return middle;
}

static void cut(const points *of, int64_t from, int64_t to, int64_t unit) {
    const int64_t middle = middle_of(of, from, to, &unit);
    if (to - from <= 1) return;
    cut(of, from, middle, unit);
    cut(of, middle, to, unit);
}

#define MOST_PARTS 256 /* number of parts that the threads share: several each, since parts take unequal times */

typedef struct {
    points all;
    int64_t unit, parts, edge[MOST_PARTS + 1], middle[MOST_PARTS];
    int last; /* 1: order each part completely, 0: cut each once */
} cuts;

static void cut_task(void *context, int thread, int threads) {
    cuts *job = context;
    for (int64_t k = thread; k < job->parts; k += threads) {
        int64_t unit = job->unit;
        if (job->last) cut(&job->all, job->edge[k], job->edge[k + 1], unit);
        else job->middle[k] = middle_of(&job->all, job->edge[k], job->edge[k + 1], &unit);
    }
}

int mapuot_order(mapuot_pool *pool, int64_t m, int64_t width, const double *X, int64_t unit, int64_t *order) {
    cuts job = {.all = {width, X, order, NULL}, .unit = unit, .parts = 1, .edge = {0, m}};
    for (int64_t i = 0; i < m; i++) order[i] = i;
    while (2 * job.parts <= MOST_PARTS && m / (2 * job.parts) > 2 * unit) {
        pool_run(pool, cut_task, &job);
        for (int64_t k = job.parts; k > 0; k--) {
            job.edge[2 * k] = job.edge[k];
            job.edge[2 * k - 1] = job.middle[k - 1];
        }
        job.parts *= 2;
    }
    job.last = 1;
    pool_run(pool, cut_task, &job);
    return MAPUOT_RUNNING;
}
