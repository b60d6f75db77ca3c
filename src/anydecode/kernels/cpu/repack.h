/* Packs GGUF's rows of blocks, or rows of plain numbers, into groups of sixteen columns (see
 * quant.h). */
#ifndef ANYDECODE_REPACK_H
#define ANYDECODE_REPACK_H

#include "ptq161.h"
#include "quant.h"

/* A block of 32 weights of one row: codes as stored, float32, float16 or integer scales. */
typedef struct {
  float f;
  uint16_t d, m;
  uint8_t first, second;
  uint8_t q[QUANT_BLOCK];
} Block;

/* Add `count` bits from bit `at` on of each of 32 bytes to the codes, from their bit `to` on. */
INLINE void add_bits(const uint8_t *bytes, int at, int count, int to, uint8_t *codes) {
  uint64_t mask = 0x0101010101010101u * ((1u << count) - 1);
  for (int k = 0; k < QUANT_BLOCK; k += 8) {
    uint64_t from, sum;
    memcpy(&from, bytes + k, 8);
    memcpy(&sum, codes + k, 8);
    sum |= (from >> at & mask) << to;
    memcpy(codes + k, &sum, 8);
  }
}

INLINE void k_scale(const uint8_t *packed, int j, uint8_t *scale, uint8_t *min) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *min = packed[j + 4] & 63;
  } else {
    *scale = (uint8_t)((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4);
    *min = (uint8_t)((packed[j + 4] >> 4) | (packed[j] >> 6) << 4);
  }
}

INLINE void read_k6(const uint8_t *p, int j, Block *out) {
  add_bits(p + 64 * (j / 4) + 32 * (j % 2), j % 4 / 2 * 4, 4, 0, out->q);
  add_bits(p + 128 + 32 * (j / 4), j % 4 * 2, 2, 4, out->q);
  out->first = p[192 + 2 * j];
  out->second = p[193 + 2 * j];
  memcpy(&out->d, p + 208, 2);
}

/* Scales and minima, or biased scales, of a block's halves, and codes of two or three bits. */
INLINE void read_k23(int format, const uint8_t *p, int j, Block *out) {
  add_bits(p + (format == Q2_K ? 16 : 32) + 32 * (j / 4), j % 4 * 2, 2, 0, out->q);
  if (format == Q2_K) {
    out->first = p[2 * j];
    out->second = p[2 * j + 1];
    memcpy(&out->d, p + 80, 2);
    memcpy(&out->m, p + 82, 2);
    return;
  }
  add_bits(p, j, 1, 2, out->q);
  uint8_t scale[2];
  for (int half = 0; half < 2; half++) {
    int i = 2 * j + half;
    int low = p[96 + i % 8] >> (i / 8 * 4) & 15, high = p[104 + i % 4] >> (i / 4 * 2) & 3;
    scale[half] = (uint8_t)((low | high << 4) - 32);
  }
  out->first = scale[0];
  out->second = scale[1];
  memcpy(&out->d, p + 108, 2);
}

INLINE void iq4_xs_scale(const uint8_t *p, int j, Block *out) {
  int low = p[4 + j / 2] >> (j % 2 * 4) & 15, high = p[2 + j / 4] >> (j % 4 * 2) & 3;
  out->first = (uint8_t)((low | high << 4) - 32);
  memcpy(&out->d, p, 2);
}

/* Ternary codes: four to a byte, or five as the digits of a fraction in base 3, the first highest. */
INLINE void read_ternary(int format, const uint8_t *p, int j, Block *out) {
  static const uint8_t powers[5] = {1, 3, 9, 27, 81};
  memcpy(&out->d, p + (format == TQ2_0 ? 64 : 52), 2);
  if (format == TQ2_0) {
    add_bits(p + 32 * (j / 4), j % 4 * 2, 2, 0, out->q);
    return;
  }
  for (int k = 0; k < QUANT_BLOCK; k++) {
    /* Values 0 to 159 are in bytes 0 to 31, the next 80 in bytes 32 to 47, 16 in bytes 48 to 51. */
    int i = 32 * j + k, digit = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
    int at = i < 160 ? i % 32 : i < 240 ? 32 + i % 16 : 48 + i % 4;
    uint8_t rest = (uint8_t)(p[at] * powers[digit]);
    out->q[k] = (uint8_t)(rest * 3 >> 8);
  }
}

