/* kernels_tmpl.c - the O(mn) kernels that depend on the storage of K; compiled once per instruction set and dtype.
 *
 * row_pass is the fused read-only pass. It reads a tile of R rows from memory for s = K v, computes u = prox(s), and
 * reads the tile again from cache for K^T u, while the next tile comes from memory. narrow_pass does the same in short
 * float32 runs, twice as fast out of cache; row_pass certifies its answers. row_dots is its first half. With one
 * potential (half_tile) an entry counts for its row and, as K is symmetric, for its column. plan_pass is the single
 * pass of arXiv 2412.11079 with the scalings carried: the buffer is the plan.
 * The source of a tile is known at compile time. STORED: it lies in K. MADE: its rows are computed into the thread's
 * own buffer, used for both halves and overwritten by the next tile: from M in float64 through cost.h, or from points
 * in float32 together with their dots (narrow_points.h). If M stores only some pairs, so does K, and a tile is some
 * runs of entries (sparse.h).
 * Contract and glossary: kernels.h.  Twins: dense/row_pass.cuh, dense/portable.cu, backends/reference.py.
 */
#include "cost.h"
#include "kernels.h"
#include "narrow_points.h"
#include "prox_rows.h"
#include "sparse.h"
#include "vec.h"

enum { LINE = 64 / sizeof(real) }; /* columns a step: a cache line of K */
enum { DOTS_AHEAD = 8 * LINE };    /* columns requested ahead of the dots */
enum { L1_TILE = 32 << 10 };       /* bytes of tiles that stay in L1 */
enum { RUN = 512, RUN_ROWS = 64 }; /* columns (x FL: of a lane) and rows that are summed in float32 */

/* the data of a pass over a range of rows */
typedef struct {
    const mapuot_state *state;
    int64_t np, ld;
    const double *v;
    const float *narrow_v;
    double *sums;
    float *run; /* narrow column sums of up to RUN_ROWS rows */
} range;

static range range_of(const mapuot_state *state, const double *v, double *sums) {
    return (range){state, padded(state->n), state->ld, v, state->narrow_v, sums, state->run};
}

/* rows with known factors: u, or for the plan the growth of u */
typedef struct {
    real *row;
    const double *u;
} tile;

typedef enum { WIDE, NARROW, PLAN } form;  /* the three passes; always a compile-time constant */
typedef enum { STORED, MADE } source;      /* source of a tile; also a compile-time constant */
enum { MAKES = sizeof(real) == 8 };        /* rows of K are computed in float64 for any storage... */
enum { MAKES_POINTS = sizeof(real) == 4 }; /* ...and in float32 for narrow passes between points */

/* ---- rows from M ---- */

/* Write out[k .. count), less than VL entries. */
ALWAYS_INLINE void write_part(real *out, const double *entry, int64_t k, int64_t count) {
    v_store_part_real(out + k, v_load(entry + k), (int)(count - k));
}

/* Stream past the caches, from the first whole cache line on, if K or the plan is larger than they are. */
ALWAYS_INLINE void write_block(real *out, const double *entry, int64_t count, int nontemporal) {
    const int64_t head = (int64_t)(-(uintptr_t)out % 64 / sizeof(real));
    int64_t k = 0;
    if (nontemporal && head < count && (uintptr_t)(out + head) % 64 == 0) {
        for (; k < head; k += VL) write_part(out, entry, k, k + VL < head ? k + VL : head);
        for (k = head; k + VL <= count; k += VL) v_stream_real(out + k, v_load(entry + k));
    }
    for (; k + VL <= count; k += VL) v_store_real(out + k, v_load(entry + k));
    write_part(out, entry, k, count);
}

