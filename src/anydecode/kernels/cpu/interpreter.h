/* Runs a slice of a program over the rows of a pass: every thread walks the same ops. */
#ifndef ANYDECODE_INTERPRETER_H
#define ANYDECODE_INTERPRETER_H

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "pointwise.h"
#include "repack.h"

/* One thread's view of the op being run. */
typedef struct {
  const Pass *pass;
  const Op *op;
  int n, thread, threads, first, last; /* rows [first, last) are this thread's */
  int64_t base;                        /* floats per row before this part's buffers */
  void *barrier;
} Step;

INLINE float *buffer(const Step *s, int64_t at) {
  if (at == BUFFER_STREAM) return s->pass->stream;
  if (at == BUFFER_LOGITS) return s->pass->logits;
  return s->pass->workspace + s->base + at * s->n;
}

static void run_embed(const Step *s) {
  int width = s->op->width;
  for (int r = s->first; r < s->last; r++) {
    float *out = s->pass->stream + (int64_t)r * width;
    if (s->pass->tokens[r] >= 0)
      unpack_row(s->op->matrix, s->pass->tokens[r], out);
    else
      memcpy(out, s->pass->inputs + (int64_t)r * width, (size_t)width * 4);
    if (s->pass->tokens[r] >= 0 && s->op->x != 1.0f) scale_row(out, width, s->op->x, out);
  }
}

static void run_tap(const Step *s) {
  int width = s->pass->hidden_size;
  for (int t = 0; t < s->pass->num_taps; t++) {
    const Tap *tap = s->pass->taps + t;
    if (tap->layer != s->op->layer) continue;
    for (int i = 0; i < tap->count; i++)
      if (tap->rows[i] >= s->first && tap->rows[i] < s->last)
        memcpy(tap->out + (int64_t)i * width, s->pass->stream + (int64_t)tap->rows[i] * width,
               (size_t)width * 4);
  }
}

/* Ask for the first weights that this thread reads in the next product. */
static void expect_next(const Step *s) {
  for (const Op *op = s->op + 1; op < s->op + 9; op++) {
    if (op == s->pass->ops + s->pass->num_ops) return;
    if (op->code != OP_LINEAR) continue;
    int first, last;
    split_groups(op->matrix, s->thread, s->threads, &first, &last);
    const uint8_t *p = op->matrix->data + first * op->matrix->group_bytes;
    for (int i = 0; i < 128 && first < last; i++) __builtin_prefetch(p + 64 * i, 0, 2);
    return;
  }
}

static void run_linear(const Step *s) {
  const Matrix *w = s->op->matrix;
  int first, last;
  split_groups(w, s->thread, s->threads, &first, &last);
  linear_columns(w, buffer(s, s->op->a), s->n, s->op->weight, buffer(s, s->op->out),
                 w->out_features, first, last);
  expect_next(s);
}

static void run_lora(const Step *s, int r) {
  int32_t adapter = s->pass->adapters[r];
  if (adapter < 0) return;
  const Lora *lora = s->pass->loras + (int64_t)adapter * s->pass->num_targets + s->op->count;
  lora_row(lora, buffer(s, s->op->a) + (int64_t)r * s->op->width, s->op->width, s->op->width_out,
           buffer(s, s->op->out) + (int64_t)r * s->op->width_out);
}

/* Ops that act on one row. */
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
      quantise_row(a + from, op->width, (Activations *)out + r * (wide / QUANT_BLOCK));
      break;
    case OP_LORA: run_lora(s, r); break;
    case OP_ROPE_TABLE:
      rope_table(s->pass->positions[r], op->weight, op->count, op->x, out + r * 2 * op->count);
      break;
    case OP_ROPE:
      rope(a + from, op->heads, op->head_dim, b + (int64_t)r * 2 * op->count, op->count,
           out + from);
      break;
    case OP_STORE: store_row(s->pass, op, r, a + from, b + from); break;
    case OP_GATED: gated(a + from, b + from, op->width, op->activation, out + from); break;
    case OP_ADD: add_rows(a + from, b + from, wide, out + from); break;
    case OP_SCALE: scale_row(a + from, op->width, op->x, out + from); break;
    case OP_SOFTCAP: softcap_row(a + from, op->width, op->x, out + from); break;
    case OP_COPY: memmove(out + to, a + from, (size_t)wide * 4); break;
    default: break;
  }
}

static void run_op(const Step *s) {
  const Op *op = s->op;
  switch (op->code) {
    case OP_EMBED:
      if (s->pass->embed) run_embed(s);
      break;
    case OP_TAP: run_tap(s); break;
    case OP_LINEAR: run_linear(s); break;
    case OP_ATTEND:
      attend(s->pass, op, buffer(s, op->a), buffer(s, op->out), s->thread, s->threads);
      break;
    case OP_EXPERTS:
      experts(op, s->n, buffer(s, op->a), buffer(s, op->b), buffer(s, op->c), buffer(s, op->out),
              s->thread, s->threads, s->barrier);
      break;
    case OP_LORA:
      if (!s->pass->adapters) break; /* fall through */
    default:
      for (int r = s->first; r < s->last; r++) run_row(s, r);
  }
}

static void run_ops(Step *s, int first, int last, int n) {
  s->n = n;
  s->first = (int)((int64_t)n * s->thread / s->threads);
  s->last = (int)((int64_t)n * (s->thread + 1) / s->threads);
  for (int i = first; i < last; i++) {
    s->op = s->pass->ops + i;
    if (s->op->barrier) barrier_wait(s->barrier);
    run_op(s);
  }
}

static void run(const Pass *pass, int thread, int threads, void *barrier) {
  Step step = {pass, NULL, 0, thread, threads, 0, 0, 0, barrier};
  run_ops(&step, 0, pass->num_prologue, pass->num_rows);
  run_ops(&step, pass->first, pass->last, pass->num_rows);
  if (!pass->num_logits) return;
  barrier_wait(barrier);
  step.base = pass->head_offset * pass->num_rows;
  run_ops(&step, pass->head, pass->num_ops, pass->num_logits);
}

/* A whole product on one thread; `scratch` holds the quantised rows. */
static void linear(const Matrix *w, const float *x, int n, const float *bias, float *out,
                   uint8_t *scratch) {
  int64_t blocks = w->in_features / QUANT_BLOCK;
  const void *from = x;
  if (!is_float(w->format)) {
    Activations *quantised = (Activations *)scratch;
    for (int r = 0; r < n; r++)
      quantise_row(x + (int64_t)r * w->in_features, w->in_features, quantised + r * blocks);
    from = quantised;
  }
  linear_columns(w, from, n, bias, out, w->out_features, 0, (w->out_features + 7) / 8);
}

#endif
