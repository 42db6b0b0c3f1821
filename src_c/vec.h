/* vec.h - a vector vocabulary of float64 lanes, the same words on every instruction set (VL lanes each).
 *
 * v_set v_load v_store v_add v_sub v_mul v_div v_fma (a b + c) v_fnma (c - a b) v_sqrt v_max v_min v_sum
 * v_gather (p[at[k]]) v_load_part v_store_part (the first count lanes; the others from rest) v_sum_each (lane k: v_sum of x[k])
 * v_transpose (lane r of x[k] and lane k of x[r] trade places)
 * v_if_less (x < y ? a : b) v_scale2 (p 2^k) v_split (x = m 2^e, 1 <= m < 2)
 * v_load_f32 v_store_f32 v_load_part_f32 (zeros behind count) v_store_part_f32 v_stream v_stream_f32
 * and, built on them, v_exp and v_log; on FL lanes of float32: f_set f_load f_store f_add f_sub f_fma f_max
 * f_sqrt f_round f_scale2 (p 2^k, k whole) f_if_less f_fold f_add_to, and f_exp2 of them.
 */
#pragma once
#include <float.h>
#include <math.h>

#include "real.h"

#if defined(MAPUOT_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(MAPUOT_ISA_AVX2)
#include "vec_avx2.h"
#elif defined(MAPUOT_ISA_NEON)
#include "vec_neon.h"
#else
#include "vec_scalar.h"
#endif

/* the number of lanes of the vector from j on that lie within n */
ALWAYS_INLINE int v_part(int64_t n, int64_t j) { return (int)(n - j < VL ? n - j : VL); }

/* the largest lane */
ALWAYS_INLINE double v_top(vd x) {
    double lane[VL], top;
    v_store(lane, x);
    top = lane[0];
    for (int k = 1; k < VL; k++) top = lane[k] > top ? lane[k] : top;
    return top;
}

#define MAGIC 6755399441055744.0 /* 1.5 * 2^52: adding it leaves round(x) in the low bits */

/* e^x within 1 ulp for x <= 709; 0 below lo (lo >= -708). degree 11: 3e-18; degree 6: 2e-9, for narrow K. */
ALWAYS_INLINE vd v_exp_above(vd x, double lo, int narrow) {
    /* e^x = 2^k e^r, k = round(x / log 2), |r| <= log(2) / 2 */
    vd t = v_min(v_max(x, v_set(-708.0)), v_set(709.0));
    vd kd = v_fma(t, v_set(1.4426950408889634), v_set(MAGIC));
    vd k = v_sub(kd, v_set(MAGIC));
    vd r = v_fnma(k, v_set(0x1.62e42fefa38p-1), t);
    r = v_fnma(k, v_set(0x1.ef35793c7673p-45), r);
    vd p;
    if (narrow) {
        p = v_set(0x1.6d7543e4127b8p-10);
        p = v_fma(p, r, v_set(0x1.126fb8fa71fe6p-7));
        p = v_fma(p, r, v_set(0x1.5554accfdb593p-5));
        p = v_fma(p, r, v_set(0x1.5554041b96acbp-3));
        p = v_fma(p, r, v_set(0x1.000000287f871p-1));
        p = v_fma(p, r, v_set(0x1.000000a21653fp+0));
    } else {
        /* in short dependency chains, since every tile waits for it: low + r^3 (mid + r^3 (high + r^2 top)) */
        vd r2 = v_mul(r, r), r3 = v_mul(r2, r);
        vd top = v_fma(v_set(0x1.af632a0f7e2cep-26), r, v_set(0x1.28b4101c77212p-22));
        top = v_fma(top, r, v_set(0x1.71ddf56d8deb5p-19));
        vd high = v_fma(v_set(0x1.a01991a10d9aep-16), r, v_set(0x1.a01a01b1461c5p-13));
        vd mid = v_fma(v_set(0x1.6c16c1880029fp-10), r, v_set(0x1.111111110f21ep-7));
        mid = v_fma(mid, r, v_set(0x1.555555554f0bap-5));
        vd low = v_fma(v_fma(v_set(0x1.555555555555ap-3), r, v_set(0x1.0000000000011p-1)), r, v_set(1.0));
        p = v_fma(r3, v_fma(r3, v_fma(r2, top, high), mid), low);
    }
    p = v_fma(p, r, v_set(1.0));
    return v_if_less(x, v_set(lo), v_set(0.0), v_scale2(p, kd));
}

ALWAYS_INLINE vd v_exp(vd x) { return v_exp_above(x, -708.0, 0); }

/* log x within 1 ulp for normal x > 0 (the caller keeps x >= DBL_MIN). */
ALWAYS_INLINE vd v_log(vd x) {
    vd e, m = v_split(x, &e);
    vd half = v_mul(m, v_set(0.5)), up = v_add(e, v_set(1.0));
    vd root = v_set(1.4142135623730951);
    e = v_if_less(root, m, up, e);
    m = v_if_less(root, m, half, m);
    /* log m = 2 z + z^3 p(z^2), z = (m - 1) / (m + 1) */
    vd f = v_sub(m, v_set(1.0));
    vd z = v_div(f, v_add(m, v_set(1.0)));
    vd w = v_mul(z, z);
    vd w2 = v_mul(w, w), w3 = v_mul(w2, w);
    vd p = v_fma(v_set(0.15386240205813478), w, v_set(0.18181795630884753));
    p = v_fma(v_fma(v_set(0.13086767009948175), w, v_set(0.13268759668560612)), w2, p);
    vd low = v_fma(v_set(0.2222222239180047), w, v_set(0.2857142857080323));
    p = v_fma(w3, p, v_fma(low, w, v_set(0.4000000000000088)));
    p = v_fma(p, w, v_set(0.6666666666666666));
    vd tail = v_fma(v_mul(z, w), p, v_mul(e, v_set(0x1.ef35793c7673p-45)));
    return v_fma(e, v_set(0x1.62e42fefa38p-1), v_add(v_add(z, z), tail));
}

/* 2^t within 2e-7, 0 below 2^-126, for |t| < 2^22; degree 5 */
ALWAYS_INLINE vf f_exp2(vf t) {
    const vf k = f_round(t), r = f_sub(t, k);
    vf p = f_fma(f_set(0x1.5bba14p-10f), r, f_set(0x1.3cea88p-7f));
    p = f_fma(p, r, f_set(0x1.c6b752p-5f));
    p = f_fma(p, r, f_set(0x1.ebf9bcp-3f));
    p = f_fma(p, r, f_set(0x1.62e42ap-1f));
    p = f_fma(p, r, f_set(1.0f));
    return f_if_less(t, f_set(-126.0f), f_set(0.0f), f_scale2(p, k));
}

#if defined(MAPUOT_DTYPE_F64)
#define v_load_real v_load
#define f_load_real(p) f_load((const float *)(p)) /* there is no narrow pass over a float64 K */
#define v_store_real v_store
#define v_store_part_real v_store_part
#define v_stream_real v_stream
#define REAL_MIN_LOG (-708.0)
#define REAL_NARROW 0
#elif defined(MAPUOT_DTYPE_F32)
#define v_load_real v_load_f32
#define f_load_real f_load
#define v_store_real v_store_f32
#define v_store_part_real v_store_part_f32
#define v_stream_real v_stream_f32
#define REAL_MIN_LOG (-87.3)
#define REAL_NARROW 1
#endif
