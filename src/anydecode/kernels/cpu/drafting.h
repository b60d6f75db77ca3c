/* Multi-step passes with drafts. Each step scores the last token and a draft of each sequence, and
 * keeps the drafts' tokens that equal the samples, so that the tokens are those without drafts. A
 * draft is copied from a text (copying.h), or is the chain of a drafter, maybe with a sibling of its
 * first token. */
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

/* The probability that the first tokens of a draft are right, given that of one token fewer, `path`;
 * 0 below the least one, and behind the draft. */
static double longer_path(const Drafting *drafting, const Draft *draft, int count, double path) {
  double longer = count < draft->count ? path * draft->chances[count] : 0.0;
  return longer < drafting->min_probability ? 0.0 : longer;
}

/* Cut the drafts of `n` sequences off where they give the most expected tokens per second, each with
 * the weight of its sequence, and return these. That of a single one may have a sibling. `spent`: the
 * seconds that drafting is expected to have taken. */
static double cut_drafts(const Drafting *drafting, Draft *const *drafts, int n, double spent) {
  const double *costs = drafting->costs;
  double expected = n, best = drafting->min_gain * n / (costs[0] + spent), paths[MAX_SEQUENCES];
  double sibling = drafts[0]->sibling_chance;
  int taken[MAX_SEQUENCES] = {0}, kept[MAX_SEQUENCES] = {0}, num_siblings = 0, num_kept = 0;
  const SequenceDrafts *of = drafting->sequences;
  for (int i = 0; i < n; i++) paths[i] = longer_path(drafting, drafts[i], 0, 1.0);
  for (int total = 1; total <= drafting->max_drafts; total++) {
    int next = 0;
    for (int i = 1; i < n; i++)
      if (of[i].weight * paths[i] > of[next].weight * paths[next]) next = i;
    if (sibling > of[next].weight * paths[next]) {
      expected += sibling;
      sibling = 0.0;
      num_siblings = 1;
    } else {
      if (paths[next] == 0.0) break;
      expected += of[next].weight * paths[next];
      paths[next] = longer_path(drafting, drafts[next], ++taken[next], paths[next]);
    }
    if (expected > best * (costs[total] + spent)) {
      best = expected / (costs[total] + spent);
      memcpy(kept, taken, sizeof(int) * (size_t)n);
      num_kept = num_siblings;
    }
  }
  for (int i = 0; i < n; i++) drafts[i]->count = kept[i];
  drafts[0]->num_siblings = num_kept;
  return best;
}

/* The class of a probability. */
static int probability_bin(double probability) {
  int bin = (int)(probability * NUM_BINS);
  return bin < NUM_BINS ? bin : NUM_BINS - 1;
}

static int depth_class(const Drafter *drafter, int depth) {
  return depth < drafter->num_depths ? depth : drafter->num_depths - 1;
}