/* Half a block of 64, whose quarters have scales. Their sign bits have no meaning; 127 is no number
 * and counts as 0. */
INLINE void read_nvfp4(const uint8_t *p, int j, Block *out) {
  uint8_t scale[2];
  for (int half = 0; half < 2; half++) {
    const uint8_t *q = p + 4 + 16 * j + 8 * half;
    uint8_t stored = p[2 * j + half];
    scale[half] = stored == 127 ? 0 : stored & 127;
    for (int k = 0; k < 8; k++) {
      out->q[16 * half + k] = q[k] & 15;
      out->q[16 * half + 8 + k] = q[k] >> 4;
    }
  }
  out->first = scale[0];
  out->second = scale[1];
}

/* The magnitudes of the points are odd numbers below 16. */
INLINE void read_iq3_s(const uint8_t *p, const uint8_t *grid, int j, Block *out) {
  memcpy(&out->d, p, 2);
  out->first = (uint8_t)(2 * (p[106 + j / 2] >> (j % 2 * 4) & 15) + 1);
  for (int k = 0; k < QUANT_BLOCK; k++) {
    int n = k / 4, index = p[2 + 8 * j + n] | (p[66 + j] >> n & 1) << 8;
    int magnitude = grid[4 * index + k % 4] - 128, sign = p[74 + 4 * j + k / 8] >> (k % 8) & 1;
    out->q[k] = (uint8_t)((magnitude >> 1 & 7) | sign << 3);
  }
}

INLINE void read_q8_0(const uint8_t *p, Block *out) {
  memcpy(&out->d, p, 2);
  for (int k = 0; k < QUANT_BLOCK; k++) out->q[k] = p[2 + k] ^ 0x80;
}

INLINE int stored_bytes(int format) {
  switch (format) {
    case Q4_0: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case IQ4_NL: return 18;
    case IQ4_XS: return 136;
    case MXFP4: return 17;
    case NVFP4: return 36;
    case TQ1_0: return 54;
    case TQ2_0: return 66;
    case IQ1_S: return 50;
    case IQ1_M: return 56;
    case IQ2_XXS: return 66;
    case IQ2_XS: return 74;
    case IQ2_S: return 82;
    case IQ3_XXS: return 98;
    case IQ3_S: return 110;
    case NF4:
    case FP4: return 36;
    case Q4_K: return 144;
    case Q5_K: return 176;
    default: return 210;
  }
}

INLINE void read_block(int format, const uint8_t *row, const uint8_t *grid, int b, Block *out) {
  if (format == NVFP4) {
    read_nvfp4(row + (int64_t)(b / 2) * stored_bytes(format), b % 2, out);
    return;
  }
  if (format == Q8_0) {
    read_q8_0(row + (int64_t)b * stored_bytes(format), out);
    return;
  }
  const uint8_t *p = row + (int64_t)(b / 8) * stored_bytes(format);
  switch (format) {
    case Q2_K:
    case Q3_K: read_k23(format, p, b % 8, out); break;
    case Q6_K: read_k6(p, b % 8, out); break;
    case IQ3_S: read_iq3_s(p, grid, b % 8, out); break;
    default: read_ternary(format, p, b % 8, out);
  }
}

/* The bits `mask` << `from` of each byte of `count` words, side by side in one word; `size`: of them. */
INLINE uint32_t join_bits(const uint32_t *words, int count, int from, uint32_t mask, int size) {
  uint32_t joined = 0;
  for (int i = 0; i < count; i++) joined |= (words[i] >> from & mask) << (size * i);
  return joined;
}

