/* reach.h - which pairs of points the metric "wfr" forbids: those half of pi apart and more, where its cost
 * -2 log cos |x - y| ends, and those nearer to it than 2^-13, on whose cost rounding decides.
 * Oracle: mapuot/problem/metrics.py (REACH), which says why. */
#pragma once
#define HALF_PI 1.5707963267948966
#define REACH_SQUARED ((HALF_PI - 0x1p-13) * (HALF_PI - 0x1p-13)) /* a pair is forbidden from this |x - y|^2 on */
