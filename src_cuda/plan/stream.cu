// Mirrors src_c/stream_tmpl.c: one read of M for results that need the plan or the cost but no K.
//
// The entry (i, j) is c_ij exp(alpha_i + beta_j - M_ij / reg), exponent in float64, computed in tiles of 32 x 32 from M
// in any strides: reads follow the unit stride, through shared memory if it runs down the rows. Sums and maxima are
// along the rows; the caller swaps the strides to get them along the columns. out has gridDim.y slabs, one for each
// part of the columns, which the caller joins. Options: STORE (type of K or P), COST (of M: 0 float64, 1 float32),
// REFERENCE (of c, likewise), MASKED (1: c is multiplied by a mask).
#include "common.cuh"
#include "common/mask.h"
#include "stored_exp.cuh"

typedef floating<REFERENCE == 0>::type share;
#pragma option MASKED 0
#define SIDE 32
#define STEP 8 // threads are 32 x 8: each has SIDE / STEP rows of a tile

struct View {
    int64_t m, n;
    const cost *M;
    const share *c;
    int64_t M_row, M_col, c_row, c_col;
    const double *alpha, *beta;
    double inv_reg;
    mapuot_mask mask;
};

template <typename N> struct Tile {
    N x[SIDE][SIDE + 1];
};

// This thread's reads of the rows i0 to i0 + SIDE of a matrix: entry k of its tile at column j0 is
// from[j0 col + k step]. turned: the unit stride runs down the rows, so that reads follow the rows and are transposed
// through shared memory.
template <typename T> struct Way {
    const T *from;
    int64_t col, step, i0;
    bool turned;

    FN Way(const T *A, int64_t row, int64_t col, int64_t i0) : from(A), col(col), i0(i0) {
        const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
        turned = col != 1 && row < col;
        from += turned ? (i0 + tx) * row + ty * col : (i0 + ty) * row + tx * col;
        step = STEP * (turned ? col : row);
    }

    // Read this thread's entries of the tile at column j0, `missing` outside
    FN void request(const View &V, int64_t j0, double missing, T (&found)[SIDE / STEP]) const {
        const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
        const T *at = from + j0 * col;
        if (i0 + SIDE <= V.m && j0 + SIDE <= V.n) {
            UNROLLED (int k = 0; k < SIDE / STEP; k++, at += step) found[k] = *at;
            return;
        }
        UNROLLED (int k = 0; k < SIDE / STEP; k++, at += step) {
            const int64_t i = i0 + (turned ? tx : ty + STEP * k), j = j0 + (turned ? ty + STEP * k : tx);
            found[k] = i < V.m && j < V.n ? *at : (T)missing;
        }
    }

    // value[k] = A[i0 + ty + STEP k, j0 + tx], from the entries read
    template <typename N> FN void take(const T (&found)[SIDE / STEP], Tile<N> &tile, N (&value)[SIDE / STEP]) const {
        const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
        UNROLLED (int k = 0; k < SIDE / STEP; k++) value[k] = (N)found[k];
        if (!turned) return;
        __syncthreads();
        UNROLLED (int k = 0; k < SIDE / STEP; k++) tile.x[ty + STEP * k][tx] = value[k];
        __syncthreads();
        UNROLLED (int k = 0; k < SIDE / STEP; k++) value[k] = tile.x[tx][ty + STEP * k];
    }
};

// The columns of slab blockIdx.y, in whole tiles
struct Span {
    int64_t begin, end;
};

FN Span span_of(int64_t columns) {
    const int64_t tiles = (columns + SIDE - 1) / SIDE;
    return {tiles * blockIdx.y / gridDim.y * SIDE, tiles * (blockIdx.y + 1) / gridDim.y * SIDE};
}

// The rows i0 to i0 + SIDE of the exponents, tile by tile from column j0 on; the next tile of M is loaded while one
// is used.
struct Exponents {
    const Way<cost> M;
    cost ahead[SIDE / STEP];
    double alpha[SIDE / STEP]; // of this thread's rows, -inf outside

