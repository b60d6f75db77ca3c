/* Block formats in their packed order, and the int8 activations they are multiplied with.
 *
 * Sixteen output columns are stored together: a lane each of a pair of vectors. A product reads all
 * parts in the order in which they lie in memory, which the processor's prefetcher can follow. A
 * block of 32 inputs is eight steps of 64 bytes; byte 4 * c + j of step i belongs to column c and input k = 4 * i + j. Four-bit codes have
 * two steps per pair of vectors: step i in the low nibbles, step i + 4 in the high ones. With n = 16:
 *
 *   Q4_0  d[n]        q[256]          Q5_0  d[n]       h[64] q[256]      Q8_0  d[n]  q[512]
 *   Q4_1  d[n] m[n]   q[256]          Q5_1  d[n] m[n]  h[64] q[256]
 *   Q4_K  d[n] m[n], then 8 times  sc[n] mn[n] q[256]
 *   Q5_K  d[n] m[n], then 8 times  sc[n] mn[n] h[64] q[256]
 *   Q6_K  d[n],      then 8 times  sc[2][n]    h[128] q[256]
 *   Q2_K  d[n] m[n], then 8 times  sm[2][n]    q[128]
 *   Q3_K  d[n],      then 8 times  sc[2][n]    h[64]  q[128]
 *   IQ4_NL  d[n]     q[256]           IQ4_XS, IQ3_S  d[n], then 8 times  sc[n] q[256]
 *   MXFP4   e[n]     q[256]           NVFP4   s[2][n]  q[256]
 *   TQ1_0, TQ2_0  d[n], then 8 times  q[128]
 *   NF4, FP4      f[n], then twice    q[256]
 *
 * d and m are float16, f is float32. Bit i of h[64] is the highest bit of step i; bits 2i and 2i + 1
 * of h[128] are the two upper bits of step i and, in the second pair of vectors, of step i + 4. Two-bit
 * codes have four steps per pair. sm holds a scale in its low nibble and a minimum in its high one; e is the
 * biased exponent of the scale, s a scale of 4 exponent and 3 mantissa bits (E4M3). Q8_0 codes are
 * offset by 128. */
#ifndef ANYDECODE_QUANT_H
#define ANYDECODE_QUANT_H

#include "grids.h"
#include "layout.h"
#include "simd_pairs.h"

/* Bytes of a block's scales, after which its codes start. */
INLINE int scales_bytes(int format) {
  if (is_ternary(format) || has_wide_table(format)) return 0;
  if (has_byte_scale(format)) return GROUP;
  return is_super(format) ? 2 * GROUP : header_bytes(format);
}

/* Bytes of the upper bits of a block's codes, which lie before the lower ones. */
INLINE int upper_bytes(int format) {
  if (format == Q6_K) return 128;
  return is_five_bit(format) || format == Q3_K ? 64 : 0;
}

/* What a code, or the value in a table that it selects, is larger than the number that it stands
 * for: products have unsigned codes. */
INLINE int code_offset(int format) {
  switch (format) {
    case TQ1_0:
    case TQ2_0: return 1;
    case Q3_K: return 4;
    case Q4_0: return 8;
    case MXFP4:
    case NVFP4: return 12;
    case IQ3_S: return 15;
    case Q5_0: return 16;
    case Q6_K: return 32;
    case Q8_0:
    case IQ4_NL:
    case IQ4_XS: return 128;
    default: return 0;
  }
}

/* The values of a format's 16 codes. Those of NF4 and FP4 are numbers of 16 bits: 256 times what the
 * first part stands for, plus what the second part does (see `wide_unit`). */
