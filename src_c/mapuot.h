/* mapuot.h - the C interface of mapuot: entropic unbalanced optimal transport on dense costs.
 *
 * The caller owns every array; the library owns only its thread pools and starts no thread elsewhere.
 * No call prints, and no call returns into the caller's code.  Every call returns a mapuot_status.
 * Only #pragma once and #include stand here as preprocessor lines: the Python binding reads this file and
 * common/record.h, which has the records that the rules of a pass work on.
 * The words (m n a b M reg reg_m u v K) are explained once, in kernels.h.
 */
#pragma once
#include "common/record.h"

typedef enum { MAPUOT_F64, MAPUOT_F32 } mapuot_dtype;

/* Which pairs of points count, the others being left out of every sum: points of x in boxes of `rows`, and for each box
 * the runs of y, [from, to), that it is kept with (boxes_tmpl.c); first NULL: all pairs. */
typedef struct {
    int64_t rows, before; /* before: points of x in front of the first one here */
    const int64_t *first; /* boxes + 1: where the runs of a box begin */
    const int32_t *run;   /* from and to, multiples of 16; the last may end at padded(n) */
    int64_t width;        /* the most columns of one box */
} mapuot_kept;

/* Two clouds of points; their costs, scale times the metric, are made where they are needed (points.h). */
typedef struct {
    const double *x; /* m x d, one point after another */
    const double *y; /* d x ld, one coordinate after another; ld is padded(n), copies of the last point behind n */
    int64_t d, ld;
    double scale;
    mapuot_metric metric;
    mapuot_kept kept;
} mapuot_points;

/* Boxes of points of both clouds, in units in which a cost is reg, for bounds on the plan between them (boxes_tmpl.c).
 * Those of x: m, d numbers each, one box after another; those of y: d x n, one coordinate after another, n a multiple of
 * 16; log_mass: log of the sum over a box of e^(log scaling - slope (x - mid)), -inf of one without mass. */
typedef struct {
    int64_t m, n, d;
    mapuot_metric metric; /* slopes other than 0 are for SQEUCLIDEAN only */
    const double *x_mid, *x_half, *x_slope, *x_log_mass;
    const double *y_mid, *y_half, *y_slope, *y_log_mass;
    const double *x_cut, *y_cut; /* skipped where the log of the bound is at most x_cut + y_cut */
} mapuot_boxes;

/* A matrix as the caller has it, M or the reference c: dense, strides in elements, dtype F64 or F32; where points.x is
 * not NULL, that of two clouds, and the other members do not count.  Where start is not NULL, it has m + 1 numbers and
 * only some pairs are stored: of row i the entries data[k - start[0]], start[i] <= k < start[i + 1], in the columns
 * column[k - start[0]], each column once.  Pairs that are not stored are forbidden.  A reference of such an M has its
 * entries in the same places; K and the plan have theirs so, too.
 * c is multiplied by what its mask makes, if any. */
typedef struct {
    const void *data;
    int64_t row_stride, col_stride;
    mapuot_dtype dtype;
    mapuot_points points;
    const int64_t *start;
    const int32_t *column;
    mapuot_mask mask;
} mapuot_matrix;

/* What mapuot_limits come from. */
typedef struct {
    double reg;
    double rho_rows, rho_cols; /* the one rho of a side's points, inf where they are hard; NaN: they have no one rho */
    double largest_rho;        /* the largest one of a soft point */
    double rho_kl, rho_tv, rho_l2, hard_sides; /* see mapuot_limits */
    double noise;                              /* what float32 passes leave in a marginal */
    double tol, tol_gap;
    int64_t translate, memory, in_place;
    mapuot_dtype dtype;
    double path, missed; /* see mapuot_limits */
    int64_t symmetric;
} mapuot_terms;

/* One marginal: the rows (a, u) or the columns (b, v).  All arrays have len entries; those of the columns
 * are padded with zeros to a multiple of 16 and aligned to 64 bytes. */
