// Vector formulas, evaluated operation by operation: CuPy would compile a kernel for each operation, type and layout.
// Option: STORE 0.
#include "common.cuh"

// Operations, named as in NumPy; PLACE: the index of an entry.
// clang-format off
enum {
    POSITIVE, ADD, SUBTRACT, MULTIPLY, DIVIDE, NEGATIVE, ABSOLUTE, SQUARE, SQRT, EXP, LOG, LOG1P, RINT, MINIMUM, MAXIMUM,
    ISFINITE, ISINF, EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, BITWISE_AND, BITWISE_OR, INVERT, WHERE, PLACE
};
// clang-format on
enum { BOOL, INT64, FLOAT32, FLOAT64, NUMBER };

#define SLOTS 32 // operands of a formula, and operations; their results follow the operands

// An array of one to three axes, with rows picked by ``index``, or a number; for a result, value is its slot
struct Operand {
    void *x;
    const int64_t *index;
    int64_t kind, step[3];
    double value;
};

struct Task {
    int64_t size[3], operations, inputs, outputs;
    uint32_t code[SLOTS]; // operation, and the slots of its operands, a byte each
    Operand slot[SLOTS];
};

FN double get(const Operand &X, int64_t i, int64_t j, int64_t k) {
    if (X.kind == NUMBER) return X.value;
    const int64_t at = (X.index ? X.index[i] : i) * X.step[0] + j * X.step[1] + k * X.step[2];
    if (X.kind == BOOL) return ((const bool *)X.x)[at];
    if (X.kind == INT64) return (double)((const int64_t *)X.x)[at];
    return X.kind == FLOAT32 ? (double)((const float *)X.x)[at] : ((const double *)X.x)[at];
}

FN void set(const Operand &X, int64_t i, int64_t j, int64_t k, double value) {
    const int64_t at = (X.index ? X.index[i] : i) * X.step[0] + j * X.step[1] + k * X.step[2];
    if (X.kind == BOOL) ((bool *)X.x)[at] = value != 0;
    else if (X.kind == INT64) ((int64_t *)X.x)[at] = (int64_t)value;
    else if (X.kind == FLOAT32) ((float *)X.x)[at] = (float)value;
    else ((double *)X.x)[at] = value;
}

FN double result(int operation, double a, double b, double c, int64_t place) {
    if (operation == ADD) return a + b;
    if (operation == SUBTRACT) return a - b;
    if (operation == MULTIPLY) return a * b;
    if (operation == DIVIDE) return a / b;
    if (operation == NEGATIVE) return -a;
    if (operation == ABSOLUTE) return fabs(a);
    if (operation == SQUARE) return a * a;
    if (operation == SQRT) return sqrt(a);
    if (operation == EXP) return exp(a);
    if (operation == LOG) return log(a);
    if (operation == LOG1P) return log1p(a);
    if (operation == RINT) return rint(a);
    if (operation == MINIMUM) return a <= b || isnan(a) ? a : b; // NaN if one is
    if (operation == MAXIMUM) return a >= b || isnan(a) ? a : b;
    if (operation == ISFINITE) return isfinite(a);
    if (operation == ISINF) return isinf(a);
    if (operation == EQUAL) return a == b;
    if (operation == NOT_EQUAL) return a != b;
    if (operation == LESS) return a < b;
    if (operation == LESS_EQUAL) return a <= b;
    if (operation == GREATER) return a > b;
    if (operation == GREATER_EQUAL) return a >= b;
    if (operation == BITWISE_AND) return a != 0 && b != 0; // of masks
    if (operation == BITWISE_OR) return a != 0 || b != 0;
    if (operation == INVERT) return a == 0;
    if (operation == WHERE) return a != 0 ? b : c;
    if (operation == PLACE) return (double)place;
    return a;
}

extern "C" __global__ void __launch_bounds__(256) evaluate(const __grid_constant__ Task T) {
    const int64_t plane = T.size[1] * T.size[2];
    double x[2 * SLOTS];
    for (int64_t e = (int64_t)blockIdx.x * 256 + threadIdx.x; e < T.size[0] * plane; e += (int64_t)gridDim.x * 256) {
        const int64_t i = plane > 1 ? e / plane : e, j = plane > 1 ? e % plane / T.size[2] : 0, k = e % T.size[2];
        for (int s = 0; s < T.inputs; s++) x[s] = get(T.slot[s], i, j, k);
        for (int q = 0; q < T.operations; q++) {
            const uint32_t own = T.code[q];
            x[SLOTS + q] = result(own & 255, x[own >> 8 & 255], x[own >> 16 & 255], x[own >> 24], e);
        }
        for (int s = (int)T.inputs; s < T.inputs + T.outputs; s++) set(T.slot[s], i, j, k, x[(int)T.slot[s].value]);
    }
}

// out_ij = x_sj merged with x_tj, .., from s = starts_i up to the next start; the last run ends at the end of x, a
// number. The second operation is applied to each entry first.
extern "C" __global__ void __launch_bounds__(256) reduceat(const __grid_constant__ Task T) {
    const int64_t m = T.size[0], n = T.size[1], *starts = (const int64_t *)T.slot[1].x;
    for (int64_t e = (int64_t)blockIdx.x * 256 + threadIdx.x; e < m * n; e += (int64_t)gridDim.x * 256) {
        const int64_t i = e / n, j = e % n, end = i + 1 < m ? starts[i + 1] : (int64_t)T.slot[2].value;
        double found = 0;
        for (int64_t s = starts[i]; s < end; s++) {
            const double own = result(T.code[0] >> 8 & 255, get(T.slot[0], s, j, 0), 0, 0, 0);
            found = s > starts[i] ? result(T.code[0] & 255, found, own, 0, 0) : own;
        }
        set(T.slot[3], i, j, 0, found);
    }
}
