/* The structs that Python fills in (kernels/program.py mirrors them) and the numbers they use. */
#ifndef ANYDECODE_LAYOUT_H
#define ANYDECODE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

/* Attention sums segments of this many positions by themselves, then adds them in order. */
enum { SEGMENT = 128 };
enum { KEY_BLOCK = 32, LANES = 8, QUANT_BLOCK = 32, ATTENTION_ROWS = 8 };

/* Formats and tile sizes are constants once inlined; plain C has no use for that. */
#ifdef ANYDECODE_SCALAR
#define INLINE static inline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

enum Format { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, NUM_FORMATS };

enum Code {
  OP_EMBED, OP_TAP, OP_GATHER, OP_NORM, OP_QUANTISE, OP_LINEAR, OP_LORA, OP_ROPE_TABLE, OP_ROPE,
  OP_STORE, OP_ATTEND, OP_MERGE, OP_GATED, OP_ADD, OP_SCALE, OP_SOFTCAP, OP_COPY, OP_EXPERTS
};

/* Where a value lives: an offset in floats per row into the workspace, or one of these. */
enum { BUFFER_STREAM = -1, BUFFER_LOGITS = -2, BUFFER_NONE = -3 };

enum Error { OK, ERROR_TOKEN, ERROR_SLOT, ERROR_TABLE, ERROR_ADAPTER, ERROR_MEMORY };

/* A matrix in groups of eight output columns, the lanes. */
typedef struct {
  const uint8_t *data;
  int64_t group_bytes;
  int32_t format, out_features, in_features, reserved;
} Matrix;

typedef struct {
  const float *down; /* [rank, in_features] */
  const float *up;   /* [rank, out_features], times the adapter's scale */
  int32_t rank, reserved;
} Lora;

typedef struct {
  int32_t code, barrier; /* barrier: begins a stage, after all that came before */
  int32_t layer, activation;
  int64_t a, b, c, out; /* buffers */
  int32_t width, width_out, heads, kv_heads, head_dim, groups, window, count;
  float x, y;
  const Matrix *matrix;
  const float *weight;
  const Matrix *const *experts; /* [gate, up, down][count] */
} Op;

typedef struct {
  int32_t layer, count;
  const int32_t *rows;
  float *out;
} Tap;

/* A token to pick from row `row` of the logits: that of the largest logit * inverse_temperature +
 * noise of this place, or of the largest logit where inverse_temperature is 0. */
typedef struct {
  double inverse_temperature;
  uint64_t seed;
  uint32_t place[3]; /* position, stream, attempt */
  int32_t row, pick, reserved;
} Choice;

/* The best of some tokens. */
typedef struct {
  double value;
  int64_t id;
} Found;

typedef struct {
  const Op *ops;
  int32_t num_prologue, first, last, head, num_ops; /* ops: prologue, layers, head */
  int32_t num_rows, num_logits, num_taps, num_layers, vocab_size, hidden_size;
  int32_t embed; /* whether the stream starts from tokens and inputs */
  int32_t cache_format, num_slots, num_tables, num_adapters, num_targets, num_choices;
  int32_t num_said, num_ends; /* 1 or more: see `said` */
  const int32_t *tokens, *positions, *slots, *table, *prefix, *tails, *tail_start, *tail_length;
  const int32_t *adapters, *logit_rows;
  const int32_t *const *tables;
  const int64_t *table_stride; /* entries from one layer to the next; 0 where layers share */
  const int32_t *table_length;
  int64_t num_tails;
  void *const *keys, *const *values;
  const float *inputs;
  float *stream, *logits, *workspace;
  int64_t head_offset; /* floats per row before the head's buffers */
  const Tap *taps;
  const Lora *loras;    /* [num_adapters, num_targets] */
  float *attention_scratch;
  int64_t attention_scratch_floats;
  Choice *choices;
  /* Tokens chosen one after the other: the pass's only choice, of its last row, then that of a pass
   * over the token just said, at the position behind it. It ends with one of `ends`, or `num_said`;
   * -1 stands behind the last where there are fewer. */
  int32_t *said;
  const int32_t *ends;
} Pass;

