/* mapuot.h - the C interface of mapuot: entropic unbalanced optimal transport on dense costs.
 *
 * The caller owns every array. The library owns only its thread pools and starts no other thread. No call prints, and
 * no call returns into the caller's code. Every call returns a mapuot_status.
 * The only preprocessor lines are #pragma once and #include: the Python binding reads this file and common/record.h,
 * which has the records of the rules of a pass.
 * kernels.h explains the symbols (m n a b M reg reg_m u v K).
 */
#pragma once
#include "common/record.h"

typedef enum { MAPUOT_F64, MAPUOT_F32 } mapuot_dtype;

/* The pairs of points that are kept. All others are left out of every sum. Points of x lie in boxes of `rows`, and each
 * box has the runs of y, [from, to), that it is kept with (boxes_tmpl.c). first NULL: all pairs. */
typedef struct {
    int64_t rows, before; /* before: index of the first row of this call among all points of x */
    const int64_t *first; /* boxes + 1 numbers: where the runs of each box begin */
    const int32_t *run;   /* from and to, multiples of 16; the last may end at padded(n) */
    int64_t width;        /* the largest number of columns that one box is kept with */
} mapuot_kept;

/* Two clouds of points. Their costs, scale times the metric, are computed where they are needed (points.h). */
typedef struct {
    const double *x; /* m x d, one point after another */
    const double *y; /* d x ld, one coordinate after another; ld is padded(n), copies of the last point behind n */
    int64_t d, ld;
    double scale;
    mapuot_metric metric;
    mapuot_kept kept;
} mapuot_points;

/* Boxes of points of both clouds, for bounds on the plan between them (boxes_tmpl.c). Costs are in units of reg.
 * Boxes of x: m, with d numbers each, box after box. Boxes of y: d x n, coordinate after coordinate, n a multiple of
 * 16. log_mass: log of the sum over a box of e^(log scaling - slope (x - mid)), -inf for a box without mass. */
typedef struct {
    int64_t m, n, d;
    mapuot_metric metric; /* slopes may differ from 0 for SQEUCLIDEAN only */
    const double *x_mid, *x_half, *x_slope, *x_log_mass;
    const double *y_mid, *y_half, *y_slope, *y_log_mass;
    const double *x_cut, *y_cut; /* a pair is skipped if the log of its bound is at most x_cut + y_cut */
} mapuot_boxes;

/* A matrix of the caller, M or the reference c: dense, strides in elements, dtype F64 or F32. If points.x is not NULL,
 * it is the cost matrix of two clouds, and the other members are unused.
 * If start is not NULL, it has m + 1 numbers and only some pairs are stored. Row i has the entries data[k - start[0]],
 * start[i] <= k < start[i + 1], in the columns column[k - start[0]], each column once. Pairs that are not stored are
 * forbidden. The reference, K and the plan then have their entries in the same places.
 * c is multiplied by its mask, if it has one. */
typedef struct {
    const void *data;
    int64_t row_stride, col_stride;
    mapuot_dtype dtype;
    mapuot_points points;
    const int64_t *start;
    const int32_t *column;
    mapuot_mask mask;
} mapuot_matrix;

/* The inputs of the computation of mapuot_limits. */
typedef struct {
    double reg;
    double rho_rows, rho_cols; /* the rho common to a side, inf: hard points, NaN: rho differs between points */
    double largest_rho;        /* the largest rho of a soft point */
    double rho_kl, rho_tv, rho_l2, hard_sides; /* see mapuot_limits */
    double noise;                              /* error of a marginal after float32 passes */
    double tol, tol_gap;
    int64_t translate, anderson_depth, in_place;
    mapuot_dtype dtype;
    double path, missed; /* see mapuot_limits */
    int64_t symmetric;
} mapuot_terms;

/* One marginal: the rows (a, u) or the columns (b, v). All arrays have len entries. The arrays of the columns are
 * padded with zeros to a multiple of 16 and aligned to 64 bytes. */
