// Mirrors src_c/stream_tmpl.c for rows with stored pairs only: K, the plan, and sums over it.
//
// As in stream.cu, the entry (i, j) is c_ij exp(alpha_i + beta_j - M_ij / reg), exponent in float64. Sums and maxima
// are along the rows of Runs; for those along the columns the caller gives the transposed Runs, with alpha and beta
// exchanged. Options: STORE (type of K or P), COST (of M: 0 float64, 1 float32).
#include "sparse.cuh"

// Inputs of an entry's computation; c: float64, or null
struct Pairs {
    const cost *M;
    const double *c, *alpha, *beta;
    double inv_reg;
};

// x = alpha_i + beta_j - M_ij / reg of entry k in row i, and c_ij
FN double exponent(const Pairs &P, const Runs &runs, int64_t i, int64_t k, double &share) {
    share = P.c ? P.c[k] : 1;
    return P.alpha[i] + P.beta[runs.index[k]] - (double)P.M[k] * P.inv_reg;
}

FN double plan_entry(const Pairs &P, const Runs &runs, int64_t i, int64_t k) {
    double share;
    const double x = exponent(P, runs, i, k, share);
    return share > 0 ? share * exp(x) : 0; // 0 also where e^x overflows
}

// K, entries below `flush` being 0, or, with flush = 0, the plan; out[k - before] for entry k
extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    sparse_entries(const __grid_constant__ Pairs P, const __grid_constant__ Runs runs, real *out, int64_t before,
                   double flush) {
    each_run(runs, [&](const Run &run) {
        for (int64_t k = run.first + run.lane; k < run.end; k += runs.lanes) {
            const double p = plan_entry(P, runs, run.row, k);
            out[k - before] = (real)(p >= flush ? p : 0);
        }
    });
}

// out_i = max_j log(entry), -inf for a row without entries
extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    sparse_max(const __grid_constant__ Pairs P, const __grid_constant__ Runs runs, double *out) {
    __shared__ double part[RUN_THREADS / 32];
    each_run(runs, [&](const Run &run) {
        double top = -INF;
        for (int64_t k = run.first + run.lane; k < run.end; k += runs.lanes) {
            double share;
            const double x = exponent(P, runs, run.row, k, share);
            top = fmax(top, P.c ? x + log(share) : x);
        }
        top = joined_run<Larger>(runs, top, part);
        if (run.lane == 0 && run.row >= 0) out[run.row] = top;
    });
}

// out_i = sum_j P_ij, cost_i = sum_j P_ij M_ij
extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    sparse_sums(const __grid_constant__ Pairs P, const __grid_constant__ Runs runs, double *out, double *cost_out) {
    __shared__ double part[RUN_THREADS / 32];
    each_run(runs, [&](const Run &run) {
        double sum = 0, paid = 0;
        for (int64_t k = run.first + run.lane; k < run.end; k += runs.lanes) {
            const double p = plan_entry(P, runs, run.row, k);
            sum += p;
            paid += p > 0 ? p * (double)P.M[k] : 0;
        }
        sum = joined_run<Plus>(runs, sum, part);
        paid = joined_run<Plus>(runs, paid, part);
        if (run.lane == 0 && run.row >= 0) out[run.row] = sum, cost_out[run.row] = paid;
    });
}

// out_i,x = sum_j P_ij X_jx for the COLUMNS columns of X from x0 on; X is n x d, out m x d
#define COLUMNS 4
extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    sparse_apply(const __grid_constant__ Pairs P, const __grid_constant__ Runs runs, const double *X, int64_t d,
                 int64_t x0, double *out) {
    __shared__ double part[RUN_THREADS / 32];
    each_run(runs, [&](const Run &run) {
        double sum[COLUMNS] = {};
        for (int64_t k = run.first + run.lane; k < run.end; k += runs.lanes) {
            const double p = plan_entry(P, runs, run.row, k), *x = X + runs.index[k] * d + x0;
            UNROLLED (int q = 0; q < COLUMNS; q++) sum[q] = x0 + q < d ? fma(p, x[q], sum[q]) : 0;
        }
        UNROLLED (int q = 0; q < COLUMNS; q++) {
            const double whole = joined_run<Plus>(runs, sum[q], part);
            if (run.lane == 0 && run.row >= 0 && x0 + q < d) out[run.row * d + x0 + q] = whole;
        }
    });
}

// Follow a row or column to the least number of its part, and halve the way for the next search.
FN int end_of(volatile int *next, int i) {
    for (int to; (to = next[i]) != i; i = to) next[i] = next[to];
    return i;
}

// next: of each row, and of each column behind the m rows, a number of its part that is no larger, at first its own
extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    join_parts_of(const __grid_constant__ Runs runs, int *next, int m) {
    each_run(runs, [&](const Run &run) {
        for (int64_t k = run.first + run.lane; k < run.end; k += runs.lanes) {
            int low = (int)run.row, high = m + runs.index[k];
            for (;;) {
                const int one = end_of(next, low), other = end_of(next, high);
                low = one < other ? one : other;
                high = one < other ? other : one;
                if (low == high || atomicCAS(next + high, high, low) == high) break;
            }
        }
    });
}

// Each number's end
extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT) end_parts(int *next, int count) {
    const int i = blockIdx.x * RUN_THREADS + threadIdx.x;
    if (i < count) next[i] = end_of(next, i);
}
