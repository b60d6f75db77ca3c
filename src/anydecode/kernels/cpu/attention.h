/* Attention over slot tables, by online softmax. Keys are processed in order, in blocks of 32
 * absolute positions, with a running maximum. Each segment of `SEGMENT` positions has sums of its
 * own, and the segments are added in order. A row's result depends on the positions that it attends
 * to, not on their slots or on other rows. */
#ifndef ANYDECODE_ATTENTION_H
#define ANYDECODE_ATTENTION_H

#include "attention_keys.h"
#include "integer_attention.h"

/* What one part of attention computes: the rows of a tile, one key head, and the segments
 * [first, last). */
typedef struct {
  int tile, kv_head, first, last;
} AttentionPart;

/* A tile also has several pairs of keys, or of vectors of a value. */
enum { TILE = 2 };
#ifdef HAS_WIDE_PAIRS
enum { MIN_PANEL_HEADS = 16 };
enum { MAX_LOADS = INT32_MAX }; /* the most heads that vectors are converted for as they are loaded */

/* Add the products of eight numbers of a few queries and two pairs of keys. */
INLINE void add_scores(int format, int heads, const float *q, int padded, const char *const *key,
                       int d, f8x2 *sum) {
  f8x2 k[TILE];
#pragma GCC unroll 2
  for (int j = 0; j < TILE; j++) k[j] = load_two(format, key + 2 * j, d);
#pragma GCC unroll 12
  for (int i = 0; i < heads; i++) {
    f8x2 part = f8x2_load_twice(q + i * padded + d);
#pragma GCC unroll 2
    for (int j = 0; j < TILE; j++) sum[TILE * i + j] = f8x2_fma(part, k[j], sum[TILE * i + j]);
  }
}

/* Add `pairs` pairs of vectors of a value, weighted for a few heads. */
INLINE void add_value(int format, int heads, const float *weights, const char *value, int at,
                      int pairs, f8x2 *sum) {
  f8x2 part[TILE];
#pragma GCC unroll 2
  for (int v = 0; v < pairs; v++) part[v] = load_pair(format, value, at + 16 * v);
#pragma GCC unroll 12
  for (int i = 0; i < heads; i++) {
    f8x2 weight = f8x2_set(weights[i * KEY_BLOCK]);
#pragma GCC unroll 2
    for (int v = 0; v < pairs; v++)
      sum[TILE * i + v] = f8x2_fma(weight, part[v], sum[TILE * i + v]);
  }
}
#else
enum { MAX_LOADS = 2 * MAX_HEADS };

/* The same for 16 registers: 12 sums, three queries or weights, and one key or vector of a value. A
 * sum that does not fit would be stored and loaded in every step. */
INLINE void add_scores(int format, int heads, const float *q, int padded, const char *const *key,
                       int d, f8x2 *sum) {
  f8 part[MAX_HEADS];
#pragma GCC unroll 3
  for (int i = 0; i < heads; i++) part[i] = f8_load(q + i * padded + d);
#pragma GCC unroll 4
  for (int j = 0; j < 2 * TILE; j++) {
    f8 k = load_as(format, key[j], d);
#pragma GCC unroll 3
    for (int i = 0; i < heads; i++) {
      f8 *to = &sum[TILE * i + j / 2].v[j % 2];
      *to = f8_fma(part[i], k, *to);
    }
  }
}

INLINE void add_value(int format, int heads, const float *weights, const char *value, int at,
                      int pairs, f8x2 *sum) {
  f8 weight[MAX_HEADS];
#pragma GCC unroll 3
  for (int i = 0; i < heads; i++) weight[i] = f8_set(weights[i * KEY_BLOCK]);
#pragma GCC unroll 4
  for (int v = 0; v < 2 * pairs; v++) {
    f8 part = load_as(format, value, at + 8 * v);
#pragma GCC unroll 3
    for (int i = 0; i < heads; i++) {
      f8 *to = &sum[TILE * i + v / 2].v[v % 2];
      *to = f8_fma(weight[i], part, *to);
    }
  }
}
#endif

/* Vectors that end with eight plain numbers are converted to float32 as they are loaded; others
 * beforehand, as are those that are loaded for many heads. */
