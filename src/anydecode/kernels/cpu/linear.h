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
 * rows and two groups of columns. Two steps at a time, so that weights and sums of a whole tile stay
 * in registers. Partial sums are widened to int32 before they can overflow. */
INLINE void nibble_sums(int format, int rows, const uint8_t *const *p, const Activations *const *a,
                        int b, int half, i8x2 *sum) {
  i8x2 dot[TILE_ROWS];
  int first = has_halves(format) ? 2 * half : 0, last = has_halves(format) ? first + 2 : 4;
  int is_large = has_halves(format) || is_five_bit(format) || has_table(format);
  int span = format == Q6_K ? 1 : is_large ? 2 : 4;
#pragma GCC unroll 4
  for (int j = first; j < last; j++) {
    int starts_span = j % span == 0, ends_span = (j + 1) % span == 0;
    int has_sum = j - first >= span;
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
        sum[r] = has_sum ? pin_pair(i8x2_add(sum[r], widen_partial_pair(dot[r])))
                         : widen_partial_pair(dot[r]);
    }
  }
}

/* The same of a format whose codes are bytes, or select them. */
INLINE void byte_sums(int format, int rows, const uint8_t *const *p, const Activations *const *a,
                      int b, i8x2 *sum) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    b32x2 codes = format == Q8_0 ? load_codes(format, p, 0, i) : unpack_step(format, p, i);
    byte_pair w = byte_pair_weights(codes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      quad_pair x = quad_pair_load(a[r][b].q + 4 * i);
      sum[r] = pin_pair(add_byte_pair_dot(
          i ? sum[r] : initial_byte_pair_sum(covered_sum(format, 0, a[r] + b)), w, x));
    }
  }
}

INLINE void grid_sums(int format, int rows, const uint8_t *const *p, const uint8_t *grid,
                      const Activations *const *a, int b, int half, i8x2 *sum) {
  int first = has_halves(format) ? 2 * half : 0, last = has_halves(format) ? first + 2 : 4;
#pragma GCC unroll 4
  for (int t = first; t < last; t++) {
    b32 both[2][2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) unpack_points(format, p[g], grid, t, both[g]);
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
INLINE void add_blocks(int format, int rows, const uint8_t *const *p, const uint8_t *grid,
                       const Activations *const *a, int b, int half, const f8 *super,
                       const f8 *super_min, f8x2 *total) {
  f8 scale[2], min[2];
  i8x2 sum[TILE_ROWS];
  if (has_grid(format)) grid_sums(format, rows, p, grid, a, b, half, sum);
  else if (has_bytes(format)) byte_sums(format, rows, p, a, b, sum);
  else nibble_sums(format, rows, p, a, b, half, sum);
#pragma GCC unroll 2
  for (int g = 0; g < 2; g++)
    load_scales(format, p[g], half, super[g], super_min[g], &scale[g], &min[g]);
  f8x2 scales = f8x2_join(scale[0], scale[1]), mins = f8x2_join(min[0], min[1]);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
    total[r] = add_block(format, half, total[r], sum[r], a[r] + b, scales, mins);
}

/* Two groups of columns at a time, so that each broadcast of activations serves both. `next`:
 * weights to prefetch meanwhile, or NULL; the processor's own prefetcher follows the reads. */
INLINE void quant_tile(int format, int rows, const uint8_t *const *groups, const uint8_t *grid,
                       int blocks, const Activations *const *rows_of, const uint8_t *next,
                       f8x2 *total) {
  const uint8_t *p[2] = {groups[0], groups[1]};
  const Activations *a[TILE_ROWS];
  f8 super[2], super_min[2];
  for (int r = 0; r < rows; r++) a[r] = rows_of[r];
  for (int g = 0; g < 2; g++) super[g] = super_min[g] = f8_set(0.0f);
  for (int r = 0; r < rows; r++) total[r] = f8x2_set(0.0f);
  for (int b = 0; b < blocks; b++) {
    if (is_super(format) && b % 8 == 0) {
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) {
        super[g] = f8_load_f16((const uint16_t *)p[g]);
        if (has_grid(format)) super[g] = f8_mul(super[g], f8_set(grid_unit(format)));
        if (has_min(format)) super_min[g] = f8_load_f16((const uint16_t *)p[g] + 8);
        p[g] += header_bytes(format);
      }
    }
    add_blocks(format, rows, p, grid, a, b, 0, super, super_min, total);
    if (has_halves(format)) add_blocks(format, rows, p, grid, a, b, 1, super, super_min, total);
    p[0] += block_bytes(format);
    p[1] += block_bytes(format);
    if (next) {
#pragma GCC unroll 9
      for (int o = 0; o < 2 * block_bytes(format); o += 64) __builtin_prefetch(next + o, 0, 2);
      next += 2 * block_bytes(format);
    }
  }
}

enum { FLOAT_ROWS = 4 };

INLINE f8 load_weights(int format, const uint8_t *p, int64_t k) {
  if (format == F32) return f8_load((const float *)p + 8 * k);
  const uint16_t *half = (const uint16_t *)p + 8 * k;
  return format == F16 ? f8_load_f16(half) : f8_load_bf16(half);
}

INLINE void float_tile(int format, int rows, int groups, const uint8_t *p, int64_t group_bytes,
                       int width, const float *const *x, f8 *total) {
  for (int i = 0; i < rows * groups; i++) total[i] = f8_set(0.0f);
  for (int k = 0; k < width; k++) {
    f8 w[4];
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) w[g] = load_weights(format, p + g * group_bytes, k);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      f8 one = f8_set(x[r][k]);
#pragma GCC unroll 4
      for (int g = 0; g < groups; g++)
        total[r * groups + g] = f8_fma(w[g], one, total[r * groups + g]);
    }
  }
}