typedef struct {
    int64_t len;
    mapuot_penalty penalty;
    const double *weight;   /* a or b */
    const double *rho;      /* reg_m per point (inf = balanced); MAPUOT_RANGE: the lower factor */
    const double *upper;    /* MAPUOT_RANGE: the upper factor; else NULL */
    const double *absorbed; /* d: the log scaling that K holds. +inf marks a point left out (scale 0) */
    const double *fi;       /* KL, balanced: rho / (rho + reg) */
    const double *base;     /* KL, balanced: fi log(weight) - (1 - fi) d; -inf where left out */
    double *log_scale;      /* rows: log(scale), relative to d + shift; columns: log v + shift */
    double *scale;          /* exp(log_scale), the scaling that K does not hold: P = diag(scale_u) K diag(scale_v) */
    double *marginal;       /* r or s, the marginal of the current plan */
    const double *factor; /* NULL, or for rows: u = factor s without a prox, so that row_pass multiplies by the plan */
} mapuot_side;

/* Clusters of rows, and the coarse correction of steps by the mass that clusters exchange (coarse_tmpl.c). */
typedef struct {
    int64_t clusters, own;        /* on all processes, and on this one */
    const int64_t *order, *first; /* m: the rows, cluster by cluster. own + 1: where each cluster begins */
    float *blocks, *own_blocks;   /* clusters x n padded: each column's share of the plan's mass in a cluster */
    double *mass, *own_mass;      /* clusters: the plan's mass in each cluster */
    float *weights;               /* clusters x n padded: W of the last matrix */
    double *part;                 /* clusters: r of the last matrix */
    double *root;                 /* n padded: square root of a column's mass, of the last matrix */
    double *matrix;               /* clusters x clusters */
    double *step;                 /* clusters */
    double *sums;                 /* threads x (n padded + MAPUOT_SCALARS), or threads x clusters if that is more */
    double fi;                    /* fi1 fi2 */
    int64_t labelled;             /* 1: the next row_pass finds own_blocks and own_mass */
} mapuot_coarse;

/* One worker thread in the passes of a state (schedule.c). */
typedef struct {
    double pace;    /* seconds a row, averaged over earlier passes, 0: not known */
    double seconds; /* time of the last pass */
    double part;    /* its share of the rows to claim, by its pace */
    int64_t first;  /* where its range begins */
    int64_t rows;   /* number of rows that it summed in the last pass */
} mapuot_share;

/* Data of the rows of K in float32 passes between points (narrow_points.h). x NULL: no such pass. */
typedef struct {
    const float *x;   /* m x d, one point after another */
    const float *y;   /* n padded / 16 blocks of 16 points, one coordinate after another in each */
    const float *row; /* m: the exponent of base 2 that is added to the metric's */
    const float *col; /* n padded: the same for columns, -2^15 behind n and for columns left out */
    int64_t d;
    mapuot_narrow_form form;
} mapuot_narrow_points;

/* The state of one solve. sums has n entries (padded) and then MAPUOT_SCALARS row scalars. If processes share the rows,
 * row_pass has to exchange only the sum of this one array over the processes. */
typedef struct {
    int64_t m, n, ld; /* K is m x n with leading dimension ld (a multiple of 16) */
    int64_t before;   /* one potential: the column of the first row, if processes share the rows */
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
    int32_t tile_rows; /* rows of K in a tile, 2, 4 or 8. 0: chosen by the size of L2 */
    int32_t piped;     /* 1: the sums of a tile and the dots of the next in one sweep, -1: if measured to be faster */
    int32_t tried[2];  /* number of passes measured, wide and narrow */
    double seconds[2][2]; /* their shortest times, plain and piped */
    int32_t exact; /* 1: K is recomputed from M in float64, tile by tile, since its storage is too coarse for tol */
    mapuot_matrix M, c;         /* for exact passes, and for points: their K is not stored */
    const double *alpha, *beta; /* the log scalings in K (m, n) */
    double *tile;               /* threads x 8 x ld: the rows of K that a pass computes and works on */
    mapuot_narrow_points narrow_points;
    mapuot_coarse coarse; /* used while progress.coarse or coarse.labelled is 1 */
    mapuot_share *shares; /* one a thread, to split rows by the speed of each. NULL: split them evenly */
    int64_t parts;        /* 2 and more: parts of M that no pair connects. Each has its own translation */
    const int32_t *part;  /* n: the part of each column, < parts */
    double *part_sums;    /* 2 x parts */
} mapuot_state;

