/* Argmax, top-k, exponentials and sampling of one row of logits. The noise is that of
 * scoring/noise.py: Philox4x32-10 (Salmon et al., 2011). */
#ifndef ANYDECODE_SAMPLE_H
#define ANYDECODE_SAMPLE_H

#include "doubles.h"
#include "layout.h"
#include "maths.h"

static float max_of(const float *x, int64_t n) {
  f8 best[4];
  for (int i = 0; i < 4; i++) best[i] = f8_set(-INFINITY);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 4; j++) best[j] = f8_max(f8_load(x + i + 8 * j), best[j]);
  float max = f8_reduce_max(f8_max(f8_max(best[0], best[1]), f8_max(best[2], best[3])));
  for (; i < n; i++) max = x[i] > max ? x[i] : max;
  return max;
}

/* The lowest index of the maximum. NaN loses to every finite value. */
static int32_t argmax(const float *x, int64_t n) {
  float max = max_of(x, n);
  f8 below = f8_set(nextafterf(max, -INFINITY));
  int64_t i = 0;
  while (i + 8 <= n && !f8_any_above(f8_load(x + i), below)) i += 8;
  for (; i < n; i++)
    if (x[i] == max) return (int32_t)i;
  return 0;
}

/* Insert a value into `filled` values in descending order, of which at most `count` are kept.
 * Returns how many there are now. */
INLINE int insert(float value, int32_t id, int filled, int count, int32_t *ids, float *values) {
  int i = filled < count ? filled : count - 1;
  for (; i > 0 && values[i - 1] < value; i--) {
    values[i] = values[i - 1];
    ids[i] = ids[i - 1];
  }
  values[i] = value;
  ids[i] = id;
  return filled < count ? filled + 1 : count;
}

/* The `count` largest values in descending order, the lowest index first among equals. NaN is left
 * out; where fewer values remain, ids are -1 and values -inf. */
static void top_k(const float *x, int64_t n, int count, int32_t *ids, float *values) {
  int filled = 0;
  float min = -INFINITY;
  for (int64_t i = 0; i < n; i += 32) {
    int part = n - i < 32 ? (int)(n - i) : 32;
    if (part == 32 && filled == count) {
      f8 max = f8_set(min);
      for (int j = 0; j < 32; j += 8) max = f8_max(f8_load(x + i + j), max);
      if (!f8_any_above(max, f8_set(min))) continue;
    }
    for (int j = 0; j < part; j++) {
      if (filled == count ? !(x[i + j] > min) : x[i + j] != x[i + j]) continue;
      filled = insert(x[i + j], (int32_t)(i + j), filled, count, ids, values);
      if (filled == count) min = values[count - 1];
    }
  }
  for (; filled < count; filled++) {
    ids[filled] = -1;
    values[filled] = -INFINITY;
  }
}

static double logsumexp(const float *x, int64_t n) {
  float max = max_of(x, n);
  if (max == -INFINITY) return -INFINITY;
  double sum = 0.0;
  f8 shift = f8_set(max);
  for (int64_t start = 0; start < n; start += 1024) {
    int64_t end = start + 1024 < n ? start + 1024 : n;
    f8 part = f8_set(0.0f);
    int64_t i = start;
    for (; i + 8 <= end; i += 8) part = f8_add(part, f8_exp(f8_sub(f8_load(x + i), shift)));
    sum += (double)f8_sum(part);
    for (; i < end; i++) sum += portable_exp((double)x[i] - (double)max);
  }
  return (double)max + portable_log(sum);
}

/* weights[i] = exp(x[i] - max). Returns the sum of the weights: lane j of eight adds every eighth one
 * from j on. */
