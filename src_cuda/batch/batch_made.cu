// Mirrors src_c/batch.c for problems that are too large for registers, each with its own costs. All passes of one run
// in one block. The largest problems come first.
//
//     s_i = sum_j K_ij v_j,  u = prox(s),  K^T u,     K_ij = 2^(alpha_i + beta_j - c_ij)  in float32, e^(..)  in float64
//
// K is computed twice in every pass and stored nowhere (with one potential once): from points in
// shared memory, or from the costs M. Float32 passes come first. Float64 passes go on from their potentials and
// differences, and certify. K is rebuilt around other potentials if the scalings leave its range, so that every reg
// works. A warp sums some rows at once, with its lanes over the columns. Then each lane has some columns and sums over
// rows. Options: DIM (coordinates of a point, 0: costs M), METRIC (a mapuot_metric), FORM (a mapuot_narrow_form) and
// those in batch.cuh; NARROW and STORE 0.
#define THREADS 256
#define HOLDERS 8
#include "batch_finish.cuh"
#include "common/metric.h"

#define STRETCH 32        // terms of a column summed before they are added in float64
#define MOST_PARTS 8      // most parts of the rows, a warp each
#define LEAST_PART 1024   // room for the sums of all parts: 8 of 128 columns
#define FIELDS (DIM + 2)  // numbers of a point: its coordinates, the potential in K, its scale
#define NARROW_SCALE 1e12 // with a larger scale K is rebuilt
#define NARROW_DEAD 1e-30 // with a smaller float32 sum no mass is in reach

extern __shared__ __align__(128) unsigned char memory[];

struct Shared {
    Batch S; // the record of this problem alone: its sizes, its places in all tables
    Work work;
    int64_t width; // columns of a row of M
    double top;    // M - M_narrow: the constant that float32 passes leave out
};

// The layout of the dynamic shared memory; twin: made_bytes of mapuot/backends/cuda/batch.py
struct Room {
    double *v, *row, *part; // v: n; row: K v, m; part: K^T u of each part of the rows, parts x n
    unsigned char *points;  // m x FIELDS of the rows, FIELDS x n of the columns, in float32 or in float64
};

template <typename T> FN constexpr bool is_narrow() { return sizeof(T) == 4; }

// Rows of a warp at a time, and columns of a lane: more of them took a third longer in float64
template <typename T> FN constexpr int rows_at_once() { return is_narrow<T>() ? 8 : 4; }
template <typename T> FN constexpr int columns_at_once() { return is_narrow<T>() ? 4 : 2; }

// Number of parts of the rows that warps share if there are few columns
template <typename T> FN int parts_of(int n) {
    const int units = (n + 32 * columns_at_once<T>() - 1) / (32 * columns_at_once<T>());
    return units >= MOST_PARTS ? 1 : MOST_PARTS / units;
}

FN Room room_of(const Batch &S) {
    Room at;
    at.v = (double *)memory;
    at.row = at.v + S.n;
    at.part = at.row + S.m;
    at.points = (unsigned char *)(at.part + (S.n < LEAST_PART ? LEAST_PART : S.n));
    return at;
}

template <typename T> FN T *rows_in(const Room &at) { return (T *)at.points; }
template <typename T> FN T *columns_in(const Room &at, const Batch &S) { return (T *)at.points + FIELDS * S.m; }

