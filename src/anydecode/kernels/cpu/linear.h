/* Products of rows with packed matrices. The rows of a tile share the unpacked weights; each output
 * is summed in the same order of inputs in every tile size. */
#ifndef ANYDECODE_LINEAR_H
#define ANYDECODE_LINEAR_H

#include "ptq161.h"
#include "quant.h"

/* The integer sums and totals of a tile stay in registers; AVX-512 has 32 of them. */
#ifdef HAS_WIDE_PAIRS
enum { TILE_ROWS = 8 };
#else
enum { TILE_ROWS = 4 };
#endif

/* Integer sums of one block, or half a block, of a format with nibbles or two-bit codes, for `rows`
 * rows. Two steps at a time, so that weights and sums of a whole tile stay in registers. Partial sums
 * of 16 bits are widened to int32 before they can overflow. */
INLINE void nibble_sums(int format, int rows, const uint8_t *p, const Activations *const *a, int b,
                        int half, i8x2 *sum) {
  i8x2 dot[TILE_ROWS];
  int first = has_halves(format) ? 2 * half : 0, last = has_halves(format) ? first + 2 : 4;
  int is_large = has_halves(format) || is_five_bit(format) || has_table(format);
  int span = PARTIAL_BITS == 32 || !is_large ? 4 : format == Q6_K ? 1 : 2;
#pragma GCC unroll 4
  for (int j = first; j < last; j++) {
    int starts_span = (j - first) % span == 0, ends_span = (j + 1) % span == 0 || j + 1 == last;
    int step[2] = {has_halves(format) ? 2 * j : j, has_halves(format) ? 2 * j + 1 : j + 4};
    b32x2 w[2];
#pragma GCC unroll 2
    for (int t = 0; t < 2; t++) w[t] = pin_byte_pair(unpack_step(format, p, step[t]));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
      for (int t = 0; t < 2; t++) {
        quad_pair x = quad_pair_load(a[r][b].q + 4 * step[t]);
        dot[r] = pin_pair(starts_span && t == 0 ? partial_pair_dot(w[t], x)
                                                : add_partial_pair_dot(dot[r], w[t], x));
      }
      if (ends_span)
        sum[r] = j - first >= span ? pin_pair(i8x2_add(sum[r], widen_partial_pair(dot[r])))
                                   : widen_partial_pair(dot[r]);
    }
  }
}

/* The same of a format whose codes are bytes, or select them. */
INLINE void byte_sums(int format, int rows, const uint8_t *p, const Activations *const *a, int b,
                      i8x2 *sum) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    byte_pair w =
        byte_pair_weights(format == Q8_0 ? load_codes(format, p, 0, i) : unpack_step(format, p, i));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      quad_pair x = quad_pair_load(a[r][b].q + 4 * i);
      if (i == 0) sum[r] = initial_byte_pair_sum(covered_sum(format, 0, a[r] + b));
      sum[r] = pin_pair(add_byte_pair_dot(sum[r], w, x));
    }
  }
}

/* The same of a format whose codes select numbers of 16 bits, as two bytes: the sum of the first ones
 * is multiplied by 256 before that of the second ones is added. Two products of bytes per row are
 * the fewest: an instruction multiplies 16-bit numbers with half as many activations, and no 255
 * multiples of one unit are within 8 millionths of the numbers of NF4. With products that take twice
 * the time of those of IQ4_NL, codes are read once for both. */
INLINE void wide_sums(int format, int rows, const uint8_t *p, const Activations *const *a, int b,
                      i8x2 *sum) {
  i8x2 low[TILE_ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    b32x2 codes = unpack_step(format, p, i);
    byte_pair first = byte_pair_weights(b32x2_lookup(code_values(format, 0), codes));
    byte_pair second = byte_pair_weights(b32x2_lookup(code_values(format, 1), codes));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      quad_pair x = quad_pair_load(a[r][b].q + 4 * i);
      if (i == 0) sum[r] = low[r] = initial_byte_pair_sum(covered_sum(format, 0, a[r] + b));
      sum[r] = pin_pair(add_byte_pair_dot(sum[r], first, x));
      low[r] = pin_pair(add_byte_pair_dot(low[r], second, x));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = i8x2_add(i8x2_left(sum[r], 8), low[r]);
}

INLINE void grid_sums(int format, int rows, const uint8_t *p, const uint8_t *grid,
                      const Activations *const *a, int b, int half, i8x2 *sum) {
  int first = has_halves(format) ? 2 * half : 0, last = has_halves(format) ? first + 2 : 4;
#pragma GCC unroll 4
  for (int t = first; t < last; t++) {
    b32 both[2][2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) unpack_points(format, p, grid, t, LANES * g, both[g]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      byte_pair w = byte_pair_weights(b32x2_join(both[0][i], both[1][i]));
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        quad_pair x = quad_pair_load(a[r][b].q + 8 * t + 4 * i);
        int is_first = t == first && i == 0;
        sum[r] = pin_pair(add_byte_pair_dot(
            is_first ? initial_byte_pair_sum(covered_sum(format, half, a[r] + b)) : sum[r], w, x));
      }
    }
  }
}

