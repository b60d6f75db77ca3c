/* AVX2, FMA and F16C; with VNNI where the compiler targets it. */
#include <immintrin.h>

typedef __m256 f8;
typedef __m256i i8;
typedef __m256i b32;

INLINE f8 f8_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void f8_store(float *p, f8 x) { _mm256_storeu_ps(p, x); }
INLINE f8 f8_set(float x) { return _mm256_set1_ps(x); }
INLINE f8 f8_add(f8 x, f8 y) { return _mm256_add_ps(x, y); }
INLINE f8 f8_sub(f8 x, f8 y) { return _mm256_sub_ps(x, y); }
INLINE f8 f8_mul(f8 x, f8 y) { return _mm256_mul_ps(x, y); }
INLINE f8 f8_div(f8 x, f8 y) { return _mm256_div_ps(x, y); }
/* y where either is NaN */
INLINE f8 f8_max(f8 x, f8 y) { return _mm256_max_ps(x, y); }
INLINE f8 f8_min(f8 x, f8 y) { return _mm256_min_ps(x, y); }
INLINE f8 f8_fma(f8 x, f8 y, f8 z) { return _mm256_fmadd_ps(x, y, z); }
INLINE f8 f8_abs(f8 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE f8 f8_round(f8 x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* a where x < limit, else b */
INLINE f8 f8_select_below(f8 x, f8 limit, f8 a, f8 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
INLINE int f8_any_above(f8 x, f8 limit) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_GT_OQ));
}
/* vhaddps, which takes longer */
INLINE f8 add_neighbours(f8 x, f8 y) {
  return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
}
/* Lane i: (0+1)+(2+3) of x[i]; lane i + 4: (4+5)+(6+7). */
INLINE f8 f8_fours(const f8 *x) {
  return add_neighbours(add_neighbours(x[0], x[1]), add_neighbours(x[2], x[3]));
}
/* Lower lane i plus upper lane i, of `low` in lanes 0 to 3 and of `high` in lanes 4 to 7. */
INLINE f8 f8_join(f8 low, f8 high) {
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                       _mm256_permute2f128_ps(low, high, 0x31));
}
INLINE float f8_reduce_max(f8 x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
INLINE f8 f8_from_i8(i8 x) { return _mm256_cvtepi32_ps(x); }
/* x * 2^n for whole n in [-126, 127] */
INLINE f8 f8_scale2(f8 x, f8 n) {
  i8 e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
INLINE f8 f8_load_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE f8 f8_set_f16(const uint8_t *p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}
INLINE f8 f8_load_bf16(const uint16_t *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE void f8_store_f16(uint16_t *p, f8 x) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE f8 f8_load_u8(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE f8 f8_load_s8(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
/* See e4m3_to_float; the numbers are below 128. */
INLINE f8 f8_load_e4m3(const uint8_t *p) {
  __m128i halves = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
  return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(128.0f));
}
/* 2^(e - 128) of eight exponents e; the first two are below the normal numbers. */
INLINE f8 f8_load_e8m0(const uint8_t *p) {
  i8 e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  i8 normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  i8 small = _mm256_sllv_epi32(_mm256_set1_epi32(1 << 21), e);
  i8 is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small));
}
INLINE i8 i8_set(int32_t x) { return _mm256_set1_epi32(x); }
INLINE i8 i8_add(i8 x, i8 y) { return _mm256_add_epi32(x, y); }
INLINE i8 i8_sub(i8 x, i8 y) { return _mm256_sub_epi32(x, y); }

INLINE i8 i8_load(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
/* Each lane as unsigned, shifted by a constant. */
#define i8_right(x, n) _mm256_srli_epi32(x, n)
#define i8_left(x, n) _mm256_slli_epi32(x, n)
/* Eight unsigned numbers, each in the lower half of 64 bits. The upper halves are ignored, so
 * products need no shuffles. */
typedef struct { __m256i even, odd; } n8;
INLINE n8 n8_set(uint32_t x) {
  __m256i all = _mm256_set1_epi32((int32_t)x);
  return (n8){all, all};
}
/* from + 0, 1, ... 7 */
INLINE n8 n8_count(uint32_t from) {
  __m256i first = _mm256_set1_epi32((int32_t)from);
  return (n8){_mm256_add_epi32(first, _mm256_setr_epi32(0, 0, 2, 0, 4, 0, 6, 0)),
              _mm256_add_epi32(first, _mm256_setr_epi32(1, 0, 3, 0, 5, 0, 7, 0))};
}
INLINE n8 n8_xor(n8 x, n8 y) {
  return (n8){_mm256_xor_si256(x.even, y.even), _mm256_xor_si256(x.odd, y.odd)};
}
/* The upper and lower 32 bits of the products with one number. */
INLINE void n8_multiply(n8 x, uint32_t by, n8 *high, n8 *low) {
  __m256i factor = _mm256_set1_epi32((int32_t)by);
  *low = (n8){_mm256_mul_epu32(x.even, factor), _mm256_mul_epu32(x.odd, factor)};
  *high = (n8){_mm256_srli_epi64(low->even, 32), _mm256_srli_epi64(low->odd, 32)};
}
INLINE i8 n8_words(n8 x) { return _mm256_blend_epi32(x.even, _mm256_slli_epi64(x.odd, 32), 0xaa); }
/* out[4 * i + j] = lane i of x[j] */
INLINE void i8_store_fours(uint32_t *out, const i8 *x) {
  i8 a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]);
  i8 c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
  i8 four[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b),
                _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)};
  for (int i = 0; i < 4; i++) {
    _mm_storeu_si128((__m128i *)(out + 4 * i), _mm256_castsi256_si128(four[i]));
    _mm_storeu_si128((__m128i *)(out + 16 + 4 * i), _mm256_extracti128_si256(four[i], 1));
  }
}