// The record of one problem: behind the end of a smaller cloud no table is read or written.
FN void open_own(const Batch &S, Shared &all) {
    if (threadIdx.x > 0) return;
    const int64_t problem = S.order ? S.order[blockIdx.x] : blockIdx.x;
    Batch &own = all.S;
    own = S;
    all.width = S.n;
    if (S.factors) own.scale *= S.factors[problem];
    if (S.places) { // first row, rows, first column, columns
        const int64_t *at = S.places + 4 * problem;
        own.m = at[1];
        own.n = at[3];
        own.points_x += at[0] * S.dim;
        own.points_y += at[2] * S.dim;
        if (own.limits.missed > 1)
            own.limits.missed *= fmin((double)own.m, (double)own.n) / fmin((double)S.m, (double)S.n);
    }
    own.M += problem * S.M_problem;
    own.M_narrow += problem * S.m * S.n;
    own.A += problem * S.m;
    own.B += problem * S.n;
    own.x += problem * S.n;
    own.log_u += problem * S.m;
    own.r += problem * S.m;
    own.row_absorbed += problem * S.m;
    own.log_v += problem * S.n;
    own.s += problem * S.n;
    own.report += problem;
    own.columns += problem * COLUMN_KINDS * S.n;
    own.count += (int64_t)own.report->passes; // S.count further passes
}

// Do these passes certify nothing, since they only give a start?
FN bool is_coarse(const Batch &S) { return S.coarse > 0; }

// The factor of the coordinates (float32) or of the costs; float32 exponents are binary.
template <typename T> FN double unit_of(const Batch &S) {
    const double unit = S.scale * S.limits.inv_reg * (is_narrow<T>() ? LOG2E : 1);
    return DIM > 0 && is_narrow<T>() && FORM == MAPUOT_SQUARES ? sqrt(unit) : unit;
}

// known - M_ij / reg, up to the constant that float32 passes keep in alpha; x, y: the coordinates of both points
template <typename T>
FN T exponent(T known, const T *x, const T *y, T unit, const Batch &S, int64_t i, int64_t j, int64_t width) {
    if constexpr (DIM > 0 && is_narrow<T>()) {
        T sum = FORM == MAPUOT_SQUARES ? known : 0;
        UNROLLED (int k = 0; k < DIM; k++) {
            const T t = x[k] - y[k];
            sum = FORM == MAPUOT_SQUARES ? fmaf(-t, t, sum) : FORM == MAPUOT_SIZES ? sum + fabsf(t) : fmaf(t, t, sum);
        }
        return FORM == MAPUOT_SQUARES ? sum : known - (FORM == MAPUOT_ROOTS ? root_of(sum) : sum);
    } else if constexpr (DIM > 0) {
        T sum = 0;
        UNROLLED (int k = 0; k < DIM; k++) sum = metric_sum(METRIC, sum, x[k], y[k]);
        return known - metric_of(METRIC, sum) * unit;
    } else if constexpr (is_narrow<T>()) {
        return fmaf(-S.M_narrow[i * width + j], unit, known);
    } else {
        return known - (known > -INF ? (double)S.M[i * S.M_row + j * S.M_col] : 0) * unit;
    }
}

FN float power(float t) { return power_of(t); }
FN double power(double t) { return exp(t); }

// The start of a sum, and the sum with one more term; TOPS: the largest exponent instead of the sum
#define NOTHING (TOPS ? (T) - INF : 0)
template <bool TOPS, typename T> FN T added(T sum, T t, T weight) {
    if constexpr (TOPS) return sum > t ? sum : t;
    else return is_narrow<T>() ? fmaf(power(t), weight, sum) : fma(power(t), weight, sum);
}

