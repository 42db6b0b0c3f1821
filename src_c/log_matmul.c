/* log_matmul.c - batched log-semiring products on the pool: the exponentials of B's columns are computed for a group of
 * products, then the threads take blocks of rows of the whole group. Kernels: log_matmul_tmpl.c.
 */
#include <stdlib.h>
#include <string.h>

#include "flush.h"
#include "log_matmul.h"

enum { GROUP_BYTES = 4 << 20 }; /* bytes of exponentials of B held at once */

typedef struct {
    const log_matmul_kernels *kernels;
    log_product product; /* its A, B and out belong to the first product of the group */
    int64_t group, width;
    int64_t step_A, step_B, step_out; /* from one product to the next, in entries; step_B = 0: shared */
    int64_t size_F, size_E, size_S;   /* entries for one product, in a thread */
    int64_t panels;
} log_job;

/* product q of the group, with the buffers of a thread */
static log_product member(const log_job *job, int64_t q, int thread) {
    const int64_t w = job->width, f = job->step_B ? q : 0;
    log_product one = job->product;
    one.A = (const char *)one.A + q * job->step_A * w;
    one.B = (const char *)one.B + q * job->step_B * w;
    one.out = (char *)one.out + q * job->step_out * w;
    one.F = (char *)one.F + f * job->size_F * w;
    one.col_shift += f * job->panels * job->kernels->columns;
    one.E = (char *)one.E + thread * job->size_E * w;
    one.S += thread * job->size_S;
    return one;
}

static void pack_task(void *context, int thread, int threads) {
    const log_job *job = context;
    const int64_t total = (job->step_B ? job->group : 1) * job->panels;
    for (int64_t t = total * thread / threads; t < total * (thread + 1) / threads; t++) {
        log_product one = member(job, t / job->panels, thread);
        job->kernels->pack_columns(&one, t % job->panels);
    }
}

static void rows_task(void *context, int thread, int threads) {
    const log_job *job = context;
    const int64_t m = job->product.m, blocks = (m + ROW_BLOCK - 1) / ROW_BLOCK, total = job->group * blocks;
    const uint64_t before = begin_flush(1.0); /* the largest term of a sum is 1 */
    for (int64_t t = total * thread / threads; t < total * (thread + 1) / threads && !stopped(&job->product); t++) {
        const int64_t i = t % blocks * ROW_BLOCK;
        log_product one = member(job, t / blocks, thread);
        job->kernels->log_rows(&one, i, i + ROW_BLOCK < m ? i + ROW_BLOCK : m);
    }
    end_flush(before);
}

/* F, col_shift, E and S in one allocation; NULL if there is no memory */
static void *allocate(log_job *job, int64_t group, int threads) {
    const int64_t shifts = group * job->panels * job->kernels->columns, w = job->width;
    const int64_t sizes[] = {shifts * 8, threads * job->size_S * 8, group * job->size_F * w, threads * job->size_E * w};
    int64_t offset[5] = {0};
    char *base = NULL;
    for (int k = 0; k < 4; k++) offset[k + 1] = offset[k] + (sizes[k] + 63) / 64 * 64;
    if (posix_memalign((void **)&base, 64, (size_t)offset[4] + 64) != 0) return NULL;
    job->product.col_shift = (double *)base;
    job->product.S = (double *)(base + offset[1]);
    job->product.F = base + offset[2];
    job->product.E = base + offset[3];
    return base;
}

int mapuot_log_matmul(mapuot_pool *pool, int64_t p, int64_t m, int64_t k, int64_t n, mapuot_dtype dtype, const void *A,
                      const void *B, int32_t shared_B, int32_t exact, void *out, const int32_t *stop) {
    const int threads = mapuot_pool_threads(pool);
    log_job job = {.kernels = mapuot_active_kernels()->dtype[dtype]->log_matmul, .width = entry_bytes(dtype)};
    job.product = (log_product){.m = m, .k = k, .n = n, .exact = exact, .stop = stop};
    job.panels = (n + job.kernels->columns - 1) / job.kernels->columns;
    job.step_A = m * k;
    job.step_B = shared_B ? 0 : k * n;
    job.step_out = m * n;
    job.size_F = job.panels * job.kernels->columns * k;
    job.size_E = ROW_BLOCK * k;
    job.size_S = ROW_BLOCK * job.panels * job.kernels->columns;
    const int64_t fit = GROUP_BYTES / (job.size_F * job.width + 1) + 1;
    const int64_t group = shared_B ? p : fit < p ? fit : p;
    void *memory = allocate(&job, shared_B ? 1 : group, threads);
    if (!memory) return MAPUOT_NO_MEMORY;
    for (int64_t q = 0; q < p && !stopped(&job.product); q += group) {
        job.group = p - q < group ? p - q : group;
        job.product.A = (const char *)A + q * job.step_A * job.width;
        job.product.B = (const char *)B + q * job.step_B * job.width;
        job.product.out = (char *)out + q * job.step_out * job.width;
        pool_run(pool, pack_task, &job);
        pool_run(pool, rows_task, &job);
    }
    free(memory);
    return MAPUOT_RUNNING;
}
