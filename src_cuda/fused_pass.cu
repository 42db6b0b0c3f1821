// Mirrors src_c/kernels_tmpl.c (row_pass) with u = e^base s^-fi in the place of a prox: s = K v, sums = K^T u, for the
// passes over many marginals (mapuot/backends/kernel.py, fused).  K is read once, in one cooperative launch, sm_90+.
//
// Rows are few and long: those of an array have a column for each point of all its other marginals.  A stream of
// blocks shares the rows of its part of K, each block a strip of columns, whose v and sums stay in registers while tiles
// of R rows pass through a ring in shared memory.  Beside the warps that sweep, which never meet, a block has a courier
// and a clerk: the courier adds up the warps' products of a tile with v, posts the sum (UNSET in common.cuh) to the clerk of
// its step, in one of the stream's blocks, and fills the slot that all have left; the clerk adds up those of the blocks
// and posts u, which all take up `lag` steps later: the way there and back, 2 us through the L2 cache, costs nothing while
// tiles stream by.  What one launch posts, the next one takes back; it sweeps the other way, and finds the last rows in
// the L2 cache.
// Options: STORE, THREADS (that sweep), CPT (columns of a thread), R (rows of a tile), RESIDENT (blocks a
// multiprocessor).
#include "bulk.cuh"

#define WARPS (THREADS / 32)
#define GT THREADS // that share a row
#define VPT (CPT / CHUNK)
#define LANES (32 / R) // lanes that hold the sum of one row
#define SLOTS 32       // most tiles in the ring
#define LETTERS 8      // that a clerk's lane waits for at once
#define HOLD 0         // entries are read twice

#include "entries_stored.cuh"
#include "tile_products.cuh"

struct Shared {
    uint64_t full[SLOTS], ready[SLOTS]; // mbarriers: the tile is there; all warps have left their products
};

#define RING_OFFSET (((int)sizeof(Shared) + 127) / 128 * 128)

// The warps' products of the tile in a slot: behind the ring
FN double *part_of(int slots, int bytes, int slot) {
    return (double *)(memory + RING_OFFSET + slots * bytes) + slot * R * WARPS;
}

struct Pass {
    const real *kernel;
    int64_t m, ld;
    int64_t strips, slice, slots, lag; // blocks of a stream, columns of each; tiles of a ring, u behind the products
    const double *v, *base;
    const int64_t *starts; // v is a product of factors (Product, mapuot/backends/kernel.py): where each begins in v
    int64_t axes;          // so many; 0: v is there
    const int64_t *own;    // rank (common.cuh) of what base is less by; 0: nothing
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

// The product of the factors of column j, 0 below flush
__device__ __noinline__ double product_at(const Pass &P, int64_t j) {
    double v = 1;
    for (int k = (int)P.axes - 1; k > 0; k--) {
        const int64_t first = P.starts[k], n = P.starts[k + 1] - first;
        const int64_t next = P.ld >> 32 ? j / n : (uint32_t)j / (uint32_t)n; // one of 64 bits takes ten times as long
        v *= P.v[first + j - next * n];
        j = next;
    }
    v *= P.v[j];
    return v < P.flush ? 0 : v;
}

// The first row of the tile of a step
FN int64_t row_at(const Part &g, int step) { return (g.first + (g.back ? g.tiles - 1 - step : step)) * R; }

// One thread starts the copy of a tile; a row beyond the last is the last one, whose u is 0.
FN void fetch(const Pass &P, const Part &g, int step, int slot) {
    const int64_t row = row_at(g, step);
    const uint32_t bytes = g.columns * (uint32_t)sizeof(real),
                   to = shared_address(memory) + RING_OFFSET + slot * g.bytes;
    const uint32_t full = shared_address(((Shared *)memory)->full + slot);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes * R) : "memory");
    UNROLLED (int q = 0; q < R; q++)
        copy_in(to + q * bytes, P.kernel + (row + q < P.m ? row + q : P.m - 1) * P.ld + g.column, bytes, full);
}

// The sum over the strips of this lane's row, once all are posted
FN double whole_row(const double *from, int strips, int lane) {
    double sum = 0;
    for (int first = lane % LANES; first < strips; first += LANES * LETTERS) {
        double x[LETTERS];
        UNROLLED (int i = 0; i < LETTERS; i++) x[i] = first + i * LANES < strips ? posted(from + first + i * LANES) : 0;
        UNROLLED (int i = 0; i < LETTERS; i++) {
            while (is_unset(x[i])) x[i] = posted(from + first + i * LANES);
            sum += x[i];
        }
    }
    __syncwarp();
    return warp_sum<LANES>(sum);
}

// u of the rows of every strips-th step
FN void clerk(const Pass &P, const Part &g, int strip) {
    const int lane = threadIdx.x % 32;
    const double own = P.own ? number_of(*P.own) : 0;
    for (int step = strip; step < g.tiles; step += P.strips) {
        const int64_t i = row_at(g, step) + lane / LANES;
        const double base = i < P.m ? P.base[i] - own : 0;
        const double s = whole_row(P.part + i * P.strips, (int)P.strips, lane);
        const double u = i < P.m ? WIDEN * far_exp(base - P.fi * far_log(s)) : 0;
        if (lane % LANES == 0) {
            post(P.scale + i, u);
            take_back(P.old_scale + i);
            if (i < P.m) P.s[i] = s;
        }
    }
}