INLINE int loaded_format(const Heads *h, int heads) {
  return h->format != Q4_1 && h->head_dim % 8 == 0 && heads <= MAX_LOADS ? h->format : F32;
}

/* Dot products of eight keys with each of a few queries, in the order of f8_fours. */
INLINE void eight_scores(int format, int heads, const float *q, const char *const *key, int padded,
                         f8 *low, f8 *high) {
#pragma GCC unroll 2
  for (int four = 0; four < 2; four++) {
    f8x2 sum[MAX_HEADS * TILE];
#pragma GCC unroll 24
    for (int j = 0; j < heads * TILE; j++) sum[j] = f8x2_set(0.0f);
    for (int d = 0; d < padded; d += 8)
      add_scores(format, heads, q, padded, key + 4 * four, d, sum);
#pragma GCC unroll 12
    for (int i = 0; i < heads; i++) {
      const f8x2 *pairs = sum + TILE * i;
      f8 each[4] = {f8x2_part(pairs[0], 0), f8x2_part(pairs[0], 1), f8x2_part(pairs[1], 0),
                    f8x2_part(pairs[1], 1)};
      (four ? high : low)[i] = f8_fours(each);
    }
  }
}

/* Scaled scores of the block for the heads [at, at + heads), -inf where not visible, and each head's
 * maximum. */
