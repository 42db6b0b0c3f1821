// The potentials in K of one problem, and the layout of K in the registers of a block; for batch.cu and
// batch_narrow.cu.
//
// Thread (g, c) of GROUPS x 16 keeps rows g RT .. (g + 1) RT - 1 and columns c, c + 16, .. (CT of them) of
// K = exp(alpha_i + beta_j - M_ij / reg) from the first pass to the last.
// Options: GROUPS, RT, CT, RESIDENT (blocks a multiprocessor) and the options of batch.cuh.
#define THREADS (16 * GROUPS)
#include "batch.cuh"

#define ROWS (GROUPS * RT)
#define COLUMNS (16 * CT)

// M_ij / reg, 0 outside
FN double ratio(const Batch &S, const cost *M, int i, int j) {
    return i < (int)S.m && j < (int)S.n ? (double)M[i * S.M_row + j * S.M_col] * S.limits.inv_reg : 0;
}

// alpha = -max_j(beta_j - M_ij / reg), beta_j = -max_i(alpha_i - M_ij / reg), where beta comes as log v_j b_j and the
// synchronised block calls: K is at most 1 and has an entry 1 in every row and column in use.  -inf: left out.
// part: WARPS x COLUMNS.
FN void balance(const Batch &S, const cost *M, const double *a, double *alpha, double *beta, float *part) {
    const int g = threadIdx.x / 16, c = threadIdx.x % 16;
    ROLLED (int i = g * RT; i < (g + 1) * RT; i++) {
        double top = -INF;
#pragma unroll 2
        for (int j = c; j < COLUMNS; j += 16) top = fmax(top, beta[j] - ratio(S, M, i, j));
        top = warp_max<16>(top);
        if (c == 0) alpha[i] = a[i] > 0 ? -top : -INF;
    }
    __syncwarp();
    ROLLED (int j = c; j < COLUMNS; j += 16) {
        double top = -INF;
#pragma unroll 2
        for (int i = g * RT; i < (g + 1) * RT; i++) top = fmax(top, alpha[i] - ratio(S, M, i, j));
        top = fmax(top, __shfl_xor_sync(FULL, top, 16));
        if (threadIdx.x % 32 < 16)
            part[threadIdx.x / 32 * COLUMNS + j] = (float)top; // rounded: any beta near it serves
    }
    __syncthreads();
    ROLLED (int j = threadIdx.x; j < COLUMNS; j += THREADS) {
        double top = -INF;
        for (int w = 0; w < WARPS; w++) top = fmax(top, (double)part[w * COLUMNS + j]);
        beta[j] = beta[j] > -INF ? -top : -INF;
    }
    __syncthreads();
}

// With one potential K absorbs the mean of both: it is still at most 1, and symmetric.
FN void share_potentials(const Batch &S, double *alpha, double *beta) {
    for (int j = threadIdx.x; ONE_POTENTIAL && j < (int)S.n; j += THREADS)
        alpha[j] = beta[j] = 0.5 * (alpha[j] + beta[j]);
    if (ONE_POTENTIAL) __syncthreads();
}