/* 32 activations: x = scale * q; `scaled_sum` = scale * (low + high). */
typedef struct {
  float scale, scaled_sum;
  int32_t low, high; /* sums of the first and the second 16 */
  int8_t q[QUANT_BLOCK];
} Activations;

/* Ops that no thread waits between: their parts are first stretches of rows, then the parts of each
 * op that is divided otherwise. */
typedef struct {
  int32_t first, last; /* ops */
  int32_t rows, row_parts;
  int32_t phase; /* of OP_EXPERTS, which stands alone */
  int64_t base;  /* floats per row before the buffers */
} Stage;

/* A pass as stages. Rows are attended to in tiles of neighbours that share a table. */
typedef struct {
  const Pass *pass;
  Stage *stages;
  int32_t *parts;      /* of each stage */
  int32_t *tile_start; /* [num_tiles + 1], rows */
  int32_t *tile_of;    /* of each row */
  float *states;       /* attention of the segments of each tile and key head, where divided */
  Found *found;        /* by each part of the last stage, of each choice; NULL: nothing is picked */
  int num_stages, num_tiles, threads;
} Plan;

typedef struct {
  const char *name;
  void (*run)(const Plan *plan, int stage, int part, int thread);
  void (*expect)(const Plan *plan, int stage, int thread);
  void (*repack)(const Matrix *to, const uint8_t *from, int64_t row_bytes, int first, int last);
  void (*linear)(const Matrix *w, const float *x, int n, const float *bias, float *out,
                 uint8_t *scratch);
  void (*unpack_row)(const Matrix *w, int row, float *out);
  int32_t (*argmax)(const float *logits, int64_t n);
  void (*largest)(const float *logits, int64_t n, int count, int32_t *ids, float *values);
  double (*logsumexp)(const float *logits, int64_t n);
  void (*search)(const Choice *choice, const float *logits, int64_t first, int64_t last,
                 Found *found);
} Kernels;

INLINE int has_min(int format) {
  return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K;
}
INLINE int is_super(int format) { return format == Q4_K || format == Q5_K || format == Q6_K; }
INLINE int is_float(int format) { return format == F32 || format == F16 || format == BF16; }
INLINE int five_bits(int format) { return format == Q5_0 || format == Q5_1 || format == Q5_K; }

INLINE int header_bytes(int format) { return has_min(format) ? 32 : 16; }

/* Bytes of one block of 32 k by 8 columns, without the header of a super-block. */
INLINE int block_bytes(int format) {
  switch (format) {
    case Q4_0: return 144;
    case Q4_1: return 160;
    case Q5_0: return 176;
    case Q5_1: return 192;
    case Q8_0: return 272;
    case Q4_K: return 144;
    case Q5_K: return 176;
    default: return 208;
  }
}

INLINE int64_t packed_group_bytes(int format, int in_features) {
  if (format == F32) return (int64_t)in_features * 32;
  if (is_float(format)) return (int64_t)in_features * 16;
  int64_t blocks = in_features / QUANT_BLOCK;
  int64_t bytes = blocks * block_bytes(format);
  return is_super(format) ? bytes + blocks / 8 * header_bytes(format) : bytes;
}

/* Bytes of one head's key or value in the cache: plain numbers, or GGUF's blocks Q8_0 and Q4_1. */
INLINE int64_t cache_head_bytes(int format, int head_dim) {
  int64_t blocks = (head_dim + QUANT_BLOCK - 1) / QUANT_BLOCK;
  if (format == Q8_0) return blocks * 34;
  if (format == Q4_1) return blocks * 20;
  return (int64_t)head_dim * (format == F32 ? 4 : 2);
}

/* What attention keeps of `heads` query heads over a stretch of keys: weighted sums of values
 * [heads, padded], sums of weights by lane [heads, 8] and largest scores [heads]. */
INLINE int64_t attention_state_floats(int padded, int heads) {
  return (int64_t)heads * (padded + 8) + (heads + 7) / 8 * 8;
}

INLINE int64_t attention_room_floats(int head_dim, int group) {
  int64_t padded = (head_dim + 7) / 8 * 8, heads = ATTENTION_ROWS * group;
  return (2 * KEY_BLOCK + 1) * padded + heads * (padded + KEY_BLOCK + 8 + 1) + 16 +
         2 * attention_state_floats((int)padded, (int)heads);
}

#endif