/* Write the codes of one column into a packed block. */
INLINE void write_column(int format, const Block *from, int c, uint8_t *codes) {
  uint8_t *upper = codes + 4 * c, *q = upper + upper_bytes(format);
  uint32_t step[8], word;
  memcpy(step, from->q, QUANT_BLOCK);
  if (format == Q8_0) {
    for (int i = 0; i < 8; i++) memcpy(q + 64 * i, step + i, 4);
    return;
  }
  if (is_two_bit(format)) {
    for (int i = 0; i < 2; i++) {
      word = join_bits(step + 4 * i, 4, 0, 0x03030303, 2);
      memcpy(q + 64 * i, &word, 4);
    }
    word = join_bits(step, 8, 2, 0x01010101, 1);
    if (format == Q3_K) memcpy(upper, &word, 4);
    return;
  }
  for (int i = 0; i < 4; i++) {
    word = (step[i] & 0x0f0f0f0f) | (step[i + 4] & 0x0f0f0f0f) << 4;
    memcpy(q + 64 * i, &word, 4);
  }
  for (int i = 0; i < 2 && format == Q6_K; i++) {
    word = join_bits(step + 4 * i, 4, 4, 0x03030303, 2);
    memcpy(upper + 64 * i, &word, 4);
  }
}

INLINE void write_scales(int format, const Block *from, int c, uint8_t *header, uint8_t *block) {
  if (format == MXFP4 || format == NVFP4) header[c] = from->first;
  else if (has_wide_table(format)) memcpy(header + 4 * c, &from->f, 4);
  else memcpy(header + 2 * c, &from->d, 2);
  if (format == NVFP4) header[GROUP + c] = from->second;
  if (has_min(format)) memcpy(header + 2 * (GROUP + c), &from->m, 2);
  if (is_super(format) && scales_bytes(format) >= GROUP) block[c] = from->first;
  if (is_super(format) && scales_bytes(format) == 2 * GROUP) block[GROUP + c] = from->second;
}

INLINE void write_block(int format, const Block *from, int c, uint8_t *header, uint8_t *block) {
  write_scales(format, from, c, header, block);
  write_column(format, from, c, block + scales_bytes(format));
}

/* Whether a format stores nibbles in the packed order already, so that whole words are copied. */
INLINE int has_words(int format) {
  return format == Q4_0 || format == Q4_1 || format == Q5_0 || format == Q5_1 ||
         format == IQ4_NL || format == IQ4_XS || format == MXFP4 || has_wide_table(format);
}

/* Pack block b of one column in Q4_K or Q5_K, whose codes are nibbles of 32 consecutive bytes. */
INLINE void write_k4(int format, const uint8_t *row, int b, int c, uint8_t *header,
                     uint8_t *block) {
  const uint8_t *p = row + (int64_t)(b / 8) * stored_bytes(format);
  const uint8_t *q = p + (format == Q5_K ? 48 : 16) + 32 * (b % 8 / 2);
  uint8_t *upper = block + scales_bytes(format) + 4 * c, *to = upper + upper_bytes(format);
  int shift = b % 2 * 4;
  Block scales;
  memcpy(&scales.d, p, 2);
  memcpy(&scales.m, p + 2, 2);
  k_scale(p + 4, b % 8, &scales.first, &scales.second);
  write_scales(format, &scales, c, header, block);
  for (int i = 0; i < 4; i++) {
    uint32_t low, high;
    memcpy(&low, q + 4 * i, 4);
    memcpy(&high, q + 16 + 4 * i, 4);
    low = (low >> shift & 0x0f0f0f0f) | (high >> shift & 0x0f0f0f0f) << 4;
    memcpy(to + 64 * i, &low, 4);
  }
  if (format != Q5_K) return;
  uint32_t step[8];
  memcpy(step, p + 16, QUANT_BLOCK);
  step[0] = join_bits(step, 8, b % 8, 0x01010101, 1);
  memcpy(upper, step, 4);
}