typedef struct {
    int64_t len;
    mapuot_penalty penalty;
    const double *weight;   /* a or b */
    const double *rho;      /* reg_m per point (inf = balanced); MAPUOT_RANGE: the lower factor */
    const double *upper;    /* MAPUOT_RANGE: the upper factor; else NULL */
    const double *absorbed; /* d: the log scaling that K holds; +inf marks a point left out (scale 0) */
    const double *fi;       /* KL, balanced: rho / (rho + reg) */
    const double *base;     /* KL, balanced: fi log(weight) - (1 - fi) d; -inf where left out */
    double *log_scale;      /* rows: log(scale), relative to d + shift; columns: log v + shift */
    double *scale;          /* exp(log_scale) relative to what K holds: P = diag(scale_u) K diag(scale_v) */
    double *marginal;       /* r or s, the marginal of the current plan */
    const double *factor;   /* NULL, or of rows: u = factor s, no prox, so that row_pass makes a product of the plan */
} mapuot_side;

/* Clusters of rows, and the correction of steps by what they exchange (coarse_tmpl.c). */
typedef struct {
    int64_t clusters, own;        /* on all processes, and on this one */
    const int64_t *order, *first; /* m: the rows, cluster by cluster; own + 1: where each begins */
    float *blocks, *own_blocks;   /* clusters x n padded: the shares of the columns in the plan's mass of a cluster */
    double *mass, *own_mass;      /* clusters: the plan's mass */
    float *weights;               /* clusters x n padded: W, of the last matrix */
    double *part;                 /* clusters: r, of the last matrix */
    double *root;                 /* n padded: of the mass of a column, of the last matrix */
    double *matrix;               /* clusters x clusters */
    double *step;                 /* clusters */
    double *sums;                 /* threads x (n padded + MAPUOT_SCALARS), or x clusters where these are more */
    double fi;                    /* fi1 fi2 */
    int64_t labelled;             /* 1: the next row_pass finds own_blocks and own_mass */
} mapuot_coarse;

/* One worker in the passes of a state (schedule.c). */
typedef struct {
    double pace;    /* seconds a row takes it, from the passes before; 0: not known */
    double seconds; /* that the last pass took it */
    double part;    /* its share of the rows to claim, by its pace */
    int64_t first;  /* where its range begins */
    int64_t rows;   /* how many it summed in the last pass */
} mapuot_share;

/* What float32 passes between points make their rows of (narrow_points.h); x NULL: there are none. */
typedef struct {
    const float *x;   /* m x d, one point after another */
    const float *y;   /* n padded / 16 blocks of 16 points, in each one coordinate after another */
    const float *row; /* m: the exponent of base 2 beside that of the metric */
    const float *col; /* n padded, -2^15 behind n, as of all that is left out */
    int64_t d;
    mapuot_narrow_form form;
} mapuot_narrow_points;

/* All that one solve holds.  sums has n entries (padded) and then MAPUOT_SCALARS row scalars: with the rows
 * shared among processes, the sum of this one array over them is all that row_pass has to exchange. */
