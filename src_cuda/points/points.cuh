// Mirrors src_c/narrow_points.h and src_c/points.h: the sums of a pass over costs between points, computed and never
// stored.
//
//     s_i = sum_j K_ij w_j,   K_ij = 2^(to_i + from_j - c_ij)  (POINTS_NARROW 1, float32)  or  exp(to_i + from_j - c_ij / reg)
//                                    (QUICK 1: 2^ of it, to 2e-9 of itself, QUICK 2: to 3e-7; the factors are the
//                                    caller's)
//
// The sums are of the rows with w = v, then of the columns with w = u: two evaluations a pass, in sums of their own
// order. One evaluation for both would have to hold 220 KB of a strip of rows in flight on every multiprocessor. Both
// make the same bits of K_ij, so that their marginals belong to one kernel. A warp is SPLIT groups of lanes; a lane has
// RT of the points that get sums, the same ones in every group, and each group takes other FROM of the points summed
// over, by loads of 16 bytes.  Float32 sums run over STRETCH points, beyond them in float64.  out has gridDim.y slabs,
// one a part of the points summed over.
// TOPS 1 (float64 and not QUICK, or STEPS): instead of the sums, max_j of to_i + from_j - c_ij / reg, -INF if there is none.
// HALVED 1: one potential, with rows and columns the same points with the same w. A block sums from its own points
// on; behind them an entry counts for both of its points, and fold_halves adds the sums from the blocks before:
// rows of out behind its slabs, one a block.
// KEPT 1: pairs are skipped. A warp's points are one box, and it sums over the runs of that box; the boxes with most
// pairs come first in `order`. Each part has its share of a long run, or all of a short one, so that boxes with many
// pairs keep no block waiting.
// Options: POINTS 1, POINTS_NARROW, QUICK (not narrow), TOPS, HALVED (needs DIM > 0, and TOPS, KEPT and MASKED 0),
// KEPT, SPLIT (1, 2, 4 or 8), FORM (a mapuot_narrow_form; not narrow: a mapuot_metric, or EXPANDED: own terms of points are in
// the logarithms and c_ij is -x.y, for QUICK 1 and 2), DIM (d up to 4, 0 beyond), DEPTH (not 0: the sums are those of
// point_tiles.cuh), STEPS (not 0: of point_products.cuh, with PRODUCTS), WIDE_CHUNKS (not 0: of
// point_wide_products.cuh), POINT_BLOCKS (of a multiprocessor), MASKED (1: entries are multiplied by a mask; its rows
// are the points that get sums).
#include "common/mask.h"
#include "common/metric.h"

#define EXPANDED (-1) // a form beside the mapuot_metrics

#pragma option KEPT 0
#pragma option QUICK 0
#pragma option TOPS 0
#pragma option HALVED 0
#pragma option DEPTH 0
#pragma option STEPS 0
#pragma option PRODUCTS 3
#pragma option WIDE_CHUNKS 0
#pragma option SPLIT 1

typedef floating<!POINTS_NARROW>::type coord;

#define LANES_EACH (32 / SPLIT)
#define RT ((POINTS_NARROW ? 4 : 2) * (DIM && !MASKED && (KEPT || !POINTS_NARROW) ? 2 : 1))
#define FROM (DIM ? 4 : 8)               // points summed over at a time
#define LOADED (16 / (int)sizeof(coord)) // numbers of a load of 16 bytes
#define STRETCH (64 / FROM)              // times as many are summed in coord before they go to float64
#define OWN (RT * LANES_EACH)            // points of a warp that get sums
#define HELD (DIM && !KEPT ? 64 : 0)     // times FROM points that a block holds in shared memory
#if MASKED
#define SHARE(q, e) (coord) mask_weight(&mask, at[q], b *FROM + (e))
#else
#define SHARE(q, e) 1
#endif
#if TOPS
#define NOTHING (-INF)
#define ENTRY(t) (t)
#define ADD(to, w, entry, share) to = fmax(to, (share) > 0 ? (entry) : -INF)
#define JOIN(to, x) to = fmax(to, x)
#else
#define NOTHING 0
#define ENTRY(t) power_of(t)
#define ADD(to, w, entry, share) to += w * (entry) * share
#define JOIN(to, x) to += x
#endif