/* The scalars that the sweeps of finish_pass need beside the state. */
typedef struct {
    double offset;       /* log of the factor of u and of the column sums in the translation before the prox */
    double kappa;        /* e^offset */
    double base;         /* 0 with a translation, else the shift: the first sweep computes b e^(-k (x - base)) */
    double q_factor;     /* the factor from there to q = b e^(-k log v): e^(k shift), or 1 */
    double common;       /* translation of log v found after the prox */
    int64_t slot, depth; /* Anderson: where the new difference goes (-1: nowhere), and how many differences count */
    double gamma[20];
} mapuot_sweep;

typedef struct mapuot_pool mapuot_pool;

const char *mapuot_isa(void);                              /* the instruction set in use: scalar, avx2, avx512, neon */
int mapuot_set_isa(const char *isa);                       /* lower or restore it ("auto"), for tests and benchmarks */
int mapuot_scalars(void);                                  /* row scalars at the end of sums */
int64_t mapuot_history(int64_t anderson_depth, int64_t n); /* length of history, for a depth of at most 20 */

/* fills limits, except the numbers that K and the range of M decide: exponent_error, scale_limit, most_scale, dual_* */
void mapuot_limits_of(const mapuot_terms *terms, mapuot_limits *limits);
/* padded row length of K. One cache line is added if rows would otherwise fall on the same cache sets */
int64_t mapuot_leading(int64_t n, int64_t entry_bytes);

/* cores: the number of cores that this process may keep busy. With more threads than cores, idle threads sleep at
 * once */
mapuot_pool *mapuot_pool_new(int threads, int cores);
void mapuot_pool_free(mapuot_pool *pool);
int mapuot_pool_threads(const mapuot_pool *pool);
/* For tests and benchmarks, while the pool is idle: this worker makes each row_pass `times` times, like a slow core. */
void mapuot_pool_slow(mapuot_pool *pool, int thread, int times);

/* row_pass: s = K v, u = prox(s), sums = K^T u, row scalars. It reads K once. finish_pass: the O(n) rest.
 * row_dots: rows.marginal = K v. row_prox: u = prox(s) and the row scalars for s = rows.marginal, with column sums of
 * zero.
 * iterate: at most count passes of both. It stops early on any status but RUNNING. *made is the number of passes
 * made. */
int mapuot_row_pass(mapuot_pool *pool, mapuot_state *state);
int mapuot_row_dots(mapuot_pool *pool, mapuot_state *state);
int mapuot_row_prox(mapuot_pool *pool, mapuot_state *state);
int mapuot_finish_pass(mapuot_pool *pool, mapuot_state *state, mapuot_stats *stats);
int mapuot_iterate(mapuot_pool *pool, mapuot_state *state, int64_t count, mapuot_stats *stats, int64_t *made);

/* The rules of a pass (common/rules.h) for callers that make their own passes on their own records: plan_error, settle
 * and judge. judge_again adds extra_error and extra_gap if they are known only after the pass was judged, and returns 1
 * if the solve may still end. */
double mapuot_plan_error(double d);
void mapuot_settle(const mapuot_limits *limits, mapuot_progress *progress, mapuot_stats *stats);
int mapuot_judge(const mapuot_limits *limits, mapuot_progress *progress, mapuot_stats *stats, double scale,
                 double next_v);
int mapuot_judge_again(const mapuot_limits *limits, const mapuot_progress *progress, mapuot_stats *stats);

/* Derive vectors from the potentials that K holds. set_side needs absorbed: it sets the weights in use, and base if the
 * side has one. set_scale needs cols.log_scale, too: it sets v. */
void mapuot_set_side(mapuot_side *side, const double *weight, const double *log_weight);
void mapuot_set_scale(mapuot_state *state);

/* Newton's step towards hard columns (newton.c), by reverse communication. Call begin after a pass. While the verdict
 * is ASKS, fill t with P^T ((fi / r) o P d) and call next. */
