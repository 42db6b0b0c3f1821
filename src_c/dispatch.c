/* dispatch.c - which kernels run: the best instruction set that the processor and the operating system support.
 *
 * MAPUOT_EACH_ISA(DO), DO(isa) for all that are built, the best last, comes from setup.py, which compiles them.
 * MAPUOT_ISA=scalar|avx2|avx512|neon lowers the choice. Every feature that the flags there name is tested;
 * __builtin_cpu_supports also asks XGETBV whether the operating system saves the registers.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "barycenter.h"
#include "kernels.h"
#include "left.h"
#include "log_matmul.h"
#include "marginals.h"

#define DECLARE_DTYPE(isa, dtype)                                                                                      \
    void row_pass_##dtype##_##isa(const mapuot_state *, int64_t, int64_t, double *);                                   \
    void narrow_pass_##dtype##_##isa(const mapuot_state *, int64_t, int64_t, double *);                                \
    void row_dots_##dtype##_##isa(const mapuot_state *, int64_t, int64_t, double *);                                   \
    void plan_pass_##dtype##_##isa(const mapuot_state *, int64_t, int64_t, double *);                                  \
    void build_kernel_##dtype##_##isa(const stream_args *, int64_t, int64_t);                                          \
    void form_plan_##dtype##_##isa(const stream_args *, int64_t, int64_t);                                             \
    void batch_pass_##dtype##_##isa(mapuot_state *const *, int);
#define DECLARE_SWEEP(op, isa) void op##_##isa(const mapuot_state *, const sweep_args *, int64_t, int64_t, double *);
#define DECLARE_GATHER(op, isa) void op##_##isa(const stream_args *, int64_t, int64_t, double *);
#define DECLARE(isa)                                                                                                   \
    DECLARE_DTYPE(isa, f64)                                                                                            \
    DECLARE_DTYPE(isa, f32)                                                                                            \
    void row_prox_##isa(const mapuot_state *, int64_t, int64_t, double *);                                             \
    DECLARE_SWEEP(sweep_marginal, isa)                                                                                 \
    DECLARE_SWEEP(sweep_prox, isa)                                                                                     \
    DECLARE_SWEEP(sweep_difference, isa)                                                                               \
    DECLARE_SWEEP(sweep_advance, isa)                                                                                  \
    void coarse_rows_##isa(const mapuot_state *, pass_fn, int, int, double *);                                         \
    void coarse_part_##isa(const mapuot_state *, const sweep_args *, int, int, int);                                   \
    void coarse_factor_##isa(const mapuot_state *);                                                                    \
    void coarse_solve_##isa(const mapuot_state *, int);                                                                \
    DECLARE_GATHER(extrema, isa)                                                                                       \
    DECLARE_GATHER(balance, isa)                                                                                       \
    DECLARE_GATHER(apply_transpose, isa)                                                                               \
    DECLARE_GATHER(plan_sums, isa)                                                                                     \
    void apply_##isa(const stream_args *, int64_t, int64_t);                                                           \
    void box_pairs_##isa(const box_args *, int64_t, int64_t, double *);                                                \
    extern const log_matmul_kernels log_matmul_f64_##isa, log_matmul_f32_##isa;                                        \
    extern const barycenter_kernels barycenter_##isa;                                                                  \
    extern const marginal_kernels marginals_##isa;                                                                     \
    extern const left_kernels left_##isa;                                                                              \
    static const mapuot_kernels table_##isa = {                                                                        \
        #isa,                                                                                                          \
        {{row_pass_f64_##isa, NULL, row_dots_f64_##isa, plan_pass_f64_##isa, build_kernel_f64_##isa,                   \
          form_plan_f64_##isa, batch_pass_f64_##isa, &log_matmul_f64_##isa},                                           \
         {row_pass_f32_##isa, narrow_pass_f32_##isa, row_dots_f32_##isa, plan_pass_f32_##isa, build_kernel_f32_##isa,  \
          form_plan_f32_##isa, batch_pass_f32_##isa, &log_matmul_f32_##isa}},                                          \
        row_prox_##isa,                                                                                                \
        sweep_marginal_##isa,                                                                                          \
        sweep_prox_##isa,                                                                                              \
        sweep_difference_##isa,                                                                                        \
        sweep_advance_##isa,                                                                                           \
        coarse_rows_##isa,                                                                                             \
        coarse_part_##isa,                                                                                             \
        coarse_factor_##isa,                                                                                           \
        coarse_solve_##isa,                                                                                            \
        extrema_##isa,                                                                                                 \
        balance_##isa,                                                                                                 \
        apply_transpose_##isa,                                                                                         \
        plan_sums_##isa,                                                                                               \
        apply_##isa,                                                                                                   \
        box_pairs_##isa,                                                                                               \
        &barycenter_##isa,                                                                                             \
        &marginals_##isa,                                                                                              \
        &left_##isa};

MAPUOT_EACH_ISA(DECLARE)

#define TABLE(isa) &table_##isa,
static const mapuot_kernels *const tables[] = {MAPUOT_EACH_ISA(TABLE)};
enum { TABLES = sizeof tables / sizeof *tables };

/* whether this machine runs what was built for it with these instructions */
static int runs_here(const char *isa)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(isa, "avx2") == 0)
        return avx2;
    if (strcmp(isa, "avx512") == 0)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
#endif
    (void)isa; /* every aarch64 has NEON */
    return 1;
}

/* the table of that name if this machine can run it, the best one for "auto", else NULL */
static const mapuot_kernels *find(const char *isa)
{
    const int any = strcmp(isa, "auto") == 0;
    for (int k = TABLES - 1; k >= 0; k--)
        if ((any || strcmp(isa, tables[k]->isa) == 0) && runs_here(tables[k]->isa))
            return tables[k];
    return NULL;
}

static _Atomic(const mapuot_kernels *) active;

const mapuot_kernels *mapuot_active_kernels(void)
{
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

int mapuot_set_isa(const char *isa)
{
    const mapuot_kernels *kernels = find(isa);
    if (!kernels)
        return MAPUOT_BAD_ARGUMENT;
    atomic_store(&active, kernels);
    return MAPUOT_RUNNING;
}
