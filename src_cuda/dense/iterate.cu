// Mirrors src_c/solver.c (mapuot_iterate): many passes in one cooperative launch, one block a multiprocessor, sm_80+.
//
// row_pass, a meeting of the grid, then the O(n) finish_pass spread over all blocks, which post their
// sums and the next v to each other (UNSET in common.cuh: two more meetings cost 1.3 to 2.6 us). With few columns
// (solo) every block does all of finish_pass for itself.  K stays in flight or in shared memory from the first pass to
// the last.  Every block holds the same Progress and stops at the same pass. The NARROW kernel runs while
// progress.narrow is 1, then the other one; each returns at once if it has nothing to do. SPARSE 1: K has stored pairs
// only, twice, by rows and by columns (sparse.cuh); a pass has two more meetings, to share u and to share v. LEAPS 1:
// Newton's steps between passes (newton.cuh).
#define PERSISTENT 1
#pragma option LEAPS 0
#include "row_pass.cuh"
#include "finish_pass.cuh"
#if SPARSE
#define RUN_THREADS THREADS
#include "sparse.cuh"
#endif

#if CLUSTER > 1
#define SHAPE __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
#else
#define SHAPE __launch_bounds__(THREADS, 1)
#endif

enum { ROWS = 1, FINISH = 2 }; // mode: which halves of a pass to make. A single half is made once and uses S.total.

#if SPARSE
struct Shared {
    Finish finish;
    Scratch scratch;
};
#else
struct Shared {
    Finish finish;
    Exchange exchange;
    Ring ring[GROUPS];
    uint64_t full[GROUPS][SLOTS];
#if SPREAD
    RowLayout layout;
    Mail mail;
#endif
};
#endif

#define RING_OFFSET (((int)sizeof(Shared) + 127) / 128 * 128)

#if SPREAD
FN Mail &own_mail() { return ((Shared *)memory)->mail; }
#endif

#if !SPARSE
// Set up this block's share of the tiles and of shared memory; all is zeroed once, so that no stale NaN is ever read.
FN Ring ring_open(const State &S, int slots, int kept, int group) {
    Shared &all = *(Shared *)memory;
    const int64_t tiles = (S.m + R - 1) / R;
    Ring g;
#if SPREAD
    const RowLayout layout = row_layout(S, gridDim.x);
    if (threadIdx.x == 0) all.layout = layout;
    const int owner = blockIdx.x / CLUSTER, owners = layout.streams, slice = layout.slice, strip = strip_of(group);
    const bool works = owner < owners && strip < layout.strips;
    const int rings = (layout.strips + CLUSTER - 1) / CLUSTER;
    g.step = 1;
    g.kept = 0;
#else
    const int clusters = gridDim.x / CLUSTER, owner = (int)(blockIdx.x / CLUSTER) * GROUPS + group;
    const int slice = (int)((S.ld / 16 + CLUSTER - 1) / CLUSTER * 16), strip = cluster_rank(); // at most WIDTH
    const int64_t owners = (int64_t)clusters * GROUPS;
    const bool works = true;
    const int rings = GROUPS;
#endif
    g.first = works ? (int)(tiles * owner / owners) : 0;
    g.tiles = works ? (int)(tiles * (owner + 1) / owners) - g.first : 0;
    if (!SPREAD) g.kept = kept < g.tiles ? kept : g.tiles;
    g.slots = slots - g.kept;
    g.slot = g.kept;
    g.forward = true;
    g.parity = 0;
    g.column = strip * slice;
    g.columns = (int)(S.ld - g.column < slice ? S.ld - g.column : slice);
    g.bytes = R * slice * (int)sizeof(real);
    g.tile = RING_OFFSET + group * slots * g.bytes;
    g.full = shared_address(all.full[group]);
    uint4 *words = (uint4 *)(memory + RING_OFFSET);
    const int behind = SPREAD * 32 * CPT * (int)sizeof(real); // behind the last row, since a warp reads beyond it
    for (int q = threadIdx.x; q < (rings * slots * g.bytes + behind) / 16; q += THREADS)
        words[q] = make_uint4(0, 0, 0, 0);
    for (int q = threadIdx.x; q < GROUPS * R * NEXT_B; q += THREADS) ((double *)all.exchange.row)[q] = 0;
    for (int q = threadIdx.x; q < GROUPS * SLOTS; q += THREADS)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address((uint64_t *)all.full + q)),
                     "r"(BULK ? 1 : GT)
                     : "memory");
#if BULK
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
#endif
    __syncthreads();
    return g;
}

// The place of v at the start of a launch
FN const num *first_v(const State &S) {
#if NARROW
    return S.narrow_v + own_copy(S);
#else
    return S.v_scale + own_copy(S);
#endif
}

#endif

