/* barycenter.h - the contract between barycenter.c and its vectors: n entries of any alignment, shorter vectors in part. */
#ifndef MAPUOT_BARYCENTER_H
#define MAPUOT_BARYCENTER_H
#include "kernels.h"

typedef struct barycenter_kernels {
    void (*range)(int64_t n, const double *x, double *low,
                  double *high); /* the least and largest entry that is not -inf */
    void (*scales)(int64_t n, const double *x, double high, double *out); /* e^(x - high) */
    void (*logs)(int64_t n, const double *x, double shift, double *out);  /* log x + shift, x at least DBL_MIN */
    double (*columns)(mapuot_barycenter_run *run, const double *log_s);   /* q, log v and the change of q */
    void (*pass)(mapuot_state *const *states, int count);                 /* batch_pass: one read of K for all */
} barycenter_kernels;
#endif