/* The expected share of right tokens among those to which the drafter gives this probability. */
static double drafter_chance(const Drafter *drafter, int depth, double probability) {
  return drafter->chances[depth_class(drafter, depth) * NUM_BINS + probability_bin(probability)];
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

/* Find a sibling of the first token of a chain, which `spec` has sampled from the only row of logits
 * of `pass`: what it samples without that token. */
static int draft_sibling(const Drafting *drafting, const Pass *pass, SampleSpec spec, Draft *draft) {
  const Drafter *drafter = drafting->drafter;
  int32_t first = spec.token;
  int problem = sample_without(pass, first, &spec);
  if (problem || spec.token < 0 || spec.token == first) return problem;
  double probability = probability_of(pass, 0, spec.token);
  double chance = drafter->sibling_chances[probability_bin(2.0 * probability)];
  draft->sibling = spec.token;
  draft->sibling_probability = (float)probability;
  draft->sibling_chance = chance < drafting->min_probability ? 0.0 : chance;
  return OK;
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
    if (!n && drafter->sibling_chances &&
        (problem = draft_sibling(drafting, &next, spec, draft)))
      return problem;
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

/* Find a draft of up to `max` tokens for a single sequence, whose copy is `draft`: this, or the
 * drafter's chain where it promises more. */
static int find_draft(const Drafting *drafting, const Pass *target, const SampleSpec *spec, int max,
                      Draft *draft, int threads) {
  Drafter *drafter = drafting->drafter;
  Draft copied = *draft, *copy = &copied;
  double rate = cut_drafts(drafting, &draft, 1, 0.0);
  if (!drafter || max < 1 || drafter->num_read == drafter->num_known) return OK;
  if (!drafter->num_due && rate >= drafter->rate) return OK;
  double start = now();
  int problem, pass = drafting->num_passes;
  if (max > drafter->max_drafts) max = drafter->max_drafts;
  if ((problem = draft_chain(drafting, target, *spec, max, draft, threads))) return problem;
  if (draft->count == max) draft->sibling_chance = 0.0;
  drafter->draft_seconds[pass] = now() - start;
  drafter->num_drafted[pass] = draft->count;
  if (drafter->num_due) drafter->num_due--;
  draft->source = drafting->sequences->num_texts;
  double spent = draft->count * drafter->seconds;
  rate = cut_drafts(drafting, &draft, 1, spent);
  if (cut_drafts(drafting, &copy, 1, spent) > rate) *draft = copied;
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

/* A sequence in a pass over its last token and a draft. */
typedef struct {
  int32_t token, position; /* of the last token */
  int step, first;         /* tokens so far; the first row of the pass */
  int num_drafts;          /* of all passes so far */
  Draft draft;
} Drafted;

/* Store the draft of a sequence in the results of a pass. */
static void store_draft(SequenceDrafts *results, Drafted *one, int pass) {
  const Draft *draft = &one->draft;
  results->counts[pass] = draft->count;
  results->sources[pass] = draft->source;
  for (int i = 0; i < draft->count; i++) {
    results->drafts[one->num_drafts] = draft->tokens[i];
    results->probabilities[one->num_drafts++] = draft->probabilities[i];
  }
}

/* Store the sibling of a drafter's first token in the results of a pass. */
static void store_sibling(const Drafter *drafter, const Draft *draft, int pass) {
  drafter->siblings[pass] = draft->sibling;
  drafter->num_siblings[pass] = draft->num_siblings;
  drafter->sibling_probabilities[pass] = draft->sibling_probability;
}

/* Put the slot and the state of an accepted sibling, whose row is the last one of the pass, in the
 * place of those of the first drafted token. The token has become known. */
static void move_sibling(Drafter *drafter, const Drafted *one) {
  int32_t *slots = drafter->table + one->position + 1, count = one->draft.count, slot = *slots;
  int64_t width = drafter->projection->hidden_size;
  float *states = drafter->states + drafter->num_known * width;
  *slots = slots[count];
  slots[count] = slot;
  if (count) memcpy(states, states + count * width, sizeof(float) * (size_t)width);
}

/* Keep the samples of a sequence up to the first that its draft does not have. Returns whether they
 * end the burst. The logits of the last token kept become row `number`. */
static int keep_samples(const Pass *pass, int number, Drafted *one, const SampleSpec *specs) {
  Drafting *drafting = pass->drafting;
  Drafter *drafter = drafting->drafter;
  int32_t *tokens = pass->multi_step_tokens + (int64_t)number * pass->num_steps;
  const Draft *draft = &one->draft;
  int kept = 0, row = one->first, ends = 0;
  for (;;) {
    int32_t token = specs[row].token;
    ends = token < 0;
    if (ends) break;
    tokens[one->step++] = one->token = token;
    read_token(drafting->sequences + number, token);
    if (drafter) drafter->tokens[drafter->num_known++] = token;
    ends = is_end_token(pass, token) || one->step == pass->step_limits[number];
    if (ends || row > one->first + draft->count) break;
    if (kept < draft->count && token == draft->tokens[kept]) {
      row++;
    } else if (!kept && draft->num_siblings && token == draft->sibling) {
      row += draft->count + 1;
      move_sibling(drafter, one);
    } else {
      break;
    }
    kept++;
  }
  pass->step_counts[number] = one->step;
  one->position += kept + 1;
  int64_t size = pass->head_size;
  if (row > number)
    memcpy(pass->logits + number * size, pass->logits + row * size, sizeof(float) * (size_t)size);
  return ends;
}

/* Run passes over the last tokens and drafts, up to max_passes passes, or until a text ends or has
 * its step_limits. */
static int drafting_steps(const Pass *pass, int threads) {
  enum { ROWS = MAX_SEQUENCES + MAX_DRAFTS };
  static const int32_t zeros[ROWS];
  Drafting *drafting = pass->drafting;
  Drafter *drafter = drafting->drafter;
  int32_t tokens[ROWS], positions[ROWS], slots[ROWS], tables[ROWS], prefixes[ROWS];
  int32_t adapters[ROWS], logit_rows[ROWS], tail_lengths[ROWS], tail = 0;
  const int32_t *own_table = drafter ? drafter->table : NULL;
  SampleSpec specs[ROWS];
  Drafted sequences[MAX_SEQUENCES];
  Draft *drafts[MAX_SEQUENCES];
  int n = pass->num_samples;
  Pass next = *pass;
  next.captures = drafter ? drafter->captures : NULL;
  next.num_captures = drafter ? drafter->num_captures : 0;
  next.tokens = tokens;
  next.positions = positions;
  next.slots = slots;
  next.table = tables;
  next.prefix = prefixes;
  next.tails = &tail;
  next.num_tails = 1;
  next.tail_start = zeros;
  next.tail_length = tail_lengths;
  if (own_table) next.tables = &own_table;
  next.logit_rows = logit_rows;
  next.samples = specs;
  if (pass->adapters) next.adapters = adapters;
  for (int i = 0; i < n; i++) {
    sequences[i] = (Drafted){.token = pass->tokens[i], .position = pass->positions[i]};
    drafts[i] = &sequences[i].draft;
    find_matches(drafting->sequences + i);
  }
  for (;;) {
    int max = 0, problem = OK, rows = 0, ends = 0;
    for (int i = 0; i < n; i++) {
      const Drafted *one = sequences + i;
      int64_t room = pass->table_length[pass->table[i]] - one->position - 1;
      max = pass->step_limits[i] - one->step - 1;
      if (max > drafting->max_drafts) max = drafting->max_drafts;
      if (room < 0) return ERROR_TABLE;
      if (max > room) max = (int)room;
      copy_draft(drafting->sequences + i, max, drafts[i]);
    }
    if (n > 1) {
      cut_drafts(drafting, drafts, n, 0.0);
    } else {
      SampleSpec spec = *pass->samples;
      spec.counter[0] += (uint32_t)sequences->step;
      problem = find_draft(drafting, pass, &spec, max, drafts[0], threads);
    }
    if (problem) return problem;
    for (int i = 0; i < n; i++) {
      Drafted *one = sequences + i;
      one->first = rows;
      const Draft *draft = &one->draft;
      for (int j = 0; j <= draft->count + draft->num_siblings; j++, rows++) {
        int is_sibling = j > draft->count, depth = is_sibling ? 1 : j;
        tokens[rows] = is_sibling ? draft->sibling : j ? draft->tokens[j - 1] : one->token;
        positions[rows] = one->position + depth;
        prefixes[rows] = positions[rows] + !is_sibling;
        tables[rows] = pass->table[i];
        slots[rows] = next.tables[tables[rows]][one->position + j];
        tail_lengths[rows] = is_sibling;
        if (is_sibling) tail = slots[rows];
        adapters[rows] = pass->adapters ? pass->adapters[i] : -1;
        logit_rows[rows] = rows;
        specs[rows] = pass->samples[i];
        specs[rows].counter[0] += (uint32_t)(one->step + depth);
        specs[rows].row = rows;
      }
    }
    next.num_rows = next.num_logits = next.num_samples = rows;
    if (drafter) {
      store_sibling(drafter, drafts[0], drafting->num_passes);
      capture_states(drafter, rows);
    }
    double start = now();
    if ((problem = run_once(&next, threads))) return problem;
    drafting->seconds[drafting->num_passes] = now() - start;
    for (int i = 0; i < n; i++) {
      store_draft(drafting->sequences + i, sequences + i, drafting->num_passes);
      ends |= keep_samples(pass, i, sequences + i, specs);
    }
    pass->step_counts[n] = ++drafting->num_passes;
    if (ends || drafting->num_passes == drafting->max_passes || is_interrupted(pass)) return OK;
  }
}

#endif
