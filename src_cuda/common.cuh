// Mirrors src_c/real.h and src_c/vec.h: how K is stored, read and summed on the device.
//
// K is stored as STORE (0 float64, 1 float32, 2 bfloat16; the numbers of mapuot_dtype) and every product and sum is
// float64.  K is never negative, so a stored float widens to float64 by two shifts of its bits, without a conversion:
// the result is K 2^-896 exactly (zeros and subnormals too), and v and u carry the factor WIDEN back.
// Options: STORE, GW (warps of a group), CPT (columns of a thread), R (rows of a tile), CLUSTER, KL_ROWS and
// KL_COLS (1: the side is KL or balanced).
#ifndef COMMON_CUH
#define COMMON_CUH

typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;

#if STORE == 0
typedef double real;
#define WIDEN 1.0
#elif STORE == 1
typedef float real;
#define WIDEN 0x1p896
#else
typedef unsigned short real;
#define WIDEN 0x1p896
#endif

#define CHUNK (16 / (int)sizeof(real))  // entries of one 16-byte chunk
#define INF __longlong_as_double(0x7ff0000000000000LL)
#define FULL 0xffffffffu
#define TINY 2.3e-308  // a sum below it is dead
#define BOUND 85.0     // log of the largest scale: times WIDEN it is finite

struct alignas(16) Point { double x, y, z, w; };

// The entries of one chunk of K, times 2^-896 where K is not float64.
__device__ __forceinline__ void widen(const uint4 &w, double (&k)[CHUNK]) {
    const uint32_t x[4] = {w.x, w.y, w.z, w.w};
#if STORE == 0
    k[0] = __hiloint2double(x[1], x[0]);
    k[1] = __hiloint2double(x[3], x[2]);
#elif STORE == 1
#pragma unroll
    for (int i = 0; i < 4; i++) k[i] = __hiloint2double(x[i] >> 3, x[i] << 29);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        k[2 * i] = __hiloint2double((x[i] & 0xffffu) << 13, 0);
        k[2 * i + 1] = __hiloint2double((x[i] >> 16) << 13, 0);
    }
#endif
}

// One entry rounded to the storage of K (nearest, ties to even).
__device__ __forceinline__ real narrow(double x) {
#if STORE == 0
    return x;
#elif STORE == 1
    return (float)x;
#else
    const uint32_t w = __float_as_uint((float)x);
    return (real)((w + 0x7fffu + ((w >> 16) & 1u)) >> 16);
#endif
}

__device__ __forceinline__ double entry(real k) {
#if STORE == 2
    return (double)__uint_as_float((uint32_t)k << 16);
#else
    return (double)k;
#endif
}

// Sums over a warp of N values held by every lane: lane l returns the sum of value l / (32 / N).
template <int N>
__device__ __forceinline__ double warp_sums(double (&x)[N], int lane) {
#pragma unroll
    for (int half = N / 2, bit = 16; half > 0; half /= 2, bit /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) {
            const bool up = lane & bit;
            const double give = up ? x[i] : x[i + half];
            x[i] = (up ? x[i + half] : x[i]) + __shfl_xor_sync(FULL, give, bit);
        }
    double s = x[0];
#pragma unroll
    for (int bit = 16 / N; bit > 0; bit /= 2) s += __shfl_xor_sync(FULL, s, bit);
    return s;
}

__device__ __forceinline__ double warp_sum(double s) {
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) s += __shfl_xor_sync(FULL, s, bit);
    return s;
}

__device__ __forceinline__ double warp_max(double s) {
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) s = fmax(s, __shfl_xor_sync(FULL, s, bit));
    return s;
}

// All blocks of the grid meet; what they wrote to global memory before is visible after (read it with __ldcg).
// The counter only grows, so thread 0 knows from meeting_start on at which count each meeting ends.
__device__ __forceinline__ uint32_t meeting_start(const uint32_t *counter) {
    return *(const volatile uint32_t *)counter / gridDim.x * gridDim.x;
}

__device__ __forceinline__ void grid_barrier(uint32_t *counter, uint32_t &ended) {
    __syncthreads();
    ended += gridDim.x;
    if (threadIdx.x == 0) {
        uint32_t now;
        asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        while ((int)(now - ended) < 0);
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
    __syncthreads();
}

#endif