/* Add one block, or half a block, to the totals of a tile. */
INLINE void add_blocks(int format, int rows, const uint8_t *p, const uint8_t *grid,
                       const Activations *const *a, int b, int half, f8x2 super, f8x2 super_min,
                       f8x2 *total) {
  f8x2 scale, min;
  i8x2 sum[TILE_ROWS];
  if (has_grid(format)) grid_sums(format, rows, p, grid, a, b, half, sum);
  else if (has_wide_table(format)) wide_sums(format, rows, p, a, b, sum);
  else if (has_bytes(format)) byte_sums(format, rows, p, a, b, sum);
  else nibble_sums(format, rows, p, a, b, half, sum);
  load_scales(format, p, half, super, super_min, &scale, &min);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
    total[r] = add_block(format, half, total[r], sum[r], a[r] + b, scale, min);
}

enum { PREFETCHED_BLOCKS = 32 }; /* how many blocks before their use weights are prefetched */

/* Whether a product of so many rows prefetches weights. One row, and two of a fast format, read weights
 * so fast that the processor's own prefetcher, which follows the misses of a sequential read, is
 * faster. */
INLINE int prefetches(int format, int rows, int blocks) {
  int is_slow = blocks > 64 || has_halves(format) || PARTIAL_BITS == 16;
  return rows > 2 || (rows == 2 && is_slow);
}

INLINE void prefetch_weights(const uint8_t *p, int bytes) {
#pragma GCC unroll 9
  for (int o = 0; o < bytes; o += 64) __builtin_prefetch(p + o, 0, 2);
}

/* `ahead`: how many bytes after those that are read weights are prefetched; 0: none are. */
INLINE void quant_tile(int format, int rows, const uint8_t *p, const uint8_t *grid, int blocks,
                       const Activations *const *rows_of, int64_t ahead, f8x2 *out) {
  const Activations *a[TILE_ROWS];
  f8x2 total[TILE_ROWS]; /* not `out`: gcc would also store these in every block */
  f8x2 super = f8x2_set(0.0f), super_min = super;
  for (int r = 0; r < rows; r++) a[r] = rows_of[r];
  for (int r = 0; r < rows; r++) total[r] = f8x2_set(0.0f);
  for (int b = 0; b < blocks; b++) {
    if (is_super(format) && b % super_blocks(format) == 0) {
      super = load_super(format, p);
      if (has_min(format)) super_min = f8x2_load_f16((const uint16_t *)p + GROUP);
      if (ahead) prefetch_weights(p + ahead, header_bytes(format));
      p += header_bytes(format);
    }
    add_blocks(format, rows, p, grid, a, b, 0, super, super_min, total);
    if (has_halves(format)) add_blocks(format, rows, p, grid, a, b, 1, super, super_min, total);
    if (ahead) prefetch_weights(p + ahead, block_bytes(format));
    p += block_bytes(format);
  }
  for (int r = 0; r < rows; r++) out[r] = total[r];
}

enum { FLOAT_ROWS = 4 };

INLINE f8x2 load_weights(int format, const uint8_t *p, int64_t k) {
  if (format == F32) return f8x2_load((const float *)p + GROUP * k);
  const uint16_t *half = (const uint16_t *)p + GROUP * k;
  return format == F16 ? f8x2_load_f16(half) : f8x2_load_bf16(half);
}

INLINE void float_tile(int format, int rows, const Matrix *w, const uint8_t *p,
                       const float *const *x, f8x2 *total) {
  if (format == PTQ161) {
    const uint8_t *const parts[2] = {p, p + w->group_bytes / 2};
    ptq161_tile(rows, w, parts, x, total);
    return;
  }
  for (int r = 0; r < rows; r++) total[r] = f8x2_set(0.0f);
  for (int k = 0; k < w->in_features; k++) {
    f8x2 weights = load_weights(format, p, k);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) total[r] = f8x2_fma(weights, f8x2_set(x[r][k]), total[r]);
  }
}

