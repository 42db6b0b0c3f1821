/* batch.c - many problems at once. Every thread of the pool holds up to SLOTS problems. It makes one pass over the K
 * that they share, finishes each by its own finish_pass, and replaces a stopped problem by the next of the queue.
 *
 * The problems are independent, so the threads never wait for each other. Kernels: batch_tmpl.c.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "flush.h"
#include "kernels.h"

enum { SLOTS = 16 };

typedef struct {
    int64_t p, count;
    int shared, slots;
    mapuot_state *states;
    mapuot_stats *stats;
    mapuot_newton *newton;
    mapuot_pool *serial;
    double *room; /* mapuot_meet_room of each thread, where columns are hard */
    int64_t room_len;
    atomic_llong next;
} batch_job;

static void spread_side(mapuot_side *side, int64_t q) {
    const int64_t step = q * padded(side->len);
    side->weight += step;
    side->absorbed += step;
    side->base = side->base ? side->base + step : NULL;
    side->log_scale += step;
    side->scale += step;
    side->marginal += step;
}

int mapuot_batch_spread(int64_t p, int32_t shared, mapuot_state *states) {
    const mapuot_state first = states[0];
    const int64_t np = padded(first.n), width = entry_bytes(first.dtype);
    for (int64_t q = 1; q < p; q++) {
        mapuot_state *state = states + q;
        *state = first;
        spread_side(&state->rows, q);
        spread_side(&state->cols, q);
        state->sums += q * (np + SCALARS);
        state->work += q * 3 * np;
        state->history += q * mapuot_history(first.limits.anderson_depth, first.n);
        if (!shared) state->kernel = (char *)state->kernel + q * first.m * first.ld * width;
    }
    return MAPUOT_RUNNING;
}

/* the next problem of the queue that is still running, -1 if there is none */
static int64_t take(batch_job *job) {
    for (;;) {
        int64_t i = atomic_fetch_add(&job->next, 1);
        if (i >= job->p) return -1;
        if (job->stats[i].status == MAPUOT_RUNNING) return i;
    }
}

static void one_pass(const batch_job *job, mapuot_state *const *states, int count) {
    for (int k = 0; k < count && job->shared; k++)
        memset(states[k]->sums, 0, (size_t)(padded(states[k]->n) + SCALARS) * sizeof(double));
    if (!job->shared) {
        for (int k = 0; k < count; k++) mapuot_row_pass(job->serial, states[k]);
        return;
    }
    const uint64_t before = begin_flush(states[0]->limits.reg);
    mapuot_active_kernels()->dtype[states[0]->dtype]->batch_pass(states, count);
    end_flush(before);
}

/* Finish a pass and, where hard columns nearly hold, make Newton's step. Returns the status. */
static int finish(const batch_job *job, mapuot_state *state, int64_t i, double *room) {
    mapuot_stats two[2] = {0};
    int64_t made = 0;
    int status = mapuot_finish_pass(job->serial, state, two);
    if (room && status == MAPUOT_CONVERGED)
        status = mapuot_meet(job->serial, state, job->newton + i, room, 1, two, &made);
    job->stats[i] = two[made];
    return status;
}

/* Certify the last pass of a problem that runs on. */
static void look_back(const batch_job *job, int64_t i, double *room) {
    int64_t made = 0;
    job->newton[i].wait = 0;
    if (mapuot_meet(job->serial, job->states + i, job->newton + i, room, 0, job->stats + i, &made) == MAPUOT_STALLED)
        job->stats[i].status = MAPUOT_RUNNING;
}

static void batch_task(void *context, int thread, int threads) {
    batch_job *job = context;
    mapuot_state *states[SLOTS];
    int64_t index[SLOTS], made[SLOTS];
    int held = 0, open = 1;
    double *room = job->room ? job->room + thread * job->room_len : NULL;
    (void)threads;
    for (int64_t i; room && job->count == 0 && (i = take(job)) >= 0;) look_back(job, i, room);
    if (job->count == 0) return;
    for (;;) {
        while (open && held < job->slots) {
            const int64_t i = take(job);
            open = i >= 0;
            if (!open) break;
            index[held] = i;
            made[held] = 0;
            states[held++] = job->states + i;
        }
        if (held == 0) return;
        one_pass(job, states, held);
        for (int k = held - 1; k >= 0; k--) {
            if (finish(job, states[k], index[k], room) == MAPUOT_RUNNING && ++made[k] < job->count) continue;
            held--; /* the last one takes its place */
            index[k] = index[held];
            made[k] = made[held];
            states[k] = states[held];
        }
    }
}

int mapuot_batch_iterate(mapuot_pool *pool, int64_t p, int32_t shared, int32_t slots, mapuot_state *states,
                         int64_t count, mapuot_stats *stats, mapuot_newton *newton) {
    batch_job job = {.p = p, .count = count, .shared = shared, .states = states, .stats = stats, .newton = newton};
    const int64_t room_len = newton ? mapuot_meet_room(states->m, states->n) : 0;
    job.slots = !shared || slots < 1 ? 1 : slots < SLOTS ? slots : SLOTS;
    job.serial = mapuot_pool_new(1, 1);
    char *room = room_len ? malloc((size_t)(mapuot_pool_threads(pool) * room_len) * sizeof(double) + 64) : NULL;
    if (!job.serial || (room_len && !room)) {
        free(room);
        mapuot_pool_free(job.serial);
        return MAPUOT_NO_MEMORY;
    }
    job.room = room ? (double *)(room + (-(uintptr_t)room & 63)) : NULL;
    job.room_len = room_len;
    atomic_init(&job.next, 0);
    pool_run(pool, batch_task, &job);
    mapuot_pool_free(job.serial);
    free(room);
    return MAPUOT_RUNNING;
}
