/* Block formats in their packed order, and the int8 activations they are multiplied with.
 *
 * Eight output columns (the lanes) are stored together. A block of 32 inputs is eight steps of 32
 * bytes; byte 4 * c + j of step i belongs to column c and input k = 4 * i + j. Four-bit codes have
 * two steps per vector: step i in the low nibbles, step i + 4 in the high ones.
 *
 *   Q4_0  d[8]        q[128]          Q5_0  d[8]       q[128] h[32]      Q8_0  d[8]  q[256]
 *   Q4_1  d[8] m[8]   q[128]          Q5_1  d[8] m[8]  q[128] h[32]
 *   Q4_K  d[8] m[8], then 8 times  sc[8] mn[8] q[128]
 *   Q5_K  d[8] m[8], then 8 times  sc[8] mn[8] q[128] h[32]
 *   Q6_K  d[8],      then 8 times  sc[2][8]    q[128] h[64]
 *
 * d and m are float16. Bit i of h[32] is the fifth bit of step i; bits 2i and 2i + 1 of h[64] are
 * the two upper bits of step i and, in the second vector, of step i + 4. Q8_0 codes are offset
 * by 128. */
#ifndef ANYDECODE_QUANT_H
#define ANYDECODE_QUANT_H

#include "layout.h"
#include "simd.h"

/* Bytes of a block's scales, after which its codes start. */
INLINE int scales_bytes(int format) { return is_super(format) ? 16 : header_bytes(format); }

/* Bits `from` to `from` + `count` - 1 of each byte, moved to bit 4. */
INLINE b32 upper_bits(b32 x, int from, int count) {
  int mask = ((1 << count) - 1) << 4;
  switch (from) {
    case 0: return b32_and(b32_left(x, 4), mask);
    case 1: return b32_and(b32_left(x, 3), mask);
    case 2: return b32_and(b32_left(x, 2), mask);
    case 3: return b32_and(b32_left(x, 1), mask);
    case 4: return b32_and(x, mask);
    case 5: return b32_and(b32_right(x, 1), mask);
    case 6: return b32_and(b32_right(x, 2), mask);
    default: return b32_and(b32_right(x, 3), mask);
  }
}

/* The codes of step `i` of a block with nibbles. */
INLINE b32 unpack_step(int format, const uint8_t *block, int i) {
  const uint8_t *q = block + scales_bytes(format);
  b32 both = b32_load(q + 32 * (i % 4)), w = b32_and(i < 4 ? both : b32_right(both, 4), 15);
  if (is_five_bit(format)) w = b32_or(w, upper_bits(b32_load(q + 128), i, 1));
  if (format == Q6_K) w = b32_or(w, upper_bits(b32_load(q + 128 + 32 * (i / 4)), i % 4 * 2, 2));
  return w;
}

/* Scales of a block for eight columns. `second` is the minimum, or the scale of a Q6_K block's
 * second half. */
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

/* total + the product of one block, or half a block of Q6_K, from its integer sum; `scale` is that
 * of the block or half. */
INLINE f8 add_block(int format, int half, f8 total, i8 sum, const Activations *a, f8 scale,
                    f8 min) {
  if (format == Q4_0) sum = i8_sub(sum, i8_set(8 * (a->low + a->high)));
  if (format == Q5_0) sum = i8_sub(sum, i8_set(16 * (a->low + a->high)));
  if (format == Q6_K) sum = i8_sub(sum, i8_set(32 * (half ? a->high : a->low)));
  total = f8_fma(f8_from_i8(sum), f8_mul(scale, f8_set(a->scale)), total);
  if (format == Q4_K || format == Q5_K) return f8_fma(min, f8_set(-a->scaled_sum), total);
  return has_min(format) ? f8_fma(min, f8_set(a->scaled_sum), total) : total;
}

/* Quantise one row in blocks of 32, rounded half to even to multiples of amax / 127. */
static void quantise_row(const float *x, int width, Activations *out) {
  for (int b = 0; b < width / QUANT_BLOCK; b++, x += QUANT_BLOCK, out++) {
    f8 max = f8_set(0.0f);
    for (int i = 0; i < QUANT_BLOCK; i += LANES) max = f8_max(f8_abs(f8_load(x + i)), max);
    float amax = f8_reduce_max(max);
    float inverse = amax > 0 ? 127.0f / amax : 0.0f;
    round_block(x, inverse, out->q, &out->low, &out->high);
    out->scale = amax / 127.0f;
    out->scaled_sum = out->scale * (float)(out->low + out->high);
  }
}

#endif
