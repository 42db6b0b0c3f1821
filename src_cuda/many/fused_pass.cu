// Mirrors src_c/kernels_tmpl.c (row_pass) with u = e^base s^-fi instead of a prox: s = K v, sums = K^T u, for the
// passes over many marginals (mapuot/backends/kernel.py, fused).  K is read once, in one cooperative launch, sm_90+.
//
// Rows are few and long: the rows of an array have a column for each point of all its other marginals. A stream of
// blocks shares the rows of its part of K. Each block has a strip of columns, with v and sums in registers while tiles
// of R rows pass through a ring in shared memory. Beside the sweeping warps, which never meet, a block has a courier,
// a clerk and a porter. The courier adds up the warps' products of a tile with v, posts the sum (UNSET in common.cuh)
// to the clerk of its step, in one of the stream's blocks, and refills the slot that all warps have left. The clerk
// adds up the blocks' sums and posts u. The porter brings u to its block, where the warps use it `lag` steps later: the
// way there and back, 3 us through the L2 cache, costs nothing while tiles stream by. Each launch clears the posts of
// the one before, sweeps the other way, and so finds the last rows in the L2 cache.
// Options: STORE, THREADS (that sweep), CPT (columns of a thread), R (rows of a tile), RESIDENT (blocks a
// multiprocessor).
#include "bulk.cuh"

#define WARPS (THREADS / 32)
#define ALL (THREADS + 96)
#define GT THREADS // threads that share a row
#define VPT (CPT / CHUNK)
#define LANES (32 / R) // lanes that hold the sum of one row
#define SLOTS 32       // most tiles in the ring
#define LETTERS 10     // most posts that one lane of a clerk waits for at once
#define HOLD 0         // 0: a thread keeps no entries and reads each tile twice
#define EARLY 2        // tiles requested before v
#define BEYOND STORE   // entries beyond a row may have any finite value: their v is 0

#include "entries_stored.cuh"
#include "tile_products.cuh"

struct Shared {
    uint64_t full[SLOTS], ready[SLOTS],
        told[SLOTS];        // mbarriers. full: the tile has arrived; ready: all warps left it; told: its u has arrived
    double scale[SLOTS][R]; // u of the last steps
    uint64_t posted;        // number of steps with posted products
};

#define RING_OFFSET (((int)sizeof(Shared) + 127) / 128 * 128)

// The warps' products of the tile in a slot; they lie behind the ring
FN double *part_of(int slots, int bytes, int slot) {
    return (double *)(memory + RING_OFFSET + slots * bytes) + slot * R * WARPS;
}

struct Pass {
    const real *kernel;
    int64_t m, ld;
    int64_t strips, slice, slots, lag; // blocks a stream, columns a block; tiles a ring, steps from product to u
    const double *v, *base;
    const int64_t *starts; // v is a product of factors (Product, mapuot/backends/kernel.py): where each begins in v
    int64_t axes;          // number of factors; 0: v is given
    const int64_t *own;    // a number to subtract from base, as its rank (common.cuh); 0: none
    double fi, flush;
    double *s, *sums;                            // m; a row of ld for each stream
    double *part, *scale, *old_part, *old_scale; // posts of this launch, and of the last one
};

// This block's share
struct Part {
    int64_t first;
    int tiles, column, columns, bytes; // of a tile
    bool back;
};

FN uint64_t look(const uint64_t *word) {
    uint64_t x;
    asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(x) : "r"(shared_address(word)) : "memory");
    return x;
}

// The slot of a step's tile in the ring, and the parity of its barriers
struct Place {
    int slot;
    uint32_t parity;
};

FN void advance(Place &at, int slots) {
    at.slot = at.slot + 1 < slots ? at.slot + 1 : 0;
    at.parity ^= at.slot == 0;
}

FN void begin(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

FN void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// v of this thread's columns: the products of their factors, 0 below flush. A column fits 32 bits: division of 64 bits
// takes ten times as long.
FN void own_factors(const Pass &P, const Part &g, double (&v)[CPT]) {
    uint32_t at[CPT];
    UNROLLED (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * THREADS + threadIdx.x) * CHUNK + c % CHUNK;
        at[c] = j < g.columns ? g.column + j : 0;
        v[c] = j < g.columns ? 1 : 0;
    }
    for (int k = (int)P.axes - 1; k > 0; k--) {
        const double *from = P.v + P.starts[k];
        const uint32_t n = (uint32_t)(P.starts[k + 1] - P.starts[k]);
        UNROLLED (int c = 0; c < CPT; c++) {
            const uint32_t next = at[c] / n;
            v[c] *= from[at[c] - next * n];
            at[c] = next;
        }
    }
    const uint32_t count = (uint32_t)(P.axes ? P.starts[1] : P.ld); // K has columns of zeros behind an array's
    UNROLLED (int c = 0; c < CPT; c++) {
        v[c] *= at[c] < count ? P.v[at[c]] : 0;
        v[c] = v[c] < P.flush ? 0 : WIDEN * v[c];
    }
}

