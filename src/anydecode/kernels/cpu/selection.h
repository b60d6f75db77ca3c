/* Attention to selected positions (DeepSeek-V3.2, arXiv:2512.02556). An indexer scores every position
 * that a row sees: the sum over its heads of weight * max(query @ key, 0). A row attends to the top_k
 * positions with the largest scores, of equal ones to the lower, in order of position; and to all
 * positions, without scores, where it sees no more than top_k. Without weights each head of the
 * indexer selects for its part of the key heads, by query @ key (MiniMax-M3). Positions may be
 * selected in blocks, by the largest score of each, of which a row's last ones always are; or by a key
 * of the whole block (GLM-5.3), which is that of its last position. A row attends to the positions
 * behind its last whole block then, too.
 *
 * With entries (DeepSeek-V4) a row attends to these, or to those that are selected, and then to the
 * positions of its window. An entry is the second key head of the slot of its last position: that of
 * slot s is found in a table as slot num_slots + s of the first head. */
#ifndef ANYDECODE_SELECTION_H
#define ANYDECODE_SELECTION_H

#include "attention.h"

/* An integer of the order of a score; 0 is below all. Zeros are equal. */
INLINE uint32_t order_of(float score) {
  uint32_t bits;
  score += 0.0f;
  memcpy(&bits, &score, 4);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return bits ? bits : 1;
}

#define ADD_INDEX_SCORES(count)                                                            \
  for (; at + count <= heads; at += count) {                                               \
    eight_scores(F32, count, q + (int64_t)at * size, key, size, low, high);                \
    for (int i = 0; i < count; i++) {                                                      \
      f8 product = f8_max(f8_join(low[i], high[i]), f8_set(0.0f));                         \
      sum = f8_fma(f8_set(weights[at + i]), product, sum);                                 \
    }                                                                                      \
  }

/* The scores of eight keys; without weights those of a single head. */
static void eight_index_scores(int heads, int size, const float *q, const float *weights,
                               const char *const *key, float *scores) {
  f8 low[MAX_HEADS], high[MAX_HEADS], sum = f8_set(0.0f);
  int at = 0;
  if (!weights) {
    eight_scores(F32, 1, q, key, size, low, high);
    f8_store(scores, f8_join(low[0], high[0]));
    return;
  }
  FOR_EACH_TILE(ADD_INDEX_SCORES)
  f8_store(scores, sum);
}

/* The slot of a position that a row sees; -1: none. */
INLINE int32_t slot_at(const Pass *pass, const Op *op, int row, int32_t position) {
  int32_t prefix = pass->prefix[row];
  if (position < prefix) return table_of(pass, op, row)[position];
  return pass->tails[pass->tail_start[row] + position - prefix];
}

/* The last position of what has a key of the indexer: an entry, a block or a single position. */
INLINE int32_t last_position(const Op *op, int32_t number) {
  return (number + 1) * key_positions(op) - 1;
}

/* The scores of the candidates [first, last) of a row, as integers; 0 where there is no slot. They are processed in blocks that start at `first`; a score does not depend on the others. */
static void score_positions(const Pass *pass, const Op *op, int row, const float *q,
                            const float *weights, int first, int last, uint32_t *orders,
                            float *base) {
  int size = op->index_dim;
  int64_t bytes;
  const char *keys = index_keys(pass, op, &bytes);
  Heads h = {0, size, size, size, op->heads, bytes, op, keys, keys, NULL, pass->cache_format};
  Scratch scratch = make_scratch(base, size, 1);
  scratch.format = F32;
  for (int start = first; start < last; start += KEY_BLOCK) {
    int count = last - start < KEY_BLOCK ? last - start : KEY_BLOCK;
    int32_t slots[KEY_BLOCK];
    for (int j = 0; j < count; j++) slots[j] = slot_at(pass, op, row, last_position(op, start + j));
    uint32_t present = gather(&h, slots, count, &scratch, 0);
    for (int j = 0; j < count; j += 8) {
      float scores[8];
      eight_index_scores(op->heads, size, q, weights, scratch.key + j, scores);
      for (int i = j; i < j + 8 && i < count; i++)
        orders[start + i] = present >> i & 1 ? order_of(scores[i - j]) : 0;
    }
  }
}

/* The positions of the `count` largest of n integers, in order of position; of equal ones the first.
 * Each step finds eight more bits of the smallest of them. */
static void choose_positions(const uint32_t *orders, int64_t n, int count, int32_t *positions) {
  uint32_t limit = 0, known = 0; /* the smallest so far, and the bits of it that are known */
  int left = count;              /* how many of them have the known bits */
  for (int shift = 24; shift >= 0; shift -= 8) {
    int32_t counts[256] = {0};
    for (int64_t i = 0; i < n; i++)
      if ((orders[i] & known) == limit) counts[orders[i] >> shift & 255]++;
    int value = 255;
    for (; counts[value] < left; value--) left -= counts[value];
    limit |= (uint32_t)value << shift;
    known |= 255u << shift;
  }
  for (int64_t i = 0; i < n; i++) {
    if (orders[i] < limit || (orders[i] == limit && left-- <= 0)) continue;
    *positions++ = (int32_t)i;
  }
}

