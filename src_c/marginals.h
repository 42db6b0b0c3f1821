/* marginals.h - the contract between marginals.c, tree.c and their vectors: n points of one marginal, of any alignment. */
#pragma once
#include "mapuot.h"

/* What points at `size` and `largest` is raised to the largest |number|, or number, of its kind. */
typedef struct marginal_kernels {
    double (*log_amount)(int64_t n, const double *x, const double *log_u, double rate); /* log sum e^(x - rate log_u) */
    mapuot_worth (*worth)(int64_t n, const double *log_weight, const double *weight, const double *log_u,
                          const double *log_s, double rho, double reg);
    /* out = e^(the sum of the four - its largest); what they add up to */
    double (*shares)(int64_t n, const double *const *x, double *out);
    void (*change_sums)(int64_t n, const double *weight, const double *change, double *out);
    /* v = e^(x + y - q - top), what lies below flush as 0; top, and NaN where a number is not finite, as own below */
    double (*factors)(int64_t n, const double *x, const double *y, const double *q, double flush, double *v,
                      double *size);
    /* base = x + rest y - rest p - own, of which the largest is 0; own */
    double (*base)(int64_t n, const double *x, const double *y, const double *p, double rest, double *base,
                   double *size);
    /* late = log s + shift - p, log_u = -fi (near + late), s = r / u; 0 where an s is below least, or r near the ends of
     * float64; the largest u */
    int (*late)(int64_t n, const mapuot_side *rows, const double *near, const double *p, double fi, double shift,
                double least, double *late, double *log_u, double *size, double *largest);
    /* up = log sum + shift - q, added to near; 0 where a sum is below least, or not finite */
    int (*up)(int64_t n, const double *sums, const double *q, double shift, double least, double *up, double *near,
              double *size);
} marginal_kernels;
