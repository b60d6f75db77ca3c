/* The structs that Python fills in (kernels/library.py mirrors them) and their constants. */
#ifndef ANYDECODE_LAYOUT_H
#define ANYDECODE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

/* Attention sums each segment of this many positions separately and adds the segments in order. */
enum { SEGMENT = 128 };
enum { KEY_BLOCK = 32, LANES = 8, QUANT_BLOCK = 32, ATTENTION_ROWS = 16 };
enum { HEAD_TILE = 12 }; /* the most query heads that attention computes side by side */
enum { GROUP = 2 * LANES }; /* output columns of a matrix that are stored together */

/* Inlining makes formats and tile sizes compile-time constants; plain C does not need that. */
#ifdef ANYDECODE_SCALAR
#define INLINE static inline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

enum Format {
  F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1,
  Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, TQ1_0, TQ2_0,
  IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, PTQ161, NF4, FP4, NUM_FORMATS
};

enum Code {
  OP_EMBED, OP_CAPTURE, OP_GATHER, OP_NORM, OP_QUANTISE, OP_LINEAR, OP_LORA, OP_ROPE_TABLE, OP_ROPE,
  OP_STORE, OP_ATTEND, OP_MERGE, OP_GATED, OP_ADD, OP_SCALE, OP_SOFTCAP, OP_COPY, OP_EXPERTS,
  OP_LAYER_NORM, OP_ACTIVATE, OP_ADD_POSITION, OP_GATE_PARTS, OP_STORE_INPUTS, OP_CONVOLVE,
  OP_SCAN, OP_GROUPED_LINEAR, OP_SPLIT, OP_JOIN, OP_TOKEN_ROW,
  OP_CLAMP, OP_MULTIPLY, OP_CUT_OFF, OP_MATCH_MAGNITUDE, OP_MIX, OP_SPREAD,
  OP_SHIFT, OP_STORED, OP_BLOCK_CONVOLVE, OP_INDEX, OP_SELECT,
  OP_STORE_INDEX, OP_POOL, OP_HYPER, OP_COLLAPSE, OP_SOFTMAX, OP_TOKEN, OP_NGRAM
};

/* interface.py: RULES */
enum Rule {
  RULE_CONV, RULE_SSD, RULE_DELTA, RULE_SELECTIVE, RULE_WKV, RULE_LRU, RULE_KDA, RULE_RETENTION,
  RULE_POOL, RULE_WKV6, RULE_GLA, RULE_MLSTM
};
enum { MAX_WINDOW = 64 }; /* positions of a convolution */
enum { MAX_POOL = 512 };  /* positions that an entry reads */
enum { MAX_STREAMS = 64 };
enum { MAX_SELECTIONS = 4 }; /* kinds of layers with selections */
enum { MAX_BRANCH_STATES = 16 }; /* see kernels/recurrent.py */

/* The buffer of a value: an offset into the workspace, in floats per row, or one of these. */
enum { BUFFER_STREAM = -1, BUFFER_LOGITS = -2, BUFFER_NONE = -3 };

enum Error { OK, ERROR_TOKEN, ERROR_SLOT, ERROR_TABLE, ERROR_ADAPTER, ERROR_MEMORY };

/* A matrix packed in groups of sixteen output columns, one per lane of a pair of vectors. Its values
 * are multiplied by `scale`. `grid`: the points of IQ1, IQ2 and IQ3 (see grids.h), or NULL. `columns`: of PTQ161, the
 * order of its inputs, those with signs first, and then their scales in bfloat16; else NULL. `order`: which input each
 * stored one is, [in_features]; NULL: they are in order. */
typedef struct {
  const uint8_t *data, *grid;
  int64_t group_bytes;
  int32_t format, out_features, in_features;
  float scale;
  const uint16_t *columns;
  const int32_t *order;
} Matrix;

typedef struct {
  const float *down; /* [rank, in_features] */
  const float *up;   /* [rank, out_features], multiplied by the adapter's scale */
  int32_t rank, reserved;
} Lora;

/* What experts are: MLPs, or one matrix each (interface.py: expert_products, expert_sums). */
typedef enum { EXPERT_MLPS, EXPERT_PRODUCTS, EXPERT_SUMS } ExpertKind;

