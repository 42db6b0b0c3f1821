// Float32 sums of points.cuh where points have more coordinates than a thread holds: all pairs, no mask, as a product of
// matrices.
//
// A block sums TILE points over TILE others at a time, EACH x EACH pairs a thread.  Coordinates come DEPTH at a time into
// shared memory, while those before are in use, so that 4 loads of 16 bytes serve 64 operations.  A pair's sum over the
// coordinates has the same order for the rows and for the columns, so that both have the same bits of K_ij.
// Option: DEPTH (coordinates at a time, of which `d` is a multiple; 0: points.cuh makes these sums).
#ifndef POINT_TILES_CUH
#define POINT_TILES_CUH
#define TILE 128
#define EACH 8
#define QUADS (TILE / 4)
#define TILES_SHORT 8 // tiles whose products a thread adds up in float32

struct Coordinates {
    float4 to[DEPTH][QUADS], from[DEPTH][QUADS];
};

// 16 bytes from global to shared memory; they are there for all after all_here and a barrier
__device__ __forceinline__ void bring(float4 *to, const float *from)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"l"(__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *to = *(const float4 *)from;
#endif
}

__device__ __forceinline__ void all_here()
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Those from k0 on of TILE points on either side, by warps of a coordinate each
__device__ __forceinline__ void bring(Coordinates &here, const float *to, int64_t to_ld, const float *from,
                                      int64_t from_ld, int64_t k0)
{
    const int warp = threadIdx.x / 32, quad = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < (DEPTH + 7) / 8; q++) {
        const int k = warp + 8 * q;
        if (DEPTH % 8 == 0 || k < DEPTH) {
            bring(&here.to[k][quad], to + (k0 + k) * to_ld + 4 * quad);
            bring(&here.from[k][quad], from + (k0 + k) * from_ld + 4 * quad);
        }
    }
}

// A thread's EACH of TILE numbers: 4 from 4 part on, and 4 in the other half
__device__ __forceinline__ void own_of(const float4 *all, int part, float (&mine)[EACH])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 q = all[part + half * (QUADS / 2)];
        mine[4 * half] = q.x, mine[4 * half + 1] = q.y, mine[4 * half + 2] = q.z, mine[4 * half + 3] = q.w;
    }
}

// sum += what DEPTH coordinates add
__device__ __forceinline__ void add_coordinates(const Coordinates &here, int to_part, int from_part,
                                                float (&sum)[EACH][EACH])
{
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        float x[EACH], y[EACH];
        own_of(here.to[k], to_part, x);
        own_of(here.from[k], from_part, y);
#pragma unroll
        for (int q = 0; q < EACH; q++)
#pragma unroll
            for (int e = 0; e < EACH; e++)
                sum[q][e] = grown(sum[q][e], x[q], y[e]);
    }
}

// acc_q += sum_e w_e K_qe
__device__ __forceinline__ void add_products(const float (&sum)[EACH][EACH], const float4 *to_log,
                                             const float4 *from_log, const float4 *weight, int to_part, int from_part,
                                             float (&acc)[EACH])
{
    float own[EACH], log[EACH], w[EACH];
    own_of(to_log, to_part, own);
    own_of(from_log, from_part, log);
    own_of(weight, from_part, w);
#pragma unroll
    for (int q = 0; q < EACH; q++)
#pragma unroll
        for (int e = 0; e < EACH; e++)
            acc[q] += w[e] * power_of(exponent_of(own[q] + log[e], sum[q][e], 1));
}

// The arrays have room for whole tiles, but `weight`.
extern "C" __global__ void __launch_bounds__(256, 2)
    tile_sums(const __grid_constant__ State S, int parity, const float *to, int64_t to_ld, const float *to_log,
              const float *from, const float *from_log, const float *weight, double *out, int64_t count, int64_t others,
              int64_t d, double, const int64_t *, const int *, int64_t from_ld, const __grid_constant__ mapuot_mask)
{
    __shared__ Coordinates here[2];
    __shared__ float4 own_log[QUADS], log[QUADS], w[QUADS];
    if (stopped(S, parity))
        return;
    const int from_part = threadIdx.x % 16, to_part = threadIdx.x / 16, chunks = (int)(d / DEPTH);
    const int64_t i0 = (int64_t)blockIdx.x * TILE, tiles = (others + TILE - 1) / TILE;
    const int first = (int)(tiles * blockIdx.y / gridDim.y), end = (int)(tiles * (blockIdx.y + 1) / gridDim.y);
    float acc[EACH] = {};
    double total = 0;
    if (threadIdx.x < TILE)
        ((float *)own_log)[threadIdx.x] = to_log[i0 + threadIdx.x];
    bring(here[0], to + i0, to_ld, from + (int64_t)first * TILE, from_ld, 0);
    all_here();
    for (int tile = first, step = 0; tile < end; tile++) {
        const int64_t j = (int64_t)tile * TILE + threadIdx.x;
        float sum[EACH][EACH] = {};
        __syncthreads(); // the logarithms and weights of the tile before are read
        if (threadIdx.x < TILE) {
            ((float *)log)[threadIdx.x] = from_log[j];
            ((float *)w)[threadIdx.x] = j < others ? weight[j] : 0;
        }
        for (int chunk = 0; chunk < chunks; chunk++, step++) {
            const bool last = chunk + 1 == chunks;
            __syncthreads(); // these coordinates are here, and those before are read
            if (!last || tile + 1 < end)
                bring(here[(step + 1) % 2], to + i0, to_ld, from + (int64_t)(tile + last) * TILE, from_ld,
                      last ? 0 : (int64_t)(chunk + 1) * DEPTH);
            add_coordinates(here[step % 2], to_part, from_part, sum);
            all_here();
        }
        add_products(sum, own_log, log, w, to_part, from_part, acc);
        if ((tile - first) % TILES_SHORT == TILES_SHORT - 1 || tile + 1 == end) {
            total += warp_sums<EACH, 8>(acc, threadIdx.x);
#pragma unroll
            for (int q = 0; q < EACH; q++)
                acc[q] = 0;
        }
    }
    const int q = from_part / 2;
    const int64_t i = i0 + q / 4 * (TILE / 2) + 4 * to_part + q % 4;
    if (from_part % 2 == 0 && i < count)
        out[blockIdx.y * count + i] = total;
}
#endif
