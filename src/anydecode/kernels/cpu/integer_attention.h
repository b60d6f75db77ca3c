/* Attention over an int8 cache by sums of whole numbers, which are exact and so the same in any order.
 * Queries are rounded to int8 in blocks of 32 numbers, as the keys are. The weights of a segment's
 * positions, relative to the largest and multiplied by the scales of the values, are rounded to 15
 * bits. A segment has one maximum, so that its sums are never rescaled. */
#ifndef ANYDECODE_INTEGER_ATTENTION_H
#define ANYDECODE_INTEGER_ATTENTION_H

#include "attention_keys.h"
#include "quant.h"

enum { SEGMENT_BLOCKS = SEGMENT / KEY_BLOCK, MAX_WEIGHT = 32767 };

INLINE int query_blocks(const Heads *h) { return (h->padded + QUANT_BLOCK - 1) / QUANT_BLOCK; }
INLINE int value_blocks(const Heads *h) {
  return (h->value_padded + QUANT_BLOCK - 1) / QUANT_BLOCK;
}

/* The blocks with number `b` of the queries. `low` is what a sum of their products starts with. */
INLINE Activations *query_block(const Heads *h, const Scratch *scratch, int b) {
  return scratch->integers.q + (int64_t)b * ATTENTION_ROWS * h->group;
}

static void quantise_queries(const Heads *h, int heads, Scratch *scratch) {
  for (int b = 0; b < query_blocks(h); b++) {
    int left = h->padded - b * QUANT_BLOCK, size = left < QUANT_BLOCK ? left : QUANT_BLOCK;
    Activations *to = query_block(h, scratch, b);
    for (int i = 0; i < heads; i++, to++) {
      float block[QUANT_BLOCK] = {0};
      memcpy(block, scratch->q + (int64_t)i * h->padded + b * QUANT_BLOCK, (size_t)size * 4);
      quantise_row(block, QUANT_BLOCK, to);
      to->low = initial_byte_sum(to->low + to->high);
    }
  }
}

/* Scales of the blocks with number `b` of 16 vectors. */
INLINE void copy_scales(const char *const *vectors, int b, uint16_t *to) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) memcpy(to + i, vectors[i] + 34 * b, 2);
}

/* Arrange the gathered keys and values of `count` positions, those of block `block` of the segment. */
static void arrange(const Heads *h, Scratch *scratch, int block, int count) {
  const Integers *to = &scratch->integers;
  int blocks = query_blocks(h), own = value_blocks(h);
  for (int j = 0; j < count; j += 16) {
    uint8_t *keys = to->keys + (int64_t)j * blocks * QUANT_BLOCK;
    for (int b = 0; b < blocks; b++) {
      for (int half = 0; half < 2; half++) {
        const uint8_t *from[16];
        b32x2 four[4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
          from[i] = (const uint8_t *)scratch->key[j + i] + 34 * b + 2 + 16 * half;
        b32x2_load_columns(from, four);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, keys += 64) b32x2_store(keys, b32x2_flip_signs(four[i]));
      }
      copy_scales(scratch->key + j, b, to->key_scales + b * KEY_BLOCK + j);
    }
    for (int b = 0; b < own; b++)
      copy_scales(scratch->value + j, b, to->value_scales + b * SEGMENT + block * KEY_BLOCK + j);
  }
  uint8_t *values = to->values + (int64_t)block * KEY_BLOCK * own * QUANT_BLOCK;
  for (int j = 0; j < count; j += 2) {
    const uint8_t *first = (const uint8_t *)scratch->value[j] + 2;
    const uint8_t *second = (const uint8_t *)scratch->value[j + 1] + 2;
    for (int b = 0; b < own; b++, values += 2 * QUANT_BLOCK) {
      b32 pairs[2];
      b32_interleave(b32_load(first + 34 * b), b32_load(second + 34 * b), pairs);
      b32_store(values, pairs[0]);
      b32_store(values + 32, pairs[1]);
    }
  }
}

