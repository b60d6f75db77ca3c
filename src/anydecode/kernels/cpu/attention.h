/* Attention over slot tables. Keys are taken in blocks of 32 absolute positions, in order, with a
 * running maximum; every `SEGMENT` positions the sums start anew, and those of the segments are
 * added in order. What a row sums depends on the positions it sees, not on slots or neighbours. */
#ifndef ANYDECODE_ATTENTION_H
#define ANYDECODE_ATTENTION_H

#include "plan.h"
#include "pointwise.h"

/* What is known of a stretch of keys, for each query head of a tile. */
typedef struct {
  float *sums;  /* [heads, padded] */
  float *total; /* [heads, 8]: sums of weights by lane */
  float *most;  /* [heads]: running maxima */
} State;

/* One thread's room, in floats. */
typedef struct {
  const float *key[KEY_BLOCK], *value[KEY_BLOCK]; /* where the vectors of one block are */
  float *keys, *values; /* [32, padded]: those that had to be converted */
  float *nothing;       /* [padded] zeros, for positions without a slot */
  float *q;             /* [rows, group, padded] */
  float *scores;        /* [group, 32] */
  State segment, all;
} Room;

typedef struct {
  int kv_head, head_dim, padded, group;
  int64_t bytes; /* of one head's key or value */
  const Op *op;
  const char *keys, *values; /* the key head's */
  const int32_t *table;
  int format;
} Heads;

static State make_state(float *base, int padded, int heads) {
  State state = {base, base + (int64_t)heads * padded, 0};
  state.most = state.total + heads * 8;
  return state;
}

static Room make_room(float *base, int padded, int group) {
  int heads = ATTENTION_ROWS * group;
  Room room = {.keys = base, .values = base + KEY_BLOCK * padded};
  room.nothing = room.values + KEY_BLOCK * padded;
  memset(room.nothing, 0, (size_t)padded * 4);
  for (int j = 0; j < KEY_BLOCK; j++) room.key[j] = room.value[j] = room.nothing;
  room.q = room.nothing + padded;
  room.scores = room.q + (int64_t)heads * padded;
  float *states = room.scores + group * KEY_BLOCK;
  room.segment = make_state(states, padded, heads);
  room.all = make_state(states + attention_state_floats(padded, heads), padded, heads);
  return room;
}

/* Blocks as the cache keeps them, into their place in the room. */
INLINE void widen_blocks(int format, const uint8_t *from, int padded, float *to) {
  for (int i = 0; i < padded; i += 8, to += 8) {
    int at = i % QUANT_BLOCK;
    const uint8_t *block = from + i / QUANT_BLOCK * (format == Q8_0 ? 34 : 20);
    f8 scale = f8_set_f16(block);
    if (format == Q8_0) {
      f8_store(to, f8_mul(f8_load_s8(block + 2 + at), scale));
    } else {
      uint64_t codes;
      memcpy(&codes, block + 4 + at % 16, 8);
      codes = (at < 16 ? codes : codes >> 4) & 0x0f0f0f0f0f0f0f0fu;
      f8_store(to, f8_add(f8_mul(f8_load_u8((const uint8_t *)&codes), scale), f8_set_f16(block + 2)));
    }
  }
}

/* One slot's vector into its place in the room; the padding of plain numbers stays zero. */
INLINE void widen(int format, const char *from, int count, int padded, float *to) {
  if (!is_float(format)) {
    widen_blocks(format, (const uint8_t *)from, padded, to);
    return;
  }
  if (count == padded) {
    for (int i = 0; i < count; i += 8, to += 8) {
      if (format == F32) f8_store(to, f8_load((const float *)from + i));
      else if (format == F16) f8_store(to, f8_load_f16((const uint16_t *)from + i));
      else f8_store(to, f8_load_bf16((const uint16_t *)from + i));
    }
    return;
  }
  for (int i = 0; i < padded; i++) {
    const uint16_t *half = (const uint16_t *)from + i;
    if (i >= count) to[i] = 0.0f;
    else if (format == F32) to[i] = ((const float *)from)[i];
    else to[i] = format == F16 ? f16_to_float(*half) : bf16_to_float(*half);
  }
}