INLINE void block_scores(int format, int heads, const Op *op, const Scratch *scratch, int at,
                         int padded, uint32_t mask) {
  const float *q = scratch->q + (int64_t)at * padded;
  float *scores = scratch->scores + at * KEY_BLOCK, *block_max = scratch->block_max + at;
  f8 max[MAX_HEADS], low[MAX_HEADS], high[MAX_HEADS];
#pragma GCC unroll 12
  for (int i = 0; i < heads; i++) max[i] = f8_set(-INFINITY);
  for (int j = 0; j < KEY_BLOCK; j += 8) {
    uint32_t eight = (mask >> j) & 255;
    if (eight) eight_scores(format, heads, q, scratch->key + j, padded, low, high);
#pragma GCC unroll 12
    for (int i = 0; i < heads; i++) {
      float *to = scores + i * KEY_BLOCK + j;
      if (!eight) {
        f8_store(to, f8_set(-INFINITY));
        continue;
      }
      f8 s = f8_mul(f8_join(low[i], high[i]), f8_set(op->x));
      s = finish_eight(op, scratch, at + i, j, padded, eight, s, to);
      max[i] = f8_max(s, max[i]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < heads; i++) block_max[i] = f8_reduce_max(max[i]);
}

/* Turn scores into weights relative to the new maximum; `factor`: for the earlier sums. */
INLINE void block_weights(const State *state, int at, float max, f8 factor, float *scores,
                          float *rescale) {
  f8 sum = f8_set(0.0f);
  for (int i = 0; i < KEY_BLOCK; i += 16) {
    f8x2 weights = f8x2_exp(f8x2_sub(f8x2_load(scores + i), f8x2_set(max)));
    f8x2_store(scores + i, weights);
    sum = f8_add(f8_add(sum, f8x2_part(weights, 0)), f8x2_part(weights, 1));
  }
  state->max[at] = max;
  f8_store(state->total + 8 * at, f8_fma(f8_load(state->total + 8 * at), factor, sum));
  f8_store(rescale, factor);
}

/* sums[d] = sums[d] * rescale + the block's weighted values, for `pairs` pairs of vectors of d. */
INLINE void weigh_values(int format, int heads, const float *weights, const char *const *value,
                         int at, int lo, int hi, const float *rescale, int pairs, int padded,
                         float *sums) {
  f8x2 sum[MAX_HEADS * TILE];
#pragma GCC unroll 12
  for (int i = 0; i < heads; i++)
#pragma GCC unroll 2
    for (int v = 0; v < pairs; v++)
      sum[TILE * i + v] =
          f8x2_mul(f8x2_load(sums + i * padded + 16 * v), f8x2_load_twice(rescale + 8 * i));
  for (int j = lo; j < hi; j++) add_value(format, heads, weights + j, value[j], at, pairs, sum);
#pragma GCC unroll 12
  for (int i = 0; i < heads; i++)
#pragma GCC unroll 2
    for (int v = 0; v < pairs; v++) f8x2_store(sums + i * padded + 16 * v, sum[TILE * i + v]);
}

/* The same for a last vector alone. */
INLINE void weigh_last(int format, int heads, const float *weights, const char *const *value,
                       int at, int lo, int hi, const float *rescale, int padded, float *sums) {
  for (int i = 0; i < heads; i++, weights += KEY_BLOCK, rescale += 8, sums += padded) {
    f8 sum = f8_mul(f8_load(sums), f8_load(rescale));
    for (int j = lo; j < hi; j++)
      sum = f8_fma(f8_set(weights[j]), load_as(format, value[j], at), sum);
    f8_store(sums, sum);
  }
}

INLINE void fold_scores(int format, int heads, const Heads *h, const Scratch *scratch, int at,
                        uint32_t mask) {
  block_scores(format, heads, h->op, scratch, at, h->padded, mask);
}

INLINE void fold_values(int format, int heads, const Heads *h, const Scratch *scratch, int at,
                        uint32_t mask) {
  int padded = h->padded, lo = __builtin_ctz(mask), hi = 32 - __builtin_clz(mask), d = 0;
  const float *weights = scratch->scores + at * KEY_BLOCK, *rescale = scratch->rescale + 8 * at;
  float *sums = scratch->segment.sums + (int64_t)at * padded;
  for (; d + 16 * TILE <= h->value_padded; d += 16 * TILE)
    weigh_values(format, heads, weights, scratch->value, d, lo, hi, rescale, TILE, padded,
                 sums + d);
  for (; d + 16 <= h->value_padded; d += 16)
    weigh_values(format, heads, weights, scratch->value, d, lo, hi, rescale, 1, padded, sums + d);
  if (d < h->value_padded)
    weigh_last(format, heads, weights, scratch->value, d, lo, hi, rescale, padded, sums + d);
}

#define FOLD_SCORES(heads)                                                                   \
  for (; at + heads <= last; at += heads) fold_scores(format, heads, h, scratch, at, mask);
#define FOLD_VALUES(heads)                                                                   \
  for (; at + heads <= last; at += heads) fold_values(format, heads, h, scratch, at, mask);

/* Fold one block into the heads [first, last), which attend to the same positions. */
INLINE void fold_heads(int format, const Heads *h, const Scratch *scratch, int first, int last,
                       uint32_t mask) {
  const State *state = &scratch->segment;
  int at = first;
  FOR_EACH_TILE(FOLD_SCORES)
  for (at = first; at < last; at++) {
    float old = state->max[at], max = scratch->block_max[at] > old ? scratch->block_max[at] : old;
    block_weights(state, at, max, f8_exp(f8_set(old - max)), scratch->scores + at * KEY_BLOCK,
                  scratch->rescale + at * 8);
  }
  at = first;
  FOR_EACH_TILE(FOLD_VALUES)
}

#ifdef HAS_WIDE_PAIRS
/* With many heads a lane is a head, not a number of a key, so that products need no sums across
 * lanes. What is added is added in the same order. V: f8 or f8x2, of a panel's heads. */
#define DEFINE_PANEL_SCORES(V)                                                                \
  /* Scaled products of four keys with the queries of a panel, summed as in f8_fours. */      \
  INLINE void V##_four_scores(const float *queries, int padded, const float *const *key,      \
                              float scale, V *out) {                                          \
    int lanes = (int)(sizeof(V) / 4);                                                         \
    for (int half = 0; half < 2; half++) {                                                    \
      V sum[4][4];                                                                            \
      _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)                                     \
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) sum[k][i] = V##_set(0.0f);        \
      for (int d = 4 * half; d < padded; d += 8)                                              \
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {                                 \
          V part = V##_load(queries + (d + i) * lanes);                                       \
          _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)                                 \
            sum[k][i] = V##_fma(part, V##_set(key[k][d + i]), sum[k][i]);                     \
        }                                                                                     \
      _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) {                                   \
        V four = V##_add(V##_add(sum[k][0], sum[k][1]), V##_add(sum[k][2], sum[k][3]));       \
        out[k] = half ? V##_mul(V##_add(out[k], four), V##_set(scale)) : four;                \
      }                                                                                       \
    }                                                                                         \
  }                                                                                           \
  /* Scores of the positions [j, j + 8) of the block, and the maxima if all are visible. */   \
  INLINE void V##_panel_scores(const Scratch *scratch, float scale, int at, int j, int padded, \
                               const float *const *key) {                                     \
    const float *queries = scratch->panels + (int64_t)at * padded;                            \
    float *max = scratch->block_max + at;                                                     \
    V eight[8], largest = j ? V##_load(max) : V##_set(-INFINITY);                             \
    V##_four_scores(queries, padded, key, scale, eight);                                      \
    V##_four_scores(queries, padded, key + 4, scale, eight + 4);                              \
    _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) largest = V##_max(eight[k], largest); \
    V##_store(max, largest);                                                                  \
    V##_store_eights(scratch->scores + at * KEY_BLOCK + j, KEY_BLOCK, eight);                 \
  }
