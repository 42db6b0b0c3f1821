/* stream_tmpl.c - one read of M for results that need the plan or the cost but no K; compiled once per instruction set.
 *
 * The entry (i, j) is c_ij exp(alpha_i + beta_j - M_ij / reg), computed block by block in L1 and used at once. Each
 * thread has its accumulators, which streams.c reduces. If M stores only some pairs, a row is a run of them (sparse.h).
 * Twin: src_cuda/plan/stream.cu.
 */
#include "sparse.h"

#define PLAN_MIN_LOG (-708.0)

/* An iterator over blocks of columns, at most `width` wide, that the rows of a tile are kept with; at and count belong
 * to the current block. */
typedef struct {
    kept_runs runs;
    int64_t n, k, end, at, count, width;
    int32_t whole[2];
} walk;

ALWAYS_INLINE void open_walk(const stream_args *args, int64_t i, int64_t width, walk *w) {
    *w = (walk){.n = args->n, .k = -1, .width = width};
    w->runs = runs_of(&args->M.points.kept, i, 0, padded(args->n), w->whole);
}

ALWAYS_INLINE int next_block(walk *w) {
    w->at += w->count;
    while (w->at >= w->end && ++w->k < w->runs.count) {
        w->at = w->runs.run[2 * w->k];
        w->end = w->runs.run[2 * w->k + 1] < w->n ? w->runs.run[2 * w->k + 1] : w->n;
    }
    w->count = w->end - w->at < w->width ? w->end - w->at : w->width;
    return w->k < w->runs.count;
}

/* Extrema of a block with entries that are not finite. */
ALWAYS_INLINE void odd_extrema(const double *M, int64_t count, vd *low, vd *high, double *acc) {
    const vd zero = v_set(0), one = v_set(1);
    vd finite = zero, infinite = zero;
    for (int64_t k = 0; k < count; k += VL) {
        vd x = v_cost(M, k, count, NAN), in = v_if_less(v_max(x, v_sub(zero, x)), v_set(INFINITY), one, zero);
        *low = v_min(*low, v_if_less(zero, in, x, v_set(INFINITY)));
        *high = v_max(*high, v_if_less(zero, in, x, v_set(-INFINITY)));
        finite = v_add(finite, in);
        infinite = v_add(infinite, v_if_less(v_set(DBL_MAX), x, one, zero));
    }
    acc[2] += (double)count - v_sum(finite) - v_sum(infinite);
    acc[3] += v_sum(infinite);
}

/* acc: min and max over finite entries, number of NaN or -inf, number of +inf */
static void extrema(const stream_args *args, int64_t i0, int64_t i1, double *acc) {
    const int64_t step = rows_together(&args->M); /* not always 8 rows: with n >= 1000 that took twice as long */
    const int64_t width = columns_together(&args->M);
    vd low = v_set(INFINITY), high = v_set(-INFINITY);
    double lane[VL];
    panel near;
    open_panel(&near, step, i1, args->n);
    acc[0] = INFINITY;
    acc[1] = -INFINITY;
    for (int64_t i = i0; i < i1; i += step)
        for (int64_t j = 0; j < args->n; j += width)
            for (int64_t r = i; r < i1 && r < i + step; r++) {
                int64_t count = args->n - j < width ? args->n - j : width;
                const double *M = cost_block(&args->M, r, j, count, &near), first = M[0];
                vd odd = v_set(0), least = low, most = high;
                for (int64_t k = 0; k < count; k += VL) {
                    vd x = v_cost(M, k, count, first);
                    odd = v_add(odd, v_sub(x, x)); /* NaN once an entry is not finite */
                    least = v_min(least, x);
                    most = v_max(most, x);
                }
                if (v_sum(odd) == 0.0) {
                    low = least;
                    high = most;
                } else odd_extrema(M, count, &low, &high, acc);
            }
    v_store(lane, low);
    for (int q = 0; q < VL; q++) acc[0] = lane[q] < acc[0] ? lane[q] : acc[0];
    v_store(lane, high);
    for (int q = 0; q < VL; q++) acc[1] = lane[q] > acc[1] ? lane[q] : acc[1];
}

/* the exponents log c_ij + alpha_i + beta_j - M_ij / reg of a block, -inf behind count */
ALWAYS_INLINE void log_entries(const stream_args *args, int64_t i, int64_t j, int64_t count, panel *near, double *out) {
    exponents(args, i, j, count, near, out);
    if (has_shares(&args->c)) {
        double buffer[BLOCK];
        const double *c = share_block(&args->c, i, j, count, buffer);
        for (int64_t k = 0; k < count; k++) out[k] = c[k] > 0.0 ? out[k] + log(c[k]) : -INFINITY;
    }
    for (int64_t k = count; k % VL; k++) out[k] = -INFINITY;
}

