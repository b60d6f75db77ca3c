/* Logarithm, exponential, sine and cosine in double precision, with the same bits on every machine:
 * C libraries differ in the last ones. IEEE 754 defines those of the operations used here.
 * kernels/portable.py has the same functions. */
#ifndef ANYDECODE_DOUBLES_H
#define ANYDECODE_DOUBLES_H

#include "layout.h"

#include <math.h>
#include <string.h>

#ifdef ANYDECODE_FAST_MATH /* those of the C library */
INLINE double portable_log(double x) { return log(x); }
INLINE double portable_exp(double x) { return exp(x); }
INLINE void sine_and_cosine(double x, double *sine, double *cosine) {
  *sine = sin(x);
  *cosine = cos(x);
}
#else

/* log(2) and pi / 2 as sums. Products of the first parts with whole numbers up to 2^20 and 2^23 are
 * exact. */
#define LOG2_HIGH 0x1.62e42feep-1
#define LOG2_LOW 0x1.a39ef35793c76p-33
#define HALF_PI_HIGH 0x1.921fb54p+0
#define HALF_PI_MIDDLE 0x1.10b46118p-30
#define HALF_PI_LOW 0x1.313198a2e037p-61

/* The nearest whole number, of a size up to 2^51. */
INLINE double nearest_whole(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

/* The polynomial of these coefficients, that of the highest power first. */
INLINE double series(double x, const double *coefficients, int count) {
  double sum = coefficients[0];
  for (int i = 1; i < count; i++) sum = sum * x + coefficients[i];
  return sum;
}

INLINE double double_of_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, 8);
  return x;
}

/* log(x) of a positive normal number, within 3 units in the last place: x = m 2^n, and log(m) is
 * 2 artanh((m - 1) / (m + 1)) by its series. Infinity and NaN remain. */
INLINE double portable_log(double x) {
  uint64_t bits;
  if (!(x < INFINITY)) return x;
  memcpy(&bits, &x, 8);
  double power = (double)(int64_t)(bits >> 52) - 1023.0;
  double m = double_of_bits((bits & 0xfffffffffffffu) | 0x3ff0000000000000u);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    power += 1.0;
  }
  double f = m - 1.0, s = f / (f + 2.0), z = s * s;
  double p = series(z, (const double[]){1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                        1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3}, 11);
  return power * LOG2_HIGH + (power * LOG2_LOW + 2.0 * (s + s * z * p));
}

/* e^x within 2 units in the last place; 0 below -708, infinity above 709. */
INLINE double portable_exp(double x) {
  if (!(x >= -708.0)) return x < 0.0 ? 0.0 : x;
  if (x > 709.0) return INFINITY;
  double n = nearest_whole(x * 1.4426950408889634);
  double r = (x - n * LOG2_HIGH) - n * LOG2_LOW;
  double p = series(r, (const double[]){1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800,
                                        1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                        1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5}, 12);
  p = (r + p * (r * r)) + 1.0;
  return p * double_of_bits((uint64_t)((int64_t)n + 1023) << 52);
}

/* Sine and cosine of an angle up to 10^7, in radians, each within 1e-15. */
INLINE void sine_and_cosine(double x, double *sine, double *cosine) {
  double n = nearest_whole(x * 0.6366197723675814);
  double r = ((x - n * HALF_PI_HIGH) - n * HALF_PI_MIDDLE) - n * HALF_PI_LOW, z = r * r;
  double s = series(z, (const double[]){1.0 / 355687428096000, -1.0 / 1307674368000,
                                        1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880,
                                        -1.0 / 5040, 1.0 / 120, -1.0 / 6}, 8);
  double c = series(z, (const double[]){-1.0 / 6402373705728000, 1.0 / 20922789888000,
                                        -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800,
                                        1.0 / 40320, -1.0 / 720, 1.0 / 24, -0.5}, 9);
  s = r + r * (z * s);
  c = 1.0 + z * c;
  int quarter = (int)((int64_t)n & 3);
  double first = quarter & 1 ? c : s, second = quarter & 1 ? s : c;
  *sine = quarter & 2 ? -first : first;
  *cosine = quarter == 1 || quarter == 2 ? -second : second;
}

#endif
#endif