/* Pack block b of one column, of a format with `has_words`. */
INLINE void write_words(int format, const uint8_t *row, int b, int c, uint8_t *header,
                        uint8_t *block) {
  int block_of_row = is_super(format) ? b / super_blocks(format) : b;
  const uint8_t *q = row + (int64_t)block_of_row * stored_bytes(format);
  uint32_t high = 0, spread = 0;
  Block scales;
  if (format == IQ4_XS) {
    iq4_xs_scale(q, b % 8, &scales);
    q += 8 + 16 * (b % 8);
  } else if (has_wide_table(format)) {
    memcpy(&scales.f, q, 4);
    q += 4 + 16 * (b % 2);
  } else if (format == MXFP4) {
    scales.first = *q++;
  } else {
    memcpy(&scales.d, q, 2);
    if (has_min(format)) memcpy(&scales.m, q + 2, 2);
    q += has_min(format) ? 4 : 2;
  }
  if (is_five_bit(format)) {
    memcpy(&high, q, 4);
    q += 4;
  }
  write_scales(format, &scales, c, header, block);
  uint8_t *upper = block + scales_bytes(format) + 4 * c, *to = upper + upper_bytes(format);
  for (int i = 0; i < 4; i++) memcpy(to + 64 * i, q + 4 * i, 4);
  if (!is_five_bit(format)) return;
  /* Four bits at a time become the lowest bits of four bytes. */
  for (int i = 0; i < 8; i++)
    spread |= ((high >> (4 * i) & 15) * 0x204081u & 0x01010101u) << i;
  memcpy(upper, &spread, 4);
}

INLINE void repack_blocks(int format, const Matrix *to, const uint8_t *from, int64_t row_bytes,
                          int group) {
  int blocks = to->in_features / QUANT_BLOCK;
  uint8_t *p = (uint8_t *)to->data + group * to->group_bytes, *header = p;
  int is_full = (group + 1) * GROUP <= to->out_features;
  if (!is_full || has_grid(format)) memset(p, 0, to->group_bytes); /* else all bytes are written */
  for (int b = 0; b < blocks; b++) {
    if (is_super(format) && b % super_blocks(format) == 0) {
      header = p;
      p += header_bytes(format);
    } else if (!is_super(format)) {
      header = p;
    }
    for (int c = 0; c < GROUP && group * GROUP + c < to->out_features; c++) {
      const uint8_t *row = from + (int64_t)(group * GROUP + c) * row_bytes;
      if (has_words(format)) {
        write_words(format, row, b, c, header, p);
      } else if (format == Q4_K || format == Q5_K) {
        write_k4(format, row, b, c, header, p);
      } else if (has_grid(format)) {
        const uint8_t *stored = row + (int64_t)(b / 8) * stored_bytes(format);
        write_grid_block(format, stored, b % 8, c, header, p);
      } else {
        Block block = {0};
        read_block(format, row, to->grid, b, &block);
        write_block(format, &block, c, header, p);
      }
    }
    p += block_bytes(format);
  }
}

INLINE void repack_numbers(int size, const Matrix *to, const uint8_t *from, int64_t row_bytes,
                           int group) {
  uint8_t *p = (uint8_t *)to->data + group * to->group_bytes;
  memset(p, 0, to->group_bytes);
  for (int c = 0; c < GROUP && group * GROUP + c < to->out_features; c++) {
    const uint8_t *row = from + (int64_t)(group * GROUP + c) * row_bytes;
    for (int64_t k = 0; k < to->in_features; k++)
      memcpy(p + (GROUP * k + c) * size, row + k * size, size);
  }
}

static void repack_floats(const Matrix *to, const uint8_t *from, int64_t row_bytes, int group) {
  if (to->format == F32) repack_numbers(4, to, from, row_bytes, group);
  else repack_numbers(2, to, from, row_bytes, group);
}

/* Loading a model is mostly this, so that each format has a function without branches on it. */
#define REPACK(format)                                                                      \
  static __attribute__((noinline)) void repack_##format(                                    \
      const Matrix *to, const uint8_t *from, int64_t row_bytes, int group) {                \
    repack_blocks(format, to, from, row_bytes, group);                                      \
  }
