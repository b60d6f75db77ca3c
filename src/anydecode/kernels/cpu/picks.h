/* Choices over one row of logits. Noise: Philox4x32-10 (Salmon et al., 2011), as scoring/noise. */
#ifndef ANYDECODE_PICKS_H
#define ANYDECODE_PICKS_H

#include "layout.h"
#include "maths.h"

static float largest_of(const float *x, int64_t n) {
  f8 best[4];
  for (int i = 0; i < 4; i++) best[i] = f8_set(-INFINITY);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 4; j++) best[j] = f8_max(f8_load(x + i + 8 * j), best[j]);
  float most = f8_largest(f8_max(f8_max(best[0], best[1]), f8_max(best[2], best[3])));
  for (; i < n; i++) most = x[i] > most ? x[i] : most;
  return most;
}

/* The lowest index of the largest value. NaN is never picked unless nothing else is there. */
static int32_t argmax(const float *x, int64_t n) {
  float most = largest_of(x, n);
  f8 below = f8_set(nextafterf(most, -INFINITY));
  int64_t i = 0;
  while (i + 8 <= n && !f8_any_above(f8_load(x + i), below)) i += 8;
  for (; i < n; i++)
    if (x[i] == most) return (int32_t)i;
  return 0;
}

/* Puts a value at its place among `held` falling ones, of which at most `count` stay. */
INLINE int insert(float value, int32_t id, int held, int count, int32_t *ids, float *values) {
  int at = held < count ? held : count - 1;
  for (; at > 0 && values[at - 1] < value; at--) {
    values[at] = values[at - 1];
    ids[at] = ids[at - 1];
  }
  values[at] = value;
  ids[at] = id;
  return held < count ? held + 1 : count;
}

/* The `count` largest, falling, the lowest index first among equals. NaN is never among them:
 * where too few are left, ids are -1 and values -inf. */
static void largest(const float *x, int64_t n, int count, int32_t *ids, float *values) {
  int held = 0;
  float least = -INFINITY;
  for (int64_t i = 0; i < n; i += 32) {
    int part = n - i < 32 ? (int)(n - i) : 32;
    if (part == 32 && held == count) {
      f8 most = f8_set(least);
      for (int j = 0; j < 32; j += 8) most = f8_max(f8_load(x + i + j), most);
      if (!f8_any_above(most, f8_set(least))) continue;
    }
    for (int j = 0; j < part; j++) {
      if (held == count ? !(x[i + j] > least) : x[i + j] != x[i + j]) continue;
      held = insert(x[i + j], (int32_t)(i + j), held, count, ids, values);
      if (held == count) least = values[count - 1];
    }
  }
  for (; held < count; held++) {
    ids[held] = -1;
    values[held] = -INFINITY;
  }
}

static double logsumexp(const float *x, int64_t n) {
  float most = largest_of(x, n);
  if (most == -INFINITY) return -INFINITY;
  double sum = 0.0;
  f8 shift = f8_set(most);
  for (int64_t start = 0; start < n; start += 1024) {
    int64_t end = start + 1024 < n ? start + 1024 : n;
    f8 part = f8_set(0.0f);
    int64_t i = start;
    for (; i + 8 <= end; i += 8) part = f8_add(part, f8_exp(f8_sub(f8_load(x + i), shift)));
    sum += (double)f8_sum(part);
    for (; i < end; i++) sum += exp((double)x[i] - (double)most);
  }
  return (double)most + log(sum);
}

enum { NOISE_TOKENS = 32 };

