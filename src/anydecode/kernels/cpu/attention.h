/* Attention over slot tables. Keys are taken in blocks of 32 absolute positions, in order, with a
 * running maximum; what a row sums depends on the positions it sees, not on slots or neighbours. */
#ifndef ANYDECODE_ATTENTION_H
#define ANYDECODE_ATTENTION_H

#include "layout.h"
#include "pointwise.h"

/* One thread's room, in floats. */
typedef struct {
  float *keys, *values; /* [padded / 8, 32, 8]: one block, converted */
  float *q, *sums;      /* [rows, group, padded] */
  float *total;         /* [rows, group, 8]: sums of weights by lane */
  float *most;          /* [rows, group]: running maxima */
  float *scores;        /* [group, 32] */
} Room;

typedef struct {
  int kv_head, head_dim, padded, group, size;
  const Op *op;
  void *keys, *values;
  const int32_t *table;
  int format, kv_heads;
} Heads;

static Room make_room(float *base, int padded, int group) {
  int64_t heads = (int64_t)ATTENTION_ROWS * group;
  Room room = {base, base + KEY_BLOCK * padded, 0, 0, 0, 0, 0};
  room.q = room.values + KEY_BLOCK * padded;
  room.sums = room.q + heads * padded;
  room.total = room.sums + heads * padded;
  room.most = room.total + heads * 8;
  room.scores = room.most + (heads + 7) / 8 * 8;
  return room;
}

/* One slot's vector into its place in the room; the padding stays zero. */
INLINE void widen(int format, const char *from, int count, int padded, float *to) {
  if (count == padded) {
    for (int i = 0; i < count; i += 8, to += 8 * KEY_BLOCK) {
      if (format == F32) f8_store(to, f8_load((const float *)from + i));
      else if (format == F16) f8_store(to, f8_load_f16((const uint16_t *)from + i));
      else f8_store(to, f8_load_bf16((const uint16_t *)from + i));
    }
    return;
  }
  for (int i = 0; i < padded; i++) {
    const uint16_t *half = (const uint16_t *)from + i;
    float *at = to + i / 8 * 8 * KEY_BLOCK + i % 8;
    if (i >= count) *at = 0.0f;
    else if (format == F32) *at = ((const float *)from)[i];
    else *at = format == F16 ? f16_to_float(*half) : bf16_to_float(*half);
  }
}

INLINE void blank(int padded, float *to) {
  for (int i = 0; i < padded; i += 8) f8_store(to + i * KEY_BLOCK, f8_set(0.0f));
}

INLINE void narrow(int format, const float *from, int count, char *to) {
  int i = 0;
  uint16_t *half = (uint16_t *)to;
  if (format == F32) {
    memcpy(to, from, (size_t)count * 4);
  } else if (format == F16) {
    for (; i + 8 <= count; i += 8) f8_store_f16(half + i, f8_load(from + i));
    for (; i < count; i++) half[i] = float_to_f16(from[i]);
  } else {
    for (; i < count; i++) half[i] = float_to_bf16(from[i]);
  }
}

INLINE uint32_t gather_as(int format, int padded, const Heads *h, const int32_t *slots, int count,
                          Room *room, int at) {
  uint32_t present = 0;
  int64_t stride = (int64_t)h->kv_heads * h->head_dim * h->size;
  int64_t offset = (int64_t)h->kv_head * h->head_dim * h->size;
  for (int j = 0; j < count; j++) {
    float *key = room->keys + 8 * (at + j), *value = room->values + 8 * (at + j);
    if (slots[j] < 0) {
      blank(padded, key);
      blank(padded, value);
      continue;
    }
    widen(format, (const char *)h->keys + slots[j] * stride + offset, h->head_dim, padded, key);
    widen(format, (const char *)h->values + slots[j] * stride + offset, h->head_dim, padded, value);
    present |= 1u << (at + j);
  }
  return present;
}

/* Bring the slots of `count` positions into the room; bit j of the answer: position j exists. */
static uint32_t gather(const Heads *h, const int32_t *slots, int count, Room *room, int at) {
  switch (h->format) {
    case F32: return gather_as(F32, h->padded, h, slots, count, room, at);
    case F16: return gather_as(F16, h->padded, h, slots, count, room, at);
    default: return gather_as(BF16, h->padded, h, slots, count, room, at);
  }
}

enum { BLOCKS_AHEAD = 4 };

/* Ask for slots a few blocks before they are summed: their lines are too scattered for the
 * processor to foresee. */
static void expect(const Heads *h, const int32_t *slots, int count) {
  int bytes = h->head_dim * h->size;
  for (int j = 0; j < count; j++) {
    if (slots[j] < 0) continue;
    int64_t offset = ((int64_t)slots[j] * h->kv_heads + h->kv_head) * bytes;
    for (int b = 0; b < bytes; b += 64) {
      __builtin_prefetch((const char *)h->keys + offset + b, 0, 2);
      __builtin_prefetch((const char *)h->values + offset + b, 0, 2);
    }
  }
}