/* 32 numbers as a block of the cache. */
static void narrow_block(int format, const float *from, uint8_t *to) {
  f8 most = f8_load(from), least = f8_sub(f8_set(0.0f), most), size = f8_abs(most);
  for (int i = 8; i < QUANT_BLOCK; i += 8) {
    f8 x = f8_load(from + i);
    most = f8_max(x, most);
    least = f8_max(f8_sub(f8_set(0.0f), x), least);
    size = f8_max(f8_abs(x), size);
  }
  if (format == Q8_0) {
    float amax = f8_largest(size);
    uint16_t scale = float_to_f16(amax / 127.0f);
    int32_t low, high;
    memcpy(to, &scale, 2);
    round_block(from, amax > 0 ? 127.0f / amax : 0.0f, (int8_t *)to + 2, &low, &high);
    return;
  }
  float low = -f8_largest(least), step = (f8_largest(most) - low) / 15.0f;
  float inverse = step > 0 ? 1.0f / step : 0.0f, codes[QUANT_BLOCK];
  uint16_t halves[2] = {float_to_f16(step), float_to_f16(low)};
  memcpy(to, halves, 4);
  for (int i = 0; i < QUANT_BLOCK; i += 8) {
    f8 code = f8_round(f8_mul(f8_sub(f8_load(from + i), f8_set(low)), f8_set(inverse)));
    f8_store(codes + i, f8_min(f8_max(code, f8_set(0.0f)), f8_set(15.0f)));
  }
  for (int i = 0; i < 16; i++) to[4 + i] = (uint8_t)((int)codes[i] | (int)codes[16 + i] << 4);
}

/* One head's vector as the cache keeps it. */
INLINE void narrow(int format, const float *from, int count, char *to) {
  int i = 0;
  uint16_t *half = (uint16_t *)to;
  if (format == F32) {
    memcpy(to, from, (size_t)count * 4);
  } else if (format == F16) {
    for (; i + 8 <= count; i += 8) f8_store_f16(half + i, f8_load(from + i));
    for (; i < count; i++) half[i] = float_to_f16(from[i]);
  } else if (format == BF16) {
    for (; i < count; i++) half[i] = float_to_bf16(from[i]);
  } else {
    for (; i < count; i += QUANT_BLOCK, to += format == Q8_0 ? 34 : 20) {
      float part[QUANT_BLOCK] = {0};
      memcpy(part, from + i, (size_t)(count - i < QUANT_BLOCK ? count - i : QUANT_BLOCK) * 4);
      narrow_block(format, part, (uint8_t *)to);
    }
  }
}

INLINE uint32_t gather_as(int format, int padded, const Heads *h, const int32_t *slots, int count,
                          Room *room, int at) {
  uint32_t present = 0;
  int as_is = format == F32 && h->head_dim == padded;
  for (int j = at; j < at + count; j++, slots++) {
    room->key[j] = room->value[j] = room->nothing;
    if (*slots < 0) continue;
    const char *key = h->keys + *slots * h->bytes, *value = h->values + *slots * h->bytes;
    present |= 1u << j;
    if (as_is) {
      room->key[j] = (const float *)key;
      room->value[j] = (const float *)value;
      continue;
    }
    widen(format, key, h->head_dim, padded, room->keys + j * padded);
    widen(format, value, h->head_dim, padded, room->values + j * padded);
    room->key[j] = room->keys + j * padded;
    room->value[j] = room->values + j * padded;
  }
  return present;
}

