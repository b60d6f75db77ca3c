/* NEON: two 128-bit registers per value; dot-product instructions where the target has them. */
#include <arm_neon.h>

typedef struct { float32x4_t a, b; } f8;
typedef struct { int32x4_t a, b; } i8;
typedef struct { uint8x16_t a, b; } b32;

#define F8(x, y) ((f8){(x), (y)})
#define I8(x, y) ((i8){(x), (y)})
#define B32(x, y) ((b32){(x), (y)})

INLINE f8 f8_load(const float *p) { return F8(vld1q_f32(p), vld1q_f32(p + 4)); }
INLINE void f8_store(float *p, f8 x) { vst1q_f32(p, x.a); vst1q_f32(p + 4, x.b); }
INLINE f8 f8_set(float x) { return F8(vdupq_n_f32(x), vdupq_n_f32(x)); }
INLINE f8 f8_add(f8 x, f8 y) { return F8(vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)); }
INLINE f8 f8_sub(f8 x, f8 y) { return F8(vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)); }
INLINE f8 f8_mul(f8 x, f8 y) { return F8(vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)); }
INLINE f8 f8_div(f8 x, f8 y) { return F8(vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)); }
/* y where either is NaN, as in the other variants */
INLINE f8 f8_max(f8 x, f8 y) {
  return F8(vbslq_f32(vcgtq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcgtq_f32(x.b, y.b), x.b, y.b));
}
INLINE f8 f8_min(f8 x, f8 y) {
  return F8(vbslq_f32(vcltq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcltq_f32(x.b, y.b), x.b, y.b));
}
INLINE f8 f8_fma(f8 x, f8 y, f8 z) {
  return F8(vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b));
}
INLINE f8 f8_abs(f8 x) { return F8(vabsq_f32(x.a), vabsq_f32(x.b)); }
INLINE f8 f8_round(f8 x) { return F8(vrndnq_f32(x.a), vrndnq_f32(x.b)); }
INLINE f8 f8_select_below(f8 x, f8 limit, f8 a, f8 b) {
  return F8(vbslq_f32(vcltq_f32(x.a, limit.a), a.a, b.a),
            vbslq_f32(vcltq_f32(x.b, limit.b), a.b, b.b));
}
INLINE int f8_any_above(f8 x, f8 limit) {
  return vmaxvq_u32(vorrq_u32(vcgtq_f32(x.a, limit.a), vcgtq_f32(x.b, limit.b))) != 0;
}
/* Lane i: (0+1)+(2+3) of x[i]; lane i + 4: (4+5)+(6+7). */
INLINE f8 f8_fours(const f8 *x) {
  return F8(vpaddq_f32(vpaddq_f32(x[0].a, x[1].a), vpaddq_f32(x[2].a, x[3].a)),
            vpaddq_f32(vpaddq_f32(x[0].b, x[1].b), vpaddq_f32(x[2].b, x[3].b)));
}
/* Lower lane i plus upper lane i, of `low` in lanes 0 to 3 and of `high` in lanes 4 to 7. */
INLINE f8 f8_join(f8 low, f8 high) {
  return F8(vaddq_f32(low.a, low.b), vaddq_f32(high.a, high.b));
}
INLINE float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE float f8_reduce_max(f8 x) {
  float32x4_t m = max4(x.a, x.b);
  m = max4(m, vextq_f32(m, m, 2));
  return vgetq_lane_f32(max4(m, vdupq_laneq_f32(m, 1)), 0);
}
INLINE f8 f8_from_i8(i8 x) { return F8(vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)); }
INLINE float32x4_t power_of_two(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
INLINE f8 f8_scale2(f8 x, f8 n) { return f8_mul(x, F8(power_of_two(n.a), power_of_two(n.b))); }
INLINE f8 f8_load_f16(const uint16_t *p) {
  float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
  return F8(vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h));
}
INLINE f8 f8_set_f16(const uint8_t *p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return f8_set(f16_to_float(half));
}
INLINE f8 f8_load_bf16(const uint16_t *p) {
  uint16x8_t h = vld1q_u16(p);
  return F8(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16)));
}
INLINE void f8_store_f16(uint16_t *p, f8 x) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}
/* 2^(e - 128) of eight exponents e; the first two are below the normal numbers. */
INLINE float32x4_t four_e8m0(uint32x4_t e) {
  uint32x4_t normal = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23);
  uint32x4_t small = vshlq_u32(vdupq_n_u32(1 << 21), vreinterpretq_s32_u32(e));
  return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), small, normal));
}
INLINE f8 f8_load_e8m0(const uint8_t *p) {
  uint16x8_t h = vmovl_u8(vld1_u8(p));
  return F8(four_e8m0(vmovl_u16(vget_low_u16(h))), four_e8m0(vmovl_u16(vget_high_u16(h))));
}
INLINE f8 f8_load_u8(const uint8_t *p) {
  uint16x8_t h = vmovl_u8(vld1_u8(p));
  return F8(vcvtq_f32_u32(vmovl_u16(vget_low_u16(h))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(h))));
}
INLINE f8 f8_load_s8(const uint8_t *p) {
  int16x8_t h = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
  return F8(vcvtq_f32_s32(vmovl_s16(vget_low_s16(h))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(h))));
}
/* See e4m3_to_float; the numbers are below 128. */
INLINE f8 f8_load_e4m3(const uint8_t *p) {
  float16x8_t h = vreinterpretq_f16_u16(vshll_n_u8(vld1_u8(p), 7));
  return f8_mul(F8(vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)), f8_set(128.0f));
}
INLINE i8 i8_set(int32_t x) { return I8(vdupq_n_s32(x), vdupq_n_s32(x)); }
INLINE i8 i8_add(i8 x, i8 y) { return I8(vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)); }
INLINE i8 i8_sub(i8 x, i8 y) { return I8(vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b)); }

