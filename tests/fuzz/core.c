/* core.c - the C interface under arbitrary bytes: sizes, strides, aliasing, numbers of any bits, statuses.
 *
 * LLVMFuzzerTestOneInput reads one call from its input: what, which instruction set, how many threads, shapes, layouts,
 * then numbers. Every array ends where its contract says, between what the address sanitizer guards; a status that is
 * none, a count beyond what was asked or a certificate that is no number aborts. Driven by libFuzzer or by driver.c.
 */
#include <stddef.h>

#include "check_passes.h"

#define MUST(what)                                                                                                     \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what);                                         \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST = 40, POOLS = 3 };

static const uint8_t *input;
static size_t left;
static mapuot_pool *pools[POOLS];

static unsigned byte(void) { return left ? left--, *input++ : 0; }
static int64_t below(int64_t n) { return (int64_t)(byte() % (unsigned)n); }

/* a number: mostly a tame one, else the very bits */
static double number(void) {
    static const double odd[] = {0,         -0.0,   1,     -1,     INFINITY, -INFINITY, NAN,
                                 0x1p-1074, 1e-308, 1e308, -1e308, 1e-30,    1e30,      745};
    const unsigned kind = byte();
    double x = 0;
    if (kind < 160) return kind / 32.0;
    if (kind < 200) return odd[kind % (sizeof odd / sizeof *odd)];
    if (kind < 230) return ldexp(1 + kind / 256.0, (int)byte() * 9 - 1150);
    for (int k = 0; k < 8; k++) ((unsigned char *)&x)[k] = (unsigned char)byte();
    return x;
}

/* the first few from the input, the rest repeat them */
static void fill(double *x, int64_t count) {
    double kept[24];
    const int64_t fresh = 1 + below(24);
    for (int64_t k = 0; k < fresh; k++) kept[k] = number();
    for (int64_t k = 0; k < count; k++) x[k] = kept[k % fresh];
}

static double *numbers(int64_t count) {
    double *x = vector(count, 0);
    fill(x, count);
    return x;
}

/* m x n entries of a buffer that ends with the last one reached: rows, columns, backwards, overlapping, or one for all */
static mapuot_matrix matrix(int64_t m, int64_t n) {
    const int64_t layout = below(8), gap = below(3);
    int64_t rows = n + gap, cols = 1, first = 0, last;
    if (layout == 1) {
        rows = 1;
        cols = m + gap;
    } else if (layout == 2) {
        rows = 0;
        cols = 1;
    } else if (layout == 3) {
        rows = 1;
        cols = 1;
    } else if (layout == 4) {
        rows = cols = 0;
    } else if (layout == 5) {
        rows = -rows;
    } else if (layout == 6) {
        rows = 2 * n + gap;
        cols = -2;
    }
    first += rows < 0 ? -rows * (m - 1) : 0;
    first += cols < 0 ? -cols * (n - 1) : 0;
    last = first + (rows > 0 ? rows * (m - 1) : 0) + (cols > 0 ? cols * (n - 1) : 0);
    mapuot_matrix M = {.row_stride = rows, .col_stride = cols, .dtype = byte() % 2 ? MAPUOT_F32 : MAPUOT_F64};
    double *wide = numbers(last + 1);
    M.data = wide + first;
    if (M.dtype == MAPUOT_F32) {
        float *narrow = guarded((size_t)(last + 1) * sizeof(float), 0);
        for (int64_t k = 0; k <= last; k++) {
            uint64_t bits;
            memcpy(&bits, wide + k, 8);
            memcpy(narrow + k, &bits, 4); /* any bits again: a conversion would make inf of most */
            if (k % 2) narrow[k] = fabs(wide[k]) < 1e30 ? (float)wide[k] : 1.0f;
        }
        M.data = narrow + first;
    }
    return M;
}

static void status_is_one(int status) { MUST(status >= MAPUOT_BAD_ARGUMENT && status <= MAPUOT_COARSE); }

static void streams(mapuot_pool *pool, int64_t m, int64_t n) {
    const mapuot_matrix M = matrix(m, n), other = matrix(m, n), none = {0};
    const mapuot_matrix c = below(3) == 0 ? none : below(2) ? M : other; /* c may be M itself */
    const int64_t np = padded(n), d = 1 + below(9), what = below(7), ld = np + 16 * below(2);
    const double reg = number();
    double *alpha = numbers(m), *beta = numbers(n), out[4];
    const mapuot_dtype dtype = (mapuot_dtype)below(2);
    int status = MAPUOT_RUNNING;
    if (what == 0) {
        status = mapuot_extrema(pool, m, n, M, out);
        MUST(out[2] >= 0 && out[3] >= 0 && out[2] + out[3] <= (double)(m * n));
    } else if (what == 1) {
        status = mapuot_balance(pool, m, n, M, c, reg, beta, alpha, vector(n, 0));
    } else if (what == 2) {
        status = mapuot_build_kernel(pool, m, n, M, c, reg, alpha, beta, m == n && below(2) ? n : 0, dtype,
                                     guarded((size_t)(m * ld) * width[dtype], 0), ld);
    } else if (what == 3) {
        status =
            mapuot_form_plan(pool, m, n, M, c, reg, alpha, beta, dtype, guarded((size_t)(m * n) * width[dtype], 0), n);
    } else if (what == 4) {
        status = mapuot_apply(pool, m, n, M, c, reg, alpha, beta, d, numbers(d * np), vector(m * d, 0));
    } else if (what == 5) {
        status = mapuot_apply_transpose(pool, m, n, M, c, reg, alpha, beta, d, numbers(m * d), vector(d * np, 0));
    } else {
        status = mapuot_plan_sums(pool, m, n, M, c, reg, alpha, beta, out, below(2) ? vector(m, 0) : NULL,
                                  below(2) ? vector(n, 0) : NULL);
    }
    status_is_one(status);
}

