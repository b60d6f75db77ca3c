/* The pool. Every thread has a share of each stage, and helps others when it is through with its
 * own, so that a thread that loses its core delays one part and no more. Waiting threads spin for a
 * moment and then sleep: whoever they wait for may need their core. */
#define _GNU_SOURCE
#include "threads.h"

#include <stdatomic.h>
#include <string.h>

#ifdef _WIN32
#include <windows.h>
typedef SRWLOCK Lock;
typedef CONDITION_VARIABLE Signal;
#define LOCK_INITIALIZER SRWLOCK_INIT
#define SIGNAL_INITIALIZER CONDITION_VARIABLE_INIT
static void lock(Lock *l) { AcquireSRWLockExclusive(l); }
static void unlock(Lock *l) { ReleaseSRWLockExclusive(l); }
static void wait_for(Signal *s, Lock *l) { SleepConditionVariableSRW(s, l, INFINITE, 0); }
static void wake_all(Signal *s) { WakeAllConditionVariable(s); }
#else
#include <pthread.h>
#include <sched.h>
typedef pthread_mutex_t Lock;
typedef pthread_cond_t Signal;
#define LOCK_INITIALIZER PTHREAD_MUTEX_INITIALIZER
#define SIGNAL_INITIALIZER PTHREAD_COND_INITIALIZER
static void lock(Lock *l) { pthread_mutex_lock(l); }
static void unlock(Lock *l) { pthread_mutex_unlock(l); }
static void wait_for(Signal *s, Lock *l) { pthread_cond_wait(s, l); }
static void wake_all(Signal *s) { pthread_cond_broadcast(s); }
#endif

enum { MAX_THREADS = 256, SPINS_INSIDE = 200, SPINS_FOR_STAGE = 2000, SPINS_FOR_JOB = 20000 };

/* Threads that sleep until something changes. */
typedef struct {
  Signal signal;
  atomic_int count;
} Sleepers;

static struct {
  /* The job's number, and its threads in the lower 16 bits; no threads: it is closed. */
  _Alignas(64) atomic_uint_least64_t ticket;
  /* Workers that may look at the job. The caller returns, and the job goes, when none is left: one
   * that waits is not among them. */
  _Alignas(64) atomic_int inside;
  _Alignas(64) atomic_uint_least64_t done; /* parts, over all stages */
  struct {
    _Alignas(64) atomic_uint_least64_t next; /* stage + 1, and in the lower half its next part */
  } shares[MAX_THREADS];
  Job job;
  Lock callers, sleeping;
  Sleepers idle, stalled;
  int started;
  uint64_t seen_at_start[MAX_THREADS];
} pool = {.callers = LOCK_INITIALIZER,
          .sleeping = LOCK_INITIALIZER,
          .idle = {.signal = SIGNAL_INITIALIZER},
          .stalled = {.signal = SIGNAL_INITIALIZER}};

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void wake(Sleepers *sleepers) {
  if (!atomic_load(&sleepers->count)) return;
  lock(&pool.sleeping);
  wake_all(&sleepers->signal);
  unlock(&pool.sleeping);
}

/* Whether `parts` parts are done, or the job of this ticket is over. */
static int has_reached(uint64_t parts, uint64_t ticket) {
  return atomic_load(&pool.done) >= parts || atomic_load(&pool.ticket) != ticket;
}

static void wait_until(uint64_t parts, uint64_t ticket) {
  for (int spins = 0; spins < SPINS_FOR_STAGE; spins++) {
    if (has_reached(parts, ticket)) return;
    pause_briefly();
  }
  lock(&pool.sleeping);
  atomic_fetch_add(&pool.stalled.count, 1);
  while (!has_reached(parts, ticket)) wait_for(&pool.stalled.signal, &pool.sleeping);
  atomic_fetch_sub(&pool.stalled.count, 1);
  unlock(&pool.sleeping);
}

static int enter(uint64_t ticket) {
  atomic_fetch_add(&pool.inside, 1);
  if (atomic_load(&pool.ticket) == ticket) return 1;
  atomic_fetch_sub(&pool.inside, 1);
  return 0;
}

static void leave(void) { atomic_fetch_sub(&pool.inside, 1); }

/* The next part of a share of `size` parts, or -1. */
static int claim(int share, int stage, int size) {
  atomic_uint_least64_t *next = &pool.shares[share].next;
  uint64_t seen = atomic_load_explicit(next, memory_order_relaxed), mine = (uint64_t)stage + 1;
  for (;;) {
    int part = seen >> 32 == mine ? (int)(uint32_t)seen : 0;
    if (seen >> 32 > mine || part >= size) return -1;
    if (atomic_compare_exchange_weak_explicit(next, &seen, mine << 32 | (uint32_t)(part + 1),
                                              memory_order_relaxed, memory_order_relaxed))
      return part;
  }
}

