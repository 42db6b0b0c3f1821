// Mirrors src_c/boxes_tmpl.c: bounds on the plan's mass between boxes of points, and the pairs of boxes to keep.
//
// Kept pairs are bits: a row of bits for each box of x (32 boxes of y a word, with a last word of 0 behind all words);
// lists of pairs for the sums of both sides are counted, added up and filled from these bits (points.cuh). The
// arithmetic of a bound equals the CPU's, operation by operation, so that both keep the same pairs.
// Option METRIC (a mapuot_metric).
#define STORE 0
#include "common/record.h"

// mapuot_boxes of src_c/mapuot.h
struct Boxes {
    int64_t m, n, d, metric;
    const double *x_mid, *x_half, *x_slope, *x_log_mass;
    const double *y_mid, *y_half, *y_slope, *y_log_mass;
    const double *x_cut, *y_cut;
};

#define SLOPES 16 // most dimensions with fitted potentials: MOST_SLOPES
#define ROWS 64   // boxes of x that a block processes, one after the other; a thread has one box of y

// (A + ridge) x = b in place of b, by Cholesky, in one thread: d numbers a row
__device__ void solve_in_place(double (*A)[SLOPES], double *b, int d) {
    for (int j = 0; j < d; j++)
        for (int i = j; i < d; i++) {
            double sum = A[i][j];
            for (int k = 0; k < j; k++) sum -= A[i][k] * A[j][k];
            A[i][j] = i == j ? sqrt(sum) : sum / A[j][j];
        }
    for (int i = 0; i < d; b[i] /= A[i][i], i++)
        for (int k = 0; k < i; k++) b[i] -= A[i][k] * b[k];
    for (int i = d - 1; i >= 0; b[i] /= A[i][i], i--)
        for (int k = i + 1; k < d; k++) b[i] -= A[k][i] * b[k];
}

// Mirrors tilted of mapuot/backends/boxes.py, a box a warp: slopes of log_scale by least squares (any slopes give a
// bound), the log of the sum of e^(log - slope offset), and each point's share of it.  sizes: the largest |log| and
// |slope offset|.
extern "C" __global__ void __launch_bounds__(32)
    box_tilt(const double *x, int64_t step, int64_t along, const double *origin, const double *mid, double factor,
             int64_t points, int64_t unit, int64_t d, int fit, const double *log_all, const double *scale_all,
             double *slope, double *log_mass, double *share, uint64_t *sizes) {
    __shared__ double A[SLOPES][SLOPES], b[SLOPES], mean[SLOPES];
    const int lane = threadIdx.x, dims = (int)d;
    const int64_t first = blockIdx.x * unit, left = points - first < unit ? points - first : unit;
    const double *log_own = log_all + first, *scale = scale_all + first;
    const auto offset = [&](int64_t i, int k) {
        // rounded like the host's box, so that no point lies outside of it
        return __dmul_rn(factor, x[(first + i) * step + k * along] - origin[k]) - mid[blockIdx.x * d + k];
    };
    double count = 0, middle = 0, top = -INF, total = 0, size[2] = {0, 0};
    const auto used = [&](int64_t i) { return log_own[i] != -INF && isfinite(scale[i]); };
    for (int64_t i = lane; fit && i < left; i += 32)
        if (used(i)) {
            count += 1;
            middle += scale[i];
        }
    count = fmax(1.0, warp_sum(count));
    middle = warp_sum(middle) / count;
    for (int k = 0; fit && k < dims; k++) {
        double sum = 0;
        for (int64_t i = lane; i < left; i += 32) sum += used(i) ? offset(i, k) : 0;
        sum = warp_sum(sum) / count;
        if (lane == 0) mean[k] = sum;
    }
    __syncwarp();
    for (int k = 0; fit && k < dims; k++)
        for (int l = 0; l <= k + 1; l++) { // the last column is the right-hand side
            double sum = 0;
            for (int64_t i = lane; i < left; i += 32)
                if (used(i)) sum += (offset(i, k) - mean[k]) * (l <= k ? offset(i, l) - mean[l] : scale[i] - middle);
            sum = warp_sum(sum);
            if (lane == 0) *(l <= k ? &A[k][l] : &b[k]) = sum;
        }
    __syncwarp();
    if (fit && lane == 0) {
        double trace = 0;
        for (int k = 0; k < dims; k++) trace += A[k][k];
        for (int k = 0; k < dims; k++) A[k][k] += 1e-6 * trace + 1e-300;
        solve_in_place(A, b, dims);
        for (int k = 0; k < dims; k++) slope[blockIdx.x * d + k] = b[k] = isfinite(b[k]) ? b[k] : 0;
    }
    __syncwarp();
    const auto tilt = [&](int64_t i) {
        double off = 0;
        for (int k = 0; fit && k < dims; k++) off += offset(i, k) * b[k];
        return off;
    };
    for (int64_t i = lane; i < left; i += 32) {
        const double off = tilt(i);
        top = fmax(top, log_own[i] - off);
        size[0] = isfinite(log_own[i]) ? fmax(size[0], fabs(log_own[i])) : size[0];
        size[1] = fmax(size[1], fabs(off));
    }
    top = warp_max(top);
    const double known = isfinite(top) ? top : 0;
    for (int64_t i = lane; i < unit; i += 32) {
        const double own = i < left ? exp(log_own[i] - tilt(i) - known) : 0;
        total += own;
        share[first + i] = own;
    }
    total = warp_sum(total);
    for (int64_t i = lane; i < unit; i += 32) share[first + i] /= total > 0 ? total : 1;
    if (lane == 0) log_mass[blockIdx.x] = known + log(total);
    for (int q = 0; q < 2; q++) {
        const double most = warp_max(size[q]);
        if (lane == 0) atomicMax(sizes + q, (uint64_t)__double_as_longlong(most));
    }
}

