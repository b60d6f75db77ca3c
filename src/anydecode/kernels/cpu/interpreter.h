/* Runs the ops of a pass, part by part. */
#ifndef ANYDECODE_INTERPRETER_H
#define ANYDECODE_INTERPRETER_H

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "ngrams.h"
#include "sample.h"
#include "plan.h"
#include "pointwise.h"
#include "pooling.h"
#include "recurrence.h"
#include "repack.h"
#include "selection.h"
#include "threads.h"

/* An op over the rows [first, last) of its n rows. */
typedef struct {
  const Plan *plan;
  const Pass *pass;
  const Op *op;
  int n, first, last;
  int64_t base; /* floats in the workspace before this stage's buffers */
} Step;

INLINE float *buffer(const Step *s, int64_t offset) {
  if (offset == BUFFER_STREAM) return s->pass->stream;
  if (offset == BUFFER_LOGITS) return s->pass->logits;
  return s->pass->workspace + s->base + offset * s->n;
}

/* Hidden states start as embeddings; as the pass's inputs in rows without a token, and in all rows
 * if `count` is set. Numbers after an embedding are zero. */
static void run_embed(const Step *s) {
  int width = s->op->matrix->in_features, size = s->op->width;
  for (int r = s->first; r < s->last; r++) {
    float *out = s->pass->stream + (int64_t)r * size;
    if (s->op->count && s->pass->inputs) {
      memmove(out, s->pass->inputs + (int64_t)r * size, (size_t)size * 4);
      continue;
    }
    if (size > width) memset(out + width, 0, (size_t)(size - width) * 4);
    if (s->pass->tokens[r] < 0) {
      memmove(out, s->pass->inputs + (int64_t)r * width, (size_t)width * 4);
    } else {
      unpack_row(s->op->matrix, s->pass->tokens[r], out);
      if (s->op->x != 1.0f) scale_row(out, width, s->op->x, out);
    }
  }
}

/* `x` times the row of the matrix of row r's token. Rows without a token take the pass's input if
 * `count` is set, else the matrix's row 0, as do tokens after its end. */
static void run_token_row(const Step *s, int r, float *out) {
  const Op *op = s->op;
  int32_t token = s->pass->tokens[r];
  if (token < 0 && op->count && s->pass->inputs) {
    memcpy(out, s->pass->inputs + (int64_t)r * op->width, (size_t)op->width * 4);
    return;
  }
  unpack_row(op->matrix, token < 0 || token >= op->matrix->out_features ? 0 : token, out);
  if (op->x != 1.0f) scale_row(out, op->width, op->x, out);
}

static void run_capture(const Step *s) {
  int width = s->pass->hidden_size;
  for (int t = 0; t < s->pass->num_captures; t++) {
    const Capture *capture = s->pass->captures + t;
    if (capture->layer != s->op->layer) continue;
    for (int i = 0; i < capture->count; i++)
      if (capture->rows[i] >= s->first && capture->rows[i] < s->last)
        memcpy(capture->out + i * capture->stride,
               s->pass->stream + (int64_t)capture->rows[i] * width, (size_t)width * 4);
  }
}

/* Part `part` of a product: a range of groups of columns. */
static void run_linear(const Step *s, int part) {
  const Matrix *w = s->op->matrix;
  int each = groups_per_part(w, s->n, s->plan->threads), groups = column_groups(w);
  int first = part * each, last = first + each < groups ? first + each : groups;
  linear_columns(w, buffer(s, s->op->a), row_units(w), s->n, s->op->weight,
                 buffer(s, s->op->out), w->out_features, first, last);
}

/* Part `part` of a grouped product: a range of groups of columns of one matrix. */
static void run_grouped_linear(const Step *s, int part) {
  int each = linear_parts(s->op->experts[0], s->n, s->plan->threads), i = part / each;
  const Matrix *w = s->op->experts[i];
  int first, last;
  split_groups(w, part % each, each, &first, &last);
  const char *x = (const char *)buffer(s, s->op->a) + i * row_units(w) * unit_bytes(w);
  linear_columns(w, x, s->op->count * row_units(w), s->n, NULL,
                 buffer(s, s->op->out) + (int64_t)i * w->out_features,
                 (int64_t)s->op->count * w->out_features, first, last);
}

