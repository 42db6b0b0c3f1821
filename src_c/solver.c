/* solver.c - one pass: row_pass over the pool (O(mn), reads K once), then finish_pass (O(n), finish.c).
 * Twins: mapuot/backends/reference.py, src_cuda/dense/iterate.cu, src_cuda/dense/portable.cu.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/rules.h"
#include "flush.h"
#include "kernels.h"
#include "schedule.h"

enum { TRIALS = 4, MOST_TILE = 1 << 20 };

int mapuot_scalars(void) { return SCALARS; }

int64_t mapuot_history(int64_t anderson_depth, int64_t n) {
    return (2 * anderson_depth + 2) * padded(n) + padded(anderson_depth * anderson_depth);
}

/* ---- row_pass ---- */

static int64_t sums_len(const mapuot_state *state) { return padded(state->n) + SCALARS; }

enum { WHOLE, DOTS, PROX }; /* row_pass or a part of it */

typedef struct {
    const mapuot_state *state;
    int part;
    const mapuot_pool *pool;
    row_schedule schedule; /* without shares if rows are split evenly */
} rows_job;

/* The type of a tile's entries: the storage of K, or for computed rows float64 except in narrow passes. */
static mapuot_dtype tile_dtype(const mapuot_state *state) {
    return makes_rows(state) && !state->progress.narrow ? MAPUOT_F64 : state->dtype;
}

