/* Pairs of the vectors of simd.h: one vector of 512 bits each where the processor multiplies such
 * ones. Every lane is computed as in single vectors. */
#ifndef ANYDECODE_SIMD_PAIRS_H
#define ANYDECODE_SIMD_PAIRS_H

#include "simd.h"

#if defined(__AVX512VNNI__) && !defined(ANYDECODE_SCALAR)
#define HAS_WIDE_PAIRS
typedef __m512 f8x2;
typedef __m512i i8x2;
typedef __m512i b32x2;
INLINE f8x2 f8x2_join(f8 x, f8 y) {
  __m512d low = _mm512_castpd256_pd512(_mm256_castps_pd(x));
  return _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(y), 1));
}
INLINE f8 f8x2_part(f8x2 x, int i) {
  __m512d bits = _mm512_castps_pd(x);
  return _mm256_castpd_ps(i ? _mm512_extractf64x4_pd(bits, 1) : _mm512_castpd512_pd256(bits));
}
INLINE f8x2 f8x2_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE f8x2 f8x2_load_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE f8x2 f8x2_from_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
INLINE f8x2 f8x2_load_bf16(const uint16_t *p) {
  return f8x2_from_bf16(_mm256_loadu_si256((const __m256i *)p));
}
INLINE __m256i load_two_halves(const uint16_t *p, const uint16_t *q) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p)),
                                 _mm_loadu_si128((const __m128i *)q), 1);
}
INLINE f8x2 f8x2_load_two_f16(const uint16_t *p, const uint16_t *q) {
  return _mm512_cvtph_ps(load_two_halves(p, q));
}
INLINE f8x2 f8x2_load_two_bf16(const uint16_t *p, const uint16_t *q) {
  return f8x2_from_bf16(load_two_halves(p, q));
}
INLINE f8x2 f8x2_load_s8(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE f8x2 f8x2_load_u8(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* See f8_load_e4m3 and f8_load_e8m0. */
INLINE f8x2 f8x2_load_e4m3(const uint8_t *p) {
  __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_slli_epi16(wide, 7)), _mm512_set1_ps(128.0f));
}
INLINE f8x2 f8x2_load_e8m0(const uint8_t *p) {
  i8x2 e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  i8x2 normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  __mmask16 is_small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
  return _mm512_castsi512_ps(
      _mm512_mask_sllv_epi32(normal, is_small, _mm512_set1_epi32(1 << 21), e));
}
/* See b32_load_columns; of sixteen. */
INLINE void b32x2_load_columns(const uint8_t *const *from, b32x2 *out) {
  __m512i x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    x[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from[i]));
