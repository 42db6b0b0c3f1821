// Mirrors src_c/coarse_tmpl.c: clusters of points, the plan's mass between them, and the correction matrix of steps.
//
// Here columns have clusters, too; in C each column is one. 64 clusters of rows alone took .95 of the passes, but 64
// numbers of every column in every pass.
// It runs between the passes of iterate.cu or portable.cu, on the last state; coarse_step (in
// finish_scalars.cuh) applies the matrix. Clusters are the points nearest to some marked points, by a few rows or
// columns of M. A team of 8 threads has one cluster. Sums are taken in a fixed order.
// Options: STORE (type of K), COST (of M: 0 float64, 1 float32). Callers: mapuot/backends/coarse.py.
#include "state.cuh"

#define SAMPLES 16        // most rows (columns) of M that serve as coordinates of points
#define TEAM 8            // threads of a cluster
#define LEAST_PIVOT 1e-10 // relative to the diagonal entry; twin: coarse_tmpl.c
#define BLOCK (CLUSTERS * TEAM)

FN double finite_or(double x, double top) { return isfinite(x) ? x : top; }

// May a matrix be built from this state? Not if the guard has dropped it, or if it is not the last.
FN bool serves(const State &S, int parity) {
    const Progress &p = S.progress[parity];
    return p.status == MAPUOT_RUNNING && p.step < MAPUOT_GO_BACK;
}

// Label each point by the nearest of `count` points `mark`; coordinate k of point i is X[sample_k across + i along].
extern "C" __global__ void __launch_bounds__(256)
    nearest(const cost *X, int64_t across, int64_t along, const int64_t *sample, int samples, int64_t points,
            const int64_t *mark, int count, double top, int64_t *label) {
    __shared__ double at[CLUSTERS * SAMPLES];
    for (int q = threadIdx.x; q < count * SAMPLES; q += 256) {
        const int k = q % SAMPLES;
        at[q] = k < samples ? finite_or(X[sample[k] * across + mark[q / SAMPLES] * along], top) : 0;
    }
    __syncthreads();
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= points) return;
    double x[SAMPLES], least = INF;
    int found = 0;
    UNROLLED (int k = 0; k < SAMPLES; k++) x[k] = k < samples ? finite_or(X[sample[k] * across + i * along], top) : 0;
    for (int q = 0; q < count; q++) {
        double distance = 0;
        UNROLLED (int k = 0; k < SAMPLES; k++) {
            const double d = x[k] - at[q * SAMPLES + k];
            distance = fma(d, d, distance);
        }
        found = distance < least ? q : found;
        least = distance < least ? distance : least;
    }
    label[i] = found;
}

// The rows cluster by cluster, and where each cluster begins; one block.
extern "C" __global__ void __launch_bounds__(BLOCK)
    order_rows(const int64_t *label, int64_t m, int64_t *order, int64_t *first) {
    __shared__ int begin[CLUSTERS + 1];
    const int I = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
    const int64_t low = m * lane / TEAM, high = m * (lane + 1) / TEAM;
    int own = 0, before = 0, all = 0;
    for (int64_t i = low; i < high; i++) own += label[i] == I;
    UNROLLED (int other = 0; other < TEAM; other++) {
        const int count = __shfl_sync(FULL, own, threadIdx.x % 32 - lane + other);
        before += other < lane ? count : 0;
        all += count;
    }
    if (lane == 0) begin[I + 1] = all;
    __syncthreads();
    if (threadIdx.x == 0) {
        begin[0] = 0;
        for (int k = 0; k < CLUSTERS; k++) begin[k + 1] += begin[k];
    }
    __syncthreads();
    int64_t at = begin[I] + before;
    for (int64_t i = low; i < high; i++)
        if (label[i] == I) order[at++] = i;
    if (threadIdx.x <= CLUSTERS) first[threadIdx.x] = begin[threadIdx.x];
}

