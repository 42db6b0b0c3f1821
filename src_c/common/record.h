/* record.h - the records that the rules of a pass work on; one text for C, CUDA and, read as text, for cffi and numpy
 * (mapuot/backends/records.py).  Every member is 8 bytes wide, so that all compilers lay them out alike.
 * Only "#pragma once" and one inclusion stand here as preprocessor lines. */
#pragma once
#include "common/words.h"

typedef enum {
    MAPUOT_RUNNING = 0,    /* all passes asked for were made */
    MAPUOT_CONVERGED = 1,  /* the certified error is at most tol */
    MAPUOT_ABSORB = 2,     /* the scalings outgrew K: rebuild K around the potentials, then go on */
    MAPUOT_STALLED = 3,    /* no progress of the certificate for a long while: rounding floor */
    MAPUOT_NOT_FINITE = 4, /* a sum became NaN or infinite, or a scaling stays clipped */
    MAPUOT_UNDERFLOW = 5,  /* on a fresh K the plan, or a point that matters, is too small for float64 */
    MAPUOT_COARSE = 6,     /* the storage of K is too coarse for tol: go on with a finer one */
    MAPUOT_NO_MEMORY = -1,
    MAPUOT_BAD_ARGUMENT = -2
} mapuot_status;

/* The metrics between points, and the terms that float32 passes sum over the coordinates: squares of differences,
 * products (the scalings then hold the squares of the points), squares under a root, or absolute differences. */
typedef enum { MAPUOT_SQEUCLIDEAN, MAPUOT_EUCLIDEAN, MAPUOT_CITYBLOCK, MAPUOT_WFR, MAPUOT_INNER } mapuot_metric;
typedef enum { MAPUOT_SQUARES, MAPUOT_PRODUCTS, MAPUOT_ROOTS, MAPUOT_SIZES } mapuot_narrow_form;

typedef enum { MAPUOT_KL, MAPUOT_BALANCED, MAPUOT_TV, MAPUOT_L2, MAPUOT_RANGE } mapuot_penalty;

/* The parameters of a solve that its passes do not change. */
typedef struct {
    double reg, inv_reg;
    double fi_rows, rate_cols; /* rho / (rho + reg) of the rows, reg / rho of the columns, where a side has one rho */
    double rho_rows, rho_cols; /* these rho, 0 where a side is balanced */
    double lam_rate, mu_rate;  /* factors of a log ratio of masses in the translations, 0: no translation */
    double tol, tol_gap;       /* stop at this certified plan error, or at gap <= tol_gap |dual|; < 0: never */
    double storage_error;      /* relative rounding of K's entries */
    double exponent_error;     /* plan error caused by rounding log u + log v - M / reg in K */
    double flush;              /* entries of K below this were flushed to zero */
    double flush_tol;          /* relative mass that flushing may hide before K is rebuilt */
    double narrow_floor;       /* least certified error of float32 passes; below it they are noise */
    double scale_limit;   /* sums of u or v beyond it, or of v below its inverse: rebuild K before anything overflows */
    double most_scale;    /* a scaling beyond it is clipped */
    double dual_constant; /* reg |c| + the dual terms that no pass changes */
    double dual_scale;    /* scale of the dual's rounding error: sum of rho a + rho b over finite rho */
    double row_weight;    /* sum of a over the rows in use, for the dual value of rows with one rho */
    double rho_kl, rho_tv, rho_l2; /* the largest finite rho of each side with this penalty, added up */
    double hard_sides;             /* how many sides have a balanced point or a range */
    double extra_error;            /* known error of the plan that a pass cannot see */
    double extra_gap;              /* known distance of dual value and objective that a pass cannot see */
    double path;   /* edges of the longest path, for columns with kinks in the penalty, 0: no bound by it */
    double missed; /* factor of the mass that hard columns miss: edges of a path, or 1 where Newton's step follows */
    int64_t anderson_depth; /* Anderson differences kept at most, 0: none */
    int64_t in_place;       /* 1: K is overwritten by the plan and rounded once a pass */
    int64_t finer;          /* 1: there is a finer storage of K to go on with */
    int64_t made;           /* 1: float32 passes make the entries of K: to build it anew takes about one of them */
    int64_t symmetric;      /* 1: rows and columns are the same problem, with one potential log u = log v */
} mapuot_limits;

/* A random mask given by its seed (mask.h), for the block of a matrix that begins at (row, col) of the whole one.
 * weight 0: there is no mask. key and limit hold unsigned 64-bit numbers. */
typedef struct {
    int64_t key;   /* the seed */
    int64_t limit; /* a pair is kept where its bits are at most this */
    double weight; /* the weight of a kept pair, 1 / keep */
    int64_t row, col;
    int64_t turned; /* 1: rows and columns are exchanged, row and col as well */
} mapuot_mask;

/* The progress of a solve. Before the first pass all counters are 0, best_error is inf, the dual values are -inf. */
typedef struct {
    double shift;         /* common translation: K holds d_i + shift and e_j - shift */
    double offset, kappa; /* the plan of this pass is kappa diag(u) K diag(v), kappa = e^offset */
    double best_dual;     /* the guard compares the dual value of a pass with it */
    double best_error, progress_dual;
    int64_t since_best;   /* passes since best_error fell or progress_dual rose */
    int64_t since_absorb; /* passes since K was built */
    int64_t passes;
    int64_t status;
    double dead;          /* rows and columns that a fresh K left without mass */
    int64_t clipped;      /* 1: a fresh K left a scaling clipped */
    int64_t narrow;       /* 1: float32 passes, which only float64 ones can certify */
    int64_t have;         /* 1: there is a last image to difference with */
    int64_t depth, head;  /* differences held, and where the next one goes */
    int64_t extrapolated; /* 1: the state is an extrapolated one, so the guard watches it */
    int64_t dropped;      /* steps that the guard has dropped */
    int64_t step;         /* a mapuot_step */
    int64_t slot;         /* where this pass keeps its difference, -1: nowhere */
    int64_t coarse;       /* 1: steps are corrected cluster by cluster, until one is dropped */
    double common;        /* fi mu, the translation of the image */
    double lam;           /* the translation of this pass */
    double moved;         /* how far rounding may have moved the dual value */
    double floor_error;   /* float32 passes: the error at its last fall by a fifth, 0: none yet */
    int64_t floor_passes; /* passes since */
} mapuot_progress;

typedef enum { MAPUOT_IMAGE, MAPUOT_EXTRAPOLATE, MAPUOT_GO_BACK, MAPUOT_REPEAT } mapuot_step;

/* The result of one pass. gap, error, dual and mass belong to the state (u, v) of that pass. */
typedef struct {
    double gap; /* bound on primal - dual; inf while hard columns miss more of the mass than tol_gap (< 0: tol) */
    double
        error; /* certified relative plan error; balanced columns add |s - b|_1 / mass; inf where nothing is certified */
    double dual; /* a lower bound of the objective of every plan, with rounding counted */
    double mass;
    double residual; /* max |G(log v) - log v| over points that carry weight */
    double lost;     /* bound on the relative mass hidden by flushed entries of K */
    double dead;     /* rows and columns without mass */
    double rejected; /* 1: the guard dropped the extrapolated step */
    double status;
} mapuot_stats;