DEFINE_PANEL_SCORES(f8)
DEFINE_PANEL_SCORES(f8x2)

/* Arrange the queries of `heads` heads in panels. Lanes without a head are zero. */
static void make_panels(Scratch *scratch, int padded, int heads) {
  scratch->panel_heads = heads;
  for (int at = 0; at < heads; at += 8) {
    int lanes = at / 16 * 16 + 8 < heads ? 16 : 8;
    float *panel = scratch->panels + (int64_t)(at / 16 * 16) * padded + at % 16;
    for (int d = 0; d < padded; d += 8) {
      f8 eight[8];
      for (int i = 0; i < 8; i++)
        eight[i] = at + i < heads ? f8_load(scratch->q + (int64_t)(at + i) * padded + d)
                                  : f8_set(0.0f);
      f8_store_eights(panel + d * lanes, lanes, eight);
    }
  }
}

/* Eight keys of a block in float32; other formats are converted into the scratch memory. */
INLINE void eight_keys(int format, const Scratch *scratch, int j, int padded, const float **key) {
  for (int k = 0; k < 8; k++) {
    const char *from = scratch->key[j + k];
    float *to = scratch->keys + k * padded;
    key[k] = format == F32 ? (const float *)from : to;
    for (int d = 0; d < padded && format != F32; d += 8) f8_store(to + d, load_as(format, from, d));
  }
}

/* Fold one block into all rows of a tile, each of which attends to some position of it. For so many
 * heads the vectors of packed formats were converted beforehand. */
INLINE void fold_panels(int format, const Heads *h, const Scratch *scratch, int rows,
                        const uint32_t *masks) {
  const State *state = &scratch->segment;
  int padded = h->padded, heads = rows * h->group;
  uint32_t any = 0, all = 0xffffffffu;
  for (int row = 0; row < rows; row++) {
    any |= masks[row];
    all &= masks[row];
  }
  for (int j = 0; j < KEY_BLOCK; j += 8) {
    const float *key[8];
    if (!((any >> j) & 255)) continue;
    eight_keys(format, scratch, j, padded, key);
    for (int at = 0; at < heads; at += 16)
      if (at + 8 < heads) f8x2_panel_scores(scratch, h->op->x, at, j, padded, key);
      else f8_panel_scores(scratch, h->op->x, at, j, padded, key);
  }
  int is_done = all == 0xffffffffu && !(h->op->y > 0) && !h->op->slopes;
  for (int at = 0; at < heads && !is_done; at++) {
    f8 max = f8_set(-INFINITY);
    for (int j = 0; j < KEY_BLOCK; j += 8) {
      uint32_t eight = (masks[at / h->group] >> j) & 255;
      float *to = scratch->scores + at * KEY_BLOCK + j;
      f8 s = f8_set(-INFINITY);
      if (eight) s = finish_eight(h->op, scratch, at, j, padded, eight, f8_load(to), to);
      else f8_store(to, s);
      max = f8_max(s, max);
    }
    scratch->block_max[at] = f8_reduce_max(max);
  }
  for (int at = 0; at < heads; at += 8) {
    float new_max[8], factor[8];
    f8 old = f8_load(state->max + at), max = f8_max(f8_load(scratch->block_max + at), old);
    f8_store(new_max, max);
    f8_store(factor, f8_exp(f8_sub(old, max)));
    for (int i = at; i < heads && i < at + 8; i++)
      block_weights(state, i, new_max[i - at], f8_set(factor[i - at]),
                    scratch->scores + i * KEY_BLOCK, scratch->rescale + i * 8);
  }
  for (int row = 0, next; row < rows; row = next) {
    for (next = row + 1; next < rows && masks[next] == masks[row]; next++) {}
    int at = row * h->group, last = next * h->group;
    uint32_t mask = masks[row];
    FOR_EACH_TILE(FOLD_VALUES)
  }
}

