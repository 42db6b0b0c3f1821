/* left.h - the contract between left.c and its vectors: arrays of any alignment and length. */
#pragma once
#include "kernels.h"

typedef struct left_kernels {
    /* p, `rows` numbers, becomes the rows x n products of each with the n of x, those below flush 0 */
    void (*products)(int64_t rows, int64_t n, double flush, const double *x, double *p);
    /* of V, rows x n, a row every ld numbers: dots = V x, unless x is NULL; sums += V^T w, unless w is NULL; dots may lie
     * on V's first numbers */
    void (*sweep)(int64_t rows, int64_t n, int64_t ld, const double *V, const double *x, const double *w, double *dots,
                  double *sums);
    /* log x - shift + more, x at least DBL_MIN */
    void (*logs)(int64_t n, const double *x, const double *shift, double more, double *out);
} left_kernels;
