/* metric.h - the metrics between points, for one pair in float64 (CUDA); vector form: points.h.
 * Oracle: mapuot/problem/metrics.py, which explains REACH. */
#pragma once
#include "common/reach.h"
#include "common/record.h"

/* Add one coordinate to the sum; x and y are the coordinates of the two points. */
FN double metric_sum(int metric, double sum, double x, double y) {
    const double t = x - y;
    if (metric == MAPUOT_INNER) return fma(-x, y, sum);
    return metric == MAPUOT_CITYBLOCK ? sum + fabs(t) : fma(t, t, sum);
}

/* The metric, from the sum over all coordinates */
FN double metric_of(int metric, double sum) {
    if (metric == MAPUOT_EUCLIDEAN) return sqrt(sum);
    if (metric == MAPUOT_WFR) return sum < REACH_SQUARED ? fmax(0.0, -2 * log(cos(sqrt(sum)))) : INF;
    return sum;
}