typedef struct {
    int64_t m, n, ld; /* K is m x n with leading dimension ld (a multiple of 16) */
    int64_t before;   /* of one potential: the column of the first row, where processes share the rows */
    mapuot_dtype dtype;
    void *kernel; /* K */
    mapuot_limits limits;
    mapuot_progress progress;
    mapuot_side rows, cols;
    double *sums;
    double *partial;   /* threads x (n padded + 16): column sums of each thread */
    double *work;      /* 3 x n padded: log v + shift of the last certified state, then two of finish_pass's own */
    double *history;   /* mapuot_history: Anderson's differences and their Gram matrix; in place: v / (v in K) */
    float *narrow_v;   /* n padded: v in float32; passes are narrow_pass while progress.narrow is 1, else row_pass */
    float *run;        /* threads x n padded, zero: column sums of some rows in float32 */
    int32_t tile_rows; /* 2, 4 or 8 rows of K at a time; 0: by the size of L2 */
    int32_t piped;     /* 1: the sums of a tile and the dots of the next in one sweep; -1: if faster, by measurement */
    int32_t tried[2];  /* passes measured, wide and narrow */
    double seconds[2][2]; /* the shortest of them, plain and piped */
    int32_t exact;        /* 1: K is remade from M in float64, tile by tile, since its storage is too coarse for tol */
    mapuot_matrix M, c;   /* for exact passes, and for points, of which there is no K to read */
    const double *alpha, *beta; /* the logs in K (m, n) */
    double *tile;               /* threads x 8 x ld: the rows of K that a pass makes and works on */
    mapuot_narrow_points narrow_points;
    mapuot_coarse coarse; /* in use while progress.coarse or its own labelled is 1 */
    mapuot_share *shares; /* one a thread: rows by the speed of each; NULL: evenly, whatever their speed */
    int64_t parts;        /* 2 and more: parts of M that no pair connects, each with a translation of its own */
    const int32_t *part;  /* n: that of a column, < parts */
    double *part_sums;    /* 2 x parts */
} mapuot_state;

/* What the sweeps of finish_pass need beside the state. */
typedef struct {
    double offset;       /* log of the factor that the translation before the prox puts on u and the column sums */
    double kappa;        /* e^offset */
    double base;         /* 0 where there is a translation, else the shift: the first sweep finds b e^(-k (x - base)) */
    double q_factor;     /* what that lacks of q = b e^(-k log v): e^(k shift), or 1 */
    double common;       /* translation of log v found after the prox */
    int64_t slot, depth; /* Anderson: where the new difference goes (-1: none), how many count */
    double gamma[20];
} mapuot_sweep;

typedef struct mapuot_pool mapuot_pool;

const char *mapuot_isa(void);                      /* the instruction set in use: scalar, avx2, avx512, neon */
int mapuot_set_isa(const char *isa);               /* lower or restore it ("auto"); for tests and benchmarks */
int mapuot_scalars(void);                          /* row scalars at the end of sums */
int64_t mapuot_history(int64_t memory, int64_t n); /* length of history, for a memory of at most 20 */

/* fills limits, but for what K and the range of numbers decide: exponent_error, scale_limit, most_scale and the dual's */
void mapuot_limits_of(const mapuot_terms *terms, mapuot_limits *limits);
/* padded row length of K; one cache line more where rows would otherwise fall on the same cache sets */
int64_t mapuot_leading(int64_t n, int64_t entry_bytes);

/* cores: that this process may keep busy; more threads than these sleep as soon as they have nothing to do */
mapuot_pool *mapuot_pool_new(int threads, int cores);
void mapuot_pool_free(mapuot_pool *pool);
int mapuot_pool_threads(const mapuot_pool *pool);
/* For tests and benchmarks, while the pool is idle: this worker makes row_pass so many times over, as a slow core would. */
void mapuot_pool_slow(mapuot_pool *pool, int thread, int times);

/* row_pass: s = K v, u = prox(s), sums = K^T u, row scalars; reads K once. finish_pass: the O(n) rest.
 * row_dots: rows.marginal = K v.  row_prox: u = prox(s) and the row scalars of s = rows.marginal, the column sums zero.
 * iterate: at most count passes of both, stopping early on any status but RUNNING; *made passes were made. */
int mapuot_row_pass(mapuot_pool *pool, mapuot_state *state);
int mapuot_row_dots(mapuot_pool *pool, mapuot_state *state);
int mapuot_row_prox(mapuot_pool *pool, mapuot_state *state);
int mapuot_finish_pass(mapuot_pool *pool, mapuot_state *state, mapuot_stats *stats);
int mapuot_iterate(mapuot_pool *pool, mapuot_state *state, int64_t count, mapuot_stats *stats, int64_t *made);

