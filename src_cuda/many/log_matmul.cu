// Mirrors src_c/log_matmul.c: out_ij = log sum_k exp(A_ik + B_kj), p products, dense rows.
//
// With row maxima r_i and column maxima c_j, out = r_i + c_j + log sum_k exp(A_ik - r_i) exp(B_kj - c_j): one
// multiply-add a term, in tiles of TILE x TILE x KT in shared memory and TILE/16 x TILE/16 sums a thread.  Terms below
// e^LOW are dropped. If a sum is below k e^LOW / eps (log_matmul.h has the bound), its tile is recomputed with the
// maximum of each entry over k: one sweep for the maxima, one for the sum of exponentials. -inf is an exact zero. NaN
// and +inf give the result of log(sum(exp(.))), since their rows and columns are recomputed, too.
// Options: WIDE (1 float64, 0 float32), TILE (32 or 64).
#include "words.cuh"

typedef long long int64_t;
#if WIDE
typedef double real;
#define EXP exp
#define LOG log
#define MAX fmax
#define LOW (-708.0)
#define EPS 0x1p-53
#else
typedef float real;
#define EXP expf
#define LOG logf
#define MAX fmaxf
#define LOW (-87.3f)
#define EPS 0x1p-24f
#endif
#define INF ((real)__longlong_as_double(0x7ff0000000000000LL))
#define FULL 0xffffffffu
#define KT 16
#define EACH (TILE / 16)
#define RUN (EACH < 4 ? EACH : 4) // neighbouring rows or columns of a thread: one load of up to 16 bytes
#define PER (TILE * KT / 256)     // entries of a tile that a thread loads

// r or c: the maximum, -inf if all are zero, +inf if there is a +inf or a NaN.
FN real shift_of(real top, bool odd) { return odd ? INF : top; }

// Is the sum S of an entry too small, or odd, to give its logarithm?
FN bool unknown(real S, real shift, real limit) { return !(shift < INF) || (shift > -INF && !(S >= limit)); }

// r_i, by one warp
FN void row_shift(const real *A, int64_t i, int64_t k, real *r) {
    real top = -INF;
    bool odd = false;
    for (int64_t q = threadIdx.x % 32; q < k; q += 32) {
        const real x = A[i * k + q];
        odd |= !(x < INF);
        top = MAX(top, x);
    }
    UNROLLED (int bit = 16; bit > 0; bit /= 2) top = MAX(top, __shfl_xor_sync(FULL, top, bit));
    odd = __any_sync(FULL, odd);
    if (threadIdx.x % 32 == 0) r[i] = shift_of(top, odd);
}

// c of 32 columns of one B, by a block, 8 threads a column
FN void column_shifts(const real *B, int64_t block, int64_t k, int64_t n, real *c) {
    __shared__ real tops[8][32];
    __shared__ int odds[8][32];
    const int64_t blocks = (n + 31) / 32, product = block / blocks, j = block % blocks * 32 + threadIdx.x % 32;
    const int part = threadIdx.x / 32, lane = threadIdx.x % 32;
    real top = -INF;
    bool odd = false;
    for (int64_t q = part; q < k && j < n; q += 8) {
        const real x = B[(product * k + q) * n + j];
        odd |= !(x < INF);
        top = MAX(top, x);
    }
    tops[part][lane] = top;
    odds[part][lane] = odd;
    __syncthreads();
    if (part > 0 || j >= n) return;
    for (int q = 1; q < 8; q++) {
        top = MAX(top, tops[q][lane]);
        odd |= odds[q][lane] != 0;
    }
    c[product * n + j] = shift_of(top, odd);
}

// The first blocks find c, 32 columns each, the others r, 8 of the p m rows each.
extern "C" __global__ void __launch_bounds__(256) shifts(const real *A, const real *B, int64_t m, int64_t k, int64_t n,
                                                         int64_t rows, int64_t column_blocks, real *r, real *c) {
    const int64_t row = ((int64_t)blockIdx.x - column_blocks) * 8 + threadIdx.x / 32;
    if (blockIdx.x < column_blocks) column_shifts(B, blockIdx.x, k, n, c);
    else if (row < rows) row_shift(A, row, k, r);
}

