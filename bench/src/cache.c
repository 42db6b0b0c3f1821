/* cache.c - one process for cachegrind: `passes` passes of one form over an n x n float32 matrix, and nothing else.
 *
 * Usage: cache FORM n passes. bench/cache.py links it with bandwidth_tmpl.c and kernels_tmpl.c in AVX2, one thread, and takes the
 * difference of two runs, so that setting up does not count.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

void row_pass_f32_avx2(const mapuot_state *, int64_t, int64_t, double *);
void plan_pass_f32_avx2(const mapuot_state *, int64_t, int64_t, double *);
void two_dots_f32_avx2(const mapuot_state *, int64_t, int64_t);
void two_sums_f32_avx2(const mapuot_state *, int64_t, int64_t, double *);

static double *vector(int64_t len, double value)
{
    double *x = aligned_alloc(64, (size_t)len * sizeof *x);
    for (int64_t k = 0; k < len; k++)
        x[k] = value;
    return x;
}

static void fill_side(mapuot_side *side, int64_t len)
{
    side->len = len;
    side->penalty = MAPUOT_KL;
    side->weight = vector(len, 1.0 / (double)len);
    side->rho = vector(len, 1.0);
    side->absorbed = vector(len, 0.0);
    side->fi = vector(len, 0.5);
    side->base = vector(len, 0.0);
    side->log_scale = vector(len, 0.0);
    side->scale = vector(len, 1.0);
    side->marginal = vector(len, 0.0);
}

/* the paper's baseline: row sums, scale the rows, column sums, scale the columns */
static void four_sweeps(float *P, int64_t n, int64_t ld, double *sums)
{
    for (int64_t i = 0; i < n; i++) {
        float sum[8] = {0}, total = 0;
        for (int64_t j = 0; j < n; j += 8)
            for (int q = 0; q < 8; q++)
                sum[q] += P[i * ld + j + q];
        for (int q = 0; q < 8; q++)
            total += sum[q];
        sums[i] = 1.0 / (double)total;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            P[i * ld + j] *= (float)sums[i];
    memset(sums, 0, (size_t)n * sizeof *sums);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            sums[j] += (double)P[i * ld + j];
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            P[i * ld + j] *= (float)(1.0 / sums[j]);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    const char *form = argv[1];
    const int64_t n = atoll(argv[2]) / PAD * PAD, passes = atoll(argv[3]), ld = n + PAD;
    float *K = aligned_alloc(64, (size_t)(n * ld) * sizeof *K);
    for (int64_t k = 0; k < n * ld; k++)
        K[k] = 1.0f / (float)n;
    mapuot_state state = {.m = n, .n = n, .ld = ld, .dtype = MAPUOT_F32, .kernel = K, .tile_rows = TILE};
    state.limits.reg = state.limits.inv_reg = 1.0;
    fill_side(&state.rows, n);
    fill_side(&state.cols, n);
    state.history = vector(n, 1.0);
    state.sums = vector(n + SCALARS, 0.0);
    for (int64_t t = 0; t < passes; t++, state.progress.passes++) {
        if (strcmp(form, "fused") == 0) {
            row_pass_f32_avx2(&state, 0, n, state.sums);
        } else if (strcmp(form, "in-place") == 0) {
            plan_pass_f32_avx2(&state, 0, n, state.sums);
        } else if (strcmp(form, "two-sweeps") == 0) {
            two_dots_f32_avx2(&state, 0, n);
            two_sums_f32_avx2(&state, 0, n, state.sums);
        } else if (strcmp(form, "four-sweeps") == 0) {
            four_sweeps(K, n, ld, state.sums);
        } else {
            return 2;
        }
    }
    printf("%g\n", state.sums[0]);
    return 0;
}
