/* flush.h - flush subnormal results to 0 while a kernel over K runs: an Intel core takes some 150 cycles for each, and
 * 8000 points took 8 s instead of .7. The loss is part of `lost` (common/rules.h). Subnormal arguments stay as they are
 * where the processor can tell the two apart (x86). The calling thread gets its state back.
 */
#pragma once
#include <stdint.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#define LEAST_REG 1e-150 /* in smaller units relevant numbers may be subnormal */

/* Returns the state to restore. */
static inline uint64_t begin_flush(double reg) {
    uint64_t before = 0;
#if defined(__SSE2__)
    before = _mm_getcsr();
    if (reg >= LEAST_REG) _mm_setcsr((unsigned)before | _MM_FLUSH_ZERO_ON);
#elif defined(__aarch64__)
    const uint64_t flush_zero = (uint64_t)1 << 24;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (reg >= LEAST_REG) __asm__ volatile("msr fpcr, %0" ::"r"(before | flush_zero));
#else
    (void)reg;
#endif
    return before;
}

static inline void end_flush(uint64_t before) {
#if defined(__SSE2__)
    _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" ::"r"(before));
#else
    (void)before;
#endif
}
