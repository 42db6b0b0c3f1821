// Mirrors is_plain, begin and absorb of src_c/solve.c: from M to a state before its first pass in one cooperative
// launch, and from the last pass to the numbers of an answer in another. The host reads nothing before the answer.
//
// Plain: M in C order, finite, all masses positive, c = a b^T, no larger reg first, and one potential only if the host
// knows that it serves. If the device finds otherwise, the status says so, and the host solves the problem from the
// beginning. A solve that has not ended is continued by the host.
// Options: STORE (type of K), COST (of M: 0 float64, 1 float32).
#include "state.cuh"
#include "stored_exp.cuh"

extern __shared__ __align__(128) unsigned char memory[]; // a Seen for each warp

#define THREADS 512
#define WARPS (THREADS / 32)
#define AHEAD 4                                                      // reads of 16 bytes that a thread issues at once
#define ENTRIES ((int)(16 / sizeof(cost)))                           // of M in 16 bytes
#define LINE (32 * ENTRIES)                                          // columns that a warp processes at once
#define HEAD 8                                                       // words of an answer before its trace
#define TOLD (HEAD + TRACE_PASSES * (int)(sizeof(mapuot_stats) / 8)) // words of an answer before its vectors

struct Plain {
    const cost *M;               // m x n, at a multiple of 16 bytes
    double *alpha, *beta;        // m, ld: the scalings in K
    const double *log_a, *log_b; // m, n
    double *range;               // 4 a block: least and largest entry, how many are not finite, how many differ
    // from the entry across the diagonal
    int64_t *tops;               // n: the largest exponent of each column, by its rank
    const Progress *start;       // before a first pass
    double safe_range;           // largest range(M) / reg for a K that absorbs only the least cost
    double most_range;           // largest range(M) / reg without a larger reg first
    double log_size;             // largest |log a| + largest |log b|
    double rounding, vanishing;  // EXPONENT_ROUNDING and VANISHING of mapuot/problem/problem.py
    double cost_rate, cost_rest; // the rounding of a cost is at most rate x + rest, x the largest,
    const double *sizes;         // and size_rate times the sum of these two numbers, if any
    double size_rate;
    double dual_constant; // the dual value's constant, without the terms of hard rows
    double mass;          // total mass of b
    int64_t alike;        // 1: rows and columns are the same problem if M is its transpose
    int64_t posts;        // POSTS of the passes
};

struct Seen {
    double low, high, odd, unlike;
};

// Join the `Seen` of all threads of the block, for each of them
FN Seen seen_by_all(Seen x, Seen *of_warps) {
    x = {-warp_max(-x.low), warp_max(x.high), warp_sum(x.odd), warp_sum(x.unlike)};
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warps[threadIdx.x % WARPS];
    return {-warp_max<WARPS>(-x.low), warp_max<WARPS>(x.high), warp_sum<WARPS>(x.odd), warp_sum<WARPS>(x.unlike)};
}

FN void see(Seen &all, cost &low, cost &high, cost x) {
    low = fmin(low, x);
    high = fmax(high, x);
    all.odd += !isfinite(x);
}

// Range and counts over this thread's part of M
FN Seen look(const State &S, const Plain &T) {
    const int64_t total = S.m * S.n, chunks = total / ENTRIES, step = (int64_t)gridDim.x * THREADS;
    const int64_t own = (int64_t)blockIdx.x * THREADS + threadIdx.x, left = chunks * ENTRIES + own;
    cost low = INF, high = -INF;
    Seen all = {0, 0, 0, 0};
    for (int64_t q = own; q < chunks; q += AHEAD * step) {
        alignas(16) cost x[AHEAD][ENTRIES];
        UNROLLED (int i = 0; i < AHEAD; i++)
            *(uint4 *)x[i] = __ldg((const uint4 *)T.M + (q + i * step < chunks ? q + i * step : q));
        UNROLLED (int i = 0; i < AHEAD; i++)
            UNROLLED (int e = 0; e < ENTRIES; e++)
                if (q + i * step < chunks) see(all, low, high, x[i][e]);
    }
    if (left < total) see(all, low, high, T.M[left]);
    for (int64_t q = own; T.alike && q < S.m * 32; q += step) { // the tiles on the diagonal: see extrema in stream.cu
        const int64_t i = q / 32, j = i / 32 * 32 + q % 32;
        all.unlike += j < S.n && T.M[i * S.n + j] != T.M[j * S.n + i];
    }
    all.low = low;
    all.high = high;
    return all;
}

