/* boxes.c - bounds on the plan between boxes of points, shared by the threads; the arithmetic: boxes_tmpl.c. */
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

typedef struct {
    box_args args;
    double *acc; /* threads x 2 n */
} box_job;

static void box_task(void *context, int thread, int threads) {
    const box_job *job = context;
    const int64_t m = job->args.boxes->m, n = job->args.boxes->n;
    double *own = job->acc + 2 * n * thread;
    memset(own, 0, (size_t)(2 * n) * sizeof(double));
    mapuot_active_kernels()->box_pairs(&job->args, m * thread / threads, m * (thread + 1) / threads, own);
}

int mapuot_box_pairs(mapuot_pool *pool, const mapuot_boxes *boxes, int64_t unit, const int64_t *first, int32_t *run,
                     int write, int64_t *count, int64_t *width, double *row_mass, double *col_mass) {
    const int64_t n = boxes->n;
    const int threads = mapuot_pool_threads(pool);
    box_job job = {.args = {boxes, unit, first, run, write, count, width, row_mass}};
    if (posix_memalign((void **)&job.acc, 64, (size_t)(2 * n * threads) * sizeof(double)) != 0) return MAPUOT_NO_MEMORY;
    pool_run(pool, box_task, &job);
    for (int64_t j = 0; j < n; j++) {
        col_mass[j] = 0.0;
        for (int t = 0; t < threads; t++) col_mass[j] += job.acc[2 * n * t + j];
    }
    free(job.acc);
    return MAPUOT_RUNNING;
}
