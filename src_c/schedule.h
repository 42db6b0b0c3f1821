/* schedule.h - the rows of one pass, shared among workers of unequal speed; schedule.c has the rule. */
#pragma once
#include <stdatomic.h>

#include "kernels.h"

typedef struct {
    mapuot_share *shares; /* one a thread */
    int threads;
    int64_t m, open; /* rows from open on are claimed */
    atomic_llong next;
} row_schedule;

/* before a pass: each worker's first row, and its part of those to claim */
void schedule_rows(row_schedule *schedule, mapuot_share *shares, int threads, int64_t m);
int64_t last_row(const row_schedule *schedule, int thread); /* where its range ends */
/* the end of the rows from *i0 on that are now this worker's, 0 where there are none left for it */
int64_t claim_rows(row_schedule *schedule, int thread, int64_t *i0);
/* after a pass: what it tells of the workers' pace */
void note_paces(mapuot_share *shares, int threads);