// sums_Ij = v_j sum of u_i K_ij over the rows of cluster I = blockIdx.y; a thread has one chunk of columns.
extern "C" __global__ void __launch_bounds__(256) cluster_rows(const __grid_constant__ State S, int parity) {
    __shared__ double u[256];
    __shared__ int64_t row[256];
    if (!serves(S, parity)) return;
    const int64_t j = ((int64_t)blockIdx.x * 256 + threadIdx.x) * CHUNK, I = blockIdx.y;
    const int64_t end = S.coarse.first[I + 1];
    double acc[CHUNK] = {};
    for (int64_t begin = S.coarse.first[I]; begin < end; begin += 256) {
        const int count = (int)(end - begin < 256 ? end - begin : 256);
        __syncthreads();
        if ((int)threadIdx.x < count) {
            const int64_t i = row[threadIdx.x] = S.coarse.order[begin + threadIdx.x];
            u[threadIdx.x] = WIDEN * exp(S.u_log[i] < BOUND ? S.u_log[i] : BOUND);
        }
        __syncthreads();
        if (j < S.ld)
#pragma unroll 4
            for (int k = 0; k < count; k++) {
                double x[CHUNK];
                widen(__ldg((const uint4 *)(S.kernel + row[k] * S.ld + j)), x);
                UNROLLED (int e = 0; e < CHUNK; e++) acc[e] = fma(u[k], x[e], acc[e]);
            }
    }
    const double shift = S.progress[parity].shift;
    for (int e = 0; e < CHUNK; e++)
        if (j + e < S.n) {
            const double absorbed = S.cols.absorbed[j + e];
            const double v = isfinite(absorbed) ? exp(S.x[j + e] + shift - absorbed) : 0;
            S.coarse.sums[I * S.ld + j + e] = v > 0 ? v * acc[e] : 0;
        }
}

// P_IJ of cluster I = blockIdx.x
extern "C" __global__ void __launch_bounds__(BLOCK) cluster_blocks(const __grid_constant__ State S, int parity) {
    if (!serves(S, parity)) return;
    const int64_t J = threadIdx.x / TEAM, I = blockIdx.x;
    double sum = 0;
    for (int64_t j = threadIdx.x % TEAM; j < S.n; j += TEAM)
        sum += S.coarse.label[j] == J ? S.coarse.sums[I * S.ld + j] : 0;
    sum = warp_sum<TEAM>(sum);
    if (threadIdx.x % TEAM == 0) S.coarse.blocks[I * CLUSTERS + J] = sum;
}

// Row J = blockIdx.x of S = sum_I P_I^T P_I / r_I, and s_J behind the matrix
extern "C" __global__ void __launch_bounds__(BLOCK) cluster_products(const __grid_constant__ State S, int parity) {
    __shared__ double part[CLUSTERS]; // P_IJ / r_I
    if (!serves(S, parity)) return;
    const double *P = S.coarse.blocks;
    const int K = threadIdx.x / TEAM, lane = threadIdx.x % TEAM, J = blockIdx.x;
    double r = 0, s = 0, sum = 0;
    for (int L = lane; L < CLUSTERS; L += TEAM) {
        r += P[K * CLUSTERS + L];
        s += P[L * CLUSTERS + J];
    }
    r = warp_sum<TEAM>(r);
    s = warp_sum<TEAM>(s);
    if (lane == 0) part[K] = r > 0 ? P[K * CLUSTERS + J] / r : 0;
    __syncthreads();
    for (int I = lane; I < CLUSTERS; I += TEAM) sum = fma(part[I], P[I * CLUSTERS + K], sum);
    sum = warp_sum<TEAM>(sum);
    if (lane == 0) S.coarse.matrix[J * CLUSTERS + K] = sum;
    if (threadIdx.x == 0) S.coarse.matrix[CLUSTERS * CLUSTERS + J] = s;
}

