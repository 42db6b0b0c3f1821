// Mirrors src_c/kernels_tmpl.c (row_pass, narrow_pass): s = K v, u = prox(s), sums += K^T u; K is read once.
//
// SPREAD 1: rows are spread over the warps of a cluster, which work independently (spread_pass.cuh). Else:
// A group of GW warps owns consecutive tiles of R rows. Each of its threads owns CPT columns, with v and column sums
// in registers. Shared memory holds as many tiles as fit for the whole solve, and a ring that bulk
// copies fill with the others. These sweep back and forth, so that the next pass first needs the tiles that a pass
// leaves in the ring and in the L2 cache; if there are few enough, all stay in the cache (4096^2 float32).
// In a cluster, each block owns a slice of the columns and the row sums are exchanged through distributed memory.
// NARROW: float32 throughout, except the exponent of u and the row scalars.
#include "row_prox.cuh"

#define THREADS 512
#define GROUPS (16 / GW)         // groups of a block
#define GT (32 * GW)             // threads of a group
#define VPT (CPT / CHUNK)        // 16-byte chunks of a thread
#define WIDTH (GT * CPT)         // columns that a group covers
#define LANES (32 / R)           // lanes that hold the sum of one row
#define PARTS (GW * CLUSTER)     // partial sums of a row
#define SLOTS (SPREAD ? 16 : 32) // most tiles in the ring of a group
#define SHORT 16                 // rows of a separate float32 sum of products
// whether a tile stays in registers for both halves
#define HOLD (!PERSISTENT || (NARROW && !SPREAD && 2 * CPT + R * CPT <= 60))

// Room of a block for numbers between the sweep over K and finish_pass: the column sums of all groups but one, if
// the groups' sums are joined first, or 128 numbers of each warp.
#define JOINED ((NARROW || ORDERED) && !SPREAD ? (GROUPS - 1) * CPT * GT * (int)sizeof(num) / 8 : 0)
#define STAGE (JOINED > 2048 ? JOINED : 2048)

#define SHORT_SUMS (NARROW && CLUSTER == 1) // the sums of blocks are added in float32, too

typedef floating<!SHORT_SUMS>::type column_total;

#include "entries_stored.cuh" // with the tile shape defined above
#include "tile_products.cuh"

#if PERSISTENT
#include "bulk.cuh"

FN uint32_t cluster_rank() {
    uint32_t r = 0;
    if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

FN void group_barrier(int group) {
#if CLUSTER > 1
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#elif GW == 1
    __syncwarp();
#elif RACECHECK
    __syncthreads();
#else
    __syncwarp(); // bar.sync counts whole warps
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GT) : "memory");
#endif
}

struct Ring {
    int first, tiles; // tiles [first, first + tiles) of K belong to this group
    int kept;         // number of tiles that stay, in the first slots
    int slots, slot;  // slots of the ring behind them; slot of the next tile of the sweep
    bool forward;
    uint32_t parity;     // one bit a slot: phase of its last copy
    int column, columns; // this block's slice of K
    int bytes;           // of a tile
    int tile;            // offset of the first slot in memory
    uint32_t step;       // SPREAD: number of the first step of the next sweep, from 1 on
    uint32_t full;       // shared address of the first slot's mbarrier
};

FN Point point_of(const State &S, const Ring &g, int t) {
    const int i = (g.first + t) * R + threadIdx.x % 32 / LANES, m = (int)S.m;
    return S.point[i < m ? i : m - 1];
}

// Start the copy of tile t (of this group) into a slot; one thread of the group calls, or all where not BULK.
FN void fetch(const State &S, const Ring &g, int t, int slot) {
    const int64_t row = (int64_t)(g.first + t) * R;
    const int rows = (int)(S.m - row < R ? S.m - row : R);
    const uint32_t bytes = g.columns * (uint32_t)sizeof(real);
    const uint32_t to = shared_address(memory) + g.tile + slot * g.bytes, full = g.full + slot * 8;
    const real *from = S.kernel + row * S.ld + g.column;
#if BULK
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes * rows) : "memory");
#endif
#if CLUSTER > 1
    UNROLLED (int r = 0; r < R; r++)
        if (r < rows) copy_in(to + r * bytes, from + r * S.ld, bytes, full);
#else
    copy_in(to, from, bytes * rows, full);
