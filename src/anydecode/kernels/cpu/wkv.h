/* The steps of the recurrences of RWKV-7 and RWKV-6, and of gated linear attention (interface.py:
 * Recurrence, "wkv", "wkv6", "gla"). */
#ifndef ANYDECODE_WKV_H
#define ANYDECODE_WKV_H

#include "layout.h"
#include "maths.h"
#include "pointwise.h"

/* The vectors of one step of one head, as the state's update reads them. */
typedef struct {
  const float *receptance, *value;
  float *decay, *removed, *rated, *added; /* rated: removed * rate */
} WkvStep;

/* Compute a step's vectors from the gates of the row: receptances, decays, keys, values, rates. */
static void prepare_wkv(const Recurrence *shape, int head, const float *gates, float *scratch,
                        WkvStep *step) {
  int size = shape->state_size, padded = (size + 7) / 8 * 8, first = head * size;
  int64_t all = (int64_t)shape->heads * size;
  const float *own = gates + first, *decay = own + all, *key = own + 2 * all;
  *step = (WkvStep){own, own + 3 * all, scratch, scratch + padded, scratch + 2 * padded,
                    scratch + 3 * padded};
  f8 one = f8_set(1.0f), fastest = f8_set(-0.60653065971263342f); /* -exp(-0.5) */
  for (int i = 0; i < size; i += 8) {
    int left = size - i;
    f8 k = f8_load_part(key + i, left), rate = f8_sigmoid(f8_load_part(own + 4 * all + i, left));
    f8 w = f8_exp(f8_mul(fastest, f8_sigmoid(f8_load_part(decay + i, left))));
    f8 share = f8_mul(f8_sub(rate, one), f8_load_part(shape->key_rate + first + i, left));
    f8_store_part(step->decay + i, w, left);
    f8_store_part(step->removed + i, f8_mul(k, f8_load_part(shape->key_scale + first + i, left)),
                  left);
    f8_store_part(step->rated + i, rate, left);
    f8_store_part(step->added + i, f8_mul(k, f8_add(one, share)), left);
  }
  float norm = sqrtf(sum_of_squares(step->removed, size));
  f8 factor = f8_set(1.0f / (norm > 1e-12f ? norm : 1e-12f));
  for (int i = 0; i < size; i += 8) {
    f8 removed = f8_mul(f8_load_part(step->removed + i, size - i), factor);
    f8_store_part(step->removed + i, removed, size - i);
    f8_store_part(step->rated + i, f8_mul(removed, f8_load_part(step->rated + i, size - i)),
                  size - i);
  }
}

/* Norm a head's output. */
static void norm_wkv(const Recurrence *shape, int head, float *out) {
  int size = shape->state_size, first = head * size;
  f8 sum = f8_set(0.0f), squares = f8_set(0.0f);
  for (int i = 0; i < size; i += 8) sum = f8_add(sum, f8_load_part(out + i, size - i));
  f8 mean = f8_set(f8_sum(sum) / (float)size);
  for (int i = 0; i < size; i += 8) {
    int left = size - i;
    f8_store_part(out + i, f8_sub(f8_load_part(out + i, left), mean), left);
    f8 centred = f8_load_part(out + i, left); /* zeros after the head's end */
    squares = f8_fma(centred, centred, squares);
  }
  f8 factor = f8_set(1.0f / sqrtf(f8_sum(squares) / (float)size + shape->norm_eps));
  for (int i = 0; i < size; i += 8) {
    int left = size - i;
    f8 y = f8_mul(f8_load_part(out + i, left), factor);
    y = f8_fma(y, f8_load_part(shape->norm + first + i, left),
               f8_load_part(shape->norm_bias + first + i, left));
    f8_store_part(out + i, y, left);
  }
}

/* Add the value times the bonus of a step: sum(receptance * key * the head's bonus). */
static void add_bonus(const Recurrence *shape, int head, const float *receptance,
                      const float *key, const float *value, float *out) {
  int size = shape->state_size, first = head * size;
  f8 bonus = f8_set(0.0f);
  for (int i = 0; i < size; i += 8) {
    int left = size - i;
    f8 weight = f8_mul(f8_load_part(key + i, left), f8_load_part(shape->bonus + first + i, left));
    bonus = f8_fma(f8_load_part(receptance + i, left), weight, bonus);
  }
  f8 share = f8_set(f8_sum(bonus));
  for (int i = 0; i < size; i += 8) {
    int left = size - i;
    f8 y = f8_load_part(out + i, left);
    f8_store_part(out + i, f8_fma(share, f8_load_part(value + i, left), y), left);
  }
}