/* Functions of their own, so that the code for few heads is the same with and without them. */
#define PANELS(format)                                                                   \
  static __attribute__((noinline)) void fold_panels_##format(                            \
      const Heads *h, const Scratch *scratch, int rows, const uint32_t *masks) {         \
    fold_panels(format, h, scratch, rows, masks);                                        \
  }
PANELS(F32)
PANELS(F16)
PANELS(BF16)
#endif

/* Consecutive rows that attend to the same positions are processed together. */
INLINE void fold_as(int format, const Heads *h, const Scratch *scratch, int first, int last,
                    const uint32_t *masks) {
  for (int row = first, next; row < last; row = next) {
    for (next = row + 1; next < last && masks[next] == masks[row]; next++) {}
    if (!masks[row]) continue;
    fold_heads(format, h, scratch, row * h->group, next * h->group, masks[row]);
  }
}

/* Fold one block into the states of rows, each for the positions in its mask. All heads go through
 * one step at a time, so that the latency of one head's exponentials is hidden by other heads'
 * products. */
static void fold_block(const Heads *h, const Scratch *scratch, int first, int last,
                       const uint32_t *masks) {
#ifdef HAS_WIDE_PAIRS
  int has_panels = scratch->panel_heads && (last - first) * h->group == scratch->panel_heads;
  for (int row = first; row < last; row++) has_panels &= masks[row] != 0;
  if (has_panels) {
    switch (scratch->format) {
      case F16: fold_panels_F16(h, scratch, last, masks); return;
      case BF16: fold_panels_BF16(h, scratch, last, masks); return;
      default: fold_panels_F32(h, scratch, last, masks); return;
    }
  }
#endif
  switch (scratch->format) {
    case F16: fold_as(F16, h, scratch, first, last, masks); return;
    case BF16: fold_as(BF16, h, scratch, first, last, masks); return;
    default: fold_as(F32, h, scratch, first, last, masks);
  }
}

/* Fold one block into the rows of a tile: first, together, the rows all of whose positions in the
 * block have the slots of the first row's table; then each other row with its own table and tail. */
static void attend_block(const Plan *plan, const Heads *h, int row, int rows, int start,
                         Scratch *scratch) {
  const Pass *pass = plan->pass;
  uint32_t masks[ATTENTION_ROWS];
  int shared = 0, own = 0; /* one past the last shared position; bits of the other rows */
  scratch->start = (float)start;
  for (int i = 0; i < rows; i++) {
    int32_t prefix = pass->prefix[row + i], end = prefix + pass->tail_length[row + i];
    masks[i] = visible(pass, h->op, row + i, start);
    if (end > start + KEY_BLOCK) end = start + KEY_BLOCK;
    if (!masks[i]) continue;
    if (end <= prefix && end <= plan->shared[row + i]) shared = end > shared ? end : shared;
    else own |= 1 << i;
  }
  if (shared) {
    prefetch_ahead(h, scratch, start);
    scratch->format = loaded_format(h, rows * h->group);
    uint32_t present = gather(h, h->table + start, shared - start, scratch, 0);
    uint32_t present_masks[ATTENTION_ROWS];
    for (int i = 0; i < rows; i++) present_masks[i] = (own >> i) & 1 ? 0 : masks[i] & present;
    fold_block(h, scratch, 0, rows, present_masks);
  }
  scratch->format = loaded_format(h, h->group);
  for (int i = 0; i < rows; i++) {
    if (!((own >> i) & 1)) continue;
    int32_t prefix = pass->prefix[row + i], end = prefix + pass->tail_length[row + i];
    if (end > start + KEY_BLOCK) end = start + KEY_BLOCK;
    masks[i] &= gather_row(pass, h, row + i, start, end, scratch);
    fold_block(h, scratch, i, i + 1, masks);
  }
}

