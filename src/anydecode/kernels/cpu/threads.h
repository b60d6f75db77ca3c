/* The threads of a process, in teams. The jobs of two teams run at the same time. */
#ifndef ANYDECODE_THREADS_H
#define ANYDECODE_THREADS_H

#include <stdint.h>

/* Stages run in sequence. Each part of a stage runs once, on any thread that is free. */
typedef struct {
  void (*run)(void *argument, int stage, int part, int thread);
  /* Called when a thread finds no unclaimed part in a stage; may be NULL. */
  void (*idle)(void *argument, int stage, int thread);
  void *argument;
  const int32_t *parts; /* of each stage */
  int num_stages;
} Job;

/* The first part of the share of thread `thread`; the share ends where the next one begins. */
static inline int first_part(int parts, int thread, int threads) {
  return (int)(((int64_t)parts * thread + threads - 1) / threads);
}

enum { NUM_TEAMS = 2 };

/* Run a job on up to `threads` threads, of which the caller is thread 0 and the others are of team
 * `number`, and return when it is done. Concurrent calls for one team run one after another. After a
 * fork the child starts threads of its own. */
void pool_run(const Job *job, int threads, int number);

/* The processor time that the caller and the threads of all teams have used, in seconds; negative
 * where the system does not tell it by thread. Linux's clock of a process counts what its other
 * running threads have used up to the last tick of the timer only, which may be longer ago than a
 * pass takes. */
double pool_processor_seconds(void);

#endif