INLINE i8 i8_load(const uint32_t *p) {
  return I8(vreinterpretq_s32_u32(vld1q_u32(p)), vreinterpretq_s32_u32(vld1q_u32(p + 4)));
}
#define RIGHT4(x, n) vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), n))
/* Each lane as unsigned, shifted by a constant. */
#define i8_right(x, n) I8(RIGHT4((x).a, n), RIGHT4((x).b, n))
#define i8_left(x, n) I8(vshlq_n_s32((x).a, n), vshlq_n_s32((x).b, n))
/* Eight unsigned numbers. */
typedef struct { uint32x4_t a, b; } n8;
INLINE n8 n8_set(uint32_t x) { return (n8){vdupq_n_u32(x), vdupq_n_u32(x)}; }
/* from + 0, 1, ... 7 */
INLINE n8 n8_count(uint32_t from) {
  static const uint32_t order[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  uint32x4_t first = vdupq_n_u32(from);
  return (n8){vaddq_u32(first, vld1q_u32(order)), vaddq_u32(first, vld1q_u32(order + 4))};
}
INLINE n8 n8_xor(n8 x, n8 y) { return (n8){veorq_u32(x.a, y.a), veorq_u32(x.b, y.b)}; }
INLINE void multiply4(uint32x4_t x, uint32_t by, uint32x4_t *high, uint32x4_t *low) {
  uint32x4_t factor = vdupq_n_u32(by);
  uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(factor)));
  uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(x, factor));
  *high = vuzp2q_u32(first, second);
  *low = vuzp1q_u32(first, second);
}
/* The upper and lower 32 bits of the products with one number. */
INLINE void n8_multiply(n8 x, uint32_t by, n8 *high, n8 *low) {
  multiply4(x.a, by, &high->a, &low->a);
  multiply4(x.b, by, &high->b, &low->b);
}
INLINE i8 n8_words(n8 x) { return I8(vreinterpretq_s32_u32(x.a), vreinterpretq_s32_u32(x.b)); }
/* out[4 * i + j] = lane i of x[j] */
INLINE void i8_store_fours(uint32_t *out, const i8 *x) {
  int32x4x4_t first = {{x[0].a, x[1].a, x[2].a, x[3].a}};
  int32x4x4_t second = {{x[0].b, x[1].b, x[2].b, x[3].b}};
  vst4q_s32((int32_t *)out, first);
  vst4q_s32((int32_t *)out + 16, second);
}

