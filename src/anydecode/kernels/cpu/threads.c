/* The thread pool. Every thread has a share of the parts of each stage, and takes parts of other
 * shares when its own is done, so a thread that loses its core delays one part only. Waiting
 * threads spin for a moment and then sleep, because the threads they wait for may need the core. */
#define _GNU_SOURCE
#include "threads.h"

#include <stdatomic.h>
#include <string.h>
#include <time.h>

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

/* Threads that sleep until they are woken. */
typedef struct {
  Signal signal;
  atomic_int count;
} Sleepers;

/* The workers of one team, and its job. */
typedef struct {
  /* The job's number; in the lower 16 bits its number of threads, 0 when the job is closed. */
  _Alignas(64) atomic_uint_least64_t ticket;
  /* The number of workers that may read the job; sleeping ones are not counted. The caller returns,
   * and the job becomes invalid, when it is 0. */
  _Alignas(64) atomic_int inside;
  _Alignas(64) atomic_uint_least64_t done; /* parts, over all stages */
  struct {
    _Alignas(64) atomic_uint_least64_t next; /* stage + 1, and in the lower 32 bits its next part */
  } shares[MAX_THREADS];
  Job job;
  Lock callers, sleeping;
  Sleepers idle, stalled;
  atomic_int started;
  uint64_t ticket_at_start[MAX_THREADS];
#ifndef _WIN32
  pthread_t workers[MAX_THREADS]; /* they never end */
#endif
} Team;

#define NEW_TEAM                            \
  {.callers = LOCK_INITIALIZER,             \
   .sleeping = LOCK_INITIALIZER,            \
   .idle = {.signal = SIGNAL_INITIALIZER},  \
   .stalled = {.signal = SIGNAL_INITIALIZER}}

static Team teams[NUM_TEAMS] = {NEW_TEAM, NEW_TEAM};

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void wake(Team *team, Sleepers *sleepers) {
  if (!atomic_load(&sleepers->count)) return;
  lock(&team->sleeping);
  wake_all(&sleepers->signal);
  unlock(&team->sleeping);
}

/* Whether `parts` parts are done, or the job of this ticket is closed. */
static int has_reached(Team *team, uint64_t parts, uint64_t ticket) {
  return atomic_load(&team->done) >= parts || atomic_load(&team->ticket) != ticket;
}

static void wait_until(Team *team, uint64_t parts, uint64_t ticket) {
  for (int spins = 0; spins < SPINS_FOR_STAGE; spins++) {
    if (has_reached(team, parts, ticket)) return;
    pause_briefly();
  }
  lock(&team->sleeping);
  atomic_fetch_add(&team->stalled.count, 1);
  while (!has_reached(team, parts, ticket)) wait_for(&team->stalled.signal, &team->sleeping);
  atomic_fetch_sub(&team->stalled.count, 1);
  unlock(&team->sleeping);
}

static int enter(Team *team, uint64_t ticket) {
  atomic_fetch_add(&team->inside, 1);
  if (atomic_load(&team->ticket) == ticket) return 1;
  atomic_fetch_sub(&team->inside, 1);
  return 0;
}

static void leave(Team *team) { atomic_fetch_sub(&team->inside, 1); }

/* Claim the next part of a share of `size` parts; -1 where none is left. */
static int claim(Team *team, int share, int stage, int size) {
  atomic_uint_least64_t *next = &team->shares[share].next;
  uint64_t seen = atomic_load_explicit(next, memory_order_relaxed), current = (uint64_t)stage + 1;
  for (;;) {
    int part = seen >> 32 == current ? (int)(uint32_t)seen : 0;
    if (seen >> 32 > current || part >= size) return -1;
    if (atomic_compare_exchange_weak_explicit(next, &seen, current << 32 | (uint32_t)(part + 1),
                                              memory_order_relaxed, memory_order_relaxed))
      return part;
  }
}

/* Run the remaining parts of a stage, the thread's own share first. `target`: the number of parts
 * of all stages up to this one. */
static void run_stage(Team *team, int stage, int thread, int threads, uint64_t target) {
  const Job *job = &team->job;
  int parts = job->parts[stage], count = 0;
  for (int i = 0; i < threads; i++) {
    int share = (thread + i) % threads, part;
    int first = first_part(parts, share, threads), last = first_part(parts, share + 1, threads);
    while ((part = claim(team, share, stage, last - first)) >= 0) {
      job->run(job->argument, stage, first + part, thread);
      count++;
    }
  }
  if (count && atomic_fetch_add(&team->done, (uint64_t)count) + (uint64_t)count == target)
    wake(team, &team->stalled);
}

/* Run the stages of a job as a worker, which may arrive late at any of them. */
static void work_on_job(Team *team, uint64_t ticket, int thread) {
  int threads = (int)(ticket & 0xffff);
  uint64_t target = 0;
  if (!enter(team, ticket)) return;
  for (int stage = 0; stage < team->job.num_stages; stage++) {
    target += (uint64_t)team->job.parts[stage];
    if (atomic_load(&team->done) >= target) continue;
    run_stage(team, stage, thread, threads, target);
    if (team->job.idle) team->job.idle(team->job.argument, stage, thread);
    for (int spins = 0; spins < SPINS_INSIDE && !has_reached(team, target, ticket); spins++)
      pause_briefly();
    if (has_reached(team, target, ticket)) continue;
    leave(team);
    wait_until(team, target, ticket);
    if (!enter(team, ticket)) return;
  }
  leave(team);
}

