/* Vectors of eight floats or int32 and of 32 bytes: the only code specific to an instruction set.
 * Every variant rounds in the same way: only f8_fma fuses a product and a sum. */
#ifndef ANYDECODE_SIMD_H
#define ANYDECODE_SIMD_H

#include "layout.h"

#include <math.h>
#include <string.h>

INLINE float f16_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
  if (rest >= 0x7c00) {
    bits = 0x7f800000u | ((rest & 0x3ff) << 13);
  } else if (rest >= 0x0400) {
    bits = (rest << 13) + 0x38000000u;
  } else {
    float small = (float)rest * 0x1p-24f;
    memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

INLINE uint16_t float_to_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x47800000u) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000u) {
    float magnitude;
    memcpy(&magnitude, &rest, 4);
    magnitude += 0.5f; /* 0.5 has the spacing of the smallest float16, so this addition rounds */
    memcpy(&rest, &magnitude, 4);
    return (uint16_t)(sign | (rest - 0x3f000000u));
  }
  rest += 0xfff + ((rest >> 13) & 1);
  return (uint16_t)(sign | ((rest - 0x38000000u) >> 13));
}

INLINE float bf16_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

/* An unsigned number of 4 exponent and 3 mantissa bits (E4M3, bias 7), halved. With its bits moved
 * to those of a float16, it is smaller by a power of two. */
INLINE float e4m3_to_float(uint8_t x) { return f16_to_float((uint16_t)(x << 7)) * 128.0f; }

INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(ANYDECODE_SCALAR)
#include "simd_scalar.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "no instruction set chosen"
#endif

/* The factor by which numbers of sizes up to `max` become int8; 0 where it would be infinite. */
INLINE float int8_factor(float max) { return max > 4e-37f ? 127.0f / max : 0.0f; }

/* ((0+1)+(2+3)) + ((4+5)+(6+7)) */
INLINE float f8_sum(f8 x) {
  float v[8];
  f8_store(v, x);
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* The first `left` floats, followed by zeros. */
INLINE f8 f8_load_part(const float *p, int left) {
  if (left >= 8) return f8_load(p);
  float v[8] = {0};
  memcpy(v, p, (size_t)left * 4);
  return f8_load(v);
}

INLINE void f8_store_part(float *p, f8 x, int left) {
  if (left >= 8) {
    f8_store(p, x);
    return;
  }
  float v[8];
  f8_store(v, x);
  memcpy(p, v, (size_t)left * 4);
}

#endif