// K v of every row
template <typename T, bool TOPS = false> FN void row_sums(const Shared &all, const Room &at) {
    const Batch &S = all.S;
    constexpr int RT = rows_at_once<T>();
    const int m = (int)S.m, n = (int)S.n, lane = threadIdx.x % 32;
    const T *rows = rows_in<T>(at), *columns = columns_in<T>(at, S), unit = (T)unit_of<T>(S);
    ROLLED (int i0 = threadIdx.x / 32 * RT; i0 < m; i0 += WARPS * RT) {
        T sum[RT];
        const T *own[RT];
        UNROLLED (int r = 0; r < RT; r++) own[r] = rows + FIELDS * (i0 + r < m ? i0 + r : m - 1), sum[r] = NOTHING;
        ROLLED (int j = lane; j < n; j += 32) {
            T y[DIM + 1];
            UNROLLED (int k = 0; k <= DIM; k++) y[k] = columns[k * n + j];
            const T v = columns[(DIM + 1) * n + j];
            UNROLLED (int r = 0; r < RT; r++) {
                const int i = i0 + r < m ? i0 + r : m - 1;
                sum[r] = added<TOPS>(sum[r], exponent(own[r][DIM] + y[DIM], own[r], y, unit, S, i, j, all.width), v);
            }
        }
        if constexpr (TOPS) {
            UNROLLED (int r = 0; r < RT; r++) {
                const double top = warp_max((double)sum[r]);
                if (lane == 0 && i0 + r < m) at.row[i0 + r] = top;
            }
        } else {
            const T total = warp_sums<RT>(sum, lane);
            if (lane % (32 / RT) == 0 && i0 + lane / (32 / RT) < m) at.row[i0 + lane / (32 / RT)] = total;
        }
    }
}

// The parts of K^T u of every column
template <typename T, bool TOPS = false> FN void column_sums(const Shared &all, const Room &at) {
    const Batch &S = all.S;
    constexpr int SIDE = columns_at_once<T>();
    const int m = (int)S.m, n = (int)S.n, lane = threadIdx.x % 32, parts = parts_of<T>(n);
    const int chunks = (n + 32 * SIDE - 1) / (32 * SIDE);
    const T *rows = rows_in<T>(at), *columns = columns_in<T>(at, S), unit = (T)unit_of<T>(S);
    ROLLED (int q = threadIdx.x / 32; q < chunks * parts; q += WARPS) {
        const int part = q / chunks, first = m * part / parts, last = m * (part + 1) / parts;
        T y[SIDE][DIM + 1];
        int to[SIDE];
        double sum[SIDE];
        UNROLLED (int e = 0; e < SIDE; e++) {
            const int j = (q % chunks * SIDE + e) * 32 + lane;
            to[e] = j < n ? j : n - 1;
            sum[e] = NOTHING;
            UNROLLED (int k = 0; k <= DIM; k++) y[e][k] = columns[k * n + to[e]];
        }
        ROLLED (int i0 = first; i0 < last; i0 += STRETCH) {
            T here[SIDE];
            UNROLLED (int e = 0; e < SIDE; e++) here[e] = NOTHING;
#pragma unroll 2
            for (int i = i0; i < i0 + STRETCH && i < last; i++) {
                const T *x = rows + FIELDS * i;
                UNROLLED (int e = 0; e < SIDE; e++)
                    here[e] = added<TOPS>(here[e], exponent(x[DIM] + y[e][DIM], x, y[e], unit, S, i, to[e], all.width),
                                          x[DIM + 1]);
            }
            UNROLLED (int e = 0; e < SIDE; e++)
                sum[e] = TOPS ? fmax(sum[e], (double)here[e]) : sum[e] + (double)here[e];
        }
        UNROLLED (int e = 0; e < SIDE; e++)
            if ((q % chunks * SIDE + e) * 32 + lane < n) at.part[part * n + to[e]] = sum[e];
    }
}

// Coordinates for passes in T; in float32 relative to the first column, in units of reg.
template <typename T> FN void place_points(const Shared &all, const Room &at) {
    const Batch &S = all.S;
    const double unit = is_narrow<T>() ? unit_of<T>(S) : 1;
    T *rows = rows_in<T>(at), *columns = columns_in<T>(at, S);
    ROLLED (int q = threadIdx.x; q < DIM * (int)S.m; q += THREADS) {
        const int i = q / (DIM + !DIM), k = q % (DIM + !DIM);
        rows[FIELDS * i + k] = (T)((S.points_x[q] - (is_narrow<T>() ? S.points_y[k] : 0)) * unit);
    }
    ROLLED (int q = threadIdx.x; q < DIM * (int)S.n; q += THREADS) {
        const int j = q / (DIM + !DIM), k = q % (DIM + !DIM);
        columns[k * S.n + j] = (T)((S.points_y[q] - (is_narrow<T>() ? S.points_y[k] : 0)) * unit);
    }
}