typedef enum {
    MAPUOT_HOLDS,       /* the error is at most tol */
    MAPUOT_HOLDS_AFTER, /* the error of the next pass, made from log v + y, is at most tol */
    MAPUOT_OPEN,        /* neither: go on from log v + y, with `wait` passes before the next step */
    MAPUOT_GIVES_UP,    /* as OPEN, and no further step is worth its products */
    MAPUOT_ASKS
} mapuot_verdict;

enum { MAPUOT_MOST_PRODUCTS = 300 }; /* most products of one Newton step */

typedef struct {
    int64_t m, n;         /* of all processes together */
    int64_t hard_rows;    /* 1: all rows are hard */
    double least;         /* lower bound on the curvature of S relative to D: 1 - fi of all rows, 0: unknown */
    int64_t symmetric;    /* 1: passes of one potential. t is then -P d */
    int64_t marginals;    /* number of marginals, laid out one behind the other. t_k is -sum_l P_kl d_l. 0: two */
    const int64_t *start; /* marginals + 1 */
    double widest;   /* many marginals: the largest x_i + y_j in units of the largest x, where y is left out, else 0 */
    double rounding; /* many marginals: relative rounding of the marginals and of `asked` */
    double reg, tol, found; /* found: the error of the pass, including the mass that hard columns miss */
    double rough;           /* > 0: a step that proves nothing: its equations are solved up to this relative residual */
    int64_t enough;         /* most products of a rough step */
    const double *marginal; /* n: s */
    double *asked, *diagonal, *rate, *left, *y, *d, *t; /* n each */
    double *steps_made, *ratios;                        /* MAPUOT_MOST_PRODUCTS + 1 each */
    double error;                                       /* certified error of the plan of the pass */
    double after; /* bound for the next pass, without the error that it finds (mapuot_newton_error) */
    double mass, missed, apart, most, size, first, curvature, paths;
    int64_t products, all_products; /* of this step, and of all steps */
    int64_t tried, wait;            /* these, and all_products, are 0 before the first step of a solve */
    int64_t budget;                 /* most products of a solve; after them a factorisation is faster. 0: no limit */
} mapuot_newton;

int mapuot_newton_begin(mapuot_newton *newton, const double *weight, const double *rho, const double *log_v,
                        const int32_t *part, int64_t parts);
int mapuot_newton_next(mapuot_newton *newton);
/* The error of a pass, combined with the bound that a step proves for its plan apart from that error. */
double mapuot_newton_error(double apart, double bound);
/* Place the vectors of a step in room. */
int64_t mapuot_newton_room(int64_t n);
void mapuot_newton_place(mapuot_newton *newton, int64_t n, double *room);
/* For products by row_pass with rows.factor = factor (m), and v o d in place of v (n padded): t is v o sums. */
void mapuot_newton_factors(const mapuot_state *state, double *factor, double *v);
/* The step from the last pass of a state that shares its K with no other. meet acts on the result: CONVERGED, STALLED,
 * or RUNNING if the passes go on. stats: of the pass, with room for one more pass, which *made counts. */
int64_t mapuot_meet_room(int64_t m, int64_t n);
int mapuot_newton_solve(mapuot_pool *pool, const mapuot_state *state, mapuot_newton *newton, double *room);
int mapuot_meet(mapuot_pool *pool, mapuot_state *state, mapuot_newton *newton, double *room, int64_t passes_left,
                mapuot_stats *stats, int64_t *made);

/* Plain problems solved in one call (solve.c): KL or balanced sides with one rho each, c = a b^T.
 *
 * A stage is a run of passes at one reg. The last stage has the problem's own reg. The others, at larger regs, come
 * before it in order if there is no start and range(M) / reg exceeds their `range_over_reg` (mapuot/ascend/stages.py). A stage
 * of one potential is the only stage of a problem with equal rows and columns. Other problems leave it out. */