// The first row of the tile of a step
FN int64_t row_at(const Part &g, int step) { return (g.first + (g.back ? g.tiles - 1 - step : step)) * R; }

// A warp starts the copy of a tile, a lane for each row; behind the last row it is repeated, with u = 0.
FN void fetch(const Pass &P, const Part &g, int step, int slot) {
    const int lane = threadIdx.x % 32;
    const int64_t row = row_at(g, step) + lane;
    const uint32_t bytes = g.columns * (uint32_t)sizeof(real),
                   to = shared_address(memory) + RING_OFFSET + slot * g.bytes;
    const uint32_t full = shared_address(((Shared *)memory)->full + slot);
    if (lane < R) copy_in(to + lane * bytes, P.kernel + (row < P.m ? row : P.m - 1) * P.ld + g.column, bytes, full);
    __syncwarp();
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes * R) : "memory");
}

// The sum over the strips of this lane's row, once all strips have posted
FN double whole_row(const double *from, int strips, int lane) {
    double sum = 0;
    for (int first = lane % LANES; first < strips; first += LANES * LETTERS) {
        double x[LETTERS];
        bool wait;
        UNROLLED (int i = 0; i < LETTERS; i++) x[i] = first + i * LANES < strips ? posted(from + first + i * LANES) : 0;
        do {
            wait = false;
            UNROLLED (int i = 0; i < LETTERS; i++)
                if (is_unset(x[i])) x[i] = posted(from + first + i * LANES);
            UNROLLED (int i = 0; i < LETTERS; i++) wait |= is_unset(x[i]);
        } while (wait);
        UNROLLED (int i = 0; i < LETTERS; i++) sum += x[i];
    }
    __syncwarp();
    return warp_sum<LANES>(sum);
}

// u of the rows of every strips-th step. It reads posts once its own block's are there: earlier reads would slow
// these down.
FN void clerk(const Pass &P, const Part &g, int strip) {
    const int lane = threadIdx.x % 32;
    const double own = P.own ? number_of(*P.own) : 0;
    for (int step = strip; step < g.tiles; step += P.strips) {
        const int64_t i = row_at(g, step) + lane / LANES;
        const double base = i < P.m ? P.base[i] - own : 0;
        while (look(&((Shared *)memory)->posted) <= (uint64_t)step);
        __syncwarp();
        const double s = whole_row(P.part + i * P.strips, (int)P.strips, lane);
        const double u = i < P.m ? WIDEN * far_exp(base - P.fi * far_log(s)) : 0;
        if (lane % LANES == 0) {
            post(P.scale + i, u);
            take_back(P.old_scale + i);
            if (i < P.m) P.s[i] = s;
        }
    }
}

// Bring u of each step in turn from the clerks to this block's warps. A lane looks for u of one row of the next 32: a
// look takes .7 us and finds all that has come for these rows.
FN void porter(const Pass &P, const Part &g) {
    const int lane = threadIdx.x % 32;
    const uint32_t all_rows = (1u << R) - 1;
    Shared &all = *(Shared *)memory;
    double u = 0;
    bool there = false;
    int row = lane; // number of the row, in the order of the sweep
    for (int step = 0; step < g.tiles;) {
        if (!there && row < g.tiles * R) {
            u = posted(P.scale + row_at(g, row / R) + row % R);
            there = !is_unset(u);
        }
        __syncwarp();
        for (uint32_t found = __ballot_sync(FULL, there); step < g.tiles; step++) {
            const int first = step * R % 32;
            if ((found >> first & all_rows) != all_rows) break;
            found &= ~(all_rows << first);
            if (row / R == step) {
                all.scale[step % SLOTS][row % R] = u;
                row += 32;
                there = false;
            }
            __syncwarp();
            if (lane == 0) arrive(all.told + step % SLOTS);
        }
    }
}

// Send the block's products of each tile to its clerk. Warps that have left a step have also used u of the step `lag`
// before it, too.
FN void courier(const Pass &P, const Part &g, int strip) {
    const int lane = threadIdx.x % 32, slots = (int)P.slots, lag = (int)P.lag;
    Shared &all = *(Shared *)memory;
    for (int step = EARLY; step < slots && step < g.tiles; step++) fetch(P, g, step, step);
    Place at = {}, left = {};
    for (int step = 0; step < g.tiles; step++) {
        await(shared_address(all.ready + at.slot), at.parity);
        double sum = 0;
        for (int p = lane % LANES; p < WARPS; p += LANES)
            sum += part_of(slots, g.bytes, at.slot)[lane / LANES * WARPS + p];
        sum = warp_sum<LANES>(sum);
        const int64_t to = (row_at(g, step) + lane / LANES) * P.strips + strip;
        if (lane % LANES == 0) {
            post(P.part + to, sum);
            take_back(P.old_part + to);
        }
        if (lane == 0) *(volatile uint64_t *)&all.posted = step + 1;
        advance(at, slots);
        if (step < lag) continue;
        if (step - lag + slots < g.tiles) fetch(P, g, step - lag + slots, left.slot);
        advance(left, slots);
    }
}