/* Eight keys against one query. */
INLINE f8 eight_scores(const float *q, const float *keys, int padded) {
  f8 sum[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) sum[j] = f8_set(0.0f);
  for (int d = 0; d < padded; d += 8, keys += 8 * KEY_BLOCK) {
    f8 part = f8_load(q + d);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) sum[j] = f8_fma(part, f8_load(keys + 8 * j), sum[j]);
  }
  return f8_sums(sum);
}

/* Raw scores of the block, -inf where not visible; the largest of them. */
static float block_scores(const Op *op, const float *q, const Room *room, int padded,
                          uint32_t seen, float *scores) {
  f8 most = f8_set(-INFINITY);
  for (int i = 0; i < KEY_BLOCK; i += 8) {
    if (!((seen >> i) & 255)) {
      f8_store(scores + i, f8_set(-INFINITY));
      continue;
    }
    f8 s = f8_mul(eight_scores(q, room->keys + 8 * i, padded), f8_set(op->x));
    if (op->y > 0) s = f8_mul(f8_set(op->y), f8_tanh(f8_mul(s, f8_set(1.0f / op->y))));
    f8_store(scores + i, s);
    if (((seen >> i) & 255) != 255) {
      for (int j = 0; j < 8; j++)
        if (!((seen >> (i + j)) & 1)) scores[i + j] = -INFINITY;
      s = f8_load(scores + i);
    }
    most = f8_max(s, most);
  }
  return f8_largest(most);
}

/* Scores become weights relative to the new maximum; answers what older sums shrink by. */
INLINE f8 block_weights(Room *room, int at, float found, float *scores) {
  float most = found > room->most[at] ? found : room->most[at];
  f8 shrink = f8_exp(f8_set(room->most[at] - most)), sum = f8_set(0.0f);
  for (int i = 0; i < KEY_BLOCK; i += 8) {
    f8 weight = f8_exp(f8_sub(f8_load(scores + i), f8_set(most)));
    f8_store(scores + i, weight);
    sum = f8_add(sum, weight);
  }
  room->most[at] = most;
  f8_store(room->total + 8 * at, f8_fma(f8_load(room->total + 8 * at), shrink, sum));
  return shrink;
}