/* The rules of a pass (common/rules.h) for callers that make passes of their own, with records of their own: plan_error,
 * settle and judge.  judge_again counts extra_error and extra_gap where they are known only after the pass was judged;
 * 1: the solve may still end. */
double mapuot_plan_error(double d);
void mapuot_settle(const mapuot_limits *limits, mapuot_progress *progress, mapuot_stats *stats);
int mapuot_judge(const mapuot_limits *limits, mapuot_progress *progress, mapuot_stats *stats, double scale,
                 double next_v);
int mapuot_judge_again(const mapuot_limits *limits, const mapuot_progress *progress, mapuot_stats *stats);

/* What follows from the potentials that K holds: of a side whose absorbed is set the weights in use and base, where it
 * has one; of a state whose cols.log_scale is set too, v. */
void mapuot_set_side(mapuot_side *side, const double *weight, const double *log_weight);
void mapuot_set_scale(mapuot_state *state);

/* Newton's step towards hard columns (newton.c), by reverse communication: begin after a pass; while the verdict is ASKS the
 * caller fills t with P^T ((fi / r) o P d) and calls next. */
typedef enum {
    MAPUOT_HOLDS,       /* the error is at most tol */
    MAPUOT_HOLDS_AFTER, /* so is that of the next pass, made from log v + y */
    MAPUOT_OPEN,        /* neither: the passes go on from log v + y, `wait` of them before another step is tried */
    MAPUOT_GIVES_UP,    /* the same, and no other step is worth its products */
    MAPUOT_ASKS
} mapuot_verdict;

enum { MAPUOT_MOST_PRODUCTS = 300 }; /* of one step at most */

typedef struct {
    int64_t m, n;           /* of all processes */
    int64_t hard_rows;      /* 1: all of them are */
    double least;           /* curvature of S relative to D, at least: 1 - fi of all rows; 0: unknown */
    int64_t symmetric;      /* 1: passes of one potential, and t is -P d */
    int64_t marginals;      /* of many: their points lie one behind the other, and t_k is -sum_l P_kl d_l; else 0 */
    const int64_t *start;   /* marginals + 1 */
    double widest;          /* of many: the largest x_i + y_j in units of the largest x, where y is left out; else 0 */
    double rounding;        /* of the marginals of many, and of what is asked of them, relative */
    double reg, tol, found; /* found: the error of the pass, with what hard columns miss in it */
    double rough;           /* > 0: a step that proves nothing, of equations solved but for this share of their size */
    int64_t enough;         /* products of such a step at most */
    const double *marginal; /* n: s */
    double *asked, *diagonal, *rate, *left, *y, *d, *t; /* n each */
    double *steps_made, *ratios;                        /* MAPUOT_MOST_PRODUCTS + 1 each */
    double error;                                       /* of the plan of the pass, certified */
    double after; /* bound on that of the next one, without the error that its pass finds (mapuot_newton_error) */
    double mass, missed, apart, most, size, first, curvature, paths;
    int64_t products, all_products; /* of this step and of all */
    int64_t tried, wait;            /* all three 0 before the first step of a solve */
    int64_t budget;                 /* products of a solve after which steps give up, where a factor follows; 0: none */
} mapuot_newton;

int mapuot_newton_begin(mapuot_newton *newton, const double *weight, const double *rho, const double *log_v,
                        const int32_t *part, int64_t parts);
int mapuot_newton_next(mapuot_newton *newton);
/* The error of a pass, and what a step proves of its plan but for that. */
double mapuot_newton_error(double apart, double bound);
/* The vectors of a step, laid out in room. */
int64_t mapuot_newton_room(int64_t n);
void mapuot_newton_place(mapuot_newton *newton, int64_t n, double *room);
/* For products by row_pass with rows.factor = factor (m) and v o d in place of v (n padded): t is v o sums. */
void mapuot_newton_factors(const mapuot_state *state, double *factor, double *v);
/* The step from the last pass of a state that is alone with its K; meet acts on it: CONVERGED, STALLED, or RUNNING where the
 * passes go on.  stats: of the pass, and room for one more, which *made counts. */