INLINE b32 b32_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void b32_store(uint8_t *p, b32 x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE b32 b32_and(b32 x, int mask) {
  return _mm256_and_si256(x, _mm256_set1_epi8((char)mask));
}
INLINE b32 b32_or(b32 x, b32 y) { return _mm256_or_si256(x, y); }
/* table[i] of each byte i below 16 */
INLINE b32 b32_lookup(const uint8_t *table, b32 i) {
  return _mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), i);
}
INLINE b32 b32_xor(b32 x, b32 y) { return _mm256_xor_si256(x, y); }
/* Signed bytes plus 128, or the reverse */
INLINE b32 b32_flip_signs(b32 x) { return _mm256_xor_si256(x, _mm256_set1_epi8((char)0x80)); }
INLINE b32 b32_sub(b32 x, b32 y) { return _mm256_sub_epi8(x, y); }
/* Byte 4 * c + j: 255 if bit j, or j + 4, of bits[c] is set, else 0. */
INLINE b32 b32_mask(const uint8_t *bits, int is_upper) {
  int64_t eight;
  memcpy(&eight, bits, 8);
  __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5,
                                   5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
  __m256i bit = _mm256_set1_epi32(is_upper ? (int)0x80402010 : 0x08040201);
  __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), order);
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
}
/* Bytes 4 * c to 4 * c + 3: those at 4 * index[c] of the table. */
INLINE int32_t four_bytes(const uint8_t *p) {
  int32_t four;
  memcpy(&four, p, 4);
  return four;
}
INLINE b32 b32_gather4(const uint8_t *table, const uint16_t *i) {
  return _mm256_setr_epi32(four_bytes(table + 4 * i[0]), four_bytes(table + 4 * i[1]),
                           four_bytes(table + 4 * i[2]), four_bytes(table + 4 * i[3]),
                           four_bytes(table + 4 * i[4]), four_bytes(table + 4 * i[5]),
                           four_bytes(table + 4 * i[6]), four_bytes(table + 4 * i[7]));
}
/* Bytes 4 * c to 4 * c + 3 of out[0]: those at 8 * index[c] of the table; of out[1]: the next. */
INLINE __m128i two_points(const uint8_t *table, const uint16_t *i) {
  __m128i first = _mm_loadl_epi64((const __m128i *)(table + 8 * i[0]));
  return _mm_unpacklo_epi64(first, _mm_loadl_epi64((const __m128i *)(table + 8 * i[1])));
}
INLINE void b32_gather8(const uint8_t *table, const uint16_t *i, b32 *out) {
  __m256 x = _mm256_castsi256_ps(_mm256_setr_m128i(two_points(table, i), two_points(table, i + 4)));
  __m256 y = _mm256_castsi256_ps(
      _mm256_setr_m128i(two_points(table, i + 2), two_points(table, i + 6)));
  out[0] = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88));
  out[1] = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd));
}
/* Each byte shifted by a constant; the caller masks bits shifted in from the neighbouring byte. */
#define b32_right(x, n) _mm256_srli_epi16(x, n)
#define b32_left(x, n) _mm256_slli_epi16(x, n)

/* Forces a value into a register now: gcc would delay sums until a tile's
 * products are spilled. */