static pass_fn pass_of(const mapuot_state *state, int part) {
    const dtype_kernels *k = mapuot_active_kernels()->dtype[tile_dtype(state)];
    if (part != WHOLE) return part == DOTS ? k->row_dots : mapuot_active_kernels()->sweeps->row_prox;
    return state->limits.in_place ? k->plan_pass : state->progress.narrow ? k->narrow_pass : k->row_pass;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The pass over rows [i0, i1). A worker that a test slows down repeats it several times; u and the marginals do not
 * change by that. */
static void sum_range(const rows_job *job, const mapuot_state *own, int thread, int64_t i0, int64_t i1, double *sums) {
    const pass_fn pass = pass_of(own, job->part);
    const int times = job->part == WHOLE && !own->limits.in_place ? pool_slowness(job->pool, thread) : 1;
    double *unused = NULL;
    if (times > 1 && posix_memalign((void **)&unused, 64, (size_t)sums_len(own) * sizeof(double)) == 0) {
        memset(unused, 0, (size_t)sums_len(own) * sizeof(double));
        for (int k = 1; k < times; k++) pass(own, i0, i1, unused);
        free(unused);
    }
    pass(own, i0, i1, sums);
}

/* Sum the range of a worker, then all rows that it can claim. */
static void sum_share(rows_job *job, const mapuot_state *own, int thread, double *sums) {
    mapuot_share *share = job->schedule.shares + thread;
    const double begun = now();
    int64_t i0 = share->first, i1 = last_row(&job->schedule, thread), rows = 0;
    do {
        sum_range(job, own, thread, i0, i1, sums);
        rows += i1 - i0;
    } while ((i1 = claim_rows(&job->schedule, thread, &i0)) > 0);
    share->rows = rows;
    share->seconds = now() - begun;
}

static void rows_task(void *context, int thread, int threads) {
    rows_job *job = context;
    mapuot_state own = *job->state, *state = &own;
    const int64_t across = is_halved(state) ? state->n : 0;
    const int64_t i0 = first_row_of(&state->M, across, state->m, thread, threads);
    const int64_t i1 = first_row_of(&state->M, across, state->m, thread + 1, threads);
    double *sums = threads == 1 ? state->sums : state->partial + thread * sums_len(state);
    if (job->part != DOTS || state->limits.symmetric) memset(sums, 0, (size_t)sums_len(state) * sizeof(double));
    own.run = state->progress.narrow ? state->run + thread * padded(state->n) : NULL;
    own.tile = makes_rows(state) ? state->tile + thread * TILE * state->ld : NULL;
    const uint64_t before = begin_flush(state->limits.in_place ? 0.0 : state->limits.reg); /* a plan may grow again */
    if (state->coarse.labelled)
        mapuot_active_kernels()->coarse->rows(state, pass_of(state, job->part), thread, threads, sums);
    else if (job->schedule.shares) sum_share(job, state, thread, sums);
    else sum_range(job, state, thread, i0, i1, sums);
    end_flush(before);
}

/* sums = the sum of the threads' sums in their order, so that the result does not depend on timing. */
static void reduce_task(void *context, int thread, int threads) {
    const mapuot_state *state = context;
    const int64_t len = sums_len(state), lines = (len + 7) / 8;
    const int64_t j0 = lines * thread / threads * 8, j1 = lines * (thread + 1) / threads * 8;
    for (int64_t j = j0; j < j1 && j < len; j++) {
        double sum = 0.0;
        for (int t = 0; t < threads; t++) sum += state->partial[t * len + j];
        state->sums[j] = sum;
    }
}

/* The number of rows of a tile. 8 rows cut the traffic of v and of the sums up to half a megabyte (8192 float32
 * columns, L2 1 MB: .74 instead of .62 of the read limit; 10240 float64 columns, L2 2 MB: .89, with 4 rows .95). With
 * longer rows two tiles must fit into L2 beside v and the sums. */
static int tile_rows(const mapuot_state *state) {
    const int64_t np = state->M.points.kept.first ? state->M.points.kept.width : padded(state->n);
    const int64_t row = np * entry_bytes(tile_dtype(state));
    const int64_t L2 = mapuot_l2_bytes(), room = L2 / 8 * 7 - np * (state->progress.narrow ? 8 : 16);
    if (makes_rows(state)) /* one tile. L2 1 MiB: 8 rows of 40,000 floats 3.3e9 pairs a second, 2 of 300,000 2.3e9 */
        return TILE * row <= 4 * L2 / 3 ? TILE : 4 * row <= 4 * L2 / 3 ? 4 : 2;
    if (TILE * row <= (L2 < MOST_TILE ? L2 : MOST_TILE) / 2) return TILE;
    return 2 * 4 * row > room && 2 * 2 * row <= room ? 2 : 4;
}

/* Make one pass over the rows, or a part of it. Returns the sum of u. The processor decides if the pipe is faster (on
 * one it gives .95 instead of .83 of the read bandwidth, on another half as much): the first passes try both ways in
 * turn. */
static double sum_rows(mapuot_pool *pool, mapuot_state *state, int part, int narrow) {
    mapuot_state pass = *state;
    double *seconds = state->seconds[narrow];
    const int plain = part == WHOLE && !makes_rows(state) && !state->coarse.labelled;
    int *tried = &state->tried[narrow], trial = state->piped < 0 && *tried < TRIALS && plain;
    const double begun = trial ? now() : 0.0;
    pass.progress.narrow = narrow;
    pass.tile_rows = state->tile_rows ? state->tile_rows : tile_rows(&pass);
    if (state->piped < 0) pass.piped = trial ? *tried % 2 : seconds[1] < seconds[0];
    rows_job job = {.state = &pass, .part = part, .pool = pool};
    if (state->shares && !state->coarse.labelled && part == WHOLE)
        schedule_rows(&job.schedule, state->shares, mapuot_pool_threads(pool), state->m);
    pool_run(pool, rows_task, &job);
    if (job.schedule.shares) note_paces(state->shares, mapuot_pool_threads(pool));
    if (trial) {
        double took = now() - begun, *best = &seconds[pass.piped];
        *best = *tried < 2 || took < *best ? took : *best;
        ++*tried;
    }
    if (mapuot_pool_threads(pool) > 1 && (part != DOTS || state->limits.symmetric)) pool_run(pool, reduce_task, state);
    return state->sums[padded(state->n) + ROW_SCALE];
}

static int in_range(double x) { return x <= NARROW_LIMIT && x >= 1 / NARROW_LIMIT; }

/* Convert v to float32. Returns 0 if its largest entry is near the ends of that range. */
static int narrow_scale(const mapuot_state *state) {
    double largest = 0.0;
    for (int64_t j = 0; j < padded(state->n); j++) {
        largest = state->cols.scale[j] > largest ? state->cols.scale[j] : largest;
        state->narrow_v[j] = (float)state->cols.scale[j];
    }
    return in_range(largest);
}

/* One potential: K v = K^T u. row_dots gives the rows in rows.marginal, and in sums the columns below the diagonal. */
static void sum_symmetric(mapuot_pool *pool, mapuot_state *state) {
    sum_rows(pool, state, DOTS, state->progress.narrow && narrow_scale(state));
    for (int64_t i = 0; i < state->m; i++) state->sums[state->before + i] += state->rows.marginal[i];
}

int mapuot_row_pass(mapuot_pool *pool, mapuot_state *state) {
    if (state->progress.narrow && !mapuot_active_kernels()->dtype[state->dtype]->narrow_pass)
        return MAPUOT_BAD_ARGUMENT;
    if (state->limits.symmetric) {
        sum_symmetric(pool, state);
        return MAPUOT_RUNNING;
    }
    if (state->progress.narrow && narrow_scale(state) && in_range(sum_rows(pool, state, WHOLE, 1)))
        return MAPUOT_RUNNING;
    sum_rows(pool, state, WHOLE, 0);
    return MAPUOT_RUNNING;
}

int mapuot_row_dots(mapuot_pool *pool, mapuot_state *state) {
    sum_rows(pool, state, DOTS, 0);
    return MAPUOT_RUNNING;
}

int mapuot_row_prox(mapuot_pool *pool, mapuot_state *state) {
    sum_rows(pool, state, PROX, 0);
    return MAPUOT_RUNNING;
}

/* ---- the pass ---- */

int mapuot_iterate(mapuot_pool *pool, mapuot_state *state, int64_t count, mapuot_stats *stats, int64_t *made) {
    int status = MAPUOT_RUNNING;
    for (*made = 0; *made < count && status == MAPUOT_RUNNING; ++*made) {
        status = mapuot_row_pass(pool, state);
        if (status == MAPUOT_RUNNING) status = mapuot_finish_pass(pool, state, stats + *made);
    }
    return status;
}