struct Product {
    int64_t m, k, n;
    const real *A, *B, *r, *c; // m x k, k x n, m, n
    int i0, j0;
};

struct Tiles {
    alignas(16) real E[KT][TILE + 4], F[KT][TILE + 4];
};

// Place q of a thread's rows (at = threadIdx.x / 16) or columns (% 16) in the tile
FN int place(int at, int q) { return q / RUN * 16 * RUN + at * RUN + q % RUN; }

// Load this thread's entries of tile k0; outside they are zeros of the semiring.
FN void fetch(const Product &P, int64_t k0, real (&a)[PER], real (&b)[PER]) {
    UNROLLED (int q = 0; q < PER; q++) {
        const int64_t i = P.i0 + threadIdx.x / KT + q * (256 / KT), ka = k0 + threadIdx.x % KT;
        const int64_t j = P.j0 + threadIdx.x % TILE, kb = k0 + threadIdx.x / TILE + q * (256 / TILE);
        a[q] = i < P.m && ka < P.k ? P.A[i * P.k + ka] : -INF;
        b[q] = j < P.n && kb < P.k ? P.B[kb * P.n + j] : -INF;
    }
}

// x for the sweep: unchanged, or e^(x - shift) without terms below e^LOW
template <bool EXPONENTS> FN real taken(real x, real shift) {
    if (EXPONENTS) return x - shift > LOW ? EXP(x - shift) : 0;
    return x;
}

// result = each(result, E_ik, F_kj) over all k, tile by tile.
template <bool EXPONENTS, typename Each>
FN void sweep(const Product &P, Tiles &tiles, real (&result)[EACH][EACH], Each each) {
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16, j = threadIdx.x % TILE;
    real a[PER], b[PER], r[PER], c = 0;
    UNROLLED (int q = 0; q < PER; q++) {
        const int64_t i = P.i0 + threadIdx.x / KT + q * (256 / KT);
        r[q] = EXPONENTS && i < P.m ? P.r[i] : 0;
    }
    if (EXPONENTS && P.j0 + j < P.n) c = P.c[P.j0 + j];
    fetch(P, 0, a, b);
    for (int64_t k0 = 0; k0 < P.k; k0 += KT) {
        __syncthreads();
        UNROLLED (int q = 0; q < PER; q++) {
            tiles.E[threadIdx.x % KT][threadIdx.x / KT + q * (256 / KT)] = taken<EXPONENTS>(a[q], r[q]);
            tiles.F[threadIdx.x / TILE + q * (256 / TILE)][j] = taken<EXPONENTS>(b[q], c);
        }
        __syncthreads();
        if (k0 + KT < P.k) fetch(P, k0 + KT, a, b);
        UNROLLED (int k = 0; k < KT; k++) {
            real e[EACH], f[EACH];
            UNROLLED (int q = 0; q < EACH; q++) {
                e[q] = tiles.E[k][place(ty, q)];
                f[q] = tiles.F[k][place(tx, q)];
            }
            UNROLLED (int y = 0; y < EACH; y++)
                UNROLLED (int x = 0; x < EACH; x++) result[y][x] = each(result[y][x], e[y], f[x], y, x);
        }
    }
}

FN void fill(real (&result)[EACH][EACH], real x) {
    UNROLLED (int q = 0; q < EACH * EACH; q++) result[q / EACH][q % EACH] = x;
}

