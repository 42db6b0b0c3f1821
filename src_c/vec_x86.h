/* vec_x86.h - the operations that AVX-512 and AVX2 share: MM(add, pd) expands to the intrinsic of either. */
ALWAYS_INLINE vd v_set(double x) { return MM(set1, pd)(x); }
ALWAYS_INLINE vd v_load(const double *p) { return MM(loadu, pd)(p); }
ALWAYS_INLINE void v_store(double *p, vd x) { MM(storeu, pd)(p, x); }
ALWAYS_INLINE void v_stream(double *p, vd x) { MM(stream, pd)(p, x); }
ALWAYS_INLINE vd v_add(vd a, vd b) { return MM(add, pd)(a, b); }
ALWAYS_INLINE vd v_sub(vd a, vd b) { return MM(sub, pd)(a, b); }
ALWAYS_INLINE vd v_mul(vd a, vd b) { return MM(mul, pd)(a, b); }
ALWAYS_INLINE vd v_div(vd a, vd b) { return MM(div, pd)(a, b); }
ALWAYS_INLINE vd v_fma(vd a, vd b, vd c) { return MM(fmadd, pd)(a, b, c); }
ALWAYS_INLINE vd v_fnma(vd a, vd b, vd c) { return MM(fnmadd, pd)(a, b, c); }
ALWAYS_INLINE vd v_sqrt(vd a) { return MM(sqrt, pd)(a); }
ALWAYS_INLINE vd v_max(vd a, vd b) { return MM(max, pd)(a, b); }
ALWAYS_INLINE vd v_min(vd a, vd b) { return MM(min, pd)(a, b); }

ALWAYS_INLINE vf f_set(float x) { return MM(set1, ps)(x); }
ALWAYS_INLINE vf f_load(const float *p) { return MM(loadu, ps)(p); }
ALWAYS_INLINE void f_store(float *p, vf x) { MM(storeu, ps)(p, x); }
ALWAYS_INLINE vf f_add(vf a, vf b) { return MM(add, ps)(a, b); }
ALWAYS_INLINE vf f_sub(vf a, vf b) { return MM(sub, ps)(a, b); }
ALWAYS_INLINE vf f_fma(vf a, vf b, vf c) { return MM(fmadd, ps)(a, b, c); }
ALWAYS_INLINE vf f_max(vf a, vf b) { return MM(max, ps)(a, b); }
ALWAYS_INLINE vf f_sqrt(vf a) { return MM(sqrt, ps)(a); }
