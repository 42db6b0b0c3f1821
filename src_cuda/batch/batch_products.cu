// Mirrors src_c/batch.c for problems that are too large for a block: a launch makes one pass of all problems.
//
// One block a problem does the O(m + n) work. Between the kernels the caller computes S = V K^T and sums = U K (for one
// potential sums = S) in float64. Either K = exp(low - M / reg) serves all (safe 1), or each problem has a K of its
// own around the potentials in row_absorbed and in the column vectors, given by the caller. A problem with scalings
// that outgrow its K stops with status MAPUOT_ABSORB.
#define THREADS 128
#include "batch_finish.cuh"

// Copy weights to dense float64 for the kernels, with sum (NaN or inf if a weight is) and minimum of each problem.
// step: entries from one problem's weights to the next, 0: all problems share them.
extern "C" __global__ void __launch_bounds__(THREADS)
    weigh(const cost *from, int64_t step, int64_t length, double *to, double *mass, double *least) {
    __shared__ double scratch[WARPS];
    double sum = 0, low = INF;
    for (int64_t i = threadIdx.x; i < length; i += THREADS) {
        const double w = (double)from[blockIdx.x * step + i];
        to[blockIdx.x * length + i] = w;
        sum += w;
        low = fmin(low, w);
    }
    sum = block_sum(sum, scratch);
    low = -block_max(-low, scratch);
    if (threadIdx.x == 0) mass[blockIdx.x] = sum, least[blockIdx.x] = low;
}

// The exponents of the plan, log u + log a and log v + log b, for reference a b^T, and the potentials' terms of the
// dual value: -sum rho a (e^(-f / rho) - 1) of a side with one rho, sum a f of a balanced one. rho: 0 if balanced.
extern "C" __global__ void __launch_bounds__(THREADS)
    close_problems(const double *A, const double *B, const double *log_u, const double *log_v, int64_t m, int64_t n,
                   double reg, double rho_rows, double rho_cols, double *alpha, double *beta, double *dual) {
    __shared__ double scratch[WARPS];
    double sum = 0;
    for (int side = 0; side < 2; side++) {
        const int64_t count = side ? n : m, at = blockIdx.x * count;
        const double *weight = side ? B : A, *log_x = side ? log_v : log_u, rho = side ? rho_cols : rho_rows;
        double *to = side ? beta : alpha;
        for (int64_t i = threadIdx.x; i < count; i += THREADS) {
            const double w = weight[at + i], x = log_x[at + i];
            if (w > 0) sum += rho > 0 ? -rho * (w * expm1(-reg * x / rho)) : w * (reg * x);
            to[at + i] = w > 0 && isfinite(x) ? x + log(w) : -INF;
        }
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) dual[blockIdx.x] = sum;
}

// Load log v of the start, the potentials in K, and v.
extern "C" __global__ void __launch_bounds__(THREADS) open_problems(const __grid_constant__ Batch S) {
    __shared__ Work W;
    const int64_t problem = blockIdx.x;
    double *col = S.columns + problem * COLUMN_KINDS * S.n;
    open_columns(S, W, problem, col, (int)S.n);
    const double half = ONE_POTENTIAL ? 0.5 * S.low : 0; // each side has absorbed half of low
    for (int j = threadIdx.x; S.safe > 0 && j < (int)S.n; j += THREADS)
        col[ABSORBED * S.n + j] = half - (S.product ? col[LOG_B * S.n + j] : 0);
    for (int i = threadIdx.x; S.safe > 0 && i < (int)S.m; i += THREADS) {
        const double a = S.A[problem * S.m + i];
        S.row_absorbed[problem * S.m + i] = a > 0 ? S.low - half - (S.product ? log(a) : 0) : 0;
    }
    __syncthreads();
    start_columns(S, W, col, (int)S.n, S.v + problem * S.n);
    if (threadIdx.x == 0) {
        S.standing[problem] = W.standing[0];
        S.standing[problem].weight = total(W.next, WARPS);
    }
}

