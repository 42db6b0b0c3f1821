/* kernels.h - the contract between the solver and the kernels, with one table of pointers per instruction set.
 *
 * Glossary. M (m x n) cost; a, b weights of rows and columns; reg; reg_m = rho per point; fi = rho / (rho + reg); c
 * reference; u, v scalings; d, e the logs absorbed in K ("absorbed"); shift s, a common translation:
 *     K_ij = c_ij exp(alpha_i + beta_j - M_ij / reg),  alpha = log a + d, beta = log b + e  (log a, log b: c = a b^T)
 *     P = diag(scale_u) K diag(scale_v),  log u_i = log scale_u_i + d_i + s,  log v_j = log scale_v_j + e_j - s
 * The shift is stored separately since it can be thousands: masses 1:2 at rho / reg = 1e4 give 3466, and 4e-13 of
 * rounding.
 * r, s marginals (row, column); f = reg log u, g = reg log v; one pass = one read of K.
 *
 * Shapes: K is m x n with leading dimension ld >= padded(n), a multiple of 16; columns n .. padded(n) are zero. Column
 * vectors have padded(n) entries, zero (absorbed: +inf) beyond n, aligned to 64 bytes. Row vectors have m.
 * Aliasing: no two arrays overlap. Threads: a call works on rows [i0, i1), and writes only these and its own sums.
 * Precision: K as stored; every vector, product and sum in float64. In narrow_pass products, row sums of up to 32 terms
 * a lane and column sums of up to 64 rows are float32, and their totals float64. Entries of K below flush are exact
 * zeros.
 * Zeros: a point left out (absorbed = +inf) has scale 0 and marginal 0 and adds nothing. A point with a kernel sum
 * below DBL_MIN is dead: its scale is 0 in this pass, and it is counted, so that the caller can rebuild K.
 */
#pragma once
#include <math.h>
#include <stddef.h>

#include "mapuot.h"

enum { PAD = 16, TILE = 8, BLOCK = 512, SCALARS = 8, MAX_DEPTH = 20 };

/* row scalars behind the column sums */
enum { ROW_DUAL = 0, ROW_SCALE = 1, ROW_DEAD = 2 };

static inline int64_t entry_bytes(mapuot_dtype dtype) { return dtype == MAPUOT_F64 ? 8 : 4; }
static inline int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }

/* Is M stored column by column? */
static inline int is_turned(const mapuot_matrix *M) {
    const int64_t down = M->row_stride, step = M->col_stride;
    return M->data && !M->start && step != 1 && (down < 0 ? -down : down) < (step < 0 ? -step : step);
}

/* Does a pass compute its rows of K instead of reading them? */
static inline int makes_rows(const mapuot_state *state) { return state->exact || state->M.points.x; }

/* the runs of columns that a row is kept with */
typedef struct {
    const int32_t *run; /* from and to of each */
    int64_t count;
} kept_runs;

/* The runs of row i. If no pairs are left out, there is one run from column `from` on, stored in `whole` of the
 * caller. */
static inline kept_runs runs_of(const mapuot_kept *kept, int64_t i, int64_t from, int64_t np, int32_t whole[2]) {
    if (!kept->first) {
        whole[0] = (int32_t)from, whole[1] = (int32_t)np;
        return (kept_runs){whole, 1};
    }
    const int64_t box = (kept->before + i) / kept->rows, first = kept->first[box];
    return (kept_runs){kept->run + 2 * first, kept->first[box + 1] - first};
}

/* The column where row i of a symmetric K begins in passes of one potential: each pair is read once, except in the
 * cache line of the diagonal. */
static inline int64_t first_column(int64_t symmetric, int64_t i) { return symmetric ? i / PAD * PAD : 0; }

/* Does a pass of one potential read or compute only half of K? Stored or kept pairs and shared rows are read whole. */
static inline int is_halved(const mapuot_state *state) {
    return state->limits.symmetric && state->m == state->n && !state->M.start && !state->M.points.kept.first;
}

