/* Causal convolutions and recurrences: one position after the other, each head by itself. */
#ifndef ANYDECODE_RECURRENCE_H
#define ANYDECODE_RECURRENCE_H

#include "mlstm.h"
#include "plan.h"
#include "pointwise.h"
#include "shift.h"
#include "wkv.h"

/* Store some of a row's inputs in its slot, from number op->count on. */
static void store_inputs(const Pass *pass, const Op *op, int row, const float *x) {
  const Recurrence *shape = op->recurrence;
  float *to = pass->recurrent_inputs[op->layer] +
              (int64_t)pass->slots[row] * (shape->width + shape->num_gates);
  memcpy(to + op->count, x, (size_t)op->width * 4);
}

/* Channels [first, first + count) of the convolution at the last of the `window` slots. */
INLINE void convolve(const Pass *pass, const Op *op, const int32_t *slots, int first, int count,
                     float *out) {
  const Recurrence *shape = op->recurrence;
  const float *inputs = pass->recurrent_inputs[op->layer] + first;
  int64_t stride = shape->width + shape->num_gates;
  for (int i = 0; i < count; i += 8) {
    f8 sum = f8_set(0.0f);
    for (int j = 0; j < shape->window; j++) {
      if (slots[j] < 0) continue;
      f8 x = f8_load_part(inputs + slots[j] * stride + i, count - i);
      f8 w = f8_load_part(shape->conv + (int64_t)j * shape->width + first + i, count - i);
      sum = f8_fma(x, w, sum);
    }
    if (shape->conv_bias)
      sum = f8_add(sum, f8_load_part(shape->conv_bias + first + i, count - i));
    f8_store_part(out + i, f8_activate(sum, shape->activation), count - i);
  }
}

static void convolve_row(const Pass *pass, const Op *op, int row, float *out) {
  int32_t slots[MAX_WINDOW];
  last_slots(pass, row, op->recurrence->window, slots);
  convolve(pass, op, slots, 0, op->recurrence->width, out);
}

INLINE float first_lane(f8 x) {
  float v[8];
  f8_store(v, x);
  return v[0];
}

/* x / sqrt(sum(x^2) + 1e-6) * scale */
INLINE void normalise(float *x, int count, float scale) {
  float factor = scale / sqrtf(sum_of_squares(x, count) + 1e-6f);
  for (int i = 0; i < count; i += 8)
    f8_store_part(x + i, f8_mul(f8_load_part(x + i, count - i), f8_set(factor)), count - i);
}

/* The inputs of one step of one head. */
typedef struct {
  float *value, *key, *query;
  float *decays; /* of RULE_KDA, one per number of the key */
  float decay, strength;
} HeadStep;

/* The number of the key and the query of a head. */
INLINE int key_group(const Recurrence *shape, int head) {
  if (shape->has_tiled_keys) return head % shape->groups;
  return head / (shape->heads / shape->groups);
}

/* Advance the state of one head, [head_dim, state_size], by one step. `out` receives the output,
 * unless it is NULL. */
INLINE void advance(const Recurrence *shape, const HeadStep *step, float skip, float *state,
                    float *out) {
  int size = shape->state_size;
  f8 decay = f8_set(step->decay);
  for (int p = 0; p < shape->head_dim; p++, state += size) {
    float value = step->value[p];
    if (shape->rule == RULE_DELTA) {
      f8 dot = f8_set(0.0f);
      for (int i = 0; i < size; i += 8) {
        f8 s = f8_mul(f8_load_part(state + i, size - i), decay);
        dot = f8_fma(s, f8_load_part(step->key + i, size - i), dot);
      }
      value -= f8_sum(dot);
    }
    f8 change = f8_set(value * step->strength), sum = f8_set(0.0f);
    for (int i = 0; i < size; i += 8) {
      f8 s = f8_mul(f8_load_part(state + i, size - i), decay);
      s = f8_fma(change, f8_load_part(step->key + i, size - i), s);
      f8_store_part(state + i, s, size - i);
      sum = f8_fma(s, f8_load_part(step->query + i, size - i), sum);
    }
    if (out) out[p] = f8_sum(sum) + skip * step->value[p];
  }
}