/* sums[d] = sums[d] * shrink + the block's weighted values, for `vectors` lanes of d. */
INLINE void weigh_values(const float *weights, const float *values, int lo, int hi, f8 shrink,
                         int vectors, float *sums) {
  f8 sum[8];
#pragma GCC unroll 8
  for (int i = 0; i < vectors; i++) sum[i] = f8_mul(f8_load(sums + 8 * i), shrink);
  for (int j = lo; j < hi; j++) {
    f8 weight = f8_set(weights[j]);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
      sum[i] = f8_fma(weight, f8_load(values + 8 * (j + i * KEY_BLOCK)), sum[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < vectors; i++) f8_store(sums + 8 * i, sum[i]);
}

/* Fold one block into the state of a row's heads, a stage at a time: a head's exponentials hide
 * behind its neighbours' products. */
static void fold_block(const Heads *h, Room *room, int row, uint32_t seen) {
  float *scores = room->scores, found[MAX_GROUP];
  f8 shrink[MAX_GROUP];
  int first = row * h->group, lo = __builtin_ctz(seen), hi = 32 - __builtin_clz(seen);
  for (int g = 0; g < h->group; g++)
    found[g] = block_scores(h->op, room->q + (int64_t)(first + g) * h->padded, room, h->padded,
                            seen, scores + g * KEY_BLOCK);
  for (int g = 0; g < h->group; g++)
    shrink[g] = block_weights(room, first + g, found[g], scores + g * KEY_BLOCK);
  for (int g = 0; g < h->group; g++) {
    float *sums = room->sums + (int64_t)(first + g) * h->padded, *weights = scores + g * KEY_BLOCK;
    int d = 0;
    for (; d + 64 <= h->padded; d += 64)
      weigh_values(weights, room->values + d * KEY_BLOCK, lo, hi, shrink[g], 8, sums + d);
    for (; d < h->padded; d += 8)
      weigh_values(weights, room->values + d * KEY_BLOCK, lo, hi, shrink[g], 1, sums + d);
  }
}

/* Bits of the block's positions that row r sees. */
INLINE uint32_t visible(const Pass *pass, const Op *op, int r, int start) {
  int32_t end = pass->prefix[r] + pass->tail_length[r] - start;
  int32_t begin = op->window ? pass->positions[r] - op->window + 1 - start : 0;
  if (end <= 0 || begin >= KEY_BLOCK) return 0;
  uint32_t bits = end >= KEY_BLOCK ? 0xffffffffu : (1u << end) - 1;
  return begin > 0 ? bits & ~((1u << begin) - 1) : bits;
}

/* Rows of a tile whose positions in the block all come from the shared table, then the others. */
static void attend_block(const Pass *pass, const Heads *h, int row, int rows, int start,
                         Room *room) {
  uint32_t seen[ATTENTION_ROWS];
  int shared = 0, own = 0;
  for (int i = 0; i < rows; i++) {
    int32_t prefix = pass->prefix[row + i], end = prefix + pass->tail_length[row + i];
    seen[i] = visible(pass, h->op, row + i, start);
    if (end > start + KEY_BLOCK) end = start + KEY_BLOCK;
    if (!seen[i]) continue;
    if (end <= prefix) shared = end > shared ? end : shared;
    else own |= 1 << i;
  }
  if (shared) {
    int next = start + BLOCKS_AHEAD * KEY_BLOCK, left = pass->prefix[row] - next;
    if (left > 0) expect(h, h->table + next, left < KEY_BLOCK ? left : KEY_BLOCK);
    uint32_t present = gather(h, h->table + start, shared - start, room, 0);
    for (int i = 0; i < rows; i++)
      if (!((own >> i) & 1) && (seen[i] & present)) fold_block(h, room, i, seen[i] & present);
  }
  for (int i = 0; i < rows; i++) {
    if (!((own >> i) & 1)) continue;
    int32_t prefix = pass->prefix[row + i], end = prefix + pass->tail_length[row + i];
    int from_table = prefix > start ? prefix - start : 0;
    if (end > start + KEY_BLOCK) end = start + KEY_BLOCK;
    const int32_t *tail = pass->tails + pass->tail_start[row + i] + start + from_table - prefix;
    uint32_t present = gather(h, h->table + start, from_table, room, 0);
    present |= gather(h, tail, end - start - from_table, room, from_table);
    if (seen[i] & present) fold_block(h, room, i, seen[i] & present);
  }
}

static void attend_tile(const Pass *pass, const Heads *h, int row, int rows, const float *q,
                        float *out, Room *room) {
  int heads = rows * h->group;
  int64_t width = (int64_t)h->op->heads * h->head_dim;
  int32_t end = 0, begin = INT32_MAX;
  memset(room->q, 0, (size_t)heads * h->padded * 4);
  memset(room->sums, 0, (size_t)heads * h->padded * 4);
  memset(room->total, 0, (size_t)heads * 8 * 4);
  for (int i = 0; i < rows; i++) {
    int32_t last = pass->prefix[row + i] + pass->tail_length[row + i];
    int32_t first = h->op->window ? pass->positions[row + i] - h->op->window + 1 : 0;
    end = last > end ? last : end;
    begin = first < begin ? first : begin;
    for (int g = 0; g < h->group; g++) {
      const float *from = q + (row + i) * width + (h->kv_head * h->group + g) * h->head_dim;
      memcpy(room->q + (int64_t)(i * h->group + g) * h->padded, from, (size_t)h->head_dim * 4);
      room->most[i * h->group + g] = -INFINITY;
    }
  }
  begin = begin > 0 ? begin / KEY_BLOCK * KEY_BLOCK : 0;
  int soon = pass->prefix[row] - begin;
  if (soon > BLOCKS_AHEAD * KEY_BLOCK) soon = BLOCKS_AHEAD * KEY_BLOCK;
  expect(h, h->table + begin, soon);
  for (int start = begin; start < end; start += KEY_BLOCK)
    attend_block(pass, h, row, rows, start, room);
  for (int i = 0; i < heads; i++) {
    float total = f8_sum(f8_load(room->total + 8 * i));
    int head = h->kv_head * h->group + i % h->group;
    float *to = out + (row + i / h->group) * width + (int64_t)head * h->head_dim;
    scale_row(room->sums + (int64_t)i * h->padded, h->head_dim, total > 0 ? 1.0f / total : 0.0f,
              to);
  }
}

static int cache_size(int format) { return format == F32 ? 4 : 2; }

static void attend(const Pass *pass, const Op *op, const float *q, float *out, int thread,
                   int threads) {
  Heads h = {0, op->head_dim, (op->head_dim + 7) / 8 * 8, op->heads / op->kv_heads,
             cache_size(pass->cache_format), op, pass->keys[op->layer], pass->values[op->layer],
             NULL, pass->cache_format, op->kv_heads};
  Room room = make_room(pass->attention_scratch + thread * (pass->attention_scratch_floats),
                        h.padded, h.group);
  int task = 0;
  for (int row = 0, rows; row < pass->num_rows; row += rows) {
    int32_t table = pass->table[row];
    for (rows = 1; rows < ATTENTION_ROWS && row + rows < pass->num_rows; rows++)
      if (pass->table[row + rows] != table) break;
    h.table = pass->tables[table] + pass->table_stride[table] * op->layer;
    for (h.kv_head = 0; h.kv_head < op->kv_heads; h.kv_head++, task++)
      if (task % threads == thread) attend_tile(pass, &h, row, rows, q, out, &room);
  }
}

static void store_row(const Pass *pass, const Op *op, int row, const float *k, const float *v) {
  if (pass->slots[row] < 0) return;
  int width = op->kv_heads * op->head_dim;
  int64_t offset = (int64_t)pass->slots[row] * width * cache_size(pass->cache_format);
  narrow(pass->cache_format, k, width, (char *)pass->keys[op->layer] + offset);
  narrow(pass->cache_format, v, width, (char *)pass->values[op->layer] + offset);
}

#endif