/* the runs of a row that a pass computes */
static inline kept_runs runs_made(const mapuot_state *state, int64_t i, int32_t whole[2]) {
    return runs_of(&state->M.points.kept, i, first_column(is_halved(state), i), padded(state->n), whole);
}

/* The arguments of streams over M: the entry (i, j) is c_ij exp(alpha_i + beta_j - M_ij inv_reg). */
typedef struct {
    int64_t m, n;
    mapuot_matrix M, c;
    double inv_reg;
    const double *alpha, *beta;
    int64_t d;       /* apply: columns of X or Y */
    const double *X; /* apply: d x padded(n); apply_transpose: Y, m x d */
    void *out;       /* K, P, or P X (m x d) */
    int64_t ld;
    int nontemporal; /* K or P is larger than the caches */
    double *row_sum; /* may be NULL */
    int half;        /* balance: only the row half, only the column half, or both */
    int64_t across;  /* build_kernel: columns of row 0 if K is symmetric and rows begin at first_column */
} stream_args;

/* the first column of row i that build_kernel writes */
static inline int64_t first_of(const stream_args *args, int64_t i) {
    return first_column(args->across, args->n - args->across + i);
}

enum { BOTH_HALVES, ROW_HALF, COLUMN_HALF };

/* The arguments of box_pairs (mapuot_box_pairs). */
typedef struct {
    const mapuot_boxes *boxes;
    int64_t unit;
    const int64_t *first;
    int32_t *run;
    int write;
    int64_t *count, *width;
    double *row_mass;
} box_args;

/* sums has padded(n) + SCALARS entries and is zero on entry. */
typedef void (*pass_fn)(const mapuot_state *state, int64_t i0, int64_t i1, double *sums);
typedef void (*batch_fn)(mapuot_state *const *states, int count);
typedef void (*stream_fn)(const stream_args *args, int64_t i0, int64_t i1);
/* a stream_fn with an accumulator of the calling thread, zero on entry (col_max: -inf) */
typedef void (*gather_fn)(const stream_args *args, int64_t i0, int64_t i1, double *acc);
/* mapuot_kept_pairs for some rows: the number of pairs written, -1 if there are more than room */
typedef int64_t (*kept_pairs_fn)(const stream_args *args, int64_t i0, int64_t i1, double least, int64_t room,
                                 int64_t *count, int32_t *column, double *data);
/* one sweep of finish_pass over the columns [j0, j1), both multiples of PAD; out += partial results */
typedef mapuot_sweep sweep_args;
typedef void (*sweep_fn)(const mapuot_state *state, const sweep_args *args, int64_t j0, int64_t j1, double *out);

typedef struct {
    /* If makes_rows is true, row_pass and row_dots of float64 compute their rows, and so does narrow_pass of float32 */
    pass_fn row_pass;       /* s = K v; u = prox(s); sums += K^T u */
    pass_fn narrow_pass;    /* row_pass in short float32 runs on narrow_v; NULL for float64 */
    pass_fn row_dots;       /* rows.marginal = K v; rows from first_column on add the products that they lack to sums */
    pass_fn plan_pass;      /* row_pass on the plan itself, in place */
    stream_fn build_kernel; /* K from M */
    stream_fn form_plan;    /* P from M */
    batch_fn batch_pass;    /* row_pass for several problems that share K */
    const struct log_matmul_kernels *log_matmul;
} dtype_kernels;

/* finish_tmpl.c: finish_pass in four sweeps, in this order. row_prox: u = prox(s) and the row scalars for
 * s = rows.marginal. */
typedef struct {
    pass_fn row_prox;
    sweep_fn marginal, prox, difference, advance;
} sweep_kernels;

/* coarse_tmpl.c: rows: one thread's part of a labelled pass. part: its part of a step of the matrix or the correction.
 * factor, solve: the serial work between these steps. */
typedef struct {
    void (*rows)(const mapuot_state *state, pass_fn pass, int thread, int threads, double *sums);
    void (*part)(const mapuot_state *state, const sweep_args *args, int part, int thread, int threads);
    void (*factor)(const mapuot_state *state);
    void (*solve)(const mapuot_state *state, int threads);
} coarse_kernels;

