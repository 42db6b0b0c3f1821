// An entry of K from its exponent.  Options: STORE.
#include "common.cuh"

// e^x for a stored entry: exp in float64, else within 2e-9, like v_exp_above of src_c/vec.h; 0 below -708.
FN double stored_exp(double x) {
#if STORE == 0
    return exp(x);
#else
    const bool in = x > -708.0;
    const double t = in ? fmin(x, 709.0) : -708.0, magic = 6755399441055744.0, kd = fma(t, LOG2E, magic);
    const double r = fma(kd - magic, -LN2, t); // t = k log 2 + r
    double p = 0x1.6d7543e4127b8p-10;
    p = fma(p, r, 0x1.126fb8fa71fe6p-7);
    p = fma(p, r, 0x1.5554accdfb593p-5);
    p = fma(p, r, 0x1.5554041b96acbp-3);
    p = fma(p, r, 0x1.000000287f871p-1);
    p = fma(p, r, 0x1.000000a21653fp+0);
    p = fma(p, r, 1.0);
    return in ? __hiloint2double(__double2hiint(p) + (__double2loint(kd) << 20), __double2loint(p)) : 0;
#endif
}