INLINE void row_tile(int format, int rows, int groups, const Matrix *w, const uint8_t *p,
                     const float *const *x, f8 *total) {
  if (format == PTQ161) ptq161_tile(rows, groups, w, p, x, total);
  else float_tile(format, rows, groups, p, w->group_bytes, w->in_features, x, total);
}

/* Scale, add the bias and write the columns of `group` that exist. */
INLINE void write_group(const Matrix *w, int group, f8 total, const float *bias, float *out) {
  int column = group * LANES, left = w->out_features - column;
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

/* How many rows the next tile has. */
INLINE int tile_rows(int left) {
  if (left >= TILE_ROWS) return TILE_ROWS;
  return left >= 4 ? 4 : left;
}

INLINE void quant_columns(int format, const Matrix *w, const Activations *x, int64_t x_stride,
                          int n, const float *bias, float *out, int64_t stride, int first,
                          int last) {
  int blocks = w->in_features / QUANT_BLOCK, groups = (w->out_features + 7) / 8;
  for (int g = first; g < last; g += 2) {
    const uint8_t *p[2];
    int pair = g + 1 < last;
    p[0] = w->data + g * w->group_bytes;
    p[1] = pair ? p[0] + w->group_bytes : p[0];
    for (int r = 0, rows; r < n; r += rows) {
      const Activations *a[TILE_ROWS];
      f8x2 total[TILE_ROWS];
      rows = tile_rows(n - r);
      const uint8_t *next = r || g + 2 >= groups ? NULL : p[0] + 2 * w->group_bytes;
      for (int i = 0; i < rows; i++) a[i] = x + (r + i) * x_stride;
      switch (rows) {
        case 1: quant_tile(format, 1, p, w->grid, blocks, a, next, total); break;
        case 2: quant_tile(format, 2, p, w->grid, blocks, a, next, total); break;
        case 3: quant_tile(format, 3, p, w->grid, blocks, a, next, total); break;
        case 4: quant_tile(format, 4, p, w->grid, blocks, a, next, total); break;
        default: /* used only where TILE_ROWS is larger */
          if (TILE_ROWS > 4) quant_tile(format, TILE_ROWS, p, w->grid, blocks, a, next, total);
      }
      for (int i = 0; i < rows; i++) {
        write_group(w, g, f8x2_part(total[i], 0), bias, out + (r + i) * stride);
        if (pair) write_group(w, g + 1, f8x2_part(total[i], 1), bias, out + (r + i) * stride);
      }
    }
  }
}

INLINE void float_groups(int format, int groups, const Matrix *w, const float *x,
                         int64_t x_stride, int n, const float *bias, float *out, int64_t stride,
                         int g) {
  const uint8_t *p = w->data + g * w->group_bytes;
  for (int r = 0; r < n; r += FLOAT_ROWS) {
    const float *a[FLOAT_ROWS];
    f8 total[FLOAT_ROWS * 2];
    int rows = n - r < FLOAT_ROWS ? n - r : FLOAT_ROWS;
    for (int i = 0; i < rows; i++) a[i] = x + (r + i) * x_stride;
    switch (rows) {
      case 1: row_tile(format, 1, groups, w, p, a, total); break;
      case 2: row_tile(format, 2, groups, w, p, a, total); break;
      case 3: row_tile(format, 3, groups, w, p, a, total); break;
      default: row_tile(format, 4, groups, w, p, a, total); break;
    }
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < groups; j++)
        write_group(w, g + j, total[i * groups + j], bias, out + (r + i) * stride);
  }
}

