/* marginals.h - the contract of marginals.c and tree.c with their vector kernels: n points of one marginal, of any
 * alignment. */
#pragma once
#include "mapuot.h"

/* `size` and `largest` point at running maxima: of absolute values, and of values. */
typedef struct marginal_kernels {
    double (*log_amount)(int64_t n, const double *x, const double *log_u, double rate); /* log sum e^(x - rate log_u) */
    mapuot_worth (*worth)(int64_t n, const double *log_weight, const double *weight, const double *log_u,
                          const double *log_s, double rho, double reg);
    /* out = e^(x_0 + x_1 + x_2 + x_3 - the largest of these sums). Returns the sum of out */
    double (*shares)(int64_t n, const double *const *x, double *out);
    void (*change_sums)(int64_t n, const double *weight, const double *change, double *out);
    /* v = e^(x + y - q - top), 0 below flush. Returns top, or NaN if a number is not finite. */
    double (*factors)(int64_t n, const double *x, const double *y, const double *q, double flush, double *v,
                      double *size);
    /* base = x + rest y - rest p - own, with own so that the largest is 0. Returns own */
    double (*base)(int64_t n, const double *x, const double *y, const double *p, double rest, double *base,
                   double *size);
    /* late = log s + shift - p, log_u = -fi (near + late). largest: the largest u. Returns 0 if an s is below least, or
     * r near the ends of float64 */
    int (*late)(int64_t n, const mapuot_side *rows, const double *near, const double *p, double fi, double shift,
                double least, double *late, double *log_u, double *size, double *largest);
    /* up = log sum + shift - q, which is also added to near. Returns 0 if a sum is below least or not finite */
    int (*up)(int64_t n, const double *sums, const double *q, double shift, double least, double *up, double *near,
              double *size);
} marginal_kernels;
