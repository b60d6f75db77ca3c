/* Block formats in their repacked order, and the int8 activations they are multiplied with.
 *
 * Eight output columns (the lanes) stand together. A block of 32 k is eight steps of 32 bytes,
 * byte 4 * c + j of step i being column c at k = 4 * i + j. Four-bit parts keep two steps in a
 * vector: i in the low nibbles, i + 4 in the high ones.
 *
 *   Q4_0  d[8]        q[128]          Q5_0  d[8]       q[128] h[32]      Q8_0  d[8]  q[256]
 *   Q4_1  d[8] m[8]   q[128]          Q5_1  d[8] m[8]  q[128] h[32]
 *   Q4_K  d[8] m[8], then 8 times  sc[8] mn[8] q[128]
 *   Q5_K  d[8] m[8], then 8 times  sc[8] mn[8] q[128] h[32]
 *   Q6_K  d[8],      then 8 times  sc[2][8]    q[128] h[64]
 *
 * d and m are float16; bit i of h is the fifth bit of step i, or bits 2i the two upper ones of
 * steps i and, in the second vector, i + 4. Q8_0 bytes are offset by 128. */
#ifndef ANYDECODE_QUANT_H
#define ANYDECODE_QUANT_H

#include "layout.h"
#include "simd.h"

/* Steps 4 * half to 4 * half + 3 of a block with nibbles: weights without their upper bits. */
INLINE void unpack_nibbles(const uint8_t *q, int half, b32 *w) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    b32 both = b32_load(q + 32 * i);
    w[i] = b32_and(half ? b32_right(both, 4) : both, 15);
  }
}

INLINE void add_fifth_bits(const uint8_t *h, int half, b32 *w) {
  b32 bits = b32_load(h);
  w[0] = b32_or(w[0], b32_and(half ? bits : b32_left(bits, 4), 16));
  w[1] = b32_or(w[1], b32_and(half ? b32_right(bits, 1) : b32_left(bits, 3), 16));
  w[2] = b32_or(w[2], b32_and(half ? b32_right(bits, 2) : b32_left(bits, 2), 16));
  w[3] = b32_or(w[3], b32_and(half ? b32_right(bits, 3) : b32_left(bits, 1), 16));
}

INLINE void add_two_bits(const uint8_t *h, int half, b32 *w) {
  b32 bits = b32_load(h + 32 * half);
  w[0] = b32_or(w[0], b32_and(b32_left(bits, 4), 48));
  w[1] = b32_or(w[1], b32_and(b32_left(bits, 2), 48));
  w[2] = b32_or(w[2], b32_and(bits, 48));
  w[3] = b32_or(w[3], b32_and(b32_right(bits, 2), 48));
}

/* The quants of a block start behind its scales. */
INLINE int scales_bytes(int format) { return is_super(format) ? 16 : header_bytes(format); }

/* Half a block: four steps, 16 k. */
INLINE void unpack_half(int format, const uint8_t *block, int half, b32 *w) {
  const uint8_t *q = block + scales_bytes(format);
  if (format == Q8_0) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) w[i] = prepare_8bit(b32_load(q + 128 * half + 32 * i));
    return;
  }
  unpack_nibbles(q, half, w);
  if (five_bits(format)) add_fifth_bits(q + 128, half, w);
  if (format == Q6_K) add_two_bits(q + 128, half, w);
}

/* Scales of a block for eight columns; `second` is the minimum, or Q6_K's second half. */
INLINE void load_scales(int format, const uint8_t *block, f8 super, f8 super_min, f8 *first,
                        f8 *second) {
  if (format == Q6_K) {
    *first = f8_mul(super, f8_load_s8(block));
    *second = f8_mul(super, f8_load_s8(block + 8));
  } else if (is_super(format)) {
    *first = f8_mul(super, f8_load_u8(block));
    *second = f8_mul(super_min, f8_load_u8(block + 8));
  } else {
    *first = f8_load_f16((const uint16_t *)block);
    *second = has_min(format) ? f8_load_f16((const uint16_t *)block + 8) : f8_set(0.0f);
  }
}

/* The integer sums of half a block, on top of those of the half before. */
INLINE sums dot_half(int format, int half, sums before, const b32 *w, const Activations *a) {
  const int8_t *q = a->q + 16 * half;
  if (format == Q8_0) return half ? more_8bit(before, w, q) : sums_8bit(w, q);
  if (format == Q6_K) return sums_6bit(w, q);
  if (five_bits(format)) return half ? more_5bit(before, w, q) : sums_5bit(w, q);
  return half ? more_4bit(before, w, q) : sums_4bit(w, q);
}

/* total + one block's part of the product; for Q6_K half a block's, `scale` being that half's. */
INLINE f8 add_block(int format, int half, f8 total, sums dot, const Activations *a, f8 scale,
                    f8 min) {
  i8 whole;
  if (format == Q8_0) whole = end_8bit(dot, a->low + a->high);
  else if (format == Q6_K || five_bits(format)) whole = end_wide(dot);
  else whole = end_4bit(dot);
  if (format == Q4_0) whole = i8_sub(whole, i8_set(8 * (a->low + a->high)));
  if (format == Q5_0) whole = i8_sub(whole, i8_set(16 * (a->low + a->high)));
  if (format == Q6_K) whole = i8_sub(whole, i8_set(32 * (half ? a->high : a->low)));
  total = f8_fma(f8_from_i8(whole), f8_mul(scale, f8_set(a->scale)), total);
  if (format == Q4_K || format == Q5_K) return f8_fma(min, f8_set(-a->scaled_sum), total);
  return has_min(format) ? f8_fma(min, f8_set(a->scaled_sum), total) : total;
}

/* One row in blocks of 32, rounded half to even to multiples of amax / 127. */
static void quantise_row(const float *x, int width, Activations *out) {
  for (int b = 0; b < width / QUANT_BLOCK; b++, x += QUANT_BLOCK, out++) {
    f8 largest = f8_set(0.0f);
    for (int i = 0; i < QUANT_BLOCK; i += LANES) largest = f8_max(f8_abs(f8_load(x + i)), largest);
    float amax = f8_largest(largest);
    float inverse = amax > 0 ? 127.0f / amax : 0.0f;
    round_block(x, inverse, out->q, &out->low, &out->high);
    out->scale = amax / 127.0f;
    out->scaled_sum = out->scale * (float)(out->low + out->high);
  }
}

#endif
