/* One pool of threads for the process. */
#ifndef ANYDECODE_THREADS_H
#define ANYDECODE_THREADS_H

#include <stdint.h>

/* Stages follow one another; the parts of a stage are run once each, by whoever is free. */
typedef struct {
  void (*run)(void *argument, int stage, int part, int thread);
  /* A thread has found nothing more to do in a stage; may be NULL. */
  void (*idle)(void *argument, int stage, int thread);
  void *argument;
  const int32_t *parts; /* of each stage */
  int num_stages;
} Job;

/* The parts that thread `thread` of `threads` starts with: [first, last). */
static inline int first_part(int parts, int thread, int threads) {
  return (int)(((int64_t)parts * thread + threads - 1) / threads);
}

/* Run a job on up to `threads` threads, the caller being thread 0, and return when it is done.
 * Calls from several threads queue. After a fork the child makes its own pool. */
void pool_run(const Job *job, int threads);

#endif