INLINE const uint8_t *code_values(int format, int part) {
  static const uint8_t iq4[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                  129, 141, 153, 166, 181, 197, 217, 241};
  static const uint8_t mxfp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  static const uint8_t iq3[16] = {16, 18, 20, 22, 24, 26, 28, 30, 14, 12, 10, 8, 6, 4, 2, 0};
  static const uint8_t nf4[2][16] = {
      {3, 41, 63, 79, 93, 105, 117, 128, 138, 148, 159, 170, 183, 198, 218, 253},
      {220, 186, 14, 71, 12, 120, 39, 128, 107, 143, 45, 158, 110, 160, 156, 36}};
  static const uint8_t fp4[2][16] = {
      {128, 128, 129, 129, 128, 128, 128, 128, 128, 128, 128, 127, 128, 128, 128, 128},
      {128, 129, 0, 64, 192, 224, 160, 176, 128, 127, 0, 192, 64, 32, 96, 80}};
  if (has_wide_table(format)) return format == NF4 ? nf4[part] : fp4[part];
  if (format == IQ3_S) return iq3;
  return format == MXFP4 || format == NVFP4 ? mxfp4 : iq4;
}

/* What the numbers of `code_values` are multiples of. Those of FP4 are exact; those of NF4 are rounded
 * by at most 8 millionths, which is the least of all units that two signed bytes allow. */
INLINE float wide_unit(int format) { return format == NF4 ? 1.0f / 31908.0f : 1.0f / 192.0f; }

/* Bits `from` to `from` + `count` - 1 of each byte, moved to bit `to`. */
INLINE b32x2 moved_bits(b32x2 x, int from, int count, int to) {
  int mask = ((1 << count) - 1) << to;
  switch (from - to) {
    case -4: return b32x2_and(b32x2_left(x, 4), mask);
    case -3: return b32x2_and(b32x2_left(x, 3), mask);
    case -2: return b32x2_and(b32x2_left(x, 2), mask);
    case -1: return b32x2_and(b32x2_left(x, 1), mask);
    case 0: return b32x2_and(x, mask);
    case 1: return b32x2_and(b32x2_right(x, 1), mask);
    case 2: return b32x2_and(b32x2_right(x, 2), mask);
    case 3: return b32x2_and(b32x2_right(x, 3), mask);
    case 4: return b32x2_and(b32x2_right(x, 4), mask);
    case 5: return b32x2_and(b32x2_right(x, 5), mask);
    default: return b32x2_and(b32x2_right(x, 6), mask);
  }
}

/* Pair `i` of the vectors of a block's codes, from byte `from` of the codes on. */
INLINE b32x2 load_codes(int format, const uint8_t *block, int from, int i) {
  return b32x2_load(block + scales_bytes(format) + from + 64 * i);
}

/* The codes of step `i` of a block with nibbles or two-bit codes, or their values in a table of
 * bytes. */
INLINE b32x2 unpack_step(int format, const uint8_t *block, int i) {
  if (is_two_bit(format)) {
    b32x2 w = moved_bits(load_codes(format, block, upper_bytes(format), i / 4), i % 4 * 2, 2, 0);
    if (format != Q3_K) return w;
    return b32x2_or(w, moved_bits(load_codes(format, block, 0, 0), i, 1, 2));
  }
  b32x2 both = load_codes(format, block, upper_bytes(format), i % 4);
  b32x2 w = b32x2_and(i < 4 ? both : b32x2_right(both, 4), 15);
  if (is_five_bit(format)) w = b32x2_or(w, moved_bits(load_codes(format, block, 0, 0), i, 1, 4));
  if (format == Q6_K)
    w = b32x2_or(w, moved_bits(load_codes(format, block, 0, i / 4), i % 4 * 2, 2, 4));
  return has_table(format) && !has_wide_table(format) ? b32x2_lookup(code_values(format, 0), w) : w;
}

/* The scales of a super-block, with the unit of its codes. */
INLINE f8x2 load_super(int format, const uint8_t *header) {
  if (has_wide_table(format))
    return f8x2_mul(f8x2_load((const float *)header), f8x2_set(wide_unit(format)));
  f8x2 super = f8x2_load_f16((const uint16_t *)header);
  return has_grid(format) ? f8x2_mul(super, f8x2_set(grid_unit(format))) : super;
}