/* How experts are chosen and weighted, and the biases of their matrices. */
typedef struct {
  const float *bias[3];        /* of gate, up and down: [experts, out_features]; NULL: none */
  const float *selection_bias; /* [experts], added to the scores for the choice; NULL: none */
  const float *factors;        /* [experts], of their weights; NULL: none */
  const int32_t *token_experts; /* [num_tokens, experts per row], by token; NULL: they are chosen */
  int32_t normalise, is_sigmoid, num_groups, groups_per_row;
  float scale;
  int32_t scores_per_group; /* whose sum is a group's score: 1 or 2 */
  int32_t scales_inputs;    /* whether weights multiply the experts' inputs, not their outputs */
  int32_t is_given;         /* whether the router's numbers are the weights; 0: not chosen */
  int32_t is_plain;         /* whether experts have no gate: "gate" and "up" are the same matrix */
  float jitter;             /* of the scoring "sparsemixer"; negative with another */
  int32_t block_experts;    /* experts that rows which see the same may choose from; 0: all */
  int32_t is_root; /* whether scores are roots of softplus, not sigmoids; with is_sigmoid */
  int32_t num_tokens;
  int32_t num_identity; /* experts, the last ones, that have no matrices and return their input */
  int32_t by_logits;    /* whether experts are chosen by their logits, not by their scores */
  const float *output_factors; /* [width_out], of an expert's output, which is normed; NULL: none */
  float output_eps;
  int32_t logits_per_expert; /* consecutive ones, whose chosen weights are added */
  int32_t kind;              /* an ExpertKind */
  int32_t num_parts;         /* of an expert's numbers in a row of all, with one matrix per expert */
} Routing;

/* A convolution and a recurrence (interface.py: Recurrence). */
typedef struct {
  const float *conv; /* [window, width] */
  const float *conv_bias, *decay, *step_bias, *skip; /* conv_bias, skip: NULL: none */
  const float *key_scale, *key_rate, *bonus; /* of RULE_WKV, RULE_WKV6 */
  const float *norm, *norm_bias;             /* of the same; NULL: none */
  int32_t rule, width, window, activation, heads, head_dim, groups, state_size, num_gates;
  float min_step, max_step, norm_eps, max_strength;
  float min_exponent; /* of RULE_KDA; 0: none */
  int32_t has_tiled_keys;
} Recurrence;

/* The rows of a head's state. */
INLINE int state_rows(const Recurrence *shape) {
  return shape->head_dim + (shape->rule == RULE_MLSTM ? 2 : 0);
}

typedef struct {
  int32_t code, barrier; /* barrier: starts a stage, which waits for all earlier ops */
  int32_t layer, activation;
  int64_t a, b, c, out; /* buffers */
  int32_t width, width_out, heads, kv_heads, head_dim, groups, window, count;
  /* is_latent: values are the first value_dim numbers of the only key head, and kv_heads are groups
   * of query heads. Other values have room for head_dim numbers in a slot. */
  int32_t value_dim, is_latent;
  int32_t chunk, reach; /* chunk: of chunked attention, in positions; 0: none */
  int32_t top_k;        /* positions that each row attends to (selection.h); 0: all that it sees */
  int32_t index_dim;    /* numbers of an indexer's key, stored after the heads' values; 0: none */
  int32_t block, num_local; /* positions are selected in blocks, of which the last ones always */
  int32_t has_block_keys; /* whether an indexer's key is that of a whole block */
  int32_t entry;     /* positions of an entry, which is the second key head of the last one; 0: none */
  int32_t selection; /* the kind of selection, from 1 on; 0: a row attends to what it sees */
  float x, y;
  const Matrix *matrix;
  const float *weight;
  const Matrix *const *experts; /* [gate, up, down][count]; of a grouped product: [count] */
  const Routing *routing;
  const Recurrence *recurrence;
  const float *slopes; /* of linear biases: [heads]; with a reach the biases themselves, by distance:
                        * [heads][2 * reach + 1]; with `groups` relative positions their numbers
                        * by distance, [2 * reach + 1], then their keys and their queries,
                        * [heads][groups][head_dim, rounded up to 8]; NULL: none */
} Op;

/* Rows whose hidden states after `layer` layers are copied to `out`, `stride` floats apart. */
typedef struct {
  int32_t layer, count;
  const int32_t *rows;
  float *out;
  int64_t stride;
} Capture;

/* Top-k (0: all), then top-p, then min-p, over the scores logit / divisor in float32. */
typedef struct {
  double top_p;
  float divisor, min_gap; /* min_gap: the logarithm of min-p; -inf: none */
  int32_t top_k, reserved;
} Truncation;