typedef struct {
    double reg;               /* in units of the problem's */
    double tol, balanced_tol; /* balanced_tol: if rows and columns are hard */
    double range_over_reg;
    int64_t most;      /* passes of the problem up to the end of this stage. The last stage makes at least one */
    int64_t symmetric; /* 1: passes of one potential */
} mapuot_stage;

/* The data that all problems of one call share. Python states the numbers of the last two lines: problem/validate.py,
 * problem/problem.py, backends/. */
typedef struct {
    int64_t m, n;    /* of the largest problem */
    mapuot_matrix M; /* strides and type, or d, metric and scale of points. Each problem has its own data */
    mapuot_terms terms;
    const mapuot_stage *stages;
    int64_t count;      /* number of stages */
    int64_t max_passes; /* of one problem. If the last stage allows fewer and needs more, the problem stays unsolved */
    int64_t
        hard_passes; /* most passes (and products) of a stage, then STALLED: a factorisation is faster. 0: no limit */
    mapuot_stats *trace; /* for a single problem: room for the last stage's most + 8 passes, or NULL */
    double mass_tolerance, safe_range, far, exponent_rounding, vanishing, scale_limit, most_scale;
    double cost_error; /* bound on the error of an entry of M, 0 if costs are given as numbers */
} mapuot_task;

/* One problem of a task. status: CONVERGED, RUNNING (out of passes), STALLED (go on from log v). With any other status
 * no output is valid. */
typedef struct {
    int64_t m, n;
    const void *M;                       /* unless the task has points */
    const double *x, *y;                 /* m x d and n x d, one point after another */
    const double *a, *b, *log_a, *log_b; /* masses, each with its logarithm and sum */
    double mass_a, mass_b;
    const mapuot_terms *terms; /* reg and penalties of this problem; the rest is the task's. NULL: all is */
    int64_t hard_passes;       /* of these terms */
    const double *start;       /* log v (n). NULL: zeros, and larger regs first */
    double *log_u, *log_v;     /* m, n */
    double *row_marginal, *col_marginal;
    double *alpha, *beta;      /* the exponents of the plan, without -M / reg */
    void *plan;                /* m x n in M's type, or NULL */
    double *x_slope, *y_slope; /* output of mapuot_slopes, shaped as x and y, or NULL */
    double low, high;          /* range of M's finite entries */
    mapuot_stats last;
    int64_t made;      /* number of passes, including the number given on entry */
    int64_t larger;    /* stages at larger regs that were carried out */
    int64_t products;  /* for Newton's step towards hard columns */
    int64_t forbidden; /* 1: some M_ij is inf. On entry 1: the masses of parts are known to fit */
    int64_t symmetric; /* 1: rows and columns are the same problem, solved by passes of one potential */
    int64_t status;
} mapuot_problem;

/* Solve p problems, shared by the threads of the pool. scratch has mapuot_solve_bytes(task) a thread, aligned to 64. */
int64_t mapuot_solve_bytes(const mapuot_task *task);
int mapuot_solve(mapuot_pool *pool, const mapuot_task *task, int64_t p, mapuot_problem *problems, void *scratch);
/* Derivatives of scale sum P_ij |x_i - y_j|^2 by x and by y, at the plans of alpha and beta, for problems between
 * points. */
int mapuot_slopes(mapuot_pool *pool, const mapuot_task *task, int64_t p, mapuot_problem *problems, void *scratch);
/* Build the matrix of the coarse correction after a labelled pass. The caller has gathered its blocks and masses from
 * all processes. fi is the product of rho / (rho + reg) over both sides. */
int mapuot_coarse_matrix(mapuot_pool *pool, mapuot_state *state, double fi);
/* Order m points, X m x width, by halving along the widest column of X. The first half of a range is a multiple of
 * unit, in short ranges of unit / 2, unit / 4 and so on. */
int mapuot_order(mapuot_pool *pool, int64_t m, int64_t width, const double *X, int64_t unit, int64_t *order);
/* Bounds on the plan's mass between boxes, summed over skipped pairs: row_mass (m), col_mass (n). first NULL: a pair is
 * skipped by its cuts, and count and width return the number of runs and of boxes of y that each box of x keeps. write:
 * also write the runs to run, at the places in first. Else the pairs outside the given runs are skipped. Runs are
 * multiples of unit. */
