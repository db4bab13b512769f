/* A pool of threads that run a job of phases of chunks.
 *
 * One 64-bit word says everything a thread must know to claim work: phase, how many chunks it has, and the next one.
 * A claim is one fetch-and-add; whoever finishes a phase's last chunk starts the next phase. So no thread waits for
 * another to arrive: a helper that the system has put aside costs the chunk it holds, if it holds one, and nothing else.
 *
 * Helpers watch the word for a moment after a job, then sleep in the kernel (futex); a pool without work uses no CPU.
 * After a fork the child starts helpers of its own when it first needs them.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    CHUNK_BITS = 20,
    PAUSES_BEFORE_YIELD = 4000,  /* within a job: about 0.1 ms of waiting before the core is offered to others */
    PAUSES_BEFORE_SLEEP = 4000,  /* after a job */
    TICKS_BEFORE_OFFER = 1000000, /* of the time-stamp counter: 0.3 to 0.5 ms */
};

struct facet_pool {
    _Alignas(64) atomic_uint_fast64_t word; /* phase : 24, chunks : 20, next : 20; no chunks: idle */
    _Alignas(64) atomic_uint_fast32_t done; /* chunks of this phase that have ended */
    _Alignas(64) atomic_uint epoch;         /* grows when a job starts; helpers sleep on it */
    atomic_uint sleepers;
    atomic_int busy; /* a job is running */
    atomic_int stop;
    void *job;
    count_chunks count;
    run_chunk run;
    int32_t num_threads;
    int32_t num_helpers; /* that run, in process `owner` */
    pid_t owner;
    pthread_t helpers[MAX_WORKERS];
};

typedef struct {
    facet_pool *pool;
    uint32_t worker;
} helper_start;

static uint64_t pack_word(uint64_t phase, uint64_t chunks)
{
    return phase << (2 * CHUNK_BITS) | chunks << CHUNK_BITS;
}

static uint32_t word_field(uint64_t word, int shift)
{
    return (uint32_t)(word >> shift) & ((1u << CHUNK_BITS) - 1);
}

static void sleep_on(atomic_uint *at, unsigned seen)
{
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void wake_all(atomic_uint *at)
{
    syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void start_phase(facet_pool *pool, uint32_t phase)
{
    const uint32_t chunks = pool->count(pool->job, phase);
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    if (chunks == 0)
        atomic_store_explicit(&pool->busy, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->word, pack_word(phase, chunks), memory_order_release);
}

/* Offer the core between chunks now and then. A thread that the system takes the core from in the middle of a chunk
 * makes all others wait a whole time slice; one that has just offered it is rarely taken from. */
static void offer_core(uint64_t *since)
{
    const uint64_t now = __rdtsc();
    if (now - *since > TICKS_BEFORE_OFFER) {
        sched_yield();
        *since = __rdtsc();
    }
}

/* Claim and run one chunk. 0 if the word has none left. */
static int work_once(facet_pool *pool, uint32_t worker)
{
    uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
    if (word_field(word, 0) >= word_field(word, CHUNK_BITS))
        return 0;
    word = atomic_fetch_add_explicit(&pool->word, 1, memory_order_acq_rel);
    const uint32_t chunk = word_field(word, 0), chunks = word_field(word, CHUNK_BITS);
    if (chunk >= chunks)
        return 0;
    const uint32_t phase = (uint32_t)(word >> (2 * CHUNK_BITS));
    /* A claimed chunk keeps its phase, and so its job, from ending: both are safe to read. */
    pool->run(pool->job, phase, chunk, worker);
    if (atomic_fetch_add_explicit(&pool->done, 1, memory_order_acq_rel) + 1 == chunks)
        start_phase(pool, phase + 1);
    return 1;
}

static void *help(void *argument)
{
    helper_start start = *(helper_start *)argument;
    free(argument);
    facet_pool *pool = start.pool;
    uint32_t pauses = 0;
    uint64_t since = __rdtsc();
    while (!atomic_load_explicit(&pool->stop, memory_order_acquire)) {
        const unsigned epoch = atomic_load(&pool->epoch);
        if (work_once(pool, start.worker)) {
            offer_core(&since);
            pauses = 0;
            continue;
        }
        pauses++;
        _mm_pause();
        if (atomic_load_explicit(&pool->busy, memory_order_relaxed)) {
            if (pauses > PAUSES_BEFORE_YIELD)
                sched_yield();
        } else if (pauses > PAUSES_BEFORE_SLEEP) {
            atomic_fetch_add(&pool->sleepers, 1);
            sleep_on(&pool->epoch, epoch);
            atomic_fetch_sub(&pool->sleepers, 1);
            pauses = 0;
        }
    }
    return NULL;
}

static void start_helpers(facet_pool *pool)
{
    if (pool->owner == getpid())
        return;
    pool->owner = getpid();
    pool->num_helpers = 0;
    atomic_store(&pool->sleepers, 0);
    sigset_t all, before;
    sigfillset(&all); /* signals are for the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int32_t i = 1; i < pool->num_threads; i++) {
        helper_start *start = malloc(sizeof *start);
        if (!start)
            break;
        *start = (helper_start){pool, (uint32_t)i};
        if (pthread_create(&pool->helpers[pool->num_helpers], NULL, help, start)) {
            free(start); /* fewer helpers compute the same */
            break;
        }
        pool->num_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

facet_pool *facet_pool_new(int32_t num_threads)
{
    facet_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool)
        return NULL;
    *pool = (facet_pool){.num_threads = num_threads < 1 ? 1 : num_threads > MAX_WORKERS ? MAX_WORKERS : num_threads};
    return pool;
}

void facet_pool_free(facet_pool *pool)
{
    if (!pool)
        return;
    if (pool->owner == getpid()) {
        atomic_store(&pool->stop, 1);
        atomic_fetch_add(&pool->epoch, 1);
        wake_all(&pool->epoch);
        for (int32_t i = 0; i < pool->num_helpers; i++)
            pthread_join(pool->helpers[i], NULL);
    }
    free(pool);
}

int32_t pool_size(const facet_pool *pool)
{
    return pool->num_threads;
}

void pool_run(facet_pool *pool, void *job, count_chunks count, run_chunk run)
{
    start_helpers(pool);
    pool->job = job;
    pool->count = count;
    pool->run = run;
    atomic_store(&pool->busy, 1);
    start_phase(pool, 0);
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleepers))
        wake_all(&pool->epoch);
    uint32_t pauses = 0;
    uint64_t since = __rdtsc();
    for (;;) {
        if (work_once(pool, 0)) {
            offer_core(&since);
            pauses = 0;
            continue;
        }
        uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
        if (word_field(word, CHUNK_BITS) == 0)
            return;
        _mm_pause();
        if (++pauses > PAUSES_BEFORE_YIELD)
            sched_yield();
    }
}
