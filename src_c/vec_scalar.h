/* vec_scalar.h - the vocabulary of vec.h on one lane, in plain C, for every machine. */
#define VL 1
typedef double vd;

ALWAYS_INLINE vd v_set(double x) { return x; }
ALWAYS_INLINE vd v_load(const double *p) { return *p; }
ALWAYS_INLINE void v_store(double *p, vd x) { *p = x; }
ALWAYS_INLINE void v_stream(double *p, vd x) { *p = x; }
ALWAYS_INLINE vd v_add(vd a, vd b) { return a + b; }
ALWAYS_INLINE vd v_sub(vd a, vd b) { return a - b; }
ALWAYS_INLINE vd v_mul(vd a, vd b) { return a * b; }
ALWAYS_INLINE vd v_div(vd a, vd b) { return a / b; }
ALWAYS_INLINE vd v_fma(vd a, vd b, vd c) { return a * b + c; }
ALWAYS_INLINE vd v_fnma(vd a, vd b, vd c) { return c - a * b; }
ALWAYS_INLINE vd v_sqrt(vd a) { return sqrt(a); }
ALWAYS_INLINE vd v_max(vd a, vd b) { return a > b ? a : b; }
ALWAYS_INLINE vd v_min(vd a, vd b) { return a < b ? a : b; }
ALWAYS_INLINE double v_sum(vd a) { return a; }
ALWAYS_INLINE vd v_gather(const double *p, const int32_t *at) { return p[*at]; }
ALWAYS_INLINE vd v_load_part(const double *p, int count, vd rest) { return count > 0 ? *p : rest; }
ALWAYS_INLINE void v_store_part(double *p, vd x, int count) {
    if (count > 0) *p = x;
}
ALWAYS_INLINE vd v_sum_each(const vd *x, const int count) { return count > 0 ? *x : 0.0; }
ALWAYS_INLINE void v_transpose(vd *x) { (void)x; }
ALWAYS_INLINE vd v_if_less(vd x, vd y, vd a, vd b) { return x < y ? a : b; }

ALWAYS_INLINE uint64_t bits_of(double x) {
    uint64_t b;
    memcpy(&b, &x, 8);
    return b;
}

ALWAYS_INLINE double of_bits(uint64_t b) {
    double x;
    memcpy(&x, &b, 8);
    return x;
}

ALWAYS_INLINE vd v_scale2(vd p, vd kd) { return of_bits(bits_of(p) + (bits_of(kd) << 52)); }

ALWAYS_INLINE vd v_split(vd x, vd *e) {
    uint64_t b = bits_of(x);
    *e = (double)((int64_t)(b >> 52) - 1023);
    return of_bits((b & 0xfffffffffffffULL) | 0x3ff0000000000000ULL);
}

ALWAYS_INLINE vd v_load_f32(const float *p) { return *p; }
ALWAYS_INLINE void v_store_f32(float *p, vd x) { *p = (float)x; }
ALWAYS_INLINE vd v_load_part_f32(const float *p, int count) { return count > 0 ? *p : 0.0; }
ALWAYS_INLINE void v_store_part_f32(float *p, vd x, int count) {
    if (count > 0) *p = (float)x;
}
ALWAYS_INLINE void v_stream_f32(float *p, vd x) { *p = (float)x; }

/* float32 lanes, for the narrow pass: FL of them */
#define FL 1
typedef float vf;

ALWAYS_INLINE vf f_set(float x) { return x; }
ALWAYS_INLINE vf f_load(const float *p) { return *p; }
ALWAYS_INLINE void f_store(float *p, vf x) { *p = x; }
ALWAYS_INLINE vf f_add(vf a, vf b) { return a + b; }
ALWAYS_INLINE vf f_sub(vf a, vf b) { return a - b; }
ALWAYS_INLINE vf f_fma(vf a, vf b, vf c) { return a * b + c; }
ALWAYS_INLINE vf f_max(vf a, vf b) { return a > b ? a : b; }
ALWAYS_INLINE vf f_sqrt(vf a) { return sqrtf(a); }
ALWAYS_INLINE vf f_round(vf a) {
    return (a + 12582912.0f) - 12582912.0f;
} /* |a| < 2^22: 1.5 2^23 leaves whole numbers */
ALWAYS_INLINE vf f_scale2(vf p, vf k) {
    uint32_t b;
    memcpy(&b, &p, 4);
    b += (uint32_t)(int32_t)k << 23;
    memcpy(&p, &b, 4);
    return p;
}
ALWAYS_INLINE vf f_if_less(vf x, vf y, vf a, vf b) { return x < y ? a : b; }
/* the lanes as float64, folded to VL */
ALWAYS_INLINE vd f_fold(vf x) { return x; }
/* p[0 .. FL) += x in float64 */
ALWAYS_INLINE void f_add_to(double *p, vf x) { *p += x; }