    FN Exponents(const View &V, int64_t i0, int64_t j0) : M(V.M, V.M_row, V.M_col, i0) {
        M.request(V, j0, INF, ahead);
        UNROLLED (int k = 0; k < SIDE / STEP; k++) {
            const int64_t i = i0 + threadIdx.x / 32 + STEP * k;
            alpha[k] = i < V.m ? V.alpha[i] : -INF;
        }
    }

    // x = alpha_i + beta_j - M_ij / reg (-inf outside), M_ij and c_ij (1 without c) times the mask
    FN void next(const View &V, int64_t j0, Tile<double> &tile, double (&x)[SIDE / STEP], double (&shares)[SIDE / STEP],
                 double (&costs)[SIDE / STEP]) {
        const int64_t j = j0 + threadIdx.x % 32;
        const double beta = j < V.n ? V.beta[j] : -INF;
        M.take(ahead, tile, costs);
        M.request(V, j0 + SIDE, INF, ahead);
        UNROLLED (int k = 0; k < SIDE / STEP; k++) shares[k] = 1;
        if (V.c) {
            const Way<share> c(V.c, V.c_row, V.c_col, M.i0);
            share found[SIDE / STEP];
            c.request(V, j0, 0, found);
            c.take(found, tile, shares);
        }
#if MASKED
        UNROLLED (int k = 0; k < SIDE / STEP; k++)
            shares[k] *= mask_weight(&V.mask, M.i0 + threadIdx.x / 32 + STEP * k, j);
#endif
        UNROLLED (int k = 0; k < SIDE / STEP; k++) x[k] = alpha[k] + beta - costs[k] * V.inv_reg;
    }
};

typedef double Entries[SIDE / STEP];

// Row k of this thread in the tiles of its block
FN int64_t row_at(int k) { return (int64_t)blockIdx.x * SIDE + threadIdx.x / 32 + STEP * k; }

// Call use(j0, x, c, M) for each tile of this block, in its slab of the columns
template <typename F> FN void each_tile(const View &V, int64_t columns, F use) {
    __shared__ Tile<double> tile;
    const Span span = span_of(columns);
    Exponents rows(V, (int64_t)blockIdx.x * SIDE, span.begin);
    for (int64_t j0 = span.begin; j0 < span.end; j0 += SIDE) {
        Entries x, c, M;
        rows.next(V, j0, tile, x, c, M);
        use(j0, x, c, M);
    }
}

// c e^x, also if c is 0 and e^x overflows
FN double weighed(double c, double x) { return c > 0 ? c * exp(x) : 0; }

#define RESIDENT (MASKED ? 3 : 4) // blocks a multiprocessor: a mask takes registers
// K (entries below `flush` are zero; columns n .. ld too) or, with flush = 0, the plan.
extern "C" __global__ void __launch_bounds__(256, RESIDENT)
    build_kernel(const __grid_constant__ View V, real *out, int64_t ld, double flush) {
    const int tx = threadIdx.x % 32;
    const int64_t i0 = row_at(0);
    const int left = (int)(V.m - i0 < SIDE ? V.m - i0 : SIDE); // rows from this thread's first on
    real *to = out + i0 * ld + tx;
    each_tile(V, ld, [&](int64_t j0, const Entries &x, const Entries &c, const Entries &) {
        const bool in = j0 + tx < ld;
        UNROLLED (int k = 0; k < SIDE / STEP; k++) {
            const double p = c[k] * stored_exp(x[k]);
            if (in && STEP * k < left) to[j0 + STEP * k * ld] = (real)(p >= flush ? p : 0);
        }
    });
}

// Join the parts of `count` sums or maxima, one part behind the other, into out_i; LARGER: take the maximum with out_i,
// too.
enum { SUM, LARGEST, LARGER };
extern "C" __global__ void __launch_bounds__(256)
    join_parts(const double *part, int64_t count, int parts, int how, double *out) {
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (i >= count) return;
    double all = how == LARGER ? fmax(out[i], part[i]) : part[i];
    for (int p = 1; p < parts; p++) all = how == SUM ? all + part[p * count + i] : fmax(all, part[p * count + i]);
    out[i] = all;
}

