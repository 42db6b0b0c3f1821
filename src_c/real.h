/* real.h - the names of symbols, defined only here: KERNEL(op) -> op_f32_avx512, ISA_OP(op) -> op_avx512. */
#pragma once
#include <stdint.h>
#include <string.h>

#define PASTE2_(a, b) a##_##b
#define PASTE2(a, b) PASTE2_(a, b)
#define PASTE3_(a, b, c) a##_##b##_##c
#define PASTE3(a, b, c) PASTE3_(a, b, c)

#ifdef MAPUOT_ISA
#define ISA_OP(op) PASTE2(op, MAPUOT_ISA)
#endif

#ifdef MAPUOT_DTYPE
#define KERNEL(op) PASTE3(op, MAPUOT_DTYPE, MAPUOT_ISA)
#endif

#if defined(MAPUOT_DTYPE_F64)
typedef double real; /* the type of K's stored entries */
#elif defined(MAPUOT_DTYPE_F32)
typedef float real;
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLLED(...) _Pragma("GCC unroll 16") for (__VA_ARGS__) /* a short loop, fully unrolled */