/* The selected positions or entries of a row, in order, from the scores of all. Those behind the
 * last one are -1. Overwrites the scores of blocks. */
static void select_positions(const Pass *pass, const Op *op, int row, uint32_t *orders,
                             int32_t *positions) {
  int all = num_candidates(pass, op, row), size = op->block;
  if (size == 1) {
    choose_positions(orders, all, op->top_k, positions);
    return;
  }
  int blocks = op->has_block_keys ? all : (all + size - 1) / size, count = op->top_k / size;
  all = op->has_block_keys ? all * size : all;
  for (int i = 0; i < blocks && !op->has_block_keys; i++) {
    uint32_t largest = 0;
    for (int j = i * size; j < all && j < (i + 1) * size; j++)
      largest = orders[j] > largest ? orders[j] : largest;
    orders[i] = largest;
  }
  for (int i = 0, own = pass->positions[row] / size; i < op->num_local; i++)
    if (own - i >= 0 && own - i < blocks) orders[own - i] = UINT32_MAX;
  choose_positions(orders, blocks, count, positions);
  for (int i = count - 1; i >= 0; i--) {
    int first = positions[i] * size;
    for (int j = 0; j < size; j++)
      positions[i * size + j] = first + j < all ? first + j : -1;
  }
}

/* Where the selected positions of row `row` are kept. */
INLINE int32_t *selected_of(const Pass *pass, const Selection *selection, int row) {
  int64_t at = pass->selected_rows ? pass->selected_rows[row] : row;
  return pass->selected + at * selection->groups * selection->top_k;
}

/* Part `part` of OP_INDEX: the scores of some positions of a row, or of all of them, which selects
 * them too. */
static void index_positions(const Plan *plan, const Op *op, const float *q, const float *weights,
                            int part, int thread) {
  const Pass *pass = plan->pass;
  const Selection *selection = selection_of(plan, op);
  int groups = op->groups, number = part, group = 0, row;
  if (!selection->is_by_row)
    for (number = 0;; number++) {
      int parts = position_parts(pass, op, selection->rows[number]);
      if (part < groups * parts) {
        group = part / parts;
        part %= parts;
        break;
      }
      part -= groups * parts;
    }
  row = selection->rows[number];
  int count = num_candidates(pass, op, row);
  int64_t size = op->heads / groups * op->index_dim;
  float *scratch = pass->attention_scratch + thread * pass->attention_scratch_floats;
  q += (int64_t)row * op->heads * op->index_dim;
  if (op->weight) weights = op->weight;
  else if (weights) weights += (int64_t)row * op->heads;
  if (!selection->is_by_row) {
    uint32_t *orders = selection->orders + ((int64_t)number * groups + group) * selection->longest;
    int first = part * INDEX_POSITIONS;
    int last = first + INDEX_POSITIONS < count ? first + INDEX_POSITIONS : count;
    score_positions(pass, op, row, q + group * size, weights, first, last, orders, scratch);
    return;
  }
  uint32_t *orders = selection->orders + thread * selection->longest;
  int32_t *positions = selected_of(pass, selection, row);
  for (; group < groups; group++) {
    score_positions(pass, op, row, q + group * size, weights, 0, count, orders, scratch);
    select_positions(pass, op, row, orders, positions + (int64_t)group * op->top_k);
  }
}

/* Find the slots that a row attends to, if these are others than those that it sees. `count`: whether
 * OP_INDEX has scored positions for this layer; else they are those that an earlier one selected. */
static void select_row(const Plan *plan, const Op *op, int row) {
  const Selection *selection = selection_of(plan, op);
  if (!selection || selection->number[row] < 0) return;
  const Pass *pass = plan->pass;
  int64_t scored = selection->scored[row];
  int32_t *positions = scored < 0 ? NULL : selected_of(pass, selection, row);
  if (positions && op->count && !selection->is_by_row)
    for (int i = 0; i < op->groups; i++)
      select_positions(pass, op, row,
                       selection->orders + (scored * op->groups + i) * selection->longest,
                       positions + (int64_t)i * op->top_k);
  int32_t *slots = selection->slots + selection->number[row] * op->groups * selection->stride;
  int32_t count = positions ? op->groups * op->top_k : num_candidates(pass, op, row);
  for (int32_t i = 0; i < count; i++) {
    int32_t number = positions ? positions[i] : i;
    int32_t at = op->entry ? last_position(op, number) : number;
    int32_t slot = number < 0 ? -1 : slot_at(pass, op, row, at);
    *slots++ = slot >= 0 && op->entry ? slot + pass->num_slots : slot;
  }
  int32_t begin = row_begin(pass, op, row), end = seen_positions(pass, row);
  if (!op->entry) begin = end - num_behind(pass, op, row);
  for (int32_t at = begin > 0 ? begin : 0; at < end; at++) *slots++ = slot_at(pass, op, row, at);
}

#endif