static void run_lora(const Step *s, int r) {
  int32_t adapter = s->pass->adapters[r];
  if (adapter < 0) return;
  int groups = s->op->groups, width = s->op->width, width_out = s->op->width_out;
  const Lora *lora = s->pass->loras + (int64_t)adapter * s->pass->num_targets + s->op->count;
  const float *x = buffer(s, s->op->a) + (int64_t)r * groups * width;
  float *y = buffer(s, s->op->out) + (int64_t)r * groups * width_out;
  for (int i = 0; i < groups; i++)
    lora_row(lora + i, x + (int64_t)i * width, width, width_out, y + (int64_t)i * width_out);
}

/* The numbers from `count` on of each of `groups` equal parts of x [width], side by side. */
static void split_row(const Op *op, const float *x, float *out) {
  int part = op->width / op->groups, size = op->width_out / op->groups;
  for (int i = 0; i < op->groups; i++)
    memcpy(out + (int64_t)i * size, x + (int64_t)i * part + op->count, (size_t)size * 4);
}

/* Each of `groups` equal parts of x [width], followed by that of y [width_out - width]. */
static void join_row(const Op *op, const float *x, const float *y, float *out) {
  int size = op->width / op->groups, rest = op->width_out / op->groups - size;
  for (int i = 0; i < op->groups; i++, out += size + rest) {
    memcpy(out, x + (int64_t)i * size, (size_t)size * 4);
    memcpy(out + size, y + (int64_t)i * rest, (size_t)rest * 4);
  }
}

