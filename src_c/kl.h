/* kl.h - vector forms of the Kullback-Leibler terms near 0, where their closed forms cancel. Twin: common/penalty.h. */
#pragma once
#include "vec.h"

ALWAYS_INLINE vd v_horner(vd x, const double *coefficient, const int count) {
    vd sum = v_set(coefficient[0]);
    UNROLLED (int k = 1; k < count; k++) sum = v_fma(sum, x, v_set(coefficient[k]));
    return sum;
}

/* kl_gap of common/penalty.h */
ALWAYS_INLINE vd v_kl_gap(vd q, vd r, vd x) {
    static const double series[] = {1.0 / 43545600, 1.0 / 3991680, 1.0 / 403200, 1.0 / 45360, 1.0 / 5760, 1.0 / 840,
                                    1.0 / 144,      1.0 / 30,      0.125,        1.0 / 3,     0.5};
    const vd square = v_mul(x, x), near = v_mul(v_mul(q, square), v_horner(x, series, 11));
    return v_if_less(square, v_set(0.0625), near, v_add(v_fma(r, x, v_sub(v_set(0), r)), q));
}

/* e^x - 1, given e^x */
ALWAYS_INLINE vd v_expm1_of(vd x, vd exponential) {
    static const double series[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                    1.0 / 40320,     1.0 / 5040,     1.0 / 720,     1.0 / 120,
                                    1.0 / 24,        1.0 / 6,        0.5,           1.0};
    const vd near = v_mul(x, v_horner(x, series, 12));
    return v_if_less(v_mul(x, x), v_set(0.0625), near, v_sub(exponential, v_set(1)));
}