/* The rows [i0, i1) of K from column `from` on, followed by zeros, or of the plan, to out with stride ld. */
ALWAYS_INLINE void make_rows(const stream_args *args, int64_t i0, int64_t i1, int64_t from, real *out, const int plan) {
    _Alignas(64) double entry[BLOCK + PAD]; /* PAD: the last load of write_part is a whole vector */
    const int64_t np = padded(args->n), step = rows_together(&args->M), width = columns_together(&args->M);
    panel near;
    open_panel(&near, step, i1, args->n);
    for (int64_t i = i0; i < i1; i += step)
        for (int64_t j = from; j < args->n; j += width)
            for (int64_t r = i; r < i1 && r < i + step; r++) {
                int64_t count = args->n - j < width ? args->n - j : width;
                entries(args, r, j, count, REAL_MIN_LOG, plan ? 0 : REAL_NARROW, &near, entry);
                for (; !plan && j + count < np && count < width; count++) entry[count] = 0.0;
                write_block(out + (r - i0) * args->ld + j - from, entry, count, args->nontemporal);
            }
}

/* make_rows for stored pairs: row after row, from the first row of this process on */
static void make_runs(const stream_args *args, int64_t i0, int64_t i1, const int plan) {
    _Alignas(64) double entry[BLOCK];
    real part[VL];
    stored block;
    open_stored(args, &block);
    for (int64_t i = i0; i < i1; i++) {
        const run row = run_of(&args->M, i);
        BLOCKS_OF(row) {
            const int64_t whole = count / VL * VL;
            real *out = (real *)args->out + row.first + k;
            take_stored(args, row, k, count, &block);
            entries(&block.args, i, 0, count, REAL_MIN_LOG, plan ? 0 : REAL_NARROW, &block.near, entry);
            for (int64_t q = 0; q < whole; q += VL) v_store_real(out + q, v_load(entry + q));
            if (whole < count) {
                v_store_real(part, v_load(entry + whole));
                memcpy(out + whole, part, (size_t)(count - whole) * sizeof(real));
            }
        }
    }
}

static void build_kernel(const stream_args *args, int64_t i0, int64_t i1) {
    const int64_t step = args->across ? PAD : i1 - i0;
    if (args->M.start) make_runs(args, i0, i1, 0);
    for (int64_t i = i0, next; i < i1 && !args->M.start; i = next) {
        const int64_t from = first_of(args, i);
        next = i + step < i1 ? i + step : i1;
        make_rows(args, i, next, from, (real *)args->out + i * args->ld + from, 0);
    }
}

static void form_plan(const stream_args *args, int64_t i0, int64_t i1) {
    if (args->M.start) make_runs(args, i0, i1, 1);
    else make_rows(args, i0, i1, 0, (real *)args->out + i0 * args->ld, 1);
}

/* Compute a tile in the columns that its rows are kept with, one run behind the other. */
static __attribute__((noinline)) void make_tile(const mapuot_state *state, int64_t i, int64_t count) {
    int32_t whole[2];
    const kept_runs runs = runs_made(state, i, whole);
    stream_args args = {.m = state->m,
                        .n = state->n,
                        .M = state->M,
                        .c = state->c,
                        .inv_reg = state->limits.inv_reg,
                        .alpha = state->alpha,
                        .beta = state->beta,
                        .ld = state->ld};
    real *out = (real *)state->tile;
    if (!state->M.points.kept.first) {
        make_rows(&args, i, i + count, whole[0], out, 0);
        return;
    }
    for (int64_t k = 0; k < runs.count; k++) {
        const int64_t from = runs.run[2 * k], end = runs.run[2 * k + 1];
        args.n = (end < state->n ? end : state->n) - from;
        args.M.points.y = state->M.points.y + from;
        args.beta = state->beta + from;
        make_rows(&args, i, i + count, 0, out, 0);
        out += end - from;
    }
}

/* Return R rows of K from i on. A computed tile overwrites the previous one; a narrow one also gives its dots s. */
ALWAYS_INLINE real *open_tile(const range *g, int64_t i, double *s, const form form, const source from, const int R) {
    if (from == STORED) return (real *)g->state->kernel + i * g->ld;
    if (MAKES_POINTS && form == NARROW) made_tile(g->state, i, (float *)g->state->tile, s, R);
    else make_tile(g->state, i, R);
    return (real *)g->state->tile;
}

/* ---- the halves of a tile ---- */

/* Prefetch the lines DOTS_AHEAD columns behind column j in R rows; behind their end, lines of the rows that follow. */
ALWAYS_INLINE void request_ahead(const range *g, const real *K, const real *next, int64_t j, const int R) {
    const real *from = j + DOTS_AHEAD < g->np ? K + j + DOTS_AHEAD : next + j + DOTS_AHEAD - g->np;
    UNROLLED (int r = 0; r < R; r++) __builtin_prefetch(from + r * g->ld, 0, 3);
}