static void clear(const State *state, int padded, int heads) {
  memset(state->sums, 0, (size_t)heads * padded * 4);
  memset(state->total, 0, (size_t)heads * 8 * 4);
  for (int i = 0; i < heads; i++) state->max[i] = -INFINITY;
}

static void load_queries(const Pass *pass, const Heads *h, int row, int rows, const float *q,
                         Scratch *scratch) {
  int64_t width = (int64_t)h->op->heads * h->head_dim;
  if (h->padded > h->head_dim) memset(scratch->q, 0, (size_t)rows * h->group * h->padded * 4);
  for (int i = 0; i < rows * h->group; i++) {
    int64_t head = (int64_t)h->kv_head * h->group + i % h->group;
    memcpy(scratch->q + (int64_t)i * h->padded,
           q + (row + i / h->group) * width + head * h->head_dim, (size_t)h->head_dim * 4);
    if (!h->op->slopes) continue;
    scratch->slopes[i] = h->op->reach ? (float)head : h->op->slopes[head];
    scratch->row_positions[i] = (float)pass->positions[row + i / h->group];
  }
  if (h->format == Q8_0) {
    quantise_queries(h, rows * h->group, scratch);
    return;
  }
#ifdef HAS_WIDE_PAIRS
  if (rows * h->group >= MIN_PANEL_HEADS) make_panels(scratch, h->padded, rows * h->group);
#endif
}

/* Compute the state of one segment in the scratch memory. */
static void attend_segment(const Plan *plan, const Heads *h, int row, int rows, int segment,
                           Scratch *scratch) {
  const Pass *pass = plan->pass;
  int32_t end = 0, start = segment * SEGMENT;
  clear(&scratch->segment, h->padded, rows * h->group);
  for (int i = 0; i < rows; i++) {
    int32_t last = pass->prefix[row + i] + pass->tail_length[row + i];
    end = last > end ? last : end;
  }
  if (end > start + SEGMENT) end = start + SEGMENT;
  if (h->format == Q8_0) {
    attend_integers(plan, h, row, rows, start, end, scratch);
    return;
  }
  for (; start < end; start += KEY_BLOCK) attend_block(plan, h, row, rows, start, scratch);
}

/* Add head `from_at` of the next segment's state to head `at` of `to`. */
INLINE void add_segment(const State *to, int at, const State *from, int from_at, int padded) {
  float *sums = to->sums + (int64_t)at * padded, *total = to->total + 8 * at;
  const float *more = from->sums + (int64_t)from_at * padded, *added = from->total + 8 * from_at;
  float old_max = to->max[at], new_max = from->max[from_at];
  if (new_max == -INFINITY) return;
  if (old_max == -INFINITY) {
    memcpy(sums, more, (size_t)padded * 4);
    memcpy(total, added, 8 * 4);
    to->max[at] = new_max;
    return;
  }
  float max = new_max > old_max ? new_max : old_max;
  f8 old_factor = f8_exp(f8_set(old_max - max)), new_factor = f8_exp(f8_set(new_max - max));
  for (int i = 0; i < padded; i += 8)
    f8_store(sums + i,
             f8_fma(f8_load(sums + i), old_factor, f8_mul(f8_load(more + i), new_factor)));
  f8_store(total, f8_fma(f8_load(total), old_factor, f8_mul(f8_load(added), new_factor)));
  to->max[at] = max;
}

/* Write the normalised result of head `at` of a complete state. `sink`: the score of a key whose
 * value is zero; NULL: none. */
