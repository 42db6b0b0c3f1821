// The float32 sums of points.cuh for costs by inner products, on tensor cores: coordinates in two float16 pieces.
//
//     <x, y> = sum_k (x'_k + x''_k) (y'_k + y''_k)  without  x''_k y''_k,   x' = float16(x), x'' = float16(x - x')
//
// An entry's exponent errs by some 3 2^-22 |x| |y|, less than float32 coordinates with squares of their size do. Lanes
// hold the pieces of the 32 points of a warp that get sums; 64 points summed over come into shared memory at a time,
// while the previous ones are in use. The rows' and the columns' sums multiply the same pieces in the same order, so
// that both have the same bits of K_ij.
// PRODUCTS 1: only <x', y'>, for points rounded to x' and y'; to_log and from_log then hold the squares of x' and y', so
// that both sums have the entries of these points.
// Options: STEPS (of 16 coordinates; 0: points.cuh or point_tiles.cuh makes these sums), PRODUCTS (3 or 1).
#define PIECE 32 // coordinates of a chunk
#define UNITS 8  // 16 bytes each, of a point's chunk: 4 of first pieces, 4 of second ones
#define PIECES (PRODUCTS == 1 ? 1 : 2)
#define UNITS_HERE (4 * PIECES) // of a point's chunk in shared memory
#define WARP_TO 32              // points of a warp that get sums
#define TO_TILE (8 * WARP_TO)
#define CHUNKS ((STEPS + 1) / 2)
#define AT_ONCE (CHUNKS <= 4) // are all coordinates in registers?
#define HELD_CHUNKS (AT_ONCE ? CHUNKS : 1)
#define FROM_TILE (CHUNKS <= 2 || PIECES == 1 ? 64 : 32)
#define OCTETS (FROM_TILE / 8) // of 8 points, which one instruction multiplies with 16 others
#define TILES_STRETCH 4        // tiles of products that a lane sums in float32

// The place, in 16 bytes, of unit u of point p: places of 8 neighbours differ modulo 8, so that no bank serves two
FN int64_t unit_of(int64_t p, int u) { return p * UNITS + (u ^ (int)(p & 7)); }

// The same in shared memory: first pieces alone have two points in 128 bytes
FN int place_of(int p, int u) { return p * UNITS_HERE + (u ^ (PIECES == 1 ? p >> 1 & 3 : p & 7)); }

// Copy 16 bytes from global to shared memory; they are visible to all after all_here and a barrier
FN void bring(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"l"(__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

FN void all_here() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// sum += x y, 16 x 8 sums over 16 coordinates: lane l has the rows l / 4 and 8 + l / 4, columns 2 (l % 4) and the next
FN void multiply(float (&sum)[4], const uint32_t (&x)[4], uint32_t y0, uint32_t y1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y0), "r"(y1));
}

// Four matrices of 8 points x 8 coordinates; lane l gives the address of row l % 8 of matrix l / 8
FN void take_four(uint32_t (&y)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                 : "l"(__cvta_generic_to_shared(row)));
}

// This lane's part of a chunk of 16 points: one or both pieces, in two steps of 16 coordinates
struct Pieces {
    uint32_t x[PIECES][2][4];

    // first: the pieces of the first of the 16 points
    FN void take(const uint4 *first) {
        const int lane = threadIdx.x % 32, row = lane / 4, part = lane % 4;
        UNROLLED (int piece = 0; piece < PIECES; piece++)
            UNROLLED (int step = 0; step < 2; step++)
                UNROLLED (int q = 0; q < 4; q++)
                    x[piece][step][q] = __ldg(
                        (const uint32_t *)(first + unit_of(row + q % 2 * 8, piece * 4 + step * 2 + q / 2)) + part);
    }

    // sum += products of some steps of coordinates with 8 points. y: their first pieces, z: their second ones
    template <bool TURNED>
    FN void add(float (&sum)[4], const uint32_t (&y)[4], const uint32_t (&z)[4], int steps) const {
        UNROLLED (int step = 0; step < 2; step++) {
            if (step == steps) break;
            multiply(sum, x[0][step], y[2 * step], y[2 * step + 1]);
            UNROLLED (int k = 0; k < 2 * (PIECES - 1); k++)
                if ((k == 1) == TURNED) multiply(sum, x[0][step], z[2 * step], z[2 * step + 1]);
                else multiply(sum, x[PIECES - 1][step], y[2 * step], y[2 * step + 1]);
        }
    }
};