int64_t mapuot_meet_room(int64_t m, int64_t n);
int mapuot_newton_solve(mapuot_pool *pool, const mapuot_state *state, mapuot_newton *newton, double *room);
int mapuot_meet(mapuot_pool *pool, mapuot_state *state, mapuot_newton *newton, double *room, int64_t passes_left,
                mapuot_stats *stats, int64_t *made);

/* Plain problems solved whole (solve.c): KL or balanced sides of one rho each, c = a b^T.
 *
 * A stage is a run of passes at one reg.  The last stage is the problem's own; the others, larger regs, are carried out
 * in order where there is no start and range(M) / reg is more than `spread` (mapuot/route/stages.py).  One of one potential
 * is the only one of a problem whose rows and columns are the same, and is left out of others. */
typedef struct {
    double reg;               /* in units of the problem's */
    double tol, balanced_tol; /* the latter where rows and columns are hard */
    double spread;
    int64_t most;      /* passes of the problem at its end; the last stage makes one at least */
    int64_t symmetric; /* 1: passes of one potential */
} mapuot_stage;

/* What all problems of one call share; the numbers of the last two lines are stated in Python: problem/validate.py,
 * problem/problem.py, backends/. */
typedef struct {
    int64_t m, n;    /* of the largest problem */
    mapuot_matrix M; /* strides and type, or of points d, metric and scale; what is each problem's own is there */
    mapuot_terms terms;
    const mapuot_stage *stages;
    int64_t count;      /* how many stages */
    int64_t max_passes; /* of one problem; where the last stage allows fewer, one that needs more is left unsolved */
    int64_t
        hard_passes; /* of a stage, and products for hard columns, after which a factor serves better: STALLED; 0: any */
    mapuot_stats *trace; /* of the one problem: the last stage's most + 8 passes; or NULL */
    double mass_tolerance, safe_spread, far, exponent_rounding, vanishing, scale_limit, most_scale;
    double cost_error; /* bound on what is wrong with an entry of M; 0 of costs that are given as numbers */
} mapuot_task;

/* One of them.  status: CONVERGED, RUNNING (out of passes), STALLED (log v to go on from), any other: nothing of it holds. */
typedef struct {
    int64_t m, n;
    const void *M;                       /* unless the task has points */
    const double *x, *y;                 /* m x d and n x d, one point after another */
    const double *a, *b, *log_a, *log_b; /* masses, each with its logarithm and sum */
    double mass_a, mass_b;
    const double *start;   /* log v (n); NULL: zeros, by way of larger regs */
    double *log_u, *log_v; /* m, n */
    double *row_marginal, *col_marginal;
    double *alpha, *beta;      /* the exponents of the plan beside M / reg */
    void *plan;                /* m x n in M's type, or NULL */
    double *x_slope, *y_slope; /* of mapuot_slopes: as x and y, or NULL */
    double low, high;          /* range of M's finite entries */
    mapuot_stats last;
    int64_t made;      /* passes, those on entry counted */
    int64_t larger;    /* stages at larger regs that were carried out */
    int64_t products;  /* for Newton's step towards hard columns */
    int64_t forbidden; /* 1: some M_ij is inf; on entry 1: the masses of parts are known to fit */
    int64_t symmetric; /* 1: rows and columns are the same problem, and the passes those of one potential */
    int64_t status;
} mapuot_problem;

/* p problems, shared by the threads of the pool; scratch has mapuot_solve_bytes(task) for each of them, aligned to 64 */
int64_t mapuot_solve_bytes(const mapuot_task *task);
int mapuot_solve(mapuot_pool *pool, const mapuot_task *task, int64_t p, mapuot_problem *problems, void *scratch);
/* Derivatives of scale sum P_ij |x_i - y_j|^2 by x and by y, at the plans of alpha and beta, of problems between points. */
int mapuot_slopes(mapuot_pool *pool, const mapuot_task *task, int64_t p, mapuot_problem *problems, void *scratch);
/* The coarse correction after a labelled pass, whose blocks and masses the caller has gathered from all processes: its
 * matrix, with fi the product of both sides' rho / (rho + reg). */