/* Scale, add the bias and write the columns [column, column + 8) that exist. */
INLINE void write_columns(const Matrix *w, int column, f8 total, const float *bias, float *out) {
  int left = w->out_features - column;
  total = f8_mul(total, f8_set(w->scale));
  if (left >= LANES) {
    if (bias) total = f8_add(total, f8_load(bias + column));
    f8_store(out + column, total);
    return;
  }
  float lanes[LANES];
  f8_store(lanes, total);
  for (int i = 0; i < left; i++) out[column + i] = bias ? lanes[i] + bias[column + i] : lanes[i];
}

INLINE void write_group(const Matrix *w, int group, f8x2 total, const float *bias, float *out) {
  for (int i = 0; i < 2; i++)
    write_columns(w, GROUP * group + LANES * i, f8x2_part(total, i), bias, out);
}

/* How many rows the next tile has. A last tile of one row would take nearly the time of two. */
INLINE int tile_rows(int left) {
  if (TILE_ROWS == 8 && (left == 5 || left == 9)) return 5;
  if (left >= TILE_ROWS) return TILE_ROWS;
  return left >= 4 ? 4 : left;
}

INLINE void quant_columns(int format, const Matrix *w, const Activations *x, int64_t x_stride,
                          int n, const float *bias, float *out, int64_t stride, int first,
                          int last) {
  int blocks = w->in_features / QUANT_BLOCK;
  int64_t bytes = column_groups(w) * w->group_bytes, distance = PREFETCHED_BLOCKS * block_bytes(format);
  for (int g = first; g < last; g++) {
    const uint8_t *p = w->data + g * w->group_bytes;
    for (int r = 0, rows; r < n; r += rows) {
      const Activations *a[TILE_ROWS];
      f8x2 total[TILE_ROWS];
      rows = tile_rows(n - r);
      int is_first = r == 0 && g * w->group_bytes + distance < bytes;
      int64_t ahead = is_first && prefetches(format, rows, blocks) ? distance : 0;
      for (int i = 0; i < rows; i++) a[i] = x + (r + i) * x_stride;
      switch (rows) {
        case 1: quant_tile(format, 1, p, w->grid, blocks, a, ahead, total); break;
        case 2: quant_tile(format, 2, p, w->grid, blocks, a, ahead, total); break;
        case 3: quant_tile(format, 3, p, w->grid, blocks, a, ahead, total); break;
        case 4: quant_tile(format, 4, p, w->grid, blocks, a, ahead, total); break;
        case 5: /* this and 8 only where TILE_ROWS is 8 */
          if (TILE_ROWS == 8) quant_tile(format, 5, p, w->grid, blocks, a, ahead, total);
          break;
        default:
          if (TILE_ROWS == 8) quant_tile(format, TILE_ROWS, p, w->grid, blocks, a, ahead, total);
      }
      for (int i = 0; i < rows; i++) write_group(w, g, total[i], bias, out + (r + i) * stride);
    }
  }
}

INLINE void float_columns(int format, const Matrix *w, const float *x, int64_t x_stride, int n,
                          const float *bias, float *out, int64_t stride, int first, int last) {
  for (int g = first; g < last; g++) {
    const uint8_t *p = w->data + g * w->group_bytes;
    for (int r = 0; r < n; r += FLOAT_ROWS) {
      const float *a[FLOAT_ROWS];
      f8x2 total[FLOAT_ROWS];
      int rows = n - r < FLOAT_ROWS ? n - r : FLOAT_ROWS;
      for (int i = 0; i < rows; i++) a[i] = x + (r + i) * x_stride;
      switch (rows) {
        case 1: float_tile(format, 1, w, p, a, total); break;
        case 2: float_tile(format, 2, w, p, a, total); break;
        case 3: float_tile(format, 3, w, p, a, total); break;
        default: float_tile(format, FLOAT_ROWS, w, p, a, total); break;
      }
      for (int i = 0; i < rows; i++) write_group(w, g, total[i], bias, out + (r + i) * stride);
    }
  }
}

#define COLUMNS(kind, format, type)                                                            \
  static __attribute__((noinline)) void columns_##format(                                      \
      const Matrix *w, const void *x, int64_t x_stride, int n, const float *bias, float *out,  \
      int64_t stride, int first, int last) {                                                   \
    kind##_columns(format, w, (const type *)x, x_stride, n, bias, out, stride, first, last);   \
  }