static double exponentials(const float *x, int64_t n, float *weights) {
  double sum[8] = {0.0};
  f8 max = f8_set(max_of(x, n));
  for (int64_t i = 0; i < n; i += 8) {
    int count = n - i < 8 ? (int)(n - i) : 8;
    f8_store_part(weights + i, f8_exp(f8_sub(f8_load_part(x + i, count), max)), count);
    for (int j = 0; j < count; j++) sum[j] += (double)weights[i + j];
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

enum { NOISE_TOKENS = 32, CHUNK_TOKENS = 8 * NOISE_TOKENS };

enum { ROUNDS = 10 };

/* The two keys of each round of Philox. Broadcasting them from memory is faster than from
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

/* The random words of 32 tokens from `token` on, which is a multiple of 4: eight Philox blocks in
 * parallel. The word of token `token + 4 * i + j` is lane i of words[j]. */
INLINE void philox(const Keys *keys, uint32_t token, const uint32_t *counter, i8 *words) {
  n8 c[4] = {n8_count(token >> 2), n8_set(counter[0]), n8_set(counter[1]), n8_set(counter[2])};
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

/* The upper 24 bits of words as numbers in [0, 1). */
INLINE f8 uniform_of(i8 words) { return f8_mul(f8_from_i8(i8_right(words, 8)), f8_set(0x1p-24f)); }

/* Gumbel noise is at most -log(-log(1 - 2^-33)) = 22.8740. */
#define MAX_NOISE 22.875

/* A search for the argmax of logits plus Gumbel noise. */
typedef struct {
  const SampleSpec *spec;
  const float *logits;
  Keys keys;
  double best_score;
  int32_t best_token; /* -1: none yet */
} GumbelSearch;

static void consider(GumbelSearch *search, int64_t token, uint32_t word) {
  double u = ((double)word + 0.5) * 0x1p-32;
  double score = (double)search->logits[token] * search->spec->inverse_temperature;
  score -= portable_log(-portable_log(u));
  if (search->best_token >= 0 &&
      !(score > search->best_score || (score == search->best_score && token < search->best_token)))
    return;
  search->best_score = score;
  search->best_token = (int32_t)token;
}

/* A lower bound of the u = word / 2^32 with which each of eight logits exceeds the best score: that
 * u is exp(-exp(-gap)), which is more than 1 - exp(-gap). The slack covers float32's rounding of
 * gap and u. */
INLINE f8 min_uniform(const GumbelSearch *search, f8 logits) {
  float slack = 1e-3f + 1e-6f * fabsf((float)search->best_score);
  f8 value = f8_mul(logits, f8_set((float)search->spec->inverse_temperature));
  f8 gap = f8_mul(f8_sub(f8_set((float)search->best_score), value), f8_set(0.9999f));
  return f8_sub(f8_set(1.0f - 5e-7f), f8_exp(f8_sub(f8_set(slack), gap)));
}

/* Compute the exact scores of 32 tokens, only where they may exceed the best. */
static void consider_part(GumbelSearch *search, int64_t token, const float *logits,
                          const i8 *rows) {
  float u[8], bound[8];
  uint32_t words[NOISE_TOKENS];
  i8_store_fours(words, rows);
  for (int i = 0; i < NOISE_TOKENS; i += 8) {
    f8_store(u, uniform_of(i8_load(words + i)));
    f8_store(bound, min_uniform(search, f8_load(logits + i)));
    for (int j = 0; j < 8; j++)
      if (u[j] > bound[j] && logits[i + j] > -INFINITY)
        consider(search, token + i + j, words[i + j]);
  }
}

/* Consider the CHUNK_TOKENS tokens from `token` on. Noise is generated for 32 tokens at a time, and
 * only where their maximum logit can exceed the best score; then their largest u is compared with
 * the bound of that logit. */
static void consider_chunk(GumbelSearch *search, int64_t token, const float *logits) {
  float max_logit[8], bound[8];
  double floor = (search->best_score - MAX_NOISE) / search->spec->inverse_temperature;
  for (int j = 0; j < 8; j++) {
    const float *x = logits + NOISE_TOKENS * j;
    f8 max = f8_set(-INFINITY);
    for (int i = 0; i < NOISE_TOKENS; i += 8) max = f8_max(f8_load(x + i), max);
    max_logit[j] = f8_reduce_max(max);
  }
  f8_store(bound, min_uniform(search, f8_load(max_logit)));
  for (int j = 0; j < 8; j++) {
    if (!(max_logit[j] > (float)(floor - fabs(floor) * 1e-6))) continue;
    i8 words[4];
    int64_t first = token + NOISE_TOKENS * j;
    philox(&search->keys, (uint32_t)first, search->spec->counter, words);
    f8 low = f8_max(uniform_of(words[0]), uniform_of(words[1]));
    f8 high = f8_max(uniform_of(words[2]), uniform_of(words[3]));
    if (f8_any_above(f8_max(low, high), f8_set(bound[j])))
      consider_part(search, first, logits + NOISE_TOKENS * j, words);
  }
}

/* The best token of the range [first, last) of ids under `spec`, the lowest id among equals.
 * `first` is a multiple of 4. */
static void sample_token(const SampleSpec *spec, const float *logits, int64_t first, int64_t last,
                         BestToken *best) {
  int64_t top = first + argmax(logits + first, last - first), token = first;
  *best = (BestToken){logits[top], top};
  if (spec->inverse_temperature == 0 || spec->truncation) return;
  GumbelSearch search = {spec, logits, round_keys(spec->seed), -INFINITY, -1};
  i8 rows[4];
  uint32_t words[NOISE_TOKENS];
  philox(&search.keys, (uint32_t)top & ~3u, spec->counter, rows);
  i8_store_fours(words, rows);
  consider(&search, top, words[top & 3]);
  for (; token + CHUNK_TOKENS <= last; token += CHUNK_TOKENS)
    consider_chunk(&search, token, logits + token);
  if (token < last) {
    float rest[CHUNK_TOKENS];
    for (int i = 0; i < CHUNK_TOKENS; i++)
      rest[i] = token + i < last ? logits[token + i] : -INFINITY;
    consider_chunk(&search, token, rest);
  }
  *best = (BestToken){search.best_score, search.best_token};
}

#endif
