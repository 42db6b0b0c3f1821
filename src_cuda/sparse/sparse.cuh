// Mirrors src_c/sparse.h: rows with stored pairs only, here as CSR and, transposed, once more as CSC.
//
// Every sum runs along a row of one or the other, by a few threads in a fixed order, so that a pass gives the
// same bits each time. Scatter-adds to the columns need no second index, but vary (bench/NOTES.md has both).
// A row has `lanes` threads, by the mean length of all rows; a much longer row is listed and gets a block. In a pass a
// warp has up to 32 rows at once, with the sum of each in one lane when u = prox(s) is found. Entries in STORE,
// SHORT_INDEX 1 if 16 bits hold every row's and column's number, sums in float64. SPARSE 1: the halves of a pass of
// iterate.cu and portable.cu are those here; between launches of portable.cu the image is translated part by part, too,
// as translate_parts of src_c/finish.c does.
#include "common.cuh"

#pragma option RUN_THREADS 256 // of a block
#if PERSISTENT && (STORE == 0 || (OWN_DIFFERENCES > 10 && __CUDA_ARCH__ >= 1000))
#define AHEAD 4 // eight float64 ones spill; on sm_100, beside 20 differences of a column, any do: 1028 bytes, four 536
#else
#define AHEAD 8 // entries of a row that a thread loads at once; the sums have the same bits for any number
#endif
#define RESIDENT 4 // blocks a multiprocessor: without this bound the compiler saves registers, and loads wait in turn

#pragma option SHORT_INDEX 0
#if SHORT_INDEX
typedef unsigned short place;
#else
typedef int place;
#endif

// The rows that one launch processes, and the places of their entries.
struct Runs {
    int64_t count, lanes; // rows; threads of each, a power of 2 up to 32, or RUN_THREADS
    int64_t most;         // entries of a row, at most, if there is no list
    const int64_t *start; // first entry of each row, counted in the whole matrix
    const int64_t *list;  // the rows to do, or null: all
    const place *index;   // of every entry: the index into x
};

// One row for a thread; row -1: none, and no entries
struct Run {
    int64_t row, first, end;
    int lane;
};

// Call use(run) for all rows of this block, by all its threads, also those without a row
template <typename Use> FN void each_run(const Runs &runs, Use use) {
    const int lanes = (int)runs.lanes, each = RUN_THREADS / lanes;
    for (int64_t slot = (int64_t)blockIdx.x * each; slot < runs.count; slot += (int64_t)gridDim.x * each) {
        const int64_t at = slot + threadIdx.x / lanes;
        Run run = {-1, 0, 0, (int)threadIdx.x % lanes};
        if (at < runs.count) {
            run.row = runs.list ? runs.list[at] : at;
            run.first = runs.start[run.row];
            run.end = runs.start[run.row + 1];
            if (!runs.list && run.end - run.first > runs.most) run.row = -1, run.end = run.first;
        }
        use(run);
    }
}

struct Plus {
    FN static double of(double x, double y) { return x + y; }
};

struct Larger {
    FN static double of(double x, double y) { return fmax(x, y); }
};

