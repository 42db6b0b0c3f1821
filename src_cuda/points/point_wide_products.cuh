// The float64 sums of points.cuh for products of coordinates, on the tensor cores of sm_90 and later.
//
// A warp has 16 points; its lanes hold their coordinates. It sums over FROM_TILE other points at a time. The next ones
// are copied into shared memory while the previous ones are in use. An instruction adds 16 coordinates of 16 x 8 pairs
// to the sums of the logarithms. The rows' and the columns' sums add the same products in the same order, so that both have the same bits
// of K_ij.
// Option: WIDE_CHUNKS (of 16 coordinates, up to 8; 0: points.cuh or point_tiles.cuh makes these sums).
#define PIECE 16
#define TO_TILE (8 * 16)
#define FROM_TILE (WIDE_CHUNKS <= 2 ? 64 : WIDE_CHUNKS <= 4 ? 32 : 16) // two tiles in 48 KB
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
    double point[WIDE_CHUNKS * PIECE][LINE_OF];
    double log[FROM_TILE], weight[FROM_TILE];
};

// Bring the points, logarithms and weights of tile `tile`
FN void bring_tile(Stage &here, const double *from, const double *log, const double *weight, int64_t ld, int64_t others,
                   int tile) {
    const int64_t j0 = (int64_t)tile * FROM_TILE, j = j0 + threadIdx.x;
    constexpr int pairs = WIDE_CHUNKS * PIECE * FROM_TILE / 2;
    UNROLLED (int q = 0; q < (pairs + 255) / 256; q++) {
        const int at = threadIdx.x + 256 * q, k = at / (FROM_TILE / 2), two = at % (FROM_TILE / 2) * 2;
        if (pairs % 256 && at >= pairs) break;
        bring(&here.point[k][two], from + k * ld + j0 + two);
    }
    if (threadIdx.x >= FROM_TILE) return;
    if (threadIdx.x % 2 == 0) bring(here.log + threadIdx.x, log + j);
    here.weight[threadIdx.x] = j < others ? __ldg(weight + j) : 0;
}

// All arrays but `weight` have room for whole tiles.
extern "C" __global__ void __launch_bounds__(256, POINT_BLOCKS)
    wide_product_sums(const __grid_constant__ State S, int parity, const double *to, int64_t to_ld,
                      const double *to_log, const double *from, const double *from_log, const double *weight,
                      double *out, int64_t count, int64_t others, int64_t, double, const int64_t *, const int *,
                      const int *, int64_t from_ld, const __grid_constant__ mapuot_mask) {
    __shared__ Stage stage[2];
    if (stopped(S, parity)) return;
    const int lane = threadIdx.x % 32, row = lane / 4, part = lane % 4;
    const int64_t i0 = (int64_t)blockIdx.x * TO_TILE + threadIdx.x / 32 * 16 + row;
    const int64_t tiles = (others + FROM_TILE - 1) / FROM_TILE;
    const int first = (int)(tiles * blockIdx.y / gridDim.y), end = (int)(tiles * (blockIdx.y + 1) / gridDim.y);
    const double own[2] = {to_log[i0], to_log[i0 + 8]};
    double x[WIDE_CHUNKS][8], acc[2] = {};
    UNROLLED (int c = 0; c < WIDE_CHUNKS; c++)
        UNROLLED (int q = 0; q < 8; q++) x[c][q] = to[(PIECE * c + q / 2 * 4 + part) * to_ld + i0 + q % 2 * 8];
    if (first < end) bring_tile(stage[0], from, from_log, weight, from_ld, others, first);
    for (int tile = first; tile < end; tile++) {
        all_here();
        __syncthreads(); // this tile is here, and the one before is read
        if (tile + 1 < end)
            bring_tile(stage[(tile + 1 - first) % 2], from, from_log, weight, from_ld, others, tile + 1);
        const Stage &here = stage[(tile - first) % 2];
        _Pragma("unroll 2") for (int j = 0; j < FROM_TILE; j += 8) {
            const double *log = here.log + j + 2 * part, *w = here.weight + j + 2 * part;
            double sum[4];
            UNROLLED (int q = 0; q < 4; q++) sum[q] = own[q / 2] + log[q % 2];
            UNROLLED (int c = 0; c < WIDE_CHUNKS; c++) {
                double y[4];
                UNROLLED (int q = 0; q < 4; q++) y[q] = here.point[PIECE * c + q * 4 + part][j + row];
                multiply(sum, x[c], y);
            }
            UNROLLED (int q = 0; q < 4; q++) acc[q / 2] = fma(w[q % 2], power_of(sum[q]), acc[q / 2]);
        }
    }
    UNROLLED (int h = 0; h < 2; h++) {
        const double total = warp_sum<4>(acc[h]);
        if (part == 0 && i0 + 8 * h < count) out[blockIdx.y * count + i0 + 8 * h] = total;
    }
}