typedef uint4 Stage[HELD_CHUNKS][FROM_TILE * UNITS_HERE]; // the chunks of a tile, or one chunk

struct alignas(16) Ends {
    float log[FROM_TILE], weight[FROM_TILE];
};

// Bring a chunk of tile `tile`, and with the first one the logarithms and weights
FN void bring_tile(Stage &here, Ends &ends, const uint4 *from, const float *log, const float *weight, int64_t ld,
                   int64_t others, int tile, int chunk) {
    const int64_t j0 = (int64_t)tile * FROM_TILE;
    UNROLLED (int c = 0; c < HELD_CHUNKS; c++)
        UNROLLED (int q = 0; q < FROM_TILE * UNITS_HERE / 256; q++) {
            const int at = threadIdx.x + 256 * q, p = at / UNITS_HERE, u = at % UNITS_HERE;
            bring(here[c] + (PIECES == 2 ? at : place_of(p, u)),
                  from + ((chunk + c) * ld + j0) * UNITS + (PIECES == 2 ? at : unit_of(p, u)));
        }
    if (chunk > 0 || threadIdx.x >= FROM_TILE) return;
    const int64_t j = j0 + threadIdx.x;
    if (threadIdx.x % 4 == 0) bring(ends.log + threadIdx.x, log + j);
    ends.weight[threadIdx.x] = !TOPS && j < others ? __ldg(weight + j) : 0;
}

// acc_q += sum_e w_e 2^sum_qe for 8 points e, or the largest exponent
FN void add_entries(const float (&sum)[2][4], float2 w, float (&acc)[2][2]) {
    UNROLLED (int m = 0; m < 2; m++)
        UNROLLED (int q = 0; q < 4; q++) {
            if (TOPS) acc[m][q / 2] = fmaxf(acc[m][q / 2], sum[m][q]);
            else acc[m][q / 2] = fmaf(q % 2 ? w.y : w.x, power_of(sum[m][q]), acc[m][q / 2]);
        }
}