/* A token to sample from row `row` of the logits: the argmax of logit * inverse_temperature + the
 * noise of this seed and counter, or the argmax of the logits where inverse_temperature is 0. With a
 * truncation, the argmax of score + noise over the tokens that it keeps (truncate.h). */
typedef struct {
  double inverse_temperature;
  uint64_t seed;
  uint32_t counter[3]; /* of Philox: position, stream, attempt */
  int32_t row, token, reserved; /* token: the result; -1: left to the caller */
  const Truncation *truncation; /* NULL: none */
} SampleSpec;

/* The best token of a range of ids, and its score. */
typedef struct {
  double score;
  int64_t token;
} BestToken;

enum { MAX_SEQUENCES = 64 }; /* of a multi-step pass (interface.py: MAX_SEQUENCES) */
enum { MAX_DRAFTS = 32, MAX_MATCH = 64, NUM_BINS = 10 };

/* A text that drafts are copied from. What generation continues has just matched the `match` tokens
 * before `position` (0: none). */
typedef struct {
  int32_t *tokens; /* [length]; the first text has room for the tokens of a pass */
  int64_t length, position;
  int32_t match;
  int32_t num_outcomes; /* result: of `outcomes` */
  /* Result: for each token that a match has predicted, twice the match's length, and 1 more if it
   * was right; [step_limits of the sequence]. */
  int32_t *outcomes;
  /* The probability that the token after a match of so many tokens is right, [MAX_MATCH + 1]. */
  const double *chances;
} CopyText;

typedef struct Pass Pass;

/* A drafter that reads the target's states, in a multi-step pass; see drafting.h. Row i of its
 * arrays is position first + i of the text, where `first` is the first one that it has not read. */
typedef struct {
  const Pass *pass; /* its program, and rows whose positions, slots and prefixes are set */
  const Pass *projection; /* a head without layers: from the target's states to its inputs */
  Capture *captures; /* of the target, side by side in a row of `states` */
  int32_t *tokens;   /* of the rows */
  float *states;     /* of the target at the positions before, [rows, projection's hidden_size] */
  /* The probability that its token is right if those before it are, by depth and by the probability
   * that it gives the token, [num_depths, NUM_BINS], and the means by depth. */
  const double *chances, *mean_chances;
  /* The probability that the sibling of its first token is right, by twice the probability that it
   * gives the sibling, [NUM_BINS]; NULL: none is drafted. */
  const double *sibling_chances;
  int32_t *table; /* of the target, its only one: accepted siblings change slots with other rows */
  double rate;    /* tokens per second of a step with its draft */
  double seconds; /* for one token */
  int32_t num_captures, num_depths, max_drafts;
  int32_t num_due;   /* steps in which it still drafts whatever its rate is */
  int32_t num_known; /* rows with tokens and states; counts on, as does the following */
  int32_t num_read;  /* rows that are in its cache */
  int32_t *num_drafted;  /* result: of each pass */
  int32_t *num_unread;   /* result: rows that it has read before drafting, of each pass */
  double *draft_seconds; /* result: of each pass */
  int32_t *siblings;     /* result: found in each pass; -1: none */
  int32_t *num_siblings; /* result: those that are scored, 0 or 1, of each pass */
  float *sibling_probabilities; /* result: as it gives them, of each pass */
} Drafter;

/* What one sequence of a multi-step pass drafts from, and its drafts. */
typedef struct {
  CopyText *texts; /* the first is the one that generation continues; it grows */
  int32_t num_texts, reserved; /* 0 texts: it has no drafts */
  int32_t *counts;  /* result: the drafts of each pass */
  int32_t *sources; /* result: of each pass's draft: a text, or num_texts for the drafter */
  int32_t *drafts;  /* result: of all passes in order, [max_passes * max_drafts] */
  float *probabilities; /* result: of the same, as the drafter gives them */
  double weight; /* what a token of it counts for in the expected tokens */
} SequenceDrafts;

/* Drafts of a multi-step pass; see drafting.h. */
typedef struct {
  SequenceDrafts *sequences; /* [num_samples] */
  const double *costs;       /* seconds of a pass with 0 to max_drafts drafts of all sequences */
  Drafter *drafter;          /* of a single sequence; NULL: none */
  double min_gain, min_probability;
  int32_t max_drafts, max_passes;
  int32_t num_passes; /* result */
  int32_t reserved;
  double *seconds; /* result: of each pass */
} Drafting;

