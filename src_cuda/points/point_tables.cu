// Tables of points on the device: coordinates in float64, factors of a matrix of squared distances, float16 pieces.
//
//     |x_i - y_j|^2 = (-2 (x_i - o), |x_i - o|^2, 1) . (y_j - o, 1, |y_j - o|^2)     for any origin o
//
// Rows of points are read and written along their coordinates, columns along their points.
// Options: STORE 0, COST (type of the given points: 0 float64, 1 float32).
#include "common.cuh"

#define SIDE 32      // points, and coordinates, of a tile that is transposed
#define CANDIDATES 8 // points of y; one of them becomes the origin
#define PAIRS (CANDIDATES * (CANDIDATES - 1) / 2)
#define WARPS 32 // of a block of square_factors

// Points as they were given: point i has coordinate k at i row + k column
struct Given {
    const cost *at;
    int64_t count, row, column;
};

// Copy x to m x d `rows` and y to d x ld `columns`, where the last point fills the padding. odd[0] and odd[1] become 1,
// in the host's memory, if a coordinate of x, or of y, is not finite.
extern "C" __global__ void __launch_bounds__(256)
    take_points(const __grid_constant__ Given x, const __grid_constant__ Given y, int64_t d, int64_t ld, double *rows,
                double *columns, double *odd) {
    __shared__ double tile[SIDE][SIDE + 1];
    const int64_t across = (d + SIDE - 1) / SIDE, tiles = (ld + SIDE - 1) / SIDE * across;
    const int lane = threadIdx.x % SIDE, warp = threadIdx.x / SIDE;
    bool finite = true;
    if (blockIdx.x < tiles) {
        const int64_t j0 = blockIdx.x / across * SIDE, k0 = blockIdx.x % across * SIDE;
        for (int q = warp; q < SIDE; q += 256 / SIDE) {
            const int64_t j = j0 + q < y.count ? j0 + q : y.count - 1, k = k0 + lane;
            if (k < d) tile[q][lane] = y.at[j * y.row + k * y.column], finite &= isfinite(tile[q][lane]);
        }
        __syncthreads();
        for (int q = warp; q < SIDE && k0 + q < d; q += 256 / SIDE)
            if (j0 + lane < ld) columns[(k0 + q) * ld + j0 + lane] = tile[lane][q];
        if (!finite) odd[1] = 1;
        return;
    }
    const int64_t step = (int64_t)(gridDim.x - tiles) * 256;
    for (int64_t q = (blockIdx.x - tiles) * 256 + threadIdx.x; q < x.count * d; q += step) {
        rows[q] = x.at[q / d * x.row + q % d * x.column];
        finite &= isfinite(rows[q]);
    }
    if (!finite) odd[0] = 1;
}

// Pair (i, j), i < j, of candidates, by its number
FN void pair_of(int number, int &i, int &j) {
    for (i = 0; number >= CANDIDATES - 1 - i; i++) number -= CANDIDATES - 1 - i;
    j = i + 1 + number;
}

// Copy some points of y to `some`, CANDIDATES x d, and post this block's part of the squared distances between them in
// its row of apart; clear sizes
extern "C" __global__ void __launch_bounds__(256)
    take_candidates(const double *columns, int64_t ld, int64_t n, int64_t d, double *some, double *apart,
                    double *sizes) {
    __shared__ double of_warp[8][PAIRS];
    const int64_t k = blockIdx.x * (int64_t)256 + threadIdx.x;
    double x[CANDIDATES];
    UNROLLED (int c = 0; c < CANDIDATES; c++) {
        x[c] = k < d ? columns[k * ld + c * n / CANDIDATES] : 0;
        if (k < d) some[c * d + k] = x[c];
    }
    int pair = 0;
    UNROLLED (int i = 0; i < CANDIDATES; i++)
        UNROLLED (int j = i + 1; j < CANDIDATES; j++) {
            const double sum = warp_sum((x[i] - x[j]) * (x[i] - x[j]));
            if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32][pair] = sum;
            pair++;
        }
    __syncthreads();
    if (threadIdx.x < PAIRS) {
        double sum = 0;
        for (int w = 0; w < 8; w++) sum += of_warp[w][threadIdx.x];
        apart[blockIdx.x * PAIRS + threadIdx.x] = sum;
    }
    if (blockIdx.x == 0 && threadIdx.x < 2) sizes[threadIdx.x] = 0;
}

