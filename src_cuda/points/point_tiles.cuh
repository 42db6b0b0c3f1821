// The sums of points.cuh for points with more coordinates than a thread holds, over all pairs and without a mask, as a
// product of matrices.
//
// A block sums TO_TILE points over FROM_TILE others at a time, TO_EACH x FROM_EACH pairs a thread.  Coordinates come
// DEPTH at a time into shared memory, while the previous ones are in use, so that 4 loads of 16 bytes serve 64
// operations (float64: 6 for 32).  A pair's sum over the coordinates has the same order for the rows and for the
// columns, so that both have the same bits of K_ij.
// Option: DEPTH (coordinates at a time, a divisor of `d`; 0: points.cuh makes these sums).
#define TO_EACH 8
#define FROM_EACH (POINTS_NARROW ? 8 : 4)
#define TO_TILE (16 * TO_EACH)
#define FROM_TILE (16 * FROM_EACH)
#define TILES_STRETCH 8 // tiles of products that a thread sums in coord

struct Coordinates {
    uint4 to[DEPTH][TO_TILE / LOADED], from[DEPTH][FROM_TILE / LOADED];
};

// Copy 16 bytes from global to shared memory; they are visible to all after all_here and a barrier
FN void bring(uint4 *to, const coord *from) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"l"(__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *to = *(const uint4 *)from;
#endif
}

FN void all_here() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Copy DEPTH coordinates of as many points as the array is wide
template <int LOADS> FN void bring(uint4 (&here)[DEPTH][LOADS], const coord *from, int64_t ld) {
    const int first = threadIdx.x / LOADS, load = threadIdx.x % LOADS, rows = 256 / LOADS;
    UNROLLED (int q = 0; q < (DEPTH + rows - 1) / rows; q++) {
        const int k = first + rows * q;
        if (DEPTH % rows == 0 || k < DEPTH) bring(&here[k][load], from + k * ld + load * LOADED);
    }
}

// A thread's COUNT of the 16 COUNT numbers of a tile: LOADED at `part`, as many 16 loads further, ...
template <int COUNT> FN void own_of(const uint4 *all, int part, coord (&mine)[COUNT]) {
    UNROLLED (int q = 0; q < COUNT / LOADED; q++) numbers_in(all[part + 16 * q], mine + LOADED * q);
}

// Add the terms of DEPTH coordinates to sum
FN void add_coordinates(const Coordinates &here, int to_part, int from_part, coord (&sum)[TO_EACH][FROM_EACH]) {
    UNROLLED (int k = 0; k < DEPTH; k++) {
        coord x[TO_EACH], y[FROM_EACH];
        own_of(here.to[k], to_part, x);
        own_of(here.from[k], from_part, y);
        UNROLLED (int q = 0; q < TO_EACH; q++)
            UNROLLED (int e = 0; e < FROM_EACH; e++) sum[q][e] = grown(sum[q][e], x[q], y[e]);
    }
}

// acc_q += sum_e w_e K_qe
FN void add_products(const coord (&sum)[TO_EACH][FROM_EACH], const uint4 *to_log, const uint4 *from_log,
                     const uint4 *weight, int to_part, int from_part, coord factor, coord (&acc)[TO_EACH]) {
    coord own[TO_EACH], log[FROM_EACH], w[FROM_EACH];
    own_of(to_log, to_part, own);
    own_of(from_log, from_part, log);
    own_of(weight, from_part, w);
    UNROLLED (int q = 0; q < TO_EACH; q++)
        UNROLLED (int e = 0; e < FROM_EACH; e++)
            acc[q] += w[e] * power_of(exponent_of(own[q] + log[e], sum[q][e], factor));
}

// All arrays but `weight` have room for whole tiles.
extern "C" __global__ void __launch_bounds__(256, POINT_BLOCKS)
    tile_sums(const __grid_constant__ State S, int parity, const coord *to, int64_t to_ld, const coord *to_log,
              const coord *from, const coord *from_log, const coord *weight, double *out, int64_t count, int64_t others,
              int64_t d, double scale, const int64_t *, const int *, const int *, int64_t from_ld,
              const __grid_constant__ mapuot_mask) {
    __shared__ Coordinates here[2];
    __shared__ uint4 own_log[TO_TILE / LOADED], log[FROM_TILE / LOADED], w[FROM_TILE / LOADED];
    if (stopped(S, parity)) return;
    const int from_part = threadIdx.x % 16, to_part = threadIdx.x / 16, chunks = (int)(d / DEPTH);
    const int64_t i0 = (int64_t)blockIdx.x * TO_TILE, tiles = (others + FROM_TILE - 1) / FROM_TILE;
    const int first = (int)(tiles * blockIdx.y / gridDim.y), end = (int)(tiles * (blockIdx.y + 1) / gridDim.y);
    coord acc[TO_EACH] = {};
    double total = 0;
    if (threadIdx.x < TO_TILE) ((coord *)own_log)[threadIdx.x] = to_log[i0 + threadIdx.x];
    bring(here[0].to, to + i0, to_ld);
    if (first < end) // a side without points may be a null pointer
        bring(here[0].from, from + (int64_t)first * FROM_TILE, from_ld);
    all_here();
    for (int tile = first, step = 0; tile < end; tile++) {
        const int64_t j = (int64_t)tile * FROM_TILE + threadIdx.x;
        coord sum[TO_EACH][FROM_EACH] = {};
        __syncthreads(); // the logarithms and weights of the tile before are read
        if (threadIdx.x < FROM_TILE) {
            ((coord *)log)[threadIdx.x] = from_log[j];
            ((coord *)w)[threadIdx.x] = j < others ? weight[j] : 0;
        }
        for (int chunk = 0; chunk < chunks; chunk++, step++) {
            const bool last = chunk + 1 == chunks;
            const int64_t k = last ? 0 : (int64_t)(chunk + 1) * DEPTH;
            __syncthreads(); // these coordinates are here, and those before are read
            if (!last || tile + 1 < end) {
                bring(here[(step + 1) % 2].to, to + k * to_ld + i0, to_ld);
                bring(here[(step + 1) % 2].from, from + k * from_ld + (int64_t)(tile + last) * FROM_TILE, from_ld);
            }
            add_coordinates(here[step % 2], to_part, from_part, sum);
            all_here();
        }
        add_products(sum, own_log, log, w, to_part, from_part, (coord)scale, acc);
        if ((POINTS_NARROW && (tile - first) % TILES_STRETCH == TILES_STRETCH - 1) || tile + 1 == end) {
            total += warp_sums<TO_EACH, 8>(acc, threadIdx.x);
            UNROLLED (int q = 0; q < TO_EACH; q++) acc[q] = 0;
        }
    }
    const int lanes = 16 / TO_EACH, q = from_part / lanes; // number of lanes with the sums of a point
    const int64_t i = i0 + (q / LOADED * 16 + to_part) * LOADED + q % LOADED;
    if (from_part % lanes == 0 && i < count) out[blockIdx.y * count + i] = total;
}
