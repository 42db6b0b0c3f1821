// Mirrors src_c/solver.c (mapuot_iterate): many passes in one cooperative launch, one block a multiprocessor, sm_90+.
//
// row_pass, then the O(n) finish_pass spread over all blocks; three meetings of the grid a pass.  K stays in flight or
// in shared memory from the first pass to the last.  Every block holds the same Progress and stops at the same pass.
#define PERSISTENT 1
#include "row_pass.cuh"
#include "finish_pass.cuh"

struct Shared {
    Finish finish;
    Exchange exchange;
    uint64_t full[GROUPS][SLOTS];
    alignas(128) double stage[16][32 * CHUNK];
};

#define RING_OFFSET (((int)sizeof(Shared) + 127) / 128 * 128)

// This block's share of the tiles and of shared memory; everything is zeroed once, so that no stale NaN is ever read.
__device__ __forceinline__ Ring ring_open(const State &S, unsigned char *memory, int slots, int group) {
    Shared &all = *(Shared *)memory;
    const int clusters = gridDim.x / CLUSTER, owner = (int)(blockIdx.x / CLUSTER) * GROUPS + group;
    const int64_t tiles = (S.m + R - 1) / R, owners = (int64_t)clusters * GROUPS;
    Ring g;
    g.first = (int)(tiles * owner / owners);
    g.tiles = (int)(tiles * (owner + 1) / owners) - g.first;
    g.slots = slots;
    g.slot = 0;
    g.forward = true;
    g.parity = 0;
    const int slice = (int)((S.ld / 16 + CLUSTER - 1) / CLUSTER * 16); // at most WIDTH
    g.column = cluster_rank() * slice;
    g.columns = (int)(S.ld - g.column < slice ? S.ld - g.column : slice);
    g.bytes = R * slice * (int)sizeof(real);
    g.tile = memory + RING_OFFSET + (int64_t)group * slots * g.bytes;
    g.full = all.full[group];
    uint4 *words = (uint4 *)(memory + RING_OFFSET);
    for (int q = threadIdx.x; q < GROUPS * slots * g.bytes / 16; q += THREADS) words[q] = make_uint4(0, 0, 0, 0);
    for (int q = threadIdx.x; q < GROUPS * R * ROW_SCALARS; q += THREADS) ((double *)all.exchange.row)[q] = 0;
    if (threadIdx.x < GROUPS * SLOTS)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address((uint64_t *)all.full + threadIdx.x))
                     : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    __syncthreads();
    return g;
}

// v of this thread's columns; other blocks wrote it, so L1 is passed by.
__device__ __forceinline__ void load_v(const State &S, const Ring &g, double (&v)[CPT]) {
#pragma unroll
    for (int c = 0; c < VPT; c++) {
        const int j = (c * GT + threadIdx.x % GT) * CHUNK;
#pragma unroll
        for (int e = 0; e < CHUNK; e += 2) {
            double2 x = make_double2(0, 0);
            if (j < g.columns) x = __ldcg((const double2 *)(S.v_scale + g.column + j + e));
            v[c * CHUNK + e] = x.x * WIDEN;
            v[c * CHUNK + e + 1] = x.y * WIDEN;
        }
    }
}

__device__ __forceinline__ void add_row_scalars(const State &S, Exchange &x) {
    __syncthreads();
    if (threadIdx.x < ROW_SCALARS) {
        double total = 0;
        for (int q = 0; q < GROUPS * R; q++) {
            double *row = (double *)x.row + q * ROW_SCALARS + threadIdx.x;
            total += *row;
            *row = 0;
        }
        if (total != 0) atomicAdd(S.row_scalars + threadIdx.x, total);
    }
}

#if CLUSTER > 1
#define SHAPE __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
#else
#define SHAPE __launch_bounds__(THREADS, 1)
#endif

extern "C" __global__ void SHAPE iterate(const __grid_constant__ State S, int slots, int count, int bare) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared &all = *(Shared *)memory;
    Finish &F = all.finish;
    const int group = threadIdx.x / GT, thread = threadIdx.x % GT;
    uint32_t ended = meeting_start(S.barrier);
    Ring g = ring_open(S, memory, slots, group);
    copy_record(&F.p, S.progress);
    if (threadIdx.x == 0) F.parity = 0;
#if CLUSTER > 1
    group_barrier(group);
#endif
    if (thread == 0)
        for (int t = 0; t < g.slots && t < g.tiles; t++) fetch(S, g, t, t);
    __syncthreads();
    for (int pass = 0; pass < count; pass++) {
        if (g.tiles) {
            double v[CPT], acc[CPT];
            load_v(S, g, v);
#pragma unroll
            for (int c = 0; c < CPT; c++) acc[c] = 0;
            row_pass(S, g, all.exchange, group, F.p.shift, v, acc);
            add_sums(S, g, acc, all.stage[threadIdx.x / 32]);
        }
        add_row_scalars(S, all.exchange);
        if (threadIdx.x / 32 == 1) finish_next(S, F);
        grid_barrier(S.barrier, ended);
        if (bare) continue; // benchmarks: the row half and its meeting alone
        finish_begin(S, F);
        finish_columns(S, F, blockIdx.x);
        grid_barrier(S.barrier, ended);
        finish_scalars(S, F);
        finish_advance(S, F, blockIdx.x, 0);
        if (blockIdx.x == 0 && threadIdx.x < ROW_SCALARS) S.row_scalars[threadIdx.x] = 0;
        if (blockIdx.x == 0) copy_record(S.trace + pass, &F.trace);
        grid_barrier(S.barrier, ended);
        if (F.p.status != RUNNING) break;
    }
    if (blockIdx.x == 0) copy_record(S.progress, &F.p);
#if CLUSTER > 1
    group_barrier(group); // no block leaves while a peer may still write to it
#endif
}

extern "C" __global__ void iterate_sizes(int *out) { out[0] = RING_OFFSET; }