/* The words of 32 tokens from `token` on, which is a multiple of 4: eight blocks side by side. */
static void philox(uint64_t seed, uint32_t token, const uint32_t *place, uint32_t *words) {
  static const uint32_t order[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
  i8 c[4] = {i8_add(i8_set((int32_t)(token >> 2)), i8_load(order)), i8_set((int32_t)place[0]),
             i8_set((int32_t)place[1]), i8_set((int32_t)place[2])};
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    i8 high0, low0, high1, low1;
    i8_multiply(c[0], 0xD2511F53u, &high0, &low0);
    i8_multiply(c[2], 0xCD9E8D57u, &high1, &low1);
    c[0] = i8_xor(i8_xor(high1, c[1]), i8_set((int32_t)key0));
    c[2] = i8_xor(i8_xor(high0, c[3]), i8_set((int32_t)key1));
    c[1] = low1;
    c[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  i8_store_fours(words, c);
}

/* Gumbel noise is at most -log(-log(1 - 2^-33)) = 22.8740. */
#define MOST_NOISE 22.875

typedef struct {
  const float *logits;
  int64_t count;
  double inverse_temperature;
  uint64_t seed;
  uint32_t place[3]; /* position, stream, attempt */
  double best;
  int32_t pick;
} Draw;

static void consider(Draw *draw, int64_t token, uint32_t word) {
  double u = ((double)word + 0.5) * 0x1p-32;
  double value = (double)draw->logits[token] * draw->inverse_temperature - log(-log(u));
  if (draw->pick >= 0 && !(value > draw->best || (value == draw->best && token < draw->pick)))
    return;
  draw->best = value;
  draw->pick = (int32_t)token;
}

/* The exact value is formed only where u = word / 2^32 may lift a token over the best, which needs
 * u > exp(-exp(-gap)) > 1 - exp(-gap). Slack covers float32's rounding of gap and u. */
static void consider_eight(Draw *draw, int64_t token, const float *logits, const uint32_t *words) {
  float u[8], least[8], slack = 1e-3f + 1e-6f * fabsf((float)draw->best);
  f8 uniform = f8_mul(f8_from_i8(i8_right(i8_load(words), 8)), f8_set(0x1p-24f));
  f8 value = f8_mul(f8_load(logits), f8_set((float)draw->inverse_temperature));
  f8 gap = f8_mul(f8_sub(f8_set((float)draw->best), value), f8_set(0.9999f));
  f8 chance = f8_exp(f8_sub(f8_set(slack), gap));
  f8 limit = f8_sub(f8_set(1.0f - 5e-7f), chance);
  if (!f8_any_above(uniform, limit)) return;
  f8_store(u, uniform);
  f8_store(least, limit);
  for (int i = 0; i < 8; i++)
    if (u[i] > least[i] && token + i < draw->count) consider(draw, token + i, words[i]);
}

static void consider_part(Draw *draw, int64_t token) {
  float logits[NOISE_TOKENS];
  uint32_t words[NOISE_TOKENS];
  const float *from = draw->logits + token;
  double floor = (draw->best - MOST_NOISE) / draw->inverse_temperature;
  f8 bound = f8_set((float)(floor - fabs(floor) * 1e-6)), most = f8_set(-INFINITY);
  if (token + NOISE_TOKENS > draw->count) {
    for (int i = 0; i < NOISE_TOKENS; i++)
      logits[i] = token + i < draw->count ? from[i] : -INFINITY;
    from = logits;
  }
  for (int i = 0; i < NOISE_TOKENS; i += 8) most = f8_max(f8_load(from + i), most);
  if (!f8_any_above(most, bound)) return;
  philox(draw->seed, (uint32_t)token, draw->place, words);
  for (int i = 0; i < NOISE_TOKENS; i += 8) consider_eight(draw, token + i, from + i, words + i);
}

/* argmax of logit * inverse_temperature + Gumbel noise, ties to the lowest id. */
static int32_t pick_gumbel(const float *logits, int64_t n, double inverse_temperature,
                           uint64_t seed, uint32_t stream, uint32_t position, uint32_t attempt) {
  Draw draw = {logits, n, inverse_temperature, seed, {position, stream, attempt}, -INFINITY, -1};
  uint32_t words[NOISE_TOKENS];
  int32_t top = argmax(logits, n);
  philox(seed, (uint32_t)top & ~3u, draw.place, words);
  consider(&draw, top, words[top & 3]);
  for (int64_t token = 0; token < n; token += NOISE_TOKENS) consider_part(&draw, token);
  return draw.pick;
}

#endif
