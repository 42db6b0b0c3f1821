/* schedule.c - the rows of a pass that each worker of the pool sums, if workers may differ in speed ("auto").
 *
 * Rows are split evenly, in whole tiles, as long as no worker is 5 % behind the others: the sums then do not depend on
 * timing. A state without shares ("static") always does so. Otherwise each worker has a range by its pace in earlier
 * passes, except for the last eighth of the rows: workers that are done claim it in chunks from an atomic counter.
 */
#include <math.h>

#include "schedule.h"

enum { CLAIMED = 8 };              /* one tile in this many is claimed */
static const double UNEVEN = 1.05; /* ratio of the slowest worker's time to the mean */
static const double LEAST = 3e-6;  /* and seconds above the mean: the cost of fetching data from another core's cache */
static const double WEIGHT = 0.25; /* weight of the newest pass in the mean; one interrupted pass must not dominate */

/* Return whether the slowest worker would be behind the others if all had equal ranges. */
static int uneven(const mapuot_share *shares, int threads, int64_t m) {
    double sum = 0.0, slowest = 0.0;
    for (int t = 0; t < threads; t++) {
        if (!(shares[t].pace > 0.0)) return 0;
        sum += shares[t].pace;
        slowest = fmax(slowest, shares[t].pace);
    }
    const double mean = sum / threads;
    return slowest > UNEVEN * mean && (slowest - mean) * (double)m / threads > LEAST;
}

void schedule_rows(row_schedule *schedule, mapuot_share *shares, int threads, int64_t m) {
    const int64_t tiles = (m + TILE - 1) / TILE, claimed = uneven(shares, threads, m) ? tiles / CLAIMED : 0;
    double speed = 0.0, before = 0.0;
    schedule->shares = shares;
    schedule->threads = threads;
    schedule->m = m;
    schedule->open = claimed > 0 ? (tiles - claimed) * TILE : m;
    atomic_init(&schedule->next, schedule->open);
    for (int t = 0; t < threads && claimed > 0; t++) speed += 1.0 / shares[t].pace;
    for (int t = 0; t < threads; t++) {
        shares[t].first = first_row(m, t, threads);
        if (claimed > 0) {
            shares[t].first = (int64_t)((double)(tiles - claimed) * before) * TILE;
            shares[t].part = 1.0 / (shares[t].pace * speed);
            before += shares[t].part;
        }
    }
}

int64_t last_row(const row_schedule *schedule, int thread) {
    return thread + 1 < schedule->threads ? schedule->shares[thread + 1].first : schedule->open;
}

/* Claim half of a worker's part of the rest at a time, so that all end together. A worker slower than the mean leaves
 * the last tiles to the others, since all would wait for it. */
int64_t claim_rows(row_schedule *schedule, int thread, int64_t *i0) {
    const double part = schedule->shares[thread].part;
    long long next = atomic_load(&schedule->next);
    while (next < schedule->m) {
        const double mine = part * (double)(schedule->m - next);
        if (mine < TILE / 2 && part * schedule->threads < 1.0) return 0;
        const int64_t chunk = mine < 2 * TILE ? TILE : (int64_t)mine / (2 * TILE) * TILE, end = next + chunk;
        if (atomic_compare_exchange_weak(&schedule->next, &next, end)) {
            *i0 = next;
            return end < schedule->m ? end : schedule->m;
        }
    }
    return 0;
}

void note_paces(mapuot_share *shares, int threads) {
    for (int t = 0; t < threads; t++) {
        mapuot_share *share = shares + t;
        /* a worker without rows seems ever faster, until it gets rows again */
        const double pace = share->rows > 0 ? share->seconds / (double)share->rows : 0.0;
        share->pace += (share->pace > 0.0 ? WEIGHT : 1.0) * (pace - share->pace);
    }
}
