/* The steps of the recurrence of xLSTM (interface.py: Recurrence, "mlstm"). */
#ifndef ANYDECODE_MLSTM_H
#define ANYDECODE_MLSTM_H

#include "layout.h"
#include "maths.h"

/* Advance the state of one head, [head_dim + 2, state_size], by one step. `inputs` has the row's
 * values, keys and queries, `gates` its gates. `out` receives the output, unless it is NULL. */
static void advance_mlstm(const Recurrence *shape, int head, const float *inputs,
                          const float *gates, float *state, float *out) {
  int size = shape->state_size, dim = shape->head_dim;
  const float *value = inputs + head * dim, *key = inputs + shape->heads * dim + head * size;
  const float *query = key + (int64_t)shape->heads * size;
  float *largest = state + (int64_t)(dim + 1) * size, exponents[8] = {0}, factors[8];
  float forget[8];
  f8_store(forget, f8_softplus(f8_set(-gates[shape->heads + head])));
  float input = gates[head], kept = *largest - forget[0], max = kept > input ? kept : input;
  exponents[0] = kept - max;
  exponents[1] = input - max;
  exponents[2] = -max;
  f8_store(factors, f8_exp(f8_load(exponents)));
  f8 keeps = f8_set(factors[0]);
  float scale = 1.0f / sqrtf((float)size), sum = 0.0f;
  for (int p = 0; p <= dim; p++, state += size) {
    f8 total = f8_set(0.0f), change = f8_set((p < dim ? value[p] : 1.0f) * factors[1]);
    for (int i = 0; i < size; i += 8) {
      f8 s = f8_mul(f8_load_part(state + i, size - i), keeps);
      s = f8_fma(change, f8_load_part(key + i, size - i), s);
      f8_store_part(state + i, s, size - i);
      total = f8_fma(s, f8_load_part(query + i, size - i), total);
    }
    sum = f8_sum(total) * scale;
    if (out && p < dim) out[p] = sum;
  }
  *largest = max;
  float divisor = fabsf(sum) > factors[2] ? fabsf(sum) : factors[2]; /* the last row is n */
  for (int p = 0; p < dim && out; p++) out[p] /= divisor + shape->norm_eps;
}

#endif
