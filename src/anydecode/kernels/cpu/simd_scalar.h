/* Plain C with the same lanes and the same rounding: what the other variants are checked against. */

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
INLINE f8 f8_pick_below(f8 x, f8 limit, f8 a, f8 b) {
  EACH(f8, x.v[i] < limit.v[i] ? a.v[i] : b.v[i]);
}
INLINE int f8_any_above(f8 x, f8 limit) {
  int found = 0;
  for (int i = 0; i < 8; i++) found |= x.v[i] > limit.v[i];
  return found;
}
INLINE float sum_of(const float *v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}
INLINE f8 f8_sums(const f8 *x) { EACH(f8, sum_of(x[i].v)); }
INLINE float f8_largest(f8 x) {
  float best = x.v[0];
  for (int i = 1; i < 8; i++) best = x.v[i] > best ? x.v[i] : best;
  return best;
}
INLINE f8 f8_from_i8(i8 x) { EACH(f8, (float)x.v[i]); }
INLINE f8 f8_scale2(f8 x, f8 n) { EACH(f8, x.v[i] * ldexpf(1.0f, (int)n.v[i])); }
INLINE f8 f8_load_f16(const uint16_t *p) { EACH(f8, f16_to_float(p[i])); }
INLINE f8 f8_load_bf16(const uint16_t *p) { EACH(f8, bf16_to_float(p[i])); }
INLINE void f8_store_f16(uint16_t *p, f8 x) {
  for (int i = 0; i < 8; i++) p[i] = float_to_f16(x.v[i]);
}
INLINE f8 f8_load_u8(const uint8_t *p) { EACH(f8, (float)p[i]); }
INLINE f8 f8_load_s8(const uint8_t *p) { EACH(f8, (float)(int8_t)p[i]); }
INLINE i8 i8_set(int32_t x) { EACH(i8, x); }
INLINE i8 i8_add(i8 x, i8 y) { EACH(i8, x.v[i] + y.v[i]); }
INLINE i8 i8_sub(i8 x, i8 y) { EACH(i8, x.v[i] - y.v[i]); }

#define EACH_BYTE(expression)                             \
  b32 out;                                                \
  for (int i = 0; i < 32; i++) out.v[i] = (uint8_t)(expression); \
  return out

INLINE b32 b32_load(const uint8_t *p) { EACH_BYTE(p[i]); }
INLINE b32 b32_and(b32 x, int mask) { EACH_BYTE(x.v[i] & mask); }
INLINE b32 b32_or(b32 x, b32 y) { EACH_BYTE(x.v[i] | y.v[i]); }
INLINE b32 b32_right(b32 x, int n) { EACH_BYTE(x.v[i] >> n); }
INLINE b32 b32_left(b32 x, int n) { EACH_BYTE(x.v[i] << n); }

INLINE i8 settled(i8 x) { return x; }
INLINE void round_block(const float *x, float inverse, int8_t *q, int32_t *low, int32_t *high) {
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < 32; i++) {
    q[i] = (int8_t)rintf(x[i] * inverse);
    sums[i / 16] += q[i];
  }
  *low = sums[0];
  *high = sums[1];
}

/* `before` + the sum over four steps of w[i][4c..4c+3] * a[4i..4i+3], for lane c. */
INLINE i8 dot_steps(i8 before, const b32 *w, const int8_t *a) {
  for (int c = 0; c < 8; c++)
    for (int k = 0; k < 16; k++) before.v[c] += (int32_t)w[k / 4].v[4 * c + k % 4] * a[k];
  return before;
}
typedef i8 sums;
INLINE sums sums_4bit(const b32 *w, const int8_t *a) { return dot_steps(i8_set(0), w, a); }
INLINE sums more_4bit(sums before, const b32 *w, const int8_t *a) { return dot_steps(before, w, a); }
INLINE i8 end_4bit(sums x) { return x; }
INLINE sums sums_5bit(const b32 *w, const int8_t *a) { return sums_4bit(w, a); }
INLINE sums more_5bit(sums before, const b32 *w, const int8_t *a) { return dot_steps(before, w, a); }
INLINE sums sums_6bit(const b32 *w, const int8_t *a) { return sums_4bit(w, a); }
INLINE i8 end_wide(sums x) { return x; }
INLINE sums sums_8bit(const b32 *w, const int8_t *a) { return sums_4bit(w, a); }
INLINE sums more_8bit(sums before, const b32 *w, const int8_t *a) { return dot_steps(before, w, a); }
INLINE i8 end_8bit(sums x, int32_t sum) { return i8_sub(x, i8_set(128 * sum)); }
INLINE b32 prepare_8bit(b32 w) { return w; }