COLUMNS(float, F32, float)
COLUMNS(float, F16, float)
COLUMNS(float, BF16, float)
COLUMNS(float, PTQ161, float)
COLUMNS(quant, Q8_0, Activations)
COLUMNS(quant, Q4_0, Activations)
COLUMNS(quant, Q4_1, Activations)
COLUMNS(quant, Q5_0, Activations)
COLUMNS(quant, Q5_1, Activations)
COLUMNS(quant, Q2_K, Activations)
COLUMNS(quant, Q3_K, Activations)
COLUMNS(quant, Q4_K, Activations)
COLUMNS(quant, Q5_K, Activations)
COLUMNS(quant, Q6_K, Activations)
COLUMNS(quant, IQ4_NL, Activations)
COLUMNS(quant, IQ4_XS, Activations)
COLUMNS(quant, MXFP4, Activations)
COLUMNS(quant, NVFP4, Activations)
COLUMNS(quant, TQ2_0, Activations)
COLUMNS(quant, IQ1_S, Activations)
COLUMNS(quant, IQ1_M, Activations)
COLUMNS(quant, IQ2_XXS, Activations)
COLUMNS(quant, IQ2_S, Activations)
COLUMNS(quant, IQ3_XXS, Activations)
COLUMNS(quant, IQ3_S, Activations)
COLUMNS(quant, NF4, Activations)
COLUMNS(quant, FP4, Activations)

typedef void (*Columns)(const Matrix *, const void *, int64_t, int, const float *, float *, int64_t,
                        int, int);
static const Columns columns_of[NUM_FORMATS] = {
    [F32] = columns_F32,       [F16] = columns_F16,       [BF16] = columns_BF16,
    [Q8_0] = columns_Q8_0,     [Q4_0] = columns_Q4_0,     [Q4_1] = columns_Q4_1,
    [Q5_0] = columns_Q5_0,     [Q5_1] = columns_Q5_1,     [Q2_K] = columns_Q2_K,
    [Q3_K] = columns_Q3_K,     [Q4_K] = columns_Q4_K,     [Q5_K] = columns_Q5_K,
    [Q6_K] = columns_Q6_K,     [IQ4_NL] = columns_IQ4_NL, [IQ4_XS] = columns_IQ4_XS,
    [MXFP4] = columns_MXFP4,   [NVFP4] = columns_NVFP4,   [TQ1_0] = columns_TQ2_0,
    [TQ2_0] = columns_TQ2_0,   [IQ1_S] = columns_IQ1_S,   [IQ1_M] = columns_IQ1_M,
    [IQ2_XXS] = columns_IQ2_XXS, [IQ2_XS] = columns_IQ2_S, [IQ2_S] = columns_IQ2_S,
    [IQ3_XXS] = columns_IQ3_XXS, [IQ3_S] = columns_IQ3_S,
    [PTQ161] = columns_PTQ161, [NF4] = columns_NF4,       [FP4] = columns_FP4};

/* The range of column groups of share `thread` of `threads`. */
static void split_groups(const Matrix *w, int thread, int threads, int *first, int *last) {
  int64_t groups = column_groups(w);
  *first = (int)(groups * thread / threads);
  *last = (int)(groups * (thread + 1) / threads);
}

/* Bytes of a unit of a row that a product reads: a float, or `Activations` for block formats. */
INLINE int64_t unit_bytes(const Matrix *w) {
  return reads_floats(w->format) ? 4 : (int64_t)sizeof(Activations);
}

/* Units of such a row. */
INLINE int64_t row_units(const Matrix *w) {
  return reads_floats(w->format) ? w->in_features : w->in_features / QUANT_BLOCK;
}

/* The columns of the groups [first, last) of x @ w.T + bias. x: rows that are `x_stride` units apart.
 * They are processed in chunks that fit the first-level cache. */
static void linear_columns(const Matrix *w, const void *x, int64_t x_stride, int n,
                           const float *bias, float *out, int64_t stride, int first, int last) {
  int64_t row_bytes = row_units(w) * unit_bytes(w), x_bytes = x_stride * unit_bytes(w);
  int chunk = (int)(20000 / row_bytes) / TILE_ROWS * TILE_ROWS;
  if (chunk < 2 * TILE_ROWS) chunk = 2 * TILE_ROWS;
  int span = (int)(200000 / w->group_bytes);
  if (span < 1 || n <= chunk) span = n <= chunk ? last - first : 1;
  for (int g = first; g < last; g += span)
    for (int r = 0; r < n; r += chunk) {
      int rows = n - r < chunk ? n - r : chunk, end = g + span < last ? g + span : last;
      columns_of[w->format](w, (const char *)x + r * x_bytes, x_stride, rows, bias,
                            out + r * stride, stride, g, end);
    }
}

#endif
