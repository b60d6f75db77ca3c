/* Plain C with the same lanes and rounding. The other variants are checked against it. */

typedef struct { float v[8]; } f8;
typedef struct { int32_t v[8]; } i8;
typedef struct { uint8_t v[32]; } b32;

#define EACH(type, expression)                            \
  type out;                                               \
  for (int i = 0; i < 8; i++) out.v[i] = (expression);    \
  return out

INLINE f8 f8_load(const float *p) { EACH(f8, p[i]); }
INLINE void f8_store(float *p, f8 x) { memcpy(p, x.v, sizeof x.v); }
INLINE f8 f8_set(float x) { EACH(f8, x); }
INLINE f8 f8_add(f8 x, f8 y) { EACH(f8, x.v[i] + y.v[i]); }
INLINE f8 f8_sub(f8 x, f8 y) { EACH(f8, x.v[i] - y.v[i]); }
INLINE f8 f8_mul(f8 x, f8 y) { EACH(f8, x.v[i] * y.v[i]); }
INLINE f8 f8_div(f8 x, f8 y) { EACH(f8, x.v[i] / y.v[i]); }
INLINE f8 f8_max(f8 x, f8 y) { EACH(f8, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
INLINE f8 f8_min(f8 x, f8 y) { EACH(f8, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
INLINE f8 f8_fma(f8 x, f8 y, f8 z) { EACH(f8, fmaf(x.v[i], y.v[i], z.v[i])); }
INLINE f8 f8_abs(f8 x) { EACH(f8, fabsf(x.v[i])); }
INLINE f8 f8_round(f8 x) { EACH(f8, rintf(x.v[i])); }
INLINE f8 f8_select_below(f8 x, f8 limit, f8 a, f8 b) {
  EACH(f8, x.v[i] < limit.v[i] ? a.v[i] : b.v[i]);
}
INLINE int f8_any_above(f8 x, f8 limit) {
  int any = 0;
  for (int i = 0; i < 8; i++) any |= x.v[i] > limit.v[i];
  return any;
}
INLINE float four_of(const float *v) { return (v[0] + v[1]) + (v[2] + v[3]); }
/* Lane i: (0+1)+(2+3) of x[i]; lane i + 4: (4+5)+(6+7). */
INLINE f8 f8_fours(const f8 *x) { EACH(f8, four_of(x[i % 4].v + i / 4 * 4)); }
/* Lower lane i plus upper lane i, of `low` in lanes 0 to 3 and of `high` in lanes 4 to 7. */
INLINE f8 f8_join(f8 low, f8 high) {
  EACH(f8, i < 4 ? low.v[i] + low.v[i + 4] : high.v[i - 4] + high.v[i]);
}
INLINE float f8_reduce_max(f8 x) {
  float m[4];
  for (int i = 0; i < 4; i++) m[i] = x.v[i] > x.v[i + 4] ? x.v[i] : x.v[i + 4];
  for (int i = 0; i < 2; i++) m[i] = m[i] > m[i + 2] ? m[i] : m[i + 2];
  return m[0] > m[1] ? m[0] : m[1];
}
INLINE f8 f8_from_i8(i8 x) { EACH(f8, (float)x.v[i]); }
INLINE f8 f8_scale2(f8 x, f8 n) { EACH(f8, x.v[i] * ldexpf(1.0f, (int)n.v[i])); }
INLINE f8 f8_load_f16(const uint16_t *p) { EACH(f8, f16_to_float(p[i])); }
INLINE f8 f8_set_f16(const uint8_t *p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return f8_set(f16_to_float(half));
}
INLINE f8 f8_load_bf16(const uint16_t *p) { EACH(f8, bf16_to_float(p[i])); }
INLINE void f8_store_f16(uint16_t *p, f8 x) {
  for (int i = 0; i < 8; i++) p[i] = float_to_f16(x.v[i]);
}
INLINE f8 f8_load_u8(const uint8_t *p) { EACH(f8, (float)p[i]); }
INLINE f8 f8_load_s8(const uint8_t *p) { EACH(f8, (float)(int8_t)p[i]); }
/* See e4m3_to_float; the numbers are below 128. */
INLINE f8 f8_load_e4m3(const uint8_t *p) { EACH(f8, e4m3_to_float(p[i])); }
/* 2^(e - 128) of eight exponents e */
INLINE f8 f8_load_e8m0(const uint8_t *p) { EACH(f8, ldexpf(1.0f, p[i] - 128)); }
INLINE i8 i8_set(int32_t x) { EACH(i8, x); }
INLINE i8 i8_add(i8 x, i8 y) { EACH(i8, x.v[i] + y.v[i]); }
INLINE i8 i8_sub(i8 x, i8 y) { EACH(i8, x.v[i] - y.v[i]); }

INLINE i8 i8_load(const uint32_t *p) { EACH(i8, (int32_t)p[i]); }
INLINE i8 i8_right(i8 x, int n) { EACH(i8, (int32_t)((uint32_t)x.v[i] >> n)); }
INLINE i8 i8_left(i8 x, int n) { EACH(i8, (int32_t)((uint32_t)x.v[i] << n)); }
/* Eight unsigned numbers. */
typedef struct { uint32_t v[8]; } n8;
INLINE n8 n8_set(uint32_t x) { EACH(n8, x); }
/* from + 0, 1, ... 7 */
INLINE n8 n8_count(uint32_t from) { EACH(n8, from + (uint32_t)i); }
INLINE n8 n8_xor(n8 x, n8 y) { EACH(n8, x.v[i] ^ y.v[i]); }
/* The upper and lower 32 bits of the products with one number. */
INLINE void n8_multiply(n8 x, uint32_t by, n8 *high, n8 *low) {
  for (int i = 0; i < 8; i++) {
    uint64_t product = (uint64_t)x.v[i] * by;
    high->v[i] = (uint32_t)(product >> 32);
    low->v[i] = (uint32_t)product;
  }
}
INLINE i8 n8_words(n8 x) { EACH(i8, (int32_t)x.v[i]); }
/* out[4 * i + j] = lane i of x[j] */
INLINE void i8_store_fours(uint32_t *out, const i8 *x) {
  for (int i = 0; i < 32; i++) out[i] = (uint32_t)x[i % 4].v[i / 4];
}

#define EACH_BYTE(expression)                             \
  b32 out;                                                \
  for (int i = 0; i < 32; i++) out.v[i] = (uint8_t)(expression); \
  return out

INLINE b32 b32_load(const uint8_t *p) { EACH_BYTE(p[i]); }
INLINE void b32_store(uint8_t *p, b32 x) { memcpy(p, x.v, sizeof x.v); }
INLINE b32 b32_and(b32 x, int mask) { EACH_BYTE(x.v[i] & mask); }
INLINE b32 b32_or(b32 x, b32 y) { EACH_BYTE(x.v[i] | y.v[i]); }
/* table[i] of each byte i below 16 */
INLINE b32 b32_lookup(const uint8_t *table, b32 i) {
  b32 out;
  for (int k = 0; k < 32; k++) out.v[k] = table[i.v[k]];
  return out;
}
INLINE b32 b32_xor(b32 x, b32 y) { EACH_BYTE(x.v[i] ^ y.v[i]); }
/* Signed bytes plus 128, or the reverse */
INLINE b32 b32_flip_signs(b32 x) { EACH_BYTE(x.v[i] ^ 0x80); }
INLINE b32 b32_sub(b32 x, b32 y) { EACH_BYTE(x.v[i] - y.v[i]); }
/* Byte 4 * c + j: 255 if bit j, or j + 4, of bits[c] is set, else 0. */
INLINE b32 b32_mask(const uint8_t *bits, int is_upper) {
  EACH_BYTE(bits[i / 4] >> (i % 4 + 4 * is_upper) & 1 ? 255 : 0);
}
/* Bytes 4 * c to 4 * c + 3: those at 4 * index[c] of the table. */
INLINE b32 b32_gather4(const uint8_t *table, const uint16_t *index) {
  EACH_BYTE(table[4 * index[i / 4] + i % 4]);
}
/* Bytes 4 * c to 4 * c + 3 of out[0]: those at 8 * index[c] of the table; of out[1]: the next. */
INLINE void b32_gather8(const uint8_t *table, const uint16_t *index, b32 *out) {
  for (int i = 0; i < 64; i++) out[i / 32].v[i % 32] = table[8 * index[i % 32 / 4] + i / 32 * 4 + i % 4];
}
INLINE b32 b32_right(b32 x, int n) { EACH_BYTE(x.v[i] >> n); }
INLINE b32 b32_left(b32 x, int n) { EACH_BYTE(x.v[i] << n); }

INLINE i8 pin(i8 x) { return x; }
INLINE b32 pin_bytes(b32 x) { return x; }
INLINE void round_block(const float *x, float inverse, int8_t *q, int32_t *low, int32_t *high) {
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < 32; i++) {
    q[i] = (int8_t)rintf(x[i] * inverse);
    sums[i / 16] += q[i];
  }
  *low = sums[0];
  *high = sums[1];
}

typedef const int8_t *quad;
INLINE quad quad_load(const int8_t *a) { return a; }
enum { PARTIAL_BITS = 32 };
typedef i8 partial_sums; /* lane c: sum of w[4c..4c+3] * a[0..3] */
INLINE partial_sums add_partial_dot(partial_sums sum, b32 w, quad a) {
  for (int i = 0; i < 32; i++) sum.v[i / 4] += (int32_t)w.v[i] * a[i % 4];
  return sum;
}
INLINE partial_sums partial_dot(b32 w, quad a) { return add_partial_dot(i8_set(0), w, a); }
INLINE i8 widen_partial(partial_sums x) { return x; }
typedef b32 byte_vector;
INLINE byte_vector byte_weights(b32 w) { return w; }
enum { BYTE_OFFSET = 128 }; /* of the bytes that are multiplied */
INLINE i8 add_byte_dot(i8 sum, byte_vector w, quad a) { return add_partial_dot(sum, w, a); }
/* Byte 4 * c + j of out[i]: byte 4 * i + j of from[c], for eight c and four i. */
INLINE void b32_load_columns(const uint8_t *const *from, b32 *out) {
  for (int i = 0; i < 4; i++)
    for (int c = 0; c < 8; c++) memcpy(out[i].v + 4 * c, from[c] + 4 * i, 4);
}
/* Bytes of x and y in turn: out[0] has those with numbers 0 to 7 and 16 to 23, out[1] the others. */
INLINE void b32_interleave(b32 x, b32 y, b32 *out) {
  for (int i = 0; i < 32; i++) {
    int to = i / 16 * 16 + 2 * (i % 8);
    out[i / 8 % 2].v[to] = x.v[i];
    out[i / 8 % 2].v[to + 1] = y.v[i];
  }
}
/* Sixteen signed bytes as int16 */
INLINE b32 b32_load_words(const uint8_t *p) {
  int16_t words[16];
  for (int i = 0; i < 16; i++) words[i] = (int8_t)p[i];
  b32 out;
  memcpy(out.v, words, sizeof words);
  return out;
}
/* Floats rounded half to even to int16 */
INLINE void f8_store_s16(int16_t *p, f8 x) {
  for (int i = 0; i < 8; i++) p[i] = (int16_t)rintf(x.v[i]);
}
/* Lane c: sum[c] + w[2c] * a[0] + w[2c + 1] * a[1], of int16. */
INLINE i8 add_word_dot(i8 sum, b32 w, quad a) {
  int16_t words[16], by[2];
  memcpy(words, w.v, sizeof words);
  memcpy(by, a, sizeof by);
  for (int c = 0; c < 8; c++) sum.v[c] += words[2 * c] * by[0] + words[2 * c + 1] * by[1];
  return sum;
}
