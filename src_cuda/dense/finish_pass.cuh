// Mirrors src_c/finish_tmpl.c and the scalar work of src_c/finish.c: the O(n) half of a pass, one thread a column.
//
// With k = reg / rho and x = log v + shift, all on logarithms; all blocks meet before 1 and 2:
//   1 marginal    lam from A = mass and B = sum b e^(-k log v);  s = v K^T u, q = b e^(-k log v)
//     prox        gap = rho q h(log s/q), G(x) = fi log(b / K^T u) + shift;  all sums at once:
//                 F = G - x + c with c = fi mu not yet known, so that <F, .> = <G - x, .> + c <1, .>
// 2 difference  every block: mu, dual value, guard, status, Anderson's weights gamma
//     advance     x = G - sum gamma dG, put back into the domain of the dual, v = e^(x - e), B of the new x
// Sources: Sejourne, Vialard, Peyre 2022 (translation); Walker, Ni 2011 (Anderson, type II).
#include "finish_column.cuh"

// Sum of the scalars of `count` blocks, in a fixed order; rows: the row scalars if they are not among them.
FN void join_scalars(Finish &F, const double *scalars, int count, const double *rows) {
    const int q = threadIdx.x % 8, lane = threadIdx.x % 32;
    if (threadIdx.x < JOINERS) {
        double sum = 0;
        const int first = threadIdx.x / 8;
        const double *at = scalars + SCALARS * first + (q < SCALARS ? q : 0);
        ROLLED (int k = first; k < count; k += 9 * JOINERS / 8, at += SCALARS * 9 * JOINERS / 8)
            UNROLLED (int i = 0; i < 9; i++)
                sum += k + i * JOINERS / 8 < count ? __ldcg(at + i * SCALARS * JOINERS / 8) : 0;
        if (rows && q < NEXT_B) sum = threadIdx.x < 8 ? __ldcg(rows + q) : 0;
        sum += __shfl_xor_sync(FULL, sum, 8);
        sum += __shfl_xor_sync(FULL, sum, 16);
        if (lane < SCALARS) F.join[threadIdx.x / 32][lane] = sum;
    }
    __syncthreads();
    if (threadIdx.x < SCALARS)
        F.row[threadIdx.x] =
            (F.join[0][threadIdx.x] + F.join[1][threadIdx.x]) + (F.join[2][threadIdx.x] + F.join[3][threadIdx.x]);
}

// Two sums, or two maxima (never NaN)
FN double joined(int q, double x, double y) { return q == MAX_F || q == MAX_MINUS ? (x > y ? x : y) : x + y; }

// Join one value over a team, for each of its threads
FN double joined_team(int q, double x) {
    UNROLLED (int bit = TEAM / 2; bit > 0; bit /= 2) x = joined(q, x, __shfl_xor_sync(FULL, x, bit));
    return x;
}

// A team sums one value over the block's columns, and the block's part of a cluster's mean of F. 512 threads.
FN double strip_values(const State &S, Finish &F, const Column &c, const double (&value)[SUM_DOT], double total,
                       double &mean) {
    const int q = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
    for (int first = 0; first < column_threads(S); first += STRIP) {
        const int at = (int)threadIdx.x % LINE - first, held = partner() * OWN_DIFFERENCES;
        const bool in = at >= 0 && at < STRIP;
        __syncthreads();
        if (in && partner() == 0)
            UNROLLED (int i = 0; i < SUM_DOT; i++) F.value[i * STRIP + at] = value[i];
        if (COARSE && in && partner() == 0) {
            F.value[USED * STRIP + at] = c.share * c.f;
            F.label[at] = c.label;
        }
        if (PARTNERS > 1) __syncthreads();
        if (in)
            UNROLLED (int i = 0; i < OWN_DIFFERENCES; i++) {
                F.value[(SUM_DOT + held + i) * STRIP + at] = c.d[i] * F.value[SUM_P * STRIP + at];
                F.value[(SUM_RHS + held + i) * STRIP + at] = c.d[i] * F.value[SUM_F * STRIP + at];
            }
        __syncthreads();
        if (q < USED)
            UNROLLED (int i = 0; i < STRIP; i += TEAM) total = joined(q, total, F.value[q * STRIP + i + lane]);
        if (COARSE && F.p.coarse > 0)
            UNROLLED (int i = 0; i < STRIP; i += TEAM)
                mean += F.label[i + lane] == q ? F.value[USED * STRIP + i + lane] : 0;
    }
    return total;
}

