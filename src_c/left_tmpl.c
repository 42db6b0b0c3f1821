/* left_tmpl.c - the vector kernels of left.c; compiled once per instruction set. */
#include "flush.h"
#include "left.h"
#include "vec.h"

enum { ROWS = 4 }; /* rows of a sweep at a time */

/* It runs backwards, since a row of products overlaps the numbers behind its own. */
static void products(int64_t rows, int64_t n, double flush, const double *x, double *p) {
    const vd zero = v_set(0.0), least = v_set(flush);
    for (int64_t i = rows - 1; i >= 0; i--) {
        const vd y = v_set(p[i]);
        for (int64_t j = 0; j < n; j += VL) {
            const vd z = v_mul(y, v_load_part(x + j, v_part(n, j), zero));
            v_store_part(p + i * n + j, v_if_less(z, least, zero, z), v_part(n, j));
        }
    }
}

/* dots and sums of `count` rows, all read before the first dot is written */
ALWAYS_INLINE void some_rows(const int count, int64_t n, int64_t ld, const double *V, const double *x, const double *w,
                             double *dots, double *sums, const int has_x, const int has_w) {
    const vd zero = v_set(0.0);
    vd s[ROWS], u[ROWS];
    UNROLLED (int k = 0; k < count; k++) {
        s[k] = zero;
        u[k] = has_w ? v_set(w[k]) : zero;
    }
    for (int64_t j = 0; j < n; j += VL) {
        const int part = v_part(n, j);
        const vd y = has_x ? v_load_part(x + j, part, zero) : zero;
        vd sum = has_w ? v_load_part(sums + j, part, zero) : zero;
        UNROLLED (int k = 0; k < count; k++) {
            const vd a = v_load_part(V + k * ld + j, part, zero);
            s[k] = has_x ? v_fma(a, y, s[k]) : s[k];
            sum = has_w ? v_fma(u[k], a, sum) : sum;
        }
        if (has_w) v_store_part(sums + j, sum, part);
    }
    for (int k = 0; has_x && k < count; k++) dots[k] = v_sum(s[k]);
}

ALWAYS_INLINE void all_rows(int64_t rows, int64_t n, int64_t ld, const double *V, const double *x, const double *w,
                            double *dots, double *sums, const int has_x, const int has_w) {
    int64_t i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        some_rows(ROWS, n, ld, V + i * ld, x, w + (has_w ? i : 0), dots + (has_x ? i : 0), sums, has_x, has_w);
    for (; i < rows; i++)
        some_rows(1, n, ld, V + i * ld, x, w + (has_w ? i : 0), dots + (has_x ? i : 0), sums, has_x, has_w);
}

static void sweep(int64_t rows, int64_t n, int64_t ld, const double *V, const double *x, const double *w, double *dots,
                  double *sums) {
    const uint64_t before =
        begin_flush(1.0); /* terms are at most 1, and sums below `least` are reported to the caller */
    if (x && w) all_rows(rows, n, ld, V, x, w, dots, sums, 1, 1);
    else if (x) all_rows(rows, n, ld, V, x, w, dots, sums, 1, 0);
    else all_rows(rows, n, ld, V, x, w, dots, sums, 0, 1);
    end_flush(before);
}

static void logs(int64_t n, const double *x, const double *shift, double more, double *out) {
    const vd one = v_set(1.0), zero = v_set(0.0);
    for (int64_t j = 0; j < n; j += VL) {
        const int part = v_part(n, j);
        const vd y = v_log(v_load_part(x + j, part, one));
        v_store_part(out + j, v_add(v_sub(y, v_load_part(shift + j, part, zero)), v_set(more)), part);
    }
}

const left_kernels ISA_OP(left) = {products, sweep, logs};
