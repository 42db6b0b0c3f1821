/* left.h - the contract between left.c and its vector kernels: arrays of any alignment and length. */
#pragma once
#include "kernels.h"

typedef struct left_kernels {
    /* p, `rows` numbers, becomes their rows x n products with the n numbers of x; products below flush are 0 */
    void (*products)(int64_t rows, int64_t n, double flush, const double *x, double *p);
    /* V is rows x n with a row every ld numbers. dots = V x unless x is NULL; sums += V^T w unless w is NULL. dots may
     * overlap the first numbers of V */
    void (*sweep)(int64_t rows, int64_t n, int64_t ld, const double *V, const double *x, const double *w, double *dots,
                  double *sums);
    /* log x - shift + more, x at least DBL_MIN */
    void (*logs)(int64_t n, const double *x, const double *shift, double more, double *out);
} left_kernels;
