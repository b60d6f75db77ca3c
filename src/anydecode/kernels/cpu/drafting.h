/* Multi-step passes with drafts. Each step scores the last token and a draft, and keeps the draft's
 * tokens that equal the samples, so that the tokens are those without drafts. A draft is copied from
 * a text (copying.h), or is the chain of a drafter. */
#ifndef ANYDECODE_DRAFTING_H
#define ANYDECODE_DRAFTING_H

#include "copying.h"
#include "passes.h"

#include <string.h>
#include <time.h>

static double now(void) {
  struct timespec time;
  timespec_get(&time, TIME_UTC);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Cut a draft off where it gives the most expected tokens per second, and return these. `spent`:
 * the seconds that drafting is expected to have taken. */
static double cut_draft(const Drafting *drafting, Draft *draft, double spent) {
  const double *costs = drafting->costs;
  double expected = 1.0, path = 1.0, best = drafting->min_gain / (costs[0] + spent);
  int count = 0;
  for (int n = 0; n < draft->count; n++) {
    path *= draft->chances[n];
    if (path < drafting->min_probability) break;
    expected += path;
    if (expected > best * (costs[n + 1] + spent)) {
      best = expected / (costs[n + 1] + spent);
      count = n + 1;
    }
  }
  draft->count = count;
  return best;
}

static int depth_class(const Drafter *drafter, int depth) {
  return depth < drafter->num_depths ? depth : drafter->num_depths - 1;
}

/* The expected share of right tokens among those to which the drafter gives this probability. */
static double drafter_chance(const Drafter *drafter, int depth, double probability) {
  int bin = (int)(probability * NUM_BINS), first = depth_class(drafter, depth) * NUM_BINS;
  return drafter->chances[first + (bin < NUM_BINS ? bin : NUM_BINS - 1)];
}

/* A pass of the drafter over `count` rows from row `first` on, with the logits of the last one. */
static Pass drafter_pass(const Drafter *drafter, int first, int count, const int32_t *last) {
  Pass pass = *drafter->pass;
  pass.num_rows = count;
  pass.num_logits = pass.num_samples = 1;
  pass.tokens += first;
  pass.positions += first;
  pass.slots += first;
  pass.prefix += first;
  pass.logit_rows = last;
  return pass;
}

/* Let the drafter read the rows that it has not read, and draft a chain of up to `max` tokens. Its
 * state of each token is its input beside the next one. `spec` samples the token after the text: a
 * drafted token is the sample of the drafter's logits with the noise of the target's. */
static int draft_chain(const Drafting *drafting, const Pass *target, SampleSpec spec, int max,
                       Draft *draft, int threads) {
  static const int32_t zero = 0;
  Drafter *drafter = drafting->drafter;
  int first = drafter->num_read, unread = drafter->num_known - first, problem;
  drafter->num_unread[drafting->num_passes] = unread;
  int32_t last = unread - 1;
  Pass projection = *drafter->projection;
  projection.num_rows = projection.num_logits = unread;
  projection.tokens = drafter->tokens + first;
  projection.inputs = drafter->states + (int64_t)first * projection.hidden_size;
  if ((problem = run_once(&projection, threads))) return problem;
  Pass next = drafter_pass(drafter, first, unread, &last);
  next.inputs = projection.logits;
  const double *costs = drafting->costs;
  double path = 1.0, expected = 1.0, spent = 0.0;
  spec.row = 0;
  for (draft->count = 0;;) {
    next.samples = &spec;
    if ((problem = run_once(&next, threads))) return problem;
    drafter->num_read = drafter->num_known;
    if (spec.token < 0) return OK;
    int n = draft->count++;
    double probability = probability_of(&next, 0, spec.token);
    draft->tokens[n] = spec.token;
    draft->probabilities[n] = (float)probability;
    path *= draft->chances[n] = drafter_chance(drafter, n, probability);
    expected += path;
    spent += drafter->seconds;
    if (n + 1 == max || is_end_token(target, spec.token)) return OK;
    double gain = path * drafter->mean_chances[depth_class(drafter, n + 1)];
    double rate = expected / (costs[n + 1] + spent);
    if (gain < rate * (costs[n + 2] - costs[n + 1] + drafter->seconds)) return OK;
    const float *state = next.stream + (int64_t)(next.num_rows - 1) * next.hidden_size;
    int row = drafter->num_known + n;
    drafter->tokens[row] = spec.token;
    next = drafter_pass(drafter, row, 1, &zero);
    next.inputs = state;
    spec.counter[0]++;
  }
}

/* Find a draft of up to `max` tokens: a copy, or the drafter's chain where it promises more. */
static int find_draft(Drafting *drafting, const Pass *target, const SampleSpec *spec, int max,
                      Draft *draft, int threads) {
  Drafter *drafter = drafting->drafter;
  copy_draft(drafting, max, draft);
  Draft copied = *draft;
  double rate = cut_draft(drafting, draft, 0.0);
  if (!drafter || max < 1 || drafter->num_read == drafter->num_known) return OK;
  if (!drafter->num_due && rate >= drafter->rate) return OK;
  double start = now();
  int problem, pass = drafting->num_passes;
  if (max > drafter->max_drafts) max = drafter->max_drafts;
  if ((problem = draft_chain(drafting, target, *spec, max, draft, threads))) return problem;
  drafter->draft_seconds[pass] = now() - start;
  drafter->num_drafted[pass] = draft->count;
  if (drafter->num_due) drafter->num_due--;
  draft->source = drafting->num_texts;
  double spent = draft->count * drafter->seconds;
  rate = cut_draft(drafting, draft, spent);
  if (cut_draft(drafting, &copied, spent) > rate) *draft = copied;
  return OK;
}

/* Let a pass over the last token and a draft store the states that the drafter reads. */
static void capture_states(const Drafter *drafter, int rows) {
  int64_t width = drafter->projection->hidden_size, size = width / drafter->num_captures;
  for (int i = 0; i < drafter->num_captures; i++) {
    drafter->captures[i].count = rows;
    drafter->captures[i].out = drafter->states + drafter->num_known * width + i * size;
  }
}

/* Run passes over the last token and drafts, up to num_steps tokens or max_passes passes. The logits
 * of the last token kept are the first row. */
static int drafting_steps(const Pass *pass, int threads) {
  enum { ROWS = MAX_DRAFTS + 1 };
  static const int32_t zeros[ROWS];
  Drafting *drafting = pass->drafting;
  Drafter *drafter = drafting->drafter;
  int32_t tokens[ROWS], positions[ROWS], slots[ROWS], tables[ROWS], prefixes[ROWS];
  int32_t adapters[ROWS], logit_rows[ROWS], table = *pass->table, base = *pass->positions;
  int32_t *drafts = drafting->drafts;
  float *probabilities = drafting->probabilities;
  SampleSpec specs[ROWS];
  Draft draft;
  Pass next = *pass;
  next.captures = drafter ? drafter->captures : NULL;
  next.num_captures = drafter ? drafter->num_captures : 0;
  next.tokens = tokens;
  next.positions = positions;
  next.slots = slots;
  next.table = tables;
  next.prefix = prefixes;
  next.tail_start = next.tail_length = zeros;
  next.logit_rows = logit_rows;
  next.samples = specs;
  if (pass->adapters) next.adapters = adapters;
  tokens[0] = *pass->tokens;
  for (int step = 0;;) {
    int64_t room = pass->table_length[table] - base - 1;
    int max = pass->num_steps - step - 1, problem;
    if (max > drafting->max_drafts) max = drafting->max_drafts;
    if (room < 0) return ERROR_TABLE;
    if (max > room) max = (int)room;
    specs[0] = *pass->samples;
    specs[0].counter[0] += (uint32_t)step;
    if ((problem = find_draft(drafting, pass, specs, max, &draft, threads))) return problem;
    int count = draft.count, rows = count + 1, kept = 0;
    memcpy(tokens + 1, draft.tokens, sizeof(int32_t) * (size_t)count);
    for (int i = 0; i < rows; i++) {
      positions[i] = base + i;
      prefixes[i] = base + i + 1;
      slots[i] = pass->tables[table][base + i];
      tables[i] = table;
      adapters[i] = pass->adapters ? *pass->adapters : -1;
      logit_rows[i] = i;
      specs[i] = *pass->samples;
      specs[i].counter[0] += (uint32_t)(step + i);
      specs[i].row = i;
    }
    next.num_rows = next.num_logits = next.num_samples = rows;
    if (drafter) capture_states(drafter, rows);
    double start = now();
    if ((problem = run_once(&next, threads))) return problem;
    for (int i = 0; i < count; i++) {
      *drafts++ = draft.tokens[i];
      *probabilities++ = draft.probabilities[i];
    }
    drafting->rows[drafting->num_passes] = rows;
    drafting->sources[drafting->num_passes] = draft.source;
    drafting->seconds[drafting->num_passes++] = now() - start;
    pass->step_counts[1] = drafting->num_passes;
    for (;; kept++) {
      int32_t token = specs[kept].token;
      pass->step_counts[0] = step + (token >= 0);
      if (token < 0) return OK;
      pass->multi_step_tokens[step++] = token;
      read_token(drafting, token);
      if (drafter) drafter->tokens[drafter->num_known++] = token;
      int ends = is_end_token(pass, token) || step == pass->num_steps;
      int is_last = kept == count || token != tokens[kept + 1];
      int is_full = drafting->num_passes == drafting->max_passes;
      if (ends || (is_last && (is_full || is_interrupted(pass)))) {
        if (kept)
          memcpy(pass->logits, pass->logits + (int64_t)kept * pass->head_size,
                 sizeof(float) * pass->head_size);
        return OK;
      }
      if (is_last) break;
    }
    base += kept + 1;
    tokens[0] = specs[kept].token;
  }
}

#endif