/* Advance the state of one head, [state_size, state_size], by one step. `gates` has the row's
 * gates, `scratch` memory for four vectors of state_size. `out` receives the output, unless it is
 * NULL. */
static void advance_wkv(const Recurrence *shape, int head, const float *gates, float *scratch,
                        float *state, float *out) {
  int size = shape->state_size;
  WkvStep step;
  prepare_wkv(shape, head, gates, scratch, &step);
  for (int p = 0; p < size; p++, state += size) {
    f8 dot = f8_set(0.0f), sum = f8_set(0.0f), value = f8_set(step.value[p]);
    for (int i = 0; i < size; i += 8)
      dot = f8_fma(f8_load_part(state + i, size - i), f8_load_part(step.removed + i, size - i),
                   dot);
    f8 change = f8_set(-f8_sum(dot));
    for (int i = 0; i < size; i += 8) {
      int left = size - i;
      f8 s = f8_mul(f8_load_part(state + i, left), f8_load_part(step.decay + i, left));
      s = f8_fma(change, f8_load_part(step.rated + i, left), s);
      s = f8_fma(value, f8_load_part(step.added + i, left), s);
      f8_store_part(state + i, s, left);
      sum = f8_fma(s, f8_load_part(step.receptance + i, left), sum);
    }
    if (out) out[p] = f8_sum(sum);
  }
  if (!out) return;
  if (shape->norm) norm_wkv(shape, head, out);
  add_bonus(shape, head, step.receptance, step.added, step.value, out);
}

/* The same with the rule RULE_WKV6; `scratch` has memory for one vector of state_size. */
static void advance_wkv6(const Recurrence *shape, int head, const float *gates, float *scratch,
                         float *state, float *out) {
  int size = shape->state_size;
  int64_t all = (int64_t)shape->heads * size;
  const float *receptance = gates + head * size, *decay = receptance + all;
  const float *key = decay + all, *value = key + all;
  for (int i = 0; i < size; i += 8) {
    f8 rate = f8_exp(f8_load_part(decay + i, size - i));
    f8_store_part(scratch + i, f8_exp(f8_sub(f8_set(0.0f), rate)), size - i);
  }
  for (int p = 0; p < size; p++, state += size) {
    f8 sum = f8_set(0.0f), added = f8_set(value[p]);
    for (int i = 0; i < size; i += 8) {
      int left = size - i;
      f8 s = f8_load_part(state + i, left);
      sum = f8_fma(s, f8_load_part(receptance + i, left), sum);
      s = f8_mul(s, f8_load_part(scratch + i, left));
      f8_store_part(state + i, f8_fma(added, f8_load_part(key + i, left), s), left);
    }
    if (out) out[p] = f8_sum(sum);
  }
  if (!out) return;
  add_bonus(shape, head, receptance, key, value, out);
  norm_wkv(shape, head, out);
}

/* The same with the rule RULE_GLA; `scratch` has memory for two vectors of state_size. */
static void advance_gla(const Recurrence *shape, int head, const float *gates, float *scratch,
                        float *state, float *out) {
  int size = shape->state_size, group = head / (shape->heads / shape->groups);
  int64_t all = (int64_t)shape->heads * size;
  const float *receptance = gates + head * size, *decay = receptance + all;
  const float *key = gates + 2 * all + group * size, *value = key + (int64_t)shape->groups * size;
  float *factor = scratch, *added = scratch + (size + 7) / 8 * 8;
  for (int i = 0; i < size; i += 8) {
    int left = size - i;
    f8 rate = f8_min(f8_exp(f8_load_part(decay + i, left)), f8_set(5.0f));
    f8 kept = f8_exp(f8_sub(f8_set(0.0f), rate));
    f8_store_part(factor + i, kept, left);
    f8_store_part(added + i, f8_mul(f8_load_part(key + i, left), f8_sub(f8_set(1.0f), kept)), left);
  }
  float scale = 1.0f / sqrtf((float)size);
  for (int p = 0; p < size; p++, state += size) {
    f8 sum = f8_set(0.0f), change = f8_set(value[p]);
    for (int i = 0; i < size; i += 8) {
      int left = size - i;
      f8 s = f8_mul(f8_load_part(state + i, left), f8_load_part(factor + i, left));
      s = f8_fma(change, f8_load_part(added + i, left), s);
      f8_store_part(state + i, s, left);
      sum = f8_fma(s, f8_load_part(receptance + i, left), sum);
    }
    if (out) out[p] = f8_sum(sum) * scale;
  }
}

#endif