int mapuot_box_pairs(mapuot_pool *pool, const mapuot_boxes *boxes, int64_t unit, const int64_t *first, int32_t *run,
                     int write, int64_t *count, int64_t *width, double *row_mass, double *col_mass);
/* Split m points, X m x width, into count clusters (a power of 2) by median splits along the widest column of X: label
 * is the cluster of each point, order lists the points cluster by cluster. */
int mapuot_split(int64_t m, int64_t width, const double *X, int64_t count, int64_t *order, int64_t *label);

/* Streams over M. alpha (m) and beta (n) are log scalings of rows and columns. c may have data == NULL: it is then
 * ones, or its mask alone. The entry is c_ij exp(alpha_i + beta_j - M_ij / reg).
 * costs: M itself, for points, m x n.
 * extrema: min and max of the finite entries, the number of NaN or -inf, the number of +inf.
 * balance: alpha (on entry 0, or -inf for a row to leave out) = -max_j (log v_j - M_ij / reg + log c_ij), +inf if a row
 * has no entry. col_max_j = max_i (alpha_i + log v_j - M_ij / reg + log c_ij), -inf if a column has none. */
int mapuot_costs(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, double *out);
int mapuot_extrema(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, double out[4]);
/* Is a dense n x n matrix its own transpose? Stops at the first difference. */
int mapuot_is_symmetric(mapuot_pool *pool, int64_t n, mapuot_matrix M);
int mapuot_balance(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                   const double *log_v, double *alpha, double *col_max);
/* across: 0, or for a symmetric K the number of columns that the first row has from the diagonal on. Of each row only
 * this part is written, from the start of its cache line: passes of one potential read nothing else. */
int mapuot_build_kernel(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                        const double *alpha, const double *beta, int64_t across, mapuot_dtype dtype, void *K,
                        int64_t ld);
/* List the pairs with log c_ij + alpha_i + beta_j - M_ij / reg >= least, row by row. count (m) is the number in each
 * row. Each thread has whole rows and its own `room` places for columns and costs, and fills found (threads) of them.
 * Returns RUNNING, or ABSORB if a thread finds more. */
int mapuot_kept_pairs(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                      const double *alpha, const double *beta, double least, int64_t room, int64_t *count,
                      int64_t *found, int32_t *column, double *data);
int mapuot_form_plan(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                     const double *alpha, const double *beta, mapuot_dtype dtype, void *P, int64_t ld);
int mapuot_apply(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                 const double *alpha, const double *beta, int64_t d, const double *Xt, double *out);
int mapuot_apply_transpose(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                           const double *alpha, const double *beta, int64_t d, const double *Y, double *out_t);
/* out: <P, M>, sum of P. row_sum (m) and col_sum (n) may be NULL. */
int mapuot_plan_sums(mapuot_pool *pool, int64_t m, int64_t n, mapuot_matrix M, mapuot_matrix c, double reg,
                     const double *alpha, const double *beta, double out[2], double *row_sum, double *col_sum);

/* Batches. batch_spread: states[q] = states[0], with every per-problem array moved on by q times its length. For
 * weight, absorbed, base, log_scale, scale and marginal of a side this is its padded len, for sums, work and history
 * their own length, and for K m ld unless K is shared. rho, fi and upper are common to all problems. batch_iterate: at
 * most count passes of each problem in status RUNNING, as mapuot_iterate. A shared K is read once for up to slots
 * problems. The threads of the pool share the problems. newton: NULL, or p records for problems with hard columns,
 * zeros before the first call. count 0 then certifies the last pass of the running problems. */
int mapuot_batch_spread(int64_t p, int32_t shared, mapuot_state *states);
int mapuot_batch_iterate(mapuot_pool *pool, int64_t p, int32_t shared, int32_t slots, mapuot_state *states,
                         int64_t count, mapuot_stats *stats, mapuot_newton *newton);

/* out_ij = log sum_k exp(A_ik + B_kj) for p products of dense rows. exact != 0: compute k exponentials for every entry.
 * If stop is not NULL, another thread may set it to 1: the call then returns within milliseconds, with out
 * unfinished. */