REPACK(Q8_0)
REPACK(Q4_0)
REPACK(Q4_1)
REPACK(Q5_0)
REPACK(Q5_1)
REPACK(Q2_K)
REPACK(Q3_K)
REPACK(Q4_K)
REPACK(Q5_K)
REPACK(Q6_K)
REPACK(IQ4_NL)
REPACK(IQ4_XS)
REPACK(MXFP4)
REPACK(NVFP4)
REPACK(TQ1_0)
REPACK(TQ2_0)
REPACK(IQ1_S)
REPACK(IQ1_M)
REPACK(IQ2_XXS)
REPACK(IQ2_XS)
REPACK(IQ2_S)
REPACK(IQ3_XXS)
REPACK(IQ3_S)
REPACK(NF4)
REPACK(FP4)

typedef void (*RepackGroup)(const Matrix *, const uint8_t *, int64_t, int);
static const RepackGroup repack_of[NUM_FORMATS] = {
    [F32] = repack_floats,      [F16] = repack_floats,      [BF16] = repack_floats,
    [Q8_0] = repack_Q8_0,       [Q4_0] = repack_Q4_0,       [Q4_1] = repack_Q4_1,
    [Q5_0] = repack_Q5_0,       [Q5_1] = repack_Q5_1,       [Q2_K] = repack_Q2_K,
    [Q3_K] = repack_Q3_K,       [Q4_K] = repack_Q4_K,       [Q5_K] = repack_Q5_K,
    [Q6_K] = repack_Q6_K,       [IQ4_NL] = repack_IQ4_NL,   [IQ4_XS] = repack_IQ4_XS,
    [MXFP4] = repack_MXFP4,     [NVFP4] = repack_NVFP4,     [TQ1_0] = repack_TQ1_0,
    [TQ2_0] = repack_TQ2_0,     [IQ1_S] = repack_IQ1_S,     [IQ1_M] = repack_IQ1_M,
    [IQ2_XXS] = repack_IQ2_XXS, [IQ2_XS] = repack_IQ2_XS,   [IQ2_S] = repack_IQ2_S,
    [IQ3_XXS] = repack_IQ3_XXS, [IQ3_S] = repack_IQ3_S,     [PTQ161] = repack_ptq161,
    [NF4] = repack_NF4,         [FP4] = repack_FP4};

/* Pack groups [first, last) of `to` from rows that are `row_bytes` apart. */
static void repack(const Matrix *to, const uint8_t *from, int64_t row_bytes, int first, int last) {
  for (int g = first; g < last; g++) repack_of[to->format](to, from, row_bytes, g);
}

/* The nibble of column c at input k. */
INLINE int nibble_at(const uint8_t *q, int c, int k) {
  int i = k / 4, offset = 4 * c + k % 4;
  return i < 4 ? q[64 * i + offset] & 15 : q[64 * (i - 4) + offset] >> 4;
}

/* The number that the code of column c at input k stands for, before scale and minimum. */
static int code_at(int format, const uint8_t *codes, int c, int k) {
  int i = k / 4, offset = 4 * c + k % 4;
  const uint8_t *q = codes + upper_bytes(format);
  if (format == Q8_0) return q[64 * i + offset] - code_offset(format);
  if (is_two_bit(format)) {
    int code = q[64 * (i / 4) + offset] >> (i % 4 * 2) & 3;
    if (format == Q3_K) code |= (codes[offset] >> i & 1) << 2;
    return code - code_offset(format);
  }
  int value = nibble_at(q, c, k);
  if (is_five_bit(format)) value |= ((codes[offset] >> i) & 1) << 4;
  if (format == Q6_K) value |= ((codes[64 * (i / 4) + offset] >> (i % 4 * 2)) & 3) << 4;
  if (has_table(format)) value = code_values(format, 0)[value];
  return value - code_offset(format);
}