INLINE void float_columns(int format, const Matrix *w, const float *x, int64_t x_stride, int n,
                          const float *bias, float *out, int64_t stride, int first, int last) {
  int g = first;
  for (; g + 2 <= last; g += 2) float_groups(format, 2, w, x, x_stride, n, bias, out, stride, g);
  if (g < last) float_groups(format, 1, w, x, x_stride, n, bias, out, stride, g);
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
    [PTQ161] = columns_PTQ161};

/* The range of column groups of share `thread` of `threads`: whole pairs, except for the last
 * group. */
static void split_groups(const Matrix *w, int thread, int threads, int *first, int *last) {
  int64_t groups = (w->out_features + 7) / 8, pairs = (groups + 1) / 2;
  *first = (int)(pairs * thread / threads * 2);
  *last = (int)(pairs * (thread + 1) / threads * 2);
  if (*last > groups) *last = (int)groups;
}

/* Bytes of a unit of a row that a product reads: a float, or `Activations` for block formats. */
INLINE int64_t unit_bytes(const Matrix *w) {
  return reads_floats(w->format) ? 4 : (int64_t)sizeof(Activations);
}

/* Units of such a row. */
INLINE int64_t row_units(const Matrix *w) {
  return reads_floats(w->format) ? w->in_features : w->in_features / QUANT_BLOCK;
}

/* Columns [8 * first, 8 * last) of x @ w.T + bias. x: rows that are `x_stride` units apart. They are
 * processed in chunks that fit the first-level cache. */
static void linear_columns(const Matrix *w, const void *x, int64_t x_stride, int n,
                           const float *bias, float *out, int64_t stride, int first, int last) {
  int64_t row_bytes = row_units(w) * unit_bytes(w), x_bytes = x_stride * unit_bytes(w);
  int chunk = (int)(20000 / row_bytes) / TILE_ROWS * TILE_ROWS;
  if (chunk < 2 * TILE_ROWS) chunk = 2 * TILE_ROWS;
  int span = (int)(200000 / w->group_bytes) / 2 * 2;
  if (span < 2 || n <= chunk) span = n <= chunk ? last - first : 2;
  for (int g = first; g < last; g += span)
    for (int r = 0; r < n; r += chunk) {
      int rows = n - r < chunk ? n - r : chunk, end = g + span < last ? g + span : last;
      columns_of[w->format](w, (const char *)x + r * x_bytes, x_stride, rows, bias,
                            out + r * stride, stride, g, end);
    }
}

#endif
