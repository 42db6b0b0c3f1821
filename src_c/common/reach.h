/* reach.h - the pairs of points that the metric "wfr" forbids: pairs at distance pi / 2 and more, where its cost -2 log
 * cos |x - y| ends, and pairs up to 2^-13 nearer, where rounding decides the cost.
 * Oracle and reason: mapuot/problem/metrics.py (REACH). */
#pragma once
#define HALF_PI 1.5707963267948966
#define REACH_SQUARED ((HALF_PI - 0x1p-13) * (HALF_PI - 0x1p-13)) /* a pair is forbidden from this |x - y|^2 on */