/* Wait for a ticket other than `last`, and return it. */
static uint64_t next_ticket(Team *team, uint64_t last) {
  for (int spins = 0; spins < SPINS_FOR_JOB; spins++) {
    if (atomic_load(&team->ticket) != last) return atomic_load(&team->ticket);
    pause_briefly();
  }
  lock(&team->sleeping);
  atomic_fetch_add(&team->idle.count, 1);
  while (atomic_load(&team->ticket) == last) wait_for(&team->idle.signal, &team->sleeping);
  atomic_fetch_sub(&team->idle.count, 1);
  unlock(&team->sleeping);
  return atomic_load(&team->ticket);
}

static void work(Team *team, int thread) {
  uint64_t ticket = team->ticket_at_start[thread];
  for (;;) {
    ticket = next_ticket(team, ticket);
    if (thread < (int)(ticket & 0xffff)) work_on_job(team, ticket, thread);
  }
}

/* The argument of a new thread: the numbers of its team and of the thread in it. */
static void *label_of(const Team *team, int thread) {
  return (void *)(intptr_t)((team - teams) * MAX_THREADS + thread);
}

static void work_as(void *label) {
  int number = (int)(intptr_t)label;
  work(teams + number / MAX_THREADS, number % MAX_THREADS);
}

#ifdef _WIN32
static DWORD WINAPI start(void *label) {
  work_as(label);
  return 0;
}

static int start_worker(Team *team, int thread) {
  HANDLE handle = CreateThread(NULL, 0, start, label_of(team, thread), 0, NULL);
  return handle && CloseHandle(handle);
}

static void register_fork_handler(void) {}
#else
static void *start(void *label) {
  work_as(label);
  return NULL;
}

static int start_worker(Team *team, int thread) {
  pthread_t *id = &team->workers[thread];
  return pthread_create(id, NULL, start, label_of(team, thread)) == 0 && pthread_detach(*id) == 0;
}

/* In the child of a fork only the forking thread exists. */
static void reset_after_fork(void) {
  for (Team *team = teams; team < teams + NUM_TEAMS; team++) {
    atomic_store(&team->started, 0);
    atomic_store(&team->inside, 0);
    atomic_store(&team->idle.count, 0);
    atomic_store(&team->stalled.count, 0);
    pthread_mutex_init(&team->callers, NULL);
    pthread_mutex_init(&team->sleeping, NULL);
    pthread_cond_init(&team->idle.signal, NULL);
    pthread_cond_init(&team->stalled.signal, NULL);
  }
}

static void register_for_forks(void) { pthread_atfork(NULL, NULL, reset_after_fork); }

static void register_fork_handler(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, register_for_forks);
}
#endif

/* Start up to `threads` - 1 workers. Returns the number of threads to use. */
static int start_workers(Team *team, int threads) {
  register_fork_handler();
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  while (team->started < threads - 1) {
    team->ticket_at_start[team->started + 1] = atomic_load(&team->ticket);
    if (!start_worker(team, team->started + 1)) break;
    team->started++;
  }
  return threads < team->started + 1 ? threads : team->started + 1;
}

static void run_alone(const Job *job) {
  for (int stage = 0; stage < job->num_stages; stage++)
    for (int part = 0; part < job->parts[stage]; part++)
      job->run(job->argument, stage, part, 0);
}

void pool_run(const Job *job, int threads, int number) {
  Team *team = teams + number;
  if (threads <= 1) {
    run_alone(job);
    return;
  }
  lock(&team->callers);
  threads = start_workers(team, threads);
  team->job = *job;
  atomic_store(&team->done, 0);
  for (int i = 0; i < threads; i++) atomic_store(&team->shares[i].next, 0);
  uint64_t closed = ((atomic_load(&team->ticket) >> 16) + 1) << 16, target = 0;
  uint64_t ticket = closed | (uint64_t)threads;
  atomic_store(&team->ticket, ticket);
  wake(team, &team->idle);
  for (int stage = 0; stage < job->num_stages; stage++) {
    target += (uint64_t)job->parts[stage];
    run_stage(team, stage, 0, threads, target);
    if (job->idle) job->idle(job->argument, stage, 0);
    wait_until(team, target, ticket);
  }
  atomic_store(&team->ticket, closed);
  wake(team, &team->stalled);
  for (int spins = 0; atomic_load(&team->inside);) {
    pause_briefly();
    if (++spins > SPINS_FOR_STAGE) {
#ifdef _WIN32
      SwitchToThread();
#else
      sched_yield();
#endif
    }
  }
  unlock(&team->callers);
}

#ifdef __linux__
/* The processor time of a thread in seconds; 0 where the system does not tell it. */
static double thread_seconds(pthread_t thread) {
  clockid_t clock;
  struct timespec time;
  if (pthread_getcpuclockid(thread, &clock) || clock_gettime(clock, &time)) return 0;
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double pool_processor_seconds(void) {
  double seconds = 0;
  for (Team *team = teams; team < teams + NUM_TEAMS; team++)
    for (int i = 1; i <= atomic_load(&team->started); i++) seconds += thread_seconds(team->workers[i]);
  return seconds + thread_seconds(pthread_self());
}
#else
double pool_processor_seconds(void) { return -1; }
#endif