INLINE i8 pin(i8 x) {
  __asm__ volatile("" : "+x"(x));
  return x;
}
INLINE b32 pin_bytes(b32 x) { return pin(x); }
INLINE __m256i rounded8(const float *x, f8 by) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), by));
}
INLINE int32_t sum4(__m128i x) {
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
/* 32 values times `inverse`, rounded half to even, and the sums of the first and the last 16. */
INLINE void round_block(const float *x, float inverse, int8_t *q, int32_t *low, int32_t *high) {
  f8 by = _mm256_set1_ps(inverse);
  __m256i ab = _mm256_packs_epi32(rounded8(x, by), rounded8(x + 8, by));
  __m256i cd = _mm256_packs_epi32(rounded8(x + 16, by), rounded8(x + 24, by));
  __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  _mm256_storeu_si256((__m256i *)q, bytes);
  *low = sum4(_mm256_castsi256_si128(fours));
  *high = sum4(_mm256_extracti128_si256(fours, 1));
}

/* The same four activations in every lane. */
typedef __m256i quad;
INLINE quad quad_load(const int8_t *a) {
  int32_t four;
  memcpy(&four, a, 4);
  return _mm256_set1_epi32(four);
}

/* Byte 4 * c + j of out[i]: byte 4 * i + j of from[c], for eight c and four i. */
INLINE void b32_load_columns(const uint8_t *const *from, b32 *out) {
  __m256i x[4];
  for (int i = 0; i < 4; i++) {
    __m128i low = _mm_loadu_si128((const __m128i *)from[i]);
    x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                   _mm_loadu_si128((const __m128i *)from[i + 4]), 1);
  }
  __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]);
  __m256i c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
  out[0] = _mm256_unpacklo_epi64(a, b);
  out[1] = _mm256_unpackhi_epi64(a, b);
  out[2] = _mm256_unpacklo_epi64(c, d);
  out[3] = _mm256_unpackhi_epi64(c, d);
}
/* Bytes of x and y in turn: out[0] has those with numbers 0 to 7 and 16 to 23, out[1] the others. */
INLINE void b32_interleave(b32 x, b32 y, b32 *out) {
  out[0] = _mm256_unpacklo_epi8(x, y);
  out[1] = _mm256_unpackhi_epi8(x, y);
}
/* Sixteen signed bytes as int16 */
INLINE b32 b32_load_words(const uint8_t *p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}
/* Floats rounded half to even to int16 */
INLINE void f8_store_s16(int16_t *p, f8 x) {
  __m256i n = _mm256_cvtps_epi32(x);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi32(_mm256_castsi256_si128(n),
                                                 _mm256_extracti128_si256(n, 1)));
}
/* Lane c: sum[c] + w[2c] * a[0] + w[2c + 1] * a[1], of int16. */
INLINE i8 add_word_dot(i8 sum, b32 w, quad a) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, w, a);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(w, a));
#endif
}

/* Bits of the partial sums of products. AVX-512 multiplies pairs of vectors instead: simd_pairs.h. */
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
enum { PARTIAL_BITS = 32 };
#else
enum { PARTIAL_BITS = 16 };
#endif
#if defined(__AVXVNNI__)
#define DOT(acc, w, a) _mm256_dpbusd_avx_epi32(acc, w, a)
typedef i8 partial_sums; /* lane c: sum of w[4c..4c+3] * a[0..3] */
INLINE partial_sums partial_dot(b32 w, quad a) { return DOT(_mm256_setzero_si256(), w, a); }
INLINE partial_sums add_partial_dot(partial_sums sum, b32 w, quad a) { return DOT(sum, w, a); }
INLINE i8 widen_partial(partial_sums x) { return x; }
typedef b32 byte_vector;
INLINE byte_vector byte_weights(b32 w) { return w; }
enum { BYTE_OFFSET = 128 }; /* of the bytes that are multiplied */
INLINE i8 add_byte_dot(i8 sum, byte_vector w, quad a) { return DOT(sum, w, a); }
#else
/* int16: sums of two products. Eight steps of at most 2 * 15 * 127 stay below 2^15, as do four of
 * 2 * 31 * 127 and two of 2 * 63 * 127. */
typedef __m256i partial_sums;
INLINE partial_sums partial_dot(b32 w, quad a) { return _mm256_maddubs_epi16(w, a); }
INLINE partial_sums add_partial_dot(partial_sums sum, b32 w, quad a) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, a));
}
INLINE i8 widen_partial(partial_sums x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
typedef struct { b32 value, size; } byte_vector;
INLINE byte_vector byte_weights(b32 w) {
  b32 value = b32_flip_signs(w);
  return (byte_vector){value, pin(_mm256_abs_epi8(value))};
}
enum { BYTE_OFFSET = 0 };
/* |w| * (a with w's sign): two products stay below 2^15. */
INLINE i8 add_byte_dot(i8 sum, byte_vector w, quad a) {
  __m256i pairs = _mm256_maddubs_epi16(w.size, _mm256_sign_epi8(a, w.value));
  return _mm256_add_epi32(sum, widen_partial(pairs));
}
#endif