// The number of the candidate with the least sum of distances to the others; all threads of a block call it
FN int middle_of(const double *apart, int parts) {
    __shared__ double size[PAIRS];
    if (threadIdx.x < PAIRS) {
        double sum = 0;
        for (int p = 0; p < parts; p++) sum += apart[p * PAIRS + threadIdx.x];
        size[threadIdx.x] = sqrt(sum);
    }
    __syncthreads();
    double sums[CANDIDATES] = {};
    for (int pair = 0; pair < PAIRS; pair++) {
        int i, j;
        pair_of(pair, i, j);
        UNROLLED (int c = 0; c < CANDIDATES; c++) sums[c] += c == i || c == j ? size[pair] : 0;
    }
    int best = 0;
    double least = sums[0];
    UNROLLED (int c = 1; c < CANDIDATES; c++) {
        best = sums[c] < least ? c : best;
        least = fmin(least, sums[c]);
    }
    return best;
}

// Make both factors of the squared distances of points times `factor`: left m x (d + 2), right (d + 2) x n; some and
// apart: of take_candidates by `parts` blocks. sizes become the largest squares of x and of y.
extern "C" __global__ void __launch_bounds__(1024)
    square_factors(const double *rows, const double *columns, int64_t ld, int64_t m, int64_t n, int64_t d,
                   const double *some, const double *apart, int parts, double factor, double *left, double *right,
                   double *sizes) {
    __shared__ double part[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t right_blocks = (n + 31) / 32;
    const double *origin = some + middle_of(apart, parts) * d;
    double sum = 0;
    if (blockIdx.x < right_blocks) {
        const int64_t j = blockIdx.x * (int64_t)32 + lane;
        if (j < n)
            for (int64_t k = warp; k < d; k += WARPS) {
                const double t = (columns[k * ld + j] - origin[k]) * factor;
                right[k * n + j] = t;
                sum = fma(t, t, sum);
            }
        part[warp][lane] = sum;
        __syncthreads();
        if (warp > 0) return;
        for (int w = 1; w < WARPS; w++) sum += part[w][lane];
        if (j < n) right[d * n + j] = 1, right[(d + 1) * n + j] = sum;
        sum = warp_max(sum);
        if (lane == 0) atomicMax((int64_t *)sizes + 1, __double_as_longlong(sum));
        return;
    }
    const int64_t i = (blockIdx.x - right_blocks) * WARPS + warp;
    if (i >= m) return;
    double *own = left + i * (d + 2);
    for (int64_t k = lane; k < d; k += 32) {
        const double t = (rows[i * d + k] - origin[k]) * factor;
        own[k] = -2 * t;
        sum = fma(t, t, sum);
    }
    sum = warp_sum(sum);
    if (lane > 0) return;
    own[d] = sum;
    own[d + 1] = 1;
    atomicMax((int64_t *)sizes, __double_as_longlong(sum));
}

// float16 from float32, to the nearest, and back
FN unsigned short short_of(float x) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

FN float float_of(unsigned short h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

// Split factor x into two float16 pieces for point_products.cuh, 8 coordinates a thread, and set *largest to its
// largest size. Coordinate k of point p lies at k step + p own; those beyond d, and points from count to ld, are 0.
extern "C" __global__ void __launch_bounds__(256)
    split_points(const double *points, int64_t step, int64_t own, int64_t d, int64_t count, int64_t ld, int64_t chunks,
                 double factor, uint4 *out, double *largest) {
    double most = 0;
    for (int64_t q = blockIdx.x * (int64_t)256 + threadIdx.x; q < 4 * chunks * ld; q += gridDim.x * (int64_t)256) {
        const int64_t p = q % ld, unit = q / ld % 4, chunk = q / ld / 4;
        alignas(16) unsigned short first[8], second[8];
        for (int e = 0; e < 8; e++) {
            const int64_t k = chunk * 32 + unit * 8 + e;
            const double x = p < count && k < d ? factor * points[k * step + p * own] : 0;
            most = fmax(most, fabs(x));
            first[e] = short_of((float)x);
            second[e] = short_of((float)(x - float_of(first[e])));
        }
        uint4 *to = out + (chunk * ld + p) * 8;
        to[unit ^ (p & 7)] = *(uint4 *)first;
        to[(4 + unit) ^ (p & 7)] = *(uint4 *)second;
    }
    most = block_max(most);
    if (threadIdx.x == 0) atomicMax((int64_t *)largest, __double_as_longlong(most));
}

// lost_p = |x_p|^2 - |x'_p|^2, factor x'_p being the first piece of factor x_p. Coordinates lie as for split_points.
extern "C" __global__ void __launch_bounds__(256) lost_squares(const double *points, int64_t step, int64_t own,
                                                               int64_t d, int64_t count, double factor, double *lost) {
    const int64_t p = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (p >= count) return;
    double sum = 0;
    for (int64_t k = 0; k < d; k++) {
        const double x = points[k * step + p * own], near = float_of(short_of((float)(factor * x))) / factor;
        sum = fma(x - near, x + near, sum);
    }
    lost[p] = sum;
}
