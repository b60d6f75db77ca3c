/* Sampling with a temperature and then top-k, top-p and min-p, as sampling/truncation.py and min_p.py
 * define them: each of them keeps the first tokens in the order of scores. Where rounding might
 * decide which ones, or where they are too many, no token is sampled. */
#ifndef ANYDECODE_TRUNCATE_H
#define ANYDECODE_TRUNCATE_H

#include "sample.h"

#include <stdlib.h>

enum { MAX_SCORED = 4096, MAX_TOP = 128 };
/* Sums of weights are compared up to this fraction of all: float32's rounding of exp and of sums over
 * SUMMED tokens, and numpy's of exp. */
#define WEIGHT_SLACK 2e-6
enum { SUMMED = 64 };

typedef struct {
  float score;
  int32_t token;
} ScoredToken;

static int by_score(const void *x, const void *y) {
  const ScoredToken *a = x, *b = y;
  if (a->score != b->score) return a->score > b->score ? -1 : 1;
  return a->token < b->token ? -1 : 1;
}

/* Find the tokens whose score is at least `floor`. Returns their number, or -1 if they are more than
 * MAX_SCORED. */
static int tokens_above(const float *logits, int64_t n, float divisor, float floor,
                        ScoredToken *found) {
  int count = 0;
  float low = floor * divisor;
  f8 bound = f8_set(low - 1e-6f * fabsf(low) - 1e-30f);
  for (int64_t start = 0; start < n; start += 32) {
    int part = n - start < 32 ? (int)(n - start) : 32;
    const float *x = logits + start;
    if (part == 32) {
      f8 max = f8_max(f8_max(f8_load(x), f8_load(x + 8)), f8_max(f8_load(x + 16), f8_load(x + 24)));
      if (!f8_any_above(max, bound)) continue;
    }
    for (int i = 0; i < part; i++) {
      float score = x[i] / divisor;
      if (!(score >= floor)) continue;
      if (count == MAX_SCORED) return -1;
      found[count++] = (ScoredToken){score, (int32_t)(start + i)};
    }
  }
  return count;
}

/* The sum of exp(score - max) over all tokens. */
static double total_weight(const float *logits, int64_t n, float divisor, float max) {
  double sum = 0.0;
  for (int64_t start = 0; start < n; start += SUMMED) {
    int64_t end = start + SUMMED < n ? start + SUMMED : n, i = start;
    f8 part = f8_set(0.0f);
    for (; i + 8 <= end; i += 8) {
      f8 score = f8_div(f8_load(logits + i), f8_set(divisor));
      part = f8_add(part, f8_exp(f8_sub(score, f8_set(max))));
    }
    sum += (double)f8_sum(part);
    for (; i < end; i++) sum += portable_exp((double)(logits[i] / divisor - max));
  }
  return sum;
}

/* How many of the tokens, in the order of their scores, top-p keeps. `is_whole`: whether there are
 * no others. Returns 0 if others are kept too, and -1 if rounding might decide. */
static int nucleus(const ScoredToken *tokens, int count, int is_whole, double top_p, double total) {
  double mass = top_p * total, slack = WEIGHT_SLACK * total, sum = 0.0;
  for (int i = 0; i < count; i++) {
    sum += portable_exp((double)(tokens[i].score - tokens[0].score));
    if (sum > mass + slack) return i + 1;
    if (sum > mass - slack) return -1;
  }
  return is_whole ? -1 : 0;
}

/* The score of the token number `count`, at most MAX_TOP, in the order of scores. */
static float score_at(const float *logits, int64_t n, int count, float divisor) {
  int32_t ids[MAX_TOP];
  float values[MAX_TOP];
  top_k(logits, n, count, ids, values);
  return values[count - 1] / divisor;
}

/* The token that `spec` samples with its truncation, or -1. */
static int32_t sample_truncated(const SampleSpec *spec, const float *logits, int64_t n) {
  const Truncation *rule = spec->truncation;
  ScoredToken tokens[MAX_SCORED];
  float max = max_of(logits, n) / rule->divisor, bound = max + rule->min_gap, lowest = -INFINITY;
  int kept = 0, has_few = rule->top_k && rule->top_k <= MAX_TOP && rule->top_k < n;
  double whole = 0.0;
  if (!(fabsf(max) < INFINITY)) return -1;
  if (has_few) lowest = score_at(logits, n, rule->top_k, rule->divisor);
  else if (rule->top_p < 1.0) whole = total_weight(logits, n, rule->divisor, max);
  for (float depth = 4.0f; !kept && depth <= 16.0f; depth += 2.0f) {
    float floor = has_few ? lowest : max - depth;
    int count = tokens_above(logits, n, rule->divisor, floor, tokens), is_whole = count == n;
    if (count < 0) return -1;
    qsort(tokens, (size_t)count, sizeof *tokens, by_score);
    int is_first = rule->top_k && rule->top_k <= count; /* else top-k keeps more, or all of n */
    if (is_first) count = rule->top_k;
    else if (rule->top_k && rule->top_k < n && !is_whole) continue;
    is_whole |= is_first;
    if (rule->top_p < 1.0) {
      double total = is_first ? 0.0 : whole;
      for (int i = 0; is_first && i < count; i++) total += portable_exp((double)(tokens[i].score - max));
      int size = nucleus(tokens, count, is_whole, rule->top_p, total);
      if (size < 0) return -1;
      if (!size && bound < floor) continue;
      is_whole |= size > 0;
      if (size) count = size;
    }
    if (!is_whole && !(bound >= floor)) continue;
    while (tokens[count - 1].score < bound) count--;
    kept = count;
  }
  if (kept < 2) return kept ? tokens[0].token : -1;
  Keys keys = round_keys(spec->seed);
  double best = -INFINITY;
  int32_t token = -1;
  for (int i = 0; i < kept; i++) {
    i8 rows[4];
    uint32_t words[NOISE_TOKENS], id = (uint32_t)tokens[i].token;
    philox(&keys, id & ~3u, spec->counter, rows);
    i8_store_fours(words, rows);
    double u = ((double)words[id & 3] + 0.5) * 0x1p-32;
    double key = (double)tokens[i].score - portable_log(-portable_log(u));
    if (key < best || (key == best && tokens[i].token > token)) continue;
    best = key;
    token = tokens[i].token;
  }
  return token;
}

#endif