// Sweep 1 over the block's columns; thread TEAM q returns the block's sum q, and its part of cluster q's mean in
// `mean`.
template <typename Next>
FN double column_sweep(const State &S, Finish &F, int rounds, Column &c, double &mean, Next next) {
    const int q = threadIdx.x / TEAM;
    double total = q == MAX_F || q == MAX_MINUS ? -1e38 : 0;
    mean = 0;
    for (int round = 0; round < rounds; round++) {
        double value[SUM_DOT] = {};
        value[MAX_F] = value[MAX_MINUS] = -1e38;
        const double sum = next(round);
        if ((int)threadIdx.x < column_threads(S)) column_values(S, F, sum, c, value);
        if (rounds > 1 && c.j >= 0) {
            S.work[c.j] = c.f;
            S.work[S.n + c.j] = c.G;
        }
        total = strip_values(S, F, c, value, total, mean);
    }
    if (COARSE) mean = warp_sum<TEAM>(mean);
    return joined_team(q, total);
}

// Join the first `used` numbers at `partial` of every block, in the same order in every block; 512 threads, and
// thread TEAM q returns number q.
FN double join_posts(const State &S, Finish &F, const double *partial, int used, bool maxima) {
    const int own = threadIdx.x % VALUES, team = threadIdx.x / VALUES, parts = (int)S.parts;
    const int kind = maxima ? own : 0;
    const double none = kind == MAX_F || kind == MAX_MINUS ? -1e38 : 0;
    double total = none;
    ROLLED (int first = team; first < parts; first += TEAM * 5) {
        double value[5];
        bool wait;
        do {
            wait = false;
            UNROLLED (int i = 0; i < 5; i++) {
                const int q = first + TEAM * i;
                value[i] = q < parts && own < used ? posted(partial + q * POSTS + own) : none;
                wait |= is_unset(value[i]);
            }
        } while (__any_sync(FULL, wait));
        UNROLLED (int i = 0; i < 5; i++) total = joined(kind, total, value[i]);
    }
    __syncthreads();
    F.value[team * (VALUES + 1) + own] = total;
    __syncthreads();
    const int q = threadIdx.x / TEAM;
    return joined_team(maxima ? q : 0, F.value[threadIdx.x % TEAM * (VALUES + 1) + q]);
}

// Join the numbers that the blocks post: the sums over all columns and, with a coarse correction, the clusters' means.
FN void finish_totals(const State &S, Finish &F, const double *partial) {
    const double total = join_posts(S, F, partial, USED, true);
    if (threadIdx.x % TEAM == 0) F.total[threadIdx.x / TEAM] = total;
    if (!COARSE || !(F.p.coarse > 0)) return;
    const double mean = join_posts(S, F, partial + VALUES, CLUSTERS, false);
    if (threadIdx.x % TEAM == 0) F.mean[threadIdx.x / TEAM] = mean;
}

#include "finish_scalars.cuh"

// Return the buffer where blocks post v for the next pass.
FN num *next_v(const State &S, int turn) { return (num *)(S.next_v + turn % 2 * S.ld); }

// Sweep 2, and this block's part of B and sum v; `loaded`: c holds the column of the first round.
FN void second_sweep(const State &S, Finish &F, Column &c, int part, int rounds, int turn, bool loaded, double &B,
                     double &scale) {
    B = scale = 0;
    for (int round = 0; round < rounds; round++) {
        if (!loaded) {
            load_column(S, F, part, round, c);
            load_images(S, F, c);
        }
        const double step = held_step(F, c);
        if (c.j < 0) continue;
        if (!loaded) {
            c.f = S.work[c.j];
            c.G = S.work[S.n + c.j];
        }
        if (!(S.solo && blockIdx.x > 0)) ((column_total *)sums_of(S, turn + 2))[c.j] = 0;
        if (F.p.step > 2 || !isfinite(c.absorbed)) continue;
        const double v = advance_column(S, F, c, step, B, scale);
        if (PERSISTENT && !S.solo && !SPARSE) {
            post(next_v(S, turn + 1) + c.j, (num)v);
            take_back(next_v(S, turn) + c.j);
        }
    }
}

// Put the warps' sums of B and v into F.next.
FN void next_sums(Finish &F, double B, double scale) {
    double value[2] = {B, scale};
    const int lane = threadIdx.x % 32;
    const double total = warp_sums<2>(value, lane);
    if (lane % 16 == 0) F.next[threadIdx.x / 32][lane / 16] = total;
}

// The block's sums of B (first half of the first warp) and v (second half)
FN double next_total(const State &S, const Finish &F) {
    const int warp = threadIdx.x % 16;
    return warp_sum<16>(warp < column_threads(S) / 32 ? F.next[warp][threadIdx.x / 16 % 2] : 0);
}