/* Scales and minima of a block, or half a block. */
INLINE void load_scales(int format, const uint8_t *block, int half, f8x2 super, f8x2 super_min,
                        f8x2 *scale, f8x2 *min) {
  *min = f8x2_set(0.0f);
  if (has_grid(format)) {
    *scale = load_grid_scales(format, block, half, super);
  } else if (format == Q2_K) {
    f8x2 low, high;
    split_nibbles(f8x2_load_u8(block + GROUP * half), &low, &high);
    *scale = f8x2_mul(super, low);
    *min = f8x2_mul(super_min, high);
  } else if (format == NVFP4) {
    *scale = f8x2_load_e4m3(block + GROUP * half);
  } else if (is_ternary(format) || has_wide_table(format)) {
    *scale = super;
  } else if (has_halves(format) || has_byte_scale(format)) {
    *scale = f8x2_mul(super, f8x2_load_s8(block + GROUP * half));
  } else if (is_super(format)) {
    *scale = f8x2_mul(super, f8x2_load_u8(block));
    *min = f8x2_mul(super_min, f8x2_load_u8(block + GROUP));
  } else if (format == MXFP4) {
    *scale = f8x2_load_e8m0(block);
  } else {
    *scale = f8x2_load_f16((const uint16_t *)block);
    if (has_min(format)) *min = f8x2_load_f16((const uint16_t *)block + GROUP);
  }
}

/* The sum of the activations of a block, or half a block, that a sum of products covers. */
INLINE int32_t covered_sum(int format, int half, const Activations *a) {
  if (has_halves(format)) return half ? a->high : a->low;
  return a->low + a->high;
}

/* total + the product of one block, or half a block, from its integer sum; `scale` and `min` are
 * those of the block or half. */
INLINE f8x2 add_block(int format, int half, f8x2 total, i8x2 sum, const Activations *a, f8x2 scale,
                      f8x2 min) {
  int offset = has_bytes(format) ? 0 : code_offset(format);
  if (offset) sum = i8x2_sub(sum, i8x2_set(offset * covered_sum(format, half, a)));
  total = f8x2_fma(f8x2_from_i8x2(sum), f8x2_mul(scale, f8x2_set(a->scale)), total);
  if (format == Q2_K)
    return f8x2_fma(min, f8x2_set(-a->scale * (float)covered_sum(format, half, a)), total);
  if (format == Q4_K || format == Q5_K) return f8x2_fma(min, f8x2_set(-a->scaled_sum), total);
  return has_min(format) ? f8x2_fma(min, f8x2_set(a->scaled_sum), total) : total;
}

/* Quantise one row in blocks of 32, rounded half to even to multiples of amax / 127. */
static void quantise_row(const float *x, int width, Activations *out) {
  for (int b = 0; b < width / QUANT_BLOCK; b++, x += QUANT_BLOCK, out++) {
    f8 max = f8_set(0.0f);
    for (int i = 0; i < QUANT_BLOCK; i += LANES) max = f8_max(f8_abs(f8_load(x + i)), max);
    float amax = f8_reduce_max(max);
    round_block(x, int8_factor(amax), out->q, &out->low, &out->high);
    out->scale = amax / 127.0f;
    out->scaled_sum = out->scale * (float)(out->low + out->high);
  }
}

/* Quantise one row, whose numbers are taken in the order of these indices; NULL: as they are. */
static void quantise_inputs(const float *x, const int32_t *order, int width, Activations *out) {
  float block[QUANT_BLOCK];
  if (!order) {
    quantise_row(x, width, out);
    return;
  }
  for (int b = 0; b < width / QUANT_BLOCK; b++, order += QUANT_BLOCK) {
    for (int i = 0; i < QUANT_BLOCK; i++) block[i] = x[order[i]];
    quantise_row(block, QUANT_BLOCK, out + b);
  }
}

#endif