INLINE b32 b32_load(const uint8_t *p) { return B32(vld1q_u8(p), vld1q_u8(p + 16)); }
INLINE void b32_store(uint8_t *p, b32 x) {
  vst1q_u8(p, x.a);
  vst1q_u8(p + 16, x.b);
}
INLINE b32 b32_and(b32 x, int mask) {
  uint8x16_t m = vdupq_n_u8((uint8_t)mask);
  return B32(vandq_u8(x.a, m), vandq_u8(x.b, m));
}
INLINE b32 b32_or(b32 x, b32 y) { return B32(vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b)); }
/* table[i] of each byte i below 16 */
INLINE b32 b32_lookup(const uint8_t *table, b32 i) {
  uint8x16_t values = vld1q_u8(table);
  return B32(vqtbl1q_u8(values, i.a), vqtbl1q_u8(values, i.b));
}
INLINE b32 b32_xor(b32 x, b32 y) { return B32(veorq_u8(x.a, y.a), veorq_u8(x.b, y.b)); }
/* Signed bytes plus 128, or the reverse */
INLINE b32 b32_flip_signs(b32 x) {
  uint8x16_t flip = vdupq_n_u8(0x80);
  return B32(veorq_u8(x.a, flip), veorq_u8(x.b, flip));
}
INLINE b32 b32_sub(b32 x, b32 y) { return B32(vsubq_u8(x.a, y.a), vsubq_u8(x.b, y.b)); }
/* Byte 4 * c + j: 255 if bit j, or j + 4, of bits[c] is set, else 0. */
INLINE b32 b32_mask(const uint8_t *bits, int is_upper) {
  static const uint8_t order[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  uint8x16_t eight = vcombine_u8(vld1_u8(bits), vdup_n_u8(0)), first = vld1q_u8(order);
  uint8x16_t second = vaddq_u8(first, vdupq_n_u8(4));
  uint8x16_t bit = vreinterpretq_u8_u32(vdupq_n_u32(is_upper ? 0x80402010u : 0x08040201u));
  return B32(vtstq_u8(vqtbl1q_u8(eight, first), bit), vtstq_u8(vqtbl1q_u8(eight, second), bit));
}
/* Bytes 4 * c to 4 * c + 3: those at 4 * index[c] of the table. */
INLINE b32 b32_gather4(const uint8_t *table, const uint16_t *index) {
  uint8_t bytes[32];
  for (int c = 0; c < 8; c++) memcpy(bytes + 4 * c, table + 4 * index[c], 4);
  return b32_load(bytes);
}
/* Bytes 4 * c to 4 * c + 3 of out[0]: those at 8 * index[c] of the table; of out[1]: the next. */
INLINE uint32x4_t two_points(const uint8_t *table, const uint16_t *i) {
  return vreinterpretq_u32_u8(vcombine_u8(vld1_u8(table + 8 * i[0]), vld1_u8(table + 8 * i[1])));
}
INLINE void b32_gather8(const uint8_t *table, const uint16_t *index, b32 *out) {
  uint32x4_t x[4];
  for (int c = 0; c < 4; c++) x[c] = two_points(table, index + 2 * c);
  out[0] = B32(vreinterpretq_u8_u32(vuzp1q_u32(x[0], x[1])),
               vreinterpretq_u8_u32(vuzp1q_u32(x[2], x[3])));
  out[1] = B32(vreinterpretq_u8_u32(vuzp2q_u32(x[0], x[1])),
               vreinterpretq_u8_u32(vuzp2q_u32(x[2], x[3])));
}
INLINE b32 b32_right(b32 x, int n) {
  int8x16_t by = vdupq_n_s8((int8_t)-n);
  return B32(vshlq_u8(x.a, by), vshlq_u8(x.b, by));
}
INLINE b32 b32_left(b32 x, int n) {
  int8x16_t by = vdupq_n_s8((int8_t)n);
  return B32(vshlq_u8(x.a, by), vshlq_u8(x.b, by));
}

INLINE i8 pin(i8 x) { return x; }
INLINE b32 pin_bytes(b32 x) { return x; }
INLINE int8x16_t rounded16(const float *x, float inverse) {
  int16x8_t half[2];
  for (int i = 0; i < 2; i++) {
    int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 8 * i), inverse));
    int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 8 * i + 4), inverse));
    half[i] = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b));
  }
  return vcombine_s8(vqmovn_s16(half[0]), vqmovn_s16(half[1]));
}
/* 32 values times `inverse`, rounded half to even, and the sums of the first and the last 16. */
INLINE void round_block(const float *x, float inverse, int8_t *q, int32_t *low, int32_t *high) {
  int8x16_t first = rounded16(x, inverse), second = rounded16(x + 16, inverse);
  vst1q_s8(q, first);
  vst1q_s8(q + 16, second);
  *low = vaddlvq_s8(first);
  *high = vaddlvq_s8(second);
}