int mapuot_log_matmul(mapuot_pool *pool, int64_t p, int64_t m, int64_t k, int64_t n, mapuot_dtype dtype, const void *A,
                      const void *B, int32_t shared_B, int32_t exact, void *out, const int32_t *stop);

/* The points of many marginals, one marginal behind the other, and the messages along the edges of a tree, one behind
 * the other. A message has one number for each point of the edge's parent. */
typedef struct {
    int64_t count, parts, edges;
    const int64_t *start; /* count + 1: where the points of each marginal begin */
    const int64_t *cell;  /* for each point its marginal times parts, plus its part. NULL: there is one part */
    const int64_t *parent, *message;   /* parent of each edge, and edges + 1 numbers: where each message begins */
    const double *log_weight, *weight; /* masses, ones for a free marginal */
    const double *rho;                 /* count: 0 for a free marginal, inf for a hard one */
    double reg;
} mapuot_marginals;

/* The terms of one marginal in the certificate, with the marginal r = a u s of the plan and q = a u^(-reg / rho): */
typedef struct {
    double largest;     /* |log u|, inf if a number is not finite: the other members are then invalid */
    double value, size; /* its terms of the dual value, and their sizes */
    double amount;      /* q */
    double gap, both;   /* KL(r | q), r + q. These two and missed are valid only with s */
    double missed;      /* |r - a| */
} mapuot_worth;

/* log sum a u^(-reg / rho) of each marginal in each part: count x parts numbers in out. room has as many. */
void mapuot_log_amounts(const mapuot_marginals *x, const double *log_u, double *room, double *out);
/* the worth of each marginal. log_s may be NULL */
void mapuot_worth_of(const mapuot_marginals *x, const double *log_u, const double *log_s, mapuot_worth *out);
/* out = x + by. by has one number for each of count ranges of points or, if cell is not NULL, for each point's cell */
void mapuot_moved(int64_t count, const int64_t *start, const int64_t *cell, const double *by, const double *x,
                  double *out);
/* For each edge, at the points of its parent as in a message: log u + back + near, translated by `by`, minus up */
void mapuot_at_edges(const mapuot_marginals *x, const double *log_u, const double *back, const double *near,
                     const double *by, const double *up, double *out);
/* the share of a point in the mass of its marginal, a e^(log u + near + late) over its total, laid out as messages */
void mapuot_mass_shares(const mapuot_marginals *x, const double *log_u, const double *near, const double *late,
                        double *room, double *out);
/* for each edge: the sums of w change^2 and of w |change| */
void mapuot_change_sums(const mapuot_marginals *x, const double *weight, const double *change, double *out);

/* An edge of a tree of pairwise costs (tree.c): a child's points are the rows of K, its parent's points the columns.
 * The points of all marginals lie one behind the other, and so do all messages. */
typedef struct {
    mapuot_pool *pool;
    mapuot_state *state;            /* K and the vectors of a row_pass. NULL: there is no K for a pass */
    const double *p, *q;            /* log scalings that K holds */
    double *base;                   /* rows.base of the state */
    double fi;                      /* exponent of the child: 0 free, 1 hard */
    double least;                   /* least valid sum with K: smaller sums may lack flushed entries */
    double sizes;                   /* the largest |p|, |q| and |cost| / reg, added up */
    int64_t narrow;                 /* 1: K and its vectors allow sums in float32 */
    int64_t child, parent, message; /* where the points of child and parent begin, and the message between them */
    double error;                   /* output: bound of the rounding error of both messages */
} mapuot_edge;

typedef struct {
    const double *log_weight; /* log masses of all points */
    const double *sent;       /* message from the parent: the sum of its terms without the child's own message */
    double *near, *late, *up; /* near: sums of messages from the leaves, 0 on entry. late: from the root. up: to it */
    double *log_u;            /* of all marginals but the root */
    double flush, noise;      /* factors below flush are 0. noise: error of float32 sums */
    int64_t narrow;           /* 1: float32 sums for edges that allow them */
} mapuot_messages;