#endif
}

struct Exchange {
    num part[GROUPS][2][R * PARTS];
    RowSums row[GROUPS * R];
};

// Put this warp's sums of R rows where every warp of the group (and of the cluster) reads them.
FN void publish(Exchange &x, int group, int phase, num s, int warp, int lane) {
    num *at = &x.part[group][phase][(lane / LANES) * PARTS + cluster_rank() * GW + warp];
#if CLUSTER > 1
    const int peer = lane % LANES;
    if (peer < CLUSTER) {
        uint32_t remote;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(at)), "r"(peer));
#if NARROW
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(s) : "memory");
#else
        asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(s) : "memory");
#endif
    }
#else
    if (lane % LANES == 0) *at = s;
#endif
}

FN num gather(const Exchange &x, int group, int phase, int lane) {
    const num *from = &x.part[group][phase][(lane / LANES) * PARTS];
    num s = 0;
    UNROLLED (int k = 0; k < (PARTS + LANES - 1) / LANES; k++)
        if (k * LANES + lane % LANES < PARTS) s += from[k * LANES + lane % LANES];
    return warp_sum<LANES>(s);
}

// Add float32 sums of a few rows without loss: sum takes acc, acc keeps the rounding error of sum.
FN void fold(num (&acc)[CPT], num (&sum)[CPT]) {
    UNROLLED (int c = 0; c < CPT; c++) {
        const num before = sum[c];
        sum[c] = before + acc[c];
        acc[c] -= sum[c] - before;
    }
}

// One step of a sweep: the resident tiles are spread evenly among the streamed ones.
struct Step {
    int tile, slot;
    bool streams;
    int stream, kept, credit; // next streamed tile, next kept tile, balance that picks one
};

FN void next_step(Ring &g, Step &s) {
    s.credit += g.kept;
    s.streams = s.credit < g.tiles;
    if (!s.streams) {
        s.credit -= g.tiles;
        s.tile = s.slot = s.kept++;
        return;
    }
    s.tile = s.stream;
    s.slot = g.slot;
    s.stream += g.forward ? 1 : -1;
    g.slot += g.forward ? 1 : -1;
    g.slot = g.slot == g.kept + g.slots ? g.kept : g.slot < g.kept ? g.kept + g.slots - 1 : g.slot;
}

// Refill the slot that this step has left, if any tile remains.
FN void refill(const State &S, Ring &g, const Step &s, int thread) {
    const int ahead = g.forward ? s.tile + g.slots : s.tile - g.slots;
    if (!s.streams || ahead < g.kept || ahead >= g.tiles) return;
    g.parity ^= 1u << s.slot;
    if (!BULK || thread == GT - 32) // by the last warp, since the first one counts the rows
        fetch(S, g, ahead, s.slot);
}

// The sweep over this group's tiles. A slot is refilled once all warps have left it: with HOLD after the barrier of
// its own step, since the tile is in registers, else after the barrier of the next step.
FN void row_pass(const State &S, Ring &g, Exchange &x, int group, double shift, const num (&v)[CPT], num (&acc)[CPT]) {
    const int thread = threadIdx.x % GT, lane = threadIdx.x % 32, warp = thread / 32;
    const bool mine = warp == 0 && lane % LANES == 0 && cluster_rank() == 0;
    Step now = {0, 0, false, g.forward ? g.kept : g.tiles - 1, 0, 0}, last = now;
    int left = now.slot;
    double *row = x.row[group * R + lane / LANES];
    Point point;
    num sum[CPT] = {}; // used by narrow passes
    next_step(g, now);
    if (HOLD && g.tiles) point = point_of(S, g, now.tile);
    for (int k = 0; k < g.tiles; k++) {
        const int i = (g.first + now.tile) * R + lane / LANES;
        Entries tile;
        num s[R];
        if (!HOLD) point = point_of(S, g, now.tile);
        await(g.full + now.slot * 8, (g.parity >> now.slot) & 1);
        tile.open(memory + g.tile + now.slot * g.bytes, g.columns, thread);
        tile_dots(tile, thread, v, s);
        publish(x, group, k & 1, warp_sums<R>(s, lane), warp, lane);
        const Row kept = row_of(point, shift);
        group_barrier(group);
        refill(S, g, HOLD ? now : last, thread);
        const num total = gather(x, group, k & 1, lane);
        const num u = (num)WIDEN * row_scale(S, i, kept, total, shift, mine, row);
        last = now;
        left = now.streams ? now.slot : left;
        next_step(g, now);
        if (HOLD && k + 1 < g.tiles) point = point_of(S, g, now.tile);
        add_tile(tile, thread, u, acc);
        if (NARROW && k % (SHORT / R) == SHORT / R - 1) fold(acc, sum);
    }
    UNROLLED (int c = 0; NARROW && c < CPT; c++) acc[c] += sum[c];
    g.slot = left;
    g.forward = !g.forward;
}

