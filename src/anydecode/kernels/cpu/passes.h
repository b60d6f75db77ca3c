/* One pass with the chosen variant of the kernels: its checks, its plan and its samples. */
#ifndef ANYDECODE_PASSES_H
#define ANYDECODE_PASSES_H

#include "doubles.h"
#include "plan.h"
#include "threads.h"

extern const Kernels kernels_scalar;
static const Kernels *chosen = &kernels_scalar;

static int check_table(const Pass *pass, int r) {
  int32_t table = pass->table[r], prefix = pass->prefix[r];
  if (table < 0 || table >= pass->num_tables || prefix < 0) return ERROR_TABLE;
  if (prefix > pass->table_length[table]) return ERROR_TABLE;
  int64_t start = pass->tail_start[r], end = start + pass->tail_length[r];
  if (pass->tail_length[r] < 0 || start < 0 || end > pass->num_tails) return ERROR_TABLE;
  for (int64_t i = start; i < end; i++)
    if (pass->tails[i] >= pass->num_slots) return ERROR_SLOT;
  return OK;
}

/* Check each table once per layer, up to the longest prefix that any row reads of it. */
static int check_tables(const Pass *pass) {
  for (int t = 0; t < pass->num_tables; t++) {
    int32_t longest = 0;
    for (int r = 0; r < pass->num_rows; r++)
      if (pass->table[r] == t && pass->prefix[r] > longest) longest = pass->prefix[r];
    int layers = pass->table_stride[t] ? pass->num_layers : 1;
    for (int l = 0; l < layers; l++) {
      const int32_t *slots = pass->tables[t] + l * pass->table_stride[t];
      int32_t max_slot = -1;
      for (int32_t i = 0; i < longest; i++) max_slot = slots[i] > max_slot ? slots[i] : max_slot;
      if (max_slot >= pass->num_slots) return ERROR_SLOT;
    }
  }
  return OK;
}

static int check_pass(const Pass *pass) {
  int layers = pass->first < pass->last;
  for (int r = 0; r < pass->num_rows; r++) {
    int problem = layers ? check_table(pass, r) : OK;
    if (problem) return problem;
    if (layers && pass->slots[r] >= pass->num_slots) return ERROR_SLOT;
    if (pass->embed && pass->tokens[r] >= pass->ops->matrix->out_features) return ERROR_TOKEN;
    if (pass->embed && pass->tokens[r] < 0 && !pass->inputs) return ERROR_TOKEN;
    if (pass->adapters && pass->adapters[r] >= pass->num_adapters) return ERROR_ADAPTER;
  }
  return layers ? check_tables(pass) : OK;
}

/* How this thread rounds, and what it does with numbers below the normal ones. Libraries that are
 * compiled for speed change it, for all threads that are started afterwards. */
#if defined(__x86_64__) || defined(_M_X64)
enum { FLAGS = 0x3f, USUAL = 0x1f80 }; /* of exceptions; to nearest, all numbers, no traps */
static unsigned float_mode(void) { return __builtin_ia32_stmxcsr() & ~(unsigned)FLAGS; }
static void set_float_mode(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
enum { USUAL = 0 };
static unsigned float_mode(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return (unsigned)mode;
}
static void set_float_mode(unsigned mode) {
  __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)mode));
}
#else
enum { USUAL = 0 };
static unsigned float_mode(void) { return USUAL; }
static void set_float_mode(unsigned mode) { (void)mode; }
#endif

static void run_part(void *argument, int stage, int part, int thread) {
  unsigned mode = float_mode();
  if (mode != USUAL) set_float_mode(USUAL);
  chosen->run(argument, stage, part, thread);
  if (mode != USUAL) set_float_mode(mode);
}

static void prefetch_part(void *argument, int stage, int thread) {
  chosen->prefetch(argument, stage, thread);
}

/* Reduce the best tokens of the last stage's parts to one token per sample. Parts are in the order
 * of token ids, so the lowest id wins a tie. NaN loses to everything. */
static void reduce_samples(const Plan *plan) {
  const Pass *pass = plan->pass;
  int parts = plan->parts[plan->num_stages - 1];
  for (int i = 0; i < pass->num_samples; i++) {
    const BestToken *candidates = plan->best_tokens + i * parts, *best = candidates;
    for (int j = 1; j < parts; j++)
      if (candidates[j].score > best->score || best->score != best->score) best = candidates + j;
    SampleSpec *spec = pass->samples + i;
    spec->token = (int32_t)best->token;
    if (!spec->truncation) continue;
    const float *logits = pass->logits + (int64_t)spec->row * pass->head_size;
    if (pass->head_tokens) { /* `spread` has the logits of the last sample */
      for (int j = 0; j < pass->head_size; j++) pass->spread[pass->head_tokens[j]] = logits[j];
      logits = pass->spread;
    }
    spec->token = chosen->sample_truncated(spec, logits, sampled_tokens(pass));
  }
}

static int run_once(const Pass *pass, int threads) {
  int problem = check_pass(pass);
  Plan plan;
  if (problem) return problem;
  if (!make_plan(pass, threads, &plan)) return ERROR_MEMORY;
  Job job = {run_part, prefetch_part, &plan, plan.parts, plan.num_stages};
  pool_run(&job, threads, pass->team);
  if (plan.best_tokens) reduce_samples(&plan);
  return OK;
}

/* Sample a row of the logits of a pass again, as if they were without `token`. */
static int sample_without(const Pass *pass, int32_t token, SampleSpec *spec) {
  int32_t column = pass->head_tokens ? head_column(pass, token) : token;
  float *logit = pass->logits + (int64_t)spec->row * pass->head_size + column, kept = *logit;
  Pass again = *pass;
  Plan plan;
  again.samples = spec;
  if (!make_plan(&again, 1, &plan)) return ERROR_MEMORY;
  *logit = -INFINITY;
  int last = plan.num_stages - 1;
  for (int part = 0; part < plan.parts[last]; part++) run_part(&plan, last, part, 0);
  reduce_samples(&plan);
  *logit = kept;
  return OK;
}

static int is_end_token(const Pass *pass, int32_t token) {
  for (int i = 0; i < pass->num_end_tokens; i++)
    if (pass->end_tokens[i] == token) return 1;
  return 0;
}

/* Whether another thread wants the pass to end after the present step. */
static int is_interrupted(const Pass *pass) { return pass->interrupt && *pass->interrupt; }

/* The probability of the token that was sampled from the logits of `row`. */
static double probability_of(const Pass *pass, int32_t row, int32_t token) {
  const float *logits = pass->logits + (int64_t)row * pass->head_size;
  float logit = logits[pass->head_tokens ? head_column(pass, token) : token];
  return portable_exp((double)logit - chosen->logsumexp(logits, pass->head_size));
}

#endif
