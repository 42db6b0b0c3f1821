// Mirrors src_c/real.h and src_c/vec.h: the storage of K, and reads and sums of it on the device.
//
// K is stored as STORE (0 float64, 1 float32; the numbers of mapuot_dtype).  NARROW 1: products and sums of a pass are
// in float32, as in narrow_pass; 0: all are in float64.  K is never negative, so a stored float widens to float64 by
// two shifts of its bits, without a conversion: the result is K 2^-896 exactly (zeros and subnormals too), and v and u
// carry the factor WIDEN back. IN_PLACE 1: the entries are the plan's and may have any size, so they are used
// unchanged. Options: STORE, COST (of M: 0 float64, 1 float32), NARROW, GW (warps of a group), CPT (columns of a
// thread), R (rows of a tile), CLUSTER, KL_ROWS and KL_COLS (1: the side is KL or balanced), SPREAD (1: a row is spread
// over the warps of a cluster), ORDERED (1: sums over blocks in a fixed order, bitwise repeatable), RACECHECK (1: the
// whole block meets where a group would, which compute-sanitizer can follow; for problems that give every group as many
// tiles).
#include "words.cuh"

typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;

#pragma option NARROW 0
#pragma option IN_PLACE 0
#pragma option SPREAD 0
#pragma option ORDERED 0
#pragma option RACECHECK 0
#pragma option COST 0

template <bool WIDE> struct floating {
    typedef double type;
};
template <> struct floating<false> {
    typedef float type;
};
typedef floating<STORE == 0>::type real;
typedef floating<!NARROW>::type num; // type of products and sums of a pass
typedef floating<COST == 0>::type cost;

#define WIDEN ((num)(STORE == 0 || NARROW || IN_PLACE ? 1.0 : 0x1p896))
#define CHUNK (16 / (int)sizeof(real)) // entries of one 16-byte chunk
#define INF __longlong_as_double(0x7ff0000000000000LL)
#define FULL 0xffffffffu
#define LOG2E 1.4426950408889634
#define LN2 0.6931471805599453
#define TINY 2.3e-308                                // a sum below it is dead
#define BOUND (STORE == 0 && !NARROW ? 691.0 : 85.0) // log of the largest scale: its sums, times WIDEN, are finite

struct alignas(16) Point {
    double x, y, z, w;
};

// The entries of one chunk of K; widened to float64 they are times 2^-896, unless K is float64.
FN void widen(const uint4 &w, num (&k)[CHUNK]) {
    const uint32_t x[4] = {w.x, w.y, w.z, w.w};
#if STORE == 0
    k[0] = __hiloint2double(x[1], x[0]);
    k[1] = __hiloint2double(x[3], x[2]);
#else
    UNROLLED (int i = 0; i < 4; i++)
#if NARROW
        k[i] = __uint_as_float(x[i]);
#elif IN_PLACE
        k[i] = (double)__uint_as_float(x[i]);
#else
        k[i] = __hiloint2double(x[i] >> 3, x[i] << 29);
#endif
#endif
}

// Out of line: instructions that run once a pass come from the L2 cache, some 2.4 cycles each, so keep them few.
__device__ __noinline__ double far_exp(double x) { return exp(x); }
__device__ __noinline__ double far_log(double x) { return log(x); }
__device__ __noinline__ double2 far_logs(double x, double y) { return make_double2(log(x), log(y)); }
__device__ __noinline__ double2 far_exps(double x, double y) { return make_double2(exp(x), exp(y)); }

// 1 / x for normal x > 0, to rounding, without a slow path
FN double inverse(double x) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    y = fma(y, fma(-x, y, 1.0), y);
    return fma(y, fma(-x, y, 1.0), y);
}

// 2^t and the root of t in one instruction, which errs in the last bits and flushes subnormal numbers to 0
FN float power_of(float t) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    return e;
}

FN float root_of(float t) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(t));
    return root;
}

// Copy a record that all threads share, to or from global memory, 8 bytes a thread.
template <typename T> FN void copy_record(T *to, const T *from) {
    for (int q = threadIdx.x; q < (int)(sizeof(T) / 8); q += blockDim.x) ((double *)to)[q] = ((const double *)from)[q];
}

// The sum and the maximum over N neighbouring lanes, returned to each of them
template <int N = 32, typename T> FN T warp_sum(T s) {
    UNROLLED (int bit = N / 2; bit > 0; bit /= 2) s += __shfl_xor_sync(FULL, s, bit);
    return s;
}