// Load the progress at `from` for a block that makes passes, and write it to `to`. Returns true if steps are corrected.
FN bool open_finish(const State &S, Finish &F, const Progress *from) {
    copy_record(&F.p, from);
    const bool corrected = COARSE && from->coarse > 0;
    if (corrected && threadIdx.x < CLUSTERS) F.last_mean[threadIdx.x] = S.coarse.mean[threadIdx.x];
    return corrected;
}

FN void close_finish(const State &S, const Finish &F, Progress *to, bool corrected) {
    copy_record(to, &F.p);
    if (corrected && threadIdx.x < CLUSTERS) S.coarse.mean[threadIdx.x] = F.last_mean[threadIdx.x];
}

// Sweep 1 over this block's columns, `rounds` a thread; c holds the data loaded for the first.
template <typename Rows>
FN void first_sweep(const State &S, Finish &F, Column &c, int part, int rounds, const Rows &done) {
    const int turn = (int)F.p.turn;
    const double first = c.j >= 0 ? done.sum(S, turn, c.j) : 0;
    join_scalars(F, scalars_of(S, turn), gridDim.x, done.scalars(S));
    if (part >= S.parts) {
        if (threadIdx.x < 32) F.move = whole_translation(S, F);
        return;
    }
    double mean;
    const double total = column_sweep(S, F, rounds, c, mean, [&](int round) {
        if (round == 0) return first;
        load_column(S, F, part, round, c);
        return c.j >= 0 ? done.sum(S, turn, c.j) : 0;
    });
    const int q = threadIdx.x / TEAM;
    if (threadIdx.x % TEAM > 0) return;
    if (COARSE) {
        if (F.p.coarse > 0) post(partial_of(S, turn) + part * POSTS + VALUES + q, mean);
        take_back(partial_of(S, turn + 1) + part * POSTS + VALUES + q);
    }
    if (q >= USED) return;
    if (S.solo) {
        F.total[q] = total;
    } else {
        post(partial_of(S, turn) + part * POSTS + q, total);
        take_back(partial_of(S, turn + 1) + part * POSTS + q);
    }
}

// The O(n) half. done: the row half, with a meeting of its blocks between arrive and wait; sum: K^T u of a column;
// scalars: the row scalars, or null if each block has written its own.
template <typename Rows> FN void finish_half(const State &S, Finish &F, Rows &done) {
    Column c;
    const int part = S.solo ? 0 : blockIdx.x, turn = (int)F.p.turn, rounds = column_rounds(S);
    double B, scale;
    done.arrive();
    load_column(S, F, part, 0, c);
    done.wait();
    first_sweep(S, F, c, part, rounds, done);
    if (rounds == 1) load_images(S, F, c);
    if (!S.solo) finish_totals(S, F, partial_of(S, turn));
    finish_scalars(S, F);
    second_sweep(S, F, c, part, rounds, turn, rounds == 1, B, scale);
    if ((int)threadIdx.x < column_threads(S) && part < S.parts) next_sums(F, B, scale);
    verdict(S, F, blockIdx.x == 0);
    __syncthreads();
    if (threadIdx.x < 32) { // joined in a fixed order: all ranks must get the same bits
        const bool repeated = F.p.step > 2, counts = repeated || S.solo ? blockIdx.x == 0 : part < S.parts;
        const int q = NEXT_B + threadIdx.x / 16;
        const double total = next_total(S, F);
        if (threadIdx.x % 16 == 0)
            scalars_of(S, turn + 1)[blockIdx.x * SCALARS + q] = !counts ? 0 : repeated ? F.row[q] : total;
    }
}

// total = the sums of the blocks in the row half: K^T u, then the row scalars; to be summed over several devices.
extern "C" __global__ void __launch_bounds__(256) gather_sums(const __grid_constant__ State S, int blocks, int parity) {
    const int turn = (int)S.progress[parity].turn;
    const int64_t j = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (j < S.n) {
        double sum = 0;
#if ORDERED
        for (int q = 0; q < blocks / CLUSTER; q++) sum += ((const num *)S.slab)[q * S.ld + j];
#else
        sum = ((const column_total *)sums_of(S, turn))[j];
#endif
        S.total[j] = sum;
    }
    if (blockIdx.x == 0) {
        __shared__ Finish F;
        join_scalars(F, scalars_of(S, turn), blocks, nullptr);
        if (threadIdx.x < NEXT_B) S.total[S.ld + threadIdx.x] = F.row[threadIdx.x];
    }
}
