// Twin of src_c/marginals.c: the O(n) work of a tree pass on the points of its marginals, with a block for each sum, in
// a fixed order.  Vectors stay on the device; the host reads a few numbers of each marginal or edge
// (mapuot/backends/cuda/marginals.py).
#include "common.cuh"
#include "common/penalty.h"

// mapuot_marginals of src_c/mapuot.h
struct Marginals {
    int64_t count, parts, edges;
    int64_t hard; // the first marginal that is hard; -1: none
    const int64_t *start, *child, *parent, *message;
    const int64_t *cell, *message_cell; // a message is translated with its child's cell
    const int64_t *order, *first;       // points ordered by cell; where each cell begins
    const double *log_weight, *weight, *rho;
    double reg;
};

// mapuot_worth; the host relies on the order of its members
struct Worth {
    double largest, value, size, amount, gap, both, missed;
};

FN double rate_of(const Marginals &X, int64_t k) { return X.rho[k] > 0 ? X.reg / X.rho[k] : 0; }

// log sum e^x over the points of a cell, valid in thread 0
template <typename F> __device__ double log_sum(const Marginals &X, int64_t cell, F x_of) {
    double top = -INF, sum = 0;
    for (int64_t at = X.first[cell] + threadIdx.x; at < X.first[cell + 1]; at += blockDim.x) {
        const double x = x_of(X.order[at]);
        top = fmax(top, isnan(x) ? INF : x);
    }
    top = block_max(top);
    for (int64_t at = X.first[cell] + threadIdx.x; at < X.first[cell + 1]; at += blockDim.x)
        sum += exp(x_of(X.order[at]) - top);
    return top + log(block_sum(sum)); // NaN if top is inf
}

// log sum a u^(-reg / rho) of each cell
extern "C" __global__ void __launch_bounds__(1024)
    log_amounts(const __grid_constant__ Marginals X, const double *log_u, double *out) {
    const double rate = rate_of(X, blockIdx.x / X.parts);
    const double found = log_sum(X, blockIdx.x, [&](int64_t i) { return X.log_weight[i] - rate * log_u[i]; });
    if (threadIdx.x == 0) out[blockIdx.x] = found;
}

// log u of the root, and the log mass of its parts
extern "C" __global__ void __launch_bounds__(1024) close_root(const __grid_constant__ Marginals X, int root, double fi,
                                                              const double *near, double *log_u, double *out) {
    const int64_t cell = root * X.parts + blockIdx.x;
    const double found = log_sum(X, cell, [&](int64_t i) {
        log_u[i] = fi > 0 ? -fi * near[i] : 0;
        return X.log_weight[i] + log_u[i] + near[i];
    });
    if (threadIdx.x == 0) out[blockIdx.x] = found;
}

// Twin of mapuot/backends/cpu/marginals.py (translation). below: translation of the terms in each message to the root;
// rest: of all marginals but the own one.  A thread for each part
extern "C" __global__ void __launch_bounds__(256)
    translation(const __grid_constant__ Marginals X, const double *log_mass, const double *log_A, double *lam,
                double *below, double *rest) {
    const int64_t p = blockIdx.x * (int64_t)256 + threadIdx.x, parts = X.parts;
    if (p >= parts) return;
    double ratios = 0, log_c = log_mass[p], total = 0;
    for (int64_t k = 0; k < X.count; k++) {
        const double R = isinf(X.rho[k]) ? 0 : X.rho[k] / X.reg;
        ratios += R;
        log_c += R * log_A[k * parts + p];
    }
    log_c = X.hard < 0 ? log_c / (1 + ratios) : log_A[X.hard * parts + p];
    for (int64_t k = 0; k < X.count; k++) {
        const double R = isinf(X.rho[k]) ? 0 : X.rho[k] / X.reg;
        total += lam[k * parts + p] = R > 0 ? R * (log_A[k * parts + p] - log_c) : 0;
    }
    if (X.hard >= 0) total += lam[X.hard * parts + p] = log_c - log_mass[p] - total;
    const bool sound = isfinite(total);
    for (int64_t k = 0; k < X.count; k++) {
        const int64_t c = k * parts + p;
        below[c] = lam[c] = sound ? lam[c] : 0;
        rest[c] = sound ? total - lam[c] : 0;
    }
    for (int64_t e = 0; e < X.edges; e++) below[X.parent[e] * parts + p] += below[X.child[e] * parts + p];
}

