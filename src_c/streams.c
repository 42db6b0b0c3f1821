/* streams.c - calls that read M once for results that need the plan or the cost but no K. Each splits the rows among
 * the threads and reduces their accumulators in order. Kernels: stream_tmpl.c, kernels_tmpl.c. Twin:
 * src_cuda/plan/stream.cu.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels.h"

typedef struct {
    stream_args args;
    stream_fn each;
    gather_fn gather;
    double *acc; /* threads x len */
    int64_t len;
    int64_t width; /* bytes of an entry of out */
} stream_job;

enum { PAGE = 4096 };

/* Touch the pages of out. The system zeroes new memory through the caches when it is first written, and streaming
 * stores then wait for these lines (8192^2 float64 plan, in reads of M: 5.8, and 4.1 with every page touched first). */
static void touch_rows(const stream_job *job, int64_t i0, int64_t i1) {
    const int64_t row = job->args.n * job->width, pitch = job->args.ld * job->width;
    for (int64_t i = i0; i < i1; i++)
        for (int64_t k = first_of(&job->args, i) * job->width; k < row; k += PAGE)
            ((volatile char *)job->args.out)[i * pitch + k] = 0;
}

static void stream_task(void *context, int thread, int threads) {
    stream_job *job = context;
    const stream_args *args = &job->args;
    const int64_t i0 = first_row_of(&args->M, args->across, args->m, thread, threads);
    const int64_t i1 = first_row_of(&args->M, args->across, args->m, thread + 1, threads);
    if (job->args.nontemporal) touch_rows(job, i0, i1);
    if (job->each) job->each(&job->args, i0, i1);
    else job->gather(&job->args, i0, i1, job->acc + thread * job->len);
}

/* Run gather with an accumulator of len entries a thread, all set to init before. acc[0 .. len) belongs to the first
 * thread. */
static int run_gather(mapuot_pool *pool, stream_job *job, int64_t len, double init) {
    const int threads = mapuot_pool_threads(pool);
    job->len = (len + PAD - 1) / PAD * PAD;
    job->acc = NULL;
    if (posix_memalign((void **)&job->acc, 64, (size_t)(job->len * threads) * sizeof(double)) != 0)
        return MAPUOT_NO_MEMORY;
    for (int64_t k = 0; k < job->len * threads; k++) job->acc[k] = init;
    pool_run(pool, stream_task, job);
    return MAPUOT_RUNNING;
}

static double sum_threads(const stream_job *job, mapuot_pool *pool, int64_t k) {
    double sum = 0.0;
    for (int t = 0; t < mapuot_pool_threads(pool); t++) sum += job->acc[t * job->len + k];
    return sum;
}

static stream_job new_job(int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg, const double *alpha,
                          const double *beta) {
    return (stream_job){.args = {.m = m, .n = n, .M = M, .c = c, .inv_reg = 1.0 / reg, .alpha = alpha, .beta = beta}};
}

/* the transpose of M, without moving M */
static mapuot_matrix turned(mapuot_matrix M) {
    const mapuot_matrix given = M;
    M.row_stride = given.col_stride;
    M.col_stride = given.row_stride;
    M.mask.row = given.mask.col;
    M.mask.col = given.mask.row;
    M.mask.turned = !given.mask.turned;
    return M;
}

int mapuot_extrema(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, double out[4]) {
    stream_job job = new_job(m, n, M, (mapuot_matrix){0}, 1.0, NULL, NULL);
    if (is_turned(&M)) job = new_job(n, m, turned(M), (mapuot_matrix){0}, 1.0, NULL, NULL);
    job.gather = mapuot_active_kernels()->streams->extrema;
    int status = run_gather(pool, &job, 4, 0.0);
    if (status != MAPUOT_RUNNING) return status;
    out[0] = INFINITY;
    out[1] = -INFINITY;
    for (int t = 0; t < mapuot_pool_threads(pool); t++) {
        out[0] = fmin(out[0], job.acc[t * job.len]);
        out[1] = fmax(out[1], job.acc[t * job.len + 1]);
    }
    out[2] = sum_threads(&job, pool, 2);
    out[3] = sum_threads(&job, pool, 3);
    free(job.acc);
    return status;
}