struct Pass {
  const Op *ops;
  int32_t num_prologue, first, last, head, num_ops; /* ops: prologue, layers, head */
  int32_t num_rows, num_logits, num_captures, num_layers, head_size, hidden_size;
  int32_t embed; /* whether the hidden states start from tokens and inputs */
  int32_t cache_format, num_slots, num_tables, num_adapters, num_targets, num_samples;
  int32_t num_steps, num_end_tokens; /* num_steps: at least 1; see multi_step_tokens */
  const int32_t *tokens, *positions, *slots, *table, *prefix, *tails, *tail_start, *tail_length;
  const int32_t *adapters, *logit_rows;
  const int32_t *const *tables;
  const int64_t *table_stride; /* entries from one layer to the next; 0: one table for all layers */
  const int32_t *table_length;
  int64_t num_tails;
  void *const *keys, *const *values;
  const float *inputs;
  float *stream, *logits, *workspace;
  int64_t head_offset; /* floats per row before the head's buffers */
  const Capture *captures;
  const Lora *loras;    /* [num_adapters, num_targets] */
  float *attention_scratch;
  int64_t attention_scratch_floats;
  SampleSpec *samples;
  /* The tokens of a multi-step pass, [num_samples, num_steps]: each sequence's sample, of its last
   * row, then that of a pass over that token at the next position, and so on. A sequence ends with
   * one of `end_tokens`, at its limit, or where its sample is left to the caller. */
  int32_t *multi_step_tokens;
  int32_t *step_counts; /* the tokens of each sequence, then the passes of all steps */
  const int32_t *end_tokens;
  const volatile int32_t *interrupt; /* NULL, or not 0 once no further step is to begin */
  /* Of drafts, which end one by one; else NULL: the probability of each of these tokens (at
   * temperature 1). A draft also ends where their product falls below its `min_probabilities`. */
  float *step_probabilities;
  /* Of a head without all tokens: those of its columns, ascending, [head_size]; else NULL. Samples
   * are of `spread` [vocab_size], which is -inf but at these tokens. */
  const int32_t *head_tokens;
  float *spread;
  float *const *recurrent_inputs, *const *states; /* by layer; NULL: none */
  /* The steps of the recurrences (kernels/recurrent.py: Scan), in num_runs runs. State -2 - b is the
   * scratch memory's state of branch b. */
  const int32_t *scan_start, *scan_first, *scan_slots, *scan_rows, *scan_saves;
  int32_t num_runs, scan_lead;
  int32_t vocab_size;
  int32_t carries_states; /* whether the input of a further step is the last row's hidden state */
  int32_t team; /* of the threads that run the pass */
  Drafting *drafting; /* of a multi-step pass with a row per sequence; NULL: its steps have no drafts */
  const int32_t *step_limits; /* of a multi-step pass: the maximum number of tokens of each sequence */
  const double *min_probabilities;
  /* The positions that the last indexer has selected for each row, [rows, groups, top_k], at
   * `selected_rows` if it is not NULL. */
  int32_t *selected;
  const int32_t *selected_rows;
  /* Result, added to: the experts that rows have chosen in all layers, the bytes of their matrices,
   * and those of all experts of these layers. */
  int64_t *expert_reads;
};

/* A block of 32 quantised activations: x = scale * q, scaled_sum = scale * (low + high). */
typedef struct {
  float scale, scaled_sum;
  int32_t low, high; /* sums of the first and the last 16 q */
  int8_t q[QUANT_BLOCK];
} Activations;

/* Consecutive ops without a barrier between them. The first parts are ranges of rows, for the ops
 * that work row by row; the others are parts of the ops that are divided in another way. */
typedef struct {
  int32_t first, last; /* ops */
  int32_t rows, row_parts;
  int32_t phase; /* of OP_EXPERTS, which is a stage by itself */
  int64_t base;  /* floats in the workspace before the buffers */
} Stage;

typedef struct Selection Selection;

/* A pass divided into stages. Attention works on tiles: consecutive rows that share a table, or whose
 * tables start with the same slots. */
typedef struct Plan {
  const Pass *pass;
  Stage *stages;
  int32_t *parts;      /* of each stage */
  int32_t *tile_start; /* [num_tiles + 1], rows */
  int32_t *tile_of;    /* of each row */
  int32_t *shared;     /* of each row: the first positions whose slots are those of its tile's first row */
  float *states;       /* of split attention: by tile, key head and segment */
  BestToken *best_tokens; /* [num_samples, parts of the last stage]; NULL: no sampling */
  int num_stages, num_tiles, threads;
  int tile_rows; /* of the largest tile */
  int groups; /* tables from `first_selected` on are as many in a row, for equal parts of key heads */
  int32_t first_selected;
  Selection *selections[MAX_SELECTIONS]; /* by kind; NULL: no row has a table of its own */
} Plan;