/* Scaled products of the positions [16 * part, 16 * part + 16) of a block for a few heads from `at`
 * on. */
INLINE void sixteen_scores(int heads, const Heads *h, const Scratch *scratch, int at, int block,
                           int part) {
  const Integers *from = &scratch->integers;
  int blocks = query_blocks(h), first = 16 * part;
  const uint8_t *keys = from->keys + (int64_t)first * blocks * QUANT_BLOCK;
  const uint16_t *scales = from->key_scales + first;
  float *to = from->scores + (int64_t)at * SEGMENT + block * KEY_BLOCK + first;
  f8x2 total[MAX_HEADS];
#pragma GCC unroll 12
  for (int i = 0; i < heads; i++) total[i] = f8x2_set(0.0f);
  for (int b = 0; b < blocks; b++, scales += KEY_BLOCK) {
    const Activations *q = query_block(h, scratch, b) + at;
    i8x2 sum[MAX_HEADS];
#pragma GCC unroll 12
    for (int i = 0; i < heads; i++) sum[i] = i8x2_set(q[i].low);
    for (int d = 0; d < QUANT_BLOCK; d += 4, keys += 64) {
      byte_pair key = byte_pair_weights(b32x2_load(keys));
#pragma GCC unroll 12
      for (int i = 0; i < heads; i++)
        sum[i] = add_byte_pair_dot(sum[i], key, quad_pair_load(q[i].q + d));
    }
    f8x2 scale = f8x2_load_f16(scales);
#pragma GCC unroll 12
    for (int i = 0; i < heads; i++)
      total[i] = f8x2_fma(f8x2_from_i8x2(sum[i]), f8x2_mul(scale, f8x2_set(q[i].scale)), total[i]);
  }
#pragma GCC unroll 12
  for (int i = 0; i < heads; i++)
    f8x2_store(to + i * SEGMENT, f8x2_mul(total[i], f8x2_set(h->op->x)));
}

#define SIXTEEN_SCORES(heads) \
  for (; at + heads <= last; at += heads) sixteen_scores(heads, h, scratch, at, block, part);

/* Scores of one block for the heads [first, last), which see the positions in `mask`. */
static void integer_scores(const Heads *h, const Scratch *scratch, int first, int last, int block,
                           uint32_t mask) {
  const Op *op = h->op;
  for (int part = 0; part < KEY_BLOCK / 16; part++) {
    if (!(mask >> 16 * part & 0xffff)) continue;
    int at = first;
    FOR_EACH_TILE(SIXTEEN_SCORES)
  }
  if (mask == 0xffffffffu && !(op->y > 0) && !op->slopes) return;
  for (int at = first; at < last; at++)
    for (int j = 0; j < KEY_BLOCK; j += 8) {
      float *to = scratch->integers.scores + (int64_t)at * SEGMENT + block * KEY_BLOCK + j;
      uint32_t eight = mask >> j & 255;
      if (eight) finish_eight(op, scratch, at, j, h->padded, eight, f8_load(to), to);
      else f8_store(to, f8_set(-INFINITY));
    }
}

/* Compute the factors of the weights of rows that see the positions in `masks`, one per block. */
static void find_factors(const Heads *h, const Integers *integers, const uint32_t *masks,
                         int count) {
  for (int b = 0; b < value_blocks(h); b++) {
    const uint16_t *scales = integers->value_scales + b * SEGMENT;
    float *factors = integers->factors + b * SEGMENT;
    f8 max = f8_set(0.0f);
    for (int j = 0; j < count; j += 8) {
      uint32_t eight = masks[j / KEY_BLOCK] >> j % KEY_BLOCK & 255;
      f8 visible = f8_load_f16(scales + j);
      f8_store(factors + j, visible);
      if (eight != 255) {
        for (int k = 0; k < 8; k++)
          if (!(eight >> k & 1)) factors[j + k] = 0.0f;
        visible = f8_load(factors + j);
      }
      max = f8_max(visible, max);
    }
    float largest = f8_reduce_max(max), factor = largest > 0 ? MAX_WEIGHT / largest : 0.0f;
    integers->units[b] = largest / MAX_WEIGHT;
    for (int j = 0; j < count; j += 8)
      f8_store(factors + j, f8_mul(f8_load(factors + j), f8_set(factor)));
  }
}

