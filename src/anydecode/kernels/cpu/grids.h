/* Formats whose codes select points of a grid, four or eight values each (IQ1, IQ2, IQ3_XXS).
 *
 * Sixteen columns are stored together, as in the other formats; a block is 32 inputs. `i` holds the
 * lowest eight bits of the indices of points, by group of inputs and column; `h` the other bits.
 * Bit k of a byte of `s` is the sign of value k of a group of eight inputs.
 *
 *   IQ2_XXS         d[16], then 8 times  sc[16] i[4][16] s[4][16]
 *   IQ2_XS, IQ2_S   d[16], then 8 times  sc[16] i[4][16] s[4][16] h[16]
 *   IQ3_XXS         d[16], then 8 times  sc[16] i[8][16] s[4][16]
 *   IQ1_S           d[16], then 8 times  h[2][16] i[4][16]
 *   IQ1_M           d[16], then 8 times  sc[16] h[2][16] i[4][16]
 *
 * A scale is d times 2 * sc + 1, and 1/4 (IQ3_XXS) or 1/8. Formats with halves have two in a byte.
 * The points of IQ1 are moved by one eighth up or down. In IQ1_S, h is four indices' bits, then the
 * scale, then this direction; in IQ1_M, it is the bits and the direction of each group. */
#ifndef ANYDECODE_GRIDS_H
#define ANYDECODE_GRIDS_H

#include "layout.h"
#include "simd_pairs.h"

INLINE int is_iq1(int format) { return format == IQ1_S || format == IQ1_M; }

/* Where the parts of a block start. */
INLINE int indices_offset(int format) {
  return (format == IQ1_S ? 2 : format == IQ1_M ? 3 : 1) * GROUP;
}
INLINE int signs_offset(int format) { return (format == IQ3_XXS ? 9 : 5) * GROUP; }
INLINE int high_offset(int format) {
  if (is_iq1(format)) return format == IQ1_M ? GROUP : 0;
  return signs_offset(format) + 4 * GROUP;
}

/* What d is multiplied by, beside 2 * sc + 1: the numbers of a point are whole. */
INLINE float grid_unit(int format) {
  return format == IQ3_XXS ? 0.25f : 0.125f;
}

/* The bits of `h` of column c. */
INLINE int high_bits(int format, const uint8_t *block, int c) {
  const uint8_t *h = block + high_offset(format);
  return is_iq1(format) ? h[c] | h[GROUP + c] << 8 : h[c];
}

/* The index of the point of column c in group n: at most as large as the format's codes can be. */
INLINE int point_index(int format, const uint8_t *block, int n, int c) {
  int low = block[indices_offset(format) + GROUP * n + c];
  switch (format) {
    case IQ2_XS:
    case IQ2_S: return low | (high_bits(format, block, c) >> 2 * n & 3) << 8;
    case IQ1_S: return low | (high_bits(format, block, c) >> 3 * n & 7) << 8;
    case IQ1_M: return low | (high_bits(format, block, c) >> 4 * n & 7) << 8;
    default: return low;
  }
}

/* Whether the point of column c in group n of IQ1 is moved down. */
INLINE int is_moved_down(int format, const uint8_t *block, int n, int c) {
  return high_bits(format, block, c) >> (format == IQ1_S ? 15 : 4 * n + 3) & 1;
}

/* The numbers of steps 2 * t and 2 * t + 1 of a block for the columns [first, first + 8), offset by
 * 128. Those of `grid` are offset by 128, and in IQ1 by 1 more. */
INLINE void unpack_points(int format, const uint8_t *block, const uint8_t *grid, int t, int first,
                          b32 *w) {
  uint16_t index[2][LANES];
  int is_four = format == IQ3_XXS;
  for (int c = 0; c < LANES; c++) {
    index[0][c] = (uint16_t)point_index(format, block, is_four ? 2 * t : t, first + c);
    if (is_four) index[1][c] = (uint16_t)point_index(format, block, 2 * t + 1, first + c);
  }
  if (is_four) {
    w[0] = b32_gather4(grid, index[0]);
    w[1] = b32_gather4(grid, index[1]);
  } else {
    b32_gather8(grid, index[0], w);
  }
  if (is_iq1(format)) {
    uint8_t down[LANES];
    for (int c = 0; c < LANES; c++)
      down[c] = (uint8_t)-is_moved_down(format, block, t, first + c);
    b32 moved = b32_and(b32_mask(down, 0), 2);
    w[0] = b32_sub(w[0], moved);
    w[1] = b32_sub(w[1], moved);
    return;
  }
  const uint8_t *signs = block + signs_offset(format) + GROUP * t + first;
  for (int i = 0; i < 2; i++) {
    b32 mask = b32_mask(signs, i);
    w[i] = b32_sub(b32_xor(w[i], mask), mask);
  }
}