int mapuot_coarse_matrix(mapuot_pool *pool, mapuot_state *state, double fi);
/* order: m points, X m x width, halved along the widest column of X, in whole units and then in whole halves of them. */
int mapuot_order(mapuot_pool *pool, int64_t m, int64_t width, const double *X, int64_t unit, int64_t *order);
/* Bounds on the plan's mass between boxes, summed over skipped pairs: row_mass (m), col_mass (n).  first NULL: a pair is
 * skipped by its cuts, and count and width tell how many runs and boxes of y each box of x keeps; with run those are
 * written, where first says.  Else skipped is what is not in the runs; they are in multiples of unit. */
int mapuot_box_pairs(mapuot_pool *pool, const mapuot_boxes *boxes, int64_t unit, const int64_t *first, int32_t *run,
                     int write, int64_t *count, int64_t *width, double *row_mass, double *col_mass);
/* label: m points, X m x width, in count clusters (a power of 2) by median splits along the widest column of X; order is
 * theirs, cluster by cluster. */
int mapuot_split(int64_t m, int64_t width, const double *X, int64_t count, int64_t *order, int64_t *label);

/* Streams over M.  alpha (m) and beta (n) are log scalings of rows and columns, c may have data == NULL (ones, or its mask alone):
 * the entry is c_ij exp(alpha_i + beta_j - M_ij / reg).
 * costs: M itself, of points, m x n.
 * extrema: min and max of the finite entries, the number of NaN or -inf, the number of +inf.
 * balance: alpha (on entry 0, or -inf for a row to leave out) = -max_j (log v_j - M_ij / reg + log c_ij), +inf where a
 * row has no entry; col_max_j = max_i (alpha_i + log v_j - M_ij / reg + log c_ij), -inf where a column has none. */
int mapuot_costs(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, double *out);
int mapuot_extrema(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, double out[4]);
/* whether a dense n x n matrix is its transpose; the look ends at the first difference */
int mapuot_is_symmetric(mapuot_pool *pool, int64_t n, mapuot_matrix M);
int mapuot_balance(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                   const double *log_v, double *alpha, double *col_max);
/* across: 0, or how many columns the first row has from the diagonal of a symmetric K on; no more of each is then written,
 * but for some numbers before it, which is what passes of one potential read */
int mapuot_build_kernel(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                        const double *alpha, const double *beta, int64_t across, mapuot_dtype dtype, void *K,
                        int64_t ld);
/* The pairs with log c_ij + alpha_i + beta_j - M_ij / reg >= least, row by row: count (m) of each row, and for each thread,
 * which has whole rows of its own, one after the other, `room` columns and costs, of which found (threads) are in use.
 * RUNNING, or ABSORB where a thread has more. */
int mapuot_near_pairs(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                      const double *alpha, const double *beta, double least, int64_t room, int64_t *count,
                      int64_t *found, int32_t *column, double *data);
int mapuot_form_plan(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                     const double *alpha, const double *beta, mapuot_dtype dtype, void *P, int64_t ld);
int mapuot_apply(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                 const double *alpha, const double *beta, int64_t d, const double *Xt, double *out);
int mapuot_apply_transpose(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                           const double *alpha, const double *beta, int64_t d, const double *Y, double *out_t);
/* out: <P, M>, sum of P; row_sum (m) and col_sum (n) may be NULL. */
int mapuot_plan_sums(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                     const double *alpha, const double *beta, double out[2], double *row_sum, double *col_sum);

