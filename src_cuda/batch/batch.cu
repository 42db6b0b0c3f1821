// Mirrors src_c/batch.c and batch_tmpl.c for problems that fit a block: one block makes all passes of a problem.
//
// K lies in registers (batch_build.cuh). A warp has 2 RT whole rows, so that u is found within it, and the column
// sums of the warps meet in shared memory: three meetings of the block a pass. K is rebuilt around the potentials
// when they leave its range, so that every reg works. After batch_narrow.cu, S.x starts near the answer.
// Options: as batch_build.cuh.
#include "batch_build.cuh"
#include "batch_finish.cuh"

#define RP (RT > 8 ? 16 : RT > 4 ? 8 : RT > 2 ? 4 : RT) // rows rounded up to a power of two, for warp_sums

// COLUMN_KINDS x COLUMNS numbers, the column vectors; their size is given at the launch
extern __shared__ __align__(128) unsigned char memory[];

FN double *columns(int kind) { return (double *)memory + kind * COLUMNS; }

struct Shared {
    Work work;
    double alpha[ROWS], absorbed[ROWS], a[ROWS], log_a[ROWS]; // of the rows; absorbed: the potential in K
    double v[COLUMNS], partial[WARPS][COLUMNS];
};

struct Lane {
    int g, c, row;   // row: this lane computes its u, as do all 16 / RP lanes of the row
    bool owns, mine; // owns: there is such a row; mine: this lane stores it
};

FN Lane lane_of() {
    const int c = threadIdx.x % 16, k = c * RP / 16;
    return {(int)threadIdx.x / 16, c, (int)threadIdx.x / 16 * RT + (k < RT ? k : 0), k < RT,
            k < RT && c % (16 / RP) == 0};
}

FN void open_rows(const Batch &S, Shared &all, int64_t problem) {
    ROLLED (int i = threadIdx.x; i < ROWS; i += THREADS) {
        const double a = i < (int)S.m ? S.A[problem * S.m + i] : 0;
        all.a[i] = a;
        all.log_a[i] = a > 0 ? log(a) : 0;
    }
    ROLLED (int j = threadIdx.x; j < COLUMNS; j += THREADS) all.v[j] = 0;
}

// Build K around the potentials of the pass, or around zeros (plain); then v.
FN void build_kernel(const Batch &S, Shared &all, const cost *M, const Lane &at, bool plain, double (&K)[RT][CT]) {
    double *beta = columns(NEW_G);
    __syncthreads();
    if (plain) {
        for (int j = threadIdx.x; j < COLUMNS; j += THREADS) beta[j] = 0;
        for (int i = threadIdx.x; i < ROWS; i += THREADS) all.alpha[i] = S.low;
    } else {
        for (int j = threadIdx.x; j < COLUMNS; j += THREADS) {
            const bool used = j < (int)S.n && columns(WEIGHT)[j] > 0;
            beta[j] = used ? columns(X)[j] + (S.product ? columns(LOG_B)[j] : 0) : -INF;
        }
        __syncthreads();
        balance(S, M, all.a, all.alpha, beta, (float *)all.partial[0]);
    }
    __syncthreads();
    share_potentials(S, all.alpha, beta);
    double part[CT];
    UNROLLED (int q = 0; q < CT; q++) part[q] = at.c + 16 * q < (int)S.n ? beta[at.c + 16 * q] : -INF;
    const cost *from = M + at.g * RT * S.M_row + at.c * S.M_col;
    const int64_t step = 16 * S.M_col;
    UNROLLED (int k = 0; k < RT; k++) {
        const double alpha = at.g * RT + k < (int)S.m ? all.alpha[at.g * RT + k] : -INF;
        UNROLLED (int q = 0; q < CT; q++) {
            const double x = alpha + part[q];
            K[k][q] = exp(x - (x > -INF ? (double)from[k * S.M_row + q * step] : 0) * S.limits.inv_reg);
        }
    }
    ROLLED (int i = threadIdx.x; i < ROWS; i += THREADS)
        all.absorbed[i] = all.a[i] > 0 ? all.alpha[i] - (S.product ? all.log_a[i] : 0) : 0;
    ROLLED (int j = threadIdx.x; j < (int)S.n; j += THREADS)
        columns(ABSORBED)[j] = columns(WEIGHT)[j] > 0 ? beta[j] - (S.product ? columns(LOG_B)[j] : 0) : 0;
    __syncthreads();
    start_columns(S, all.work, columns(0), COLUMNS, all.v);
}

