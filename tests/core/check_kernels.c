/* check_kernels.c - every kernel x instruction set x storage of K, on odd sizes and layouts, by 1, 2, 3 and 7 threads.
 *
 * A run is made twice, by scalar kernels and by an instruction set's, between guard bytes: their outputs must
 * agree, and their inputs must not change.  Prints one line; exit status 1 where a kernel is wrong.
 * Contract: src_c/kernels.h.  The tables are reached through mapuot_set_isa and mapuot_active_kernels.
 */
#include <time.h>

#include "check_buffers.h"
#include "check_made.h"
#include "check_passes.h"
#include "check_streams.h"

static const int sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 257};
static const char *const isas[] = {"scalar", "avx2", "avx512", "neon"}, *const dtypes[] = {"f64", "f32"};
static const int pool_sizes[] = {1, 2, 3, 7};
static mapuot_pool *pools[4];
enum { SIZES = sizeof sizes / sizeof *sizes, ISAS = 4, POOLS = 4 };

static void set_where(const char *isa, int dtype, int64_t m, int64_t n, int kind, int threads) {
    snprintf(where, sizeof where, "%s %s %lldx%lld variant %d, %d threads", isa, dtype < 0 ? "" : dtypes[dtype],
             (long long)m, (long long)n, kind, threads);
}

typedef void run_fn(int64_t m, int64_t n, int variant, int form, mapuot_pool *pool);

/* the same numbers by scalar kernels and by these */
static void check(const char *isa, run_fn *run, int64_t m, int64_t n, int variant, int form, int pool) {
    const uint64_t start = seed;
    set_where(isa, form / FORMS % 2, m, n, variant, pool_sizes[pool]);
    mapuot_set_isa("scalar");
    run(m, n, variant, form, pools[pool]);
    const int middle = buffer_count;
    seed = start;
    mapuot_set_isa(isa);
    run(m, n, variant, form, pools[pool]);
    compare(0, middle);
    release(0);
}

static void check_passes(const char *isa, int64_t m, int64_t n, int kind, int pool) {
    for (int form = 0; form < 2 * FORMS; form++) check(isa, run_rows, m, n, kind, form, pool);
}

/* all pairs of sizes, the layout, penalty and number of threads changing from one to the next */
static void check_isa(const char *isa) {
    int turn = 0;
    for (int p = 0; p < SIZES; p++)
        for (int q = 0; q < SIZES; q++, turn++) {
            const int64_t m = sizes[p], n = sizes[q];
            const int layout = turn % LAYOUTS, pool = turn / 3 % POOLS;
            check(isa, run_streams, m, n, layout, 0, pool);
            check(isa, run_streams, m, n, layout, 1, pool);
            check_passes(isa, m, n, turn % SIDE_KINDS, pool);
            set_where(isa, 0, m, n, layout, pool_sizes[pool]);
            check_made(m, n, layout, turn % SIDE_KINDS, pools[pool]);
            check(isa, run_pairs, m, n, turn % SIDE_KINDS, turn % 2, pool);
            for (int k = 0; k < 4 && m == n; k++) check_half(n, (mapuot_dtype)(k / 2), k % 2, pools[pool]);
        }
    for (int q = 0; q < SIZES; q++)
        for (int kind = 0; kind < SIDE_KINDS; kind++) check(isa, run_sweeps, 1, sizes[q], kind, q % 2, 0);
    /* around the block of 512 columns, and wide enough for the tiles of 4 and 2 rows */
    const int64_t wide[][2] = {{3, 511}, {9, 512},  {5, 513},  {17, 1100}, {1100, 3}, {13, 500},  {7, 515},
                               {515, 7}, {3, 1001}, {1001, 1}, {5, 2047},  {2, 4097}, {13, 9001}, {11, 33001}};
    const int streamed = 12; /* the rest would take long */
    for (int k = 0; k < 14; k++) {
        set_where(isa, -1, wide[k][0], wide[k][1], k, pool_sizes[k % POOLS]);
        if (k < streamed) check(isa, run_streams, wide[k][0], wide[k][1], k % LAYOUTS, k % 2, k % POOLS);
        check_made(wide[k][0], wide[k][1], k % LAYOUTS, k % SIDE_KINDS, pools[k % POOLS]);
        check(isa, run_pairs, wide[k][0], wide[k][1], k % SIDE_KINDS, k % 2, k % POOLS);
        check_passes(isa, wide[k][0], wide[k][1], k % 2, k % POOLS);
    }
}

/* a pool's first rounds: its threads may still be starting when the work is handed out */
static void check_new_pools(void) {
    for (int k = 0; k < 60; k++) {
        mapuot_pool *pool = mapuot_pool_new(1 + k % 6, 2);
        set_where("new pool", -1, 7 + k % 20, 1 + k % 5, k % LAYOUTS, 1 + k % 6);
        expect("threads", 0, mapuot_pool_threads(pool), 1 + k % 6, 0, 0);
        const uint64_t start = seed;
        run_streams(7 + k % 20, 1 + k % 5, k % LAYOUTS, 0, pools[0]);
        const int middle = buffer_count;
        seed = start;
        run_streams(7 + k % 20, 1 + k % 5, k % LAYOUTS, 0, pool);
        compare(0, middle);
        release(0);
        mapuot_pool_free(pool);
    }
    expect("pool of no threads", 0, mapuot_pool_new(0, 1) == NULL, 1, 0, 0);
    mapuot_pool_free(NULL);
}

int main(void) {
    const time_t begun = time(NULL);
    char checked[64] = "";
    for (int k = 0; k < POOLS; k++) pools[k] = mapuot_pool_new(pool_sizes[k], 2);
    for (int i = 0; i < ISAS; i++)
        if (mapuot_set_isa(isas[i]) == 0) {
            check_isa(isas[i]);
            strcat(strcat(checked, " "), isas[i]);
        }
    check_new_pools();
    printf("check_kernels:%s; %ld values, %ld wrong, %.0f s\n", checked, checks, failures, difftime(time(NULL), begun));
    for (int k = 0; k < POOLS; k++) mapuot_pool_free(pools[k]);
    return failures > 0;
}
