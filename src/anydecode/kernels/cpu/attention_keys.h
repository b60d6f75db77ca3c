/* What attention reads: its scratch memory, the keys and values of positions, and the biases and masks
 * of scores. */
#ifndef ANYDECODE_ATTENTION_KEYS_H
#define ANYDECODE_ATTENTION_KEYS_H

#include "cache_vectors.h"
#include "plan.h"

/* Tile sizes in heads, the largest first, so that each load serves several sums and the sums fit the
 * registers. */
#ifdef HAS_WIDE_PAIRS
enum { MAX_HEADS = HEAD_TILE };
#define FOR_EACH_TILE(fold) fold(12) fold(8) fold(6) fold(4) fold(3) fold(2) fold(1)
#else
enum { MAX_HEADS = 3 };
#define FOR_EACH_TILE(fold) fold(3) fold(2) fold(1)
#endif

/* The online-softmax state over some keys, for each query head of a tile. */
typedef struct {
  float *sums;  /* [heads, padded] */
  float *total; /* [heads, 8]: sums of weights per lane */
  float *max;   /* [heads]: running maximum scores */
} State;

typedef struct {
  int kv_head, head_dim, padded, value_padded, group;
  int64_t bytes; /* of one head's key or value */
  const Op *op;
  const char *keys, *values; /* the key head's */
  const int32_t *table;
  int format;
} Heads;

/* Scratch memory of attention over an int8 cache; see integer_attention.h. */
typedef struct {
  Activations *q;      /* [blocks, rows, group]: the queries, in blocks as the keys */
  uint8_t *keys;       /* [2, 8 * blocks, 16, 4]: those of 16 positions side by side, plus 128 */
  uint16_t *key_scales;   /* float16 [blocks, KEY_BLOCK] */
  uint8_t *values; /* [SEGMENT / 2, blocks, 2, 16, 2]: those of two positions side by side; see
                    * b32_interleave */
  uint16_t *value_scales; /* float16 [blocks, SEGMENT] */
  float *factors;      /* [blocks, SEGMENT]: from a position's weight to an integer */
  float *units;        /* [blocks]: what an integer stands for, as a factor of a value */
  float *scores;       /* [rows, group, SEGMENT] */
  int16_t *weights;    /* [blocks, HEAD_TILE, SEGMENT] */
} Integers;

/* One thread's scratch memory. */
typedef struct {
  const char *key[KEY_BLOCK], *value[KEY_BLOCK]; /* the vectors of one block */
  int format;             /* of those vectors */
  float *keys, *values;   /* [32, padded]: vectors that were converted beforehand */
  const float *zeros;     /* [padded + 8], zero in every format: for positions without a slot */
  float *q;             /* [rows, group, padded] */
  float *panels;        /* the same as panels [padded, 16 heads], the last one maybe [padded, 8] */
  int panel_heads;      /* the heads in them; 0: there are none */
  float *scores;        /* [rows, group, 32] */
  float *block_max;     /* [rows, group]: maximum scores of a block */
  float *rescale;       /* [rows, group, 8]: factor for the earlier sums, in every lane */
  float *slopes, *row_positions; /* [rows, group]: of biases; slopes: with a reach, the heads */
  float start;                   /* the first position of the block */
  int end;                       /* of the positions of the tile's table in this part */
  Heads next;                    /* of the thread's next part; its table starts at its positions */
  int num_next;                  /* of these positions; 0: none */
  State segment, all;
  Integers integers;
} Scratch;

static State make_state(float *base, int padded, int heads) {
  State state = {base, base + (int64_t)heads * padded, 0};
  state.max = state.total + heads * 8;
  return state;
}

static Integers make_integers(float *base, int blocks, int heads) {
  Integers integers = {.values = (uint8_t *)base};
  float *keys = base + SEGMENT * QUANT_BLOCK / 4 * blocks;
  integers.keys = (uint8_t *)keys;
  float *scales = keys + KEY_BLOCK * QUANT_BLOCK / 4 * blocks;
  integers.key_scales = (uint16_t *)scales;
  integers.value_scales = integers.key_scales + KEY_BLOCK * blocks;
  integers.factors = scales + (KEY_BLOCK + SEGMENT) / 2 * blocks;
  integers.scores = integers.factors + SEGMENT * blocks;
  float *weights = integers.scores + (int64_t)heads * SEGMENT;
  integers.weights = (int16_t *)weights;
  float *q = weights + HEAD_TILE * SEGMENT / 2 * blocks;
  integers.q = (Activations *)q;
  integers.units = q + (int64_t)heads * blocks * (int)(sizeof(Activations) / 4);
  return integers;
}

