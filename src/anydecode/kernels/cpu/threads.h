/* One pool of threads for the process. */
#ifndef ANYDECODE_THREADS_H
#define ANYDECODE_THREADS_H

typedef void (*Task)(void *argument, int thread, int threads, void *barrier);

/* Run `task` on `threads` threads, the caller being thread 0. Calls from several threads queue.
 * After a fork the child makes its own pool. */
void pool_run(Task task, void *argument, int threads);

#endif
