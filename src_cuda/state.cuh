// Mirrors src_c/mapuot.h: what one solve holds on the device.  Every member is 8 bytes wide, so that the numpy
// records of mapuot/backends/cuda.py (STATE, PROGRESS, TRACE) have the same layout.
// K holds the log scalings d_i (rows) and e_j (columns); the plan is diag(u) K diag(v) with
// log u_i = d_i + shift + u_log_i,  log v_j = e_j - shift + log(v_scale_j).
#ifndef STATE_CUH
#define STATE_CUH
#include "common.cuh"

#define MEMORY 8   // most Anderson differences
#define VALUES 32  // sums that finish_pass takes over all columns

enum { RUNNING, CONVERGED, ABSORB, STALLED, NOT_FINITE };
enum { KL, BALANCED, TV, L2, RANGE };
enum { ROW_MASS, ROW_SOFT, ROW_DUAL, ROW_SCALE, ROW_DEAD, ROW_SCALARS = 8 };

// One marginal.  point: rows KL/balanced {base, fi, -rho (finite), reg a (balanced)}, else {d, t, rho, upper}.
struct Side {
    int64_t kind;
    const double *weight, *log_weight, *rho, *upper, *absorbed, *fi, *rate;  // rate: reg / rho
};

struct State {
    int64_t m, n, ld;
    real *kernel;
    const Point *point;               // m: what the prox of a row needs
    double *u_log, *u_scale, *r;      // m: log and value of u relative to K; row marginal before translation
    Side rows, cols;
    double *x_next, *x, *v_scale, *s; // n: next log v; certified log v; v relative to K; column marginal
    double *sums;                     // n: K^T u
    double *row_scalars;              // 2 x ROW_SCALARS sums over the rows
    double *image, *residual;         // n: last G(x) and G(x) - x
    double *work;                     // 2 n: the same of this pass, before the translation
    double *dF, *dG;                  // MEMORY x n: differences of residuals and images
    double *partial;                  // blocks x VALUES
    double *next;                     // 2 x blocks x 2: sum b v^(-reg/rho2), sum v_scale of the next state
    double *ratio;                    // n, in place: v over the v that the plan holds; else null
    uint32_t *barrier;
    struct Progress *progress;        // two: portable kernels read one and write the other
    struct Trace *trace;
    int64_t parts, memory;            // blocks that finish_pass runs on; Anderson differences at most
    double reg, fi_rows, rate_cols;   // of sides with one rho; rate = reg / rho
    double lam_rate, mu_rate;         // what a log ratio of masses is multiplied with, 0 = no translation
    double tol, tol_gap, storage_error, flush, flush_tol;
    double dual_constant, hard_weight, dual_scale;
};

struct Progress {
    double shift, kappa;  // kappa: what the translation multiplied the plan with
    double best_dual, best_error, since_best, since_absorb, passes, made, status, dead;
    double depth, head, have, extrapolated;
    double gram[MEMORY * MEMORY], ones[MEMORY], gamma[MEMORY];
    double step;          // 0: take G, 1: extrapolate, 2: go back to the last image
    double common;        // fi2 mu, the translation of the image
    double slot;          // where this pass keeps its difference, -1 = nowhere
};

struct Trace {
    double gap, error, dual, mass, residual, lost, dead, rejected, status;
};
#endif