FN double log_weight(const Batch &S, double w) { return S.product && w > 0 ? log(w) : 0; }

// Conversion of exponents from nats to T and back; `top` is the part of M, in units of reg, that float32 costs lack.
template <typename T> FN T bits_of(double x, double top) { return is_narrow<T>() ? (T)((x - top) * LOG2E) : (T)x; }

template <typename T> FN double nats_of(T x, double top) { return is_narrow<T>() ? LN2 * (double)x + top : (double)x; }

// Copy the potentials in K to the tables that passes in T read
template <typename T> FN void place_potentials(const Shared &all, const Room &at, const double *col, int ld) {
    const Batch &S = all.S;
    T *rows = rows_in<T>(at), *columns = columns_in<T>(at, S);
    ROLLED (int i = threadIdx.x; i < (int)S.m; i += THREADS) {
        const double a = S.A[i];
        rows[FIELDS * i + DIM] = a > 0 ? bits_of<T>(S.row_absorbed[i] + log_weight(S, a), all.top) : (T)-INF;
    }
    ROLLED (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        const double b = col[WEIGHT * ld + j];
        columns[DIM * S.n + j] = b > 0 ? bits_of<T>(col[ABSORBED * ld + j] + log_weight(S, b), 0) : (T)-INF;
    }
}