/* Turn the scores of head `at` into weights, and these into integers for each block of the values. */
static void integer_weights(const Heads *h, const Scratch *scratch, int at, int count,
                            int16_t *to) {
  const Integers *integers = &scratch->integers;
  const State *state = &scratch->segment;
  float *scores = integers->scores + (int64_t)at * SEGMENT;
  f8x2 most = f8x2_load(scores);
  for (int j = 16; j < count; j += 16) most = f8x2_max(f8x2_load(scores + j), most);
  float max = f8_reduce_max(f8_max(f8x2_part(most, 0), f8x2_part(most, 1)));
  f8 sum = f8_set(0.0f);
  for (int j = 0; j < count; j += 16) {
    f8x2 weights = f8x2_exp(f8x2_sub(f8x2_load(scores + j), f8x2_set(max)));
    sum = f8_add(f8_add(sum, f8x2_part(weights, 0)), f8x2_part(weights, 1));
    for (int b = 0; b < value_blocks(h); b++) {
      f8x2 factors = f8x2_load(integers->factors + b * SEGMENT + j);
      f8x2_store_s16(to + b * HEAD_TILE * SEGMENT + j, f8x2_mul(weights, factors));
    }
  }
  state->max[at] = max;
  f8_store(state->total + 8 * at, sum);
}

/* The weighted sums of the values of the pairs of positions [lo, hi), for a few heads from `at` on. */
INLINE void sum_values(int heads, const Heads *h, const Scratch *scratch, int at, int lo, int hi) {
  const Integers *from = &scratch->integers;
  int width = value_blocks(h) * QUANT_BLOCK * 2;
  float *sums = scratch->segment.sums + (int64_t)at * h->padded;
  for (int v = 0; v < 2 * value_blocks(h); v++) {
    const uint8_t *values = from->values + 32 * v;
    const int16_t *weights = from->weights + v / 2 * HEAD_TILE * SEGMENT;
    i8x2 sum[MAX_HEADS];
#pragma GCC unroll 12
    for (int i = 0; i < heads; i++) sum[i] = i8x2_set(0);
    for (int pair = lo; pair < hi; pair++) {
      b32x2 value = b32x2_load_words(values + (int64_t)pair * width);
#pragma GCC unroll 12
      for (int i = 0; i < heads; i++) {
        const int16_t *two = weights + i * SEGMENT + 2 * pair;
        sum[i] = add_word_pair_dot(sum[i], value, quad_pair_load((const int8_t *)two));
      }
    }
    f8x2 unit = f8x2_set(from->units[v / 2]);
    int d = v / 2 * QUANT_BLOCK + v % 2 * 8;
#pragma GCC unroll 12
    for (int i = 0; i < heads; i++) {
      f8x2 part = f8x2_mul(f8x2_from_i8x2(sum[i]), unit);
      float *to = sums + i * h->padded + d;
      if (d < h->value_padded) f8_store(to, f8x2_part(part, 0));
      if (d + 16 < h->value_padded) f8_store(to + 16, f8x2_part(part, 1));
    }
  }
}

#define SUM_VALUES(heads)                                                          \
  for (; at + heads <= last; at += heads) {                                        \
    for (int i = 0; i < heads; i++)                                                \
      integer_weights(h, scratch, at + i, count, integers->weights + i * SEGMENT); \
    sum_values(heads, h, scratch, at, lo / 2, hi / 2 + 1);                         \
  }

/* The state of the segment's first `count` positions for the heads [first, last), which see those in
 * `masks`. */