INLINE void finish_head(const State *state, int at, int padded, int value_dim, const float *sink,
                        float *out) {
  float total = f8_sum(f8_load(state->total + 8 * at)), factor = 1.0f;
  if (sink && total > 0) {
    float max = *sink > state->max[at] ? *sink : state->max[at], pair[8];
    f8_store(pair, f8_exp(f8_set(state->max[at] - max)));
    factor = pair[0];
    f8_store(pair, f8_exp(f8_set(*sink - max)));
    total = total * factor + pair[0];
  }
  scale_row(state->sums + (int64_t)at * padded, value_dim, total > 0 ? factor / total : 0.0f, out);
}

/* The sink of a head; NULL where the layer has none. */
INLINE const float *sink_of(const Op *op, int64_t head) {
  return op->weight ? op->weight + head : NULL;
}

static void attend_tile(const Plan *plan, const Heads *h, const AttentionPart *at, const float *q,
                        float *out, Scratch *scratch) {
  int row = plan->tile_start[at->tile], rows = plan->tile_start[at->tile + 1] - row;
  int heads = rows * h->group;
  load_queries(plan->pass, h, row, rows, q, scratch);
  clear(&scratch->all, h->padded, heads);
  for (int segment = at->first; segment < at->last; segment++) {
    attend_segment(plan, h, row, rows, segment, scratch);
    for (int i = 0; i < heads; i++) add_segment(&scratch->all, i, &scratch->segment, i, h->padded);
  }
  for (int i = 0; i < heads; i++) {
    int64_t head = h->kv_head * h->group + i % h->group;
    finish_head(&scratch->all, i, h->padded, h->op->value_dim, sink_of(h->op, head),
                out + ((int64_t)(row + i / h->group) * h->op->heads + head) * h->op->value_dim);
  }
}

static Heads tile_heads(const Plan *plan, const Op *op, int tile, int kv_head) {
  const Pass *pass = plan->pass;
  int row = plan->tile_start[tile], groups = plan->groups;
  const int32_t *slots = table_of(pass, op, row);
  if (groups > 1 && pass->table[row] >= plan->first_selected)
    slots += (int64_t)(kv_head * groups / op->kv_heads) * pass->prefix[row];
  int64_t bytes = cache_head_bytes(pass->cache_format, op->head_dim);
  int64_t offset = op->is_latent ? 0 : kv_head * bytes * pass->num_slots;
  void *const *values = op->is_latent ? pass->keys : pass->values;
  return (Heads){kv_head, op->head_dim, (op->head_dim + 7) / 8 * 8, (op->value_dim + 7) / 8 * 8,
                 op->heads / op->kv_heads, bytes, op, (const char *)pass->keys[op->layer] + offset,
                 (const char *)values[op->layer] + offset, slots, pass->cache_format};
}

/* The state of one part of split attention. Parts are in order of tile, key head and segment. */
INLINE float *part_state(const Plan *plan, const Op *op, int part) {
  int padded = (op->head_dim + 7) / 8 * 8;
  return plan->states + part * attention_state_floats(padded, state_heads(plan, op));
}

/* Find a part of attention. Returns 0 where there is none of this number. */
static int find_part(const Plan *plan, const Op *op, int part, AttentionPart *found) {
  if (!is_split(plan, op)) {
    *found = (AttentionPart){.tile = part % plan->num_tiles, .kv_head = part / plan->num_tiles};
    if (found->kv_head >= op->kv_heads) return 0;
    tile_segments(plan, op, found->tile, &found->first, &found->last);
    return 1;
  }
  for (int tile = 0; tile < plan->num_tiles; tile++) {
    int first, last;
    tile_segments(plan, op, tile, &first, &last);
    int parts = (last - first) * op->kv_heads;
    if (part < parts) {
      int segment = first + part % (last - first);
      *found = (AttentionPart){tile, part / (last - first), segment, segment + 1};
      return 1;
    }
    part -= parts;
  }
  return 0;
}

/* One past the last position that a part takes from the table of its tile's first row. */
INLINE int shared_end(const Plan *plan, const AttentionPart *part) {
  int32_t prefix = plan->pass->prefix[plan->tile_start[part->tile]], end = part->last * SEGMENT;
  return prefix < end ? prefix : end;
}