/* Process the edges from `first` on, each after the edges below it. Returns the index of the first edge left to the
 * caller, or count. */
int64_t mapuot_tree_pass(int64_t first, int64_t count, mapuot_edge *edges, const mapuot_messages *messages);

/* The array W that one marginal of three or more leaves of a kernel (left.c): an entry for each combination of points
 * of the others, one axis a marginal. s_k = <W, the factors of all axes but k>, log s_k = log
 * sums - shift + base + tops of the others. Factors are e^(log_weight + log_u - shift - top) of each axis, the largest
 * 1. The points of all axes lie one behind the other. A call returns RUNNING, or ABSORB if numbers leave float64 or may
 * lack flushed entries: the caller then rebuilds K around the state. */
typedef struct {
    mapuot_pool *pool; /* for a large W */
    int64_t axes;
    const int64_t *size;
    const double *W;           /* the last axis runs fastest. NULL: the caller has W and computes the sums */
    double base, least, flush; /* sums below least may lack terms. Factors and their products below flush are 0 */
    const double *log_weight, *shift;
    const double *fi; /* of each axis: 0 for a free marginal */
    double *log_u, *log_s, *sums, *factor;
    double *top;     /* of each axis */
    double *work;    /* 2 x (entries of W) / (last size) */
    double *partial; /* threads x the largest size */
    double log_mass; /* of the plan, after a read and after the last turn */
} mapuot_left;

/* Compute factors and tops from log_u. */
int mapuot_left_factors(mapuot_left *left);
/* v: the product of the factors of the axes, which lie one behind the other, 0 below flush */
void mapuot_product(int64_t axes, const int64_t *size, const double *factor, double flush, double *v);
/* Compute sums and log_s of all axes. If W is NULL, sums are given. */
int mapuot_left_read(mapuot_left *left);
/* Update the axes from `first` to `end` in turn, except free ones: log_s, log_u = -fi log_s, factor and top. given: the
 * sums of the first axis are given. If it returns ABSORB, the axes not yet reached are unchanged. */
int mapuot_left_turn(mapuot_left *left, int64_t first, int64_t end, int32_t given);

/* The passes of a barycenter of p histograms with soft sides (barycenter.c), from log_v on. All weights are > 0, and
 * have the sum 1. kernel: exp(low - M / reg), n x n, with rows of ld numbers. On return log_u, log_v, log_s, log_kv
 * (p x n) and log_q (n) belong to the last pass; log_s = log K^T u, log_kv = log K v. Returns CONVERGED when the error of the plans that the last
 * change suggests is at most tol, RUNNING after `most` passes, and ABSORB when a sum leaves the range of the kernel.
 * room: mapuot_barycenter_room numbers. */
typedef struct {
    int64_t p, n, ld, most;
    double reg, rho, low, tol;
    const double *weight, *mass, *log_mass, *kernel; /* p; p x n */
    double *log_u, *log_v, *log_s, *log_kv, *log_q;
    int64_t made;            /* number of passes made */
    double change, residual; /* of the last pass: relative L1 change of q, max |change of log v| */
} mapuot_barycenter;

int64_t mapuot_barycenter_room(const mapuot_barycenter *x);
int mapuot_barycenter_passes(mapuot_barycenter *x, double *room);

/* Anderson's differences of a state of several parts, which end at ends (differences.c): count <= 20 differences, each
 * a row of all the state's numbers. Products: for each part grams (count x count), sum w dF_i dF_j, and rights (count),
 * sum w dF_i F. Weights: the solution of p such systems. Combined: step = image - sum gamma_i dG_i,
 * left = residual - sum gamma_i dF_i, with a row of gammas for each part. */
void mapuot_anderson_products(int64_t parts, const int64_t *ends, int64_t count, const double *dF,
                              const double *residual, const double *weight, double *grams, double *rights);
void mapuot_anderson_weights(int64_t p, int64_t count, const double *grams, const double *rights, double *gammas);
void mapuot_anderson_combined(int64_t parts, const int64_t *ends, int64_t count, const double *gammas, const double *dF,
                              const double *dG, const double *residual, const double *image, double *step,
                              double *left);
