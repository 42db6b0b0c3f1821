/* log_matmul.h - the contract between log_matmul.c and its kernels: out_ij = log sum_k exp(A_ik + B_kj).
 *
 * Fast path: with row maxima r_i and column maxima c_j, E = exp(A - r), F = exp(B - c), S = E F (multiply-adds only),
 * out = r_i + c_j + log S_ij. E and F are at most 1 and entries below e^lo are dropped, so that each of the k terms
 * loses at most e^lo. If S_ij >= k e^lo / eps, the sum has a relative loss of at most eps, the rounding of the dtype.
 * Any other entry is recomputed in float64 from its own maximum over k, with k exponentials.
 * float64: lo = -708, eps = 2^-53, S_ij down to k 3e-292. float32: lo = -87.3, eps = 2^-24, S_ij down to k 2e-31.
 * Zeros: -inf is an exact zero; a sum of zeros is -inf. A row or column with +inf or NaN is computed entry by entry.
 */
#pragma once
#include "kernels.h"

typedef struct {
    int64_t m, k, n;
    const void *A, *B;   /* m x k and k x n, dense rows */
    void *out;           /* m x n */
    void *F;             /* panels of `columns` columns, k x columns each */
    double *col_shift;   /* c_j, 0 for a column of zeros, +inf for one with +inf or NaN; whole panels */
    void *E;             /* the calling thread's panels of `rows` rows, k x rows each, ROW_BLOCK rows in all */
    double *S;           /* the calling thread's ROW_BLOCK x padded columns */
    int exact;           /* 1: compute every entry from its own maximum */
    const int32_t *stop; /* 1: stop with out unfinished; NULL: never */
} log_product;

enum { ROW_BLOCK = 32, RUN_LENGTH = 256 };

static inline int stopped(const log_product *job) { return job->stop && __atomic_load_n(job->stop, __ATOMIC_RELAXED); }

typedef struct log_matmul_kernels {
    int rows, columns;
    void (*pack_columns)(const log_product *job, int64_t panel);
    void (*log_rows)(const log_product *job, int64_t i0, int64_t i1); /* i1 - i0 <= ROW_BLOCK */
} log_matmul_kernels;