// The products of a warp's columns of a tile with v, for the courier
FN void leave_dots(const Entries &tile, int bytes, int slots, int slot, const double (&v)[CPT]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Shared &all = *(Shared *)memory;
    double s[R];
    tile_dots(tile, threadIdx.x, v, s);
    const double own = warp_sums<R>(s, lane);
    if (lane % LANES == 0) part_of(slots, bytes, slot)[lane / LANES * WARPS + warp] = own;
    __syncwarp();
    if (lane == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(all.ready + slot)) : "memory");
}

// The block's products of each tile, to its clerk.  Who has left those of a step has taken up the tile that the step
// before it did: its slot is free.
FN void courier(const Pass &P, const Part &g, int strip) {
    const int lane = threadIdx.x % 32, slots = (int)P.slots, lag = (int)P.lag;
    Shared &all = *(Shared *)memory;
    int slot = 0, left = slots - 1 - lag;
    uint32_t parity = 0;
    for (int step = 0; step < g.tiles; step++) {
        await(shared_address(all.ready + slot), (parity >> slot) & 1);
        parity ^= 1u << slot;
        double sum = 0;
        for (int p = lane % LANES; p < WARPS; p += LANES)
            sum += part_of(slots, g.bytes, slot)[lane / LANES * WARPS + p];
        sum = warp_sum<LANES>(sum);
        const int64_t at = (row_at(g, step) + lane / LANES) * P.strips + strip;
        if (lane % LANES == 0) {
            post(P.part + at, sum);
            take_back(P.old_part + at);
        }
        const int next = step - lag - 1 + slots;
        if (lane == 0 && step > lag && next < g.tiles) fetch(P, g, next, left);
        slot = slot + 1 < slots ? slot + 1 : 0;
        left = left + 1 < slots ? left + 1 : 0;
    }
}

// A warp's sweep
FN void sweep(const Pass &P, const Part &g, const double (&v)[CPT], double (&acc)[CPT]) {
    const int lane = threadIdx.x % 32, slots = (int)P.slots, lag = (int)P.lag;
    const uint32_t full = shared_address(((Shared *)memory)->full);
    const unsigned char *ring = memory + RING_OFFSET;
    int to = 0, from = 0;
    uint32_t parity = 0;
    double letter = 0;
    Entries tile;
    for (int step = 0; step < g.tiles + lag; step++) {
        const int late = step - lag;
        if (step < g.tiles) {
            await(full + to * 8, (parity >> to) & 1);
            parity ^= 1u << to;
            tile.open(ring + to * g.bytes, g.columns, threadIdx.x);
            leave_dots(tile, g.bytes, slots, to, v);
            to = to + 1 < slots ? to + 1 : 0;
        }
        if (late >= 0) {
            const double *at = P.scale + row_at(g, late) + lane / LANES;
            if (late == 0) letter = posted(at);
            while (is_unset(letter)) letter = posted(at);
            __syncwarp();
            tile.open(ring + from * g.bytes, g.columns, threadIdx.x);
            add_tile(tile, threadIdx.x, letter, acc);
            from = from + 1 < slots ? from + 1 : 0;
            if (late + 1 < g.tiles) // on its way beside the products of the next step
                letter = posted(P.scale + row_at(g, late + 1) + lane / LANES);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 64, RESIDENT)
    fused_pass(const __grid_constant__ Pass P, int back) {
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
    if (threadIdx.x == THREADS - 32) {
        for (int q = 0; q < SLOTS; q++) {
            const uint32_t full = shared_address(all.full + q), ready = shared_address(all.ready + q);
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full), "r"(1) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ready), "r"(WARPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
        for (int step = 0; step < P.slots && step < g.tiles; step++) fetch(P, g, step, step);
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x < THREADS + 32) courier(P, g, strip);
        else clerk(P, g, strip);
        return;
    }
    double v[CPT], acc[CPT];
    UNROLLED (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * THREADS + threadIdx.x) * CHUNK + c % CHUNK;
        v[c] = j < g.columns ? WIDEN * (P.axes ? product_at(P, g.column + j) : P.v[g.column + j]) : 0;
        acc[c] = 0;
    }
    sweep(P, g, v, acc);
    UNROLLED (int c = 0; c < CPT; c++) {
        const int j = (c / CHUNK * THREADS + threadIdx.x) * CHUNK + c % CHUNK;
        if (j < g.columns) P.sums[stream * P.ld + g.column + j] = acc[c];
    }
}

// The streams' sums, which may lie on those of the first
extern "C" __global__ void __launch_bounds__(256)
    join_streams(const double *sums, double *out, int64_t ld, int streams) {
    for (int64_t j = (int64_t)blockIdx.x * 256 + threadIdx.x; j < ld; j += (int64_t)gridDim.x * 256) {
        double total = sums[j];
        for (int q = 1; q < streams; q++) total += sums[q * ld + j];
        out[j] = total;
    }
}

extern "C" __global__ void ring_offset(int *out) { out[0] = RING_OFFSET; }