/* balance of stored pairs */
static void balance_runs(const stream_args *args, int64_t i0, int64_t i1, double *acc) {
    double x[BLOCK], *alpha = (double *)args->out;
    stored block;
    open_stored(args, &block);
    for (int64_t i = i0; i < i1; i++) {
        const run row = run_of(&args->M, i);
        double top = -INFINITY;
        BLOCKS_OF(row) {
            take_stored(args, row, k, count, &block);
            log_entries(&block.args, i, 0, count, &block.near, x);
            for (int64_t q = 0; q < count; q++) top = x[q] > top ? x[q] : top;
        }
        alpha[i] = -top;
        BLOCKS_OF(row) {
            if (alpha[i] == INFINITY) break;
            take_stored(args, row, k, count, &block);
            log_entries(&block.args, i, 0, count, &block.near, x);
            for (int64_t q = 0; q < count; q++) {
                double *most = acc + row.column[k + q];
                *most = x[q] > *most ? x[q] : *most;
            }
        }
    }
}

/* alpha_i = -max_j (beta_j - M_ij / reg + log c_ij) for the rows of a tile */
ALWAYS_INLINE void balance_rows(const stream_args *args, int64_t i, int64_t end, panel *near) {
    walk w;
    vd top[PANEL_ROWS];
    double x[BLOCK], lane[VL], *alpha = (double *)args->out;
    for (int64_t r = i; r < end; r++) top[r - i] = v_set(-INFINITY);
    for (open_walk(args, i, columns_together(&args->M), &w); next_block(&w);)
        for (int64_t r = i; r < end; r++) {
            log_entries(args, r, w.at, w.count, near, x);
            for (int64_t k = 0; k < w.count; k += VL) top[r - i] = v_max(top[r - i], v_load(x + k));
        }
    for (int64_t r = i; r < end; r++) {
        v_store(lane, top[r - i]);
        alpha[r] = -lane[0];
        for (int q = 1; q < VL; q++) alpha[r] = -lane[q] < alpha[r] ? -lane[q] : alpha[r];
    }
}

/* acc_j = max_i (alpha_i + beta_j - M_ij / reg + log c_ij) over the rows of a tile that have an entry */
ALWAYS_INLINE void balance_columns(const stream_args *args, int64_t i, int64_t end, panel *near, double *acc) {
    walk w;
    double x[BLOCK];
    for (open_walk(args, i, columns_together(&args->M), &w); next_block(&w);)
        for (int64_t r = i; r < end; r++) {
            const int64_t j = w.at, count = w.count;
            if (args->alpha[r] == INFINITY) continue;
            log_entries(args, r, j, count, near, x);
            for (int64_t k = 0; k < count; k++) acc[j + k] = x[k] > acc[j + k] ? x[k] : acc[j + k];
        }
}

/* alpha_i of balance_rows, to out (= args->alpha, on entry 0, or -inf for a row to leave out), +inf if the row has no
 * entry. Then, while the tile is in cache, acc_j of balance_columns. beta is log v. args->half selects one of these
 * halves. */
static void balance(const stream_args *args, int64_t i0, int64_t i1, double *acc) {
    panel near;
    const int64_t step = is_turned(&args->M) ? PANEL_ROWS : TILE;
    if (args->M.start) {
        balance_runs(args, i0, i1, acc);
        return;
    }
    open_panel(&near, step, i1, args->n);
    for (int64_t i = i0; i < i1; i += step) {
        const int64_t end = i + step < i1 ? i + step : i1;
        if (args->half != COLUMN_HALF) balance_rows(args, i, end, &near);
        if (args->half != ROW_HALF) balance_columns(args, i, end, &near, acc);
    }
}

/* the plan's entries of a block, zeros behind count */
ALWAYS_INLINE void plan_entries(const stream_args *args, int64_t i, int64_t j, int64_t count, panel *near, double *p) {
    entries(args, i, j, count, PLAN_MIN_LOG, 0, near, p);
    for (int64_t k = count; k % VL; k++) p[k] = 0.0;
}