// alpha_i = -max_j over the parts of row_max, -inf if used_i is -inf: a row left out. +inf: a row without pairs; its
// used_i becomes -inf.
extern "C" __global__ void __launch_bounds__(256)
    balance_rows(const double *part, int64_t count, int parts, double *used, double *alpha) {
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (i >= count) return;
    double top = part[i];
    for (int p = 1; p < parts; p++) top = fmax(top, part[p * count + i]);
    alpha[i] = used[i] = used[i] == -INF ? -INF : -top;
    if (top == -INF) used[i] = -INF;
}

// out_i = max_j log(entry)
extern "C" __global__ void __launch_bounds__(256, 3) row_max(const __grid_constant__ View V, double *out) {
    Entries top;
    UNROLLED (int k = 0; k < SIDE / STEP; k++) top[k] = -INF;
    each_tile(V, V.n, [&](int64_t, const Entries &x, const Entries &c, const Entries &) {
        UNROLLED (int k = 0; k < SIDE / STEP; k++) top[k] = fmax(top[k], V.c || MASKED ? x[k] + far_log(c[k]) : x[k]);
    });
    UNROLLED (int k = 0; k < SIDE / STEP; k++) {
        const double high = warp_max(top[k]);
        const int64_t i = row_at(k);
        if (threadIdx.x % 32 == 0 && i < V.m) out[blockIdx.y * V.m + i] = high;
    }
}

// Pairs with log c_ij + alpha_i + beta_j - M_ij / reg at least `least`. Without `column`, count their number in each
// row and part of the columns: count, a number a row and part. With `column`, write their columns and costs from place
// count on, in order.
extern "C" __global__ void __launch_bounds__(256)
    kept_pairs(const __grid_constant__ View V, double least, int64_t *count, int *column, double *data) {
    const int lane = threadIdx.x % 32;
    int64_t found[SIDE / STEP], *own[SIDE / STEP];
    UNROLLED (int k = 0; k < SIDE / STEP; k++) {
        const int64_t i = row_at(k);
        own[k] = count + (i < V.m ? i : V.m - 1) * gridDim.y + blockIdx.y;
        found[k] = column ? *own[k] : 0;
    }
    each_tile(V, V.n, [&](int64_t j0, const Entries &x, const Entries &c, const Entries &M) {
        UNROLLED (int k = 0; k < SIDE / STEP; k++) {
            const bool near = (V.c ? x[k] + far_log(c[k]) : x[k]) >= least;
            const uint32_t all = __ballot_sync(FULL, near);
            if (column && near) {
                const int64_t at = found[k] + __popc(all & ((1u << lane) - 1));
                column[at] = (int)(j0 + lane);
                data[at] = M[k];
            }
            found[k] += __popc(all);
        }
    });
    UNROLLED (int k = 0; k < SIDE / STEP; k++)
        if (!column && lane == 0 && row_at(k) < V.m) *own[k] = found[k];
}

// out_i = sum_j P_ij, cost_i = sum_j P_ij M_ij
extern "C" __global__ void __launch_bounds__(256)
    plan_sums(const __grid_constant__ View V, double *out, double *cost_out) {
    Entries sum = {}, paid = {};
    each_tile(V, V.n, [&](int64_t, const Entries &x, const Entries &c, const Entries &M) {
        UNROLLED (int k = 0; k < SIDE / STEP; k++) {
            const double p = weighed(c[k], x[k]);
            sum[k] += p;
            paid[k] += p > 0 ? p * M[k] : 0;
        }
    });
    UNROLLED (int k = 0; k < SIDE / STEP; k++) {
        const double s = warp_sum(sum[k]), w = warp_sum(paid[k]);
        const int64_t i = row_at(k);
        if (threadIdx.x % 32 == 0 && i < V.m) out[blockIdx.y * V.m + i] = s, cost_out[blockIdx.y * V.m + i] = w;
    }
}