// S becomes (I - J + fi 1 s^T / |s|)^-1 - I, J = fi diag(1 / s) S: Gauss and Jordan on its product with diag(s), which
// is symmetric and positive definite, in registers, column TEAM c + lane of row i in A[c]; one block.
extern "C" __global__ void __launch_bounds__(BLOCK)
    cluster_matrix(const __grid_constant__ State S, int parity, double fi) {
    __shared__ double s[CLUSTERS], row[2][CLUSTERS];
    __shared__ int bad;
    if (!serves(S, parity)) return;
    const int i = threadIdx.x / TEAM, lane = threadIdx.x % TEAM, team = threadIdx.x % 32 - lane;
    double A[CLUSTERS / TEAM], total = 0;
    if (threadIdx.x < CLUSTERS) s[threadIdx.x] = S.coarse.matrix[CLUSTERS * CLUSTERS + threadIdx.x];
    if (threadIdx.x == 0) bad = 0;
    __syncthreads();
    for (int k = 0; k < CLUSTERS; k++) total += s[k];
    UNROLLED (int c = 0; c < CLUSTERS / TEAM; c++) {
        const int k = TEAM * c + lane;
        A[c] = (i == k ? s[i] : 0) + fi * (s[i] * s[k] / total - S.coarse.matrix[i * CLUSTERS + k]);
    }
    UNROLLED (int q = 0; q < CLUSTERS / TEAM; q++) // unrolled, since registers cannot be indexed at run time
        ROLLED (int l = 0; l < TEAM; l++) {
            const int at = TEAM * q + l;
            double *upper = row[l % 2];
            if (i == at)
                UNROLLED (int c = 0; c < CLUSTERS / TEAM; c++) upper[TEAM * c + lane] = A[c];
            const double factor = __shfl_sync(FULL, A[q], team + l);
            __syncthreads();
            const double pivot = 1 / fmax(upper[at], fmax(LEAST_PIVOT * s[at], TINY));
            UNROLLED (int c = 0; c < CLUSTERS / TEAM; c++) {
                const double scaled = TEAM * c + lane == at ? pivot : upper[TEAM * c + lane] * pivot;
                const double kept = TEAM * c + lane == at ? 0 : A[c];
                A[c] = i == at ? scaled : fma(-factor, scaled, kept);
            }
        }
    UNROLLED (int c = 0; c < CLUSTERS / TEAM; c++) {
        const int k = TEAM * c + lane;
        const double T = A[c] * s[k] - (i == k ? 1 : 0);
        S.coarse.matrix[i * CLUSTERS + k] = T;
        if (!isfinite(T)) bad = 1;
    }
    __syncthreads();
    if (threadIdx.x == 0) S.progress[parity].coarse = total > 0 && isfinite(total) && !bad;
}

// The mean over each cluster (R) of the held differences, one block each, and of the last residual in the last block,
// which also finds the shares.
extern "C" __global__ void __launch_bounds__(BLOCK) cluster_means(const __grid_constant__ State S, int parity) {
    __shared__ double mass[CLUSTERS];
    const int k = blockIdx.x, J = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
    if (!serves(S, parity) || (k < MOST_DEPTH && k >= S.progress[parity].depth)) return;
    const double *F = k < MOST_DEPTH ? S.dF + k * S.n : S.residual;
    double own = 0, sum = 0;
    for (int64_t j = lane; j < S.n; j += TEAM) {
        const double s = S.coarse.label[j] == J ? S.s[j] : 0;
        own += s;
        sum += s > 0 ? s * F[j] : 0;
    }
    own = warp_sum<TEAM>(own);
    sum = warp_sum<TEAM>(sum);
    if (lane == 0) {
        mass[J] = own;
        (k < MOST_DEPTH ? S.coarse.mean_dF + k * CLUSTERS : S.coarse.mean)[J] = own > 0 ? sum / own : 0;
    }
    __syncthreads();
    for (int64_t j = threadIdx.x; k == MOST_DEPTH && j < S.n; j += BLOCK) {
        const double all = mass[S.coarse.label[j]];
        S.coarse.share[j] = all > 0 && S.s[j] > 0 ? S.s[j] / all : 0;
    }
}
