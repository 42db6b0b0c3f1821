/* bandwidth.c - the benchmark's own library: memory bandwidth, and baselines of the pass.
 *
 * bench/library.py builds it, with a copy of the core's pool and headers, and declares the functions that EXPORT marks.
 * Arrays are 64-byte aligned and shared among the threads in whole lines.  `repeats` runs go on inside one call, so that
 * caches small enough to be read in a microsecond can be measured; the threads do not wait for each other between them.
 * Kernels: bandwidth_tmpl.c, in the instruction set that bench_isa names.
 */
#include <string.h>

#include "kernels.h"
#include "real.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    double (*read)(const double *x, int64_t len, int streams, int64_t ahead);
    void (*copy)(const double *x, double *y, int64_t len);
    void (*copy_nontemporal)(const double *x, double *y, int64_t len);
    void (*scale)(double *x, int64_t len);
    void (*two_dots[2])(const mapuot_state *state, int64_t i0, int64_t i1); /* f64, f32 */
    void (*two_sums[2])(const mapuot_state *state, int64_t i0, int64_t i1, double *sums);
    void (*shared_rows[2])(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, int thread, int threads,
                           int chunk);
} bench_kernels;

#define DECLARE_DTYPE(isa, dtype)                                                                                      \
    void two_dots_##dtype##_##isa(const mapuot_state *, int64_t, int64_t);                                             \
    void two_sums_##dtype##_##isa(const mapuot_state *, int64_t, int64_t, double *);                                   \
    void shared_rows_##dtype##_##isa(const mapuot_state *, int64_t, int64_t, double *, int, int, int);
