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
  for (int64_t i = 0; i < n; i++)
    if (x[i] == most) return (int32_t)i;
  return 0;
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

static void philox(uint64_t seed, const uint32_t *counter, uint32_t *words) {
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    uint32_t next0 = (uint32_t)(p1 >> 32) ^ c1 ^ key0, next2 = (uint32_t)(p0 >> 32) ^ c3 ^ key1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = next0;
    c2 = next2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

/* Gumbel noise is at most -log(-log(1 - 2^-33)) = 22.8740. */
#define MOST_NOISE 22.875

typedef struct {
  const float *logits;
  double inverse_temperature;
  uint64_t seed;
  uint32_t stream, position, attempt;
} Noise;

static double noisy(const Noise *noise, int64_t token, const uint32_t *words) {
  double u = ((double)words[token & 3] + 0.5) * 0x1p-32;
  return (double)noise->logits[token] * noise->inverse_temperature - log(-log(u));
}

/* A word below this cannot lift a value that lies `gap` under the best: u < exp(-exp(-gap)). */
static double least_word(double gap) {
  if (gap <= -4.0) return 0.0;
  double words = exp(-exp(-gap)) * 0x1p32;
  return words - 16.0;
}

static void consider(const Noise *noise, int64_t token, const uint32_t *words, double *best,
                     int32_t *pick) {
  double gap = *best - (double)noise->logits[token] * noise->inverse_temperature;
  if (*pick >= 0 && (gap > MOST_NOISE || (double)words[token & 3] < least_word(gap))) return;
  double value = noisy(noise, token, words);
  if (*pick < 0 || value > *best || (value == *best && token < *pick)) {
    *best = value;
    *pick = (int32_t)token;
  }
}

/* argmax of logit * inverse_temperature + Gumbel noise, ties to the lowest id. */
static int32_t pick_gumbel(const float *logits, int64_t n, double inverse_temperature,
                           uint64_t seed, uint32_t stream, uint32_t position, uint32_t attempt) {
  Noise noise = {logits, inverse_temperature, seed, stream, position, attempt};
  uint32_t counter[4] = {0, position, stream, attempt}, words[4];
  int32_t pick = -1;
  double best = -INFINITY;
  int32_t top = argmax(logits, n);
  counter[0] = (uint32_t)top >> 2;
  philox(seed, counter, words);
  consider(&noise, top, words, &best, &pick);
  for (int64_t start = 0; start < n; start += 8) {
    int left = n - start < 8 ? (int)(n - start) : 8;
    double floor = (best - MOST_NOISE) / inverse_temperature;
    /* float32 rounds the bound: a little slack keeps it below every candidate */
    f8 bound = f8_set((float)(floor - fabs(floor) * 1e-6));
    if (left == 8 && inverse_temperature > 0 && !f8_any_above(f8_load(logits + start), bound))
      continue;
    for (int64_t token = start; token < start + left; token += 4) {
      counter[0] = (uint32_t)token >> 2;
      philox(seed, counter, words);
      for (int64_t t = token; t < token + 4 && t < start + left; t++)
        consider(&noise, t, words, &best, &pick);
    }
  }
  return pick;
}

#endif