// One step of a warp: products of a tile with v, and with u of the tile `lag` steps before; the compiler interleaves
// them, so that neither waits for the other.
template <bool DOTS, bool SUMS>
FN void one_step(const Part &g, int slots, Place &to, Place &from, int late, const double (&v)[CPT],
                 double (&acc)[CPT]) {
    const int lane = threadIdx.x % 32;
    const unsigned char *ring = memory + RING_OFFSET;
    Shared &all = *(Shared *)memory;
    Entries tile;
    double s[R], sum = 0;
    if (DOTS) await(shared_address(all.full + to.slot), to.parity);
    if (SUMS) await(shared_address(all.told + late % SLOTS), late / SLOTS & 1);
    if (DOTS) {
        tile.open(ring + to.slot * g.bytes, g.columns, threadIdx.x);
        tile_dots(tile, threadIdx.x, v, s);
        sum = warp_sums<R>(s, lane);
    }
    if (SUMS) {
        tile.open(ring + from.slot * g.bytes, g.columns, threadIdx.x);
        add_tile(tile, threadIdx.x, [&](int q) { return all.scale[late % SLOTS][q]; }, acc);
        advance(from, slots);
    }
    if (!DOTS) return;
    if (lane % LANES == 0) part_of(slots, g.bytes, to.slot)[lane / LANES * WARPS + threadIdx.x / 32] = sum;
    __syncwarp();
    if (lane == 0) arrive(all.ready + to.slot);
    advance(to, slots);
}

extern "C" __global__ void __launch_bounds__(ALL, RESIDENT) fused_pass(const __grid_constant__ Pass P, int back) {
    Shared &all = *(Shared *)memory;
    const int strips = (int)P.strips, slice = (int)P.slice;
    const int stream = blockIdx.x / strips, strip = blockIdx.x % strips, streams = gridDim.x / strips;
    const int64_t tiles = (P.m + R - 1) / R;
    Part g;
    g.first = tiles * stream / streams;
    g.tiles = (int)(tiles * (stream + 1) / streams - g.first);
    g.back = back;
    g.column = strip * slice;
    g.columns = (int)(P.ld - g.column < slice ? P.ld - g.column : slice);
    g.bytes = R * slice * (int)sizeof(real);
    const int own = threadIdx.x / 32 - WARPS; // index among the warps that do not sweep
    double v[CPT], acc[CPT] = {};
    if (own < 0) own_factors(P, g, v); // before most tiles are requested: afterwards these loads take 10 us
    if (own == 0) {
        for (int q = threadIdx.x % 32; q < SLOTS; q += 32) {
            begin(all.full + q, 1);
            begin(all.ready + q, WARPS);
            begin(all.told + q, 1);
        }
        all.posted = 0;
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
        __syncwarp();
        for (int step = 0; step < EARLY && step < P.slots && step < g.tiles; step++) fetch(P, g, step, step);
    }
    __syncthreads();
    if (own == 0) courier(P, g, strip);
    if (own == 1) clerk(P, g, strip);
    if (own == 2) porter(P, g);
    if (own >= 0) return;
    const int slots = (int)P.slots, lag = (int)P.lag < g.tiles ? (int)P.lag : g.tiles;
    Place to = {}, from = {};
    int late = 0;
    for (int step = 0; step < lag; step++) one_step<true, false>(g, slots, to, from, 0, v, acc);
    for (; late < g.tiles - lag; late++) one_step<true, true>(g, slots, to, from, late, v, acc);
    for (; late < g.tiles; late++) one_step<false, true>(g, slots, to, from, late, v, acc);
    UNROLLED (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * THREADS + threadIdx.x) * CHUNK + c % CHUNK;
        if (j < g.columns) P.sums[stream * P.ld + g.column + j] = acc[c];
    }
}

// Join the streams' sums; out may be the first stream's sums
extern "C" __global__ void __launch_bounds__(256)
    join_streams(const double *sums, double *out, int64_t ld, int streams) {
    for (int64_t j = (int64_t)blockIdx.x * 256 + threadIdx.x; j < ld; j += (int64_t)gridDim.x * 256) {
        double total = sums[j];
        for (int q = 1; q < streams; q++) total += sums[q * ld + j];
        out[j] = total;
    }
}

extern "C" __global__ void ring_offset(int *out) { out[0] = RING_OFFSET; }