/* Batches.  batch_spread: states[q] = states[0] with every per-problem array moved on by q of its lengths: weight,
 * absorbed, base, log_scale, scale and marginal of a side by its padded len, sums, work and history by their own, K by
 * m ld unless it is shared; rho, fi and upper are those of all.  batch_iterate: at most count passes of each problem
 * whose stats say RUNNING, as mapuot_iterate; a shared K is read once for up to slots problems.  The threads of the pool
 * share the problems.  newton: NULL, or p records, zeros before the first call, of problems whose columns are hard; count
 * 0 then certifies the last pass of those that run. */
int mapuot_batch_spread(int64_t p, int32_t shared, mapuot_state *states);
int mapuot_batch_iterate(mapuot_pool *pool, int64_t p, int32_t shared, int32_t slots, mapuot_state *states,
                         int64_t count, mapuot_stats *stats, mapuot_newton *newton);

/* out_ij = log sum_k exp(A_ik + B_kj) for p products, dense rows; exact != 0: k exponentials for every entry.  Where
 * stop is not NULL, another thread may make it 1: the call then returns within milliseconds, out unfinished. */
int mapuot_log_matmul(mapuot_pool *pool, int64_t p, int64_t m, int64_t k, int64_t n, mapuot_dtype dtype, const void *A,
                      const void *B, int32_t shared_B, int32_t exact, void *out, const int32_t *stop);

/* The points of many marginals, one behind the other, and behind one another what passes along the edges of a tree: each
 * message has the points of the edge's parent. */
typedef struct {
    int64_t count, parts, edges;
    const int64_t *start;            /* count + 1: where the points of each marginal begin */
    const int64_t *cell;             /* of each point its marginal times parts, and its part; NULL: there is one part */
    const int64_t *parent, *message; /* of each edge; edges + 1: where its message begins */
    const double *log_weight, *weight; /* masses, ones of a free marginal */
    const double *rho;                 /* count: 0 of a free marginal, inf of a hard one */
    double reg;
} mapuot_marginals;

/* What one marginal brings to the certificate, with the marginal r = a u s of the plan and q = a u^(-reg / rho): */
typedef struct {
    double largest;     /* |log u|; inf where a number is not finite, and nothing of what follows holds */
    double value, size; /* its terms of the dual value, and their sizes */
    double amount;      /* q */
    double gap, both;   /* KL(r | q), r + q; of these and the next nothing without s */
    double missed;      /* |r - a| */
} mapuot_worth;

/* log sum a u^(-reg / rho) of each marginal, in each part: count x parts, as many as are in room */
void mapuot_log_amounts(const mapuot_marginals *x, const double *log_u, double *room, double *out);
/* of each marginal; log_s may be NULL */
void mapuot_worth_of(const mapuot_marginals *x, const double *log_u, const double *log_s, mapuot_worth *out);
/* out = x + by, one of it for each of so many stretches, or, where cell is not NULL, of each number's cell */
void mapuot_moved(int64_t count, const int64_t *start, const int64_t *cell, const double *by, const double *x,
                  double *out);
/* at_edges: points that are their parent's, as in a message: log u + back + near, moved likewise, without up */
void mapuot_at_edges(const mapuot_marginals *x, const double *log_u, const double *back, const double *near,
                     const double *by, const double *up, double *out);
/* the share of a point in the mass of its marginal, a e^(log u + near + late) without its total, as in a message */
void mapuot_mass_shares(const mapuot_marginals *x, const double *log_u, const double *near, const double *late,
                        double *room, double *out);
/* of each edge: the sums of w change^2 and of w |change| */
void mapuot_change_sums(const mapuot_marginals *x, const double *weight, const double *change, double *out);

/* The edges of a tree of pairwise costs (tree.c): a child's points are the rows of K, its parent's the columns.  Numbers of
 * the points of all marginals lie one behind the other, those of all messages likewise. */