/* Advance the state of one head as `advance` does, with the rule RULE_KDA. */
INLINE void advance_kda(const Recurrence *shape, const HeadStep *step, float *state, float *out) {
  int size = shape->state_size;
  for (int p = 0; p < shape->head_dim; p++, state += size) {
    f8 dot = f8_set(0.0f), sum = f8_set(0.0f);
    for (int i = 0; i < size; i += 8) {
      f8 s = f8_mul(f8_load_part(state + i, size - i), f8_load_part(step->decays + i, size - i));
      f8_store_part(state + i, s, size - i);
      dot = f8_fma(s, f8_load_part(step->key + i, size - i), dot);
    }
    f8 change = f8_set((step->value[p] - f8_sum(dot)) * step->strength);
    for (int i = 0; i < size; i += 8) {
      f8 s = f8_load_part(state + i, size - i);
      s = f8_fma(change, f8_load_part(step->key + i, size - i), s);
      f8_store_part(state + i, s, size - i);
      sum = f8_fma(s, f8_load_part(step->query + i, size - i), sum);
    }
    if (out) out[p] = f8_sum(sum);
  }
}

/* Advance the state of one head as `advance` does, with the rule RULE_SELECTIVE. `gates` has the
 * row's gates, `times` is scratch memory for one number per channel. */
INLINE void advance_selective(const Recurrence *shape, int head, const float *value,
                              const float *gates, float *times, float *state, float *out) {
  int dim = shape->head_dim, size = shape->state_size, first = head * dim;
  int group = key_group(shape, head), keys = shape->groups * size;
  const float *key = gates + group * size, *query = key + keys, *gate = gates + 2 * keys + first;
  const float *decay = shape->decay + (int64_t)first * size;
  for (int p = 0; p < dim; p += 8) {
    f8 bias = f8_load_part(shape->step_bias + first + p, dim - p);
    f8 time = f8_softplus(f8_add(f8_load_part(gate + p, dim - p), bias));
    time = f8_min(f8_max(time, f8_set(shape->min_step)), f8_set(shape->max_step));
    f8_store_part(times + p, time, dim - p);
  }
  for (int p = 0; p < dim; p++, state += size, decay += size) {
    f8 time = f8_set(times[p]), change = f8_set(value[p] * times[p]), sum = f8_set(0.0f);
    for (int i = 0; i < size; i += 8) {
      f8 factor = f8_exp(f8_mul(time, f8_load_part(decay + i, size - i)));
      f8 s = f8_mul(f8_load_part(state + i, size - i), factor);
      s = f8_fma(change, f8_load_part(key + i, size - i), s);
      f8_store_part(state + i, s, size - i);
      sum = f8_fma(s, f8_load_part(query + i, size - i), sum);
    }
    if (out) out[p] = f8_sum(sum) + (shape->skip ? shape->skip[first + p] * value[p] : 0.0f);
  }
}

/* Advance the state of one head, [head_dim], by one step, with the rule RULE_LRU. `is_first`:
 * whether it is that of position 0. */
static void advance_lru(const Recurrence *shape, int head, const float *value, const float *gates,
                        int is_first, float *state, float *out) {
  int dim = shape->head_dim, first = head * dim, all = shape->heads * dim;
  const float *inputs = gates + first, *recurrence = inputs + all, *bias = shape->step_bias + first;
  for (int i = 0; i < dim; i += 8) {
    int left = dim - i;
    f8 share = f8_sigmoid(f8_add(f8_load_part(inputs + i, left), f8_load_part(bias + i, left)));
    f8 gate = f8_add(f8_load_part(recurrence + i, left), f8_load_part(bias + all + i, left));
    f8 exponent = f8_mul(f8_sigmoid(gate), f8_load_part(shape->decay + first + i, left));
    f8 decay = f8_exp(exponent), change = f8_mul(f8_load_part(value + i, left), share);
    if (!is_first) {
      float factor[8];
      f8_store(factor, f8_sub(f8_set(1.0f), f8_exp(f8_add(exponent, exponent))));
      for (int k = 0; k < 8; k++) factor[k] = sqrtf(factor[k]);
      change = f8_mul(change, f8_load(factor));
    }
    f8 s = f8_fma(f8_load_part(state + i, left), decay, change);
    f8_store_part(state + i, s, left);
    if (out) f8_store_part(out + i, s, left);
  }
}

/* Set the inputs of one step of one head, with a rule other than RULE_SELECTIVE. `slots` are those
 * of the window, `gates` those of the row. */