extern "C" __global__ void __launch_bounds__(1024)
    worth(const __grid_constant__ Marginals X, const double *log_u, const double *log_s, Worth *out) {
    const int64_t k = blockIdx.x;
    const double rho = X.rho[k], rate = isinf(rho) ? 0 : rate_of(X, k);
    double most = 0, highest = 0, sound = 0; // highest: largest exponent; sound: 0, or NaN if a number is not finite
    Worth sum = {};
    for (int64_t i = X.start[k] + threadIdx.x; i < X.start[k + 1]; i += blockDim.x) {
        const double a = X.weight[i], x = log_u[i], y = -rate * x;
        const double half = exp(0.5 * y), q = a * half * half; // in halves: a may be 1e300 where e^y underflows
        const double term = isinf(rho) ? a * (X.reg * x) : rate > 0 ? -rho * (a * expm1(y)) : 0;
        most = fmax(most, fabs(x));
        highest = fmax(highest, y);
        sound += 0 * x;
        sum.value += term;
        sum.size += fabs(term);
        sum.amount += q;
        if (!log_s) continue;
        const double t = x + log_s[i], log_r = X.log_weight[i] + t, r = exp(log_r);
        highest = fmax(highest, log_r);
        sound += 0 * t;
        sum.gap += kl_gap(q, r, t - y);
        sum.both += r + q;
        sum.missed += fabs(r - a);
    }
    const bool told = block_sum(sound) == 0 && block_max(highest) < 709;
    const double found[] = {block_max(most),    block_sum(sum.value), block_sum(sum.size),  block_sum(sum.amount),
                            block_sum(sum.gap), block_sum(sum.both),  block_sum(sum.missed)};
    if (threadIdx.x == 0) out[k] = {told ? found[0] : INF, found[1], found[2], found[3], found[4], found[5], found[6]};
}

// out = x + by of each number's cell
extern "C" __global__ void __launch_bounds__(256)
    moved(int64_t n, const int64_t *cell, const double *by, const double *x, double *out) {
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (i < n) out[i] = x[i] + by[cell[i]];
}

// The numbers that the parent of edge blockIdx.y sends
extern "C" __global__ void __launch_bounds__(256)
    at_edges(const __grid_constant__ Marginals X, const double *log_u, const double *back, const double *near,
             const double *by, const double *up, double *out) {
    const int64_t e = blockIdx.y, k = X.parent[e], j = blockIdx.x * (int64_t)256 + threadIdx.x;
    const int64_t i = X.start[k] + j, at = X.message[e] + j;
    if (at < X.message[e + 1]) out[at] = log_u[i] + back[i] + near[i] + by[X.cell[i]] - up[at];
}

// The mass shares of the points of each edge's parent, laid out as its message
extern "C" __global__ void __launch_bounds__(1024) mass_shares(const __grid_constant__ Marginals X, const double *log_u,
                                                               const double *near, const double *late, double *out) {
    const int64_t first = X.message[blockIdx.x], n = X.message[blockIdx.x + 1] - first;
    const int64_t i = X.start[X.parent[blockIdx.x]];
    double top = -INF, sum = 0;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        const double x = X.log_weight[i + j] + log_u[i + j] + (near[i + j] + late[i + j]);
        top = fmax(top, out[first + j] = x);
    }
    top = block_max(top);
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) sum += out[first + j] = exp(out[first + j] - top);
    sum = block_sum(sum);
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) out[first + j] /= sum;
}

// For each edge two sums, and the largest |change|, inf if one is not finite
extern "C" __global__ void __launch_bounds__(1024)
    change_sums(const __grid_constant__ Marginals X, const double *weight, const double *change, double *out) {
    double squares = 0, sizes = 0, most = 0;
    for (int64_t j = X.message[blockIdx.x] + threadIdx.x; j < X.message[blockIdx.x + 1]; j += blockDim.x) {
        const double x = fabs(change[j]), once = weight[j] * x;
        sizes += once;
        squares = fma(once, x, squares);
        most = fmax(most, isnan(x) ? INF : x);
    }
    squares = block_sum(squares);
    sizes = block_sum(sizes);
    most = block_max(most);
    if (threadIdx.x > 0) return;
    out[3 * blockIdx.x] = squares;
    out[3 * blockIdx.x + 1] = sizes;
    out[3 * blockIdx.x + 2] = most;
}