// Build K around log v of the pass, at most 1 and with an entry 1 in every row and column in use, like balance of
// batch_build.cuh does, or around zeros (plain); then v. The potentials in K are rounded to T.
template <typename T> FN void build_kernel(Shared &all, const Room &at, double *col, int ld, bool plain) {
    const Batch &S = all.S;
    const int m = (int)S.m, n = (int)S.n;
    T *rows = rows_in<T>(at), *columns = columns_in<T>(at, S);
    __syncthreads();
    for (int i = threadIdx.x; i < m; i += THREADS) rows[FIELDS * i + DIM] = plain ? bits_of<T>(S.low, all.top) : 0;
    for (int j = threadIdx.x; j < n; j += THREADS) {
        const double b = col[WEIGHT * ld + j], x = plain ? 0 : col[X * ld + j] + log_weight(S, b);
        columns[DIM * n + j] = b > 0 ? bits_of<T>(x, 0) : (T)-INF;
    }
    __syncthreads();
    if (!plain) {
        row_sums<T, true>(all, at);
        __syncthreads();
        for (int i = threadIdx.x; i < m; i += THREADS) rows[FIELDS * i + DIM] = S.A[i] > 0 ? (T)-at.row[i] : (T)-INF;
        for (int j = threadIdx.x; j < n; j += THREADS) columns[DIM * n + j] = 0;
        __syncthreads();
        column_sums<T, true>(all, at);
        __syncthreads();
        for (int j = threadIdx.x; j < n; j += THREADS) {
            double top = -INF;
            for (int q = 0; q < parts_of<T>(n); q++) top = fmax(top, at.part[q * n + j]);
            columns[DIM * n + j] = col[WEIGHT * ld + j] > 0 ? (T)-top : (T)-INF;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; ONE_POTENTIAL && i < m; i += THREADS) { // one potential: absorb the mean of both
        const double mean = 0.5 * (nats_of(rows[FIELDS * i + DIM], all.top) + nats_of(columns[DIM * n + i], 0));
        S.row_absorbed[i] = S.A[i] > 0 ? nats_of(bits_of<T>(mean, 0), 0) - log_weight(S, S.A[i]) : 0;
        col[ABSORBED * ld + i] = S.row_absorbed[i];
    }
    for (int i = threadIdx.x; !ONE_POTENTIAL && i < m; i += THREADS) {
        const double a = S.A[i];
        S.row_absorbed[i] = a > 0 ? nats_of(rows[FIELDS * i + DIM], all.top) - log_weight(S, a) : 0;
    }
    for (int j = threadIdx.x; !ONE_POTENTIAL && j < n; j += THREADS) {
        const double b = col[WEIGHT * ld + j];
        col[ABSORBED * ld + j] = b > 0 ? nats_of(columns[DIM * n + j], 0) - log_weight(S, b) : 0;
    }
    __syncthreads();
    place_potentials<T>(all, at, col, ld);
    start_columns(S, all.work, col, ld, at.v);
}

// s = K v, u = prox(s), the parts of K^T u and of the row scalar. Returns true if K is outgrown.
template <typename T> FN bool row_half(Shared &all, const Room &at, const double *col, int ld) {
    const Batch &S = all.S;
    const double shift = all.work.standing[0].shift;
    T *rows = rows_in<T>(at), *columns = columns_in<T>(at, S);
    for (int j = threadIdx.x; j < (int)S.n; j += THREADS) columns[(DIM + 1) * S.n + j] = (T)at.v[j];
    __syncthreads();
    row_sums<T>(all, at);
    __syncthreads();
    double part = 0;
    bool odd = false;
    ROLLED (int i = threadIdx.x; i < (int)S.m; i += THREADS) {
        const double a = S.A[i], d = S.row_absorbed[i], s = at.row[i], log_a = a > 0 ? log(a) : 0;
        const double log_v = ONE_POTENTIAL && a > 0 ? col[X * ld + i] - col[ABSORBED * ld + i] : 0;
        double log_u = -INF;
        const double u = row_scale(S, a, log_a, d, s, shift, log_v, log_u, odd);
        odd |= is_narrow<T>() && a > 0 && !(s > NARROW_DEAD);
        rows[FIELDS * i + DIM + 1] = (T)u;
        S.log_u[i] = log_u + d;
        S.r[i] = u * s;
        part += S.k1 > 0 || ONE_POTENTIAL ? u * s : a > 0 ? a * (log_u + d) : 0;
    }
    part = warp_sum(part);
    if (threadIdx.x % 32 == 0) all.work.row[threadIdx.x / 32] = part;
    odd = __syncthreads_or(odd);
    if (!ONE_POTENTIAL) column_sums<T>(all, at);
    __syncthreads();
    return odd;
}

// The column half of a pass. Returns true if K is to be rebuilt around other potentials.
template <typename T> FN bool column_half(Shared &all, const Room &at, double *col, int ld, Move &move, bool odd) {
    const Batch &S = all.S;
    const int parts = parts_of<T>((int)S.n);
    const double dead = is_narrow<T>() ? NARROW_DEAD : 0;
    const bool has_columns = (int)threadIdx.x / 32 < column_warps((int)S.n);
    move = find_move(S, all.work);
    bool lost = false, far = false;
    if (has_columns)
        lost = first_sweep(S, all.work, col, ld, at.v, move, [&](int j) {
            if (ONE_POTENTIAL) return at.row[j];
            double sum = 0;
            for (int q = 0; q < parts; q++) sum += at.part[q * S.n + j];
            return sum > dead ? sum : 0;
        });
    const int depth = held(all.work);
    odd |= __syncthreads_or(lost) != 0;
    if (depth > 0) {
        find_products(S, all.work, col, ld, depth);
        __syncthreads();
    }
    if (has_columns) far = finish_columns(S, all.work, col, ld, at.v, move, odd);
    return __syncthreads_or(far);
}

// Passes in T until the problem has ended or float32 passes have done their work. The very last pass is in float64.
// Returns true if the next pass needs another K.
template <typename T> FN bool make_passes(Shared &all, const Room &at, double *col, int ld, bool rebuild, Move &move) {
    Batch &S = all.S;
    Work &W = all.work;
    bool plain = rebuild && S.safe > 0, far = false;
    if (threadIdx.x == 0) S.limits.scale_limit = is_narrow<T>() ? NARROW_SCALE : 1e100;
    place_points<T>(all, at);
    if (!rebuild) place_potentials<T>(all, at, col, ld);
    __syncthreads();
    ROLLED (;;) {
        if (rebuild || far) build_kernel<T>(all, at, col, ld, plain);
        rebuild = plain = false;
        const bool odd = row_half<T>(all, at, col, ld);
        far = column_half<T>(all, at, col, ld, move, odd);
        const bool still = W.report.status == MAPUOT_RUNNING;
        if (is_narrow<T>() ? !still || W.standing[0].narrow == 0 || W.report.passes + 1 >= S.count
                           : !still || (W.report.passes >= S.count && !odd))
            return far;
    }
}

// Write the iterate of the last pass for the caller.
FN void close_problem(const Shared &all, const double *col, int ld, const Move &move) {
    const Batch &S = all.S;
    const double shift = all.work.standing[0].shift;
    const bool coarse = is_coarse(S);
    if (threadIdx.x == 0) {
        *S.report = all.work.report;
        if (coarse) S.report->status = MAPUOT_RUNNING;
    }
    for (int i = threadIdx.x; i < (int)S.m; i += THREADS) {
        S.log_u[i] += shift + move.off;
        S.r[i] *= move.kappa;
    }
    for (int j = threadIdx.x; j < (int)S.n; j += THREADS) {
        const bool used = col[WEIGHT * ld + j] > 0;
        const double log_v = used ? col[NEW_G * ld + j] - col[NEW_F * ld + j] - shift : -INF;
        S.log_v[j] = log_v;
        if (coarse) S.x[j] = isfinite(log_v) ? log_v * S.ratio : 0;
        S.s[j] = used ? col[MARGINAL * ld + j] : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) batch_made(const __grid_constant__ Batch S) {
    __shared__ Shared all;
    open_own(S, all);
    __syncthreads();
    const int64_t made = (int64_t)all.S.report->passes;
    if (all.S.report->status != MAPUOT_RUNNING || made >= all.S.count) return;
    const Room at = room_of(all.S);
    const int ld = (int)all.S.n;
    double *col = S.columns ? all.S.columns : (double *)(at.points + sizeof(double) * FIELDS * (all.S.m + all.S.n));
    Move move;
    const bool narrow = S.narrow > 0 && (made + 1 < all.S.count || is_coarse(S));
    bool again = true;
    if (threadIdx.x == 0) {
        all.work.report = *all.S.report;
        all.top = 0;
    }
    open_columns(all.S, all.work, 0, col, ld);
    if (narrow) {
        if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < HOLDERS) all.work.standing[threadIdx.x / 32].narrow = 1;
        if (threadIdx.x == 0) all.top = DIM > 0 ? 0 : S.low;
        __syncthreads();
        again = make_passes<float>(all, at, col, ld, true, move);
        if (all.work.report.status == MAPUOT_NOT_FINITE || all.work.report.status == MAPUOT_UNDERFLOW) {
            if (threadIdx.x == 0) all.S.report->passes = all.work.report.passes;
            __syncthreads();
            open_columns(all.S, all.work, 0, col, ld); // float32 passes failed: continue in float64
            again = true;
        }
    }
    if (!(narrow && is_coarse(S))) {
        __syncthreads();
        if (threadIdx.x == 0) {
            all.work.report.status = MAPUOT_RUNNING;
            all.top = 0;
        }
        if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < HOLDERS) widen_passes(&all.work.standing[threadIdx.x / 32]);
        __syncthreads();
        make_passes<double>(all, at, col, ld, again, move);
    }
    __syncthreads();
    close_problem(all, col, ld, move);
}
