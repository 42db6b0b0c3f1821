/* check_buffers.h - tools for the checks of check_kernels.c: buffers between guard bytes (all ones: NaN to whoever
 * reads them; under the address sanitizer the guards are its own), expectations, storage types, and the comparison of all
 * buffers of a run with a run by scalar kernels.
 */
#pragma once
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#ifdef __SANITIZE_ADDRESS__
enum { GUARD = 0 };
#else
enum { GUARD = 192 };
#endif
enum { MAX_BUFFERS = 256 };

static const double rounding[] = {0x1p-53, 0x1p-24}; /* by mapuot_dtype */
static const size_t width[] = {8, 4};

static struct {
    unsigned char *raw, *data;
    size_t used;
    int kind; /* BYTES that no kernel changes, numbers of a mapuot_dtype within rtol and atol, or NOTES of no interest */
    double rtol, atol;
} buffers[MAX_BUFFERS];
enum { BYTES = -1, NOTES = -2 };
static int buffer_count;
static char where[160];
static long checks, failures;

static void expect(const char *what, int64_t i, double got, double want, double rtol, double atol) {
    checks++;
    if (got == want || fabs(got - want) <= rtol * fabs(want) + atol || (isnan(got) && isnan(want))) return;
    if (failures++ < 20)
        fprintf(stderr, "%s: %s[%lld] = %.17g, expected %.17g\n", where, what, (long long)i, got, want);
}

/* an array that starts skew bytes behind a cache line */
static void *guarded(size_t bytes, size_t skew) {
    void *raw = NULL;
    const size_t used = skew + bytes;
    if (buffer_count == MAX_BUFFERS || posix_memalign(&raw, 64, used + 2 * GUARD + (used + GUARD == 0)) != 0) abort();
    memset(raw, 0xff, used + 2 * GUARD);
    buffers[buffer_count].raw = raw;
    buffers[buffer_count].used = used;
    buffers[buffer_count].kind = BYTES;
    return buffers[buffer_count++].data = (unsigned char *)raw + GUARD + skew;
}

static double *vector(int64_t n, size_t skew) { return guarded((size_t)n * sizeof(double), skew); }

/* free the buffers from the given one on; nothing may have been written around them */
static void release(int from) {
    while (buffer_count > from) {
        unsigned char *raw = buffers[--buffer_count].raw;
        size_t used = buffers[buffer_count].used;
        for (int k = 0; k < GUARD; k++)
            if (raw[k] != 0xff || raw[GUARD + used + k] != 0xff) {
                expect("guard byte of buffer", buffer_count, 1, 0, 0, 0);
                break;
            }
        free(raw);
    }
}

/* A kernel's output: numbers within rtol and atol of the scalar kernels' numbers. NOTES are not compared. */
static void *written(void *data, int kind, double rtol, double atol) {
    for (int k = buffer_count - 1; k >= 0; k--)
        if (buffers[k].data == data) {
            buffers[k].kind = kind;
            buffers[k].rtol = rtol;
            buffers[k].atol = atol;
            return data;
        }
    abort();
}

static uint64_t seed = 1;

static double uniform(double lo, double hi) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return lo + (hi - lo) * (double)(seed >> 11) * 0x1p-53;
}

static double stored(const void *K, mapuot_dtype dtype, int64_t k) {
    return dtype == MAPUOT_F64 ? ((const double *)K)[k] : ((const float *)K)[k];
}

static void store(void *K, mapuot_dtype dtype, int64_t k, double value) {
    if (dtype == MAPUOT_F64) ((double *)K)[k] = value;
    else ((float *)K)[k] = (float)value;
}

/* Compare buffers of a run, from `middle` on, with the same run by scalar kernels, from `from` on. */
static void compare(int from, int middle) {
    for (int a = from, b = middle; a < middle; a++, b++) {
        const int kind = buffers[a].kind;
        const size_t bytes = buffers[a].used - (size_t)(buffers[a].data - buffers[a].raw - GUARD);
        if (kind == BYTES)
            expect("bytes of an input, buffer", a - from, memcmp(buffers[a].data, buffers[b].data, bytes), 0, 0, 0);
        for (size_t k = 0; kind >= 0 && k < bytes / width[kind]; k++)
            expect("number of a run by vectors, 100000 times its buffer and", 100000 * (a - from) + (int64_t)k,
                   stored(buffers[b].data, (mapuot_dtype)kind, (int64_t)k),
                   stored(buffers[a].data, (mapuot_dtype)kind, (int64_t)k), buffers[a].rtol, buffers[a].atol);
    }
}
