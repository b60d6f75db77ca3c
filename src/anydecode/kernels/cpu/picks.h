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

enum { NOISE_TOKENS = 32, STRETCH = 8 * NOISE_TOKENS };

enum { ROUNDS = 10 };

/* The two keys of each round. Vectors are filled with them from memory, which costs less than from
 * registers. */
typedef struct {
  uint32_t even[ROUNDS], odd[ROUNDS];
} Keys;

static Keys round_keys(uint64_t seed) {
  Keys keys;
  for (int i = 0; i < ROUNDS; i++) {
    keys.even[i] = (uint32_t)seed + (uint32_t)i * 0x9E3779B9u;
    keys.odd[i] = (uint32_t)(seed >> 32) + (uint32_t)i * 0xBB67AE85u;
  }
  return keys;
}

/* The words of 32 tokens from `token` on, which is a multiple of 4: eight blocks side by side.
 * Token `token + 4 * i + j` has lane i of words[j]. */
INLINE void philox(const Keys *keys, uint32_t token, const uint32_t *place, i8 *words) {
  n8 c[4] = {n8_count(token >> 2), n8_set(place[0]), n8_set(place[1]), n8_set(place[2])};
#pragma GCC unroll 10
  for (int round = 0; round < ROUNDS; round++) {
    n8 high0, low0, high1, low1;
    n8_multiply(c[0], 0xD2511F53u, &high0, &low0);
    n8_multiply(c[2], 0xCD9E8D57u, &high1, &low1);
    c[0] = n8_xor(n8_xor(high1, c[1]), n8_set(keys->even[round]));
    c[2] = n8_xor(n8_xor(high0, c[3]), n8_set(keys->odd[round]));
    c[1] = low1;
    c[3] = low0;
  }
  for (int i = 0; i < 4; i++) words[i] = n8_words(c[i]);
}

/* Words as numbers from 0 on, below 1: their upper 24 bits. */
INLINE f8 uniform_of(i8 words) { return f8_mul(f8_from_i8(i8_right(words, 8)), f8_set(0x1p-24f)); }

/* Gumbel noise is at most -log(-log(1 - 2^-33)) = 22.8740. */
#define MOST_NOISE 22.875

typedef struct {
  const Choice *choice;
  const float *logits;
  Keys keys;
  double best;
  int32_t pick;
} Draw;

static void consider(Draw *draw, int64_t token, uint32_t word) {
  double u = ((double)word + 0.5) * 0x1p-32;
  double value = (double)draw->logits[token] * draw->choice->inverse_temperature;
  value -= log(-log(u));
  if (draw->pick >= 0 && !(value > draw->best || (value == draw->best && token < draw->pick)))
    return;
  draw->best = value;
  draw->pick = (int32_t)token;
}

/* What u = word / 2^32 must at least be to lift eight logits over the best: exp(-exp(-gap)), which
 * is more than 1 - exp(-gap). Slack covers float32's rounding of gap and u. */
INLINE f8 least_uniform(const Draw *draw, f8 logits) {
  float slack = 1e-3f + 1e-6f * fabsf((float)draw->best);
  f8 value = f8_mul(logits, f8_set((float)draw->choice->inverse_temperature));
  f8 gap = f8_mul(f8_sub(f8_set((float)draw->best), value), f8_set(0.9999f));
  return f8_sub(f8_set(1.0f - 5e-7f), f8_exp(f8_sub(f8_set(slack), gap)));
}

/* The exact value is formed only where it may win. */
static void consider_part(Draw *draw, int64_t token, const float *logits, const i8 *rows) {
  float u[8], least[8];
  uint32_t words[NOISE_TOKENS];
  i8_store_fours(words, rows);
  for (int i = 0; i < NOISE_TOKENS; i += 8) {
    f8_store(u, uniform_of(i8_load(words + i)));
    f8_store(least, least_uniform(draw, f8_load(logits + i)));
    for (int j = 0; j < 8; j++)
      if (u[j] > least[j] && logits[i + j] > -INFINITY) consider(draw, token + i + j, words[i + j]);
  }
}

/* `logits` of STRETCH tokens from `token` on. Noise is made for 32 tokens at a time, where the
 * largest of their logits can win at all; their words are first held against what it would need. */
static void consider_stretch(Draw *draw, int64_t token, const float *logits) {
  float most[8], least[8];
  double floor = (draw->best - MOST_NOISE) / draw->choice->inverse_temperature;
  for (int j = 0; j < 8; j++) {
    const float *x = logits + NOISE_TOKENS * j;
    f8 largest = f8_set(-INFINITY);
    for (int i = 0; i < NOISE_TOKENS; i += 8) largest = f8_max(f8_load(x + i), largest);
    most[j] = f8_largest(largest);
  }
  f8_store(least, least_uniform(draw, f8_load(most)));
  for (int j = 0; j < 8; j++) {
    if (!(most[j] > (float)(floor - fabs(floor) * 1e-6))) continue;
    i8 words[4];
    int64_t first = token + NOISE_TOKENS * j;
    philox(&draw->keys, (uint32_t)first, draw->choice->place, words);
    f8 low = f8_max(uniform_of(words[0]), uniform_of(words[1]));
    f8 high = f8_max(uniform_of(words[2]), uniform_of(words[3]));
    if (f8_any_above(f8_max(low, high), f8_set(least[j])))
      consider_part(draw, first, logits + NOISE_TOKENS * j, words);
  }
}

/* Among the tokens from `first`, a multiple of 4, to `last` the one that `choice` asks for, the
 * lowest among equals. */
static void search(const Choice *choice, const float *logits, int64_t first, int64_t last,
                   Found *found) {
  int64_t top = first + argmax(logits + first, last - first), token = first;
  *found = (Found){logits[top], top};
  if (choice->inverse_temperature == 0) return;
  Draw draw = {choice, logits, round_keys(choice->seed), -INFINITY, -1};
  i8 rows[4];
  uint32_t words[NOISE_TOKENS];
  philox(&draw.keys, (uint32_t)top & ~3u, choice->place, rows);
  i8_store_fours(words, rows);
  consider(&draw, top, words[top & 3]);
  for (; token + STRETCH <= last; token += STRETCH) consider_stretch(&draw, token, logits + token);
  if (token < last) {
    float rest[STRETCH];
    for (int i = 0; i < STRETCH; i++) rest[i] = token + i < last ? logits[token + i] : -INFINITY;
    consider_stretch(&draw, token, rest);
  }
  *found = (Found){draw.best, draw.pick};
}

#endif