#if QUICK == 2
// 2^t to 3e-7 of itself by float32's unit: with its product and sum two float64 operations, and 11 by a polynomial. t is
// rounded to a multiple of 2^-23 (error 4.2e-8), and 2^(1 + fraction) errs by 2^-22 at most (CUDA C++ Programming Guide,
// exp2f). Powers below 2^-256 are less than 1e-313; from t = 255.9995 on none is a number.
FN double power_of(double t) {
    const uint32_t size = (uint32_t)__double2hiint(t);
    const int part = __double2loint(t + 0x1.8p29); // t / 2^-23
    const uint32_t p = __float_as_uint(power_of(__uint_as_float((part & 0x7fffff) | 0x3f800000)));
    const uint32_t high = (p >> 3) + ((uint32_t)(part >> 3) & 0xfff00000u) + ((1023u - 127u - 1u) << 20);
    return __hiloint2double((int)size >= 0x406fffff ? 0x7ff00000u : size >= 0xc0700000u ? 0 : high, p << 29);
}
#elif QUICK
// 2^t to 2e-9 of itself for t of up to 2^30 in size, 0 below 2^-1022: the polynomial errs by that at most where |r| <=
// .5
FN double power_of(double t) {
    const uint32_t size = (uint32_t)__double2hiint(t); // high word of t: tests t >= 1024 and t <= -1022
    const double whole = t + 0x1.8p52, r = t - (whole - 0x1.8p52);
    double p = 0x1.41fbbc24fa7ffp-13;
    p = fma(p, r, 0x1.5f3e5343ad0f4p-10);
    p = fma(p, r, 0x1.3b2d4cf2585d8p-7);
    p = fma(p, r, 0x1.c6aee88df31afp-5);
    p = fma(p, r, 0x1.ebfbdc3c2ebe7p-3);
    p = fma(p, r, 0x1.62e430af27852p-1);
    p = fma(p, r, 1.0);
    const uint32_t power = (uint32_t)(__double2loint(whole) + 1023) << 20;
    const bool large = size - 0x40900000u < 0x40000000u;
    return p * __hiloint2double(large ? 0x7ff00000u : size >= 0xc08ff000u ? 0 : power, 0);
}
#else
FN double power_of(double t) { return exp(t); }
#endif

// Unpack the numbers in 16 bytes
FN void numbers_in(const uint4 &w, coord *to) {
#if POINTS_NARROW
    to[0] = __uint_as_float(w.x);
    to[1] = __uint_as_float(w.y);
    to[2] = __uint_as_float(w.z);
    to[3] = __uint_as_float(w.w);
#else
    to[0] = __hiloint2double(w.y, w.x);
    to[1] = __hiloint2double(w.w, w.z);
#endif
}

// Load COUNT numbers, the same for all lanes of a group
template <int COUNT> FN void take(const coord *from, coord (&to)[COUNT]) {
    UNROLLED (int q = 0; q < COUNT / LOADED; q++)
        numbers_in(HELD ? ((const uint4 *)from)[q] : __ldg((const uint4 *)from + q), to + LOADED * q);
}

// Copy COUNT blocks of FROM numbers each from global to shared memory, by all threads
FN void hold(uint4 *to, const coord *from, int count) {
    for (int q = threadIdx.x; q < count * FROM / LOADED; q += 256) to[q] = __ldg((const uint4 *)from + q);
}

// Squares are subtracted from the known part of the exponent one by one, other sums at the end.
#define DOWN (POINTS_NARROW && FORM == MAPUOT_SQUARES)

// add the term of one coordinate
FN coord grown(coord sum, coord x, coord y) {
#if POINTS_NARROW
    const coord t = x - y;
    return DOWN                      ? fmaf(-t, t, sum)
           : FORM == MAPUOT_PRODUCTS ? fmaf(x, y, sum)
           : FORM == MAPUOT_SIZES    ? sum + fabsf(t)
                                     : fmaf(t, t, sum);
#else
    return FORM == EXPANDED ? fma(x, y, sum) : metric_sum(FORM, sum, x, y);
#endif
}

// the exponent, from the sum over the coordinates
FN coord exponent_of(coord known, coord sum, coord factor) {
    if (DOWN) return sum;
#if POINTS_NARROW
    (void)factor;
    return FORM == MAPUOT_PRODUCTS ? known + sum : known - (FORM == MAPUOT_ROOTS ? root_of(sum) : sum);
#else
    if (FORM == EXPANDED) return known + sum;
    if (FORM == MAPUOT_WFR) // QUICK: an exponent of -2^30 gives 0, as -INF would
        return sum < REACH_SQUARED ? known + 2 * factor * log(cos(sqrt(sum))) : QUICK ? -0x1p30 : -INF;
    return known - factor * metric_of(FORM, sum);
#endif
}

