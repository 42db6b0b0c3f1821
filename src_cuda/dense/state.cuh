// Mirrors src_c/mapuot.h: the state of one solve on the device. Every member is 8 bytes wide:
// mapuot/backends/records.py reads the records from this text.
// K holds the log scalings d_i (rows) and e_j (columns); the plan is diag(u) K diag(v) with
// log u_i = d_i + shift + offset + u_log_i,  log v_j = x_j - shift = e_j - shift + log(v_scale_j).
#include "common.cuh"

#include "common/rules.h"

#ifndef ANDERSON_DEPTH
#define ANDERSON_DEPTH 5 // largest number of Anderson differences: 5, or 20 if a pass takes long beside them
#endif
#define MOST_DEPTH 20
#pragma option OWN_DIFFERENCES 5                    // of a thread
#define PARTNERS (ANDERSON_DEPTH / OWN_DIFFERENCES) // threads that share the differences of a column
#define VALUES (ANDERSON_DEPTH > 5 ? 64 : 32)       // room for the sums that finish_pass takes over all columns
#define COARSE (ANDERSON_DEPTH > 5)                 // 1: steps can be corrected cluster by cluster
#define CLUSTERS 64                                 // most clusters of rows, and of columns
#define POSTS (VALUES + COARSE * CLUSTERS)
#define TRACE_PASSES 256 // passes that trace holds, pass k at k - 1 modulo it
#define BLOCKS 256       // most blocks of a cooperative launch
#pragma option SPARSE 0  // 1: K has stored pairs only (sparse.cuh)

// scalars that a block writes beside the column sums: five sums over its rows, and two over its columns for the next
// pass
enum { ROW_MASS, ROW_SOFT, ROW_DUAL, ROW_SCALE, ROW_DEAD, NEXT_B, NEXT_SCALE, SCALARS };

// One marginal.  point: rows KL/balanced {base, fi, -rho (finite), reg a (balanced)}, else {d, t, rho, upper}.
struct Side {
    int64_t penalty;
    const double *weight, *log_weight, *rho, *upper, *absorbed, *fi, *rate; // rate: reg / rho
};

// The coarse correction (coarse.cu) between CLUSTERS clusters; some may be empty.
struct Coarse {
    const int64_t *label, *order,
        *first;             // cluster of each column; the rows by cluster, and where each cluster's rows begin
    double *share;          // n: each column's share of the column sums of its cluster
    double *matrix;         // the correction, a row a cluster; then the clusters' column sums
    double *mean, *mean_dF; // one a cluster: R F of the last pass; ANDERSON_DEPTH of them: R dF
    double *sums, *blocks;  // clusters x ld: the plan between clusters of rows and columns, or clusters of columns
};

// Parts of a sparse M that no pair connects, each with its own translation; count 0: one part.
struct Apart {
    int64_t count, pieces;
    const int64_t *part, *order; // the part of each column; the columns part by part
    const int64_t *piece;        // pieces + 1: where pieces of these begin; a piece lies within one part
    const int64_t *first;        // count + 1: the first piece of each part
    double *sums, *move;         // pieces x 2: mass and weight; count: the translation of the image
};

// Newton's steps between passes over stored pairs (newton.cuh)
struct Leap {
    int64_t most, even;        // products of a step at most; 1: all points are hard, so that both masses must agree
    struct Equation *equation; // n
    double *y, *vd, *Sd;       // n: the step, v d and S d
    double *mid, *factor;      // m: the rows' sums, and their factors
    double *sums;              // 2 x BLOCKS x 8, used in turn
};

// Arrays of length n with `copies` have one copy a block where every block does all of finish_pass (solo).
struct State {
    int64_t m, n, ld;
    real *kernel;
    const Point *point;          // m: the data for the prox of a row
    double *u_log, *u_scale, *r; // m: log and value of u relative to K (in place 2 m); row marginal before translation
    Side rows, cols;
    double *x, *s;            // n: certified log v; column marginal
    double *x_next, *v_scale; // copies of n: next log v + shift; v relative to K
    float *narrow_v;          // copies of ld: v_scale in float32
    double *image, *residual; // copies of n: last G(x) and G(x) - x, G with the shift as x
    double *dF, *dG;          // copies of ANDERSON_DEPTH x n: differences of residuals and images
    double *work;             // 2 n, portable: G(x) - x and G(x) of this pass, before the translation
    double *sums;             // 3 x ld, used in turn: K^T u (float32 where SHORT_SUMS)
    double *total;            // ld + SCALARS: K^T u and the row scalars of a pass in two halves, to be reduced
    double *slab;             // clusters x ld, ORDERED: the column sums of each cluster
    double *scalars;          // 2 x BLOCKS (or parts, if more) x SCALARS, used in turn
    double *partial;          // 2 x parts x POSTS, used in turn: posted by one block, read by all
    double *next_v;    // 2 x ld, used in turn: v_scale (float32 in narrow passes), posted like partial; not if solo
    double *ratio;     // n, in place: v over the v that the plan holds; else null
    uint32_t *barrier; // 64 counters of the grid's meetings; narrow passes use the 33rd and later ones
    struct Progress *progress; // two: portable kernels read one and write the other
    mapuot_stats *trace;
    int64_t parts, share, solo; // number of blocks that share the columns, and columns of each
    mapuot_limits limits;
    double hard_weight; // a of the rows with rho = inf
    Coarse coarse;
    Apart apart;
    Leap leap;
};

struct Progress : mapuot_progress {
    int64_t turn; // passes and repeated passes: selects the buffers in use
    double exponent_error,
        dual_constant; // mapuot_limits has the same: they are K's, which a device may build by itself
    double
        reach; // largest move of a column by the next of Newton's steps, in nats; 0: as at first, < 0: no step follows
    int64_t leaps, products; // 1: the next pass starts from Newton's step; products of all steps so far
    double gram[MOST_DEPTH * MOST_DEPTH], ones[MOST_DEPTH], gamma[MOST_DEPTH];
};
