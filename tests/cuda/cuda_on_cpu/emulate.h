// CUDA C++ as C++ of this machine, for tests without a GPU: threads are fibers that change where CUDA's wait for
// others, at barriers, shuffles and polls.  The blocks of a cooperative launch live side by side, others run one after
// the other, so that __shared__ can be static.  Bulk copies are made at once; PTX is replaced in the text
// (cupy/__init__.py).
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

using std::isfinite, std::isinf, std::isnan;
#define int64_t device_int64 // CUDA's long long is not this machine's
#define uint64_t device_uint64
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct dim3 {
    unsigned x, y, z;
};
struct float2 {
    float x, y;
};
struct double2 {
    double x, y;
};
struct double3 {
    double x, y, z;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static float2 make_float2(float x, float y) { return {x, y}; }
static double2 make_double2(double x, double y) { return {x, y}; }
static double3 make_double3(double x, double y, double z) { return {x, y, z}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From> static To bits(From x) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

static double __longlong_as_double(long long x) { return bits<double>(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static int __float_as_int(float x) { return bits<int>(x); }
static float __int_as_float(int x) { return bits<float>(x); }
static int __double2hiint(double x) { return (int)(bits<unsigned long long>(x) >> 32); }
static int __double2loint(double x) { return (int)bits<unsigned long long>(x); }
static double __hiloint2double(unsigned hi, unsigned lo) { return bits<double>((unsigned long long)hi << 32 | lo); }
static double rsqrt(double x) { return 1 / sqrt(x); }
static double __dmul_rn(double x, double y) { return x * y; }
template <typename T> static T __ldg(const T *p) { return *p; }
template <typename T> static T __ldcg(const T *p) { return *p; }
template <typename T> static T atomicAdd(T *p, T x) { return (*p += x) - x; }
template <typename T> static T atomicCAS(T *p, T from, T to) {
    const T was = *p;
    *p = was == from ? to : was;
    return was;
}
template <typename T> static T atomicMax(T *p, T x) { return *p = x > *p ? x : *p; }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static long long __double_as_longlong(double x) { return bits<long long>(x); }

// ---- fibers

struct Barrier {
    int count = 0;
    long turn = 0;
};

struct Warp {
    Barrier barrier;
    int live = 0;
    alignas(16) char slot[32][16];
};

struct Block {
    dim3 index;
    int live = 0;
    Barrier whole, named[16];
    std::vector<Warp> warps;
    int vote[2] = {0, 0};
    unsigned char *shared;
};

struct Fiber {
    ucontext_t context; // its first turn starts here, the others at `place`: swapcontext asks the system each time
    jmp_buf place;
    bool begun = false;
    Block *block;
    dim3 index;
    int id;
    Barrier *at = nullptr; // the barrier it waits for, and since which phase of it
    long turn = 0;
    bool done = false;
    int votes = 0;
};

static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Fiber *self;
static jmp_buf home;
static dim3 blockDim, gridDim;
static void (*body)(void *);
static void *arguments;

#define threadIdx (self->index)
#define blockIdx (self->block->index)

static void change() {
    if (!_setjmp(self->place)) _longjmp(home, 1);
}

static void resume(Fiber &f) {
    self = &f;
    if (_setjmp(home)) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.context);
}

static bool opened(Barrier &b, int expected) {
    if (b.count != expected) return false;
    b.count = 0;
    b.turn++;
    return true;
}

static void meet(Barrier &b, int expected) {
    ++b.count;
    if (opened(b, expected)) return;
    self->at = &b;
    self->turn = b.turn;
    change();
}

static void leave(Barrier &b, int expected) {
    if (expected > 0) opened(b, expected);
}

static Warp &own_warp() { return self->block->warps[self->id / 32]; }
static void __syncthreads() { meet(self->block->whole, self->block->live); }

static int __syncthreads_or(int x) {
    int *vote = self->block->vote, now = self->votes++ % 2;
    vote[now] |= x != 0;
    __syncthreads();
    vote[1 - now] = 0;
    const int any = vote[now];
    __syncthreads();
    return any;
}

static void __syncwarp() { meet(own_warp().barrier, own_warp().live); }
static void named_barrier(int id, int expected) { meet(self->block->named[id], expected); }

static void cluster_barrier(int size) {
    Block &first = blocks[self->block->index.x / size * size];
    meet(first.named[15], size * (int)blockDim.x);
}

// translate an address of the own shared memory into block `rank` of the own cluster
static void *in_cluster(int size, unsigned address, int rank) {
    return blocks[self->block->index.x / size * size + rank].shared + address;
}

static size_t __cvta_generic_to_shared(const void *p) { return (const unsigned char *)p - self->block->shared; }
static void *from_shared(unsigned address) { return self->block->shared + address; }

// an mbarrier's word: arrivals of a phase, and all so far
struct Arrivals {
    unsigned each, all;
};

static void mbarrier_init(void *at, unsigned each) { *(Arrivals *)at = {each, 0}; }
static void mbarrier_arrive(void *at) { ((Arrivals *)at)->all++; }
static bool mbarrier_in_phase(const void *at, unsigned parity) {
    const volatile Arrivals *x = (const volatile Arrivals *)at;
    return (x->all / x->each & 1) == parity;
}

template <typename T> static T shuffled(T x, int from) {
    Warp &w = own_warp();
    T y;
    memcpy(w.slot[self->id % 32], &x, sizeof x);
    meet(w.barrier, w.live);
    memcpy(&y, w.slot[from & 31], sizeof y);
    meet(w.barrier, w.live);
    return y;
}

template <typename T> static T __shfl_sync(unsigned, T x, int from, int width = 32) {
    return shuffled(x, (self->id & -width) | (from & (width - 1)));
}

template <typename T> static T __shfl_xor_sync(unsigned, T x, int bit) { return shuffled(x, self->id % 32 ^ bit); }

static unsigned __ballot_sync(unsigned, bool x) {
    Warp &w = own_warp();
    unsigned all = 0;
    w.slot[self->id % 32][0] = x;
    meet(w.barrier, w.live);
    for (int lane = 0; lane < 32; lane++) all |= (unsigned)(w.slot[lane][0] != 0) << lane;
    meet(w.barrier, w.live);
    return all;
}

static bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
static bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }

// ---- tensor cores

static unsigned short short_of_float(float x) { return bits<unsigned short>((_Float16)x); }
static float float_of_short(unsigned short h) { return (float)bits<_Float16>(h); }

// one of the two float16 numbers in a word
static float part_of(unsigned word, int k) { return float_of_short((unsigned short)(word >> 16 * k)); }

// words of lanes 4 first .. 4 first + 3 and 4 second .. 4 second + 3, `count` of each
static void words_of_lanes(const unsigned *own, int count, int first, int second, unsigned (*found)[4]) {
    Warp &w = own_warp();
    memcpy(w.slot[self->id % 32], own, 4 * count);
    meet(w.barrier, w.live);
    for (int q = 0; q < 8; q++) memcpy(found[q], w.slot[4 * (q < 4 ? first : second) + q % 4], 4 * count);
    meet(w.barrier, w.live);
}

// mma.m16n8k16: sum (16 x 8) += x (16 x 16) y (16 x 8), with the parts of the lanes as in the PTX manual
static void multiply_tiles(float *sum, const unsigned *x, unsigned y0, unsigned y1) {
    const int lane = self->id % 32, row = lane / 4, column = 2 * (lane % 4);
    const unsigned y[2] = {y0, y1};
    unsigned a[8][4], b[8][4];
    words_of_lanes(x, 4, row, row, a);
    words_of_lanes(y, 2, column, column + 1, b);
    for (int k = 0; k < 16; k++)
        for (int q = 0; q < 4; q++) {
            const int of = k % 8 / 2; // the lane, of four, that has coordinate k
            sum[q] += part_of(a[of][q / 2 + 2 * (k / 8)], k % 2) * part_of(b[of + 4 * (q % 2)][k / 8], k % 2);
        }
}

// mma.m16n8k16 of float64
static void multiply_doubles(double *sum, const double *x, const double *y) {
    const int lane = self->id % 32, row = lane / 4, column = 2 * (lane % 4);
    for (int k = 0; k < 16; k++) {
        double a[2], b[2];
        for (int h = 0; h < 2; h++) a[h] = shuffled(x[k / 4 * 2 + h], row * 4 + k % 4);
        for (int e = 0; e < 2; e++) b[e] = shuffled(y[k / 4], (column + e) * 4 + k % 4);
        for (int q = 0; q < 4; q++) sum[q] = fma(a[q / 2], b[q % 2], sum[q]);
    }
}

// ldmatrix.x4: lane l points at row l % 8 of matrix l / 8, and gets two numbers of row l / 4 of each matrix
static void matrices_of(unsigned *y, const void *row) {
    const int lane = self->id % 32;
    for (int m = 0; m < 4; m++) {
        const void *at = shuffled(row, 8 * m + lane / 4);
        memcpy(y + m, (const char *)at + 4 * (lane % 4), 4);
    }
}

static void start() {
    Fiber *own = self;
    body(arguments);
    own->done = true;
    Warp &w = own->block->warps[own->id / 32];
    leave(w.barrier, --w.live);
    leave(own->block->whole, --own->block->live);
    _longjmp(home, 1);
}

// blocks [first, last) side by side; abort where all wait for one another
static void run_blocks(int first, int last, int shared) {
    const size_t stack = 1 << 16, threads = blockDim.x * blockDim.y, count = (last - first) * threads;
    static std::vector<char *> stacks;
    std::vector<unsigned char> memory((last - first) * (shared + 256) + 256, 0xa5);
    while (stacks.size() < count) stacks.push_back((char *)malloc(stack));
    blocks.assign(last - first, Block());
    fibers.assign(count, Fiber());
    for (size_t i = 0; i < count; i++) {
        Fiber &f = fibers[i];
        Block &b = blocks[i / threads];
        if (i % threads == 0) {
            const unsigned at = first + i / threads, area = (shared + 255) / 256 * 256;
            b.index = {at % gridDim.x, at / gridDim.x, 0};
            b.warps.resize((threads + 31) / 32);
            b.shared = memory.data() + (256 - (size_t)memory.data() % 256) + i / threads * area;
        }
        f.block = &b;
        f.id = (int)(i % threads);
        f.index = {f.id % blockDim.x, f.id / blockDim.x, 0};
        b.warps[f.id / 32].live++;
        b.live++;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks[i];
        f.context.uc_stack.ss_size = stack;
        makecontext(&f.context, start, 0);
    }
    for (size_t left = count; left > 0;) {
        left = 0;
        bool moved = false;
        for (Fiber &f : fibers) {
            left += !f.done;
            if (f.done || (f.at && f.at->turn == f.turn)) continue;
            f.at = nullptr;
            moved = true;
            resume(f);
        }
        if (left > 0 && !moved) abort();
    }
}

template <typename... A, size_t... I> static void call(void (*f)(A...), void **with, std::index_sequence<I...>) {
    f(*(std::decay_t<A> *)with[I]...);
}

// shape: of the grid and the blocks (x, y each), bytes of dynamic shared memory, whether the launch is cooperative
template <typename... A> static void launch(void (*f)(A...), const int *shape, void **with) {
    struct Bound {
        void (*f)(A...);
        void **with;
    } bound{f, with};
    body = [](void *p) { call(((Bound *)p)->f, ((Bound *)p)->with, std::index_sequence_for<A...>()); };
    arguments = &bound;
    gridDim = {(unsigned)shape[0], (unsigned)shape[1], 1};
    blockDim = {(unsigned)shape[2], (unsigned)shape[3], 1};
    const int count = shape[0] * shape[1], together = shape[5] ? count : 1;
    for (int first = 0; first < count; first += together) run_blocks(first, first + together, shape[4]);
}
