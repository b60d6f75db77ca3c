/* Rows of a table that stand for n-grams (interface.py: NgramHash). */
#ifndef ANYDECODE_NGRAMS_H
#define ANYDECODE_NGRAMS_H

#include "repack.h"
#include "shift.h"

/* The rows of the heads of a row, side by side. op->window: the largest order; op->groups: heads;
 * op->chunk: the end token; op->weight: int64 multipliers, sizes and offsets. Slots store tokens. */
static void ngram_rows(const Pass *pass, const Op *op, int row, float *out) {
  int order = op->window, heads = op->groups, each = heads / (order - 1), is_ended = 0;
  const int64_t *multipliers = (const int64_t *)op->weight, *sizes = multipliers + order;
  const int64_t *offsets = sizes + heads;
  int32_t slots[MAX_WINDOW];
  last_slots(pass, row, order, slots);
  int64_t number = 0;
  for (int i = 0; i < order; i++) {
    int32_t slot = slots[order - 1 - i];
    int64_t token = slot < 0 ? op->chunk : (int64_t)*stored_numbers(pass, op, slot);
    is_ended |= i > 0 && token == op->chunk;
    number ^= (is_ended ? op->chunk : token) * multipliers[i];
    for (int h = (i - 1) * each; i > 0 && h < i * each; h++, out += op->matrix->in_features)
      unpack_row(op->matrix, (int)(number % sizes[h] + offsets[h]), out);
  }
}

#endif