#if DEPTH
#include "point_tiles.cuh"
#endif
#if STEPS
#include "point_products.cuh"
#endif
#if WIDE_CHUNKS
#include "point_wide_products.cuh"
#endif
#if HALVED
// The sums over a warp of one number for each of FROM points, the one of point k into to[k].
FN void add_lanes(coord (&x)[FROM], double *to) {
    const int lane = threadIdx.x % 32, upper = lane & 16, odd = lane & 8;
    coord pair[2], sum;
    UNROLLED (int e = 0; e < 2; e++)
        pair[e] = (upper ? x[2 + e] : x[e]) + __shfl_xor_sync(FULL, upper ? x[e] : x[2 + e], 16);
    sum = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(FULL, odd ? pair[0] : pair[1], 8);
    UNROLLED (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(FULL, sum, lanes);
    if (lane % 8 == 0) to[lane / 8] = sum;
}

// Add up the warps' results for a point in each thread; sums of points before `least` are not used.
FN void put_across(const double (*across)[HELD * FROM], double *to, int64_t j, int64_t least, int64_t end) {
    double total = 0;
    UNROLLED (int w = 0; w < 8; w++) total += across[w][threadIdx.x];
    if (j >= least && j < end) to[j] = total;
}
#endif
#if !DEPTH && !STEPS && !WIDE_CHUNKS
extern "C" __global__ void __launch_bounds__(256, POINT_BLOCKS)
    point_sums(const __grid_constant__ State S, int parity, const coord *to, int64_t to_ld, const coord *to_log,
               const coord *from, const coord *from_log, const coord *weight, double *out, int64_t count,
               int64_t others, int64_t d, double scale, const int64_t *first, const int *run, const int *order, int64_t,
               const __grid_constant__ mapuot_mask mask) {
#if HELD
    __shared__ uint4 held_y[HELD * DIM * FROM / LOADED], held_log[HELD * FROM / LOADED], held_w[HELD * FROM / LOADED];
    int64_t held = 0; // their first block
#endif
#if HALVED
    __shared__ double across[8][HELD * FROM];
    const int64_t least = (blockIdx.x + 1) * (int64_t)(8 * OWN);
    double *const to_across = out + (gridDim.y + blockIdx.x) * count;
#endif
    if (!TOPS && stopped(S, parity)) return;
    const int group = threadIdx.x % 32 / LANES_EACH;
#if KEPT
    const int64_t block = blockIdx.y * (int64_t)gridDim.x + blockIdx.x,
                  place = block / gridDim.y * 8 + threadIdx.x / 32;
    const bool has_box = place * OWN < count;
    const int box = has_box ? order[place] : 0, part = (int)(block % gridDim.y);
    const int64_t own_warp = has_box ? (int64_t)box * OWN : count;
#else
    const int64_t own_warp = ((int64_t)blockIdx.x * 8 + threadIdx.x / 32) * OWN;
    const int part = blockIdx.y;
#endif
    const int64_t i0 = own_warp + threadIdx.x % LANES_EACH;
    const int64_t blocks = (others + FROM - 1) / FROM;
    const coord factor = (coord)scale;
    coord own[RT], x[RT][DIM + 1], acc[RT], mine[RT];
    double total[RT];
    int64_t at[RT];
    UNROLLED (int q = 0; q < RT; q++) {
        at[q] = i0 + q * LANES_EACH < count ? i0 + q * LANES_EACH : count - 1;
        own[q] = to_log[at[q]];
        acc[q] = total[q] = NOTHING;
        UNROLLED (int k = 0; k < DIM; k++) x[q][k] = to[k * to_ld + at[q]];
        if (HALVED) mine[q] = weight[at[q]]; // a point that the last block repeats adds no pairs
    }
#if KEPT
    for (int64_t k = has_box ? first[box] : 0, last = has_box ? first[box + 1] : 0; k < last; k++) {
        const int start = run[2 * k] / FROM,
                  stop = run[2 * k + 1] / FROM < blocks ? run[2 * k + 1] / FROM : (int)blocks, parts = (int)gridDim.y;
        const int64_t length = stop - start;
        const bool is_long = length >= parts * STRETCH;
        if (!is_long && k % parts != part) continue;
        int b = (is_long ? start + (int)(length * part / parts) : start) + group;
        const int end = is_long ? start + (int)(length * (part + 1) / parts) : stop;
#else
    {
        const int64_t before = HALVED ? blockIdx.x * (int64_t)(8 * OWN / FROM) : 0, left = blocks - before;
        int64_t b = before + left * part / gridDim.y + group;
        const int64_t begin = b, end = before + left * (part + 1) / gridDim.y;
#endif
        while (b < end) {
#if HELD
            if ((b - begin) % HELD == 0) {
                const int some = end - b < HELD ? (int)(end - b) : HELD;
                __syncthreads(); // all warps have read the previous points
#if HALVED
                if (b > begin) put_across(across, to_across, held * FROM + threadIdx.x, least, count);
#endif
                held = b;
                hold(held_y, from + b * DIM * FROM, some * DIM);
                hold(held_log, from_log + b * FROM, some);
                hold(held_w, weight + b * FROM, some);
                __syncthreads();
            }
#endif
            for (const int64_t stop = b + STRETCH * SPLIT < end ? b + STRETCH * SPLIT : end; b < stop; b += SPLIT) {
#if DIM
                coord both[FROM] = {};
                UNROLLED (int half = 0; half < FROM; half += LOADED) {
                    coord y[DIM][LOADED], y_log[LOADED], w[LOADED];
#if HELD
                    const int here = (int)(b - held);
                    const coord *const ys = (coord *)held_y, *const logs = (coord *)held_log,
                                       *const ws = (coord *)held_w;
#else
                    const int64_t here = b;
                    const coord *const ys = from, *const logs = from_log, *const ws = weight;
#endif
                    take(logs + here * FROM + half, y_log);
                    UNROLLED (int k = 0; k < DIM; k++) take(ys + (here * DIM + k) * FROM + half, y[k]);
                    take(ws + here * FROM + half, w);
                    UNROLLED (int e = 0; e < LOADED; e++)
                        UNROLLED (int q = 0; q < RT; q++) {
                            const coord known = own[q] + y_log[e];
                            coord sum = DOWN ? known : 0;
                            UNROLLED (int k = 0; k < DIM; k++) sum = grown(sum, x[q][k], y[k][e]);
                            const coord entry = ENTRY(exponent_of(known, sum, factor));
                            ADD(acc[q], w[e], entry, SHARE(q, half + e));
                            if (HALVED) both[half + e] += mine[q] * entry;
                        }
                }
#if HALVED
                if (b * FROM >= least) add_lanes(both, across[threadIdx.x / 32] + (b - held) * FROM);
#endif
#else
                coord sum[RT][FROM] = {}, y[FROM], w[FROM];
                for (int64_t k = 0; k < d; k++) {
                    take(from + (b * d + k) * FROM, y);
                    UNROLLED (int q = 0; q < RT; q++) {
                        const coord xk = to[k * to_ld + at[q]];
                        UNROLLED (int e = 0; e < FROM; e++) sum[q][e] = grown(sum[q][e], xk, y[e]);
                    }
                }
                take(from_log + b * FROM, y);
                take(weight + b * FROM, w);
                UNROLLED (int q = 0; q < RT; q++)
                    UNROLLED (int e = 0; e < FROM; e++) {
                        const coord known = own[q] + y[e],
                                    power = exponent_of(known, (DOWN ? known : 0) + sum[q][e], factor);
                        ADD(acc[q], w[e], ENTRY(power), SHARE(q, e));
                    }
#endif
            }
#if POINTS_NARROW
            UNROLLED (int q = 0; q < RT; q++) {
                JOIN(total[q], acc[q]);
                acc[q] = NOTHING;
            }
#endif
        }
#if HALVED
        __syncthreads();
        if (begin < end)
            put_across(across, to_across, held * FROM + threadIdx.x, least, end * FROM < count ? end * FROM : count);
#endif
    }
    UNROLLED (int q = 0; q < RT; q++) {
        JOIN(total[q], acc[q]);
        UNROLLED (int lanes = LANES_EACH; lanes < 32; lanes *= 2)
            JOIN(total[q], __shfl_xor_sync(FULL, total[q], lanes));
        if (group == 0 && i0 + q * LANES_EACH < count) out[part * count + i0 + q * LANES_EACH] = total[q];
    }
}
#endif

#if HALVED
// Add up the slabs of each point, and the results of earlier blocks of points, into the first slab.
extern "C" __global__ void __launch_bounds__(256)
    fold_halves(const __grid_constant__ State S, int parity, double *out, int64_t count, int parts) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (stopped(S, parity) || i >= count) return;
    out[i] = slabs(out, i, count, parts) + slabs(out + parts * count, i, count, (int)(i / (8 * OWN)));
}
#endif

// K^T u, a column a thread; ratio: as for join_rows
extern "C" __global__ void __launch_bounds__(256)
    point_columns(const __grid_constant__ State S, int parity, const double *out, int parts, float *,
                  const double *ratio) {
    const int64_t j = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (stopped(S, parity) || j >= S.n) return;
    sums_of(S, (int)S.progress[parity].turn)[j] = slabs(out, j, S.n, parts) * (ratio ? ratio[j] : 1);
}