static void prepare(const Pass *pass, const Op *op, int head, const int32_t *slots,
                    const float *gates, HeadStep *step) {
  const Recurrence *shape = op->recurrence;
  int size = shape->state_size, is_kda = shape->rule == RULE_KDA;
  int group = key_group(shape, head), keys = shape->heads * shape->head_dim;
  convolve(pass, op, slots, keys + group * size, size, step->key);
  convolve(pass, op, slots, keys + (shape->groups + group) * size, size, step->query);
  if (shape->rule == RULE_RETENTION) {
    step->decay = first_lane(f8_exp(f8_set(shape->decay[head])));
    step->strength = 1.0f;
    return;
  }
  f8 low = f8_set(shape->min_step), high = f8_set(shape->max_step), time = low;
  if (is_kda) {
    const float *gate = gates + shape->heads + head * size, *bias = shape->step_bias + head * size;
    for (int i = 0; i < size; i += 8) {
      f8 sum = f8_add(f8_load_part(gate + i, size - i), f8_load_part(bias + i, size - i));
      f8 rate = f8_set(shape->decay[head]), exponent;
      if (shape->min_exponent < 0.0f) {
        f8 share = f8_sigmoid(f8_mul(sum, f8_sub(f8_set(0.0f), rate)));
        exponent = f8_mul(share, f8_set(shape->min_exponent));
      } else {
        exponent = f8_mul(f8_min(f8_max(f8_softplus(sum), low), high), rate);
      }
      f8_store_part(step->decays + i, f8_exp(exponent), size - i);
    }
  } else {
    f8 gate = f8_set(gates[shape->num_gates - shape->heads + head] + shape->step_bias[head]);
    time = f8_min(f8_max(f8_softplus(gate), low), high);
    step->decay = first_lane(f8_exp(f8_mul(time, f8_set(shape->decay[head]))));
  }
  int is_delta = is_kda || shape->rule == RULE_DELTA;
  step->strength = first_lane(is_delta ? f8_sigmoid(f8_set(gates[head])) : time);
  if (is_delta) {
    step->strength *= shape->max_strength;
    normalise(step->key, size, 1.0f);
    normalise(step->query, size, 1.0f / sqrtf((float)size));
  }
}

/* Run all steps of one head. `scratch` has recurrence_floats(...) floats. */
static void scan_head(const Pass *pass, const Op *op, int head, float *scratch, float *out) {
  const Recurrence *shape = op->recurrence;
  int dim = shape->head_dim, size = shape->state_size, lead = pass->scan_lead;
  int64_t floats = (int64_t)state_rows(shape) * size, total = floats * shape->heads;
  int padded = (dim + 7) / 8 * 8;
  float *state = scratch, *kept = pass->states[op->layer] + head * floats;
  float *times = scratch + floats + padded;
  HeadStep step = {scratch + floats, times + padded, NULL, NULL, 0.0f, 0.0f};
  step.query = step.key + (size + 7) / 8 * 8;
  step.decays = step.query + (size + 7) / 8 * 8;
  float *branches = step.key + (size + 7) / 8 * 32; /* advance_wkv uses four vectors */
  for (int run = 0; run < pass->num_runs; run++) {
    int32_t start = pass->scan_start[run];
    if (start == -1) memset(state, 0, (size_t)floats * 4);
    else memcpy(state, start < 0 ? branches - (start + 2) * floats : kept + start * total,
                (size_t)floats * 4);
    for (int i = pass->scan_first[run] + lead; i < pass->scan_first[run + 1]; i++) {
      const int32_t *slots = pass->scan_slots + i + 1 - shape->window;
      int64_t stride = shape->width + shape->num_gates;
      const float *gates =
          pass->recurrent_inputs[op->layer] + pass->scan_slots[i] * stride + shape->width;
      int has_conv = shape->rule != RULE_WKV && shape->rule != RULE_WKV6 &&
                     shape->rule != RULE_GLA && shape->rule != RULE_MLSTM;
      if (has_conv) convolve(pass, op, slots, head * dim, dim, step.value);
      int32_t row = pass->scan_rows[i], save = pass->scan_saves[i];
      float *to = row < 0 ? NULL : out + (int64_t)row * shape->heads * dim + head * dim;
      if (shape->rule == RULE_SELECTIVE) {
        advance_selective(shape, head, step.value, gates, times, state, to);
      } else if (shape->rule == RULE_WKV) {
        advance_wkv(shape, head, gates, step.key, state, to);
      } else if (shape->rule == RULE_WKV6) {
        advance_wkv6(shape, head, gates, step.key, state, to);
      } else if (shape->rule == RULE_GLA) {
        advance_gla(shape, head, gates, step.key, state, to);
      } else if (shape->rule == RULE_MLSTM) {
        advance_mlstm(shape, head, gates - shape->width, gates, state, to);
      } else if (shape->rule == RULE_LRU) {
        int is_first = start == -1 && i == pass->scan_first[run] + lead;
        advance_lru(shape, head, step.value, gates, is_first, state, to);
      } else {
        prepare(pass, op, head, slots, gates, &step);
        if (shape->rule == RULE_KDA) advance_kda(shape, &step, state, to);
        else advance(shape, &step, shape->skip ? shape->skip[head] : 0.0f, state, to);
      }
      if (save != -1)
        memcpy(save < 0 ? branches - (save + 2) * floats : kept + save * total, state,
               (size_t)floats * 4);
    }
  }
}

#endif