enum { SQUARE = 32 }; /* rows of a square of M; it and its transpose fit a cache */

/* Does a square of M equal its transpose, at entries (i, j) with j < i? `type` is the type of data. */
#define SAME_SQUARE(type)                                                                                              \
    static int same_square_of_##type(const mapuot_matrix *M, int64_t n, int64_t i0, int64_t j0) {                      \
        const type *data = M->data;                                                                                    \
        const int64_t down = M->row_stride, step = M->col_stride;                                                      \
        int same = 1;                                                                                                  \
        for (int64_t i = i0; i < n && i < i0 + SQUARE; i++)                                                            \
            for (int64_t j = j0; j < i && j < j0 + SQUARE; j++)                                                        \
                same &= data[i * down + j * step] == data[j * down + i * step];                                        \
        return same;                                                                                                   \
    }
SAME_SQUARE(double)
SAME_SQUARE(float)

typedef struct {
    mapuot_matrix M;
    int64_t n;
    atomic_int differs;
} same_job;

/* Threads take the rows of squares in turn, which balances their lengths. */
static void same_task(void *context, int thread, int threads) {
    same_job *job = context;
    const mapuot_matrix *M = &job->M;
    for (int64_t i = thread * SQUARE; i < job->n; i += threads * SQUARE)
        for (int64_t j = 0; j <= i && !atomic_load_explicit(&job->differs, memory_order_relaxed); j += SQUARE)
            if (!(M->dtype == MAPUOT_F64 ? same_square_of_double : same_square_of_float)(M, job->n, i, j))
                atomic_store(&job->differs, 1);
}

int mapuot_is_symmetric(mapuot_pool *pool, int64_t n, mapuot_matrix M) {
    same_job job = {.M = M, .n = n};
    atomic_init(&job.differs, 0);
    pool_run(pool, same_task, &job);
    return !job.differs;
}

/* Run balance, or one half of it: rows to the job's out, columns to col_max. */
static int run_balance(mapuot_pool *pool, stream_job *job, int half, double *col_max) {
    const int64_t n = job->args.n;
    job->args.half = half;
    job->gather = mapuot_active_kernels()->streams->balance;
    int status = run_gather(pool, job, n, -INFINITY);
    if (status != MAPUOT_RUNNING) return status;
    for (int64_t j = 0; half != ROW_HALF && j < n; j++) {
        col_max[j] = -INFINITY;
        for (int t = 0; t < mapuot_pool_threads(pool); t++) col_max[j] = fmax(col_max[j], job->acc[t * job->len + j]);
    }
    free(job->acc);
    return status;
}

/* Balance by the transpose: two reads of M in its own order take half the time of one across it. */
static int balance_turned(mapuot_pool *pool, int64_t m, stream_job *job, double *alpha, double *col_max) {
    int status = run_balance(pool, job, COLUMN_HALF, alpha);
    if (status != MAPUOT_RUNNING) return status;
    for (int64_t i = 0; i < m; i++) /* rows without an entry are left out of the other half by -inf */
        alpha[i] = alpha[i] == -INFINITY ? -INFINITY : -alpha[i];
    job->args.out = col_max;
    status = run_balance(pool, job, ROW_HALF, NULL);
    for (int64_t j = 0; j < job->args.m; j++) col_max[j] = -col_max[j];
    for (int64_t i = 0; i < m; i++) alpha[i] = alpha[i] == -INFINITY ? INFINITY : alpha[i];
    return status;
}

int mapuot_balance(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                   const double *log_v, double *alpha, double *col_max) {
    if (is_turned(&M) && (!c.data || is_turned(&c))) {
        stream_job job = new_job(n, m, turned(M), turned(c), reg, log_v, alpha);
        return balance_turned(pool, m, &job, alpha, col_max);
    }
    stream_job job = new_job(m, n, M, c, reg, alpha, log_v);
    job.args.out = alpha;
    return run_balance(pool, &job, BOTH_HALVES, col_max);
}