/* ---- passes ---- */

/* what the binding would have made of other arguments: other numbers of the same signs */
static void spoil(mapuot_state *state) {
    mapuot_side *const sides[] = {&state->rows, &state->cols};
    const unsigned which = byte();
    for (int k = 0; k < 2; k++) {
        const int64_t len = sides[k]->len;
        if (which & 1u << k) fill((double *)sides[k]->weight, len);
        if (which & 4u << k) fill((double *)sides[k]->absorbed, len);
        if (which & 16u << k) fill(sides[k]->scale, len);
        if (which & 64u << k) fill((double *)sides[k]->rho, len);
    }
    if (byte() % 2)
        for (int64_t i = 0; i < state->m; i++)
            for (int64_t j = 0; j < state->n; j++)
                store(state->kernel, state->dtype, i * state->ld + j, byte() / 200.0 * (byte() < 250 ? 1.0 : number()));
    state->limits.tol = byte() % 2 ? number() : 1e-6;
    state->limits.tol_gap = byte() % 4 ? -1 : number();
    state->limits.storage_error = byte() % 4 ? 1e-16 : fmax(0, number());
    state->limits.exponent_error = byte() % 4 ? 1e-15 : fmax(0, number());
    state->limits.flush = byte() % 2 ? 0 : fmax(0, number());
    state->limits.scale_limit = byte() % 2 ? 1e100 : number();
    state->limits.most_scale = byte() % 2 ? 1e250 : number();
    state->limits.lam_rate = byte() % 2 ? 0.5 : number();
    state->limits.mu_rate = byte() % 2 ? 0.5 : number();
    state->limits.dual_constant = number();
    state->limits.dual_scale = fmax(0, number());
}

static mapuot_state fuzzed_state(int64_t m, int64_t n, int threads, int may_be_narrow) {
    const mapuot_dtype dtype = (mapuot_dtype)below(2);
    const int memory = (int)below(MAX_MEMORY + 1), np = (int)padded(n);
    mapuot_state state = new_state(m, n, dtype, (int)below(SIDE_KINDS), (int)below(SIDE_KINDS), memory, threads);
    memset(state.partial, 0, (size_t)(threads * (np + SCALARS)) * sizeof(double));
    state.progress =
        (mapuot_progress){.best_dual = -INFINITY, .best_error = INFINITY, .progress_dual = -INFINITY, .kappa = 1};
    state.narrow_v = guarded((size_t)np * sizeof(float), 0);
    state.run = guarded((size_t)(threads * np) * sizeof(float), 0);
    memset(state.run, 0, (size_t)(threads * np) * sizeof(float));
    memset(state.history, 0, (size_t)mapuot_history(memory, n) * sizeof(double));
    state.progress.narrow = may_be_narrow && dtype != MAPUOT_F64 && below(2);
    state.limits.in_place = !state.progress.narrow && memory == 0 && below(3) == 0;
    if (state.limits.in_place)
        for (int64_t j = 0; j < np; j++) state.history[j] = state.cols.scale[j];
    state.limits.finer = dtype != MAPUOT_F64 && !state.limits.in_place && below(2);
    if (state.limits.finer) { /* where the storage is too coarse for tol, passes make K from M */
        state.M = matrix(m, n);
        state.c = below(2) ? matrix(m, n) : (mapuot_matrix){0};
        state.alpha = numbers(m);
        state.beta = numbers(n);
        state.tile = vector(threads * TILE * state.ld, 0);
    }
    state.piped = (int32_t)below(3) - 1;
    state.tile_rows = (int32_t)(below(2) ? 0 : 2 << below(3));
    spoil(&state);
    return state;
}

static void told_is_sound(const mapuot_state *state, const mapuot_stats *stats, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        status_is_one((int)stats[k].status);
        if (stats[k].status == MAPUOT_CONVERGED) {
            MUST(stats[k].error <= state->limits.tol || stats[k].gap <= state->limits.tol_gap * fabs(stats[k].dual));
            MUST(stats[k].error >= 0);
            MUST(isfinite(stats[k].mass));
        }
    }
}