static Scratch make_scratch(float *base, int padded, int group) {
  int heads = ATTENTION_ROWS * group;
  Scratch scratch = {.keys = base, .values = base + KEY_BLOCK * padded};
  float *zeros = scratch.values + KEY_BLOCK * padded;
  scratch.zeros = memset(zeros, 0, (size_t)(padded + 8) * 4);
  scratch.q = zeros + padded + 8;
  for (int j = 0; j < KEY_BLOCK; j++)
    scratch.key[j] = scratch.value[j] = (const char *)scratch.zeros;
  scratch.scores = scratch.q + (int64_t)heads * padded;
  scratch.rescale = scratch.scores + heads * KEY_BLOCK;
  scratch.block_max = scratch.rescale + heads * 8;
  scratch.slopes = scratch.block_max + heads;
  scratch.row_positions = scratch.slopes + heads;
  float *states = scratch.row_positions + heads;
  scratch.segment = make_state(states, padded, heads);
  scratch.all = make_state(states + attention_state_floats(padded, heads), padded, heads);
  float *end = states + 2 * attention_state_floats(padded, heads);
  scratch.panels = (float *)(((uintptr_t)end + 63) / 64 * 64);
  int blocks = (padded + QUANT_BLOCK - 1) / QUANT_BLOCK;
  float *values = scratch.panels + (int64_t)heads * padded;
  scratch.integers = make_integers(values, blocks, heads);
  return scratch;
}

INLINE uint32_t gather_as(int format, int padded, const Heads *h, const int32_t *slots, int count,
                          Scratch *scratch, int at) {
  const char *keys = h->keys, *values = h->values, *zeros = (const char *)scratch->zeros;
  int is_loaded = scratch->format == format && (h->head_dim == padded || format == Q8_0);
  int64_t bytes = h->bytes;
  uint32_t present = 0;
  int j = at;
  for (; j < at + count; j++, slots++) {
    int64_t slot = *slots;
    if (slot < 0) {
      scratch->key[j] = scratch->value[j] = zeros;
      continue;
    }
    const char *key = keys + slot * bytes, *value = values + slot * bytes;
    present |= 1u << j;
    if (is_loaded) {
      scratch->key[j] = key;
      scratch->value[j] = value;
      continue;
    }
    decode_vector(format, key, h->head_dim, padded, scratch->keys + j * padded);
    scratch->key[j] = scratch->value[j] = (const char *)(scratch->keys + j * padded);
    if (value == key) continue;
    decode_vector(format, value, h->head_dim, padded, scratch->values + j * padded);
    scratch->value[j] = (const char *)(scratch->values + j * padded);
  }
  /* Scores are computed for up to 16 keys at once, and values are read in pairs. What an earlier block
   * left here may be of another format. */
  for (; j % 16; j++) scratch->key[j] = scratch->value[j] = zeros;
  return present;
}

/* Find the keys and values of `count` positions. Bit j of the result: position j has a slot. */
static uint32_t gather(const Heads *h, const int32_t *slots, int count, Scratch *scratch, int at) {
  switch (h->format) {
    case F32: return gather_as(F32, h->padded, h, slots, count, scratch, at);
    case F16: return gather_as(F16, h->padded, h, slots, count, scratch, at);
    case Q8_0: return gather_as(Q8_0, h->padded, h, slots, count, scratch, at);
    case Q4_1: return gather_as(Q4_1, h->padded, h, slots, count, scratch, at);
    default: return gather_as(BF16, h->padded, h, slots, count, scratch, at);
  }
}

enum { BLOCKS_AHEAD = 4 };

/* Prefetch slots a few blocks before they are used: they may be too scattered for the processor's
 * own prefetcher. Inlined, since GCC takes a function that only prefetches for one without effect,
 * and removes its calls. */
INLINE void prefetch_slots(const Heads *h, const int32_t *slots, int count) {
  const char *keys = h->keys, *values = h->values;
  /* The last line of a slot is prefetched with the one that follows in memory. */
  int64_t bytes = h->bytes, whole = bytes > 64 ? bytes / 64 * 64 : bytes;
  for (int j = 0; j < count; j++) {
    if (slots[j] < 0) continue;
    int64_t from = slots[j] * bytes;
    int64_t to = from + (j + 1 < count && slots[j + 1] == slots[j] + 1 ? whole : bytes);
    for (int64_t b = from; b < to; b += 64) {
      __builtin_prefetch(keys + b, 0, 2);
      if (values != keys) __builtin_prefetch(values + b, 0, 2);
    }
  }
}

/* Prefetch the block that lies BLOCKS_AHEAD blocks after the position `start`. Behind the end of this
 * part's positions those of the thread's next part follow. */
INLINE void prefetch_ahead(const Heads *h, const Scratch *scratch, int start) {
  int from = start + BLOCKS_AHEAD * KEY_BLOCK, left = scratch->end - from;
  int here = left < 0 ? 0 : left < KEY_BLOCK ? left : KEY_BLOCK;
  prefetch_slots(h, h->table + from, here);
  from = left < 0 ? -left : 0;
  left = scratch->num_next - from;
  int there = left < KEY_BLOCK - here ? left : KEY_BLOCK - here;
  if (there > 0) prefetch_slots(&scratch->next, scratch->next.table + from, there);
}