/* Find the slots of `count` positions; bit j of the answer: position j exists. */
static uint32_t gather(const Heads *h, const int32_t *slots, int count, Room *room, int at) {
  switch (h->format) {
    case F32: return gather_as(F32, h->padded, h, slots, count, room, at);
    case F16: return gather_as(F16, h->padded, h, slots, count, room, at);
    case Q8_0: return gather_as(Q8_0, h->padded, h, slots, count, room, at);
    case Q4_1: return gather_as(Q4_1, h->padded, h, slots, count, room, at);
    default: return gather_as(BF16, h->padded, h, slots, count, room, at);
  }
}

enum { BLOCKS_AHEAD = 4 };

/* Ask for slots a few blocks before they are summed: their lines may be too scattered for the
 * processor to foresee. */
static void expect_slots(const Heads *h, const int32_t *slots, int count) {
  for (int j = 0; j < count; j++) {
    if (slots[j] < 0) continue;
    for (int b = 0; b < h->bytes; b += 64) {
      __builtin_prefetch(h->keys + slots[j] * h->bytes + b, 0, 2);
      __builtin_prefetch(h->values + slots[j] * h->bytes + b, 0, 2);
    }
  }
}

/* Eight keys against one query. */
INLINE f8 eight_scores(const float *q, const float *const *key, int padded) {
  f8 sum[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) sum[j] = f8_set(0.0f);
  for (int d = 0; d < padded; d += 8) {
    f8 part = f8_load(q + d);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) sum[j] = f8_fma(part, f8_load(key[j] + d), sum[j]);
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
    f8 s = f8_mul(eight_scores(q, room->key + i, padded), f8_set(op->x));
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
INLINE f8 block_weights(const State *state, int at, float found, float *scores) {
  float most = found > state->most[at] ? found : state->most[at];
  f8 shrink = f8_exp(f8_set(state->most[at] - most)), sum = f8_set(0.0f);
  for (int i = 0; i < KEY_BLOCK; i += 8) {
    f8 weight = f8_exp(f8_sub(f8_load(scores + i), f8_set(most)));
    f8_store(scores + i, weight);
    sum = f8_add(sum, weight);
  }
  state->most[at] = most;
  f8_store(state->total + 8 * at, f8_fma(f8_load(state->total + 8 * at), shrink, sum));
  return shrink;
}

/* sums[d] = sums[d] * shrink + the block's weighted values, for `vectors` lanes of d from `at` on. */
INLINE void weigh_values(const float *weights, const float *const *value, int at, int lo, int hi,
                         f8 shrink, int vectors, float *sums) {
  f8 sum[8];
#pragma GCC unroll 8
  for (int i = 0; i < vectors; i++) sum[i] = f8_mul(f8_load(sums + 8 * i), shrink);
  for (int j = lo; j < hi; j++) {
    f8 weight = f8_set(weights[j]);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
      sum[i] = f8_fma(weight, f8_load(value[j] + at + 8 * i), sum[i]);
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
    shrink[g] = block_weights(&room->segment, first + g, found[g], scores + g * KEY_BLOCK);
  for (int g = 0; g < h->group; g++) {
    float *sums = room->segment.sums + (int64_t)(first + g) * h->padded, *weights = scores + g * KEY_BLOCK;
    int d = 0;
    for (; d + 64 <= h->padded; d += 64)
      weigh_values(weights, room->value, d, lo, hi, shrink[g], 8, sums + d);
    for (; d < h->padded; d += 8)
      weigh_values(weights, room->value, d, lo, hi, shrink[g], 1, sums + d);
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
    if (left > 0) expect_slots(h, h->table + next, left < KEY_BLOCK ? left : KEY_BLOCK);
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

static void clear(const State *state, int padded, int heads) {
  memset(state->sums, 0, (size_t)heads * padded * 4);
  memset(state->total, 0, (size_t)heads * 8 * 4);
  for (int i = 0; i < heads; i++) state->most[i] = -INFINITY;
}

static void load_queries(const Heads *h, int row, int rows, const float *q, Room *room) {
  int64_t width = (int64_t)h->op->heads * h->head_dim;
  if (h->padded > h->head_dim) memset(room->q, 0, (size_t)rows * h->group * h->padded * 4);
  for (int i = 0; i < rows * h->group; i++) {
    int64_t head = (int64_t)h->kv_head * h->group + i % h->group;
    memcpy(room->q + (int64_t)i * h->padded, q + (row + i / h->group) * width + head * h->head_dim,
           (size_t)h->head_dim * 4);
  }
}

/* The sums of one segment alone, into the room. */
static void attend_segment(const Pass *pass, const Heads *h, int row, int rows, int segment,
                           Room *room) {
  int32_t end = 0, start = segment * SEGMENT;
  clear(&room->segment, h->padded, rows * h->group);
  for (int i = 0; i < rows; i++) {
    int32_t last = pass->prefix[row + i] + pass->tail_length[row + i];
    end = last > end ? last : end;
  }
  if (end > start + SEGMENT) end = start + SEGMENT;
  for (; start < end; start += KEY_BLOCK) attend_block(pass, h, row, rows, start, room);
}

/* Head `at` of `to` goes on with head `from_at` of the segment behind it. */
INLINE void add_segment(const State *to, int at, const State *from, int from_at, int padded) {
  float *sums = to->sums + (int64_t)at * padded, *total = to->total + 8 * at;
  const float *more = from->sums + (int64_t)from_at * padded, *added = from->total + 8 * from_at;
  float before = to->most[at], found = from->most[from_at];
  if (found == -INFINITY) return;
  if (before == -INFINITY) {
    memcpy(sums, more, (size_t)padded * 4);
    memcpy(total, added, 8 * 4);
    to->most[at] = found;
    return;
  }
  float most = found > before ? found : before;
  f8 old = f8_exp(f8_set(before - most)), fresh = f8_exp(f8_set(found - most));
  for (int i = 0; i < padded; i += 8)
    f8_store(sums + i, f8_fma(f8_load(sums + i), old, f8_mul(f8_load(more + i), fresh)));
  f8_store(total, f8_fma(f8_load(total), old, f8_mul(f8_load(added), fresh)));
  to->most[at] = most;
}

/* Head `at` of a state is complete. */
INLINE void finish_head(const State *state, int at, int padded, int head_dim, float *out) {
  float total = f8_sum(f8_load(state->total + 8 * at));
  scale_row(state->sums + (int64_t)at * padded, head_dim, total > 0 ? 1.0f / total : 0.0f, out);
}

static void attend_tile(const Plan *plan, const Heads *h, int tile, const float *q, float *out,
                        Room *room) {
  int row = plan->tile_start[tile], rows = plan->tile_start[tile + 1] - row;
  int heads = rows * h->group, first, last;
  tile_segments(plan, h->op, tile, &first, &last);
  int soon = plan->pass->prefix[row] - first * SEGMENT;
  expect_slots(h, h->table + first * SEGMENT,
               soon < BLOCKS_AHEAD * KEY_BLOCK ? soon : BLOCKS_AHEAD * KEY_BLOCK);
  load_queries(h, row, rows, q, room);
  clear(&room->all, h->padded, heads);
  for (int segment = first; segment < last; segment++) {
    attend_segment(plan->pass, h, row, rows, segment, room);
    for (int i = 0; i < heads; i++) add_segment(&room->all, i, &room->segment, i, h->padded);
  }
  for (int i = 0; i < heads; i++) {
    int64_t head = h->kv_head * h->group + i % h->group;
    finish_head(&room->all, i, h->padded, h->head_dim,
                out + ((int64_t)(row + i / h->group) * h->op->heads + head) * h->head_dim);
  }
}

static Heads tile_heads(const Plan *plan, const Op *op, int tile, int kv_head) {
  const Pass *pass = plan->pass;
  int32_t table = pass->table[plan->tile_start[tile]];
  const int32_t *slots = pass->tables[table] + pass->table_stride[table] * op->layer;
  int64_t bytes = cache_head_bytes(pass->cache_format, op->head_dim);
  int64_t offset = kv_head * bytes * pass->num_slots;
  return (Heads){kv_head, op->head_dim, (op->head_dim + 7) / 8 * 8, op->heads / op->kv_heads, bytes,
                 op, (const char *)pass->keys[op->layer] + offset,
                 (const char *)pass->values[op->layer] + offset, slots, pass->cache_format};
}

/* Where a part of a divided attention leaves its sums. Parts: by tile, then key head, then segment. */
INLINE float *part_state(const Plan *plan, const Op *op, int part) {
  int padded = (op->head_dim + 7) / 8 * 8, heads = ATTENTION_ROWS * (op->heads / op->kv_heads);
  return plan->states + part * attention_state_floats(padded, heads);
}

static void attend(const Plan *plan, const Op *op, const float *q, float *out, int part,
                   int thread) {
  const Pass *pass = plan->pass;
  int padded = (op->head_dim + 7) / 8 * 8, group = op->heads / op->kv_heads;
  Room room = make_room(pass->attention_scratch + thread * pass->attention_scratch_floats, padded,
                        group);
  if (!is_divided(plan, op)) {
    int tile = part % plan->num_tiles;
    Heads h = tile_heads(plan, op, tile, part / plan->num_tiles);
    attend_tile(plan, &h, tile, q, out, &room);
    return;
  }
  room.segment = make_state(part_state(plan, op, part), padded, ATTENTION_ROWS * group);
  for (int tile = 0;; tile++) {
    int row = plan->tile_start[tile], rows = plan->tile_start[tile + 1] - row, first, last;
    tile_segments(plan, op, tile, &first, &last);
    int parts = (last - first) * op->kv_heads;
    if (part >= parts) {
      part -= parts;
      continue;
    }
    int segment = first + part % (last - first), left = pass->prefix[row] - segment * SEGMENT;
    Heads h = tile_heads(plan, op, tile, part / (last - first));
    expect_slots(&h, h.table + segment * SEGMENT, left < SEGMENT ? left : SEGMENT);
    load_queries(&h, row, rows, q, &room);
    attend_segment(pass, &h, row, rows, segment, &room);
    return;
  }
}

/* The segments of a divided attention become one row of its result. */
static void merge_row(const Plan *plan, const Op *op, int row, float *out) {
  if (!is_divided(plan, op)) return;
  int padded = (op->head_dim + 7) / 8 * 8, group = op->heads / op->kv_heads, part = 0;
  int tile = 0, first, last;
  for (;; tile++) {
    tile_segments(plan, op, tile, &first, &last);
    if (tile == plan->tile_of[row]) break;
    part += (last - first) * op->kv_heads;
  }
  int from = (row - plan->tile_start[tile]) * group;
  for (int head = 0; head < op->heads; head++) {
    int start = part + head / group * (last - first), at = from + head % group;
    State all = make_state(part_state(plan, op, start), padded, ATTENTION_ROWS * group);
    for (int segment = 1; segment < last - first; segment++) {
      State more = make_state(part_state(plan, op, start + segment), padded, ATTENTION_ROWS * group);
      add_segment(&all, at, &more, at, padded);
    }
    float *to = out + (int64_t)head * op->head_dim;
    if (first < last) finish_head(&all, at, padded, op->head_dim, to);
    else memset(to, 0, (size_t)op->head_dim * 4);
  }
}

static void store_row(const Pass *pass, const Op *op, int row, const float *k, const float *v) {
  if (pass->slots[row] < 0) return;
  int64_t bytes = cache_head_bytes(pass->cache_format, op->head_dim);
  int64_t at = pass->slots[row] * bytes, next = pass->num_slots * bytes;
  for (int h = 0; h < op->kv_heads; h++, at += next, k += op->head_dim, v += op->head_dim) {
    narrow(pass->cache_format, k, op->head_dim, (char *)pass->keys[op->layer] + at);
    narrow(pass->cache_format, v, op->head_dim, (char *)pass->values[op->layer] + at);
  }
}

#endif