// Clear the passes' buffers for sums and posts, and set the ranks of all columns to -inf.
FN void empty(const State &S, const Plain &T) {
    const int64_t own = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    for (int64_t q = own; q < 2 * (S.parts > BLOCKS ? S.parts : BLOCKS) * SCALARS; q += step) S.scalars[q] = 0;
    for (int64_t q = own; q < 3 * S.ld; q += step) S.sums[q] = 0;
    for (int64_t q = own; q < 2 * S.parts * T.posts; q += step) take_back(S.partial + q);
    for (int64_t q = own; q < S.n; q += step) T.tops[q] = rank_of(-INF);
}

// Read ENTRIES of M; only the first `count` exist. whole: the address is a multiple of 16 bytes.
FN void read_entries(const cost *at, int64_t count, bool whole, cost (&x)[ENTRIES]) {
    if (whole && count >= ENTRIES) {
        *(uint4 *)x = __ldg((const uint4 *)at);
        return;
    }
    UNROLLED (int e = 0; e < ENTRIES; e++) x[e] = e < count ? at[e] : (cost)INF;
}

// alpha_i = -max_j(log b_j - M_ij / reg), a warp a row
FN void balance_rows(const State &S, const Plain &T) {
    const int lane = threadIdx.x % 32;
    const bool whole = S.n % ENTRIES == 0;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; i < S.m; i += (int64_t)gridDim.x * WARPS) {
        double top = -INF;
        for (int64_t j = ENTRIES * lane; j < S.n; j += LINE * AHEAD) {
            alignas(16) cost x[AHEAD][ENTRIES];
            UNROLLED (int k = 0; k < AHEAD; k++)
                read_entries(T.M + i * S.n + j + LINE * k, S.n - j - LINE * k, whole, x[k]);
            UNROLLED (int k = 0; k < AHEAD; k++)
                UNROLLED (int e = 0; e < ENTRIES; e++)
                    if (j + LINE * k + e < S.n) top = fmax(top, T.log_b[j + LINE * k + e] - x[k][e] * S.limits.inv_reg);
        }
        top = warp_max(top);
        if (lane == 0) T.alpha[i] = -top;
    }
}

// Store ENTRIES of K
FN void copy_entries(real *to, const real (&x)[ENTRIES]) {
    constexpr int BYTES = ENTRIES * (int)sizeof(real);
    if constexpr (BYTES >= 16) {
        UNROLLED (int q = 0; q < BYTES / 16; q++) ((uint4 *)to)[q] = ((const uint4 *)x)[q];
    } else {
        *(double *)to = *(const double *)x;
    }
}

// A warp's part of a matrix: rows i to end, LINE columns. This lane reads ENTRIES columns from column j on.
struct Strip {
    int64_t i, end, j;

    // strip number `warp` of strips x parts
    FN Strip(const State &S, int64_t warp, int64_t strips, int64_t parts)
        : i(S.m * (warp / strips) / parts), end(S.m * (warp / strips + 1) / parts),
          j(warp % strips * LINE + threadIdx.x % 32 * ENTRIES) {}

    // Call with (i, entries of M) for each of its rows, and read AHEAD rows at once
    template <typename F> FN void each_row(const State &S, const Plain &T, F call) const {
        const bool whole = S.n % ENTRIES == 0;
        for (int64_t first = i; first < end; first += AHEAD) {
            alignas(16) cost x[AHEAD][ENTRIES];
            UNROLLED (int k = 0; k < AHEAD; k++)
                read_entries(T.M + (first + k) * S.n + j, first + k < end ? S.n - j : 0, whole, x[k]);
            UNROLLED (int k = 0; k < AHEAD; k++)
                if (first + k < end) call(first + k, x[k]);
        }
    }
};

// Share strips over so many columns among the warps of the first blocks
template <typename F> FN void each_strip(const State &S, int64_t columns, int blocks, F call) {
    const int64_t strips = (columns + LINE - 1) / LINE, warps = (int64_t)blocks * WARPS;
    const int64_t parts = warps > strips ? warps / strips : 1;
    const int64_t own = (int)blockIdx.x < blocks ? (int64_t)blockIdx.x * WARPS + threadIdx.x / 32 : strips * parts;
    for (int64_t q = own; q < strips * parts; q += warps) call(Strip(S, q, strips, parts));
}