/* The nibbles of bytes that were converted to floats. */
INLINE void split_nibbles(f8x2 both, f8x2 *low, f8x2 *high) {
  *high = f8x2_round(f8x2_mul(f8x2_sub(both, f8x2_set(7.5f)), f8x2_set(0.0625f))); /* both / 16 */
  *low = f8x2_sub(both, f8x2_mul(*high, f8x2_set(16.0f)));
}

/* The scales of a block, or half a block. `super` includes the unit. */
INLINE f8x2 load_grid_scales(int format, const uint8_t *block, int half, f8x2 super) {
  f8x2 s = f8x2_load_u8(block + (format == IQ1_S ? GROUP : 0)), low, high;
  if (has_halves(format) || format == IQ1_S) {
    split_nibbles(s, &low, &high);
    s = half || format == IQ1_S ? high : low;
  }
  if (format == IQ1_S)
    s = f8x2_select_below(s, f8x2_set(8.0f), s, f8x2_sub(s, f8x2_set(8.0f)));
  return f8x2_mul(super, f8x2_add(f8x2_add(s, s), f8x2_set(1.0f)));
}

/* Seven signs, and an eighth by which their number is even. */
static uint8_t eight_signs(uint32_t seven) {
  return (uint8_t)((seven & 127) | (uint32_t)__builtin_parity(seven & 127) << 7);
}

/* Pack block j of a super-block of one column, whose packed block is zero. */
static void write_grid_block(int format, const uint8_t *stored, int j, int c, uint8_t *header,
                             uint8_t *block) {
  uint8_t *indices = block + indices_offset(format) + c, *signs = block + signs_offset(format) + c;
  uint8_t *high = block + high_offset(format) + c;
  uint16_t word;
  uint32_t words[2];
  memcpy(header + 2 * c, stored, 2);
  switch (format) {
    case IQ2_XXS:
    case IQ3_XXS: {
      int count = format == IQ2_XXS ? 4 : 8;
      memcpy(words, stored + (format == IQ2_XXS ? 6 + 8 * j : 66 + 4 * j), 4);
      for (int n = 0; n < count; n++)
        indices[GROUP * n] = stored[2 + 8 * j + n];
      for (int n = 0; n < 4; n++) signs[GROUP * n] = eight_signs(words[0] >> 7 * n);
      block[c] = (uint8_t)(words[0] >> 28);
      break;
    }
    case IQ2_XS:
      for (int n = 0; n < 4; n++) {
        memcpy(&word, stored + 2 + 8 * j + 2 * n, 2);
        indices[GROUP * n] = (uint8_t)word;
        *high |= (uint8_t)((word >> 8 & 1) << 2 * n);
        signs[GROUP * n] = eight_signs(word >> 9);
      }
      block[c] = stored[66 + j];
      break;
    case IQ2_S:
      for (int n = 0; n < 4; n++) {
        indices[GROUP * n] = stored[2 + 4 * j + n];
        signs[GROUP * n] = stored[34 + 4 * j + n];
      }
      *high = stored[66 + j];
      block[c] = stored[74 + j];
      break;
    case IQ1_S:
      for (int n = 0; n < 4; n++) indices[GROUP * n] = stored[2 + 4 * j + n];
      high[0] = stored[34 + 2 * j];
      high[GROUP] = stored[35 + 2 * j];
      break;
    default: /* IQ1_M, whose float16 is the upper quarters of four words of scales */
      for (int n = 0; n < 4; n++) indices[GROUP * n] = stored[4 * j + n];
      high[0] = stored[32 + 2 * j];
      high[GROUP] = stored[33 + 2 * j];
      for (int n = 0; n < 2; n++) header[2 * c + n] = (uint8_t)(
          stored[49 + 4 * n] >> 4 | (stored[51 + 4 * n] & 240));
      memcpy(&word, stored + 48 + j / 2 * 2, 2);
      word = (uint16_t)(word >> j % 2 * 6);
      block[c] = (uint8_t)((word & 7) | (word >> 3 & 7) << 4);
  }
}

/* A block of column c in float32. */
static void unpack_grid_block(int format, const uint8_t *block, const uint8_t *grid, int c,
                              float super, float factor, float *out) {
  int both = format == IQ1_S ? block[GROUP + c] >> 4 & 7 : block[c];
  int size = format == IQ3_XXS ? 4 : 8;
  for (int k = 0; k < QUANT_BLOCK; k++) {
    int s = !has_halves(format) ? both : k < 16 ? both & 15 : both >> 4, n = k / 8;
    int value = grid[size * point_index(format, block, k / size, c) + k % size] - 128;
    if (is_iq1(format)) value -= 2 * is_moved_down(format, block, n, c);
    else if (block[signs_offset(format) + GROUP * n + c] >> (k % 8) & 1) value = -value;
    out[k] = factor * (super * (float)(2 * s + 1) * (float)value);
  }
}

#endif