// Mark v as not posted; columns without v are 0.
FN void open_posts(const State &S) {
    for (int j = blockIdx.x * THREADS + threadIdx.x; j < S.ld; j += gridDim.x * THREADS)
        for (int turn = 0; turn < 2; turn++)
            if (j < S.n && isfinite(S.cols.absorbed[j])) take_back(next_v(S, turn) + j);
            else post(next_v(S, turn) + j, (num)0);
}

#if !SPARSE
// Load v of this thread's columns; POSTED: once all of the warp's are posted (warps that diverge would meet a cluster
// twice)
template <bool POSTED> FN void load_v(const num *from, const Ring &g, num (&v)[CPT]) {
    bool wait;
    do {
        wait = false;
        UNROLLED (int c = 0; c < VPT; c++) {
            const int j = (c * GT + threadIdx.x % GT) * CHUNK;
            UNROLLED (int e = 0; e < CHUNK; e += 16 / (int)sizeof(num))
                if (j < g.columns) {
                    const num *at = from + g.column + j + e;
                    if constexpr (POSTED) posted(at, v + c * CHUNK + e);
                    else *(uint4 *)(v + c * CHUNK + e) = *(const uint4 *)at; // v of this block, from L1
                }
            UNROLLED (int e = 0; e < CHUNK; e++) {
                v[c * CHUNK + e] = j < g.columns ? v[c * CHUNK + e] : 0;
                wait |= POSTED && is_unset(v[c * CHUNK + e]);
                v[c * CHUNK + e] *= WIDEN;
            }
        }
    } while (__any_sync(FULL, wait));
}

// s = K v, u = prox(s), column sums and row scalars of this block.  Between passes the ring waits in shared memory.
// later: the last pass of this launch has posted v; lag: SPREAD, steps from the products with v to u.
FN void row_half(const State &S, Shared &all, int group, bool later, int lag) {
    const int turn = (int)all.finish.p.turn;
    alignas(16) num v[CPT];
    num acc[CPT];
#if SPREAD
    Ring &g = all.ring[group]; // a reference: a copy would take registers that the sweep needs
#else
    Ring g = all.ring[group];
#endif
    UNROLLED (int c = 0; c < CPT; c++) acc[c] = 0;
    if (g.tiles) {
        if (later && !S.solo) load_v<true>(next_v(S, turn), g, v);
        else load_v<false>(first_v(S), g, v);
#if SPREAD
        spread_pass(S, all.layout, g, group, lag, all.finish.p.shift, all.exchange.row + group * R, v, acc);
#else
        row_pass(S, g, all.exchange, group, all.finish.p.shift, v, acc);
#endif
    }
    __syncthreads();
    if (!SPREAD && threadIdx.x % GT == 0) all.ring[group] = g;
    add_sums(S, g, acc, group, all.finish.value, (column_total *)sums_of(S, turn));
    const int slot = threadIdx.x % 32; // the last warp, since the others may still be summing
    if ((int)threadIdx.x >= THREADS - 32 && slot < NEXT_B) {
        double sum = 0;
        UNROLLED (int q = 0; q < GROUPS * R; q++) sum += all.exchange.row[q][slot];
        UNROLLED (int q = 0; q < GROUPS * R; q++) all.exchange.row[q][slot] = 0;
        scalars_of(S, turn)[blockIdx.x * SCALARS + slot] = sum;
    }
}

#endif

// K^T u of one column in this pass
FN double column_sum(const State &S, int turn, int j, int mode) {
    if (mode == FINISH) return __ldcg(S.total + j);
    double sum = 0;
    if (!ORDERED) return __ldcg((const column_total *)sums_of(S, turn) + j);
#pragma unroll 16
    for (int q = 0; q < (int)gridDim.x / CLUSTER; q++) sum += __ldcg((const num *)S.slab + q * S.ld + j);
    return sum;
}

// Solo: copy the vectors that the last launch left in the first block's copy to this block's
FN void copy_vectors(const State &S) {
    const int64_t own = own_copy(S);
    if (own == 0) return;
    for (int j = threadIdx.x; j < S.ld; j += blockDim.x) {
        S.x_next[own + j] = S.x_next[j];
        S.v_scale[own + j] = S.v_scale[j];
        S.narrow_v[own + j] = S.narrow_v[j];
        S.image[own + j] = S.image[j];
        S.residual[own + j] = S.residual[j];
    }
    for (int j = threadIdx.x; j < ANDERSON_DEPTH * S.ld; j += blockDim.x) {
        S.dF[own * ANDERSON_DEPTH + j] = S.dF[j];
        S.dG[own * ANDERSON_DEPTH + j] = S.dG[j];
    }
}

// The results of the row half, from this launch or an earlier one, for finish_half
struct RowsDone {
    int mode;
    uint32_t *counter, &ended;

    FN void arrive() {
        if (mode & ROWS) grid_arrive(counter, ended);
    }

    FN void wait() const {
        if (mode & ROWS) grid_wait(counter, ended);
    }

