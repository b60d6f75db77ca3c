/* Products with matrices whose salient input columns have four bits and whose other columns have
 * one (kernels/ptq161.py has the format).
 *
 * A packed group has two parts of eight output columns. A part has four numbers of each column in
 * float16 (the factors of the sums of signs, inputs, codes and salient inputs), then a byte of signs
 * for each input, then four bytes, the bit planes of the codes, for each salient input. Bit c belongs
 * to column c. A code q is the sum of the signs of its bits, times 1, 2, 4 and 8: 2q - 15. */
#ifndef ANYDECODE_PTQ161_H
#define ANYDECODE_PTQ161_H

#include "simd_pairs.h"

enum { PTQ161_HEADER = 64, PTQ161_STORED_HEADER = 8 };

#define SIGN(b, i) ((b) >> (i) & 1 ? 1.0f : -1.0f)
#define SIGNS_1(b)                                                                           \
  {SIGN(b, 0), SIGN(b, 1), SIGN(b, 2), SIGN(b, 3), SIGN(b, 4), SIGN(b, 5), SIGN(b, 6), SIGN(b, 7)}
#define SIGNS_4(b) SIGNS_1(b), SIGNS_1(b + 1), SIGNS_1(b + 2), SIGNS_1(b + 3)
#define SIGNS_16(b) SIGNS_4(b), SIGNS_4(b + 4), SIGNS_4(b + 8), SIGNS_4(b + 12)
#define SIGNS_64(b) SIGNS_16(b), SIGNS_16(b + 16), SIGNS_16(b + 32), SIGNS_16(b + 48)
static const _Alignas(32) float signs_of[256][LANES] = {SIGNS_64(0), SIGNS_64(64), SIGNS_64(128),
                                                        SIGNS_64(192)};

/* Pack group `group` from rows of four float16, bits of signs and nibbles. */
static void repack_ptq161(const Matrix *to, const uint8_t *from, int64_t row_bytes, int group) {
  int salient = ptq161_salient(to->in_features), signs = to->in_features - salient;
  uint8_t *start = (uint8_t *)to->data + group * to->group_bytes;
  memset(start, 0, (size_t)to->group_bytes);
  for (int i = 0; i < GROUP && group * GROUP + i < to->out_features; i++) {
    const uint8_t *row = from + (int64_t)(group * GROUP + i) * row_bytes;
    uint8_t *p = start + i / LANES * (to->group_bytes / 2);
    int c = i % LANES;
    for (int j = 0; j < 4; j++) memcpy(p + 16 * j + 2 * c, row + 2 * j, 2);
    const uint8_t *bits = row + PTQ161_STORED_HEADER, *codes = bits + (signs + 7) / 8;
    uint8_t *out = p + PTQ161_HEADER;
    for (int k = 0; k < signs; k++) *out++ |= (uint8_t)((bits[k / 8] >> (k % 8) & 1) << c);
    for (int k = 0; k < salient; k++) {
      int code = codes[k / 2] >> (k % 2 * 4) & 15;
      for (int j = 0; j < 4; j++) *out++ |= (uint8_t)((code >> j & 1) << c);
    }
  }
}

INLINE f8 ptq161_codes(const uint8_t *planes) {
  f8 code = f8_load(signs_of[planes[0]]);
  code = f8_fma(f8_load(signs_of[planes[1]]), f8_set(2.0f), code);
  code = f8_fma(f8_load(signs_of[planes[2]]), f8_set(4.0f), code);
  return f8_fma(f8_load(signs_of[planes[3]]), f8_set(8.0f), code);
}

/* Inputs are read in the order of `w->columns`. The sums of inputs are the same for all columns. */
INLINE void ptq161_tile(int rows, const Matrix *w, const uint8_t *const *p, const float *const *x,
                        f8x2 *out) {
  int salient = ptq161_salient(w->in_features), signs = w->in_features - salient;
  const uint16_t *column = w->columns, *scale = w->columns + w->in_features;
  f8 sum[4], total[4][2], coded[4][2];
  for (int r = 0; r < rows; r++) sum[r] = total[r][0] = total[r][1] = f8_set(0.0f);
  for (int k = 0; k < signs; k++) {
    f8 factor = f8_set(bf16_to_float(scale[k])), sign[2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) sign[g] = f8_load(signs_of[p[g][PTQ161_HEADER + k]]);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      f8 one = f8_mul(factor, f8_set(x[r][column[k]]));
      sum[r] = f8_add(sum[r], one);
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) total[r][g] = f8_fma(sign[g], one, total[r][g]);
    }
  }
  for (int g = 0; g < 2; g++) {
    uint16_t head[16];
    memcpy(head, p[g], sizeof head); /* parts may have an odd number of bytes */
    f8 spread = f8_load_f16(head), mean = f8_load_f16(head + 8);
    for (int r = 0; r < rows; r++)
      total[r][g] = f8_fma(mean, sum[r], f8_mul(spread, total[r][g]));
  }
  for (int r = 0; r < rows; r++) sum[r] = coded[r][0] = coded[r][1] = f8_set(0.0f);
  for (int k = 0; k < salient; k++) {
    f8 code[2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) code[g] = ptq161_codes(p[g] + PTQ161_HEADER + signs + 4 * k);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      f8 one = f8_set(x[r][column[signs + k]]);
      sum[r] = f8_add(sum[r], one);
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) coded[r][g] = f8_fma(code[g], one, coded[r][g]);
    }
  }
  for (int g = 0; g < 2; g++) {
    uint16_t head[16];
    memcpy(head, p[g] + sizeof head, sizeof head);
    f8 step = f8_load_f16(head), middle = f8_load_f16(head + 8);
    for (int r = 0; r < rows; r++) {
      f8 part = f8_fma(middle, sum[r], f8_mul(step, coded[r][g]));
      total[r][g] = f8_add(total[r][g], part);
    }
  }
  for (int r = 0; r < rows; r++) out[r] = f8x2_join(total[r][0], total[r][1]);
}

/* One row of the matrix in float32. */
static void unpack_ptq161(const Matrix *w, int row, float *out) {
  int salient = ptq161_salient(w->in_features), signs = w->in_features - salient, c = row % LANES;
  const uint8_t *p = w->data + row / LANES * (w->group_bytes / 2);
  const uint16_t *scale = w->columns + w->in_features;
  float head[4];
  for (int i = 0; i < 4; i++) {
    uint16_t half;
    memcpy(&half, p + 2 * (8 * i + c), 2);
    head[i] = f16_to_float(half);
  }
  p += PTQ161_HEADER;
  for (int k = 0; k < signs; k++) {
    float value = head[1] + (p[k] >> c & 1 ? head[0] : -head[0]);
    out[w->columns[k]] = w->scale * (value * bf16_to_float(scale[k]));
  }
  for (int k = 0; k < salient; k++) {
    const uint8_t *plane = p + signs + 4 * k;
    int code = 0;
    for (int j = 0; j < 4; j++) code += (plane[j] >> c & 1) << j;
    out[w->columns[signs + k]] = w->scale * (head[2] * (float)(2 * code - 15) + head[3]);
  }
}

#endif
