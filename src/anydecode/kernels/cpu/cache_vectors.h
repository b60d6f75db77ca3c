/* The vectors of the key-value cache: conversion to and from its formats, and loads as float32. */
#ifndef ANYDECODE_CACHE_VECTORS_H
#define ANYDECODE_CACHE_VECTORS_H

#include "pointwise.h"
#include "simd_pairs.h"

/* The block of Q8_0 with the number `at` of a vector. */
INLINE const uint8_t *block_of(const char *vector, int at) {
  return (const uint8_t *)vector + at / QUANT_BLOCK * 34;
}

/* The numbers from `at` on of a vector in Q4_1. */
INLINE f8 load_q4_1(const char *vector, int at) {
  const uint8_t *block = (const uint8_t *)vector + at / QUANT_BLOCK * 20;
  uint64_t codes;
  memcpy(&codes, block + 4 + at % 16, 8);
  codes = (at % QUANT_BLOCK < 16 ? codes : codes >> 4) & 0x0f0f0f0f0f0f0f0fu;
  return f8_add(f8_mul(f8_load_u8((const uint8_t *)&codes), f8_set_f16(block)),
                f8_set_f16(block + 2));
}

/* The numbers from `at` on of a vector. */
INLINE f8 load_as(int format, const char *vector, int at) {
  const uint8_t *block = block_of(vector, at);
  if (format == Q4_1) return load_q4_1(vector, at);
  if (format == Q8_0)
    return f8_mul(f8_load_s8(block + 2 + at % QUANT_BLOCK), f8_set_f16(block));
  if (format == F16) return f8_load_f16((const uint16_t *)vector + at);
  if (format == BF16) return f8_load_bf16((const uint16_t *)vector + at);
  return f8_load((const float *)vector + at);
}

/* The numbers from `at` on of two keys in a format of plain numbers. */
INLINE f8x2 load_two(int format, const char *const *vectors, int at) {
  if (format == F32)
    return f8x2_load_two((const float *)vectors[0] + at, (const float *)vectors[1] + at);
  const uint16_t *first = (const uint16_t *)vectors[0] + at;
  const uint16_t *second = (const uint16_t *)vectors[1] + at;
  return format == F16 ? f8x2_load_two_f16(first, second) : f8x2_load_two_bf16(first, second);
}

/* Two consecutive vectors of a value in such a format. */
INLINE f8x2 load_pair(int format, const char *vector, int at) {
  if (format == F16) return f8x2_load_f16((const uint16_t *)vector + at);
  if (format == BF16) return f8x2_load_bf16((const uint16_t *)vector + at);
  return f8x2_load((const float *)vector + at);
}

/* Convert one head's vector in the cache to `padded` floats; the padding is zero. */
INLINE void decode_vector(int format, const char *from, int count, int padded, float *to) {
  if (format == Q8_0 && padded % QUANT_BLOCK == 0) {
    for (int i = 0; i < padded; i += QUANT_BLOCK) {
      const uint8_t *block = block_of(from, i);
      f8 scale = f8_set_f16(block);
#pragma GCC unroll 4
      for (int j = 0; j < QUANT_BLOCK; j += 8)
        f8_store(to + i + j, f8_mul(f8_load_s8(block + 2 + j), scale));
    }
    return;
  }
  if (!is_float(format) || count == padded) {
    for (int i = 0; i < padded; i += 8) f8_store(to + i, load_as(format, from, i));
    return;
  }
  for (int i = 0; i < padded; i++) {
    const uint16_t *half = (const uint16_t *)from + i;
    if (i >= count) to[i] = 0.0f;
    else if (format == F32) to[i] = ((const float *)from)[i];
    else to[i] = format == F16 ? f16_to_float(*half) : bf16_to_float(*half);
  }
}

/* Convert 32 floats to a block of the cache. */
static void encode_block(int format, const float *from, uint8_t *to) {
  f8 max = f8_load(from), negated_min = f8_sub(f8_set(0.0f), max), size = f8_abs(max);
  for (int i = 8; i < QUANT_BLOCK; i += 8) {
    f8 x = f8_load(from + i);
    max = f8_max(x, max);
    negated_min = f8_max(f8_sub(f8_set(0.0f), x), negated_min);
    size = f8_max(f8_abs(x), size);
  }
  if (format == Q8_0) {
    float amax = f8_reduce_max(size);
    uint16_t scale = float_to_f16(amax / 127.0f);
    int32_t low, high;
    memcpy(to, &scale, 2);
    round_block(from, int8_factor(amax), (int8_t *)to + 2, &low, &high);
    return;
  }
  float low = -f8_reduce_max(negated_min), step = (f8_reduce_max(max) - low) / 15.0f;
  float inverse = step > 0 ? 1.0f / step : 0.0f, codes[QUANT_BLOCK];
  uint16_t halves[2] = {float_to_f16(step), float_to_f16(low)};
  memcpy(to, halves, 4);
  for (int i = 0; i < QUANT_BLOCK; i += 8) {
    f8 code = f8_round(f8_mul(f8_sub(f8_load(from + i), f8_set(low)), f8_set(inverse)));
    f8_store(codes + i, f8_min(f8_max(code, f8_set(0.0f)), f8_set(15.0f)));
  }
  for (int i = 0; i < 16; i++) to[4 + i] = (uint8_t)((int)codes[i] | (int)codes[16 + i] << 4);
}

/* Convert one head's vector to the cache's format. */
INLINE void encode_vector(int format, const float *from, int count, char *to) {
  int i = 0;
  uint16_t *half = (uint16_t *)to;
  if (format == F32) {
    memcpy(to, from, (size_t)count * 4);
  } else if (format == F16) {
    for (; i + 8 <= count; i += 8) f8_store_f16(half + i, f8_load(from + i));
    for (; i < count; i++) half[i] = float_to_f16(from[i]);
  } else if (format == BF16) {
    for (; i < count; i++) half[i] = float_to_bf16(from[i]);
  } else {
    for (; i < count; i += QUANT_BLOCK, to += format == Q8_0 ? 34 : 20) {
      float part[QUANT_BLOCK] = {0};
      memcpy(part, from + i, (size_t)(count - i < QUANT_BLOCK ? count - i : QUANT_BLOCK) * 4);
      encode_block(format, part, (uint8_t *)to);
    }
  }
}

#endif