/* Run an op that works row by row on row r. */
static void run_row(const Step *s, int r) {
  const Op *op = s->op;
  int64_t wide = op->width, from = r * wide, to = (int64_t)r * op->width_out;
  const float *a = op->a == BUFFER_NONE ? NULL : buffer(s, op->a);
  const float *b = op->b == BUFFER_NONE ? NULL : buffer(s, op->b);
  float *out = op->out == BUFFER_NONE ? NULL : buffer(s, op->out);
  switch (op->code) {
    case OP_GATHER:
      memcpy(out + from, a + s->pass->logit_rows[r] * wide, (size_t)wide * 4);
      break;
    case OP_NORM:
      rms_norm(a + from, op->width, op->groups, op->weight, op->count, op->x, out + from);
      break;
    case OP_QUANTISE:
      quantise_inputs(a + from, (const int32_t *)op->weight, op->width,
                      (Activations *)out + r * (wide / QUANT_BLOCK));
      break;
    case OP_LORA:
      if (s->pass->adapters) run_lora(s, r);
      break;
    case OP_MERGE: merge_row(s->plan, op, r, out + from); break;
    case OP_ROPE_TABLE:
      rope_table(s->pass->positions[r] + op->chunk, op->weight, op->count, op->x, op->y, op->window,
                 op->groups, out + r * 2 * op->count);
      break;
    case OP_ROPE:
      (op->groups ? rope_pairs : rope)(a + from, op->heads, op->head_dim,
                                       b + (int64_t)r * 2 * op->count, op->count, out + from);
      break;
    case OP_STORE: {
      const float *v = b ? b + (int64_t)r * op->kv_heads * op->value_dim : NULL;
      store_row(s->pass, op, r, a + from, v);
      break;
    }
    case OP_STORE_INDEX: store_index_key(s->pass, op, r, a + from); break;
    case OP_STORE_INPUTS: store_inputs(s->pass, op, r, a + from); break;
    case OP_SHIFT: shift_row(s->pass, op, r, a + from, out + to); break;
    case OP_STORED: stored_row(s->pass, op, r, out + to); break;
    case OP_CONVOLVE: convolve_row(s->pass, op, r, out + to); break;
    case OP_GATED: gated(a + from, b + from, op->width, op, out + from); break;
    case OP_ADD: add_rows(a + from, b + from, wide, out + from); break;
    case OP_SCALE: scale_row(a + from, op->width, op->x, out + from); break;
    case OP_SOFTCAP: softcap_row(a + from, op->width, op->x, out + from); break;
    case OP_CLAMP: clamp_row(a + from, op->width, op->x, out + from); break;
    case OP_MULTIPLY: multiply_row(a + from, op->weight, op->width, out + from); break;
    case OP_CUT_OFF: cut_off_row(a + from, op->width, op->x, out + from); break;
    case OP_MATCH_MAGNITUDE: match_magnitude(a + from, b + from, op->width, out + from); break;
    case OP_MIX:
      mix(a + from, b + (int64_t)r * op->groups * op->groups, op->width, op->groups, out + from);
      break;
    case OP_BLOCK_CONVOLVE:
      block_convolve(op, s->pass->tokens, r, a, b + (int64_t)r * op->count * op->groups,
                     out + from);
      break;
    case OP_POOL: pool_row(s->pass, op, r, out + to); break;
    case OP_HYPER: hyper_factors(a + from, op->width, op->groups, op->count, op->x, out + to); break;
    case OP_COLLAPSE:
      collapse(a + from, b + (int64_t)r * op->groups, op->width, op->groups, out + to);
      break;
    case OP_TOKEN: {
      int32_t token = s->pass->tokens[r];
      out[to] = (float)(token < 0 ? op->count : token);
      break;
    }
    case OP_NGRAM: ngram_rows(s->pass, op, r, out + to); break;
    case OP_SOFTMAX: softmax_row(a + from, op->width, out + from); break;
    case OP_SPREAD:
      spread(a + from, op->weight ? op->weight : b + (int64_t)r * op->groups, op->width,
             op->groups, out + to);
      break;
    case OP_LAYER_NORM:
      layer_norm(a + from, op->width, op->groups, op->weight, op->x, out + from);
      break;
    case OP_ACTIVATE:
      if (op->activation == XIELU) xielu(a + from, op->width, op->weight, out + from);
      else activate(a + from, op->width, op->activation, out + from);
      break;
    case OP_ADD_POSITION: {
      float *row = buffer(s, op->c) + from;
      int position = s->pass->positions[r], last = op->matrix->out_features - 1;
      unpack_row(op->matrix, position < last ? position : last, row);
      add_rows(a + from, row, wide, out + from);
      break;
    }
    case OP_GATE_PARTS:
      gate_parts(a + from, b + (int64_t)r * op->groups, op->width, op->groups, op->activation,
                 out + from);
      break;
    case OP_COPY: memmove(out + to, a + from, (size_t)wide * 4); break;
    case OP_TOKEN_ROW: run_token_row(s, r, out + from); break;
    case OP_SELECT: select_row(s->plan, op, r); break;
    case OP_SPLIT: split_row(op, a + from, out + to); break;
    case OP_JOIN: join_row(op, a + from, b + to - from, out + to); break;
    default: break;
  }
}

static void run_rows(const Step *s) {
  if (s->op->code == OP_EMBED) {
    if (s->pass->embed) run_embed(s);
  } else if (s->op->code == OP_CAPTURE) {
    run_capture(s);
  } else {
    for (int r = s->first; r < s->last; r++) run_row(s, r);
  }
}

static void run_experts(const Step *s, int phase, int part, int parts) {
  experts(s->pass, s->op, s->n, buffer(s, s->op->a), buffer(s, s->op->b), buffer(s, s->op->c),
          buffer(s, s->op->out), phase, part, parts);
}

static void run_scan(const Step *s, int head, int thread) {
  const Pass *pass = s->pass;
  float *scratch = pass->attention_scratch + thread * pass->attention_scratch_floats;
  scan_head(pass, s->op, head, scratch, buffer(s, s->op->out));
}

static void run_sample(const Plan *plan, int part, int parts) {
  const Pass *pass = plan->pass;
  int64_t n = sampled_tokens(pass), first = n * part / parts & ~(int64_t)15, last = n;
  if (part + 1 < parts) last = n * (part + 1) / parts & ~(int64_t)15;
  for (int i = 0; i < pass->num_samples; i++) {
    const SampleSpec *spec = pass->samples + i;
    const float *logits = pass->logits + (int64_t)spec->row * pass->head_size, *row = logits;
    if (pass->head_tokens) {
      int32_t end = head_column(pass, last);
      for (int32_t j = head_column(pass, first); j < end; j++)
        pass->spread[pass->head_tokens[j]] = logits[j];
      row = pass->spread;
    }
    sample_token(spec, row, first, last, plan->best_tokens + i * parts + part);
  }
}