// u = prox(K v), the row scalar (NaN: K is outgrown), r and log u without the translation of the pass.
extern "C" __global__ void __launch_bounds__(THREADS) prox_rows(const __grid_constant__ Batch S) {
    __shared__ double scratch[WARPS];
    const int64_t problem = blockIdx.x;
    if (S.report[problem].status != MAPUOT_RUNNING) return;
    const double shift = S.standing[problem].shift;
    double part = 0;
    bool odd = false;
    for (int i = threadIdx.x; i < (int)S.m; i += THREADS) {
        const int64_t at = problem * S.m + i;
        const double a = S.A[at], d = S.row_absorbed[at], s = S.row_sums[at];
        const double *col = S.columns + problem * COLUMN_KINDS * S.n + i;
        const double log_v = ONE_POTENTIAL ? col[X * S.n] - col[ABSORBED * S.n] : 0;
        double log_u = -INF;
        const double u = row_scale(S, a, log(a), d, s, shift, log_v, log_u, odd);
        S.u[at] = u;
        S.r[at] = u * s;
        S.log_u[at] = log_u + d;
        part += S.k1 > 0 || ONE_POTENTIAL ? u * s : a > 0 ? a * (log_u + d) : 0;
    }
    odd = __syncthreads_or(odd);
    part = block_sum(part, scratch);
    if (threadIdx.x == 0) S.row_scalar[problem] = odd ? INF - INF : part;
}

// The column half of the pass. After the last pass it adds the translation to the results for the caller. 4 blocks a
// multiprocessor: registers for 5 would spill.
extern "C" __global__ void __launch_bounds__(THREADS, 4) finish_problems(const __grid_constant__ Batch S) {
    __shared__ Work W;
    const int64_t problem = blockIdx.x;
    if (S.report[problem].status != MAPUOT_RUNNING) return;
    double *col = S.columns + problem * COLUMN_KINDS * S.n;
    const int n = (int)S.n, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int q = lane; q < (int)(sizeof(Standing) / 8); q += 32)
        ((double *)&W.standing[warp])[q] = ((const double *)(S.standing + problem))[q];
    if (lane == 0) {
        W.row[warp] = warp == 0 ? S.row_scalar[problem] : 0;
        W.next[warp] = warp == 0 ? S.standing[problem].weight : 0;
    }
    if (threadIdx.x == 0) W.report = S.report[problem];
    __syncthreads();
    const Move move = find_move(S, W);
    const double *sums = S.sums + problem * S.n;
    bool odd = first_sweep(S, W, col, n, S.v + problem * S.n, move, [&](int j) { return sums[j]; });
    odd |= isnan(S.row_scalar[problem]);
    const int depth = held(W);
    odd = __syncthreads_or(odd);
    find_products(S, W, col, n, depth);
    __syncthreads();
    const bool far = __syncthreads_or(finish_columns(S, W, col, n, S.v + problem * S.n, move, odd));
    if (threadIdx.x == 0) {
        S.standing[problem] = W.standing[0];
        S.standing[problem].weight = total(W.next, WARPS);
        if (W.report.status == MAPUOT_RUNNING && far) W.report.status = MAPUOT_ABSORB;
        S.report[problem] = W.report;
    }
    __syncthreads();
    if (W.report.status == MAPUOT_RUNNING && W.report.passes < S.count) return;
    for (int i = threadIdx.x; i < (int)S.m; i += THREADS) {
        S.log_u[problem * S.m + i] += W.standing[0].shift + move.off;
        S.r[problem * S.m + i] *= move.kappa;
    }
    for (int j = threadIdx.x; j < n; j += THREADS) {
        const bool used = col[WEIGHT * n + j] > 0;
        S.log_v[problem * n + j] = used ? col[NEW_G * n + j] - col[NEW_F * n + j] - W.standing[0].shift : -INF;
        S.s[problem * n + j] = used ? col[MARGINAL * n + j] : 0;
    }
}
