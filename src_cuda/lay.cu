// Tables of points in another layout or type, their squares, and what balances K between them: CuPy would compile a kernel
// for each type, layout and operation.
// Option: STORE 0.
#include "common.cuh"

// Entries of float64, or of float32 where that is narrow
FN double entry(const void *x, int narrow, int64_t at) {
    return narrow ? (double)((const float *)x)[at] : ((const double *)x)[at];
}

// out_ki = factor (x_ki - origin_k - middle_k), k < d, i < room.  Beyond the ``rows`` and ``count`` of x: rest, or with ``edge``
// the last of the points.  A run of at_once points of out lies block entries from the next.  ``finite``: rest for infinities.
extern "C" __global__ void __launch_bounds__(256)
    lay(const void *x, int narrow, int64_t x_along, int64_t x_step, int64_t rows, int64_t count, const double *origin,
        int64_t origin_step, const double *middle, double factor, double rest, int edge, int finite, void *out,
        int out_narrow, int64_t block, int64_t along, int64_t step, int64_t at_once, int64_t d, int64_t room) {
    for (int64_t e = (int64_t)blockIdx.x * 256 + threadIdx.x; e < d * room; e += (int64_t)gridDim.x * 256) {
        const int64_t k = step <= along ? e / room : e % d, i = step <= along ? e % room : e / d;
        double value = rest;
        if (k < rows && (edge || i < count)) {
            value = entry(x, narrow, k * x_along + (i < count ? i : count - 1) * x_step);
            if (origin) value -= origin[k * origin_step];
            value = factor * (middle ? value - middle[k] : value);
            if (finite && isinf(value)) value = rest;
        }
        const int64_t at = i / at_once * block + k * along + i % at_once * step;
        if (out_narrow) ((float *)out)[at] = (float)value;
        else ((double *)out)[at] = value;
    }
}

// out_i = sum_k x_ki^2, of x as float32 has it where ``rounded``
extern "C" __global__ void __launch_bounds__(256) squares(const void *x, int narrow, int64_t along, int64_t step,
                                                          int64_t d, int64_t count, int rounded, double *out) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    double sum = 0;
    for (int64_t k = 0; i < count && k < d; k++) {
        const double value = entry(x, narrow, k * along + i * step), own = rounded ? (double)(float)value : value;
        sum += own * own;
    }
    if (i < count) out[i] = sum;
}

// out_i = -max over the parts of tops_i, or ``hidden`` where the mask says so
extern "C" __global__ void __launch_bounds__(256)
    balance(const double *tops, int64_t parts, int64_t count, const bool *mask, double hidden, double *out) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    double top = -INF;
    for (int64_t p = 0; p < parts; p++) top = fmax(top, tops[p * count + i]);
    out[i] = mask[i] ? hidden : -top;
}