template <int N = 32> FN double warp_max(double s) {
    UNROLLED (int bit = N / 2; bit > 0; bit /= 2) s = fmax(s, __shfl_xor_sync(FULL, s, bit));
    return s;
}

// Reduce x over a block of full warps, for all its threads: ``join`` reduces within a warp, then the warps' results (at
// most 32)
template <typename F> __device__ double of_block(double x, double none, F join) {
    __shared__ double of_warp[32];
    const int lane = threadIdx.x % 32;
    x = join(x);
    __syncthreads(); // the last result has been read
    if (lane == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    return join(lane < (int)blockDim.x / 32 ? of_warp[lane] : none);
}

__device__ double block_max(double x) {
    return of_block(x, -INF, [](double y) { return warp_max(y); });
}

__device__ double block_sum(double x) {
    return of_block(x, 0, [](double y) { return warp_sum(y); });
}

// Sums over a warp of N values held by every lane: lane l returns the sum of value l / (32 / N).
template <int N, int BIT = 16, typename T> FN T warp_sums(T *x, int lane) {
    if constexpr (N > 1) {
        UNROLLED (int i = 0; i < N / 2; i++) {
            const T low = x[i], high = x[i + N / 2];
            x[i] = (lane & BIT ? high : low) + __shfl_xor_sync(FULL, lane & BIT ? low : high, BIT);
        }
        return warp_sums<N / 2, BIT / 2>(x, lane);
    } else {
        return warp_sum<2 * BIT>(x[0]);
    }
}

// An integer with the order of the doubles, for atomicMax, and its inverse
FN int64_t rank_of(double x) {
    const int64_t bits = __double_as_longlong(x);
    return bits ^ ((bits >> 63) & 0x7fffffffffffffffLL);
}

FN double number_of(int64_t rank) { return __longlong_as_double(rank ^ ((rank >> 63) & 0x7fffffffffffffffLL)); }

// All blocks of the grid meet. Their earlier writes to global memory are visible afterwards (read them with __ldcg).
// The counter only grows: from meeting_start on thread 0 knows the count that ends each meeting.
FN uint32_t meeting_start(const uint32_t *counter) {
    return *(const volatile uint32_t *)counter / gridDim.x * gridDim.x;
}

#if SPARSE && CLUSTER > 1 // the grid is one cluster: its barrier takes a quarter of the time
FN void grid_arrive(uint32_t *, uint32_t &) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

FN void grid_wait(const uint32_t *, uint32_t) { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#else
// Work between arriving and waiting must not touch data that other blocks read or write, and excludes the last warp.
FN void grid_arrive(uint32_t *counter, uint32_t &ended) {
    __syncthreads();
    ended += gridDim.x;
    if (threadIdx.x == blockDim.x - 32)
        asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

FN void grid_wait(const uint32_t *counter, uint32_t ended) {
    if (threadIdx.x == blockDim.x - 32) {
        uint32_t now;
        do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        while ((int)(now - ended) < 0);
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
    __syncthreads();
}
#endif

FN void grid_barrier(uint32_t *counter, uint32_t &ended) {
    grid_arrive(counter, ended);
    grid_wait(counter, ended);
}

// If every block waits for numbers of the others, no meeting is needed. A word not posted yet
// holds UNSET (a double in its high half), a NaN with bits that no arithmetic returns, and is read until it changes.
#define UNSET 0xfff4fff4u

template <typename T> FN bool is_unset(T x) {
    if constexpr (sizeof(T) == 8) return (uint32_t)__double2hiint(x) == UNSET;
    else return __float_as_uint(x) == UNSET;
}

FN void post(double *to, double x) { asm volatile("st.relaxed.gpu.global.f64 [%0], %1;" ::"l"(to), "d"(x) : "memory"); }

FN void post(float *to, float x) { asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory"); }

template <typename T> FN void take_back(T *to) {
    if constexpr (sizeof(T) == 8) post(to, __hiloint2double(UNSET, 0));
    else post(to, __uint_as_float(UNSET));
}

FN double posted(const double *from) {
    double x;
    asm volatile("ld.relaxed.gpu.global.f64 %0, [%1];" : "=d"(x) : "l"(from) : "memory");
    return x;
}

// 16 bytes
FN void posted(const double *from, double *x) {
    asm volatile("ld.relaxed.gpu.global.v2.f64 {%0, %1}, [%2];" : "=d"(x[0]), "=d"(x[1]) : "l"(from) : "memory");
}

FN void posted(const float *from, float *x) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "l"(from)
                 : "memory");
}
