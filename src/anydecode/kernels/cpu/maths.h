/* exp and tanh over lanes, with the same bits on every machine. */
#ifndef ANYDECODE_MATHS_H
#define ANYDECODE_MATHS_H

#include "simd_pairs.h"

/* Define V##_exp of one vector or of a pair: e^x within 2 units in the last place; 0 below -87.3, x
 * is capped at 88. */
#define DEFINE_EXP(V)                                                                    \
  INLINE V V##_exp(V x) {                                                                \
    V tiny = V##_set(-87.33f);                                                           \
    V clipped = V##_min(V##_max(x, tiny), V##_set(88.0f));                               \
    V n = V##_round(V##_mul(clipped, V##_set(1.44269504088896341f)));                    \
    V r = V##_fma(n, V##_set(-0.693145751953125f), clipped);                             \
    r = V##_fma(n, V##_set(-1.42860682030941723e-6f), r);                                \
    V p = V##_set(1.0f / 5040);                                                          \
    p = V##_fma(p, r, V##_set(1.0f / 720));                                              \
    p = V##_fma(p, r, V##_set(1.0f / 120));                                              \
    p = V##_fma(p, r, V##_set(1.0f / 24));                                               \
    p = V##_fma(p, r, V##_set(1.0f / 6));                                                \
    p = V##_fma(p, r, V##_set(0.5f));                                                    \
    p = V##_fma(p, V##_mul(r, r), V##_add(r, V##_set(1.0f)));                            \
    return V##_select_below(x, tiny, V##_set(0.0f), V##_scale2(p, n));                   \
  }
DEFINE_EXP(f8)
DEFINE_EXP(f8x2)

/* 1 / (1 + e^-x) */
INLINE f8 f8_sigmoid(f8 x) {
  f8 one = f8_set(1.0f);
  return f8_div(one, f8_add(one, f8_exp(f8_sub(f8_set(0.0f), x))));
}

/* log(1 + e^x), with log(1 + u) = 2 artanh(u / (2 + u)) by its series */
INLINE f8 f8_softplus(f8 x) {
  f8 zero = f8_set(0.0f), u = f8_exp(f8_sub(zero, f8_abs(x)));
  f8 z = f8_div(u, f8_add(u, f8_set(2.0f))), s = f8_mul(z, z), p = f8_set(1.0f / 17);
  p = f8_fma(p, s, f8_set(1.0f / 15));
  p = f8_fma(p, s, f8_set(1.0f / 13));
  p = f8_fma(p, s, f8_set(1.0f / 11));
  p = f8_fma(p, s, f8_set(1.0f / 9));
  p = f8_fma(p, s, f8_set(1.0f / 7));
  p = f8_fma(p, s, f8_set(1.0f / 5));
  p = f8_fma(p, s, f8_set(1.0f / 3));
  p = f8_fma(p, s, f8_set(1.0f));
  return f8_fma(f8_mul(p, z), f8_set(2.0f), f8_max(x, zero));
}

/* Series near 0, where 1 - 2 / (e^2x + 1) would lose digits. */
INLINE f8 f8_tanh(f8 x) {
  f8 one = f8_set(1.0f), two = f8_set(2.0f);
  f8 far = f8_sub(one, f8_div(two, f8_add(f8_exp(f8_mul(two, x)), one)));
  f8 s = f8_mul(x, x);
  f8 p = f8_set(-0.00886323552990220f); /* -1382/155925 */
  p = f8_fma(p, s, f8_set(0.0218694885361552f)); /* 62/2835 */
  p = f8_fma(p, s, f8_set(-0.0539682539682540f)); /* -17/315 */
  p = f8_fma(p, s, f8_set(0.133333333333333f)); /* 2/15 */
  p = f8_fma(p, s, f8_set(-0.333333333333333f));
  f8 near = f8_fma(f8_mul(p, s), x, x);
  return f8_select_below(f8_abs(x), f8_set(0.3f), near, far);
}

#endif