#pragma GCC unroll 3
    for (int j = 1; j < 4; j++) {
      __m128i part = _mm_loadu_si128((const __m128i *)from[i + 4 * j]);
      x[i] = _mm512_mask_broadcast_i32x4(x[i], (__mmask16)(15 << 4 * j), part);
    }
  }
  __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]);
  __m512i c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  out[0] = _mm512_unpacklo_epi64(a, b);
  out[1] = _mm512_unpackhi_epi64(a, b);
  out[2] = _mm512_unpacklo_epi64(c, d);
  out[3] = _mm512_unpackhi_epi64(c, d);
}
INLINE b32x2 b32x2_load_words(const uint8_t *p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
INLINE void f8x2_store_s16(int16_t *p, f8x2 x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
INLINE f8x2 f8x2_load_twice(const float *p) {
  return _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(_mm256_loadu_ps(p))));
}
INLINE void f8x2_store(float *p, f8x2 x) { _mm512_storeu_ps(p, x); }
/* out[i * stride + j] = lane i of x[j], for eight vectors */
INLINE void f8x2_store_eights(float *out, int stride, const f8x2 *x) {
#pragma GCC unroll 2
  for (int j = 0; j < 8; j += 4) {
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[j], x[j + 1]));
    __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(x[j + 2], x[j + 3]));
    __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(x[j], x[j + 1]));
    __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[j + 2], x[j + 3]));
    __m512d four[4] = {_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b),
                       _mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      float *to = out + i * stride + j;
      f8x2 one = _mm512_castpd_ps(four[i]);
      _mm_storeu_ps(to, _mm512_castps512_ps128(one));
      _mm_storeu_ps(to + 4 * stride, _mm512_extractf32x4_ps(one, 1));
      _mm_storeu_ps(to + 8 * stride, _mm512_extractf32x4_ps(one, 2));
      _mm_storeu_ps(to + 12 * stride, _mm512_extractf32x4_ps(one, 3));
    }
  }
}
/* The same of eight lanes */
INLINE void f8_store_eights(float *out, int stride, const f8 *x) {
#pragma GCC unroll 2
  for (int j = 0; j < 8; j += 4) {
    __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[j], x[j + 1]));
    __m256d b = _mm256_castps_pd(_mm256_unpacklo_ps(x[j + 2], x[j + 3]));
    __m256d c = _mm256_castps_pd(_mm256_unpackhi_ps(x[j], x[j + 1]));
    __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(x[j + 2], x[j + 3]));
    __m256d four[4] = {_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b),
                       _mm256_unpacklo_pd(c, d), _mm256_unpackhi_pd(c, d)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      float *to = out + i * stride + j;
      f8 one = _mm256_castpd_ps(four[i]);
      _mm_storeu_ps(to, _mm256_castps256_ps128(one));
      _mm_storeu_ps(to + 4 * stride, _mm256_extractf128_ps(one, 1));
    }
  }
}
INLINE f8x2 f8x2_set(float x) { return _mm512_set1_ps(x); }
INLINE f8x2 f8x2_mul(f8x2 x, f8x2 y) { return _mm512_mul_ps(x, y); }
INLINE f8x2 f8x2_add(f8x2 x, f8x2 y) { return _mm512_add_ps(x, y); }
INLINE f8x2 f8x2_sub(f8x2 x, f8x2 y) { return _mm512_sub_ps(x, y); }
INLINE f8x2 f8x2_max(f8x2 x, f8x2 y) { return _mm512_max_ps(x, y); }
INLINE f8x2 f8x2_min(f8x2 x, f8x2 y) { return _mm512_min_ps(x, y); }
INLINE f8x2 f8x2_round(f8x2 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE f8x2 f8x2_select_below(f8x2 x, f8x2 limit, f8x2 a, f8x2 b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), b, a);
}
INLINE f8x2 f8x2_scale2(f8x2 x, f8x2 n) { return _mm512_scalef_ps(x, n); }
INLINE f8x2 f8x2_fma(f8x2 x, f8x2 y, f8x2 z) { return _mm512_fmadd_ps(x, y, z); }
INLINE f8x2 f8x2_from_i8x2(i8x2 x) { return _mm512_cvtepi32_ps(x); }
INLINE i8x2 i8x2_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE i8x2 i8x2_add(i8x2 x, i8x2 y) { return _mm512_add_epi32(x, y); }
INLINE i8x2 i8x2_sub(i8x2 x, i8x2 y) { return _mm512_sub_epi32(x, y); }
#define i8x2_left(x, n) _mm512_slli_epi32(x, n)
INLINE b32x2 b32x2_join(b32 x, b32 y) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1);
}
INLINE b32x2 b32x2_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE void b32x2_store(uint8_t *p, b32x2 x) { _mm512_storeu_si512(p, x); }
INLINE b32x2 b32x2_and(b32x2 x, int mask) {
  return _mm512_and_si512(x, _mm512_set1_epi8((char)mask));
}
INLINE b32x2 b32x2_or(b32x2 x, b32x2 y) { return _mm512_or_si512(x, y); }
/* Signed bytes plus 128 */
INLINE b32x2 b32x2_flip_signs(b32x2 x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }
INLINE b32x2 b32x2_lookup(const uint8_t *table, b32x2 i) {
  __m128i values = _mm_loadu_si128((const __m128i *)table);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), i);
}
#define b32x2_right(x, n) _mm512_srli_epi16(x, n)
#define b32x2_left(x, n) _mm512_slli_epi16(x, n)
INLINE i8x2 pin_pair(i8x2 x) {
  __asm__ volatile("" : "+v"(x));
  return x;
}
INLINE b32x2 pin_byte_pair(b32x2 x) { return pin_pair(x); }

typedef const int8_t *quad_pair; /* the same four activations in every lane */
INLINE quad_pair quad_pair_load(const int8_t *a) { return a; }
/* The instruction itself loads the activations, which gcc's intrinsic does not use: with fewer
 * instructions the processor sees further ahead in the weights. */