static void passes(mapuot_pool *pool, int64_t m, int64_t n) {
    const int64_t count = 1 + below(30);
    mapuot_state state = fuzzed_state(m, n, mapuot_pool_threads(pool), 1);
    mapuot_stats *stats = guarded((size_t)count * sizeof(mapuot_stats), 0);
    int64_t made = -1;
    if (state.limits.in_place == 0 && below(4) == 0) { /* the products of the rows, and their prox */
        state.progress.narrow = 0;
        status_is_one(mapuot_row_dots(pool, &state));
        status_is_one(mapuot_row_prox(pool, &state));
        return;
    }
    status_is_one(mapuot_iterate(pool, &state, count, stats, &made));
    MUST(made >= 0 && made <= count);
    told_is_sound(&state, stats, made);
}

static void batch(mapuot_pool *pool, int64_t m, int64_t n) {
    enum { MOST_PROBLEMS = 20 };
    const int64_t p = 1 + below(MOST_PROBLEMS), np = padded(n), mp = padded(m), shared = below(2);
    mapuot_state states[MOST_PROBLEMS], *first = states;
    mapuot_stats stats[MOST_PROBLEMS];
    memset(stats, 0, sizeof stats);
    *first = fuzzed_state(m, n, 1, 0);
    first->limits.in_place = first->limits.finer = 0;
    mapuot_side *const sides[] = {&first->rows, &first->cols};
    for (int k = 0; k < 2; k++) { /* tables of p rows instead of the vectors */
        const int64_t len = sides[k]->len, size = k ? np : mp;
        const double **inputs[] = {&sides[k]->weight, &sides[k]->absorbed, sides[k]->base ? &sides[k]->base : NULL};
        double **outputs[] = {&sides[k]->log_scale, &sides[k]->scale, &sides[k]->marginal};
        for (int j = 0; j < 6; j++) {
            double **from = j < 3 ? (double **)inputs[j] : outputs[j - 3];
            if (!from) continue;
            double *table = vector(p * size, 0);
            for (int64_t i = 0; i < p * size; i++)
                table[i] = i % size < len ? (*from)[i % size] : j == 1 ? INFINITY : 0.0;
            *from = table;
        }
    }
    double *K = guarded((size_t)((shared ? 1 : p) * m * first->ld) * width[first->dtype], 0);
    for (int64_t q = 0; q < (shared ? 1 : p); q++)
        memcpy((char *)K + (size_t)(q * m * first->ld) * width[first->dtype], first->kernel,
               (size_t)(m * first->ld) * width[first->dtype]);
    first->kernel = K;
    first->sums = vector(p * (np + SCALARS), 0);
    first->work = vector(p * 3 * np, 0);
    const int64_t history = p * mapuot_history(first->limits.memory, n);
    first->history = vector(history, 0);
    memset(first->work, 0, (size_t)(p * 3 * np) * sizeof(double));
    memset(first->history, 0, (size_t)history * sizeof(double));
    status_is_one(mapuot_batch_spread(p, (int32_t)shared, states));
    status_is_one(
        mapuot_batch_iterate(pool, p, (int32_t)shared, (int32_t)below(20), states, 1 + below(20), stats, NULL));
    told_is_sound(first, stats, p);
}

/* ---- products of logarithms ---- */

static void products(mapuot_pool *pool, int64_t m, int64_t n) {
    const int64_t p = 1 + below(4), k = 1 + below(MOST), shared = below(2);
    const mapuot_dtype dtype = (mapuot_dtype)below(2);
    const int32_t stop = below(8) == 0;
    const int64_t a = p * m * k, b = (shared ? 1 : p) * k * n;
    void *A = guarded((size_t)a * width[dtype], 0), *B = guarded((size_t)b * width[dtype], 0);
    double *wide = numbers(a + b);
    for (int64_t i = 0; i < a + b; i++) {
        const double x = fabs(wide[i]) < 1e38 || dtype == MAPUOT_F64 ? wide[i] : (double)INFINITY * wide[i];
        store(i < a ? A : B, dtype, i < a ? i : i - a, x);
    }
    const int status = mapuot_log_matmul(pool, p, m, k, n, dtype, A, B, (int32_t)shared, (int32_t)below(2),
                                         guarded((size_t)(p * m * n) * width[dtype], 0), below(2) ? &stop : NULL);
    MUST(status == MAPUOT_RUNNING);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const isas[] = {"scalar", "avx2", "avx512", "auto"};
    input = data;
    left = size;
    for (int k = 0; k < POOLS && !pools[k]; k++) pools[k] = mapuot_pool_new(k + 1);
    const unsigned what = byte();
    mapuot_set_isa(isas[byte() % 4]);
    MUST(mapuot_set_isa("none") == MAPUOT_BAD_ARGUMENT);
    mapuot_pool *pool = pools[what / 8 % POOLS];
    const int64_t m = 1 + below(MOST), n = 1 + below(what % 64 == 63 ? 255 : MOST);
    void (*const calls[])(mapuot_pool *, int64_t, int64_t) = {streams, passes, batch, products};
    calls[what % 4](pool, m, n);
    release(0);
    return 0;
}
