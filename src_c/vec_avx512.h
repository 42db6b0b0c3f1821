/* vec_avx512.h - the vocabulary of vec.h on eight lanes: AVX-512 F, DQ, VL, BW. */
#include <immintrin.h>
#define VL 8
#define FL 16
typedef __m512d vd;
typedef __m512 vf;
#define MM(op, lanes) _mm512_##op##_##lanes
#include "vec_x86.h"

ALWAYS_INLINE double v_sum(vd a) { return _mm512_reduce_add_pd(a); }
ALWAYS_INLINE vd v_gather(const double *p, const int32_t *at) {
    return _mm512_i32gather_pd(_mm256_loadu_si256((const __m256i *)at), p, 8);
}

ALWAYS_INLINE vd v_load_part(const double *p, int count, vd rest) {
    return count >= VL ? v_load(p) : _mm512_mask_loadu_pd(rest, (__mmask8)((1 << count) - 1), p);
}

/* avoid a mask where possible: the next load of p would wait for a masked store */
ALWAYS_INLINE void v_store_part(double *p, vd x, int count) {
    if (count >= VL) v_store(p, x);
    else if (count == VL / 2) _mm256_storeu_pd(p, _mm512_castpd512_pd256(x));
    else _mm512_mask_storeu_pd(p, (__mmask8)((1 << count) - 1), x);
}

/* the quarters of a, then of b, added in pairs */
ALWAYS_INLINE vd v_fold_lanes(vd a, vd b) {
    return _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xdd));
}

ALWAYS_INLINE vd v_sum_each(const vd *x, const int count) {
    vd pair[4], zero = _mm512_setzero_pd();
    UNROLLED (int k = 0; k < 4; k++) {
        vd a = 2 * k < count ? x[2 * k] : zero, b = 2 * k + 1 < count ? x[2 * k + 1] : zero;
        pair[k] = _mm512_add_pd(_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
    }
    return v_fold_lanes(v_fold_lanes(pair[0], pair[1]), v_fold_lanes(pair[2], pair[3]));
}

ALWAYS_INLINE void v_transpose(vd *x) {
    vd pair[VL];
    UNROLLED (int k = 0; k < VL; k += 2) {
        pair[k] = _mm512_unpacklo_pd(x[k], x[k + 1]);
        pair[k + 1] = _mm512_unpackhi_pd(x[k], x[k + 1]);
    }
    UNROLLED (int k = 0; k < 2; k++) { /* lanes k, k + 2, k + 4 and k + 6 */
        const vd a = _mm512_shuffle_f64x2(pair[k], pair[k + 2], 0x88),
                 b = _mm512_shuffle_f64x2(pair[k], pair[k + 2], 0xdd);
        const vd c = _mm512_shuffle_f64x2(pair[k + 4], pair[k + 6], 0x88);
        const vd d = _mm512_shuffle_f64x2(pair[k + 4], pair[k + 6], 0xdd);
        x[k] = _mm512_shuffle_f64x2(a, c, 0x88);
        x[k + 2] = _mm512_shuffle_f64x2(b, d, 0x88);
        x[k + 4] = _mm512_shuffle_f64x2(a, c, 0xdd);
        x[k + 6] = _mm512_shuffle_f64x2(b, d, 0xdd);
    }
}

ALWAYS_INLINE vd v_if_less(vd x, vd y, vd a, vd b) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(x, y, _CMP_LT_OQ), b, a);
}

ALWAYS_INLINE vd v_scale2(vd p, vd kd) {
    __m512i k = _mm512_slli_epi64(_mm512_castpd_si512(kd), 52);
    return _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(p), k));
}

ALWAYS_INLINE vd v_split(vd x, vd *e) {
    *e = _mm512_getexp_pd(x);
    return _mm512_getmant_pd(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
}

ALWAYS_INLINE vd v_load_f32(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
ALWAYS_INLINE void v_store_f32(float *p, vd x) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(x)); }
ALWAYS_INLINE vd v_load_part_f32(const float *p, int count) {
    return count >= VL ? v_load_f32(p) : _mm512_cvtps_pd(_mm256_maskz_loadu_ps((__mmask8)((1 << count) - 1), p));
}

ALWAYS_INLINE void v_store_part_f32(float *p, vd x, int count) {
    if (count >= VL) v_store_f32(p, x);
    else _mm256_mask_storeu_ps(p, (__mmask8)((1 << count) - 1), _mm512_cvtpd_ps(x));
}

ALWAYS_INLINE void v_stream_f32(float *p, vd x) { _mm256_stream_ps(p, _mm512_cvtpd_ps(x)); }

ALWAYS_INLINE vf f_round(vf a) { return _mm512_roundscale_ps(a, 0); }
ALWAYS_INLINE vf f_scale2(vf p, vf k) { return _mm512_scalef_ps(p, k); }
ALWAYS_INLINE vf f_if_less(vf x, vf y, vf a, vf b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}

/* the lanes as float64, folded to VL */
ALWAYS_INLINE vd f_fold(vf x) {
    return _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}

/* p[0 .. FL) += x in float64 */
ALWAYS_INLINE void f_add_to(double *p, vf x) {
    v_store(p, _mm512_add_pd(v_load(p), _mm512_cvtps_pd(_mm512_castps512_ps256(x))));
    v_store(p + 8, _mm512_add_pd(v_load(p + 8), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))));
}