static int run_each(mapuot_pool *pool, stream_job *job, stream_fn each, void *out, int64_t ld, int64_t width) {
    job->each = each;
    job->args.out = out;
    job->args.ld = ld;
    job->width = width;
    job->args.nontemporal = job->args.m * ld * width > (int64_t)32 << 20;
    pool_run(pool, stream_task, job);
    return MAPUOT_RUNNING;
}

int mapuot_costs(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, double *out) {
    stream_job job = new_job(m, n, M, (mapuot_matrix){0}, 1.0, NULL, NULL);
    return run_each(pool, &job, mapuot_active_kernels()->streams->costs, out, n, sizeof *out);
}

int mapuot_build_kernel(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                        const double *alpha, const double *beta, int64_t across, mapuot_dtype dtype, void *K,
                        int64_t ld) {
    const int transposed = across && is_turned(&M); /* the transpose equals M */
    stream_job job = new_job(m, n, transposed ? turned(M) : M, c, reg, alpha, beta);
    job.args.across = M.start ? 0 : across;
    return run_each(pool, &job, mapuot_active_kernels()->dtype[dtype]->build_kernel, K, ld, entry_bytes(dtype));
}

typedef struct {
    stream_args args;
    double least;
    int64_t room, *count, *found;
    int32_t *column;
    double *data;
} kept_pairs_job;

static void kept_pairs_task(void *context, int thread, int threads) {
    kept_pairs_job *job = context;
    const int64_t i0 = first_row(job->args.m, thread, threads), i1 = first_row(job->args.m, thread + 1, threads);
    job->found[thread] =
        mapuot_active_kernels()->streams->kept_pairs(&job->args, i0, i1, job->least, job->room, job->count,
                                                     job->column + thread * job->room, job->data + thread * job->room);
}

int mapuot_kept_pairs(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                      const double *alpha, const double *beta, double least, int64_t room, int64_t *count,
                      int64_t *found, int32_t *column, double *data) {
    kept_pairs_job job = {new_job(m, n, M, c, reg, alpha, beta).args, least, room, count, found, column, data};
    int status = MAPUOT_RUNNING;
    pool_run(pool, kept_pairs_task, &job);
    for (int t = 0; t < mapuot_pool_threads(pool); t++) status = found[t] < 0 ? MAPUOT_ABSORB : status;
    return status;
}

int mapuot_form_plan(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                     const double *alpha, const double *beta, mapuot_dtype dtype, void *P, int64_t ld) {
    stream_job job = new_job(m, n, M, c, reg, alpha, beta);
    return run_each(pool, &job, mapuot_active_kernels()->dtype[dtype]->form_plan, P, ld, entry_bytes(dtype));
}

int mapuot_apply(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                 const double *alpha, const double *beta, int64_t d, const double *Xt, double *out) {
    stream_job job = new_job(m, n, M, c, reg, alpha, beta);
    job.args.d = d;
    job.args.X = Xt;
    return run_each(pool, &job, mapuot_active_kernels()->streams->apply, out, d, 0);
}

int mapuot_apply_transpose(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                           const double *alpha, const double *beta, int64_t d, const double *Y, double *out_t) {
    stream_job job = new_job(m, n, M, c, reg, alpha, beta);
    job.args.d = d;
    job.args.X = Y;
    job.gather = mapuot_active_kernels()->streams->apply_transpose;
    int status = run_gather(pool, &job, d * padded(n), 0.0);
    if (status != MAPUOT_RUNNING) return status;
    for (int64_t k = 0; k < d * padded(n); k++) out_t[k] = sum_threads(&job, pool, k);
    free(job.acc);
    return status;
}

int mapuot_plan_sums(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                     const double *alpha, const double *beta, double out[2], double *row_sum, double *col_sum) {
    const int64_t np = padded(n);
    stream_job job = new_job(m, n, M, c, reg, alpha, beta);
    job.args.row_sum = row_sum;
    job.gather = mapuot_active_kernels()->streams->plan_sums;
    int status = run_gather(pool, &job, np + 2, 0.0);
    if (status != MAPUOT_RUNNING) return status;
    out[0] = sum_threads(&job, pool, np);
    out[1] = sum_threads(&job, pool, np + 1);
    for (int64_t j = 0; col_sum && j < n; j++) col_sum[j] = sum_threads(&job, pool, j);
    free(job.acc);
    return status;
}