// Reduce x over the threads of a row; each thread gets the result. part: RUN_THREADS / 32 numbers of the block.
template <typename Join> FN double joined_run(const Runs &runs, double x, double *part) {
    const int lanes = (int)runs.lanes;
    for (int bit = (lanes < 32 ? lanes : 32) / 2; bit > 0; bit /= 2) x = Join::of(x, __shfl_xor_sync(FULL, x, bit));
    if (lanes <= 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = part[0];
    UNROLLED (int q = 1; q < RUN_THREADS / 32; q++) x = Join::of(x, part[q]);
    return x;
}

// AHEAD entries of a row that a thread has requested, and their indices
struct Ahead {
    int at[AHEAD];
    real own[AHEAD];
};

// Request the entries of a row from `first` on, `lanes` apart. Behind the end the last entry is read again: loads under
// a condition would wait for each other.
FN void ask_ahead(const Runs &runs, const real *K, int64_t row, uint32_t first, uint32_t count, Ahead &ahead) {
    const uint32_t lanes = (uint32_t)runs.lanes;
    const place *index = runs.index + row;
    const real *from = K + row;
    UNROLLED (int q = 0; q < AHEAD; q++) {
        const uint32_t p = first + q * lanes < count ? first + q * lanes : count - 1;
        ahead.at[q] = __ldg(index + p);
        ahead.own[q] = __ldg(from + p);
    }
}

// Request the numbers that they are multiplied by; met(j): x_j
template <typename Met> FN void ask_met(const Ahead &ahead, Met met, double (&y)[AHEAD]) {
    UNROLLED (int q = 0; q < AHEAD; q++) y[q] = met(ahead.at[q]);
}

FN double sum_ahead(const Ahead &ahead, const double (&y)[AHEAD], uint32_t first, uint32_t lanes, uint32_t count,
                    double sum) {
    UNROLLED (int q = 0; q < AHEAD; q++) sum = fma(first + q * lanes < count ? (double)ahead.own[q] : 0, y[q], sum);
    return sum;
}

// K_i . x; a thread requests AHEAD of its entries, and then their factors, before it waits for either.
template <typename Met>
FN double run_dot(const Runs &runs, int64_t first, uint32_t count, const real *K, Met met, double *part) {
    const uint32_t lanes = (uint32_t)runs.lanes;
    double sum = 0;
    for (uint32_t k = threadIdx.x % lanes; k < count; k += AHEAD * lanes) {
        Ahead ahead;
        double y[AHEAD];
        ask_ahead(runs, K, first, k, count, ahead);
        ask_met(ahead, met, y);
        sum = sum_ahead(ahead, y, k, lanes, count, sum);
    }
    return joined_run<Plus>(runs, sum, part);
}

#if SPARSE
// K_i . x of the rows that a warp has at once, `teams` of them a step: the sum of row k to lane k. PERSISTENT: data of
// the next step is loaded while this one is summed, which takes the registers of two.
template <typename Met>
FN double warp_dots(const Runs &runs, const real *K, int64_t begin, int count, int each, Met met) {
    const int lanes = (int)runs.lanes, teams = 32 / lanes, lane = threadIdx.x % 32;
    double whole = 0;
#if PERSISTENT
    int64_t row = __shfl_sync(FULL, begin, lane / lanes);
    uint32_t own = __shfl_sync(FULL, count, lane / lanes), k = lane % lanes;
    Ahead ahead;
    double sum = 0;
    if (k < own) ask_ahead(runs, K, row, k, own, ahead);
    for (int step = 0; step * teams < each;) {
        const Ahead now = ahead;
        const uint32_t first = k, length = own;
        const bool more = __any_sync(FULL, k + AHEAD * lanes < own);
        double y[AHEAD];
        if (first < length) ask_met(now, met, y);
        if (more) {
            k += AHEAD * lanes;
        } else {
            const int from = (step + 1) * teams + lane / lanes;
            row = __shfl_sync(FULL, begin, from);
            own = __shfl_sync(FULL, count, from);
            own = from < each ? own : 0;
            k = lane % lanes;
        }
        if (k < own) ask_ahead(runs, K, row, k, own, ahead);
        if (first < length) sum = sum_ahead(now, y, first, lanes, length, sum);
        if (more) continue;
        const double one = __shfl_sync(FULL, joined_run<Plus>(runs, sum, nullptr), lane % teams * lanes);
        whole = lane / teams == step ? one : whole;
        sum = 0;
        step++;
    }
#else
    for (int step = 0; step * teams < each; step++) {
        const int from = step * teams + lane / lanes;
        const int64_t at = __shfl_sync(FULL, begin, from);
        const uint32_t own = (uint32_t)__shfl_sync(FULL, count, from);
        const double one = __shfl_sync(FULL, run_dot(runs, at, own, K, met, nullptr), lane % teams * lanes);
        whole = lane / teams == step ? one : whole;
    }
#endif
    return whole;
}

// The sums of all short rows of a launch, several rows a warp at once, with a lane for the sum of each:
// use(row, prepare(row), sum) by all lanes of a warp together, with row -1 in lanes without a row.
template <typename Met, typename Prepare, typename Use>
FN void each_sum(const Runs &runs, const real *K, Met met, Prepare prepare, Use use) {
    if (runs.count == 0) // a rank may have no rows
        return;
    const uint32_t teams = 32 / (uint32_t)runs.lanes, lane = threadIdx.x % 32; // as int, 8 bytes spill on sm_80
    const uint32_t count = (uint32_t)runs.count, warps = gridDim.x * (RUN_THREADS / 32);
    const uint32_t own = (count + warps - 1) / warps, turns = (own + 31) / 32;
    const uint32_t each = ((own + turns - 1) / turns + teams - 1) / teams * teams; // at most 32
    uint32_t first = (blockIdx.x * (RUN_THREADS / 32) + threadIdx.x / 32) * each;
    for (; first < count; first += warps * each) {
        bool mine = lane < each && first + lane < count;
        const int row = (int)(mine ? first + lane : first);
        const int64_t begin = runs.start[row], end = runs.start[row + 1];
        const auto held = prepare(row); // loaded before its sum is known
        mine = mine && end - begin <= runs.most;
        const double sum = warp_dots(runs, K, begin, mine ? (int)(end - begin) : 0, each, met);
        use(mine ? row : -1, held, sum);
    }
}

// The stored pairs of one half of a pass, by rows or by columns
struct Half {
    Runs runs, long_runs; // rows summed by a few threads, and rows summed by a block
    const real *K;
};

struct Scratch {
    double part[RUN_THREADS / 32];
    RowSums row[RUN_THREADS / 32]; // of each warp
};

// Call use(row, prepare(row), sum) for each row of one half, by all lanes of a warp together; row -1: no row
template <typename Met, typename Prepare, typename Use>
FN void half_sums(const Half &half, Met met, double *part, Prepare prepare, Use use) {
    each_run(half.long_runs, [&](const Run &run) {
        const int64_t row = run.lane == 0 ? run.row : -1;
        const auto own = prepare(row < 0 ? 0 : row);
        use(row, own, run_dot(half.long_runs, run.first, (uint32_t)(run.end - run.first), half.K, met, part));
    });
    each_sum(half.runs, half.K, met, prepare, use);
}

// s = K v and u = prox(s); out: NEXT_B numbers, this block's part of the row scalars
template <typename Met>
FN void row_half(const State &S, const Half &half, double shift, Met met, Scratch &scratch, double *out) {
    const int lane = threadIdx.x % 32;
    RowSums &held = scratch.row[threadIdx.x / 32];
    if (lane < NEXT_B) held[lane] = 0;
    half_sums(
        half, met, scratch.part, [&](int64_t i) { return S.point[i]; },
        [&](int64_t i, const Point &own, double s) {
            double row[8] = {};
            if (i >= 0 && S.limits.symmetric) same_scale(S, (int)i, s, true, row);
            else if (i >= 0) row_scale(S, (int)i, own, s, shift, true, row);
            const double sum = warp_sums<8>(row, lane);
            if (lane % 4 == 0 && lane / 4 < NEXT_B) held[lane / 4] += sum;
        });
    __syncthreads();
    if (threadIdx.x >= NEXT_B) return;
    double sum = 0;
    UNROLLED (int q = 0; q < RUN_THREADS / 32; q++) sum += scratch.row[q][threadIdx.x];
    out[threadIdx.x] = sum;
}

// K^T u
template <typename Met> FN void column_half(const Half &half, Met met, Scratch &scratch, double *sums) {
    half_sums(
        half, met, scratch.part, [](int64_t) { return 0; },
        [&](int64_t j, int, double sum) {
            if (j >= 0) sums[j] = sum;
        });
}

// The mass and sum b e^(-k log v') of a piece of a part, by a warp, before the image of its columns is translated
FN void sum_piece(const State &S, int64_t piece, const double *total, double shift) {
    double mass = 0, weight = 0;
    for (int64_t k = S.apart.piece[piece] + threadIdx.x % 32; k < S.apart.piece[piece + 1]; k += 32) {
        const int64_t j = S.apart.order[k];
        const mapuot_column c = column_at(S, 0, j);
        if (!isfinite(c.absorbed)) continue;
        const double sum = total[j];
        const mapuot_column_out found = column_values((int)MAPUOT_KL, &c, sum, log(sum), shift, 0, S.limits.reg);
        mass += found.marginal;
        weight += found.next;
    }
    mass = warp_sum(mass);
    weight = warp_sum(weight);
    if (threadIdx.x % 32 == 0) S.apart.sums[2 * piece] = mass, S.apart.sums[2 * piece + 1] = weight;
}

// The translation of a part's image, by a warp
FN void move_part(const State &S, int64_t k) {
    double mass = 0, weight = 0;
    for (int64_t piece = S.apart.first[k] + threadIdx.x % 32; piece < S.apart.first[k + 1]; piece += 32)
        mass += S.apart.sums[2 * piece], weight += S.apart.sums[2 * piece + 1];
    mass = warp_sum(mass);
    weight = warp_sum(weight);
    if (threadIdx.x % 32 == 0) S.apart.move[k] = next_translation(&S.limits, log_ratio_of(weight, mass));
}

#if !PERSISTENT
// scalars: NEXT_B row scalars of each block
extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    sparse_rows(const __grid_constant__ State S, int parity, const __grid_constant__ Half half, double *scalars) {
    __shared__ Scratch scratch;
    const auto met = [&](int j) { return __ldg(S.v_scale + j); };
    if (!stopped(S, parity)) row_half(S, half, S.progress[parity].shift, met, scratch, scalars + blockIdx.x * NEXT_B);
}

// Compute K^T u. Append the row scalars, summed over the `blocks` blocks of sparse_rows.
extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    sparse_columns(const __grid_constant__ State S, int parity, const __grid_constant__ Half half,
                   const double *scalars, int blocks) {
    __shared__ Scratch scratch;
    if (stopped(S, parity)) return;
    column_half(half, [&](int i) { return __ldg(S.u_scale + i); }, scratch, S.total);
    if (blockIdx.x > 0) return;
    const Runs whole = {1, RUN_THREADS, 0, nullptr, nullptr, nullptr};
    for (int q = 0; q < NEXT_B; q++) {
        double sum = 0;
        for (int k = threadIdx.x; k < blocks; k += RUN_THREADS) sum += scalars[k * NEXT_B + q];
        sum = joined_run<Plus>(whole, sum, scratch.part);
        if (threadIdx.x == 0) S.total[S.ld + q] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    part_sums(const __grid_constant__ State S, int parity) {
    const int64_t piece = ((int64_t)blockIdx.x * RUN_THREADS + threadIdx.x) / 32;
    if (!stopped(S, parity) && piece < S.apart.pieces) sum_piece(S, piece, S.total, S.progress[parity].shift);
}

extern "C" __global__ void __launch_bounds__(RUN_THREADS, RESIDENT)
    part_moves(const __grid_constant__ State S, int parity) {
    const int64_t k = ((int64_t)blockIdx.x * RUN_THREADS + threadIdx.x) / 32;
    if (!stopped(S, parity) && k < S.apart.count) move_part(S, k);
}
#endif
#endif