/* Of a pass with rows that attend to other positions than they see: see selection.h. */
struct Selection {
  Plan plan; /* of attention: the tables of these rows have the slots that they attend to */
  int32_t *number; /* of each row of the pass: that of its own table, or -1 */
  int32_t *rows;   /* [num_rows], ascending: those that some positions are selected for */
  int32_t *scored; /* of each row of the pass: its index in `rows`, or -1 */
  int32_t *slots;  /* [tables, groups, stride] */
  /* [num_rows * groups or threads, longest]: the scores, as integers of the same order */
  uint32_t *orders;
  int64_t longest, stride;
  int num_rows, top_k, groups;
  int is_by_row; /* whether a part of OP_INDEX is a row, not some positions of one */
};

typedef struct {
  const char *name;
  void (*run)(const Plan *plan, int stage, int part, int thread);
  void (*prefetch)(const Plan *plan, int stage, int thread);
  void (*repack)(const Matrix *to, const uint8_t *from, int64_t row_bytes, int first, int last);
  void (*linear)(const Matrix *w, const float *x, int n, const float *bias, float *out,
                 uint8_t *scratch);
  void (*unpack_row)(const Matrix *w, int row, float *out);
  int32_t (*argmax)(const float *logits, int64_t n);
  void (*top_k)(const float *logits, int64_t n, int count, int32_t *ids, float *values);
  double (*logsumexp)(const float *logits, int64_t n);
  double (*exponentials)(const float *x, int64_t n, float *weights);
  void (*sample)(const SampleSpec *spec, const float *logits, int64_t first, int64_t last,
                 BestToken *best);
  int32_t (*sample_truncated)(const SampleSpec *spec, const float *logits, int64_t n);
} Kernels;

INLINE int has_min(int format) {
  return format == Q4_1 || format == Q5_1 || format == Q2_K || format == Q4_K || format == Q5_K;
}
/* Whether the halves of a block have separate scales. */
INLINE int has_halves(int format) {
  return format == Q2_K || format == Q3_K || format == Q6_K || format == NVFP4 ||
         format == IQ1_M || format == IQ2_XS || format == IQ2_S;
}
/* Whether codes select points of a grid. Those of IQ3_S, which are many, are unpacked: its signed
 * numbers are 16 values. */
INLINE int has_grid(int format) { return format >= IQ1_S && format <= IQ3_XXS; }
INLINE int is_ternary(int format) { return format == TQ1_0 || format == TQ2_0; }
INLINE int is_two_bit(int format) {
  return format == Q2_K || format == Q3_K || is_ternary(format);
}
/* Whether codes are indices into a table of 16 values of two bytes each. */
INLINE int has_wide_table(int format) { return format == NF4 || format == FP4; }
/* Whether codes are indices into a table of 16 values. */
INLINE int has_table(int format) {
  return format == IQ4_NL || format == IQ4_XS || format == MXFP4 || format == NVFP4 ||
         format == IQ3_S || has_wide_table(format);
}
/* Whether products multiply signed bytes: numbers that are too large for sums of 16 bits. */
INLINE int has_bytes(int format) {
  return format == Q8_0 || format == IQ4_NL || format == IQ4_XS || has_grid(format) ||
         has_wide_table(format);
}
/* Whether the blocks of a super-block have a scale of one signed byte each. */
INLINE int has_byte_scale(int format) { return format == IQ4_XS || format == IQ3_S; }
INLINE int is_super(int format) {
  return format == Q2_K || format == Q3_K || format == Q4_K || format == Q5_K || format == Q6_K ||
         has_byte_scale(format) || is_ternary(format) || has_grid(format) ||
         has_wide_table(format);
}
/* Blocks of a super-block. */
INLINE int super_blocks(int format) { return has_wide_table(format) ? 2 : 8; }
INLINE int is_float(int format) { return format == F32 || format == F16 || format == BF16; }
/* Whether products read rows of floats, not of quantised blocks. */
INLINE int reads_floats(int format) { return is_float(format) || format == PTQ161; }
INLINE int is_five_bit(int format) { return format == Q5_0 || format == Q5_1 || format == Q5_K; }

/* Bytes of the scales of a block or super-block: float16, but MXFP4 has exponents of one byte,
 * NVFP4 numbers of one byte for each half, and NF4 and FP4 have float32. */
