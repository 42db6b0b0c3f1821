/* vec_avx2.h - the vocabulary of vec.h on four lanes: AVX2 and FMA. */
#include <immintrin.h>
#define VL 4
#define FL 8
typedef __m256d vd;
typedef __m256 vf;
#define MM(op, lanes) _mm256_##op##_##lanes
#include "vec_x86.h"

ALWAYS_INLINE double v_sum(vd a) {
    __m128d s = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}

ALWAYS_INLINE vd v_gather(const double *p, const int32_t *at) {
    return _mm256_i32gather_pd(p, _mm_loadu_si128((const __m128i *)at), 8);
}

ALWAYS_INLINE __m256i v_first(int count) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_set_epi64x(3, 2, 1, 0));
}

ALWAYS_INLINE vd v_load_part(const double *p, int count, vd rest) {
    __m256i first = v_first(count);
    if (count >= VL) return v_load(p);
    return _mm256_blendv_pd(rest, _mm256_maskload_pd(p, first), _mm256_castsi256_pd(first));
}

ALWAYS_INLINE void v_store_part(double *p, vd x, int count) {
    if (count >= VL) v_store(p, x);
    else _mm256_maskstore_pd(p, v_first(count), x);
}

ALWAYS_INLINE vd v_sum_each(const vd *x, const int count) {
    vd zero = _mm256_setzero_pd();
    vd a = _mm256_hadd_pd(x[0], count > 1 ? x[1] : zero);
    vd b = _mm256_hadd_pd(count > 2 ? x[2] : zero, count > 3 ? x[3] : zero);
    return _mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x20), _mm256_permute2f128_pd(a, b, 0x31));
}

ALWAYS_INLINE void v_transpose(vd *x) {
    const vd a = _mm256_unpacklo_pd(x[0], x[1]), b = _mm256_unpackhi_pd(x[0], x[1]);
    const vd c = _mm256_unpacklo_pd(x[2], x[3]), d = _mm256_unpackhi_pd(x[2], x[3]);
    x[0] = _mm256_permute2f128_pd(a, c, 0x20);
    x[1] = _mm256_permute2f128_pd(b, d, 0x20);
    x[2] = _mm256_permute2f128_pd(a, c, 0x31);
    x[3] = _mm256_permute2f128_pd(b, d, 0x31);
}

ALWAYS_INLINE vd v_if_less(vd x, vd y, vd a, vd b) { return _mm256_blendv_pd(b, a, _mm256_cmp_pd(x, y, _CMP_LT_OQ)); }

ALWAYS_INLINE vd v_scale2(vd p, vd kd) {
    __m256i k = _mm256_slli_epi64(_mm256_castpd_si256(kd), 52);
    return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(p), k));
}

ALWAYS_INLINE vd v_split(vd x, vd *e) {
    /* the biased exponent, put beside the bits of 2^52, is the number 2^52 + exponent */
    __m256i b = _mm256_castpd_si256(x);
    __m256i biased = _mm256_or_si256(_mm256_srli_epi64(b, 52), _mm256_set1_epi64x(0x4330000000000000LL));
    *e = _mm256_sub_pd(_mm256_castsi256_pd(biased), v_set(4503599627370496.0 + 1023.0));
    b = _mm256_and_si256(b, _mm256_set1_epi64x(0xfffffffffffffLL));
    return _mm256_castsi256_pd(_mm256_or_si256(b, _mm256_set1_epi64x(0x3ff0000000000000LL)));
}

ALWAYS_INLINE vd v_load_f32(const float *p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
ALWAYS_INLINE void v_store_f32(float *p, vd x) { _mm_storeu_ps(p, _mm256_cvtpd_ps(x)); }
ALWAYS_INLINE __m128i v_first_f32(int count) {
    return _mm_cmpgt_epi32(_mm_set1_epi32(count), _mm_set_epi32(3, 2, 1, 0));
}

ALWAYS_INLINE vd v_load_part_f32(const float *p, int count) {
    return count >= VL ? v_load_f32(p) : _mm256_cvtps_pd(_mm_maskload_ps(p, v_first_f32(count)));
}

ALWAYS_INLINE void v_store_part_f32(float *p, vd x, int count) {
    if (count >= VL) v_store_f32(p, x);
    else _mm_maskstore_ps(p, v_first_f32(count), _mm256_cvtpd_ps(x));
}

ALWAYS_INLINE void v_stream_f32(float *p, vd x) { _mm_stream_ps(p, _mm256_cvtpd_ps(x)); }

ALWAYS_INLINE vf f_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ALWAYS_INLINE vf f_scale2(vf p, vf k) {
    __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(k), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e));
}
ALWAYS_INLINE vf f_if_less(vf x, vf y, vf a, vf b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); }

/* the lanes as float64, folded to VL */
ALWAYS_INLINE vd f_fold(vf x) {
    return _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
}

/* p[0 .. FL) += x in float64 */
ALWAYS_INLINE void f_add_to(double *p, vf x) {
    v_store(p, _mm256_add_pd(v_load(p), _mm256_cvtps_pd(_mm256_castps256_ps128(x))));
    v_store(p + 4, _mm256_add_pd(v_load(p + 4), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))));
}