static void fold_integers(const Heads *h, const Scratch *scratch, int first, int last,
                          const uint32_t *masks, int count) {
  const Integers *integers = &scratch->integers;
  int lo = -1, hi = 0, at = first;
  for (int b = 0; b < count / KEY_BLOCK; b++) {
    if (!masks[b]) continue;
    if (lo < 0) lo = b * KEY_BLOCK + __builtin_ctz(masks[b]);
    hi = b * KEY_BLOCK + 31 - __builtin_clz(masks[b]);
  }
  if (lo < 0) return;
  find_factors(h, integers, masks, count);
  FOR_EACH_TILE(SUM_VALUES)
}

/* Compute the state of the positions [start, end) of a segment for the rows of a tile. The blocks whose
 * positions have the slots of the first row's table are arranged once for all rows; then, for each
 * other row, those that it has in its own table or tail. */
static void attend_integers(const Plan *plan, const Heads *h, int row, int rows, int start, int end,
                            Scratch *scratch) {
  const Pass *pass = plan->pass;
  uint32_t masks[ATTENTION_ROWS][SEGMENT_BLOCKS] = {{0}};
  int blocks = (end - start + KEY_BLOCK - 1) / KEY_BLOCK, own[ATTENTION_ROWS];
  for (int i = 0; i < rows; i++) own[i] = blocks; /* the first block that a row has of its own */
  scratch->format = Q8_0;
  for (int b = 0; b < blocks; b++) {
    int at = start + b * KEY_BLOCK, shared = 0;
    for (int i = 0; i < rows; i++) {
      int32_t prefix = pass->prefix[row + i], last = prefix + pass->tail_length[row + i];
      if (last > at + KEY_BLOCK) last = at + KEY_BLOCK;
      masks[i][b] = visible(pass, h->op, row + i, at);
      if (!masks[i][b] || own[i] < blocks) continue;
      if (last > prefix || last > plan->shared[row + i]) own[i] = b;
      else if (last > shared) shared = last;
    }
    uint32_t present = 0;
    if (shared) {
      prefetch_ahead(h, scratch, at);
      present = gather(h, h->table + at, shared - at, scratch, 0);
      arrange(h, scratch, b, shared - at);
    }
    scratch->start = (float)at;
    for (int i = 0, next; i < rows; i = next) {
      for (next = i + 1; next < rows && masks[next][b] == masks[i][b] && own[next] == own[i];)
        next++;
      if (own[i] < blocks) continue;
      for (int j = i; j < next; j++) masks[j][b] &= present;
      integer_scores(h, scratch, i * h->group, next * h->group, b, masks[i][b]);
    }
  }
  for (int i = 0, next; i < rows; i = next) {
    for (next = i + 1; next < rows && !memcmp(masks[next], masks[i], sizeof masks[i]) &&
                       own[next] == own[i];)
      next++;
    if (own[i] == blocks)
      fold_integers(h, scratch, i * h->group, next * h->group, masks[i], blocks * KEY_BLOCK);
  }
  /* A row's own blocks take the place of shared ones, which those after it no longer read. */
  for (int first = blocks - 1; first >= 0; first--)
    for (int i = 0; i < rows; i++) {
      if (own[i] != first) continue;
      int32_t last = pass->prefix[row + i] + pass->tail_length[row + i];
      for (int b = first; b < blocks; b++) {
        int at = start + b * KEY_BLOCK, stop = last < at + KEY_BLOCK ? last : at + KEY_BLOCK;
        scratch->start = (float)at;
        if (masks[i][b]) {
          masks[i][b] &= gather_row(pass, h, row + i, at, stop, scratch);
          arrange(h, scratch, b, stop - at);
        }
        integer_scores(h, scratch, i * h->group, (i + 1) * h->group, b, masks[i][b]);
      }
      fold_integers(h, scratch, i * h->group, (i + 1) * h->group, masks[i], blocks * KEY_BLOCK);
    }
}

#endif