/* Prefetch half of the next tile, line by line, while the sums work in cache: memory must not idle. */
ALWAYS_INLINE void request_half(const real *next, int64_t k, const int R) {
    UNROLLED (int q = 0; q < R / 2; q += 64 / (LINE * (int)sizeof(real)))
        __builtin_prefetch(next + R / 2 * k + q * LINE, 0, 2);
}

/* Prefetch the data that prox_part needs for the rows from i on. */
ALWAYS_INLINE void request_rows(const mapuot_side *rows, int64_t i) {
    const double *read[] = {rows->fi, rows->base, rows->absorbed, rows->weight, rows->rho};
    const double *written[] = {rows->scale, rows->log_scale, rows->marginal};
    UNROLLED (int f = 0; f < 5; f++)
        if (read[f]) __builtin_prefetch(read[f] + i, 0, 3);
    UNROLLED (int f = 0; f < 3; f++) __builtin_prefetch(written[f] + i, 1, 3);
}

/* sums += u_r row_r in VL columns from j on; rows of the plan are also multiplied by u_r and v_j */
ALWAYS_INLINE void wide_columns(const range *g, const tile *done, const vd *scale, vd vj, int64_t j, const form form,
                                const int R) {
    vd column = v_load(g->sums + j);
    UNROLLED (int r = 0; r < R; r++) {
        real *at = done->row + r * g->ld + j;
        if (form == PLAN) {
            const vd p = v_mul(v_mul(v_load_real(at), vj), scale[r]);
            v_store_real(at, p);
            column = v_add(column, p);
        } else {
            column = v_fma(v_load_real(at), scale[r], column);
        }
    }
    v_store(g->sums + j, column);
}

/* s_r = K_r . v for R rows, written up to a multiple of VL; the same sweep adds the column sums of the tile `done` */
ALWAYS_INLINE void wide_dots(const range *g, const real *K, const real *next, const tile *done, double *s,
                             const form form, const int R) {
    vd sum[TILE], scale[TILE];
    UNROLLED (int r = 0; r < R; r++) sum[r] = v_set(0.0), scale[r] = v_set(done ? done->u[r] : 0.0);
    for (int64_t j = 0; j < g->np; j += LINE) {
        if (done) request_ahead(g, K, next, j, R);
        UNROLLED (int q = 0; q < LINE; q += VL) {
            const vd vj = v_load(g->v + j + q);
            if (done) wide_columns(g, done, scale, vj, j + q, form, R);
            UNROLLED (int r = 0; r < R; r++) sum[r] = v_fma(v_load_real(K + r * g->ld + j + q), vj, sum[r]);
        }
    }
    UNROLLED (int r = 0; r < R; r += VL) v_store(s + r, v_sum_each(sum + r, R - r));
}

/* run += u_r row_r in FL columns from j on; with flush, the run is added to sums in float64 */
ALWAYS_INLINE void narrow_columns(const range *g, const tile *done, const vf *scale, int64_t j, int flush,
                                  const int R) {
    vf column = f_load(g->run + j);
    UNROLLED (int r = 0; r < R; r++) column = f_fma(f_load_real(done->row + r * g->ld + j), scale[r], column);
    if (flush) f_add_to(g->sums + j, column);
    f_store(g->run + j, flush ? f_set(0.0f) : column);
}