INLINE i8x2 add_partial_pair_dot(i8x2 sum, b32x2 w, quad_pair a) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int8_t(*)[4])a));
  return sum;
}
INLINE i8x2 partial_pair_dot(b32x2 w, quad_pair a) {
  return add_partial_pair_dot(_mm512_setzero_si512(), w, a);
}
INLINE i8x2 widen_partial_pair(i8x2 x) { return x; }
typedef b32x2 byte_pair;
INLINE byte_pair byte_pair_weights(b32x2 w) { return w; }
enum { BYTE_PAIR_OFFSET = 128 };
INLINE i8x2 add_byte_pair_dot(i8x2 sum, byte_pair w, quad_pair a) {
  return add_partial_pair_dot(sum, w, a);
}
/* See add_word_dot. */
INLINE i8x2 add_word_pair_dot(i8x2 sum, b32x2 w, quad_pair a) {
  __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int8_t(*)[4])a));
  return sum;
}
#else
typedef struct { f8 v[2]; } f8x2;
typedef struct { i8 v[2]; } i8x2;
typedef struct { b32 v[2]; } b32x2;
INLINE f8x2 f8x2_join(f8 x, f8 y) { return (f8x2){{x, y}}; }
INLINE f8 f8x2_part(f8x2 x, int i) { return x.v[i]; }
INLINE f8x2 f8x2_load(const float *p) { return f8x2_join(f8_load(p), f8_load(p + 8)); }
INLINE f8x2 f8x2_load_f16(const uint16_t *p) {
  return f8x2_join(f8_load_f16(p), f8_load_f16(p + 8));
}
INLINE f8x2 f8x2_load_bf16(const uint16_t *p) {
  return f8x2_join(f8_load_bf16(p), f8_load_bf16(p + 8));
}
INLINE f8x2 f8x2_load_two_f16(const uint16_t *p, const uint16_t *q) {
  return f8x2_join(f8_load_f16(p), f8_load_f16(q));
}
INLINE f8x2 f8x2_load_two_bf16(const uint16_t *p, const uint16_t *q) {
  return f8x2_join(f8_load_bf16(p), f8_load_bf16(q));
}
INLINE f8x2 f8x2_load_s8(const uint8_t *p) { return f8x2_join(f8_load_s8(p), f8_load_s8(p + 8)); }
INLINE f8x2 f8x2_load_u8(const uint8_t *p) { return f8x2_join(f8_load_u8(p), f8_load_u8(p + 8)); }
INLINE f8x2 f8x2_load_e4m3(const uint8_t *p) {
  return f8x2_join(f8_load_e4m3(p), f8_load_e4m3(p + 8));
}
INLINE f8x2 f8x2_load_e8m0(const uint8_t *p) {
  return f8x2_join(f8_load_e8m0(p), f8_load_e8m0(p + 8));
}
INLINE f8x2 f8x2_load_twice(const float *p) { return f8x2_join(f8_load(p), f8_load(p)); }
INLINE void f8x2_store(float *p, f8x2 x) {
  f8_store(p, x.v[0]);
  f8_store(p + 8, x.v[1]);
}
INLINE f8x2 f8x2_set(float x) { return (f8x2){{f8_set(x), f8_set(x)}}; }
INLINE f8x2 f8x2_mul(f8x2 x, f8x2 y) {
  return (f8x2){{f8_mul(x.v[0], y.v[0]), f8_mul(x.v[1], y.v[1])}};
}
INLINE f8x2 f8x2_add(f8x2 x, f8x2 y) {
  return (f8x2){{f8_add(x.v[0], y.v[0]), f8_add(x.v[1], y.v[1])}};
}
INLINE f8x2 f8x2_sub(f8x2 x, f8x2 y) {
  return (f8x2){{f8_sub(x.v[0], y.v[0]), f8_sub(x.v[1], y.v[1])}};
}
INLINE f8x2 f8x2_max(f8x2 x, f8x2 y) {
  return (f8x2){{f8_max(x.v[0], y.v[0]), f8_max(x.v[1], y.v[1])}};
}
INLINE f8x2 f8x2_min(f8x2 x, f8x2 y) {
  return (f8x2){{f8_min(x.v[0], y.v[0]), f8_min(x.v[1], y.v[1])}};
}
INLINE f8x2 f8x2_round(f8x2 x) { return (f8x2){{f8_round(x.v[0]), f8_round(x.v[1])}}; }
INLINE f8x2 f8x2_select_below(f8x2 x, f8x2 limit, f8x2 a, f8x2 b) {
  return (f8x2){{f8_select_below(x.v[0], limit.v[0], a.v[0], b.v[0]),
                 f8_select_below(x.v[1], limit.v[1], a.v[1], b.v[1])}};
}
INLINE f8x2 f8x2_scale2(f8x2 x, f8x2 n) {
  return (f8x2){{f8_scale2(x.v[0], n.v[0]), f8_scale2(x.v[1], n.v[1])}};
}
INLINE f8x2 f8x2_fma(f8x2 x, f8x2 y, f8x2 z) {
  return (f8x2){{f8_fma(x.v[0], y.v[0], z.v[0]), f8_fma(x.v[1], y.v[1], z.v[1])}};
}
INLINE f8x2 f8x2_from_i8x2(i8x2 x) {
  return (f8x2){{f8_from_i8(x.v[0]), f8_from_i8(x.v[1])}};
}
INLINE i8x2 i8x2_set(int32_t x) { return (i8x2){{i8_set(x), i8_set(x)}}; }
INLINE i8x2 i8x2_add(i8x2 x, i8x2 y) {
  return (i8x2){{i8_add(x.v[0], y.v[0]), i8_add(x.v[1], y.v[1])}};
}
INLINE i8x2 i8x2_sub(i8x2 x, i8x2 y) {
  return (i8x2){{i8_sub(x.v[0], y.v[0]), i8_sub(x.v[1], y.v[1])}};
}
#define i8x2_left(x, n) ((i8x2){{i8_left((x).v[0], n), i8_left((x).v[1], n)}})
INLINE b32x2 b32x2_join(b32 x, b32 y) { return (b32x2){{x, y}}; }
INLINE b32x2 b32x2_load(const uint8_t *p) { return b32x2_join(b32_load(p), b32_load(p + 32)); }
INLINE void b32x2_store(uint8_t *p, b32x2 x) {
  b32_store(p, x.v[0]);
  b32_store(p + 32, x.v[1]);
}
INLINE void b32x2_load_columns(const uint8_t *const *from, b32x2 *out) {
  b32 low[4], high[4];
  b32_load_columns(from, low);
  b32_load_columns(from + 8, high);
  for (int i = 0; i < 4; i++) out[i] = b32x2_join(low[i], high[i]);
}
INLINE b32x2 b32x2_load_words(const uint8_t *p) {
  return b32x2_join(b32_load_words(p), b32_load_words(p + 16));
}
INLINE void f8x2_store_s16(int16_t *p, f8x2 x) {
  f8_store_s16(p, x.v[0]);
  f8_store_s16(p + 8, x.v[1]);
}
INLINE b32x2 b32x2_and(b32x2 x, int mask) {
  return (b32x2){{b32_and(x.v[0], mask), b32_and(x.v[1], mask)}};
}
INLINE b32x2 b32x2_or(b32x2 x, b32x2 y) {
  return (b32x2){{b32_or(x.v[0], y.v[0]), b32_or(x.v[1], y.v[1])}};
}
INLINE b32x2 b32x2_flip_signs(b32x2 x) {
  return (b32x2){{b32_flip_signs(x.v[0]), b32_flip_signs(x.v[1])}};
}
INLINE b32x2 b32x2_lookup(const uint8_t *table, b32x2 i) {
  return (b32x2){{b32_lookup(table, i.v[0]), b32_lookup(table, i.v[1])}};
}
#define b32x2_right(x, n) ((b32x2){{b32_right((x).v[0], n), b32_right((x).v[1], n)}})
#define b32x2_left(x, n) ((b32x2){{b32_left((x).v[0], n), b32_left((x).v[1], n)}})
INLINE i8x2 pin_pair(i8x2 x) { return (i8x2){{pin(x.v[0]), pin(x.v[1])}}; }
INLINE b32x2 pin_byte_pair(b32x2 x) {
  return (b32x2){{pin_bytes(x.v[0]), pin_bytes(x.v[1])}};
}