/* Run what is left of a stage, the thread's own share first; `target`: parts of all stages so far. */
static void run_stage(int stage, int thread, int threads, uint64_t target) {
  const Job *job = &pool.job;
  int parts = job->parts[stage], count = 0;
  for (int i = 0; i < threads; i++) {
    int share = (thread + i) % threads, part;
    int first = first_part(parts, share, threads), last = first_part(parts, share + 1, threads);
    while ((part = claim(share, stage, last - first)) >= 0) {
      job->run(job->argument, stage, first + part, thread);
      count++;
    }
  }
  if (count && atomic_fetch_add(&pool.done, (uint64_t)count) + (uint64_t)count == target)
    wake(&pool.stalled);
}

/* The stages of a job as a worker sees them: it may come late to any of them. */
static void take_part(uint64_t ticket, int thread) {
  int threads = (int)(ticket & 0xffff);
  uint64_t target = 0;
  if (!enter(ticket)) return;
  for (int stage = 0; stage < pool.job.num_stages; stage++) {
    target += (uint64_t)pool.job.parts[stage];
    if (atomic_load(&pool.done) >= target) continue;
    run_stage(stage, thread, threads, target);
    if (pool.job.idle) pool.job.idle(pool.job.argument, stage, thread);
    for (int spins = 0; spins < SPINS_INSIDE && !has_reached(target, ticket); spins++)
      pause_briefly();
    if (has_reached(target, ticket)) continue;
    leave();
    wait_until(target, ticket);
    if (!enter(ticket)) return;
  }
  leave();
}

static uint64_t next_ticket(uint64_t seen) {
  for (int spins = 0; spins < SPINS_FOR_JOB; spins++) {
    if (atomic_load(&pool.ticket) != seen) return atomic_load(&pool.ticket);
    pause_briefly();
  }
  lock(&pool.sleeping);
  atomic_fetch_add(&pool.idle.count, 1);
  while (atomic_load(&pool.ticket) == seen) wait_for(&pool.idle.signal, &pool.sleeping);
  atomic_fetch_sub(&pool.idle.count, 1);
  unlock(&pool.sleeping);
  return atomic_load(&pool.ticket);
}

static void work(int thread) {
  uint64_t ticket = pool.seen_at_start[thread];
  for (;;) {
    ticket = next_ticket(ticket);
    if (thread < (int)(ticket & 0xffff)) take_part(ticket, thread);
  }
}

#ifdef _WIN32
static DWORD WINAPI start(void *number) {
  work((int)(intptr_t)number);
  return 0;
}

static int start_worker(int thread) {
  HANDLE handle = CreateThread(NULL, 0, start, (void *)(intptr_t)thread, 0, NULL);
  return handle && CloseHandle(handle);
}

static void watch_forks(void) {}
#else
static void *start(void *number) {
  work((int)(intptr_t)number);
  return NULL;
}

static int start_worker(int thread) {
  pthread_t id;
  return pthread_create(&id, NULL, start, (void *)(intptr_t)thread) == 0 && pthread_detach(id) == 0;
}

/* In the child of a fork only the forking thread is left. */
static void forget_workers(void) {
  pool.started = 0;
  atomic_store(&pool.inside, 0);
  atomic_store(&pool.idle.count, 0);
  atomic_store(&pool.stalled.count, 0);
  pthread_mutex_init(&pool.callers, NULL);
  pthread_mutex_init(&pool.sleeping, NULL);
  pthread_cond_init(&pool.idle.signal, NULL);
  pthread_cond_init(&pool.stalled.signal, NULL);
}

static void watch_forks(void) {
  static int watched;
  if (!watched) watched = pthread_atfork(NULL, NULL, forget_workers) == 0;
}
#endif

/* As many workers as can be had; answers the number of threads to use. */
static int start_workers(int threads) {
  watch_forks();
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  while (pool.started < threads - 1) {
    pool.seen_at_start[pool.started + 1] = atomic_load(&pool.ticket);
    if (!start_worker(pool.started + 1)) break;
    pool.started++;
  }
  return threads < pool.started + 1 ? threads : pool.started + 1;
}

static void run_alone(const Job *job) {
  for (int stage = 0; stage < job->num_stages; stage++)
    for (int part = 0; part < job->parts[stage]; part++)
      job->run(job->argument, stage, part, 0);
}

void pool_run(const Job *job, int threads) {
  if (threads <= 1) {
    run_alone(job);
    return;
  }
  lock(&pool.callers);
  threads = start_workers(threads);
  pool.job = *job;
  atomic_store(&pool.done, 0);
  for (int i = 0; i < threads; i++) atomic_store(&pool.shares[i].next, 0);
  uint64_t number = (atomic_load(&pool.ticket) >> 16) + 1, ticket = number << 16, target = 0;
  ticket |= (uint64_t)threads;
  atomic_store(&pool.ticket, ticket);
  wake(&pool.idle);
  for (int stage = 0; stage < job->num_stages; stage++) {
    target += (uint64_t)job->parts[stage];
    run_stage(stage, 0, threads, target);
    if (job->idle) job->idle(job->argument, stage, 0);
    wait_until(target, ticket);
  }
  atomic_store(&pool.ticket, number << 16);
  wake(&pool.stalled);
  for (int spins = 0; atomic_load(&pool.inside);) {
    pause_briefly();
    if (++spins > SPINS_FOR_STAGE) {
#ifdef _WIN32
      SwitchToThread();
#else
      sched_yield();
#endif
    }
  }
  unlock(&pool.callers);
}