/* wide_dots in float32 runs, for narrow K and v */
ALWAYS_INLINE void narrow_dots(const range *g, const real *K, const real *next, const tile *done, int flush, double *s,
                               const int R) {
    const float *v = g->narrow_v;
    vd total[TILE];
    vf scale[TILE];
    UNROLLED (int r = 0; r < R; r++) total[r] = v_set(0.0), scale[r] = f_set(done ? (float)done->u[r] : 0.0f);
    for (int64_t j0 = 0; j0 < g->np; j0 += RUN) {
        const int64_t j1 = j0 + RUN < g->np ? j0 + RUN : g->np;
        vf sum[TILE];
        UNROLLED (int r = 0; r < R; r++) sum[r] = f_set(0.0f);
        for (int64_t j = j0; j < j1; j += LINE) {
            if (done) request_ahead(g, K, next, j, R);
            UNROLLED (int q = 0; q < LINE; q += FL) {
                const vf vj = f_load(v + j + q);
                if (done) narrow_columns(g, done, scale, j + q, flush, R);
                UNROLLED (int r = 0; r < R; r++) sum[r] = f_fma(f_load_real(K + r * g->ld + j + q), vj, sum[r]);
            }
        }
        UNROLLED (int r = 0; r < R; r++) total[r] = v_add(total[r], f_fold(sum[r]));
    }
    UNROLLED (int r = 0; r < R; r += VL) v_store(s + r, v_sum_each(total + r, R - r));
}

ALWAYS_INLINE void dots(const range *g, const real *K, const real *next, const tile *done, int flush, double *s,
                        const form form, const int R) {
    if (form == NARROW) narrow_dots(g, K, next, done, flush, s, R);
    else wide_dots(g, K, next, done, s, form, R);
}

/* the column sums of R rows; a tile larger than L1 is swept backwards, since its end was read last */
ALWAYS_INLINE void sums(const range *g, const tile *done, const real *next, int flush, const form form, const int R) {
    const int backwards = R * g->np * (int64_t)sizeof(real) > L1_TILE;
    const int64_t step = backwards ? -LINE : LINE;
    vd scale[TILE];
    vf narrow[TILE];
    UNROLLED (int r = 0; r < R; r++) scale[r] = v_set(done->u[r]), narrow[r] = f_set((float)done->u[r]);
    for (int64_t k = 0, j = backwards ? g->np - LINE : 0; k < g->np; k += LINE, j += step) {
        if (next) request_half(next, k, R);
        UNROLLED (int q = 0; q < LINE; q += form == NARROW ? FL : VL)
            if (form == NARROW) narrow_columns(g, done, narrow, j + q, flush, R);
            else wide_columns(g, done, scale, v_load(g->v + j + q), j + q, form, R);
    }
}

/* The columns [from, end) of a range, as a range of its own */
ALWAYS_INLINE range part_of(const range *g, int64_t from, int64_t end) {
    range part = *g;
    part.np = end - from;
    part.v += from;
    part.narrow_v += from;
    part.sums += from;
    part.run = g->run ? g->run + from : NULL;
    return part;
}

/* Dots of a computed tile, run by run. s has TILE places, and prox_rows reads more than R of them. */
ALWAYS_INLINE void made_tile_dots(const range *g, int64_t i, const real *K, double *s, const form form, const int R) {
    int32_t whole[2];
    const kept_runs runs = runs_made(g->state, i, whole);
    double part_s[TILE];
    UNROLLED (int r = 0; r < TILE; r++) s[r] = 0.0;
    for (int64_t k = 0; k < runs.count; k++) {
        const range part = part_of(g, runs.run[2 * k], runs.run[2 * k + 1]);
        dots(&part, K, NULL, NULL, 0, part_s, form, R);
        UNROLLED (int r = 0; r < R; r++) s[r] += part_s[r];
        K += part.np;
    }
}

/* Column sums of a computed tile. */
ALWAYS_INLINE void made_tile_sums(const range *g, int64_t i, const tile *done, int flush, const form form,
                                  const int R) {
    int32_t whole[2];
    const kept_runs runs = runs_made(g->state, i, whole);
    tile now = *done;
    for (int64_t k = 0; k < runs.count; k++) {
        const range part = part_of(g, runs.run[2 * k], runs.run[2 * k + 1]);
        sums(&part, &now, NULL, flush, form, R);
        now.row += part.np;
    }
}

/* Do the rows from i and from j on lie in different boxes, with different runs? */
ALWAYS_INLINE int parted(const mapuot_kept *kept, int64_t i, int64_t j) {
    return kept->first && (kept->before + i) / kept->rows != (kept->before + j) / kept->rows;
}

/* u = prox(s) of R rows. s of the plan includes the old u and is divided by it; growth is the ratio of new u to
 * old u. */
