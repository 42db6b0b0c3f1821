// Mirrors src_c/points.h: a block of the costs between points as a matrix in float64, for the streams over M.
//
// x is m x d, one point after another; coordinate k of point j of y lies at k ld + j step.  A block of 16 x 16 threads
// makes 64 x 64 entries, 4 x 4 a thread, from DEPTH coordinates at a time in shared memory; each entry is summed in
// their order. With many clouds block row b computes the m x n costs of problem b, between runs of x and y; behind the
// end of a smaller cloud its last point is repeated; `factors`, if given, has a factor of the costs of each problem.
// PLAN 1: instead of costs, exp(alpha_i + beta_j - M_ij / reg), with p x m and p x n exponents and p regs.
// Options: METRIC (a mapuot_metric), PLAN, STORE 0, COST (type of the coordinates: 0 float64, 1 float32).
#include "common.cuh"
#include "common/metric.h"

#pragma option PLAN 0
#define DEPTH 8
#define SIDE 64
#define EACH 4

// Load DEPTH coordinates from k0 on of SIDE points of either side; behind the last of m or n points it is repeated
FN void take(double (&x_here)[DEPTH][SIDE + 1], double (&y_here)[DEPTH][SIDE], const cost *x, const cost *y, int64_t i0,
             int64_t j0, int64_t k0, int64_t m, int64_t n, int64_t step, int64_t ld, int64_t d) {
    for (int q = threadIdx.x; q < DEPTH * SIDE; q += 256) {
        const int64_t i = i0 + q / DEPTH, k = k0 + q % DEPTH;
        if (k < d) x_here[q % DEPTH][q / DEPTH] = x[(i < m ? i : m - 1) * d + k];
    }
    for (int q = threadIdx.x; q < DEPTH * SIDE; q += 256) {
        const int64_t j = j0 + q % SIDE, k = k0 + q / SIDE;
        if (k < d) y_here[q / SIDE][q % SIDE] = y[k * ld + (j < n ? j : n - 1) * step];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    point_costs(const cost *x, const cost *y, int64_t step, int64_t ld, int64_t m, int64_t n, int64_t d, double scale,
                double *out, const int64_t *places, const double *factors, const double *alpha, const double *beta,
                const double *regs) {
    __shared__ double x_here[DEPTH][SIDE + 1], y_here[DEPTH][SIDE];
    const int64_t across = (n + SIDE - 1) / SIDE, i0 = blockIdx.x / across * SIDE, j0 = blockIdx.x % across * SIDE;
    const int row = threadIdx.x / 16, col = threadIdx.x % 16;
    double sum[EACH][EACH] = {};
    int64_t here = m, there = n; // points of the rows and columns of this problem
    if (places) {                // first row, rows, first column, columns
        const int64_t *own = places + 4 * blockIdx.y;
        x += own[0] * d;
        here = own[1];
        y += own[2] * step;
        there = own[3];
        out += blockIdx.y * m * n;
        alpha += blockIdx.y * m;
        beta += blockIdx.y * n;
    }
    const double factor = factors ? factors[blockIdx.y] : 1, reg = PLAN ? regs[blockIdx.y] : 1;
    for (int64_t k0 = 0; k0 < d; k0 += DEPTH) {
        __syncthreads();
        take(x_here, y_here, x, y, i0, j0, k0, here, there, step, ld, d);
        __syncthreads();
        const int depth = d - k0 < DEPTH ? (int)(d - k0) : DEPTH;
        for (int k = 0; k < depth; k++) {
            double a[EACH], b[EACH];
            UNROLLED (int q = 0; q < EACH; q++) a[q] = x_here[k][row + 16 * q], b[q] = y_here[k][col + 16 * q];
            UNROLLED (int q = 0; q < EACH; q++)
                UNROLLED (int e = 0; e < EACH; e++) sum[q][e] = metric_sum(METRIC, sum[q][e], a[q], b[e]);
        }
    }
    UNROLLED (int q = 0; q < EACH; q++)
        UNROLLED (int e = 0; e < EACH; e++) {
            const int64_t i = i0 + row + 16 * q, j = j0 + col + 16 * e;
            if (i < m && j < n) {
                const double found = factor * (scale * metric_of(METRIC, sum[q][e]));
                out[i * n + j] = PLAN ? exp(alpha[i] + (beta[j] - found / reg)) : found;
            }
        }
}