// out_i,x = sum_j P_ij X_jx for the COLUMNS columns of X from x0 on; X is n x d, out m x d
#define COLUMNS 4
extern "C" __global__ void __launch_bounds__(256)
    apply(const __grid_constant__ View V, const double *X, int64_t d, int64_t x0, double *out) {
    const int tx = threadIdx.x % 32;
    double sum[SIDE / STEP][COLUMNS] = {};
    each_tile(V, V.n, [&](int64_t j0, const Entries &x, const Entries &c, const Entries &) {
        const int64_t j = j0 + tx;
        Entries p;
        UNROLLED (int k = 0; k < SIDE / STEP; k++) p[k] = weighed(c[k], x[k]);
        UNROLLED (int q = 0; q < COLUMNS; q++) {
            const double y = j < V.n && x0 + q < d ? X[j * d + x0 + q] : 0;
            UNROLLED (int k = 0; k < SIDE / STEP; k++) sum[k][q] = fma(p[k], y, sum[k][q]);
        }
    });
    UNROLLED (int k = 0; k < SIDE / STEP; k++)
        UNROLLED (int q = 0; q < COLUMNS; q++) {
            const double s = warp_sum(sum[k][q]);
            const int64_t i = row_at(k);
            if (tx == 0 && i < V.m && x0 + q < d) out[(blockIdx.y * V.m + i) * d + x0 + q] = s;
        }
}

// Find the place where the cumulated masses of n places, in order, pass this share of the total. A warp searches: lane l
// gets the sum of the l-th of 32 runs of places, which all lanes add up; the run where the share is passed is split next.
template <typename F> FN int64_t passed(int64_t n, double share, F mass) {
    const int lane = threadIdx.x % 32;
    double left = 0; // the share of the total less the mass before `first`
    int64_t first = 0, count = n;
    for (bool begun = false; !begun || count > 1; begun = true) {
        const int64_t run = count > 32 ? (count + 31) / 32 : 1;
        double sum = run == 1 && lane < count ? mass(first + lane) : 0;
        for (int k = 0; run > 1 && k * run < count; k++) {
            const int64_t begin = first + k * run, rest = count - k * run, end = begin + (rest < run ? rest : run);
            double part = 0;
            for (int64_t j = begin + lane; j < end; j += 32) part += mass(j);
            part = warp_sum(part);
            if (lane == k) sum = part;
        }
        double end = sum;
        UNROLLED (int bit = 1; bit < 32; bit *= 2) {
            const double before = __shfl_sync(FULL, end, lane >= bit ? lane - bit : lane);
            end += lane >= bit ? before : 0;
        }
        if (!begun) left = share * __shfl_sync(FULL, end, 31);
        const int passed = (int)warp_max(sum > 0 && end > left ? 32 - lane : 0);
        const int chosen = passed ? 32 - passed : (int)warp_max(sum > 0 ? lane : 0);
        left = fmax(left - __shfl_sync(FULL, end - sum, chosen), 0);
        first += chosen * run;
        const int64_t rest = count - chosen * run;
        count = rest < run ? rest : run;
    }
    return first;
}

// Number k of a seed, in [0, 1)
FN double uniform(int64_t seed, int64_t k, int which) {
    return (double)(philox((uint64_t)seed, (uint64_t)k, (uint64_t)which) >> 11) * 0x1p-53;
}

// out_k: in row rows_k - i0, the column where the cumulated mass passes the share at_k; a warp for each k.
// masses: null, or the masses of all rows: then rows_k becomes the row where they pass the share row_at_k. Without
// at and row_at the shares are random numbers from the seed. kinds: NARROW_SHARES (row_at and at are float32) and
// NARROW_PAIRS (rows and out are int32).
enum { NARROW_SHARES = 1, NARROW_PAIRS = 2 };

FN double share_of(const double *shares, int64_t k, int64_t kinds) {
    return kinds & NARROW_SHARES ? (double)((const float *)shares)[k] : shares[k];
}

FN void put_place(int64_t *places, int64_t k, int64_t place, int64_t kinds) {
    if (kinds & NARROW_PAIRS) ((int *)places)[k] = (int)place;
    else places[k] = place;
}