/* stream_tmpl.c: streams over M */
typedef struct {
    gather_fn extrema, balance, apply_transpose, plan_sums;
    stream_fn apply, costs;
    kept_pairs_fn kept_pairs;
} stream_kernels;

/* Every template ends with its table for one instruction set; dispatch.c collects these tables. */
typedef struct {
    const char *isa;
    const dtype_kernels *dtype[2]; /* by mapuot_dtype */
    const sweep_kernels *sweeps;
    const coarse_kernels *coarse;
    const stream_kernels *streams;
    /* bounds between boxes of points, for boxes of x from i0 to i1; acc: 2 n numbers, zero on entry, first the sums of
     * the columns */
    void (*box_pairs)(const box_args *args, int64_t i0, int64_t i1, double *acc);
    const struct marginal_kernels *marginals;
    const struct left_kernels *left;
} mapuot_kernels;

/* sweep results: sums over columns, but a maximum for MAX_RESIDUAL */
enum { SUM_MASS, SUM_WEIGHT, SUM_SCALE, SUM_DEAD };                                           /* sweep_marginal */
enum { SUM_GAP, SUM_HARD, SUM_DUAL, SUM_NEXT, SUM_MISFIT };                                   /* sweep_prox */
enum { SUM_ADVANCED };                                                                        /* sweep_advance */
enum { MAX_RESIDUAL, SUM_DOT, SUM_RHS = SUM_DOT + MAX_DEPTH, SWEEP_OUT = 1 + 2 * MAX_DEPTH }; /* sweep_difference */

const mapuot_kernels *mapuot_active_kernels(void);
enum { COARSE_WEIGH, COARSE_PRODUCTS, COARSE_GATHER, COARSE_SPREAD }; /* coarse_part */

int64_t mapuot_l2_bytes(void); /* L2 bytes of one core; MAPUOT_L2_KIB overrides the value of the system */

/* pool.c: run fn once on every thread of the pool, including the caller's, and return when all are done. */
typedef void (*pool_fn)(void *context, int thread, int threads);
void pool_run(mapuot_pool *pool, pool_fn fn, void *context);
/* finish.c: gamma = argmin |F - sum gamma_i dF_i| for n <= MAX_DEPTH differences, by normal equations with normalised
 * columns. gram: sum w dF_i dF_j, with rows of ld numbers; rhs: sum w dF_i F. */
void anderson_weights(int n, int64_t ld, const double *gram, const double *rhs, double *gamma);
/* coarse.c: called before sweep_advance */
void coarse_correct(mapuot_pool *pool, const mapuot_state *state, const sweep_args *args);
int pool_slowness(const mapuot_pool *pool, int thread); /* mapuot_pool_slow */

/* The first row of thread t of T: whole tiles, as even as possible. */
static inline int64_t first_row(int64_t m, int t, int T) {
    int64_t tiles = (m + TILE - 1) / TILE, row = tiles * t / T * TILE;
    return row < m ? row : m;
}

enum { ROW_ENTRIES = 12 }; /* the prox of a row takes as long as this many stored entries */

/* first_row, balanced by the work of the rows: for stored pairs, and for rows that begin at first_column, where the
 * first row has `across` columns. */
static inline int64_t first_row_of(const mapuot_matrix *M, int64_t across, int64_t m, int t, int T) {
    const double part = (double)t / T, n = (double)across;
    if (!M->start && across && t < T) /* n i - i^2 / 2 entries before row i */
        return (int64_t)(n - sqrt(n * n - part * (double)m * (2.0 * n - (double)m))) / TILE * TILE;
    if (!M->start) return first_row(m, t, T);
    const double total = (double)(M->start[m] - M->start[0] + ROW_ENTRIES * m);
    int64_t low = 0, high = (m + TILE - 1) / TILE;
    while (low < high) {
        const int64_t tile = (low + high) / 2, row = tile * TILE;
        if ((double)(M->start[row] - M->start[0] + ROW_ENTRIES * row) < part * total) low = tile + 1;
        else high = tile;
    }
    return t == T || low * TILE > m ? m : low * TILE;
}