/* The number of a key's relative position, `distance` positions behind the row. */
INLINE int relative_column(const Op *op, int distance) {
  int reach = op->reach, d = distance < -reach ? -reach : distance > reach ? reach : distance;
  return (int)op->slopes[d + reach];
}

/* Scores of the positions [j, j + 8) of the block plus the products of head `at` with relative
 * positions. */
static f8 add_relative(const Op *op, const Scratch *scratch, int at, int j, int padded, f8 scores) {
  const float *q = scratch->q + (int64_t)at * padded;
  const float *tables = op->slopes + 2 * op->reach + 1;
  int64_t head = (int64_t)scratch->slopes[at], size = (int64_t)op->groups * padded;
  const float *keys = tables + head * size, *queries = keys + op->heads * size;
  int distance = (int)(scratch->start - scratch->row_positions[at]) + j;
  float found[8];
  for (int i = 0; i < 8; i++) {
    int64_t offset = (int64_t)relative_column(op, distance + i) * padded;
    f8 sum = f8_set(0.0f);
    for (int d = 0; d < padded; d += 8) {
      sum = f8_fma(f8_load(q + d), f8_load(keys + offset + d), sum);
      f8 key = load_as(scratch->format, scratch->key[j + i], d);
      sum = f8_fma(key, f8_load(queries + offset + d), sum);
    }
    found[i] = f8_sum(sum);
  }
  return f8_fma(f8_load(found), f8_set(op->x), scores);
}

/* Scores of the positions [j, j + 8) of the block plus the biases of head `at`. */
INLINE f8 add_biases(const Op *op, const Scratch *scratch, int at, int j, int padded, f8 scores) {
  if (op->groups) return add_relative(op, scratch, at, j, padded, scores);
  static const float lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  float distance = scratch->start - scratch->row_positions[at] + (float)j;
  if (op->reach) {
    const float *biases = op->slopes + (int64_t)scratch->slopes[at] * (2 * op->reach + 1);
    float found[8];
    for (int i = 0; i < 8; i++) {
      int d = (int)distance + i;
      d = d < -op->reach ? -op->reach : d > op->reach ? op->reach : d;
      found[i] = biases[d + op->reach];
    }
    return f8_add(scores, f8_load(found));
  }
  f8 distances = f8_add(f8_set(distance), f8_load(lanes));
  if (op->count) distances = f8_sub(f8_set(0.0f), f8_abs(distances));
  return f8_fma(f8_set(scratch->slopes[at]), distances, scores);
}

/* Store the scaled products of head `at` with eight keys as scores, -inf where not visible: bit k of
 * `eight`. Returns the scores. */
INLINE f8 finish_eight(const Op *op, const Scratch *scratch, int at, int j, int padded,
                       uint32_t eight, f8 s, float *to) {
  if (op->y > 0) s = f8_mul(f8_set(op->y), f8_tanh(f8_mul(s, f8_set(1.0f / op->y))));
  if (op->slopes) s = add_biases(op, scratch, at, j, padded, s);
  f8_store(to, s);
  if (eight != 255) {
    for (int k = 0; k < 8; k++)
      if (!((eight >> k) & 1)) to[k] = -INFINITY;
    s = f8_load(to);
  }
  return s;
}

/* The mask of the block's positions that row r attends to. */
INLINE uint32_t visible(const Pass *pass, const Op *op, int r, int start) {
  int32_t end = row_end(pass, op, r) - start;
  int32_t begin = row_begin(pass, op, r) - start;
  if (end <= 0 || begin >= KEY_BLOCK) return 0;
  uint32_t bits = end >= KEY_BLOCK ? 0xffffffffu : (1u << end) - 1;
  return begin > 0 ? bits & ~((1u << begin) - 1) : bits;
}

/* The slots of row r's table in the layer of `op`. */
INLINE const int32_t *table_of(const Pass *pass, const Op *op, int r) {
  int32_t table = pass->table[r];
  return pass->tables[table] + pass->table_stride[table] * op->layer;
}

/* Find the keys and values of the positions [start, end) of row r. Bit j of the result: position
 * start + j has a slot. */
static uint32_t gather_row(const Pass *pass, const Heads *h, int r, int start, int end,
                           Scratch *scratch) {
  int32_t prefix = pass->prefix[r];
  int32_t middle = prefix < start ? start : prefix < end ? prefix : end;
  uint32_t present = gather(h, table_of(pass, h->op, r) + start, middle - start, scratch, 0);
  if (middle == end) return present;
  const int32_t *tail = pass->tails + pass->tail_start[r] + (middle - prefix);
  return present | gather(h, tail, end - middle, scratch, middle - start);
}

#endif