extern "C" __global__ void __launch_bounds__(256)
    draw(const __grid_constant__ View V, const double *masses, const double *row_at, const double *at, int64_t seed,
         int64_t *rows, int64_t i0, int64_t count, int64_t *out, int64_t kinds) {
    const int64_t k = blockIdx.x * (int64_t)8 + threadIdx.x / 32;
    if (k >= count) return;
    int64_t i = masses ? 0 : rows[k] - i0;
    const double row_share = row_at ? share_of(row_at, k, kinds) : uniform(seed, k, 0);
    if (masses) i = passed(V.m, row_share, [&](int64_t q) { return masses[q]; });
    const int64_t found = passed(V.n, at ? share_of(at, k, kinds) : uniform(seed, k, 1), [&](int64_t j) {
        double share = V.c ? (double)V.c[i * V.c_row + j * V.c_col] : 1;
#if MASKED
        share *= mask_weight(&V.mask, i, j);
#endif
        return weighed(share, V.alpha[i] + V.beta[j] - (double)V.M[i * V.M_row + j * V.M_col] * V.inv_reg);
    });
    if (threadIdx.x % 32 > 0) return;
    if (masses) put_place(rows, k, i, kinds);
    put_place(out, k, found, kinds);
}

// out, 5 numbers a block: min and max over finite entries, number of NaN or -inf, number of +inf, and how many entries
// of the tiles on the diagonal differ from the entries across it: a few do in almost every M that is not symmetric
extern "C" __global__ void __launch_bounds__(256) extrema(const __grid_constant__ View V, double *out) {
    __shared__ Tile<cost> tile;
    __shared__ double part[8][5];
    const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
    const int64_t i0 = (int64_t)blockIdx.x * SIDE;
    const Span span = span_of(V.n);
    const Way<cost> way(V.M, V.M_row, V.M_col, i0);
    cost ahead[SIDE / STEP];
    way.request(V, span.begin, 0, ahead);
    cost least = INF, most = -INF; // in the type of M: one float64 comparison costs as much as many float32 ones
    int bad = 0, infinite = 0, lopsided = 0;
    for (int64_t j0 = span.begin; j0 < span.end; j0 += SIDE) {
        cost M[SIDE / STEP];
        way.take(ahead, tile, M);
        way.request(V, j0 + SIDE, 0, ahead);
        for (int k = 0; i0 == j0 && V.m == V.n && k < SIDE / STEP; k++) {
            const int64_t i = i0 + ty + STEP * k, j = j0 + tx;
            lopsided += i < V.m && j < V.n && M[k] != V.M[j * V.M_row + i * V.M_col];
        }
        bool plain = i0 + SIDE <= V.m && j0 + SIDE <= V.n;
        UNROLLED (int k = 0; k < SIDE / STEP; k++) plain = plain && isfinite(M[k]);
        UNROLLED (int k = 0; k < SIDE / STEP; k++) {
            if (!plain && (i0 + ty + STEP * k >= V.m || j0 + tx >= V.n)) continue;
            if (plain || isfinite(M[k])) least = fmin(least, M[k]), most = fmax(most, M[k]);
            else if (M[k] == (cost)INF) infinite++;
            else bad++;
        }
    }
    double low = -warp_max(-(double)least), high = warp_max((double)most);
    double nans = warp_sum(bad), infs = warp_sum(infinite), unlike = warp_sum(lopsided);
    if (tx == 0) part[ty][0] = low, part[ty][1] = high, part[ty][2] = nans, part[ty][3] = infs, part[ty][4] = unlike;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < 8; w++) {
        low = fmin(low, part[w][0]);
        high = fmax(high, part[w][1]);
        nans += part[w][2];
        infs += part[w][3];
        unlike += part[w][4];
    }
    double *at = out + 5 * (blockIdx.y * (int64_t)gridDim.x + blockIdx.x);
    at[0] = low;
    at[1] = high;
    at[2] = nans;
    at[3] = infs;
    at[4] = unlike;
}
