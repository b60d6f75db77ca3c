/* Entries that stand for several positions (DeepSeek-V4). */
#ifndef ANYDECODE_POOLING_H
#define ANYDECODE_POOLING_H

#include "maths.h"
#include "shift.h"

/* The entry of the last `entry` positions up to that of a row; zeros if these are not those of an
 * entry. From op->count on a slot stores `groups` values of width_out numbers, and as many gates. The
 * entry is the sum of the last value of these positions and, with two groups, the first value of as
 * many positions before, weighted by the softmax of each number's gates plus the biases op->weight
 * [entry, groups, width_out]. */
static void pool_row(const Pass *pass, const Op *op, int row, float *out) {
  int size = op->entry, groups = op->groups, width = op->width_out, count = groups * size;
  int32_t slots[MAX_POOL];
  memset(out, 0, (size_t)width * 4);
  if ((pass->positions[row] + 1) % size) return;
  last_slots(pass, row, count, slots);
  for (int i = 0; i < width; i += 8) {
    int left = width - i;
    f8 gates[MAX_POOL], max = f8_set(-INFINITY), sum = f8_set(0.0f), total = f8_set(0.0f);
    for (int j = 0; j < count; j++) {
      if (slots[j] < 0) continue;
      int64_t at = (int64_t)(j / size) * width + i;
      const float *gate = stored_numbers(pass, op, slots[j]) + groups * width + at;
      const float *bias = op->weight + (int64_t)(j % size) * groups * width + at;
      gates[j] = f8_add(f8_load_part(gate, left), f8_load_part(bias, left));
      max = f8_max(max, gates[j]);
    }
    for (int j = 0; j < count; j++) {
      if (slots[j] < 0) continue;
      const float *value = stored_numbers(pass, op, slots[j]) + (int64_t)(j / size) * width + i;
      f8 weight = f8_exp(f8_sub(gates[j], max));
      total = f8_add(total, weight);
      sum = f8_fma(weight, f8_load_part(value, left), sum);
    }
    f8_store_part(out + i, f8_div(sum, total), left);
  }
}

#endif
