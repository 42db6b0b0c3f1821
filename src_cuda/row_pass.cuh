// Mirrors src_c/kernels_tmpl.c (row_pass): s = K v, u = prox(s), sums += K^T u; K is read once.
//
// A group of GW warps owns consecutive tiles of R rows; its threads own CPT columns each, whose v and column sums
// stay in registers.  All free shared memory is one ring of tiles filled by bulk copies; the sweep turns round every
// pass, so the tiles that a pass leaves in the ring (and the L2 cache) are the first that the next one needs.
// In a cluster, each block owns a slice of the columns and the row sums are exchanged through distributed memory.
#ifndef ROW_PASS_CUH
#define ROW_PASS_CUH
#include "prox.cuh"

#define THREADS 512
#define GROUPS (16 / GW)             // groups of a block
#define GT (32 * GW)                 // threads of a group
#define VPT (CPT / CHUNK)            // 16-byte chunks of a thread
#define WIDTH (GT * CPT)             // columns that a group covers
#define LANES (32 / R)               // lanes that hold the sum of one row
#define PARTS (GW * CLUSTER)         // partial sums of a row
#define SLOTS 32                     // most tiles in the ring of a group

#if !KL_ROWS // out of line: the hot loop keeps its registers
__device__ __noinline__ double general_prox(const State &S, Point p, double s, double shift) {
    if (isinf(p.x)) return -INF;
    return prox(S.rows.kind, log(s) - p.x - shift, p.y, log(p.y), p.z, p.w, S.reg) - p.x - shift;
}

__device__ __noinline__ double general_dual(const State &S, Point p, double log_u, double shift) {
    return dual_term(S.rows.kind, S.reg * (log_u + p.x + shift), p.y, p.z, p.w);
}
#endif

// log u relative to K, from s = (K v)_i.
__device__ __forceinline__ double row_prox(const State &S, Point p, double s, double shift) {
#if KL_ROWS  // p = {base, fi, -rho, reg a}: log u = base - (1 - fi) shift - fi log s
    return p.x - (1 - p.y) * shift - p.y * log(s);
#else        // p = {d, t, rho, upper}, d = inf: left out
    return general_prox(S, p, s, shift);
#endif
}

// What the row adds to the row scalars; ROW_DUAL: the dual term where the translation does not scale it with the mass.
__device__ __forceinline__ void row_count(const State &S, Point p, double log_u, double u, double s, double shift,
                                          double *row) {
    const bool dead = !(s >= TINY), left_out = isinf(p.x);
    row[ROW_MASS] += u * s;
    row[ROW_SCALE] += u;
    row[ROW_DEAD] += dead && !left_out;
    if (dead || left_out) return;
#if KL_ROWS
    row[ROW_SOFT] += p.z * (u * s);
    row[ROW_DUAL] += p.w * log_u;
#else
    row[ROW_DUAL] += general_dual(S, p, log_u, shift);
#endif
}

// u of row i (0 where it is left out or dead); where `row` is given, the row is stored and counted there.
__device__ __forceinline__ double row_scale(const State &S, int i, Point p, double s, double shift, double *row) {
    if (i >= (int)S.m) return 0;
    const double log_u = s >= TINY ? row_prox(S, p, s, shift) : s == s ? -INF : s;
    const double u = exp(log_u < BOUND ? log_u : s == s ? BOUND : s);
    if (row) {
        S.u_log[i] = log_u;
        S.u_scale[i] = u;
        S.r[i] = u * s;
        row_count(S, p, log_u, u, s, shift, row);
    }
    return u;
}

#if PERSISTENT
// ---- mbarrier, bulk copy, cluster: sm_90
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void await(uint64_t *full, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" ::"r"(shared_address(full)), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_in(void *to, const void *from, uint32_t bytes, uint64_t *full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(full)) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t r = 0;
#if CLUSTER > 1
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
    return r;
}

__device__ __forceinline__ void group_barrier(int group) {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#elif GW == 1
    __syncwarp();
#else
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(GT) : "memory");
#endif
}

struct Ring {
    int first, tiles;          // tiles [first, first + tiles) of K belong to this group
    int slots, slot;           // size of the ring; where the next tile of the sweep lies
    bool forward;
    uint32_t parity;           // one bit a slot: phase of its last copy
    int column, columns;       // this block's slice of K
    int bytes;                 // of a tile
    unsigned char *tile;
    uint64_t *full;
};

// Start the copy of tile t (of this group) into a slot; one thread of the group calls.
__device__ __forceinline__ void fetch(const State &S, const Ring &g, int t, int slot) {
    const int64_t row = (int64_t)(g.first + t) * R;
    const int rows = (int)(S.m - row < R ? S.m - row : R);
    const uint32_t bytes = g.columns * (uint32_t)sizeof(real);
    unsigned char *to = g.tile + slot * g.bytes;
    const real *from = S.kernel + row * S.ld + g.column;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(g.full + slot)),
                 "r"(bytes * rows) : "memory");
#if CLUSTER > 1
    for (int r = 0; r < rows; r++) copy_in(to + r * bytes, from + r * S.ld, bytes, g.full + slot);
#else
    copy_in(to, from, bytes * rows, g.full + slot);
#endif
}

struct Exchange {
    double part[GROUPS][2][R * PARTS];
    double row[GROUPS][R][ROW_SCALARS];
};

// Put the sums of R rows of this warp where every warp of the group (and of the cluster) finds them.
__device__ __forceinline__ void publish(Exchange &x, int group, int phase, double s, int warp, int lane) {
    double *at = &x.part[group][phase][(lane / LANES) * PARTS + cluster_rank() * GW + warp];
#if CLUSTER > 1
    const int peer = lane % LANES;
    if (peer < CLUSTER) {
        uint32_t remote;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(at)), "r"(peer));
        asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(s) : "memory");
    }