// tops_j = max_i(alpha_i + log b_j - M_ij / reg)
FN void balance_columns(const State &S, const Plain &T) {
    each_strip(S, S.n, gridDim.x, [&](const Strip &own) {
        double top[ENTRIES], log_b[ENTRIES];
        UNROLLED (int e = 0; e < ENTRIES; e++) {
            top[e] = -INF;
            log_b[e] = own.j + e < S.n ? T.log_b[own.j + e] : 0;
        }
        own.each_row(S, T, [&](int64_t i, const cost(&x)[ENTRIES]) {
            const double alpha = T.alpha[i];
            UNROLLED (int e = 0; e < ENTRIES; e++) top[e] = fmax(top[e], log_b[e] + alpha - x[e] * S.limits.inv_reg);
        });
        UNROLLED (int e = 0; e < ENTRIES; e++)
            if (own.j + e < S.n) atomicMax(T.tops + own.j + e, rank_of(top[e]));
    });
}

// The scalings of a side if it need not be balanced: one side takes all of the least exponent, or with one potential
// each half
struct Safe {
    bool is;
    double alpha, beta;
};

// Set the data of rows and columns for passes around alpha and beta; with one potential these are the mean of both.
FN void set_sides(const State &S, const Plain &T, const Safe &safe) {
    const int64_t own = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    const bool one = S.limits.symmetric && !safe.is;
    for (int64_t i = own; i < S.m; i += step) {
        Point &p = ((Point *)S.point)[i];
        const double log_a = T.log_a[i], found = safe.is ? safe.alpha : __ldcg(T.alpha + i);
        const double alpha = one ? 0.5 * (found + T.log_b[i] - number_of(__ldcg(T.tops + i))) : found;
        T.alpha[i] = alpha;
        p.x = p.y * log_a - (1 - p.y) * (alpha - log_a);
    }
    for (int64_t j = own; j < S.n; j += step) {
        const double log_b = T.log_b[j];
        const double beta = safe.is ? safe.beta : one ? T.alpha[j] : log_b - number_of(__ldcg(T.tops + j));
        const double e = beta - log_b, v = exp(-e);
        T.beta[j] = beta;
        ((double *)S.cols.absorbed)[j] = e;
        S.x_next[j] = 0;
        S.v_scale[j] = v;
        S.narrow_v[j] = (float)fmin(v, NARROW_LIMIT);
    }
}

// Build K_ij = exp(alpha_i + beta_j - M_ij / reg), by the first blocks
FN void build(const State &S, const Plain &T, int blocks, const Safe &safe) {
    each_strip(S, S.ld, blocks, [&](const Strip &own) {
        double beta[ENTRIES];
        UNROLLED (int e = 0; e < ENTRIES; e++)
            beta[e] = safe.is ? safe.beta : own.j + e >= S.n ? 0 : __ldcg(T.beta + own.j + e);
        own.each_row(S, T, [&](int64_t i, const cost(&x)[ENTRIES]) {
            const double alpha = safe.is ? safe.alpha : __ldcg(T.alpha + i);
            alignas(16) real entry[ENTRIES];
            UNROLLED (int e = 0; e < ENTRIES; e++) {
                const double p = stored_exp(alpha + beta[e] - x[e] * S.limits.inv_reg);
                entry[e] = (real)(p >= S.limits.flush ? p : 0);
            }
            real *to = S.kernel + i * S.ld + own.j;
            if (own.j < S.ld) copy_entries(to, entry);
        });
    });
}

