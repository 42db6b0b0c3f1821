/* differences.c - products of Anderson's differences for a state of many marginals, and the step built from them
 * (mapuot/backends/cpu/marginals.py). Twin: src_cuda/many/differences.cu.
 */
#include <string.h>

#include "left.h"

enum { CHUNK = 1024 }; /* numbers of a part at a time, so that their rows fit a cache */

/* dots += V x, x = y z, with a row of V every ld numbers */
static void add_dots(int64_t rows, int64_t n, int64_t ld, const double *V, const double *y, const double *z,
                     double *dots) {
    double x[CHUNK], some[MAX_DEPTH];
    for (int64_t j = 0; j < n; j++) x[j] = y[j] * z[j];
    mapuot_active_kernels()->left->sweep(rows, n, ld, V, x, NULL, some, NULL);
    for (int64_t i = 0; i < rows; i++) dots[i] += some[i];
}

void mapuot_anderson_products(int64_t parts, const int64_t *ends, int64_t count, const double *dF,
                              const double *residual, const double *weight, double *grams, double *rights) {
    const int64_t ld = ends[parts - 1];
    memset(grams, 0, (size_t)(parts * count * count) * sizeof(double));
    memset(rights, 0, (size_t)(parts * count) * sizeof(double));
    for (int64_t part = 0, j = 0; part < parts; part++, grams += count * count, rights += count) {
        for (int64_t n; j < ends[part]; j += n) {
            n = ends[part] - j < CHUNK ? ends[part] - j : CHUNK;
            for (int64_t i = 0; i < count; i++)
                add_dots(i + 1, n, ld, dF + j, dF + i * ld + j, weight + j, grams + i * count);
            add_dots(count, n, ld, dF + j, residual + j, weight + j, rights);
        }
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < i; k++) grams[k * count + i] = grams[i * count + k];
    }
}

void mapuot_anderson_weights(int64_t p, int64_t count, const double *grams, const double *rights, double *gammas) {
    for (int64_t q = 0; q < p; q++)
        anderson_weights((int)count, count, grams + q * count * count, rights + q * count, gammas + q * count);
}

void mapuot_anderson_combined(int64_t parts, const int64_t *ends, int64_t count, const double *gammas, const double *dF,
                              const double *dG, const double *residual, const double *image, double *step,
                              double *left) {
    const left_kernels *kernels = mapuot_active_kernels()->left;
    const int64_t ld = ends[parts - 1];
    double minus[MAX_DEPTH];
    memcpy(step, image, (size_t)ld * sizeof(double));
    memcpy(left, residual, (size_t)ld * sizeof(double));
    for (int64_t part = 0, j = 0; part < parts; j = ends[part++]) {
        for (int64_t i = 0; i < count; i++) minus[i] = -gammas[part * count + i];
        kernels->sweep(count, ends[part] - j, ld, dG + j, NULL, minus, NULL, step + j);
        kernels->sweep(count, ends[part] - j, ld, dF + j, NULL, minus, NULL, left + j);
    }
}