INLINE int header_bytes(int format) {
  if (format == MXFP4) return GROUP;
  if (has_wide_table(format)) return 4 * GROUP;
  return (has_min(format) ? 4 : 2) * GROUP;
}

/* Bytes of one block of 32 inputs by 16 columns, without the header of a super-block. */
INLINE int block_bytes(int format) {
  switch (format) {
    case Q4_0: return 288;
    case Q4_1: return 320;
    case Q5_0: return 352;
    case Q5_1: return 384;
    case Q8_0: return 544;
    case Q2_K: return 160;
    case Q3_K: return 224;
    case IQ4_NL: return 288;
    case IQ4_XS: return 272;
    case MXFP4: return 272;
    case NVFP4: return 288;
    case TQ1_0:
    case TQ2_0: return 128;
    case NF4:
    case FP4: return 256;
    case IQ1_S: return 96;
    case IQ1_M: return 112;
    case IQ2_XXS: return 144;
    case IQ2_XS:
    case IQ2_S: return 160;
    case IQ3_XXS: return 208;
    case IQ3_S: return 272;
    case Q4_K: return 288;
    case Q5_K: return 352;
    default: return 416;
  }
}

/* How many inputs of a matrix in PTQ161 have four bits: a fifth, rounded to nearest. */
INLINE int ptq161_salient(int in_features) { return (in_features + 2) / 5; }

/* Groups of a matrix; the last one may have fewer columns. */
INLINE int column_groups(const Matrix *w) { return (w->out_features + GROUP - 1) / GROUP; }

INLINE int64_t packed_group_bytes(int format, int in_features) {
  if (format == PTQ161)
    return 2 * (64 + (int64_t)in_features + 3 * ptq161_salient(in_features));
  if (is_float(format)) return (int64_t)in_features * GROUP * (format == F32 ? 4 : 2);
  int64_t blocks = in_features / QUANT_BLOCK;
  int64_t bytes = blocks * block_bytes(format);
  return is_super(format) ? bytes + blocks / super_blocks(format) * header_bytes(format) : bytes;
}

/* Bytes of one head's key or value in the cache: plain numbers, or GGUF's Q8_0 or Q4_1 blocks. */
INLINE int64_t cache_head_bytes(int format, int head_dim) {
  int64_t blocks = (head_dim + QUANT_BLOCK - 1) / QUANT_BLOCK;
  if (format == Q8_0) return blocks * 34;
  if (format == Q4_1) return blocks * 20;
  return (int64_t)head_dim * (format == F32 ? 4 : 2);
}

/* Floats of the attention state of `heads` query heads over some keys: weighted sums of values
 * [heads, padded], sums of weights per lane [heads, 8] and maximum scores [heads]. */
INLINE int64_t attention_state_floats(int padded, int heads) {
  return (int64_t)heads * (padded + 8) + (heads + 7) / 8 * 8;
}

/* Floats of scratch memory that one thread needs for a recurrence: a head's state, the inputs of a
 * step, and the states of a tree's branches. */
INLINE int64_t recurrence_floats(int head_dim, int state_size) {
  int64_t state = (int64_t)head_dim * state_size;
  return (1 + MAX_BRANCH_STATES) * state + (head_dim + 7) / 8 * 16 + (state_size + 7) / 8 * 32;
}

/* Floats of scratch memory for attention of `heads` query heads over an int8 cache: see `Integers`. */
INLINE int64_t integer_floats(int padded, int64_t heads) {
  int64_t blocks = (padded + QUANT_BLOCK - 1) / QUANT_BLOCK;
  int64_t values = QUANT_BLOCK * SEGMENT / 4, keys = QUANT_BLOCK * KEY_BLOCK / 4;
  int64_t scales = (KEY_BLOCK + SEGMENT) / 2 + SEGMENT + 1, weights = HEAD_TILE * SEGMENT / 2;
  int64_t each = (int64_t)sizeof(Activations) / 4; /* of a query's block */
  return blocks * (values + keys + scales + weights + heads * each) + heads * SEGMENT;
}

INLINE int64_t attention_scratch_floats(int head_dim, int group) {
  int64_t padded = (head_dim + 7) / 8 * 8, heads = ATTENTION_ROWS * group;
  return (2 * KEY_BLOCK + 1) * padded + 8 + heads * (2 * padded + KEY_BLOCK + 8 + 3) + 32 +
         2 * attention_state_floats((int)padded, (int)heads) + integer_floats((int)padded, heads);
}

#endif