typedef struct {
    mapuot_pool *pool;
    mapuot_state *state;            /* K and room for a row_pass; NULL: none that a pass could go by */
    const double *p, *q;            /* log scalings that K holds */
    double *base;                   /* rows.base of the state */
    double fi;                      /* of the child: 0 free, 1 hard */
    double least;                   /* of sums with K: entries were flushed that smaller ones may lack */
    double sizes;                   /* the largest |p|, |q| and |cost| / reg, added up */
    int64_t narrow;                 /* 1: K and its vectors allow sums in float32 */
    int64_t child, parent, message; /* where the points begin, and what travels between child and parent */
    double error;                   /* out: bound of the rounding of both messages */
} mapuot_edge;

typedef struct {
    const double *log_weight; /* log masses of all points */
    const double *sent;       /* from the parent: all that it has but the child's own message */
    double *near, *late, *up; /* sums of messages from the leaves, on entry 0; those from the root, and to it */
    double *log_u;            /* of all but the root */
    double flush, noise;      /* factors below flush are 0; noise of sums in float32 */
    int64_t narrow;           /* 1: sums in float32 where an edge allows them */
} mapuot_messages;

/* The edges from `first` on, each after those below it; which one is left to the caller, or count */
int64_t mapuot_tree_pass(int64_t first, int64_t count, mapuot_edge *edges, const mapuot_messages *messages);

/* What one marginal of three or more leaves of a kernel (left.c): W, an entry for each point of the others together, one
 * axis each.  s_k = <W, the factors of all axes but k>, log s_k = log sums - shift + base + tops of the others; factors are
 * e^(log_weight + log_u - shift - top) of each axis, the largest 1.  Numbers of the points of all axes lie one behind the
 * other.  A call returns RUNNING, or ABSORB where what it met leaves float64 or may lack what was flushed: K is to be made
 * anew around the state. */
typedef struct {
    mapuot_pool *pool; /* for a large W */
    int64_t axes;
    const int64_t *size;
    const double *W;           /* the last axis runs fastest; NULL: the caller has it and finds the sums */
    double base, least, flush; /* sums below least may lack terms, factors and their products below flush are 0 */
    const double *log_weight, *shift;
    const double *fi; /* of each axis: 0 where its marginal is free */
    double *log_u, *log_s, *sums, *factor;
    double *top;     /* of each axis */
    double *work;    /* 2 x the entries of W over the last size */
    double *partial; /* threads x the largest size */
    double log_mass; /* of the plan, after a read and after the last turn */
} mapuot_left;

/* factors and tops of log_u */
int mapuot_left_factors(mapuot_left *left);
/* v: the product of the factors of so many axes, one behind the other, 0 below flush */
void mapuot_product(int64_t axes, const int64_t *size, const double *factor, double flush, double *v);
/* sums and log_s of all axes; where W is NULL the sums are there */
int mapuot_left_read(mapuot_left *left);
/* The axes from `first` to `end` in turn, but free ones: log_s, log_u = -fi log_s, factor and top; given: the sums of the
 * first are there.  Axes whose turn has not come when it returns ABSORB are as they were. */
int mapuot_left_turn(mapuot_left *left, int64_t first, int64_t end, int32_t given);

/* Anderson's differences of a state of several parts, which end at ends (differences.c): count <= 20 of them, in rows of all
 * the state's numbers.  Products: of each part grams (count x count), sum w dF_i dF_j, and rights (count), sum w dF_i F.
 * Weights of p such systems.  Combined: step = image - sum gamma_i dG_i, left = residual - sum gamma_i dF_i, gammas a row
 * for each part. */
void mapuot_anderson_products(int64_t parts, const int64_t *ends, int64_t count, const double *dF,
                              const double *residual, const double *weight, double *grams, double *rights);
void mapuot_anderson_weights(int64_t p, int64_t count, const double *grams, const double *rights, double *gammas);
void mapuot_anderson_combined(int64_t parts, const int64_t *ends, int64_t count, const double *gammas, const double *dF,
                              const double *dG, const double *residual, const double *image, double *step,
                              double *left);