// The first group of the block gathers the sums of all groups: stage[group - 1][chunk][thread].
FN void join_groups(num (&acc)[CPT], int group, num *stage) {
    if (GROUPS == 1) return;
    const int thread = threadIdx.x % GT;
    UNROLLED (int c = 0; c < CPT; c++)
        if (group > 0) stage[((group - 1) * CPT + c) * GT + thread] = acc[c];
    __syncthreads();
    for (int q = 0; q < GROUPS - 1; q++)
        UNROLLED (int c = 0; c < CPT; c++)
            if (group == 0) acc[c] += stage[(q * CPT + c) * GT + thread];
    __syncthreads();
}

// The sums of blocks are added in float64 where rows are wide: 132 additions in float32 would be a third of the floor
// of narrow passes.  Where they are short (SHORT_SUMS) float64 would take 2 to 5 us longer, as much as the whole sweep.
#if ORDERED || SHORT_SUMS || !BULK
// to += acc, or, ORDERED, acc into this block's row of the slab
FN void add_sums(const State &S, const Ring &g, num (&acc)[CPT], int group, double *stage, column_total *to) {
    constexpr bool joins = (ORDERED || SHORT_SUMS) && !SPREAD;
    if (joins) join_groups(acc, group, (num *)stage);
    if (joins ? group > 0 : ORDERED && g.tiles == 0) return;
    [[maybe_unused]] num *slab = (num *)S.slab + (int64_t)(blockIdx.x / CLUSTER) * S.ld + g.column;
    UNROLLED (int c = 0; c < VPT; c++) {
        const int j = (c * GT + threadIdx.x % GT) * CHUNK;
        if (j >= g.columns) continue;
        [[maybe_unused]] column_total *at = to + g.column + j;
#if ORDERED
        UNROLLED (int e = 0; e < CHUNK; e++) slab[j + e] = acc[c * CHUNK + e];
#elif BULK
        UNROLLED (int e = 0; e < CHUNK; e += 4)
            asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at + e),
                         "f"(acc[c * CHUNK + e]), "f"(acc[c * CHUNK + e + 1]), "f"(acc[c * CHUNK + e + 2]),
                         "f"(acc[c * CHUNK + e + 3])
                         : "memory");
#else
        UNROLLED (int e = 0; e < CHUNK; e++) atomicAdd(at + e, (column_total)acc[c * CHUNK + e]);
#endif
    }
}
#else
// to += acc, in float64, by bulk reductions of one warp's chunks at a time; stage: 128 numbers of every warp.
FN void add_sums(const State &S, const Ring &g, num (&acc)[CPT], int group, double *all, column_total *to) {
    const int thread = threadIdx.x % GT, lane = threadIdx.x % 32;
    double *stage = all + threadIdx.x / 32 * 128;
    UNROLLED (int c = 0; c < VPT; c++) {
        const int first = (c * GT + thread - lane) * CHUNK, left = g.columns - first;
        const uint32_t bytes = (left < 32 * CHUNK ? left : 32 * CHUNK) * 8;
        UNROLLED (int e = 0; e < CHUNK; e += 2)
            *(double2 *)(stage + lane * CHUNK + e) =
                make_double2((double)acc[c * CHUNK + e], (double)acc[c * CHUNK + e + 1]);
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncwarp();
        if (lane == 0 && left > 0)
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f64 [%0], [%1], %2;\n"
                         "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::"l"(to + g.column + first),
                         "r"(shared_address(stage)), "r"(bytes)
                         : "memory");
        __syncwarp();
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
}
#endif
#if SPREAD
#include "spread_pass.cuh"
#endif
#endif