/* out = P X of stored pairs */
static void apply_runs(const stream_args *args, int64_t i0, int64_t i1) {
    double p[BLOCK];
    const int64_t np = padded(args->n), d = args->d;
    stored block;
    open_stored(args, &block);
    for (int64_t i = i0; i < i1; i++) {
        const run row = run_of(&args->M, i);
        double *out = (double *)args->out + i * d;
        memset(out, 0, (size_t)d * sizeof(double));
        BLOCKS_OF(row) {
            take_stored(args, row, k, count, &block);
            entries(&block.args, i, 0, count, PLAN_MIN_LOG, 0, &block.near, p);
            for (int64_t x = 0; x < d; x++)
                for (int64_t q = 0; q < count; q++) out[x] += p[q] * args->X[x * np + row.column[k + q]];
        }
    }
}

/* out = P X for X transposed, d x padded(n), zero behind n */
static void apply(const stream_args *args, int64_t i0, int64_t i1) {
    walk w;
    panel near;
    double p[TILE][BLOCK];
    const int64_t np = padded(args->n), d = args->d;
    double *out = (double *)args->out;
    if (args->M.start) {
        apply_runs(args, i0, i1);
        return;
    }
    open_panel(&near, PANEL / BLOCK, i1, args->n);
    for (int64_t i = i0; i < i1; i += TILE) {
        const int rows = (int)(i1 - i < TILE ? i1 - i : TILE);
        memset(out + i * d, 0, (size_t)(rows * d) * sizeof(double));
        for (open_walk(args, i, BLOCK, &w); next_block(&w);) {
            const int64_t j = w.at, count = w.count;
            for (int r = 0; r < rows; r++) plan_entries(args, i + r, j, count, &near, p[r]);
            for (int64_t x = 0; x < d; x++)
                for (int r = 0; r < rows; r++) {
                    vd sum = v_set(0);
                    for (int64_t k = 0; k < count; k += VL)
                        sum = v_fma(v_load(p[r] + k), v_load(args->X + x * np + j + k), sum);
                    out[(i + r) * d + x] += v_sum(sum);
                }
        }
    }
}

/* acc += (P^T Y)^T of stored pairs */
static void apply_transpose_runs(const stream_args *args, int64_t i0, int64_t i1, double *acc) {
    double p[BLOCK];
    const int64_t np = padded(args->n), d = args->d;
    stored block;
    open_stored(args, &block);
    for (int64_t i = i0; i < i1; i++) {
        const run row = run_of(&args->M, i);
        BLOCKS_OF(row) {
            take_stored(args, row, k, count, &block);
            entries(&block.args, i, 0, count, PLAN_MIN_LOG, 0, &block.near, p);
            for (int64_t x = 0; x < d; x++)
                for (int64_t q = 0; q < count; q++) acc[x * np + row.column[k + q]] += p[q] * args->X[i * d + x];
        }
    }
}

/* acc (d x padded(n)) += (P^T Y)^T */
static void apply_transpose(const stream_args *args, int64_t i0, int64_t i1, double *acc) {
    walk w;
    panel near;
    double p[BLOCK];
    const int64_t np = padded(args->n), d = args->d;
    if (args->M.start) {
        apply_transpose_runs(args, i0, i1, acc);
        return;
    }
    open_panel(&near, PANEL / BLOCK, i1, args->n);
    for (int64_t i = i0; i < i1; i += TILE)
        for (open_walk(args, i, BLOCK, &w); next_block(&w);)
            for (int64_t r = i; r < i1 && r < i + TILE; r++) {
                const int64_t j = w.at, count = w.count;
                plan_entries(args, r, j, count, &near, p);
                for (int64_t x = 0; x < d; x++) {
                    vd y = v_set(args->X[r * d + x]);
                    double *sum = acc + x * np + j;
                    for (int64_t k = 0; k < count; k += VL) v_store(sum + k, v_fma(v_load(p + k), y, v_load(sum + k)));
                }
            }
}

/* plan_sums of stored pairs */
static void plan_sums_runs(const stream_args *args, int64_t i0, int64_t i1, double *acc) {
    double p[BLOCK];
    const int64_t np = padded(args->n);
    stored block;
    open_stored(args, &block);
    for (int64_t i = i0; i < i1; i++) {
        const run row = run_of(&args->M, i);
        double mass = 0.0, cost = 0.0;
        BLOCKS_OF(row) {
            take_stored(args, row, k, count, &block);
            entries(&block.args, i, 0, count, PLAN_MIN_LOG, 0, &block.near, p);
            const double *M = cost_block(&block.args.M, i, 0, count, &block.near);
            for (int64_t q = 0; q < count; q++) {
                mass += p[q];
                cost += p[q] > 0.0 ? p[q] * M[q] : 0.0;
                acc[row.column[k + q]] += p[q];
            }
        }
        acc[np] += cost;
        acc[np + 1] += mass;
        if (args->row_sum) args->row_sum[i] = mass;
    }
}