#else
    if (lane % LANES == 0) *at = s;
#endif
}

__device__ __forceinline__ double gather(const Exchange &x, int group, int phase, int lane) {
    const double *from = &x.part[group][phase][(lane / LANES) * PARTS];
    double s = 0;
#pragma unroll
    for (int k = 0; k < (PARTS + LANES - 1) / LANES; k++)
        if (k * LANES + lane % LANES < PARTS) s += from[k * LANES + lane % LANES];
#pragma unroll
    for (int bit = LANES / 2; bit > 0; bit /= 2) s += __shfl_xor_sync(FULL, s, bit);
    return s;
}

// s_q = sum_j K_ij v_j over this thread's columns, for the R rows of a tile.
__device__ __forceinline__ void tile_dots(const unsigned char *tile, int columns, int thread, const double (&v)[CPT],
                                          double (&s)[R]) {
#pragma unroll
    for (int q = 0; q < R; q++) {
        const unsigned char *from = tile + q * columns * (int)sizeof(real);
        double even = 0, odd = 0;
#pragma unroll
        for (int c = 0; c < VPT; c++) {
            const int j = (c * GT + thread) * CHUNK;
            double k[CHUNK];
            if (j < columns) widen(*(const uint4 *)(from + j * (int)sizeof(real)), k);
            else
#pragma unroll
                for (int e = 0; e < CHUNK; e++) k[e] = 0;
#pragma unroll
            for (int e = 0; e < CHUNK; e += 2) {
                even = fma(k[e], v[c * CHUNK + e], even);
                odd = fma(k[e + 1], v[c * CHUNK + e + 1], odd);
            }
        }
        s[q] = even + odd;
    }
}

// acc_j += u_i K_ij; lane q LANES of every warp holds u of row q.
__device__ __forceinline__ void tile_sums(const unsigned char *tile, int columns, int thread, double u,
                                          double (&acc)[CPT]) {
#pragma unroll
    for (int q = 0; q < R; q++) {
        const unsigned char *from = tile + q * columns * (int)sizeof(real);
        const double uq = __shfl_sync(FULL, u, q * LANES);
#pragma unroll
        for (int c = 0; c < VPT; c++) {
            const int j = (c * GT + thread) * CHUNK;
            double k[CHUNK];
            if (j >= columns) continue;
            widen(*(const uint4 *)(from + j * (int)sizeof(real)), k);
#pragma unroll
            for (int e = 0; e < CHUNK; e++) acc[c * CHUNK + e] = fma(uq, k[e], acc[c * CHUNK + e]);
        }
    }
}

// The sweep over this group's tiles.  The slot of a tile is filled again one step later, when all warps have left it.
__device__ __forceinline__ void row_pass(const State &S, Ring &g, Exchange &x, int group, double shift,
                                         const double (&v)[CPT], double (&acc)[CPT]) {
    const int thread = threadIdx.x % GT, lane = threadIdx.x % 32, warp = thread / 32;
    const int step = g.forward ? 1 : -1;
    int t = g.forward ? 0 : g.tiles - 1, slot = g.slot, last = -1;
    for (int k = 0; k < g.tiles; k++, t += step) {
        const int i = (g.first + t) * R + lane / LANES, m = (int)S.m;
        const Point point = S.point[i < m ? i : m - 1];
        const unsigned char *tile = g.tile + slot * g.bytes;
        double s[R];
        await(g.full + slot, (g.parity >> slot) & 1);
        tile_dots(tile, g.columns, thread, v, s);
        publish(x, group, k & 1, warp_sums<R>(s, lane), warp, lane);
        group_barrier(group);
        const int ahead = t - step + step * g.slots;
        if (k > 0 && ahead >= 0 && ahead < g.tiles) {
            g.parity ^= 1u << last;
            if (thread == 0) fetch(S, g, ahead, last);
        }
        const double total = gather(x, group, k & 1, lane);
        const bool mine = warp == 0 && lane % LANES == 0 && cluster_rank() == 0;
        const double u = WIDEN * row_scale(S, i, point, total, shift, mine ? x.row[group][lane / LANES] : nullptr);
        tile_sums(tile, g.columns, thread, u, acc);
        last = slot;
        slot += step;
        slot = slot == g.slots ? 0 : slot < 0 ? g.slots - 1 : slot;
    }
    g.slot = last;
    g.forward = !g.forward;
}

// sums += acc, by bulk reductions of one warp's chunk at a time; stage: 32 CHUNK doubles of this warp.
__device__ __forceinline__ void add_sums(const State &S, const Ring &g, const double (&acc)[CPT], double *stage) {
    const int thread = threadIdx.x % GT, lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < VPT; c++) {
        const int first = (c * GT + thread - lane) * CHUNK, left = g.columns - first;
        const uint32_t bytes = (left < 32 * CHUNK ? left : 32 * CHUNK) * 8;
#pragma unroll
        for (int e = 0; e < CHUNK; e += 2)
            *(double2 *)(stage + lane * CHUNK + e) = make_double2(acc[c * CHUNK + e], acc[c * CHUNK + e + 1]);
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncwarp();
        if (lane == 0 && left > 0)
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f64 [%0], [%1], %2;\n"
                         "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::"l"(
                             S.sums + g.column + first), "r"(shared_address(stage)), "r"(bytes) : "memory");
        __syncwarp();
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
}
#endif
#endif