INLINE int32x4_t dot_quad(int32x4_t total, uint8x16_t w, int8x16_t a) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(total, vreinterpretq_s8_u8(w), a);
#else
  int8x16_t s = vreinterpretq_s8_u8(w);
  int16x8_t low = vmull_s8(vget_low_s8(s), vget_low_s8(a));
  int16x8_t high = vmull_high_s8(s, a);
  return vaddq_s32(total, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
/* The same four activations in every lane. */
typedef int8x16_t quad;
INLINE quad quad_load(const int8_t *a) {
  int32_t four;
  memcpy(&four, a, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
enum { PARTIAL_BITS = 32 };
typedef i8 partial_sums; /* lane c: sum of w[4c..4c+3] * a[0..3] */
INLINE partial_sums add_partial_dot(partial_sums sum, b32 w, quad a) {
  return I8(dot_quad(sum.a, w.a, a), dot_quad(sum.b, w.b, a));
}
INLINE partial_sums partial_dot(b32 w, quad a) { return add_partial_dot(i8_set(0), w, a); }
INLINE i8 widen_partial(partial_sums x) { return x; }
typedef b32 byte_vector;
INLINE byte_vector byte_weights(b32 w) { return b32_flip_signs(w); }
enum { BYTE_OFFSET = 0 };
INLINE i8 add_byte_dot(i8 sum, byte_vector w, quad a) { return add_partial_dot(sum, w, a); }
/* Byte 4 * c + j of out[i]: byte 4 * i + j of from[c], for four c. */
INLINE void four_columns(const uint8_t *const *from, uint8x16_t *out) {
  uint32x4_t x[4];
  for (int i = 0; i < 4; i++) x[i] = vreinterpretq_u32_u8(vld1q_u8(from[i]));
  uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(x[0], x[1]));
  uint64x2_t b = vreinterpretq_u64_u32(vtrn1q_u32(x[2], x[3]));
  uint64x2_t c = vreinterpretq_u64_u32(vtrn2q_u32(x[0], x[1]));
  uint64x2_t d = vreinterpretq_u64_u32(vtrn2q_u32(x[2], x[3]));
  out[0] = vreinterpretq_u8_u64(vzip1q_u64(a, b));
  out[1] = vreinterpretq_u8_u64(vzip1q_u64(c, d));
  out[2] = vreinterpretq_u8_u64(vzip2q_u64(a, b));
  out[3] = vreinterpretq_u8_u64(vzip2q_u64(c, d));
}
/* The same for eight c. */
INLINE void b32_load_columns(const uint8_t *const *from, b32 *out) {
  uint8x16_t low[4], high[4];
  four_columns(from, low);
  four_columns(from + 4, high);
  for (int i = 0; i < 4; i++) out[i] = B32(low[i], high[i]);
}
/* Bytes of x and y in turn: out[0] has those with numbers 0 to 7 and 16 to 23, out[1] the others. */
INLINE void b32_interleave(b32 x, b32 y, b32 *out) {
  out[0] = B32(vzip1q_u8(x.a, y.a), vzip1q_u8(x.b, y.b));
  out[1] = B32(vzip2q_u8(x.a, y.a), vzip2q_u8(x.b, y.b));
}
/* Sixteen signed bytes as int16 */
INLINE b32 b32_load_words(const uint8_t *p) {
  int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
  return B32(vreinterpretq_u8_s16(vmovl_s8(vget_low_s8(x))),
             vreinterpretq_u8_s16(vmovl_high_s8(x)));
}
/* Floats rounded half to even to int16 */
INLINE void f8_store_s16(int16_t *p, f8 x) {
  vst1q_s16(p, vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.a)), vqmovn_s32(vcvtnq_s32_f32(x.b))));
}
INLINE int32x4_t add_word_products(int32x4_t sum, uint8x16_t w, int16x8_t a) {
  int16x8_t words = vreinterpretq_s16_u8(w);
  int32x4_t low = vmull_s16(vget_low_s16(words), vget_low_s16(a));
  return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(words, a)));
}
/* Lane c: sum[c] + w[2c] * a[0] + w[2c + 1] * a[1], of int16. */
INLINE i8 add_word_dot(i8 sum, b32 w, quad a) {
  int16x8_t words = vreinterpretq_s16_s8(a);
  return I8(add_word_products(sum.a, w.a, words), add_word_products(sum.b, w.b, words));
}
