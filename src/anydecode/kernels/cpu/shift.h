/* What rows read of the inputs that recurrent layers store in slots. */
#ifndef ANYDECODE_SHIFT_H
#define ANYDECODE_SHIFT_H

#include "layout.h"
#include "simd.h"

/* The slots of the last `count` positions up to that of a row; -1 before the first position. */
static void last_slots(const Pass *pass, int row, int count, int32_t *slots) {
  int prefix = pass->prefix[row], length = pass->positions[row] + 1;
  const int32_t *table = pass->tables[pass->table[row]];
  const int32_t *tail = pass->tails + pass->tail_start[row];
  for (int j = 0; j < count; j++) {
    int position = length - count + j;
    slots[j] = position < 0 ? -1 : position < prefix ? table[position] : tail[position - prefix];
  }
}

/* The numbers from op->count on that a slot stores. */
INLINE const float *stored_numbers(const Pass *pass, const Op *op, int32_t slot) {
  int64_t stride = op->recurrence->width + op->recurrence->num_gates;
  return pass->recurrent_inputs[op->layer] + slot * stride + op->count;
}

/* x + (y - x) * op->weight, where y is what the slot of the position before stores. */
static void shift_row(const Pass *pass, const Op *op, int row, const float *x, float *out) {
  int32_t slots[2];
  last_slots(pass, row, 2, slots);
  const float *before = slots[0] < 0 ? NULL : stored_numbers(pass, op, slots[0]);
  for (int i = 0; i < op->width; i += 8) {
    int left = op->width - i;
    f8 own = f8_load_part(x + i, left);
    f8 y = before ? f8_load_part(before + i, left) : f8_set(0.0f);
    f8 mixed = f8_fma(f8_sub(y, own), f8_load_part(op->weight + i, left), own);
    f8_store_part(out + i, mixed, left);
  }
}

static void stored_row(const Pass *pass, const Op *op, int row, float *out) {
  memcpy(out, stored_numbers(pass, op, pass->slots[row]), (size_t)op->width * 4);
}

#endif