// s = K v, u = prox(s), the warps' parts of K^T u and of the row scalar. Returns true if K is outgrown.
FN bool row_half(const Batch &S, Shared &all, const Lane &at, const double (&K)[RT][CT], double &log_u, double &r) {
    const double shift = all.work.standing[0].shift;
    bool odd = false;
    double s[RP];
    {
        double v[CT];
        UNROLLED (int q = 0; q < CT; q++) v[q] = all.v[at.c + 16 * q];
        UNROLLED (int k = 0; k < RP; k++) {
            s[k] = 0;
            if (k < RT)
                UNROLLED (int q = 0; q < CT; q++) s[k] += K[k < RT ? k : 0][q] * v[q];
        }
    }
    const double sum = warp_sums<RP, 8>(s, threadIdx.x % 32);
    const double a = at.owns ? all.a[at.row] : 0, d = all.absorbed[at.row];
    log_u = 0;
    const double log_v = ONE_POTENTIAL && a > 0 ? columns(X)[at.row] - columns(ABSORBED)[at.row] : 0;
    const double u = row_scale(S, a, all.log_a[at.row], d, sum, shift, log_v, log_u, odd);
    r = (double)(u * sum);
    const double part = warp_sum(!at.mine ? 0 : S.k1 > 0 || ONE_POTENTIAL ? r : a > 0 ? a * (log_u + d) : 0);
    if (threadIdx.x % 32 == 0) all.work.row[threadIdx.x / 32] = part;
#if ONE_POTENTIAL
    if (at.mine && at.row < (int)S.n) all.partial[0][at.row] = sum;
#else
    double sums[CT];
    UNROLLED (int q = 0; q < CT; q++) sums[q] = 0;
    UNROLLED (int k = 0; k < RT; k++) {
        const double uk = __shfl_sync(FULL, u, k * (16 / RP), 16);
        UNROLLED (int q = 0; q < CT; q++) sums[q] += K[k][q] * uk;
    }
    UNROLLED (int q = 0; q < CT; q++) {
        sums[q] += __shfl_xor_sync(FULL, sums[q], 16);
        if (threadIdx.x % 32 < 16) all.partial[threadIdx.x / 32][at.c + 16 * q] = sums[q];
    }
#endif
    return odd;
}

// Write the certified iterate for the caller.
FN void close_problem(const Batch &S, const Shared &all, int64_t problem, const Lane &at, const Move &move,
                      double log_u, double r) {
    const Work &W = all.work;
    if (threadIdx.x == 0) S.report[problem] = W.report;
    ROLLED (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        const double *col = columns(0) + j;
        const bool used = col[WEIGHT * COLUMNS] > 0;
        const int64_t to = problem * S.n + j;
        S.log_v[to] = used ? col[NEW_G * COLUMNS] - col[NEW_F * COLUMNS] - W.standing[0].shift : -INF;
        S.s[to] = used ? col[MARGINAL * COLUMNS] : 0;
    }
    if (at.mine && at.row < (int)S.m) {
        const int64_t to = problem * S.m + at.row;
        const bool used = all.a[at.row] > 0;
        S.log_u[to] = used ? log_u + all.absorbed[at.row] + W.standing[0].shift + move.off : -INF;
        S.r[to] = used ? r * move.kappa : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) batch_solve(const __grid_constant__ Batch S) {
    __shared__ Shared all;
    const int64_t problem = blockIdx.x;
    const cost *M = S.M + problem * S.M_problem;
    const Lane at = lane_of();
    const bool has_columns = (int)threadIdx.x / 32 < column_warps((int)S.n);
    double K[RT][CT];
    if (S.report[problem].status != MAPUOT_RUNNING || S.report[problem].passes >= S.count) return;
    if (threadIdx.x == 0) all.work.report = S.report[problem];
    open_rows(S, all, problem);
    open_columns(S, all.work, problem, columns(0), COLUMNS);
    bool odd = false, plain = S.safe > 0,
         rebuild = S.m > 0; // variables: the compiler would peel the loop for constants
    Move move;
    double log_u, r;
    ROLLED (;;) {
        if (rebuild) build_kernel(S, all, M, at, plain, K);
        plain = false;
        odd = __syncthreads_or(row_half(S, all, at, K, log_u, r));
        move = find_move(S, all.work);
        bool dead = false;
        if (has_columns)
            dead = first_sweep(S, all.work, columns(0), COLUMNS, all.v, move, [&](int j) {
                double sum = 0;
                for (int w = 0; w < (ONE_POTENTIAL ? 1 : WARPS); w++) sum += all.partial[w][j];
                return sum;
            });
        const int depth = held(all.work);
        odd |= __syncthreads_or(dead) != 0;
        if (depth > 0) {
            find_products(S, all.work, columns(0), COLUMNS, depth);
            __syncthreads();
        }
        bool far = false;
        if (has_columns) far = finish_columns(S, all.work, columns(0), COLUMNS, all.v, move, odd);
        rebuild = __syncthreads_or(far);
        if (all.work.report.status != MAPUOT_RUNNING || (all.work.report.passes >= S.count && !odd)) break;
    }
    close_problem(S, all, problem, at, move, log_u, r);
}
