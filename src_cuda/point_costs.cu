// Mirrors src_c/points.h: a block of the costs between points as a matrix in float64, for the streams over M.
//
// x is m x d, one point after another, y d x ld, one coordinate after another; a thread makes the entry (i, j).
// Options: METRIC (a mapuot_metric), STORE 0.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    point_costs(const double *x, const double *y, int64_t ld, int64_t n, int64_t d, double scale, double *out)
{
    const int64_t i = blockIdx.x, j = (int64_t)blockIdx.y * 256 + threadIdx.x;
    if (j >= n)
        return;
    double sum = 0;
    for (int64_t k = 0; k < d; k++) {
        const double t = x[i * d + k] - y[k * ld + j];
        sum = METRIC == 2 ? sum + fabs(t) : fma(t, t, sum);
    }
    if (METRIC == 1)
        sum = sqrt(sum);
    if (METRIC == 3) // below half of pi
        sum = sum < 2.4674011002723395 ? fmax(0.0, -2 * log(cos(sqrt(sum)))) : INF;
    out[i * n + j] = scale * sum;
}
