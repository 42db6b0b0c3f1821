/* dispatch.c - choose the kernels: the best instruction set that the processor and the operating system support.
 *
 * MAPUOT_EACH_ISA(DO), DO(isa) for each instruction set built, best last, comes from setup.py, which compiles them.
 * MAPUOT_ISA=scalar|avx2|avx512|neon lowers the choice. CPUID is asked for every feature that the compiler flags name,
 * and XGETBV tells whether the operating system saves the registers. (__builtin_cpu_supports belongs to the compiler's
 * library. The library of zig, which compiles the wheels, reports no feature on any machine.)
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "kernels.h"

#define DECLARE(isa)                                                                                                   \
    extern const dtype_kernels kernels_f64_##isa, kernels_f32_##isa;                                                   \
    extern const sweep_kernels sweeps_##isa;                                                                           \
    extern const coarse_kernels coarse_##isa;                                                                          \
    extern const stream_kernels streams_##isa;                                                                         \
    void box_pairs_##isa(const box_args *, int64_t, int64_t, double *);                                                \
    extern const struct marginal_kernels marginals_##isa;                                                              \
    extern const struct left_kernels left_##isa;                                                                       \
    static const mapuot_kernels table_##isa = {#isa,                                                                   \
                                               {&kernels_f64_##isa, &kernels_f32_##isa},                               \
                                               &sweeps_##isa,                                                          \
                                               &coarse_##isa,                                                          \
                                               &streams_##isa,                                                         \
                                               box_pairs_##isa,                                                        \
                                               &marginals_##isa,                                                       \
                                               &left_##isa};

MAPUOT_EACH_ISA(DECLARE)

#define TABLE(isa) &table_##isa,
static const mapuot_kernels *const tables[] = {MAPUOT_EACH_ISA(TABLE)};
enum { TABLES = sizeof tables / sizeof *tables };

#ifdef __x86_64__
#define ALL(bits, of) (((of) & (bits)) == (bits))
enum { YMM = 6, ZMM = YMM | 0xe0 }; /* XCR0: registers that the operating system saves */

/* Can this machine run code built for this instruction set? */
static int runs_here(const char *isa) {
    unsigned a, b, c, d, saved;
    if (strcmp(isa, "scalar") == 0) return 1;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !ALL(bit_FMA | bit_AVX | bit_OSXSAVE, c)) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !ALL(bit_AVX2, b)) return 0;
    if (strcmp(isa, "avx2") == 0) return ALL(YMM, saved);
    return ALL(bit_AVX512F | bit_AVX512DQ | bit_AVX512VL | bit_AVX512BW, b) && ALL(ZMM, saved);
}
#else
static int runs_here(const char *isa) {
    (void)isa; /* every aarch64 has NEON */
    return 1;
}
#endif

/* the table of that name if this machine can run it, the best one for "auto", or NULL */
static const mapuot_kernels *find(const char *isa) {
    const int any = strcmp(isa, "auto") == 0;
    for (int k = TABLES - 1; k >= 0; k--)
        if ((any || strcmp(isa, tables[k]->isa) == 0) && runs_here(tables[k]->isa)) return tables[k];
    return NULL;
}

static _Atomic(const mapuot_kernels *) active;

const mapuot_kernels *mapuot_active_kernels(void) {
    const mapuot_kernels *kernels = atomic_load(&active);
    if (!kernels) {
        const char *isa = getenv("MAPUOT_ISA");
        kernels = find(isa && *isa ? isa : "auto");
        kernels = kernels ? kernels : find("auto");
        atomic_store(&active, kernels);
    }
    return kernels;
}

const char *mapuot_isa(void) { return mapuot_active_kernels()->isa; }

int mapuot_set_isa(const char *isa) {
    const mapuot_kernels *kernels = find(isa);
    if (!kernels) return MAPUOT_BAD_ARGUMENT;
    atomic_store(&active, kernels);
    return MAPUOT_RUNNING;
}