/* acc: padded(n) column sums, then <P, M> and the sum of P; row sums to row_sum */
static void plan_sums(const stream_args *args, int64_t i0, int64_t i1, double *acc) {
    walk w;
    panel near;
    double p[BLOCK];
    const int64_t np = padded(args->n);
    vd cost = v_set(0);
    if (args->M.start) {
        plan_sums_runs(args, i0, i1, acc);
        return;
    }
    open_panel(&near, PANEL / BLOCK, i1, args->n);
    for (int64_t i = i0; i < i1; i += TILE) {
        vd row[TILE];
        for (int r = 0; r < TILE; r++) row[r] = v_set(0);
        for (open_walk(args, i, BLOCK, &w); next_block(&w);)
            for (int64_t r = i; r < i1 && r < i + TILE; r++) {
                const int64_t j = w.at, count = w.count;
                plan_entries(args, r, j, count, &near, p);
                const double *M = cost_block(&args->M, r, j, count, &near);
                for (int64_t k = 0; k < count; k += VL) {
                    vd x = v_load(p + k), used = v_if_less(v_set(0), x, v_cost(M, k, count, 0.0), v_set(0));
                    row[r - i] = v_add(row[r - i], x);
                    cost = v_fma(x, used, cost);
                    v_store(acc + j + k, v_add(v_load(acc + j + k), x));
                }
            }
        for (int64_t r = i; r < i1 && r < i + TILE; r++) {
            acc[np + 1] += v_sum(row[r - i]);
            if (args->row_sum) args->row_sum[r] = v_sum(row[r - i]);
        }
    }
    acc[np] += v_sum(cost);
}

/* Find the pairs with log c_ij + alpha_i + beta_j - M_ij / reg at least `least`, row by row: the count of each row, and
 * their columns and costs. */
static int64_t kept_pairs(const stream_args *args, int64_t i0, int64_t i1, double least, int64_t room, int64_t *count,
                          int32_t *column, double *data) {
    enum { GROUP = 32 }; /* entries tested together: most groups have no such pair */
    _Alignas(64) double x[BLOCK];
    int64_t found = 0;
    walk w;
    panel near;
    open_panel(&near, PANEL / BLOCK, i1, args->n);
    for (int64_t i = i0; i < i1; i++) {
        const int64_t before = found;
        for (open_walk(args, i, BLOCK, &w); next_block(&w);) {
            const int64_t j = w.at, width = w.count;
            if (found + width > room) return -1;
            log_entries(args, i, j, width, &near, x);
            const double *M = cost_block(&args->M, i, j, width, &near);
            for (int64_t k = 0; k < width; k += GROUP) {
                const int64_t end = k + GROUP < width ? k + GROUP : width;
                vd top = v_load(x + k);
                for (int64_t q = k + VL; q < end; q += VL) top = v_max(top, v_load(x + q));
                if (!(v_top(top) >= least)) continue;
                for (int64_t q = k; q < end; q++) {
                    column[found] = (int32_t)(j + q);
                    data[found] = M[q];
                    found += x[q] >= least;
                }
            }
        }
        count[i] = found - before;
    }
    return found;
}

/* the costs of M between points, to out */
static void costs(const stream_args *args, int64_t i0, int64_t i1) {
    enum { ROWS = 4 };
    _Alignas(64) double block[ROWS * BLOCK];
    for (int64_t j = 0; j < args->n; j += BLOCK)
        for (int64_t i = i0; i < i1; i += ROWS) {
            const int64_t count = args->n - j < BLOCK ? args->n - j : BLOCK, rows = i1 - i < ROWS ? i1 - i : ROWS;
            if (rows == ROWS) points_blocks(&args->M.points, i, j, count, block, BLOCK, ROWS);
            for (int64_t r = 0; r < rows; r++) {
                if (rows < ROWS) points_block(&args->M.points, i + r, j, count, block + r * BLOCK);
                memcpy((double *)args->out + (i + r) * args->ld + j, block + r * BLOCK, (size_t)count * sizeof(double));
            }
        }
}

const stream_kernels ISA_OP(streams) = {extrema, balance, apply_transpose, plan_sums, apply, costs, kept_pairs};
