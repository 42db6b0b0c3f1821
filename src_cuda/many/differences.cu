// Anderson's differences of a state of many marginals, on the device: their sums, and the step built from them.
// Twin of mapuot/backends/cpu/marginals.py (History). A state has parts, one behind the other; each part has its own
// sums, in a fixed order.
#include "common.cuh"

struct Past {
    int64_t size, count;                          // entries of a state, and number of held differences
    const int64_t *ends;                          // where each part ends
    double *dF, *dG;                              // a row for each difference
    const double *residual, *image;               // F and G(x) of this pass
    const double *residual_before, *image_before; // F and G(x) of the previous pass
    const double *weight, *gamma;                 // weight: one an entry; gamma: one a difference and part
    double *sums;        // for each part and difference a row: its products with all differences, and with F
    double *step, *left; // image and residual, less the weighted differences
};

FN int64_t begin_of(const Past &P, int part) { return part > 0 ? P.ends[part - 1] : 0; }

// Store a new difference in row `slot`
extern "C" __global__ void __launch_bounds__(256) add_difference(const __grid_constant__ Past P, int slot) {
    const int64_t at = slot * P.size;
    for (int64_t e = (int64_t)blockIdx.x * 256 + threadIdx.x; e < P.size; e += (int64_t)gridDim.x * 256) {
        P.dF[at + e] = P.residual[e] - P.residual_before[e];
        P.dG[at + e] = P.image[e] - P.image_before[e];
    }
}

// sum w dF_i dF_j and, j = count, sum w dF_i F, over part blockIdx.y: pairs j <= i first, then the products with F
extern "C" __global__ void __launch_bounds__(256) products(const __grid_constant__ Past P) {
    const int count = (int)P.count, part = blockIdx.y;
    int i = 0, j = blockIdx.x;
    while (i < count && j > i) j -= ++i;
    if (i == count) // after all pairs of differences: the product with F
        i = j, j = count;
    const double *x = P.dF + i * P.size, *y = j < count ? P.dF + j * P.size : P.residual;
    double sum = 0;
    for (int64_t e = begin_of(P, part) + threadIdx.x; e < P.ends[part]; e += 256)
        sum = fma(P.weight[e] * x[e], y[e], sum);
    sum = block_sum(sum);
    if (threadIdx.x > 0) return;
    double *out = P.sums + (int64_t)part * count * (count + 1);
    out[i * (count + 1) + j] = sum;
    if (j < count) out[j * (count + 1) + i] = sum;
}

// image - sum gamma_i dG_i and residual - sum gamma_i dF_i, for part blockIdx.y
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Past P) {
    const double *gamma = P.gamma + blockIdx.y * P.count;
    for (int64_t e = begin_of(P, blockIdx.y) + blockIdx.x * 256 + threadIdx.x; e < P.ends[blockIdx.y];
         e += (int64_t)gridDim.x * 256) {
        double G = 0, F = 0;
        for (int64_t i = 0; i < P.count; i++) {
            G = fma(gamma[i], P.dG[i * P.size + e], G);
            F = fma(gamma[i], P.dF[i * P.size + e], F);
        }
        P.step[e] = P.image[e] - G;
        P.left[e] = P.residual[e] - F;
    }
}
