/* The start-up check: products of small random matrices in every format, argmax, sampling and
 * logsumexp, compared bit by bit. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

enum { OUT = 27, IN = 256, ROWS = 5, GROUPS = 2 };

static const int stored_row_bytes[NUM_FORMATS] = {
    [F32] = IN * 4, [F16] = IN * 2, [BF16] = IN * 2, [Q8_0] = 272, [Q4_0] = 144, [Q4_1] = 160,
    [Q5_0] = 176, [Q5_1] = 192, [Q2_K] = 84, [Q3_K] = 110, [Q4_K] = 144, [Q5_K] = 176,
    [Q6_K] = 210, [IQ4_NL] = 144, [IQ4_XS] = 136, [MXFP4] = 136, [NVFP4] = 144, [TQ1_0] = 54,
    [TQ2_0] = 66, [IQ1_S] = 50, [IQ1_M] = 56, [IQ2_XXS] = 66, [IQ2_XS] = 74, [IQ2_S] = 82,
    [IQ3_XXS] = 98, [IQ3_S] = 110, [PTQ161] = 60, [NF4] = 144, [FP4] = 144};

static uint32_t next_random(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

/* Fill with random bytes. Their exponents are set to a small one, so that products are finite. */
static void fill(int format, uint8_t *stored, uint32_t *state) {
  int bytes = stored_row_bytes[format] * OUT;
  for (int i = 0; i < bytes; i++) stored[i] = (uint8_t)next_random(state);
  if (format == F32)
    for (int i = 3; i < bytes; i += 4) stored[i] = 0x3e;
  else if (format == F16 || format == BF16)
    for (int i = 1; i < bytes; i += 2) stored[i] = 0x3c;
  else
    for (int i = 0; i < bytes; i++) stored[i] &= 0xbb; /* no scale is infinite */
}

static int products_agree(int format, const Kernels *candidate, const Kernels *plain) {
  static _Alignas(64) uint8_t stored[IN * 4 * OUT], packed[2][IN * 4 * GROUP * GROUPS];
  static _Alignas(64) uint8_t scratch[ROWS * (IN / 32) * sizeof(Activations)];
  static _Alignas(64) float x[ROWS * IN], out[2][ROWS * OUT];
  static uint8_t grid[8 * 2048]; /* as many points as the largest one has */
  static uint16_t columns[2 * IN]; /* of PTQ161 */
  const Kernels *both[2] = {candidate, plain};
  uint32_t state = 1u + (uint32_t)format;
  int64_t group_bytes = packed_group_bytes(format, IN);
  fill(format, stored, &state);
  for (size_t i = 0; i < sizeof grid; i++) grid[i] = (uint8_t)(64 + (next_random(&state) & 127));
  for (int i = 0; i < IN; i++) {
    columns[i] = (uint16_t)(i * 77 % IN);
    columns[IN + i] = (uint16_t)(0x3f00 | (next_random(&state) & 0x7f));
  }
  for (int i = 0; i < ROWS * IN; i++) x[i] = (float)next_random(&state) * 0x1p-23f - 1.0f;
  for (int i = 0; i < 2; i++) {
    Matrix w = {packed[i], grid, group_bytes, format, OUT, IN, 0.75f, columns};
    both[i]->repack(&w, stored, stored_row_bytes[format], 0, GROUPS);
    both[i]->linear(&w, x, ROWS, NULL, out[i], scratch);
  }
  return memcmp(out[0], out[1], sizeof out[0]) == 0;
}

int variants_agree(const Kernels *candidate, const Kernels *plain) {
  static _Alignas(64) float logits[1000];
  uint32_t state = 7;
  for (int format = 0; format < NUM_FORMATS; format++)
    if (!products_agree(format, candidate, plain)) return 0;
  for (int i = 0; i < 1000; i++) logits[i] = (float)next_random(&state) * 0x1p-20f;
  if (candidate->argmax(logits, 999) != plain->argmax(logits, 999)) return 0;
  for (uint32_t i = 0; i < 16; i++) {
    SampleSpec spec = {0.1, 5, {3, i, 1}, 0, 0, 0};
    BestToken best[2];
    candidate->sample(&spec, logits, 0, 999, best);
    plain->sample(&spec, logits, 0, 999, best + 1);
    if (best[0].token != best[1].token || best[0].score != best[1].score) return 0;
  }
  return candidate->logsumexp(logits, 999) == plain->logsumexp(logits, 999);
}
