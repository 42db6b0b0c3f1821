/* bandwidth.c - the benchmark's unit: arrays read, and read and written back, by the threads of a pool.
 *
 * bench/bandwidth.py compiles it for this machine, with a copy of the core's pool.  Arrays of float64 are 64-byte
 * aligned and shared among the threads in whole lines.  `repeats` runs go on inside one call, so that caches small
 * enough to be read in a microsecond can be measured; the threads do not wait for each other between them.
 */
#include <string.h>

#include "kernels.h"

#define EXPORT __attribute__((visibility("default")))
enum { LINE = 8 }; /* doubles */

typedef double line __attribute__((vector_size(64)));

typedef struct {
    double *x, *out;
    int64_t len, repeats, ahead;
    int streams;
} job;

/* the part of thread t: whole lines */
static int64_t first_entry(int64_t len, int t, int threads) { return len / LINE * t / threads * LINE; }

EXPORT mapuot_pool *bench_pool(int threads) { return mapuot_pool_new(threads, threads); }

static void fill_task(void *context, int thread, int threads) {
    const job *todo = context;
    for (int64_t k = first_entry(todo->len, thread, threads); k < first_entry(todo->len, thread + 1, threads); k++)
        todo->x[k] = 1.0;
}

/* the sum of len doubles, read as `streams` equal parts side by side, 8 lines a step */
static inline __attribute__((always_inline)) double read_streams(const double *x, int64_t len, int64_t ahead,
                                                                 const int streams) {
    const int64_t part = len / streams;
    const int lines = 8 / streams;
    line sum[8];
    memset(sum, 0, sizeof sum);
    for (int64_t k = 0; k + lines * LINE <= part; k += lines * LINE) {
#pragma GCC unroll 8
        for (int s = 0; s < 8; s++) {
            const double *p = x + s / lines * part + k + s % lines * LINE;
            if (ahead) __builtin_prefetch(p + ahead * LINE, 0, 3);
            sum[s] += *(const line *)p;
        }
    }
    double total = 0.0;
    for (int s = 0; s < 8; s++)
        for (int q = 0; q < LINE; q++) total += sum[s][q];
    return total;
}

static void read_task(void *context, int thread, int threads) {
    const job *todo = context;
    const int64_t k0 = first_entry(todo->len, thread, threads), len = first_entry(todo->len, thread + 1, threads) - k0;
    const double *x = todo->x + k0;
    double sum = 0.0;
    for (int64_t r = 0; r < todo->repeats; r++)
        sum += todo->streams == 1   ? read_streams(x, len, todo->ahead, 1)
               : todo->streams == 4 ? read_streams(x, len, todo->ahead, 4)
                                    : read_streams(x, len, todo->ahead, 8);
    todo->out[thread * LINE] = sum;
}

/* x = -x: a read and a write of the same line, as in the in-place pass */
static void scale_task(void *context, int thread, int threads) {
    const job *todo = context;
    const int64_t k1 = first_entry(todo->len, thread + 1, threads);
    for (int64_t r = 0; r < todo->repeats; r++)
        for (int64_t k = first_entry(todo->len, thread, threads); k < k1; k += LINE)
            *(line *)(todo->x + k) = -*(line *)(todo->x + k);
}

EXPORT void bench_fill(mapuot_pool *pool, double *x, int64_t len) {
    pool_run(pool, fill_task, &(job){.x = x, .len = len});
}

/* out: one sum a thread, 8 entries apart; streams: 1, 4 or 8 */
EXPORT void bench_read(mapuot_pool *pool, double *x, int64_t len, int streams, int64_t ahead, int64_t repeats,
                       double *out) {
    job todo = {.x = x, .len = len, .streams = streams, .ahead = ahead, .repeats = repeats, .out = out};
    pool_run(pool, read_task, &todo);
}

EXPORT void bench_scale(mapuot_pool *pool, double *x, int64_t len, int64_t repeats) {
    pool_run(pool, scale_task, &(job){.x = x, .len = len, .repeats = repeats});
}