ALWAYS_INLINE void prox(const range *g, int64_t i, double *s, double *growth, const form form, const int R) {
    const double *u = g->state->rows.scale + i;
    UNROLLED (int r = 0; r < R && form == PLAN; r++) {
        growth[r] = u[r] > 0.0 ? 1.0 / u[r] : 0.0;
        s[r] *= growth[r];
    }
    prox_rows(g->state, i, R, s, g->sums + g->np);
    UNROLLED (int r = 0; r < R && form == PLAN; r++) growth[r] *= u[r];
}

/* Tiles of R rows from i0 on. Every other pass goes downwards, since the caches still hold the rows read last. Plain:
 * dots, prox and sums of a tile, then the next tile, while the sums prefetch half of it. Piped: the sums of a tile and
 * the dots of the next in one sweep. Both make the same additions, bit for bit. */
ALWAYS_INLINE void row_tiles(const range *g, int64_t i0, int64_t count, const int piped, const form form,
                             const source from, const int R) {
    const int64_t step = g->state->progress.passes & 1 ? -R : R;
    double s[TILE], growth[TILE];
    int64_t i = step < 0 ? i0 + (count - 1) * R : i0;
    for (int64_t t = 0; t < count; t++, i += step) {
        const int last = t + 1 == count, leaves = from == MADE && parted(&g->state->M.points.kept, i, i + step);
        const int flush = last || leaves || (t + 1) % (RUN_ROWS / R) == 0;
        const tile now = {open_tile(g, i, s, form, from, R), form == PLAN ? growth : g->state->rows.scale + i};
        const real *next = last || from == MADE ? NULL : (real *)g->state->kernel + (i + step) * g->ld;
        if (form == NARROW && from == MADE)
            ; /* the dots came with the tile */
        else if (from == MADE) made_tile_dots(g, i, now.row, s, form, R);
        else if (!piped || t == 0) dots(g, now.row, NULL, NULL, 0, s, form, R);
        if (!last) request_rows(&g->state->rows, i + step);
        prox(g, i, s, growth, form, R);
        if (piped && next) dots(g, next, t + 2 < count ? next + step * g->ld : next, &now, flush, s, form, R);
        else if (from == MADE) made_tile_sums(g, i, &now, flush, form, R);
        else sums(g, &now, piped ? NULL : next, flush, form, R);
    }
}

ALWAYS_INLINE void tiles_or_pipe(const range *g, int64_t i0, int64_t count, const form form, const source from,
                                 const int R) {
    if (from == STORED && g->state->piped) row_tiles(g, i0, count, 1, form, from, R);
    else row_tiles(g, i0, count, 0, form, from, R);
}

ALWAYS_INLINE void row_range(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, const form form,
                             const source from) {
    const range g = range_of(state, form == PLAN ? state->history : state->cols.scale, sums);
    const int R = state->tile_rows;
    const int64_t count = (i1 - i0) / R, left = i1 - i0 - count * R;
    if (R == 8) tiles_or_pipe(&g, i0, count, form, from, 8);
    else if (R == 4) tiles_or_pipe(&g, i0, count, form, from, 4);
    else tiles_or_pipe(&g, i0, count, form, from, 2);
    row_tiles(&g, i1 - left, left, 0, form, from, 1);
}

/* s = K v of R rows to rows.marginal */
ALWAYS_INLINE void dots_tile(const range *g, int64_t i, const form form, const source from, const int R) {
    double s[TILE] = {0};
    const real *K = open_tile(g, i, s, form, from, R);
    if (from == MADE && form == WIDE) made_tile_dots(g, i, K, s, WIDE, R);
    else if (from == STORED) dots(g, K, NULL, NULL, 0, s, form, R);
    memcpy(g->state->rows.marginal + i, s, R * sizeof(double));
}

ALWAYS_INLINE void dots_range(const range *g, int64_t i0, int64_t i1, const form form, const source from) {
    const int R = form == NARROW ? TILE : 4;
    int64_t i = i0;
    for (; i + R <= i1; i += R) dots_tile(g, i, form, from, R);
    for (; i < i1; i++) dots_tile(g, i, form, from, 1);
}