/* Run one part of a stage: a range of rows, or a part of an op that is divided in another way. */
static void run(const Plan *plan, int number, int part, int thread) {
  const Stage *stage = plan->stages + number;
  if (plan->best_tokens && number == plan->num_stages - 1) {
    run_sample(plan, part, plan->parts[number]);
    return;
  }
  Step s = {plan, plan->pass, NULL, stage->rows, 0, 0, stage->base};
  int rows = part < stage->row_parts;
  if (rows) {
    s.first = first_part(s.n, part, stage->row_parts);
    s.last = first_part(s.n, part + 1, stage->row_parts);
  }
  part -= stage->row_parts;
  for (int i = stage->first; i < stage->last; i++) {
    s.op = plan->pass->ops + i;
    if (is_row_op(s.op->code)) {
      if (rows) run_rows(&s);
      continue;
    }
    if (rows) continue;
    int parts = plan->parts[number];
    if (s.op->code == OP_LINEAR) parts = linear_parts(s.op->matrix, s.n, plan->threads);
    if (s.op->code == OP_GROUPED_LINEAR) parts = grouped_parts(s.op, s.n, plan->threads);
    if (s.op->code == OP_ATTEND) parts = attention_parts(plan, s.op);
    if (s.op->code == OP_SCAN) parts = s.op->recurrence->heads;
    if (s.op->code == OP_INDEX) parts = index_parts(plan, s.op);
    if (part < parts) {
      if (s.op->code == OP_LINEAR) run_linear(&s, part);
      else if (s.op->code == OP_GROUPED_LINEAR) run_grouped_linear(&s, part);
      else if (s.op->code == OP_SCAN) run_scan(&s, part, thread);
      else if (s.op->code == OP_INDEX)
        index_positions(plan, s.op, buffer(&s, s.op->a),
                        s.op->b == BUFFER_NONE ? NULL : buffer(&s, s.op->b), part, thread);
      else if (s.op->code == OP_ATTEND)
        attend(plan, s.op, buffer(&s, s.op->a), buffer(&s, s.op->out), part, thread);
      else run_experts(&s, stage->phase, part, parts);
      return;
    }
    part -= parts;
  }
}

/* Prefetch the first weights that a thread reads in the next product. */
static void prefetch(const Plan *plan, int number, int thread) {
  for (int next = number + 1; next < plan->num_stages && next < number + 4; next++) {
    const Stage *stage = plan->stages + next;
    int part = first_part(plan->parts[next], thread, plan->threads) - stage->row_parts;
    for (int i = stage->first; i < stage->last; i++) {
      const Op *op = plan->pass->ops + i;
      if (op->code != OP_LINEAR) continue;
      int parts = linear_parts(op->matrix, stage->rows, plan->threads);
      if (part < 0 || part >= parts) {
        part -= parts;
        continue;
      }
      int groups = groups_per_part(op->matrix, stage->rows, plan->threads);
      const uint8_t *p = op->matrix->data + (int64_t)part * groups * op->matrix->group_bytes;
      for (int j = 0; j < 128; j++) __builtin_prefetch(p + 64 * j, 0, 2);
      return;
    }
  }
}

/* A whole product on one thread; `scratch` takes the quantised rows. */
static void linear(const Matrix *w, const float *x, int n, const float *bias, float *out,
                   uint8_t *scratch) {
  int64_t blocks = w->in_features / QUANT_BLOCK;
  const void *from = x;
  if (!reads_floats(w->format)) {
    Activations *quantised = (Activations *)scratch;
    for (int r = 0; r < n; r++)
      quantise_inputs(x + (int64_t)r * w->in_features, w->order, w->in_features,
                      quantised + r * blocks);
    from = quantised;
  }
  linear_columns(w, from, row_units(w), n, bias, out, w->out_features, 0, column_groups(w));
}

#endif
