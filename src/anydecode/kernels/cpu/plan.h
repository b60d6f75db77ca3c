/* How a pass is divided into stages and parts. Results do not depend on it. */
#ifndef ANYDECODE_PLAN_H
#define ANYDECODE_PLAN_H

#include "layout.h"

INLINE int by_row(int code) { return code != OP_LINEAR && code != OP_ATTEND && code != OP_EXPERTS; }

INLINE int column_pairs(const Matrix *w) { return (w->out_features + 2 * LANES - 1) / (2 * LANES); }

/* Pairs of column groups in one part of a product: enough work to be worth a claim. Many rows are
 * taken through more columns at once, so that the rows are not read too often. */
INLINE int pairs_per_part(const Matrix *w, int rows, int threads) {
  int64_t each = 12000 / (2 * w->group_bytes), pairs = column_pairs(w);
  int64_t most = rows > 16 ? 4 : 64;
  if (each < pairs / (most * threads)) each = pairs / (most * threads);
  return each < 1 ? 1 : (int)each;
}

INLINE int linear_parts(const Matrix *w, int rows, int threads) {
  int each = pairs_per_part(w, rows, threads);
  return (column_pairs(w) + each - 1) / each;
}

/* Stretches of a row of logits in which tokens are picked side by side: much the ones that each
 * thread has just written. */
INLINE int search_parts(int vocab_size, int threads) {
  int most = vocab_size / 2048;
  if (threads == 1 || most < 2) return 1;
  return most < 2 * threads ? most : 2 * threads;
}

/* Segments that the rows of a tile see: [first, last). */
INLINE void tile_segments(const Plan *plan, const Op *op, int tile, int *first, int *last) {
  int32_t end = 0, begin = INT32_MAX;
  for (int r = plan->tile_start[tile]; r < plan->tile_start[tile + 1]; r++) {
    int32_t to = plan->pass->prefix[r] + plan->pass->tail_length[r];
    int32_t from = op->window ? plan->pass->positions[r] - op->window + 1 : 0;
    end = to > end ? to : end;
    begin = from < begin ? from : begin;
  }
  *first = begin > 0 ? begin / SEGMENT : 0;
  *last = (end + SEGMENT - 1) / SEGMENT;
  if (*last < *first) *last = *first;
}

/* Whether segments are parts of their own: where there are too few tiles for the threads. */
INLINE int is_divided(const Plan *plan, const Op *op) {
  return plan->threads > 1 && plan->num_tiles * op->kv_heads < 2 * plan->threads;
}

/* Stages of the pass for up to `threads` threads; 0 where memory is short. Valid until the calling
 * thread's next call. */
int make_plan(const Pass *pass, int threads, Plan *plan);

#endif
