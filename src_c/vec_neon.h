/* vec_neon.h - the vocabulary of vec.h on two lanes: NEON, which every aarch64 has.
 *
 * v_max and v_min are comparisons and selections instead of FMAX and FMIN. These return NaN if one operand is NaN,
 * while all other vocabularies return the second operand. There are no streaming stores: STNP is a hint that processors
 * ignore.
 */
#include <arm_neon.h>
#define VL 2
typedef float64x2_t vd;

ALWAYS_INLINE vd v_set(double x) { return vdupq_n_f64(x); }
ALWAYS_INLINE vd v_load(const double *p) { return vld1q_f64(p); }
ALWAYS_INLINE void v_store(double *p, vd x) { vst1q_f64(p, x); }
ALWAYS_INLINE void v_stream(double *p, vd x) { v_store(p, x); }
ALWAYS_INLINE vd v_add(vd a, vd b) { return vaddq_f64(a, b); }
ALWAYS_INLINE vd v_sub(vd a, vd b) { return vsubq_f64(a, b); }
ALWAYS_INLINE vd v_mul(vd a, vd b) { return vmulq_f64(a, b); }
ALWAYS_INLINE vd v_div(vd a, vd b) { return vdivq_f64(a, b); }
ALWAYS_INLINE vd v_fma(vd a, vd b, vd c) { return vfmaq_f64(c, a, b); }
ALWAYS_INLINE vd v_fnma(vd a, vd b, vd c) { return vfmsq_f64(c, a, b); }
ALWAYS_INLINE vd v_sqrt(vd a) { return vsqrtq_f64(a); }
ALWAYS_INLINE vd v_max(vd a, vd b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }
ALWAYS_INLINE vd v_min(vd a, vd b) { return vbslq_f64(vcltq_f64(a, b), a, b); }
ALWAYS_INLINE double v_sum(vd a) { return vaddvq_f64(a); }
ALWAYS_INLINE vd v_gather(const double *p, const int32_t *at) {
    return vld1q_lane_f64(p + at[1], vld1q_dup_f64(p + at[0]), 1);
}

ALWAYS_INLINE vd v_load_part(const double *p, int count, vd rest) {
    if (count >= VL) return v_load(p);
    return count > 0 ? vld1q_lane_f64(p, rest, 0) : rest;
}

ALWAYS_INLINE void v_store_part(double *p, vd x, int count) {
    if (count >= VL) v_store(p, x);
    else if (count > 0) vst1q_lane_f64(p, x, 0);
}

ALWAYS_INLINE vd v_sum_each(const vd *x, const int count) {
    return vpaddq_f64(x[0], count > 1 ? x[1] : vdupq_n_f64(0.0));
}

ALWAYS_INLINE void v_transpose(vd *x) {
    const vd first = vzip1q_f64(x[0], x[1]);
    x[1] = vzip2q_f64(x[0], x[1]);
    x[0] = first;
}

ALWAYS_INLINE vd v_if_less(vd x, vd y, vd a, vd b) { return vbslq_f64(vcltq_f64(x, y), a, b); }

ALWAYS_INLINE vd v_scale2(vd p, vd kd) {
    int64x2_t k = vshlq_n_s64(vreinterpretq_s64_f64(kd), 52);
    return vreinterpretq_f64_s64(vaddq_s64(vreinterpretq_s64_f64(p), k));
}

ALWAYS_INLINE vd v_split(vd x, vd *e) {
    const uint64x2_t b = vreinterpretq_u64_f64(x), fraction = vdupq_n_u64(0xfffffffffffffULL);
    *e = vsubq_f64(vcvtq_f64_u64(vshrq_n_u64(b, 52)), v_set(1023.0));
    return vbslq_f64(fraction, x, v_set(1.0));
}

ALWAYS_INLINE vd v_load_f32(const float *p) { return vcvt_f64_f32(vld1_f32(p)); }
ALWAYS_INLINE void v_store_f32(float *p, vd x) { vst1_f32(p, vcvt_f32_f64(x)); }
ALWAYS_INLINE vd v_load_part_f32(const float *p, int count) {
    const float32x2_t one = {count > 0 ? *p : 0.0f, 0.0f};
    return count >= VL ? v_load_f32(p) : vcvt_f64_f32(one);
}

ALWAYS_INLINE void v_store_part_f32(float *p, vd x, int count) {
    if (count >= VL) v_store_f32(p, x);
    else if (count > 0) *p = (float)vgetq_lane_f64(x, 0);
}

ALWAYS_INLINE void v_stream_f32(float *p, vd x) { v_store_f32(p, x); }

/* float32 lanes, for the narrow pass: FL of them */
#define FL 4
typedef float32x4_t vf;

ALWAYS_INLINE vf f_set(float x) { return vdupq_n_f32(x); }
ALWAYS_INLINE vf f_load(const float *p) { return vld1q_f32(p); }
ALWAYS_INLINE void f_store(float *p, vf x) { vst1q_f32(p, x); }
ALWAYS_INLINE vf f_add(vf a, vf b) { return vaddq_f32(a, b); }
ALWAYS_INLINE vf f_sub(vf a, vf b) { return vsubq_f32(a, b); }
ALWAYS_INLINE vf f_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
ALWAYS_INLINE vf f_max(vf a, vf b) { return vmaxq_f32(a, b); }
ALWAYS_INLINE vf f_sqrt(vf a) { return vsqrtq_f32(a); }
ALWAYS_INLINE vf f_round(vf a) { return vrndnq_f32(a); }
ALWAYS_INLINE vf f_scale2(vf p, vf k) {
    const int32x4_t e = vshlq_n_s32(vcvtnq_s32_f32(k), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), e));
}
ALWAYS_INLINE vf f_if_less(vf x, vf y, vf a, vf b) { return vbslq_f32(vcltq_f32(x, y), a, b); }

/* the lanes as float64, folded to VL */
ALWAYS_INLINE vd f_fold(vf x) { return vaddq_f64(vcvt_f64_f32(vget_low_f32(x)), vcvt_high_f64_f32(x)); }

/* p[0 .. FL) += x in float64 */
ALWAYS_INLINE void f_add_to(double *p, vf x) {
    v_store(p, vaddq_f64(v_load(p), vcvt_f64_f32(vget_low_f32(x))));
    v_store(p + 2, vaddq_f64(v_load(p + 2), vcvt_high_f64_f32(x)));
}