    FN double sum(const State &S, int turn, int j) const { return column_sum(S, turn, j, mode); }

    FN const double *scalars(const State &S) const { return mode == FINISH ? S.total + S.ld : nullptr; }
};

#if SPARSE
// The vector that one half of a pass reads at scattered places. HELD: it lies in shared memory, where a warp that reads 32 scattered numbers waits for some
// of its banks, while the L1 gives one line of 128 bytes a cycle. Otherwise plain loads read it: other blocks have
// written it, before a meeting.
struct Met {
    const double *x;

    FN Met(const double *from, int count) : x(from) {
        if (!HELD) return;
        double *held = (double *)(memory + RING_OFFSET);
        for (int q = 2 * threadIdx.x; q < count; q += 2 * THREADS)
            *(double2 *)(held + q) = __ldcg((const double2 *)(from + q));
        __syncthreads();
    }

    FN double operator()(int j) const { return HELD ? ((const double *)(memory + RING_OFFSET))[j] : x[j]; }
};

#if LEAPS
#include "newton.cuh"
#endif

// At most `count` passes, `first` made before
extern "C" __global__ void SHAPE iterate_pairs(const __grid_constant__ State S, const __grid_constant__ Half rows,
                                               const __grid_constant__ Half cols, int first, int count) {
    Shared &all = *(Shared *)memory;
    Finish &F = all.finish;
    uint32_t *counter = S.barrier, ended = meeting_start(counter);
    if (S.progress->status != MAPUOT_RUNNING || S.progress->passes >= first + count) return;
    const bool corrected = open_finish(S, F, S.progress);
    __syncthreads();
    for (int pass = 0; pass < count; pass++) {
        if (pass > 0) grid_barrier(counter, ended); // v is complete
#if LEAPS
        leap(S, F, rows, cols, all.scratch, counter, ended);
#endif
        const int turn = (int)F.p.turn;
        row_half(S, rows, F.p.shift, Met(S.v_scale, (int)S.n), all.scratch, scalars_of(S, turn) + blockIdx.x * SCALARS);
        grid_barrier(counter, ended); // u is complete
        column_half(cols, Met(S.u_scale, (int)S.m), all.scratch, sums_of(S, turn));
#if LEAPS
        translate_parts(S, F, counter, ended);
#endif
        RowsDone done = {ROWS | FINISH, counter, ended};
        finish_half(S, F, done);
#if LEAPS
        look_ahead(F);
#endif
        if (F.p.status != MAPUOT_RUNNING || F.p.passes >= first + count || (corrected && F.p.coarse <= 0)) break;
    }
    if (blockIdx.x == 0) close_finish(S, F, S.progress, corrected);
}
#endif

#if !SPARSE
// At most `count` passes, `first` made before; kept: tiles that stay in shared memory, or the lag where SPREAD.
extern "C" __global__ void SHAPE iterate(const __grid_constant__ State S, int slots, int kept, int first, int count,
                                         int mode) {
    Shared &all = *(Shared *)memory;
    Finish &F = all.finish;
    const int group = threadIdx.x / GT;
    uint32_t *counter = S.barrier + 32 * NARROW, ended = meeting_start(counter);
    if (S.progress->narrow != NARROW || S.progress->status != MAPUOT_RUNNING || S.progress->passes >= first + count)
        return;
    const bool corrected = open_finish(S, F, S.progress);
    const Ring g = ring_open(S, slots, kept, group);
    if (threadIdx.x % GT == 0) all.ring[group] = g;
#if SPREAD
    empty_mail();
#endif
    if (CLUSTER > 1) group_barrier(group);
    if ((!BULK || threadIdx.x % GT == 0) && mode & ROWS)
        for (int t = 0; t < slots && t < g.tiles; t++) fetch(S, g, t, t);
    copy_vectors(S);
    if (!S.solo && mode == (ROWS | FINISH)) open_posts(S);
    __syncthreads();
    for (int pass = 0; pass < count; pass++) {
        if (mode & ROWS) row_half(S, all, group, pass > 0 && mode & FINISH, kept);
        if (mode == ROWS) {
            grid_barrier(counter, ended);
            continue;
        }
        RowsDone done = {mode, counter, ended};
        finish_half(S, F, done);
        if (mode == FINISH || F.p.status != MAPUOT_RUNNING || F.p.narrow != NARROW || F.p.passes >= first + count)
            break;
        if (corrected && F.p.coarse <= 0) // the correction was dropped: the host decides when to build a new matrix
            break;
    }
    if (blockIdx.x == 0 && mode & FINISH) close_finish(S, F, S.progress, corrected);
    if (CLUSTER > 1) group_barrier(group); // no block leaves while a peer may still write to it
}

#endif

extern "C" __global__ void ring_offset(int *out) { out[0] = RING_OFFSET; }
