/* How a pass is divided into stages and parts. Results do not depend on it. */
#ifndef ANYDECODE_PLAN_H
#define ANYDECODE_PLAN_H

#include "layout.h"

/* Whether an op works row by row. */
INLINE int is_row_op(int code) {
  return code != OP_LINEAR && code != OP_ATTEND && code != OP_EXPERTS && code != OP_SCAN &&
         code != OP_GROUPED_LINEAR && code != OP_INDEX;
}

/* Groups of columns in one part of a product: enough work that claiming it takes
 * little beside it. With many rows a part has more columns, so that the rows are read fewer
 * times. */
INLINE int groups_per_part(const Matrix *w, int rows, int threads) {
  int64_t each = 12000 / w->group_bytes, groups = column_groups(w);
  int64_t max_parts = rows > 16 ? 4 : 64; /* per thread */
  if (each < groups / (max_parts * threads)) each = groups / (max_parts * threads);
  return each < 1 ? 1 : (int)each;
}

INLINE int linear_parts(const Matrix *w, int rows, int threads) {
  int each = groups_per_part(w, rows, threads);
  return (column_groups(w) + each - 1) / each;
}

/* Parts of a grouped product: those of each matrix. */
INLINE int grouped_parts(const Op *op, int rows, int threads) {
  return op->count * linear_parts(op->experts[0], rows, threads);
}

/* The number of tokens among which a row is sampled. */
INLINE int sampled_tokens(const Pass *pass) {
  return pass->head_tokens ? pass->vocab_size : pass->head_size;
}

/* Parts of a row of logits that are sampled in parallel: about the ranges that the threads have
 * just written. */
INLINE int sample_parts(int head_size, int threads) {
  int max_parts = head_size / 2048;
  if (threads == 1 || max_parts < 2) return 1;
  return max_parts < 2 * threads ? max_parts : 2 * threads;
}

/* One past the last position that row r attends to; op->count: whether a window is two-sided. */
INLINE int32_t row_end(const Pass *pass, const Op *op, int r) {
  int32_t end = pass->prefix[r] + pass->tail_length[r];
  int64_t limit = (int64_t)pass->positions[r] + op->window;
  return op->count && op->window && limit < end ? (int32_t)limit : end;
}

/* The first position that row r attends to, or a lower number. */
INLINE int32_t row_begin(const Pass *pass, const Op *op, int r) {
  int32_t position = pass->positions[r];
  if (op->chunk) return position - position % op->chunk;
  return op->window ? position - op->window + 1 : 0;
}

/* The selection of an op; NULL: no row has a table of its own. */
INLINE const Selection *selection_of(const Plan *plan, const Op *op) {
  return op->selection ? plan->selections[op->selection - 1] : NULL;
}

/* The plan of an op of attention. */
INLINE const Plan *attention_plan(const Plan *plan, const Op *op) {
  const Selection *selection = selection_of(plan, op);
  return selection ? &selection->plan : plan;
}

enum { INDEX_POSITIONS = 512 }; /* whose scores one part of OP_INDEX computes */

/* Positions that row r sees, those without a slot included. */
INLINE int32_t seen_positions(const Pass *pass, int r) {
  return pass->prefix[r] + pass->tail_length[r];
}

/* The positions that one key of an indexer stands for. */
INLINE int32_t key_positions(const Op *op) {
  return op->entry ? op->entry : op->has_block_keys ? op->block : 1;
}

/* The positions, the entries, or the whole blocks with a key, that row r may attend to. */
INLINE int32_t num_candidates(const Pass *pass, const Op *op, int r) {
  return seen_positions(pass, r) / key_positions(op);
}

/* How many of these are selected. */
INLINE int32_t num_chosen(const Op *op) {
  return op->has_block_keys ? op->top_k / op->block : op->top_k;
}

/* Whether row r may attend to more than are selected. */
INLINE int is_scored_row(const Pass *pass, const Op *op, int r) {
  return op->top_k && num_candidates(pass, op, r) > num_chosen(op);
}

/* The positions of row r behind its last whole block with a key, which it always attends to. */
INLINE int32_t num_behind(const Pass *pass, const Op *op, int r) {
  return op->has_block_keys ? seen_positions(pass, r) % op->block : 0;
}

/* Parts of the scores of row r for one selection, if these are divided by positions. */
INLINE int position_parts(const Pass *pass, const Op *op, int r) {
  return (num_candidates(pass, op, r) - 1) / INDEX_POSITIONS + 1;
}

/* Parts of OP_INDEX. */
INLINE int index_parts(const Plan *plan, const Op *op) {
  const Selection *selection = selection_of(plan, op);
  if (!selection || selection->is_by_row) return selection ? selection->num_rows : 0;
  int parts = 0;
  for (int i = 0; i < selection->num_rows; i++)
    parts += position_parts(plan->pass, op, selection->rows[i]) * selection->groups;
  return parts;
}

/* The range [first, last) of segments that the rows of a tile attend to. */
INLINE void tile_segments(const Plan *plan, const Op *op, int tile, int *first, int *last) {
  int32_t end = 0, begin = INT32_MAX;
  for (int r = plan->tile_start[tile]; r < plan->tile_start[tile + 1]; r++) {
    int32_t to = row_end(plan->pass, op, r);
    int32_t from = row_begin(plan->pass, op, r);
    end = to > end ? to : end;
    begin = from < begin ? from : begin;
  }
  *first = begin > 0 ? begin / SEGMENT : 0;
  *last = (end + SEGMENT - 1) / SEGMENT;
  if (*last < *first) *last = *first;
}

/* Whether each segment is a separate part: where there are too few tiles for the threads. */
INLINE int is_split(const Plan *plan, const Op *op) {
  return plan->threads > 1 && plan->num_tiles * op->kv_heads < 2 * plan->threads;
}

/* Parts of OP_ATTEND. */
INLINE int attention_parts(const Plan *plan, const Op *op) {
  plan = attention_plan(plan, op);
  if (!is_split(plan, op)) return plan->num_tiles * op->kv_heads;
  int parts = 0;
  for (int tile = 0; tile < plan->num_tiles; tile++) {
    int first, last;
    tile_segments(plan, op, tile, &first, &last);
    parts += (last - first) * op->kv_heads;
  }
  return parts;
}

/* Query heads of one part's state in split attention. */
INLINE int state_heads(const Plan *plan, const Op *op) {
  return plan->tile_rows * (op->heads / op->kv_heads);
}

/* Divide the pass into stages for up to `threads` threads. Returns 0 where memory is short. The
 * plan is valid until the calling thread's next call. */
int make_plan(const Pass *pass, int threads, Plan *plan);

/* The first of the ascending head tokens that is at least `token`. */
INLINE int32_t head_column(const Pass *pass, int64_t token) {
  int32_t low = 0, high = pass->head_size;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (pass->head_tokens[middle] < token) low = middle + 1;
    else high = middle;
  }
  return low;
}

#endif