/* Add the float32 runs to the float64 sums. */
ALWAYS_INLINE void flush_runs(const range *g, int64_t from) {
    for (int64_t j = from; j < g->np; j += FL) {
        f_add_to(g->sums + j, f_load(g->run + j));
        f_store(g->run + j, f_set(0.0f));
    }
}

/* R rows of a symmetric K from first_column on, in one read: rows.marginal = K v, and behind the cache line of the
 * diagonal sums += K^T v for the rows below. */
ALWAYS_INLINE void half_tile(const range *g, int64_t i, const real *next, const form form, const source from,
                             const int R) {
    const int64_t first = first_column(1, i);
    const range line = part_of(g, first, first + PAD), rest = part_of(g, first + PAD, g->np);
    double s[TILE] = {0}, more[TILE] = {0};
    real *K = open_tile(g, i, s, form, from, R) + (from == STORED ? first : 0);
    const tile done = {K + PAD, g->v + i};
    if (form == NARROW && from == MADE) {
        sums(&rest, &done, NULL, 0, form, R);
    } else {
        dots(&line, K, NULL, NULL, 0, s, form, R);
        dots(&rest, K + PAD, next, &done, 0, more, form, R);
    }
    for (int r = 0; r < R; r++) g->state->rows.marginal[i + r] = s[r] + more[r];
}

/* Every other pass goes downwards, as row_tiles do. */
ALWAYS_INLINE void half_tiles(const range *g, int64_t i0, int64_t i1, const form form, const source from, const int R) {
    const int64_t count = (i1 - i0) / R, down = g->state->progress.passes & 1;
    for (int64_t t = 0; t < count; t++) {
        const int64_t i = i0 + (down ? count - 1 - t : t) * R, next = t + 1 == count ? i : down ? i - R : i + R;
        half_tile(g, i, (real *)g->state->kernel + next * g->ld + first_column(1, next) + PAD, form, from, R);
        if (form == NARROW && (t + 1) % (RUN_ROWS / R) == 0) flush_runs(g, first_column(1, down ? i : i0));
    }
    for (int64_t i = i0 + count * R; i < i1; i++) half_tile(g, i, (real *)g->state->kernel + i * g->ld, form, from, 1);
    if (form == NARROW) flush_runs(g, first_column(1, i0));
}

/* The product K v with one potential: half of the pairs stand for all. */
ALWAYS_INLINE void product_range(const mapuot_state *state, int64_t i0, int64_t i1, double *sums, const form form,
                                 const source from) {
    const range g = range_of(state, state->cols.scale, sums);
    if (is_halved(state)) half_tiles(&g, i0, i1, form, from, TILE);
    else dots_range(&g, i0, i1, form, from);
}

/* ---- stored pairs ---- */

enum { LONG_RUN = 128 }; /* least pairs of a row to load by gathers, faster than single loads */

/* K_i . v of a long row, in two chains of vectors */
ALWAYS_INLINE double long_dot(const real *K, const run row, const double *v) {
    vd even = v_set(0), odd = v_set(0);
    double rest = 0;
    int64_t k = 0;
    for (; k + 2 * VL <= row.count; k += 2 * VL) {
        even = v_fma(v_load_real(K + k), v_gather(v, row.column + k), even);
        odd = v_fma(v_load_real(K + k + VL), v_gather(v, row.column + k + VL), odd);
    }
    for (; k < row.count; k++) rest += K[k] * v[row.column[k]];
    return v_sum(v_add(even, odd)) + rest;
}

