/* points.h - the costs between points of two clouds, a block of one row in float64, for cost.h.
 *
 * Coordinates are subtracted before they are squared: distances of 1 between coordinates of 1e8 keep their digits.
 * Formulas: SciPy's cdist; WFR is the Wasserstein-Fisher-Rao cost -2 log cos |x - y| of Chizat, Peyre, Schmitzer,
 * Vialard 2018, and common/reach.h has the pairs that it forbids; INNER is minus the inner product. A metric has a case
 * in add_term, point_cost and points_blocks; the costs of a metric without them are NaN.
 */
#pragma once
#include "common/reach.h"
#include "kernels.h"
#include "vec.h"

#define HALF_PI_REST 6.123233995736766e-17 /* pi / 2 - HALF_PI */

/* cos x for 0 <= x <= pi / 2 within 2 ulp: the series of the cosine up to pi / 4, above it the sine series at
 * pi / 2 - x */
ALWAYS_INLINE vd v_cos(vd x) {
    const vd rest = v_add(v_sub(v_set(HALF_PI), x), v_set(HALF_PI_REST)), z = v_mul(x, x), w = v_mul(rest, rest);
    vd even = v_set(1.0 / 20922789888000.0), odd = v_set(-1.0 / 1307674368000.0);
    const double next_even[] = {
        -1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0, 1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5, 1.0};
    const double next_odd[] = {
        1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0, 1.0};
    UNROLLED (int k = 0; k < 8; k++) even = v_fma(even, z, v_set(next_even[k]));
    UNROLLED (int k = 0; k < 7; k++) odd = v_fma(odd, w, v_set(next_odd[k]));
    return v_if_less(x, v_set(0.5 * HALF_PI), even, v_mul(odd, rest));
}

/* the sum over the coordinates with the term of one more coordinate, x of a row and y of a column */
ALWAYS_INLINE vd add_term(vd sum, vd x, vd y, const mapuot_metric metric) {
    const vd t = v_sub(x, y);
    switch (metric) {
    case MAPUOT_SQEUCLIDEAN:
    case MAPUOT_EUCLIDEAN:
    case MAPUOT_WFR:
        return v_fma(t, t, sum);
    case MAPUOT_CITYBLOCK:
        return v_add(sum, v_max(t, v_sub(v_set(0.0), t)));
    case MAPUOT_INNER:
        return v_fnma(x, y, sum);
    }
    return v_set(NAN);
}

/* scale times the metric, from the sum over all coordinates */
ALWAYS_INLINE vd point_cost(vd sum, const mapuot_metric metric, vd scale) {
    switch (metric) {
    case MAPUOT_SQEUCLIDEAN:
    case MAPUOT_CITYBLOCK:
    case MAPUOT_INNER:
        return v_mul(sum, scale);
    case MAPUOT_EUCLIDEAN:
        return v_mul(v_sqrt(sum), scale);
    case MAPUOT_WFR: {
        const vd value = v_mul(v_log(v_max(v_cos(v_sqrt(sum)), v_set(DBL_MIN))), v_mul(scale, v_set(-2.0)));
        return v_if_less(sum, v_set(REACH_SQUARED), v_max(value, v_set(0.0)), v_set(INFINITY));
    }
    }
    return v_set(NAN);
}

/* Coordinates are summed in groups of 16, each along all columns, to suit caches and prefetchers; partial sums wait in
 * out. Groups of 64 touch 64 pages a step: with 20,000 columns a float64 pass took 1.7 times as long. */
enum { COORDINATES = 16 };

/* R rows from i on, to out with stride ld. Up to 4 rows share the loads of y, which lies in L2 from some 64 coordinates
 * on. */
ALWAYS_INLINE void metric_block(const mapuot_points *points, int64_t i, int64_t j, int64_t count, double *out,
                                int64_t ld, const mapuot_metric metric, const int R) {
    const int64_t d = points->d;
    const double *x = points->x + i * d, *y = points->y + j;
    const vd zero = v_set(0.0), scale = v_set(points->scale);
    for (int64_t from = 0, end; from < d; from = end) {
        end = from + COORDINATES < d ? from + COORDINATES : d;
        for (int64_t k = 0; k < count; k += PAD) { /* y is padded to PAD */
            vd sum[4][PAD / VL];
            UNROLLED (int r = 0; r < R; r++)
                UNROLLED (int p = 0; p < PAD / VL; p++) sum[r][p] = from > 0 ? v_load(out + r * ld + k + p * VL) : zero;
            for (int64_t q = from; q < end; q++) {
                UNROLLED (int p = 0; p < PAD / VL; p++) {
                    const vd yq = v_load(y + q * points->ld + k + p * VL);
                    UNROLLED (int r = 0; r < R; r++) {
                        sum[r][p] = add_term(sum[r][p], v_set(x[r * d + q]), yq, metric);
                    }
                }
            }
            UNROLLED (int r = 0; r < R; r++)
                UNROLLED (int p = 0; p < PAD / VL; p++)
                    v_store(out + r * ld + k + p * VL, end < d ? sum[r][p] : point_cost(sum[r][p], metric, scale));
        }
    }
}

/* The costs of R rows from i on in the columns [j, j + count), written up to a multiple of PAD. */
ALWAYS_INLINE void points_blocks(const mapuot_points *points, int64_t i, int64_t j, int64_t count, double *out,
                                 int64_t ld, const int R) {
#define OF_METRIC(name)                                                                                                \
    case name:                                                                                                         \
        metric_block(points, i, j, count, out, ld, name, R);                                                           \
        return
    switch (points->metric) {
        OF_METRIC(MAPUOT_SQEUCLIDEAN);
        OF_METRIC(MAPUOT_EUCLIDEAN);
        OF_METRIC(MAPUOT_CITYBLOCK);
        OF_METRIC(MAPUOT_WFR);
        OF_METRIC(MAPUOT_INNER);
    }
    for (int r = 0; r < R; r++)
        for (int64_t k = 0; k < count; k++) out[r * ld + k] = NAN;
}

ALWAYS_INLINE void points_block(const mapuot_points *points, int64_t i, int64_t j, int64_t count, double *out) {
    points_blocks(points, i, j, count, out, 0, 1);
}
