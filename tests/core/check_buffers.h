/* check_buffers.h - what the checks of check_kernels.c stand on: buffers between guard bytes (all ones: NaN to whoever
 * reads them; under the address sanitizer the guards are its own), expectations, and storage types.
 */
#ifndef CHECK_BUFFERS_H
#define CHECK_BUFFERS_H
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
enum { MAX_BUFFERS = 128 };

static const double rounding[] = {0x1p-53, 0x1p-24}; /* by mapuot_dtype */
static const size_t width[] = {8, 4};

static struct {
    unsigned char *raw;
    size_t used;
} buffers[MAX_BUFFERS];
static int buffer_count;
static char where[160];
static long checks, failures;

static void expect(const char *what, int64_t i, double got, double want, double rtol, double atol)
{
    checks++;
    if (got == want || fabs(got - want) <= rtol * fabs(want) + atol)
        return;
    if (failures++ < 20)
        fprintf(stderr, "%s: %s[%lld] = %.17g, expected %.17g\n", where, what, (long long)i, got, want);
}

/* an array that starts skew bytes behind a cache line */
static void *guarded(size_t bytes, size_t skew)
{
    void *raw = NULL;
    const size_t used = skew + bytes;
    if (buffer_count == MAX_BUFFERS || posix_memalign(&raw, 64, used + 2 * GUARD + (used + GUARD == 0)) != 0)
        abort();
    memset(raw, 0xff, used + 2 * GUARD);
    buffers[buffer_count].raw = raw;
    buffers[buffer_count++].used = used;
    return (unsigned char *)raw + GUARD + skew;
}

static double *vector(int64_t n, size_t skew) { return guarded((size_t)n * sizeof(double), skew); }

/* free the buffers from the given one on; nothing may have been written around them */
static void release(int from)
{
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

static uint64_t seed = 1;

static double uniform(double lo, double hi)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return lo + (hi - lo) * (double)(seed >> 11) * 0x1p-53;
}

static double stored(const void *K, mapuot_dtype dtype, int64_t k)
{
    return dtype == MAPUOT_F64 ? ((const double *)K)[k] : ((const float *)K)[k];
}

static void store(void *K, mapuot_dtype dtype, int64_t k, double value)
{
    if (dtype == MAPUOT_F64)
        ((double *)K)[k] = value;
    else
        ((float *)K)[k] = (float)value;
}
#endif
