/* metric.h - the metrics between points, for one pair in float64 (CUDA); vector form: points.h.
 * Oracle: mapuot/problem/metrics.py, which explains REACH. */
#pragma once
#include "common/reach.h"
#include "common/record.h"

/* Add one coordinate to the sum; x and y are the coordinates of the two points. */
FN double metric_sum(int metric, double sum, double x, double y) {
    const double t = x - y;
    switch (metric) {
    case MAPUOT_SQEUCLIDEAN:
    case MAPUOT_EUCLIDEAN:
    case MAPUOT_WFR:
        return fma(t, t, sum);
    case MAPUOT_CITYBLOCK:
        return sum + fabs(t);
    case MAPUOT_INNER:
        return fma(-x, y, sum);
    default:
        return INF - INF; /* no cost of an unknown metric */
    }
}

/* The metric, from the sum over all coordinates */
FN double metric_of(int metric, double sum) {
    switch (metric) {
    case MAPUOT_SQEUCLIDEAN:
    case MAPUOT_CITYBLOCK:
    case MAPUOT_INNER:
        return sum;
    case MAPUOT_EUCLIDEAN:
        return sqrt(sum);
    case MAPUOT_WFR:
        return sum < REACH_SQUARED ? fmax(0.0, -2 * log(cos(sqrt(sum)))) : INF;
    default:
        return INF - INF;
    }
}