#define DECLARE(isa)                                                                                                   \
    DECLARE_DTYPE(isa, f64)                                                                                            \
    DECLARE_DTYPE(isa, f32)                                                                                            \
    double read_##isa(const double *, int64_t, int, int64_t);                                                          \
    void copy_##isa(const double *, double *, int64_t);                                                                \
    void copy_nontemporal_##isa(const double *, double *, int64_t);                                                    \
    void scale_##isa(double *, int64_t);                                                                               \
    static const bench_kernels table_##isa = {read_##isa,                                                              \
                                              copy_##isa,                                                              \
                                              copy_nontemporal_##isa,                                                  \
                                              scale_##isa,                                                             \
                                              {two_dots_f64_##isa, two_dots_f32_##isa},                                \
                                              {two_sums_f64_##isa, two_sums_f32_##isa},                                \
                                              {shared_rows_f64_##isa, shared_rows_f32_##isa}};

MAPUOT_EACH_ISA(DECLARE)

static const bench_kernels *active = &table_scalar;

#define CHOOSE(set)                                                                                                    \
    if (strcmp(isa, #set) == 0) {                                                                                      \
        active = &table_##set;                                                                                         \
        return MAPUOT_RUNNING;                                                                                         \
    }

EXPORT int bench_isa(const char *isa)
{
    MAPUOT_EACH_ISA(CHOOSE)
    return MAPUOT_BAD_ARGUMENT;
}

EXPORT mapuot_pool *bench_pool(int threads) { return mapuot_pool_new(threads); }

/* ---- bandwidth ---- */

typedef struct {
    const double *x;
    double *y;
    int64_t len, repeats, ahead;
    int streams, nontemporal;
    double *out;
} stream_job;

/* the part of thread t: whole lines */
static int64_t first_entry(int64_t len, int t, int threads) { return len / 8 * t / threads * 8; }

static void fill_task(void *context, int thread, int threads)
{
    const stream_job *job = context;
    for (int64_t k = first_entry(job->len, thread, threads); k < first_entry(job->len, thread + 1, threads); k++)
        job->y[k] = 1.0;
}

static void read_task(void *context, int thread, int threads)
{
    const stream_job *job = context;
    const int64_t k0 = first_entry(job->len, thread, threads), k1 = first_entry(job->len, thread + 1, threads);
    double sum = 0.0;
    for (int64_t r = 0; r < job->repeats; r++)
        sum += active->read(job->x + k0, k1 - k0, job->streams, job->ahead);
    job->out[thread * 8] = sum;
}

static void copy_task(void *context, int thread, int threads)
{
    const stream_job *job = context;
    const int64_t k0 = first_entry(job->len, thread, threads), k1 = first_entry(job->len, thread + 1, threads);
    for (int64_t r = 0; r < job->repeats; r++)
        (job->nontemporal ? active->copy_nontemporal : active->copy)(job->x + k0, job->y + k0, k1 - k0);
}

static void scale_task(void *context, int thread, int threads)
{
    const stream_job *job = context;
    const int64_t k0 = first_entry(job->len, thread, threads), k1 = first_entry(job->len, thread + 1, threads);
    for (int64_t r = 0; r < job->repeats; r++)
        active->scale(job->y + k0, k1 - k0);
}

EXPORT int bench_fill(mapuot_pool *pool, double *x, int64_t len)
{
    pool_run(pool, fill_task, &(stream_job){.y = x, .len = len});
    return MAPUOT_RUNNING;
}

EXPORT int bench_read(mapuot_pool *pool, const double *x, int64_t len, int streams, int64_t ahead, int64_t repeats,
                      double *out)
{
    if (streams != 1 && streams != 4 && streams != 8)
        return MAPUOT_BAD_ARGUMENT;
    stream_job job = {.x = x, .len = len, .streams = streams, .ahead = ahead, .repeats = repeats, .out = out};
    pool_run(pool, read_task, &job);
    return MAPUOT_RUNNING;
}

EXPORT int bench_copy(mapuot_pool *pool, const double *x, double *y, int64_t len, int nontemporal, int64_t repeats)
{
    pool_run(pool, copy_task,
             &(stream_job){.x = x, .y = y, .len = len, .nontemporal = nontemporal, .repeats = repeats});
    return MAPUOT_RUNNING;
}

EXPORT int bench_scale(mapuot_pool *pool, double *x, int64_t len, int64_t repeats)
{
    pool_run(pool, scale_task, &(stream_job){.y = x, .len = len, .repeats = repeats});
    return MAPUOT_RUNNING;
}

/* ---- baselines of the pass ---- */

typedef struct {
    const mapuot_state *state;
    double *sums;
    int chunk;
} rows_job;

static int64_t sums_len(const mapuot_state *state) { return padded(state->n) + SCALARS; }

static void dots_task(void *context, int thread, int threads)
{
    const mapuot_state *state = ((rows_job *)context)->state;
    active->two_dots[state->dtype](state, first_row(state->m, thread, threads),
                                   first_row(state->m, thread + 1, threads));
}

static void sums_task(void *context, int thread, int threads)
{
    const mapuot_state *state = ((rows_job *)context)->state;
    double *sums = threads == 1 ? state->sums : state->partial + thread * sums_len(state);
    memset(sums, 0, (size_t)sums_len(state) * sizeof(double));
    active->two_sums[state->dtype](state, first_row(state->m, thread, threads),
                                   first_row(state->m, thread + 1, threads), sums);
}

static void shared_task(void *context, int thread, int threads)
{
    const rows_job *job = context;
    active->shared_rows[job->state->dtype](job->state, first_row(job->state->m, thread, threads),
                                           first_row(job->state->m, thread + 1, threads), job->sums, thread, threads,
                                           job->chunk);
}

static int fits(const mapuot_state *state) { return state->rows.fi && state->dtype != MAPUOT_BF16; }

EXPORT int bench_two_sweeps(mapuot_pool *pool, mapuot_state *state)
{
    const int threads = mapuot_pool_threads(pool);
    rows_job job = {.state = state};
    if (!fits(state))
        return MAPUOT_BAD_ARGUMENT;
    pool_run(pool, dots_task, &job);
    pool_run(pool, sums_task, &job);
    for (int64_t j = 0; threads > 1 && j < padded(state->n); j++) {
        state->sums[j] = 0.0;
        for (int t = 0; t < threads; t++)
            state->sums[j] += state->partial[t * sums_len(state) + j];
    }
    return MAPUOT_RUNNING;
}

EXPORT int bench_shared_sums(mapuot_pool *pool, const mapuot_state *state, int chunk, double *sums)
{
    const int threads = mapuot_pool_threads(pool);
    if (!fits(state) || (chunk != 4 && chunk != 8))
        return MAPUOT_BAD_ARGUMENT;
    memset(sums, 0, (size_t)(padded(state->n) * threads) * sizeof(double));
    pool_run(pool, shared_task, &(rows_job){.state = state, .sums = sums, .chunk = chunk});
    return MAPUOT_RUNNING;
}
