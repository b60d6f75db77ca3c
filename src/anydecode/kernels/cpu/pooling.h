/* Entries that stand for several positions (DeepSeek-V4). */
#ifndef ANYDECODE_POOLING_H
#define ANYDECODE_POOLING_H

#include "maths.h"
#include "shift.h"

/* The mean of the numbers from op->count on that `entry` slots store. */
static void pool_mean(const Pass *pass, const Op *op, const int32_t *slots, float *out) {
  int size = op->entry, width = op->width_out;
  for (int i = 0; i < width; i += 8) {
    f8 sum = f8_set(0.0f);
    for (int j = 0; j < size; j++)
      if (slots[j] >= 0)
        sum = f8_add(sum, f8_load_part(stored_numbers(pass, op, slots[j]) + i, width - i));
    f8_store_part(out + i, f8_div(sum, f8_set((float)size)), width - i);
  }
}

/* The entry of the last `entry` positions up to that of a row; zeros if these are not those of an
 * entry. From op->count on a slot stores `groups` values of width_out numbers, and as many gates. The
 * entry is the sum of the last value of these positions and, with two groups, the first value of as
 * many positions before, weighted by the softmax of each number's gates plus the biases op->weight
 * [entry, groups, width_out]. Without biases a slot stores values alone, and the entry is their mean. */
static void pool_row(const Pass *pass, const Op *op, int row, float *out) {
  int size = op->entry, groups = op->groups, width = op->width_out, count = groups * size;
  int32_t slots[MAX_POOL];
  memset(out, 0, (size_t)width * 4);
  if ((pass->positions[row] + 1) % size) return;
  last_slots(pass, row, count, slots);
  if (!op->weight) {
    pool_mean(pass, op, slots, out);
    return;
  }
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