// Set the progress before the first pass; one block
FN void set_progress(const State &S, const Plain &T, const Safe &safe, const Seen &M, Seen *of_warps) {
    const double least = M.low / S.limits.reg;
    Seen rows = {0, 0, 0, 0},
         cols = {0, 0, 0, 0}; // Seen is reused: high holds a largest |log u|; odd and unlike hold sums
    for (int64_t i = threadIdx.x; i < S.m; i += THREADS) {
        const double alpha = safe.is ? safe.alpha : __ldcg(T.alpha + i);
        rows.high = fmax(rows.high, fabs(alpha));
        rows.odd += S.limits.symmetric ? 0 : S.point[i].w * (alpha - T.log_a[i]); // else the columns' terms count twice
    }
    for (int64_t j = threadIdx.x; j < S.n; j += THREADS) {
        const double beta = safe.is ? safe.beta : __ldcg(T.beta + j), v = exp(T.log_b[j] - beta);
        cols.high = fmax(cols.high, fabs(beta));
        cols.low = fmin(cols.low, -v);
        cols.odd += v;
    }
    rows = seen_by_all(rows, of_warps);
    cols = seen_by_all(cols, of_warps);
    copy_record(S.progress, T.start);
    __syncthreads();
    if (threadIdx.x > 0) return;
    const double terms = rows.high + cols.high + T.log_size;
    const double paid = fmin((M.high - M.low) / S.limits.reg, terms + fabs(least) + T.vanishing);
    const double formed = T.sizes ? T.size_rate * (T.sizes[0] + T.sizes[1]) : 0;
    Progress &p = *S.progress;
    p.exponent_error = T.rounding * (paid + terms) + (T.cost_rate * M.high + T.cost_rest + formed) / S.limits.reg;
    p.dual_constant = T.dual_constant + rows.odd;
    if (!(-cols.low >= 1 / NARROW_LIMIT && -cols.low <= NARROW_LIMIT)) p.narrow = 0;
    S.scalars[NEXT_SCALE] = cols.odd;
    S.scalars[NEXT_B] = T.mass; // sum b e^(-k x) at x = 0
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    begin(const __grid_constant__ State S, const __grid_constant__ Plain T) {
    Seen *of_warps = (Seen *)memory;
    uint32_t *counter = S.barrier + 16, ended = meeting_start(counter); // the passes use other counters
    const double reg = S.limits.reg;
    Seen M = seen_by_all(look(S, T), of_warps);
    empty(S, T);
    if (threadIdx.x == 0) ((Seen *)T.range)[blockIdx.x] = M;
    grid_barrier(counter, ended);
    M = {INF, -INF, 0, 0};
    if (threadIdx.x < gridDim.x) {
        const double *at = T.range + 4 * threadIdx.x;
        M = {__ldcg(at), __ldcg(at + 1), __ldcg(at + 2), __ldcg(at + 3)};
    }
    M = seen_by_all(M, of_warps);
    const double range_over_reg = (M.high - M.low) / reg, least = M.low / reg;
    const bool finite = isfinite(range_over_reg) && isfinite(least) && isfinite(M.high / reg);
    const double shared = S.limits.symmetric ? 0.5 * least : 0;
    const Safe safe = {range_over_reg <= T.safe_range, least - shared, shared};
    const bool last = blockIdx.x == gridDim.x - 1;
    if (last && threadIdx.x == 0) ((Seen *)T.range)[BLOCKS] = M;
    if (M.odd > 0 || !finite || !(range_over_reg <= T.most_range) || (T.alike && !(M.unlike > 0))) {
        if (last && threadIdx.x == 0) S.progress->status = MAPUOT_BAD_ARGUMENT;
        return;
    }
    if (!safe.is) {
        balance_rows(S, T);
        grid_barrier(counter, ended);
        balance_columns(S, T);
        grid_barrier(counter, ended);
    }
    set_sides(S, T, safe);
    if (!safe.is) grid_barrier(counter, ended);
    build(S, T, gridDim.x > 1 ? gridDim.x - 1 : 1, safe); // meanwhile the last block sets the progress
    if (last) set_progress(S, T, safe, M, of_warps);
}

// Write an answer, from this half of progress: status, passes and range; the trace; log u, log v and the marginals. To
// exponents, for draws from the plan: its exponents and the marginal of its rows. Without a certificate only log v is
// written: other passes may continue from it.
extern "C" __global__ void __launch_bounds__(THREADS)
    tell(const __grid_constant__ State S, const __grid_constant__ Plain T, int parity, double *out, double *exponents) {
    const Progress &p = S.progress[parity];
    const Seen &M = ((const Seen *)T.range)[BLOCKS];
    const int64_t own = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    if (own == 0) {
        out[0] = (double)p.status;
        out[1] = (double)p.passes;
        out[2] = M.low;
        out[3] = M.high;
    }
    for (int64_t q = own; q < p.passes * (int)(sizeof(mapuot_stats) / 8); q += step)
        out[HEAD + q] = ((const double *)S.trace)[q];
    double *log_u = out + TOLD, *log_v = log_u + S.m, *r = log_v + S.n, *s = r + S.m;
    // an unfinished solve continues from the last image, not from a step that no guard has judged
    const bool ended = p.status == MAPUOT_CONVERGED;
    for (int64_t j = own; j < S.n; j += step) log_v[j] = ended ? S.x[j] : S.image[j] - p.shift;
    if (!ended) return;
    for (int64_t i = own; i < S.m; i += step) {
        const double log_a = T.log_a[i], x = S.u_log[i] + (T.alpha[i] - log_a) + (p.shift + p.offset);
        log_u[i] = x;
        r[i] = exponents[S.m + S.n + i] = S.r[i] * p.kappa;
        exponents[i] = isfinite(x) ? x + log_a : -INF;
    }
    for (int64_t j = own; j < S.n; j += step) {
        s[j] = S.s[j];
        exponents[S.m + j] = isfinite(S.x[j]) ? S.x[j] + T.log_b[j] : -INF;
    }
}
