/* pool.c - a pool of threads that lives as long as one solver. It contains nothing about transport.
 *
 * pool_run gives one function to all threads and waits for them: it spins for some microseconds, then sleeps. After
 * fork the child has no workers, and while another thread is inside pool_run no worker is free. In both cases the
 * caller computes every thread's share itself, one after the other, with the same results.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

enum { SPINS = 2000, CACHE_LINE = 64 };

struct mapuot_pool {
    int threads;
    int spins;
    pid_t owner;
    pthread_t *workers;
    int *slowness;        /* how many times each worker makes a pass, 0: once */
    pthread_mutex_t busy; /* one pool_run at a time */
    pthread_mutex_t lock; /* guards sleeping only */
    pthread_cond_t wake, done;
    pool_fn fn;
    void *context;
    _Alignas(CACHE_LINE) atomic_uint round; /* number of times work was handed out */
    _Alignas(CACHE_LINE) atomic_int left;   /* workers that have not finished this round */
    _Alignas(CACHE_LINE) atomic_int stop;
};

typedef struct {
    mapuot_pool *pool;
    int thread;
} worker_start;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* some 10 ns; YIELD is a nop on most cores */
#endif
}

/* wait until the round differs from seen */
static unsigned await_round(mapuot_pool *pool, unsigned seen) {
    for (int i = 0; i < pool->spins; i++) {
        unsigned round = atomic_load_explicit(&pool->round, memory_order_acquire);
        if (round != seen) return round;
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->round) == seen) pthread_cond_wait(&pool->wake, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return atomic_load(&pool->round);
}

static void *worker(void *argument) {
    worker_start start = *(worker_start *)argument;
    mapuot_pool *pool = start.pool;
    unsigned round = 0;
    free(argument);
    for (;;) {
        round = await_round(pool, round);
        if (atomic_load(&pool->stop)) return NULL;
        pool->fn(pool->context, start.thread, pool->threads);
        if (atomic_fetch_sub_explicit(&pool->left, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static void next_round(mapuot_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->round, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

void pool_run(mapuot_pool *pool, pool_fn fn, void *context) {
    if (pool->threads == 1 || pool->owner != getpid() || pthread_mutex_trylock(&pool->busy) != 0) {
        for (int t = 0; t < pool->threads; t++) fn(context, t, pool->threads);
        return;
    }
    pool->fn = fn;
    pool->context = context;
    atomic_store(&pool->left, pool->threads - 1);
    next_round(pool);
    fn(context, 0, pool->threads);
    for (int i = 0; i < pool->spins && atomic_load_explicit(&pool->left, memory_order_acquire) > 0; i++) relax();
    if (atomic_load_explicit(&pool->left, memory_order_acquire) > 0) {
        pthread_mutex_lock(&pool->lock);
        while (atomic_load(&pool->left) > 0) pthread_cond_wait(&pool->done, &pool->lock);
        pthread_mutex_unlock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->busy);
}

static int start_worker(mapuot_pool *pool, int thread) {
    worker_start *start = malloc(sizeof *start);
    if (!start) return 0;
    *start = (worker_start){pool, thread};
    if (pthread_create(&pool->workers[thread], NULL, worker, start) != 0) {
        free(start);
        return 0;
    }
    return 1;
}

mapuot_pool *mapuot_pool_new(int threads, int cores) {
    mapuot_pool *pool = NULL;
    if (threads < 1 || posix_memalign((void **)&pool, CACHE_LINE, sizeof *pool) != 0) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->owner = getpid();
    pool->threads = 1;
    pool->spins = threads <= cores ? SPINS : 0;
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    pool->slowness = calloc((size_t)threads, sizeof *pool->slowness);
    pthread_mutex_init(&pool->busy, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    int started = 1;
    while (pool->workers && pool->slowness && started < threads && start_worker(pool, started)) started++;
    pool->threads = started;
    if (started < threads) {
        mapuot_pool_free(pool);
        return NULL;
    }
    return pool;
}

void mapuot_pool_free(mapuot_pool *pool) {
    if (!pool) return;
    if (pool->threads > 1 && pool->owner == getpid()) {
        atomic_store(&pool->stop, 1);
        next_round(pool);
        for (int t = 1; t < pool->threads; t++) pthread_join(pool->workers[t], NULL);
    }
    free(pool->workers);
    free(pool->slowness);
    free(pool);
}

/* threadpoolctl finds this library by this symbol (mapuot/threadpool.py), the only visible one. */
__attribute__((visibility("default"))) int mapuot_pool_threads(const mapuot_pool *pool) { return pool->threads; }

void mapuot_pool_slow(mapuot_pool *pool, int thread, int times) { pool->slowness[thread] = times; }

int pool_slowness(const mapuot_pool *pool, int thread) { return pool->slowness[thread]; }
