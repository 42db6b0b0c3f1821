/* schedule.h - split the rows of one pass among workers of unequal speed; schedule.c has the rule. */
#pragma once
#include <stdatomic.h>

#include "kernels.h"

typedef struct {
    mapuot_share *shares; /* one a thread */
    int threads;
    int64_t m, open; /* rows from open on are claimed */
    atomic_llong next;
} row_schedule;

/* Before a pass: set each worker's first row, and its part of the rows to claim. */
void schedule_rows(row_schedule *schedule, mapuot_share *shares, int threads, int64_t m);
int64_t last_row(const row_schedule *schedule, int thread); /* the end of its range */
/* Claim rows from *i0 on for this worker. Returns their end, or 0 if none are left for it. */
int64_t claim_rows(row_schedule *schedule, int thread, int64_t *i0);
/* After a pass: update the workers' paces. */
void note_paces(mapuot_share *shares, int threads);