static void attend(const Plan *plan, const Op *op, const float *q, float *out, int number,
                   int thread) {
  plan = attention_plan(plan, op);
  const Pass *pass = plan->pass;
  int padded = (op->head_dim + 7) / 8 * 8, group = op->heads / op->kv_heads;
  Scratch scratch = make_scratch(
      pass->attention_scratch + thread * pass->attention_scratch_floats, padded, group);
  AttentionPart part, next;
  find_part(plan, op, number, &part);
  Heads h = tile_heads(plan, op, part.tile, part.kv_head);
  scratch.end = shared_end(plan, &part);
  if (find_part(plan, op, number + 1, &next)) {
    scratch.next = tile_heads(plan, op, next.tile, next.kv_head);
    scratch.next.table += next.first * SEGMENT;
    scratch.num_next = shared_end(plan, &next) - next.first * SEGMENT;
  }
  int start = part.first * SEGMENT, soon = scratch.end - start;
  prefetch_slots(&h, h.table + start,
                 soon < BLOCKS_AHEAD * KEY_BLOCK ? soon : BLOCKS_AHEAD * KEY_BLOCK);
  if (!is_split(plan, op)) {
    attend_tile(plan, &h, &part, q, out, &scratch);
    return;
  }
  int row = plan->tile_start[part.tile], rows = plan->tile_start[part.tile + 1] - row;
  scratch.segment = make_state(part_state(plan, op, number), padded, state_heads(plan, op));
  load_queries(pass, &h, row, rows, q, &scratch);
  attend_segment(plan, &h, row, rows, part.first, &scratch);
}

/* Add the segments of split attention to one row of the result. */
static void merge_row(const Plan *plan, const Op *op, int row, float *out) {
  plan = attention_plan(plan, op);
  if (!is_split(plan, op)) return;
  int padded = (op->head_dim + 7) / 8 * 8, group = op->heads / op->kv_heads, part = 0;
  int heads = state_heads(plan, op), tile = 0, first, last;
  for (;; tile++) {
    tile_segments(plan, op, tile, &first, &last);
    if (tile == plan->tile_of[row]) break;
    part += (last - first) * op->kv_heads;
  }
  int from = (row - plan->tile_start[tile]) * group;
  for (int head = 0; head < op->heads; head++) {
    int start = part + head / group * (last - first), at = from + head % group;
    State all = make_state(part_state(plan, op, start), padded, heads);
    for (int segment = 1; segment < last - first; segment++) {
      State more = make_state(part_state(plan, op, start + segment), padded, heads);
      add_segment(&all, at, &more, at, padded);
    }
    float *to = out + (int64_t)head * op->value_dim;
    if (first < last) finish_head(&all, at, padded, op->value_dim, sink_of(op, head), to);
    else memset(to, 0, (size_t)op->value_dim * 4);
  }
}

static void store_row(const Pass *pass, const Op *op, int row, const float *k, const float *v) {
  if (pass->slots[row] < 0) return;
  int64_t bytes = cache_head_bytes(pass->cache_format, op->head_dim);
  int64_t at = pass->slots[row] * bytes, next = pass->num_slots * bytes;
  for (int h = 0; h < op->kv_heads; h++, at += next, k += op->head_dim) {
    encode_vector(pass->cache_format, k, op->head_dim, (char *)pass->keys[op->layer] + at);
    if (op->is_latent) continue;
    encode_vector(pass->cache_format, v, op->value_dim, (char *)pass->values[op->layer] + at);
    v += op->value_dim;
  }
}

/* The keys of the indexer of a layer follow its heads' values, and have as many bytes in a slot if
 * there are values. */
INLINE char *index_keys(const Pass *pass, const Op *op, int64_t *bytes) {
  *bytes = cache_head_bytes(pass->cache_format, op->is_latent ? op->index_dim : op->head_dim);
  int heads = op->is_latent ? 0 : op->kv_heads;
  return (char *)pass->values[op->layer] + heads * *bytes * pass->num_slots;
}

static void store_index_key(const Pass *pass, const Op *op, int row, const float *key) {
  if (pass->slots[row] < 0) return;
  int64_t bytes;
  char *keys = index_keys(pass, op, &bytes);
  encode_vector(pass->cache_format, key, op->index_dim, keys + pass->slots[row] * bytes);
}

#endif