// log of the bound; of a metric unknown here it is inf, which skips nothing
FN double log_bound(const Boxes &B, int64_t i, int64_t j) {
    if (METRIC != MAPUOT_SQEUCLIDEAN && METRIC != MAPUOT_EUCLIDEAN && METRIC != MAPUOT_CITYBLOCK) return INF;
    double sum = 0;
    for (int64_t k = 0; k < B.d; k++) {
        const double D = B.x_mid[i * B.d + k] - B.y_mid[k * B.n + j], H = B.x_half[i * B.d + k] + B.y_half[k * B.n + j];
        const double least = D - H, most = D + H;
        if (METRIC == MAPUOT_SQEUCLIDEAN) {
            const double p = B.x_slope[i * B.d + k], q = B.y_slope[k * B.n + j], r = 0.5 * (p - q);
            const double s = fmin(fmax(0.5 * r, least), most);
            sum = fma(r, s - D, fma(-s, s, sum));
            sum = fma(0.5 * fabs(p + q), H, sum);
        } else {
            const double away = fmax(0.0, fmax(least, -most));
            sum = METRIC == MAPUOT_CITYBLOCK ? sum - away : fma(-away, away, sum);
        }
    }
    return (METRIC == MAPUOT_EUCLIDEAN ? -sqrt(-sum) : sum) + (B.x_log_mass[i] + B.y_log_mass[j]);
}

// Sums of the bounds of skipped pairs: pairs that `bits` skip if given, else pairs skipped by the cuts, which are then
// written to bits.
extern "C" __global__ void __launch_bounds__(256) box_masses(const __grid_constant__ Boxes B, int given, uint32_t *bits,
                                                             int64_t words, double *row_mass, double *col_mass) {
    const int64_t j = (int64_t)blockIdx.x * 256 + threadIdx.x, end = (int64_t)(blockIdx.y + 1) * ROWS;
    const int lane = threadIdx.x % 32;
    const bool there = j < B.n;
    double total = 0;
    for (int64_t i = (int64_t)blockIdx.y * ROWS; i < end && i < B.m; i++) {
        double mass = 0;
        bool kept = false;
        uint32_t *word = bits + i * words + j / 32;
        if (there) {
            const double bound = log_bound(B, i, j);
            kept = given ? *word >> lane & 1 : B.x_cut[i] + B.y_cut[j] < bound;
            mass = kept ? 0 : exp(bound);
        }
        const uint32_t all = __ballot_sync(FULL, kept);
        if (!given && lane == 0 && j / 32 < words) *word = all;
        total += mass;
        mass = warp_sum(mass);
        if (lane == 0) atomicAdd(row_mass + i, mass);
    }
    if (there) atomicAdd(col_mass + j, total);
}

// Transpose the bits: a warp for 32 x 32 of them.
extern "C" __global__ void __launch_bounds__(32)
    box_turn(const uint32_t *bits, int64_t words, int64_t rows, uint32_t *out, int64_t out_words, int64_t cols) {
    const int64_t i = (int64_t)blockIdx.x * 32 + threadIdx.x, j = (int64_t)blockIdx.y * 32 + threadIdx.x;
    const uint32_t own = i < rows && blockIdx.y < words ? bits[i * words + blockIdx.y] : 0;
    uint32_t turned = 0;
    for (int k = 0; k < 32; k++) {
        const uint32_t column = __ballot_sync(FULL, own >> k & 1);
        turned = (int)threadIdx.x == k ? column : turned;
    }
    if (j < cols) out[j * out_words + blockIdx.x] = turned;
}

// The runs of set bits of each row, a row a warp. first null: count the runs and their bits; else write them to the
// places in first, in multiples of unit and up to limit.
extern "C" __global__ void __launch_bounds__(32)
    box_runs(const uint32_t *bits, int64_t words, const int64_t *first, int64_t *count, int64_t *width, int *run,
             int unit, int limit) {
    const int64_t i = blockIdx.x;
    const int lane = threadIdx.x;
    int64_t begun = first ? first[i] : 0, ended = begun, sum = 0;
    uint32_t last = 0; // bit 31: whether the last box of the previous word is kept
    for (int64_t w0 = 0; w0 < words; w0 += 32) {
        const uint32_t own = w0 + lane < words ? bits[i * words + w0 + lane] : 0;
        const uint32_t left = __shfl_sync(FULL, own, lane > 0 ? lane - 1 : 0);
        const uint32_t before = own << 1 | (lane > 0 ? left : last) >> 31;
        uint32_t edge[2] = {own & ~before, ~own & before};
        int upto[2] = {__popc(edge[0]), __popc(edge[1])};
        sum += __popc(own);
        for (int bit = 1; bit < 32; bit *= 2)
            for (int e = 0; e < 2; e++) {
                const int more = __shfl_sync(FULL, upto[e], lane >= bit ? lane - bit : 0);
                upto[e] += lane >= bit ? more : 0;
            }
        for (int e = 0; first && e < 2; e++) {
            int64_t k = (e ? ended : begun) + upto[e] - __popc(edge[e]);
            for (; edge[e]; edge[e] &= edge[e] - 1, k++) {
                const int64_t at = ((w0 + lane) * 32 + __popc((edge[e] - 1) & ~edge[e])) * unit;
                run[2 * k + e] = at < limit ? (int)at : limit;
            }
        }
        begun += __shfl_sync(FULL, upto[0], 31);
        ended += __shfl_sync(FULL, upto[1], 31);
        last = __shfl_sync(FULL, own, 31);
    }
    if (first) return;
    const double whole = warp_sum((double)sum);
    if (lane == 0) {
        count[i] = begun;
        width[i] = (int64_t)whole;
    }
}
