// Work for a batch of clouds besides its passes: bounds on the costs of a problem, and tables of its points that plans
// are multiplied by.
//
// x and y hold the points of all problems, one after another. `places` has the first row, the rows, the first column
// and the columns of each problem. One block a problem. Ranges, found: 2 x p, lower bounds of the least distance of two
// points and upper bounds of the largest: from the boxes around the two clouds, the largest also from balls around the
// middle of the columns. A coordinate that is not finite makes the largest NaN.
// Options: NORM (1 or 2: the norm of the distance), STORE 0.
#include "common.cuh"

#define THREADS 128

extern __shared__ __align__(128) unsigned char memory[]; // least and largest coordinates of the rows, of the columns

FN double grown(double sum, double t) { return NORM == 1 ? sum + fabs(t) : fma(t, t, sum); }
FN double length_of(double sum) { return NORM == 1 ? sum : sqrt(sum); }

// The largest distance of points from the middle of the columns, NaN if a coordinate is not finite. All threads.
FN double radius(const double *points, int count, int d, const double *least, double *scratch) {
    double most = 0;
    bool bad = false;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        double sum = 0;
        for (int k = 0; k < d; k++)
            sum = grown(sum, points[(int64_t)i * d + k] - (0.5 * least[k] + 0.5 * least[d + k]));
        bad |= !isfinite(sum);
        most = fmax(most, sum);
    }
    most = warp_max(most);
    bad = __syncthreads_or(bad);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) most = fmax(most, scratch[w]);
    return bad ? INF - INF : length_of(most);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cloud_ranges(const double *x, const double *y, const int64_t *places, int64_t d, double *found) {
    __shared__ double scratch[THREADS / 32];
    double *box = (double *)memory;
    const int64_t *at = places + 4 * blockIdx.x;
    const int lane = threadIdx.x % 32, dim = (int)d;
    x += at[0] * d;
    y += at[2] * d;
    for (int q = threadIdx.x / 32; q < 2 * dim; q += THREADS / 32) {
        const int k = q % dim, side = q / dim, count = (int)at[2 * side + 1];
        const double *points = side ? y : x;
        double low = INF, high = -INF;
        for (int i = lane; i < count; i += 32) {
            const double t = points[(int64_t)i * d + k];
            low = fmin(low, t);
            high = fmax(high, t);
        }
        low = -warp_max(-low);
        high = warp_max(high);
        if (lane == 0) box[(2 * side) * dim + k] = low, box[(2 * side + 1) * dim + k] = high;
    }
    __syncthreads();
    const double *columns = box + 2 * dim;
    const double rows_out = radius(x, (int)at[1], dim, columns, scratch);
    __syncthreads();
    const double ball = (rows_out + radius(y, (int)at[3], dim, columns, scratch)) * (1 + 1e-12);
    if (threadIdx.x > 0) return;
    double least = 0, most = 0;
    for (int k = 0; k < dim; k++) {
        const double a = box[k] - columns[dim + k], b = columns[k] - box[dim + k]; // gaps between the boxes
        least = grown(least, fmax(0.0, fmax(a, b)));
        most = grown(most, fmax(-a, -b));
    }
    const double wide = length_of(most) * (1 + 1e-12);
    found[blockIdx.x] = length_of(least) * (1 - 1e-12);
    found[gridDim.x + blockIdx.x] = isnan(ball) ? ball : fmin(wide, ball);
}

// Tables of the points around the mean of the rows, with a column of ones: `rows` p x m x (d + 1), `columns` p x n x
// (d + 1); behind the end of a smaller cloud they are 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    cloud_tables(const double *x, const double *y, const int64_t *places, int64_t d, int64_t m, int64_t n, double *rows,
                 double *columns) {
    double *middle = (double *)memory;
    const int64_t *at = places + 4 * blockIdx.x;
    const int lane = threadIdx.x % 32, dim = (int)d;
    x += at[0] * d;
    y += at[2] * d;
    for (int k = threadIdx.x / 32; k < dim; k += THREADS / 32) {
        double sum = 0;
        for (int i = lane; i < (int)at[1]; i += 32) sum += x[(int64_t)i * d + k];
        sum = warp_sum(sum);
        if (lane == 0) middle[k] = sum / (double)at[1];
    }
    __syncthreads();
    for (int side = 0; side < 2; side++) {
        const double *points = side ? y : x;
        const int64_t count = at[2 * side + 1], most = side ? n : m;
        double *to = (side ? columns : rows) + blockIdx.x * most * (d + 1);
        for (int64_t q = threadIdx.x; q < most * (d + 1); q += THREADS) {
            const int64_t i = q / (d + 1), k = q % (d + 1);
            to[q] = i >= count ? 0 : k < d ? points[i * d + k] - middle[k] : 1;
        }
    }
}

// scale (t_0 z - t) for the first `count` points z of each problem in a table (p x most x (d + 1)): t_0 is the last
// column of the table `moved`, t has its other columns. `to` has the points of all problems, one after
// another; the points of a problem begin at `first`.
extern "C" __global__ void __launch_bounds__(THREADS)
    cloud_slopes(const double *table, const double *moved, const int64_t *first, const int64_t *count, int64_t d,
                 int64_t most, double scale, double *to) {
    const int64_t at = blockIdx.x * most * (d + 1);
    to += first[blockIdx.x] * d;
    for (int64_t q = threadIdx.x; q < count[blockIdx.x] * d; q += THREADS) {
        const int64_t here = at + q / d * (d + 1);
        to[q] = scale * (moved[here + d] * table[here + q % d] - moved[here + q % d]);
    }
}
