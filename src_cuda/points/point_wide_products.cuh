// The float64 sums of points.cuh for products of coordinates, on the tensor cores of sm_90 and later.
//
// A warp has 16 points; its lanes hold their coordinates, of up to 8 chunks all, of more one chunk at a time. It sums over
// FROM_TILE other points at a time. The next ones are copied into shared memory while the previous ones are in use. An instruction adds 16 coordinates of 16 x 8 pairs
// to the sums of the logarithms. The rows' and the columns' sums add the same products in the same order, so that both have the same bits
// of K_ij.
// Option: WIDE_CHUNKS (of 16 coordinates; 0: points.cuh or point_tiles.cuh makes these sums).
#define PIECE 16
#define TO_TILE (8 * 16)
#define AT_ONCE (WIDE_CHUNKS <= 8) // are all coordinates in registers?
#define HELD_CHUNKS (AT_ONCE ? WIDE_CHUNKS : 1)
#define FROM_TILE (HELD_CHUNKS <= 2 ? 64 : HELD_CHUNKS <= 4 ? 32 : 16) // two tiles in 48 KB
#define OCTETS (FROM_TILE / 8)  // of 8 points, which one instruction multiplies with 16 others
#define LINE_OF (FROM_TILE + 4) // numbers of a coordinate: no bank serves two lanes

// Copy 16 bytes from global to shared memory; they are visible to all after all_here and a barrier
FN void bring(double *to, const double *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"l"(__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

FN void all_here() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// sum += x y, 16 x 8 sums over 16 coordinates. Lane l has the rows l / 4 and 8 + l / 4 of x, alternating, at coordinates
// l % 4, 4 + l % 4, ..; column l / 4 of y at the same coordinates; and of sum these rows at the columns 2 (l % 4) and
// the next.
FN void multiply(double (&sum)[4], const double (&x)[8], const double (&y)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3])
        : "d"(x[0]), "d"(x[1]), "d"(x[2]), "d"(x[3]), "d"(x[4]), "d"(x[5]), "d"(x[6]), "d"(x[7]), "d"(y[0]), "d"(y[1]),
          "d"(y[2]), "d"(y[3]));
#endif
}

struct alignas(16) Stage {
    double point[HELD_CHUNKS * PIECE][LINE_OF]; // the chunks of a tile, or one chunk
};

struct alignas(16) Ends {
    double log[FROM_TILE], weight[FROM_TILE];
};

// Bring a chunk of tile `tile`, or all chunks, and with the first one the logarithms and weights
FN void bring_tile(Stage &here, Ends &ends, const double *from, const double *log, const double *weight, int64_t ld,
                   int64_t others, int tile, int chunk) {
    const int64_t j0 = (int64_t)tile * FROM_TILE, j = j0 + threadIdx.x;
    constexpr int pairs = HELD_CHUNKS * PIECE * FROM_TILE / 2;
    UNROLLED (int q = 0; q < (pairs + 255) / 256; q++) {
        const int at = threadIdx.x + 256 * q, k = at / (FROM_TILE / 2), two = at % (FROM_TILE / 2) * 2;
        if (pairs % 256 && at >= pairs) break;
        bring(&here.point[k][two], from + (chunk * PIECE + k) * ld + j0 + two);
    }
    if (chunk > 0 || threadIdx.x >= FROM_TILE) return;
    if (threadIdx.x % 2 == 0) bring(ends.log + threadIdx.x, log + j);
    ends.weight[threadIdx.x] = j < others ? __ldg(weight + j) : 0;
}

// A lane's coordinates of a chunk. first: this lane's first coordinate of its first point
FN void take_chunk(double (&x)[8], const double *first, int64_t ld) {
    UNROLLED (int q = 0; q < 8; q++) x[q] = first[q / 2 * 4 * ld + q % 2 * 8];
}

// acc_h += sum_e w_e 2^sum_he for 8 points e
FN void add_entries(const double (&sum)[4], const double *w, double (&acc)[2]) {
    UNROLLED (int q = 0; q < 4; q++) acc[q / 2] = fma(w[q % 2], power_of(sum[q]), acc[q / 2]);
}

// All arrays but `weight` have room for whole tiles.
extern "C" __global__ void __launch_bounds__(256, POINT_BLOCKS)
    wide_product_sums(const __grid_constant__ State S, int parity, const double *to, int64_t to_ld,
                      const double *to_log, const double *from, const double *from_log, const double *weight,
                      double *out, int64_t count, int64_t others, int64_t, double, const int64_t *, const int *,
                      const int *, int64_t from_ld, const __grid_constant__ mapuot_mask) {
    __shared__ Stage stage[2];
    __shared__ Ends ends[2];
    if (stopped(S, parity)) return;
    const int lane = threadIdx.x % 32, row = lane / 4, part = lane % 4;
    const int64_t i0 = (int64_t)blockIdx.x * TO_TILE + threadIdx.x / 32 * 16 + row;
    const int64_t tiles = (others + FROM_TILE - 1) / FROM_TILE;
    const int first = (int)(tiles * blockIdx.y / gridDim.y), end = (int)(tiles * (blockIdx.y + 1) / gridDim.y);
    const int stages = WIDE_CHUNKS / HELD_CHUNKS; // of a tile
    const double own[2] = {to_log[i0], to_log[i0 + 8]}, *const mine = to + part * to_ld + i0;
    double x[HELD_CHUNKS][8], acc[2] = {}, sum[AT_ONCE ? 1 : OCTETS][4];
    UNROLLED (int c = 0; AT_ONCE && c < HELD_CHUNKS; c++) take_chunk(x[c], mine + c * PIECE * to_ld, to_ld);
    if (first < end) bring_tile(stage[0], ends[first % 2], from, from_log, weight, from_ld, others, first, 0);
    for (int tile = first, turn = 0; tile < end; tile++) {
        for (int chunk = 0; chunk < stages; chunk++, turn ^= 1) {
            const bool last = chunk + 1 == stages;
            if (!AT_ONCE) take_chunk(x[0], mine + chunk * PIECE * to_ld, to_ld);
            all_here();
            __syncthreads(); // this stage is here, and the one before is read
            if (!last || tile + 1 < end)
                bring_tile(stage[turn ^ 1], ends[(tile + last) % 2], from, from_log, weight, from_ld, others,
                           tile + last, last ? 0 : chunk + 1);
            const Stage &here = stage[turn];
            const double *log = ends[tile % 2].log + 2 * part, *w = ends[tile % 2].weight + 2 * part;
            _Pragma("unroll (AT_ONCE ? 2 : OCTETS)") for (int g = 0; g < OCTETS; g++) {
                double(&s)[4] = sum[AT_ONCE ? 0 : g];
                if (chunk == 0)
                    UNROLLED (int q = 0; q < 4; q++) s[q] = own[q / 2] + log[8 * g + q % 2];
                UNROLLED (int c = 0; c < HELD_CHUNKS; c++) {
                    double y[4];
                    UNROLLED (int q = 0; q < 4; q++) y[q] = here.point[PIECE * c + q * 4 + part][8 * g + row];
                    multiply(s, x[c], y);
                }
                if (AT_ONCE) add_entries(s, w + 8 * g, acc);
            }
            if (!AT_ONCE && last)
                UNROLLED (int g = 0; g < OCTETS; g++) add_entries(sum[g], w + 8 * g, acc);
        }
    }
    UNROLLED (int h = 0; h < 2; h++) {
        const double total = warp_sum<4>(acc[h]);
        if (part == 0 && i0 + 8 * h < count) out[blockIdx.y * count + i0 + 8 * h] = total;
    }
}