// Compute every entry of the tile from its own maximum over k.
FN void exact_tile(const Product &P, Tiles &tiles, real (&out)[EACH][EACH]) {
    real top[EACH][EACH];
    fill(top, -INF);
    sweep<false>(P, tiles, top, [](real s, real a, real b, int, int) { return MAX(s, a + b); });
    UNROLLED (int q = 0; q < EACH * EACH; q++) {
        real &x = top[q / EACH][q % EACH];
        x = x > -INF && x < INF ? x : 0;
    }
    fill(out, 0);
    sweep<false>(P, tiles, out, [&](real s, real a, real b, int y, int x) { return s + EXP(a + b - top[y][x]); });
    UNROLLED (int q = 0; q < EACH * EACH; q++)
        out[q / EACH][q % EACH] = top[q / EACH][q % EACH] + LOG(out[q / EACH][q % EACH]);
}

// Mode of log_tiles: all tiles, every entry from its own maximum, or the latter only if log_sums found such entries
enum { TILES, EXACT, REPAIR };

// One tile of one product a block; step_B = 0: one B for all.
extern "C" __global__ void __launch_bounds__(256)
    log_tiles(const real *A, const real *B, const real *r, const real *c, real *out, int64_t m, int64_t k, int64_t n,
              int64_t step_B, int mode, const int *lost_some) {
    __shared__ Tiles tiles;
    const int64_t across = (n + TILE - 1) / TILE, down = (m + TILE - 1) / TILE;
    const int64_t product = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
    const Product P = {m,
                       k,
                       n,
                       A + product * m * k,
                       B + product * step_B,
                       r + product * m,
                       c + (step_B ? product * n : 0),
                       (int)(tile / across) * TILE,
                       (int)(tile % across) * TILE};
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const real limit = (real)k * EXP(LOW) / EPS;
    real sum[EACH][EACH];
    bool lost = mode != TILES;
    if (mode == REPAIR && *lost_some == 0) return;
    fill(sum, 0);
    if (mode == TILES) sweep<true>(P, tiles, sum, [](real s, real e, real f, int, int) { return s + e * f; });
    UNROLLED (int y = 0; y < EACH; y++)
        UNROLLED (int x = 0; x < EACH; x++) {
            const int i = P.i0 + place(ty, y), j = P.j0 + place(tx, x);
            if (i < m && j < n) {
                const real shift = P.r[i] + P.c[j];
                lost |= unknown(sum[y][x], shift, limit);
                sum[y][x] = shift + LOG(sum[y][x]);
            }
        }
    if (__syncthreads_or(lost)) exact_tile(P, tiles, sum);
    UNROLLED (int y = 0; y < EACH; y++)
        UNROLLED (int x = 0; x < EACH; x++) {
            const int i = P.i0 + place(ty, y), j = P.j0 + place(tx, x);
            if (i < m && j < n) out[product * m * n + (int64_t)i * n + j] = sum[y][x];
        }
}

// For products by a library: e^(x - shift) of a row of A, with its shift, or of B, with the shifts of its product.
extern "C" __global__ void __launch_bounds__(256)
    exponentials(const real *x, const real *shift, real *out, int64_t length, int64_t rows, int of_A) {
    const int64_t at = blockIdx.x * length;
    shift += of_A ? (int64_t)blockIdx.x : blockIdx.x / rows * length;
    for (int64_t q = threadIdx.x; q < length; q += 256) out[at + q] = taken<true>(x[at + q], shift[of_A ? 0 : q]);
}

// Then for a row of its sums S, in place, log S + r_i + c_j; *lost counts the rows with entries that this cannot give.
extern "C" __global__ void __launch_bounds__(256)
    log_sums(real *S, const real *r, const real *c, int64_t m, int64_t k, int64_t n, int64_t step_c, int *lost) {
    const real limit = (real)k * EXP(LOW) / EPS, row = r[blockIdx.x];
    bool bad = false;
    c += blockIdx.x / m * step_c;
    S += blockIdx.x * n;
    for (int64_t q = threadIdx.x; q < n; q += 256) {
        const real shift = row + c[q], s = S[q];
        bad |= unknown(s, shift, limit);
        S[q] = shift + LOG(s);
    }
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicAdd(lost, 1);
}
