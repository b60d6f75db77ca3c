/* The exported functions: selection of a variant, and passes, products and sampling with it. */
#include "check.h"
#include "drafting.h"
#include "passes.h"

#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* The compiled variants (those whose WITH_... is defined), the fastest first, each with the check
 * whether this machine supports it. */
typedef struct {
  const Kernels *kernels;
  int (*is_supported)(void);
} Candidate;

static int always(void) { return 1; }

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
extern const Kernels kernels_avx512vnni, kernels_avxvnni, kernels_avx2;

/* Words of CPUID and XGETBV. __builtin_cpu_supports is not available with every compiler. */
typedef struct {
  unsigned leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_1_eax;
  uint64_t xcr0; /* registers that the operating system saves */
} Features;

static Features detect_features(void) {
  Features cpu = {0};
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &cpu.leaf1_ecx, &d) || !(cpu.leaf1_ecx >> 27 & 1)) return cpu;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  cpu.xcr0 = (uint64_t)high << 32 | low;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    cpu.leaf7_ebx = b;
    cpu.leaf7_ecx = c;
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu.leaf7_1_eax = a;
  return cpu;
}

static int has_avx2(void) {
  Features cpu = detect_features();
  return (cpu.leaf1_ecx >> 12 & cpu.leaf1_ecx >> 28 & cpu.leaf1_ecx >> 29 &
          cpu.leaf7_ebx >> 5 & 1) &&
         (cpu.xcr0 & 6) == 6;
}
#ifdef WITH_avxvnni
static int has_avx_vnni(void) { return has_avx2() && (detect_features().leaf7_1_eax >> 4 & 1); }
#endif
#ifdef WITH_avx512vnni
static int has_avx512_vnni(void) {
  Features cpu = detect_features();
  return has_avx2() && (cpu.xcr0 & 0xe6) == 0xe6 &&
         (cpu.leaf7_ebx >> 16 & cpu.leaf7_ebx >> 30 & cpu.leaf7_ebx >> 31 &
          cpu.leaf7_ecx >> 11 & 1);
}
#endif
#elif defined(__aarch64__)
extern const Kernels kernels_neon_dot, kernels_neon;
#ifdef WITH_neon_dot
#if defined(__linux__)
#include <sys/auxv.h>
static int has_dot(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
#else
static int has_dot(void) { return 1; } /* every Apple processor has it */
#endif
#endif
#endif

static const Candidate candidates[] = {
#ifdef WITH_avx512vnni
    {&kernels_avx512vnni, has_avx512_vnni},
#endif
#ifdef WITH_avxvnni
    {&kernels_avxvnni, has_avx_vnni},
#endif
#ifdef WITH_avx2
    {&kernels_avx2, has_avx2},
#endif
#ifdef WITH_neon_dot
    {&kernels_neon_dot, has_dot},
#endif
#ifdef WITH_neon
    {&kernels_neon, always},
#endif
    {&kernels_scalar, always},
};

/* Whether a variant's results are plain C's. Those of builds that change sums are no machine's. */
static int is_usable(const Kernels *kernels) {
#ifdef ANYDECODE_FAST_MATH
  return kernels != NULL;
#else
  return kernels == &kernels_scalar || variants_agree(kernels, &kernels_scalar);
#endif
}

/* Select the variant `name`, or the fastest one that this machine supports where it is NULL.
 * Returns the variant's name, or NULL where there is no such variant. `failed` receives the name of
 * a variant whose results differ from plain C's, or NULL. */
EXPORT const char *anydecode_choose(const char *name, const char **failed) {
  *failed = NULL;
  for (size_t i = 0; i < sizeof candidates / sizeof *candidates; i++) {
    const Kernels *kernels = candidates[i].kernels;
    if ((name && strcmp(name, kernels->name)) || !candidates[i].is_supported()) continue;
    if (is_usable(kernels)) return (chosen = kernels)->name;
    *failed = kernels->name;
  }
  return NULL;
}

/* Sizes of the structs that Python mirrors: Op, Pass, Activations. */
EXPORT int64_t anydecode_size(int what) {
  return what == 0 ? sizeof(Op) : what == 1 ? sizeof(Pass) : sizeof(Activations);
}

typedef struct {
  const Matrix *to;
  const uint8_t *from;
  int64_t row_bytes;
} Repack;

enum { REPACK_PARTS = 64 };

static void repack_part(void *argument, int stage, int part, int thread) {
  (void)stage, (void)thread;
  const Repack *job = argument;
  int groups = column_groups(job->to);
  chosen->repack(job->to, job->from, job->row_bytes, first_part(groups, part, REPACK_PARTS),
                 first_part(groups, part + 1, REPACK_PARTS));
}

EXPORT void anydecode_repack(const Matrix *to, const uint8_t *from, int64_t row_bytes,
                             int threads) {
  static const int32_t parts = REPACK_PARTS;
  Repack repack = {to, from, row_bytes};
  Job job = {repack_part, NULL, &repack, &parts, 1};
  pool_run(&job, threads, 0);
}

EXPORT void anydecode_linear(const Matrix *w, const float *x, int n, const float *bias, float *out,
                             uint8_t *scratch) {
  chosen->linear(w, x, n, bias, out, scratch);
}

/* Bytes of a group of packed columns. */
EXPORT int64_t anydecode_group_bytes(int format, int in_features) {
  return packed_group_bytes(format, in_features);
}

/* Floats of scratch memory that one thread needs for attention. */
EXPORT int64_t anydecode_attention_floats(int head_dim, int group) {
  return attention_scratch_floats(head_dim, group);
}

/* Floats of scratch memory that one thread needs for a recurrence. */
EXPORT int64_t anydecode_recurrence_floats(int head_dim, int state_size) {
  return recurrence_floats(head_dim, state_size);
}

EXPORT void anydecode_unpack_row(const Matrix *w, int row, float *out) {
  chosen->unpack_row(w, row, out);
}

/* Go on after `pass`, which has one sample per sequence: run a pass over the sampled tokens at the
 * next positions, sample again, and so on. Drafts, which have probabilities, go on without those that
 * have ended; else all stop where one text ends. All stop where a sample is left to the caller, too.
 * Only a single sequence may have recurrences. */
static int further_steps(const Pass *pass, int threads) {
  int32_t tokens[MAX_SEQUENCES], positions[MAX_SEQUENCES], slots[MAX_SEQUENCES];
  int32_t tables[MAX_SEQUENCES], prefixes[MAX_SEQUENCES], adapters[MAX_SEQUENCES];
  int32_t rows[MAX_SEQUENCES], zeros[MAX_SEQUENCES] = {0}, numbers[MAX_SEQUENCES];
  double paths[MAX_SEQUENCES];
  SampleSpec specs[MAX_SEQUENCES];
  int n = pass->num_samples, lead = pass->scan_lead;
  size_t state = (size_t)pass->hidden_size * sizeof(float);
  for (int i = 0; i < n; i++) {
    int last = pass->logit_rows[pass->samples[i].row];
    numbers[i] = rows[i] = i;
    specs[i] = pass->samples[i];
    positions[i] = pass->positions[last];
    tables[i] = pass->table[last];
    if (pass->adapters) adapters[i] = pass->adapters[last];
    paths[i] = 1.0;
    if (pass->carries_states)
      memmove(pass->stream + (int64_t)i * pass->hidden_size,
              pass->stream + (int64_t)last * pass->hidden_size, state);
  }
  Pass next = *pass;
  next.samples = specs;
  next.num_captures = 0;
  next.tokens = tokens;
  next.positions = positions;
  next.slots = slots;
  next.table = tables;
  next.prefix = prefixes;
  next.tail_start = next.tail_length = zeros;
  next.logit_rows = rows;
  next.inputs = pass->carries_states ? pass->stream : NULL;
  if (pass->adapters) next.adapters = adapters;
  /* The last row's state is that of its run's last step; each further step replaces it. */
  int32_t scan_slots[MAX_WINDOW], scan_rows[MAX_WINDOW], scan_saves[MAX_WINDOW], scan_state = -1;
  int32_t scan_first[2] = {0, lead + 1};
  if (pass->num_runs) {
    scan_state = pass->scan_saves[pass->scan_first[pass->num_runs] - 1];
    next.num_runs = 1;
    next.scan_start = &scan_state;
    next.scan_first = scan_first;
    next.scan_slots = scan_slots;
    next.scan_rows = scan_rows;
    next.scan_saves = scan_saves;
    scan_rows[lead] = 0;
    scan_saves[lead] = scan_state;
  }
  for (int step = 0;; step++) {
    int left = 0, ends = is_interrupted(pass);
    pass->step_counts[pass->num_samples] = step + 1;
    for (int i = 0; i < n; i++) {
      int number = numbers[i];
      int64_t at = (int64_t)number * pass->num_steps + step;
      int32_t token = specs[i].token;
      pass->step_counts[number] = step + (token >= 0);
      if (token < 0) {
        ends = 1;
        continue;
      }
      pass->multi_step_tokens[at] = token;
      int is_full = step + 1 == pass->num_steps || step + 1 >= pass->step_limits[number];
      int is_last = is_full || is_end_token(pass, token);
      if (pass->step_probabilities) {
        double probability = probability_of(pass, specs[i].row, token);
        pass->step_probabilities[at] = (float)probability;
        paths[i] *= probability;
        is_last |= paths[i] < pass->min_probabilities[number];
      } else {
        ends |= is_last;
      }
      if (is_last) continue;
      if (left < i) {
        numbers[left] = number;
        specs[left] = specs[i];
        positions[left] = positions[i];
        tables[left] = tables[i];
        adapters[left] = adapters[i];
        paths[left] = paths[i];
        if (pass->carries_states)
          memmove(pass->stream + (int64_t)left * pass->hidden_size,
                  pass->stream + (int64_t)i * pass->hidden_size, state);
      }
      tokens[left++] = token;
    }
    if (!left || ends) return OK;
    n = next.num_rows = next.num_logits = next.num_samples = left;
    for (int i = 0; i < n; i++) {
      prefixes[i] = ++positions[i] + 1;
      if (prefixes[i] > pass->table_length[tables[i]]) return ERROR_TABLE;
      slots[i] = pass->tables[tables[i]][positions[i]];
      specs[i].row = i;
      specs[i].counter[0]++;
    }
    for (int j = 0; pass->num_runs && j <= lead; j++) {
      int32_t position = *positions - lead + j;
      scan_slots[j] = position < 0 ? -1 : pass->tables[*tables][position];
    }
    int problem = run_once(&next, threads);
    if (problem) return problem;
  }
}

/* Run one pass over a slice of a program, or num_steps passes in sequence (see
 * Pass.multi_step_tokens). Returns OK, or the first problem (enum Error). */
EXPORT int anydecode_run(const Pass *pass, int threads) {
  if (pass->num_steps > 1 && pass->drafting) return drafting_steps(pass, threads);
  int problem = run_once(pass, threads);
  if (problem || pass->num_steps < 2) return problem;
  return further_steps(pass, threads);
}

enum { READ_PARTS = 64 };

typedef struct {
  const uint64_t *words;
  int64_t count;
  uint64_t sums[READ_PARTS];
} Read;

static void read_part(void *argument, int stage, int part, int thread) {
  (void)stage, (void)thread;
  Read *job = argument;
  uint64_t sum[8] = {0};
  int64_t last = job->count / 8 * (part + 1) / READ_PARTS * 8;
  for (int64_t i = job->count / 8 * part / READ_PARTS * 8; i < last; i += 8)
    for (int j = 0; j < 8; j++) sum[j] += job->words[i + j];
  for (int j = 1; j < 8; j++) sum[0] += sum[j];
  job->sums[part] = sum[0];
}

/* The sum of `count` words, read by all threads: measures the read bandwidth of memory. */
EXPORT uint64_t anydecode_read(const uint64_t *words, int64_t count, int threads) {
  static const int32_t parts = READ_PARTS;
  Read read = {words, count, {0}};
  Job job = {read_part, NULL, &read, &parts, 1};
  pool_run(&job, threads, 0);
  uint64_t total = 0;
  for (int i = 0; i < READ_PARTS; i++) total += read.sums[i];
  return total;
}

EXPORT double anydecode_processor_seconds(void) { return pool_processor_seconds(); }

EXPORT int32_t anydecode_argmax(const float *logits, int64_t n) {
  return chosen->argmax(logits, n);
}

/* Ids and values [rows, count] of the `count` largest logits of each row. */
EXPORT void anydecode_top_k(const float *logits, int64_t rows, int64_t n, int count, int32_t *ids,
                              float *values) {
  for (int64_t r = 0; r < rows; r++)
    chosen->top_k(logits + r * n, n, count, ids + r * count, values + r * count);
}

EXPORT double anydecode_logsumexp(const float *logits, int64_t n) {
  return chosen->logsumexp(logits, n);
}

/* weights[i] = exp(x[i] - max). Returns the sum of the weights. */
EXPORT double anydecode_exponentials(const float *x, int64_t n, float *weights) {
  return chosen->exponentials(x, n, weights);
}

/* noise[i] = -log(-log(uniform[i])) */
EXPORT void anydecode_gumbel(const double *uniform, int64_t n, double *noise) {
  for (int64_t i = 0; i < n; i++) noise[i] = -portable_log(-portable_log(uniform[i]));
}

EXPORT int32_t anydecode_sample_gumbel(const float *logits, int64_t n, double inverse_temperature,
                                     uint64_t seed, uint32_t stream, uint32_t position,
                                     uint32_t attempt) {
  SampleSpec spec = {inverse_temperature, seed, {position, stream, attempt}, 0, 0, 0, NULL};
  BestToken best;
  chosen->sample(&spec, logits, 0, n, &best);
  return (int32_t)best.token;
}

/* The token, or -1 where the caller must sample. */
EXPORT int32_t anydecode_sample_truncated(const float *logits, int64_t n,
                                          const Truncation *truncation, uint64_t seed,
                                          uint32_t stream, uint32_t position, uint32_t attempt) {
  SampleSpec spec = {1.0, seed, {position, stream, attempt}, 0, 0, 0, truncation};
  return chosen->sample_truncated(&spec, logits, n);
}