template <bool TURNED>
FN void sums_of_block(const uint4 *to, int64_t to_ld, const float *to_log, const uint4 *from, const float *from_log,
                      const float *weight, double *out, int64_t count, int64_t others, int64_t from_ld, int every,
                      Stage (&stage)[2], Ends (&ends)[2]) {
    const int lane = threadIdx.x % 32, part = lane % 4;
    const int64_t i0 = (int64_t)blockIdx.x * TO_TILE + threadIdx.x / 32 * WARP_TO;
    const int64_t tiles = ((others + FROM_TILE - 1) / FROM_TILE + every - 1) / every;
    const int first = (int)(tiles * blockIdx.y / gridDim.y), end = (int)(tiles * (blockIdx.y + 1) / gridDim.y);
    const int stages = AT_ONCE ? 1 : CHUNKS; // of a tile
    float own[2][2], acc[2][2];
    double total[2][2];
    Pieces mine[HELD_CHUNKS][2];
    UNROLLED (int m = 0; m < 2; m++) {
        UNROLLED (int h = 0; h < 2; h++) {
            own[m][h] = to_log[i0 + 16 * m + 8 * h + lane / 4];
            acc[m][h] = TOPS ? -INF : 0;
            total[m][h] = TOPS ? -INF : 0;
        }
        UNROLLED (int c = 0; AT_ONCE && c < CHUNKS; c++) mine[c][m].take(to + (c * to_ld + i0 + 16 * m) * UNITS);
    }
    if (first < end) bring_tile(stage[0], ends[first % 2], from, from_log, weight, from_ld, others, first * every, 0);
    float sum[AT_ONCE ? 1 : OCTETS][2][4];
    for (int tile = first, turn = 0; tile < end; tile++) {
        for (int chunk = 0; chunk < stages; chunk++, turn ^= 1) {
            const bool last = chunk + 1 == stages;
            all_here();
            __syncthreads(); // this stage is here, and the one before is read
            if (!last || tile + 1 < end)
                bring_tile(stage[turn ^ 1], ends[(tile + last) % 2], from, from_log, weight, from_ld, others,
                           (tile + last) * every, last ? 0 : chunk + 1);
            const Stage &here = stage[turn];
            const Ends &known = ends[tile % 2];
            if (!AT_ONCE)
                UNROLLED (int m = 0; m < 2; m++) mine[0][m].take(to + (chunk * to_ld + i0 + 16 * m) * UNITS);
            _Pragma("unroll (AT_ONCE ? 2 : OCTETS)") for (int g = 0; g < OCTETS; g++) {
                float(&s)[2][4] = sum[AT_ONCE ? 0 : g];
                if (chunk == 0) {
                    const float2 log = *(const float2 *)(known.log + 8 * g + 2 * part);
                    UNROLLED (int m = 0; m < 2; m++) // these sums of multiples of 2^-8 are exact
                        UNROLLED (int q = 0; q < 4; q++) s[m][q] = own[m][q / 2] + (q % 2 ? log.y : log.x);
                }
                UNROLLED (int c = 0; c < HELD_CHUNKS; c++) {
                    uint32_t y[4], z[4] = {};
                    const int steps = AT_ONCE && STEPS == 2 * c + 1 ? 1 : 2;
                    if (PIECES == 2 && steps == 1) { // one step of first and one of second pieces
                        take_four(y, here[c] + place_of(8 * g + lane % 8, lane / 16 * 4 + lane / 8 % 2));
                        z[0] = y[2];
                        z[1] = y[3];
                    } else {
                        take_four(y, here[c] + place_of(8 * g + lane % 8, lane / 8));
                        if (PIECES == 2) take_four(z, here[c] + place_of(8 * g + lane % 8, 4 + lane / 8));
                    }
                    UNROLLED (int m = 0; m < 2; m++) mine[c][m].template add<TURNED>(s[m], y, z, steps);
                }
                if (AT_ONCE) add_entries(s, *(const float2 *)(known.weight + 8 * g + 2 * part), acc);
            }
            if (!AT_ONCE && last)
                UNROLLED (int g = 0; g < OCTETS; g++)
                    add_entries(sum[g], *(const float2 *)(known.weight + 8 * g + 2 * part), acc);
        }
        if ((tile - first) % TILES_STRETCH == TILES_STRETCH - 1 || tile + 1 == end)
            UNROLLED (int m = 0; m < 2; m++)
                UNROLLED (int h = 0; h < 2; h++) {
                    JOIN(total[m][h], (double)acc[m][h]);
                    acc[m][h] = TOPS ? -INF : 0;
                }
    }
    UNROLLED (int m = 0; m < 2; m++)
        UNROLLED (int h = 0; h < 2; h++) {
            UNROLLED (int lanes = 1; lanes < 4; lanes *= 2)
                JOIN(total[m][h], __shfl_xor_sync(FULL, total[m][h], lanes));
            const int64_t i = i0 + 16 * m + 8 * h + lane / 4;
            if (part == 0 && i < count) out[blockIdx.y * count + i] = total[m][h];
        }
}

// turned: 0 for the sums over rows, 1 for the sums over columns. Points, and logarithms, have room for whole tiles.
// every: TOPS: of so many tiles of points summed over one counts.
extern "C" __global__ void __launch_bounds__(256, POINT_BLOCKS)
    product_sums(const __grid_constant__ State S, int parity, const uint4 *to, int64_t to_ld, const float *to_log,
                 const uint4 *from, const float *from_log, const float *weight, double *out, int64_t count,
                 int64_t others, int64_t turned, double every, const int64_t *, const int *, const int *,
                 int64_t from_ld, const __grid_constant__ mapuot_mask) {
    __shared__ Stage stage[2];
    __shared__ Ends ends[2];
    if (!TOPS && stopped(S, parity)) return;
    const int step = TOPS ? (int)every : 1;
    if (PIECES == 2 && turned)
        sums_of_block<true>(to, to_ld, to_log, from, from_log, weight, out, count, others, from_ld, step, stage, ends);
    else
        sums_of_block<false>(to, to_ld, to_log, from, from_log, weight, out, count, others, from_ld, step, stage, ends);
}