/* K_i . v in four chains: a single chain would wait 4 cycles an entry for its sum */
ALWAYS_INLINE double run_dot(const real *K, const run row, const double *v) {
    if (row.count >= LONG_RUN) return long_dot(K, row, v);
    double sum[4] = {0.0};
    int64_t k = 0;
    for (; k + 4 <= row.count; k += 4) {
        UNROLLED (int q = 0; q < 4; q++) sum[q] += K[k + q] * v[row.column[k + q]];
    }
    for (; k < row.count; k++) sum[0] += K[k] * v[row.column[k]];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* The eight sums belong to different columns, so that none waits for another's store. */
ALWAYS_INLINE void run_sums(const real *K, const run row, double u, double *sums) {
    int64_t k = 0;
    for (; k + 8 <= row.count; k += 8) {
        double sum[8];
        for (int q = 0; q < 8; q += VL) v_store(sum + q, v_mul(v_set(u), v_load_real(K + k + q)));
        UNROLLED (int q = 0; q < 8; q++) sum[q] += sums[row.column[k + q]];
        UNROLLED (int q = 0; q < 8; q++) sums[row.column[k + q]] = sum[q];
    }
    for (; k < row.count; k++) sums[row.column[k]] += u * K[k];
}

/* R rows from i on: their dots, u = prox(s), their column sums */
ALWAYS_INLINE void run_tile(const range *g, int64_t i, const int R) {
    const mapuot_state *state = g->state;
    const real *K = (const real *)state->kernel;
    double s[TILE] = {0.0};
    run rows[TILE];
    for (int r = 0; r < R; r++) {
        rows[r] = run_of(&state->M, i + r);
        s[r] = run_dot(K + rows[r].first, rows[r], g->v);
    }
    prox_rows(state, i, R, s, g->sums + g->np);
    for (int r = 0; r < R; r++) run_sums(K + rows[r].first, rows[r], state->rows.scale[i + r], g->sums);
}

/* Whole tiles, then the remaining rows one by one; every other pass goes downwards, as in row_tiles. */
static void run_range(const mapuot_state *state, int64_t i0, int64_t i1, double *sums) {
    const range g = range_of(state, state->cols.scale, sums);
    const int64_t count = (i1 - i0) / TILE, down = state->progress.passes & 1;
    for (int64_t t = 0; t < count; t++) run_tile(&g, i0 + (down ? count - 1 - t : t) * TILE, TILE);
    for (int64_t i = i0 + count * TILE; i < i1; i++) run_tile(&g, i, 1);
}

static void run_dots(const mapuot_state *state, int64_t i0, int64_t i1) {
    for (int64_t i = i0; i < i1; i++) {
        const run row = run_of(&state->M, i);
        state->rows.marginal[i] = run_dot((const real *)state->kernel + row.first, row, state->cols.scale);
    }
}

/* ---- the passes ---- */

static void row_pass(const mapuot_state *state, int64_t i0, int64_t i1, double *sums) {
    if (state->M.start) run_range(state, i0, i1, sums);
    else if (MAKES && makes_rows(state)) row_range(state, i0, i1, sums, WIDE, MADE);
    else row_range(state, i0, i1, sums, WIDE, STORED);
}

#ifdef MAPUOT_DTYPE_F64
#define narrow_pass NULL /* a float64 K has no float32 passes */
#else
static void narrow_pass(const mapuot_state *state, int64_t i0, int64_t i1, double *sums) {
    if (MAKES_POINTS && makes_rows(state)) row_range(state, i0, i1, sums, NARROW, MADE);
    else row_range(state, i0, i1, sums, NARROW, STORED);
}
#endif

/* On entry history[j] = v_j / (the v_j that the plan holds), and rows.scale is the u that it holds. */
static void plan_pass(const mapuot_state *state, int64_t i0, int64_t i1, double *sums) {
    row_range(state, i0, i1, sums, PLAN, STORED);
}

static void row_dots(const mapuot_state *state, int64_t i0, int64_t i1, double *sums) {
    if (state->M.start) run_dots(state, i0, i1);
    else if (MAKES_POINTS && state->progress.narrow && makes_rows(state))
        product_range(state, i0, i1, sums, NARROW, MADE);
    else if (MAKES_POINTS && state->progress.narrow) product_range(state, i0, i1, sums, NARROW, STORED);
    else if (MAKES && makes_rows(state)) product_range(state, i0, i1, sums, WIDE, MADE);
    else product_range(state, i0, i1, sums, WIDE, STORED);
}

void KERNEL(batch_pass)(mapuot_state *const *states, int count);
extern const struct log_matmul_kernels KERNEL(log_matmul);

const dtype_kernels KERNEL(kernels) = {row_pass,     narrow_pass, row_dots,           plan_pass,
                                       build_kernel, form_plan,   KERNEL(batch_pass), &KERNEL(log_matmul)};
