/* The pool: workers spin for a while after a task, then sleep until the next. */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#include "layout.h"

enum { MAX_THREADS = 256, SPINS_BEFORE_YIELD = 4000, SPINS_BEFORE_SLEEP = 20000 };

typedef struct {
  _Alignas(64) atomic_int arrived;
  _Alignas(64) atomic_int round;
  int threads;
} Barrier;

static struct {
  /* number of the task in the upper bits, its threads in the lower 16: read in one piece, so
   * that a late worker never joins a task it is not counted in */
  _Alignas(64) atomic_uint_least64_t ticket;
  _Alignas(64) atomic_int running;
  pthread_mutex_t callers, sleepers;
  pthread_cond_t wake;
  atomic_int asleep;
  int started;
  uint64_t seen_at_start[MAX_THREADS];
  Task task;
  void *argument;
  Barrier barrier;
} pool = {.callers = PTHREAD_MUTEX_INITIALIZER,
          .sleepers = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void barrier_wait(void *opaque) {
  Barrier *barrier = opaque;
  if (barrier->threads == 1) return;
  int round = atomic_load_explicit(&barrier->round, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) ==
      barrier->threads - 1) {
    atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&barrier->round, round + 1, memory_order_release);
    return;
  }
  for (int spins = 0; atomic_load_explicit(&barrier->round, memory_order_acquire) == round;) {
    pause_briefly();
    if (++spins > SPINS_BEFORE_YIELD) sched_yield(); /* another process may hold the core */
  }
}

static void sleep_after(uint64_t seen) {
  pthread_mutex_lock(&pool.sleepers);
  atomic_fetch_add(&pool.asleep, 1);
  while (atomic_load(&pool.ticket) == seen) pthread_cond_wait(&pool.wake, &pool.sleepers);
  atomic_fetch_sub(&pool.asleep, 1);
  pthread_mutex_unlock(&pool.sleepers);
}

static void *work(void *number) {
  int thread = (int)(intptr_t)number;
  uint64_t seen = pool.seen_at_start[thread];
  for (;;) {
    uint64_t ticket;
    for (int spins = 0;; spins++) {
      ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
      if (ticket != seen) break;
      pause_briefly();
      if (spins > SPINS_BEFORE_SLEEP) sleep_after(seen);
    }
    seen = ticket;
    int threads = (int)(ticket & 0xffff);
    if (thread >= threads) continue;
    pool.task(pool.argument, thread, threads, &pool.barrier);
    atomic_fetch_sub_explicit(&pool.running, 1, memory_order_release);
  }
  return NULL;
}

/* In the child of a fork only the forking thread is left. */
static void forget_workers(void) {
  pool.started = 0;
  atomic_store(&pool.asleep, 0);
  atomic_store(&pool.running, 0);
  pthread_mutex_init(&pool.callers, NULL);
  pthread_mutex_init(&pool.sleepers, NULL);
  pthread_cond_init(&pool.wake, NULL);
}

/* As many workers as can be had; answers the number of threads to use. */
static int start_workers(int threads) {
  static int watched;
  if (!watched) watched = pthread_atfork(NULL, NULL, forget_workers) == 0;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  while (pool.started < threads - 1) {
    pthread_t id;
    pool.seen_at_start[pool.started + 1] = atomic_load(&pool.ticket);
    if (pthread_create(&id, NULL, work, (void *)(intptr_t)(pool.started + 1))) break;
    pthread_detach(id);
    pool.started++;
  }
  return threads < pool.started + 1 ? threads : pool.started + 1;
}

void pool_run(Task task, void *argument, int threads) {
  Barrier alone = {.threads = 1};
  if (threads <= 1) {
    task(argument, 0, 1, &alone);
    return;
  }
  pthread_mutex_lock(&pool.callers);
  threads = start_workers(threads);
  pool.barrier.threads = threads;
  pool.task = task;
  pool.argument = argument;
  atomic_store(&pool.running, threads - 1);
  uint64_t number = (atomic_load(&pool.ticket) >> 16) + 1;
  atomic_store(&pool.ticket, number << 16 | (uint64_t)threads);
  if (atomic_load(&pool.asleep)) {
    pthread_mutex_lock(&pool.sleepers);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleepers);
  }
  task(argument, 0, threads, &pool.barrier);
  for (int spins = 0; atomic_load_explicit(&pool.running, memory_order_acquire);) {
    pause_briefly();
    if (++spins > SPINS_BEFORE_YIELD) sched_yield();
  }
  pthread_mutex_unlock(&pool.callers);
}