typedef quad quad_pair;
INLINE quad_pair quad_pair_load(const int8_t *a) { return quad_load(a); }
INLINE i8x2 partial_pair_dot(b32x2 w, quad_pair a) {
  return (i8x2){{partial_dot(w.v[0], a), partial_dot(w.v[1], a)}};
}
INLINE i8x2 add_partial_pair_dot(i8x2 sum, b32x2 w, quad_pair a) {
  return (i8x2){
      {add_partial_dot(sum.v[0], w.v[0], a), add_partial_dot(sum.v[1], w.v[1], a)}};
}
INLINE i8x2 widen_partial_pair(i8x2 x) {
  return (i8x2){{widen_partial(x.v[0]), widen_partial(x.v[1])}};
}
typedef struct { byte_vector v[2]; } byte_pair;
INLINE byte_pair byte_pair_weights(b32x2 w) {
  return (byte_pair){{byte_weights(w.v[0]), byte_weights(w.v[1])}};
}
enum { BYTE_PAIR_OFFSET = BYTE_OFFSET };
INLINE i8x2 add_byte_pair_dot(i8x2 sum, byte_pair w, quad_pair a) {
  return (i8x2){{add_byte_dot(sum.v[0], w.v[0], a), add_byte_dot(sum.v[1], w.v[1], a)}};
}
INLINE i8x2 add_word_pair_dot(i8x2 sum, b32x2 w, quad_pair a) {
  return (i8x2){{add_word_dot(sum.v[0], w.v[0], a), add_word_dot(sum.v[1], w.v[1], a)}};
}
#endif

/* What a sum of products of bytes starts with: `sum` is that of the activations. */
INLINE int32_t initial_byte_sum(int32_t sum) { return -BYTE_PAIR_OFFSET * sum; }
INLINE i8x2 initial_byte_pair_sum(int32_t sum) { return i8x2_set(initial_byte_sum(sum)); }

INLINE f8x2 f8x2_load_two(const float *p, const float *q) {
  return f8x2_join(f8_load(p), f8_load(q));
}

#endif