/* The same of any format, as the tables of NF4 and FP4 have it. */
static float number_at(int format, const uint8_t *codes, int c, int k) {
  static const float nf4[16] = {
      -1.0f,       -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
      -0.091050036f, 0.0f,      0.0795803f,   0.1609302f,  0.2461123f,   0.33791524f,
      0.44070983f, 0.562617f,   0.72295684f,  1.0f};
  static const float fp4[8] = {0.0f, 1.0f / 192, 2.0f / 3, 1.0f, 1.0f / 3, 0.5f, 1.0f / 6, 0.25f};
  if (!has_wide_table(format)) return (float)code_at(format, codes, c, k);
  int code = nibble_at(codes, c, k);
  if (format == NF4) return nf4[code];
  return code < 8 ? fp4[code] : -fp4[code - 8];
}

static void unpack_block(int format, const uint8_t *block, int c, float super, float super_min,
                         float factor, float *out) {
  uint16_t d = 0, m = 0;
  float scale[2], min[2] = {0.0f, 0.0f};
  for (int half = 0; half < 2; half++) {
    uint8_t one = block[GROUP * half * has_halves(format) + c];
    if (format == Q2_K) {
      scale[half] = super * (float)(one & 15);
      min[half] = -(super_min * (float)(one >> 4));
    } else if (format == NVFP4) {
      scale[half] = e4m3_to_float(one);
    } else if (is_ternary(format) || has_wide_table(format)) {
      scale[half] = super;
    } else if (has_halves(format) || has_byte_scale(format)) {
      scale[half] = super * (float)(int8_t)one;
    } else if (is_super(format)) {
      scale[half] = super * (float)one;
      min[half] = -(super_min * (float)block[GROUP + c]);
    } else if (format == MXFP4) {
      scale[half] = ldexpf(1.0f, one - 128);
    } else {
      memcpy(&d, block + 2 * c, 2);
      if (has_min(format)) memcpy(&m, block + 2 * (GROUP + c), 2);
      scale[half] = f16_to_float(d);
      min[half] = f16_to_float(m);
    }
  }
  const uint8_t *q = block + scales_bytes(format);
  for (int k = 0; k < QUANT_BLOCK; k++)
    out[k] = factor * (scale[k / 16] * number_at(format, q, c, k) + min[k / 16]);
}

/* One row of the matrix in float32, such as an embedding. */
static void unpack_row(const Matrix *w, int row, float *out) {
  if (w->format == PTQ161) {
    unpack_ptq161(w, row, out);
    return;
  }
  int c = row % GROUP;
  const uint8_t *p = w->data + row / GROUP * w->group_bytes;
  if (is_float(w->format)) {
    for (int64_t k = 0; k < w->in_features; k++) {
      const uint16_t *half = (const uint16_t *)p + GROUP * k + c;
      float one;
      if (w->format == F32) one = ((const float *)p)[GROUP * k + c];
      else one = w->format == F16 ? f16_to_float(*half) : bf16_to_float(*half);
      out[k] = w->scale * one;
    }
    return;
  }
  float super = 0.0f, super_min = 0.0f;
  for (int b = 0; b < w->in_features / QUANT_BLOCK; b++) {
    if (is_super(w->format) && b % super_blocks(w->format) == 0) {
      uint16_t d, m = 0;
      memcpy(&d, p + 2 * c, 2);
      if (has_min(w->format)) memcpy(&m, p + 2 * (GROUP + c), 2);
      super = f16_to_float(d);
      if (has_wide_table(w->format)) memcpy(&super, p + 4 * c, 4);
      if (has_grid(w->format)) super *= grid_unit(w->format);
      super_min = f16_to_float(m);
      p += header_bytes(w->format);
    }
    float *part = out + b * QUANT_BLOCK;
    if (has_grid(w->format)) unpack_grid_block(w->format, p, w->grid, c, super, w->scale, part);
    else unpack_block(w->format, p, c, super, super_min, w->scale, part);
    p += block_bytes(w->format);
  }
}

#endif
