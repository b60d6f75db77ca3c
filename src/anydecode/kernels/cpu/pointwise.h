/* Ops that work row by row: norms, rotations, activations, sums. */
#ifndef ANYDECODE_POINTWISE_H
#define ANYDECODE_POINTWISE_H

#include "doubles.h"
#include "layout.h"
#include "maths.h"

INLINE float sum_of_squares(const float *x, int width) {
  f8 even = f8_set(0.0f), odd = even;
  int i = 0;
  for (; i + 16 <= width; i += 16) {
    f8 a = f8_load(x + i), b = f8_load(x + i + 8);
    even = f8_fma(a, a, even);
    odd = f8_fma(b, b, odd);
  }
  for (; i < width; i += 8) {
    f8 a = f8_load_part(x + i, width - i);
    even = f8_fma(a, a, even);
  }
  return f8_sum(f8_add(even, odd));
}

/* RMS norm of each group. `period`: the length of `weight`, one group or the whole row; 0: no
 * weight. */
static void rms_norm(const float *x, int width, int groups, const float *weight, int period,
                     float eps, float *out) {
  int part = width / groups;
  for (int g = 0; g < groups; g++, x += part, out += part) {
    float mean = sum_of_squares(x, part) / (float)part;
    f8 factor = f8_set(1.0f / sqrtf(mean + eps));
    const float *group_weight = period == part ? weight : weight + g * part;
    for (int i = 0; i < part; i += 8) {
      f8 y = f8_mul(f8_load_part(x + i, part - i), factor);
      if (period) y = f8_mul(y, f8_load_part(group_weight + i, part - i));
      f8_store_part(out + i, y, part - i);
    }
  }
}

/* Layer norm of one group. */
static void layer_norm_part(const float *x, int width, const float *weight, const float *bias,
                            float eps, float *out) {
  f8 sum = f8_set(0.0f), squares = f8_set(0.0f);
  for (int i = 0; i < width; i += 8) sum = f8_add(sum, f8_load_part(x + i, width - i));
  f8 mean = f8_set(f8_sum(sum) / (float)width);
  for (int i = 0; i < width; i += 8) {
    f8 centred = f8_sub(f8_load_part(x + i, width - i), mean);
    f8_store_part(out + i, centred, width - i);
    centred = f8_load_part(out + i, width - i); /* zeros after the group's end */
    squares = f8_fma(centred, centred, squares);
  }
  f8 factor = f8_set(1.0f / sqrtf(f8_sum(squares) / (float)width + eps));
  for (int i = 0; i < width; i += 8) {
    f8 y = f8_mul(f8_load_part(out + i, width - i), factor);
    y = f8_fma(y, f8_load_part(weight + i, width - i), f8_load_part(bias + i, width - i));
    f8_store_part(out + i, y, width - i);
  }
}

/* Layer norm of each group of a row. `weight`: the weights of the row and then its biases. */
static void layer_norm(const float *x, int width, int groups, const float *weight, float eps,
                       float *out) {
  int part = width / groups;
  for (int i = 0; i < width; i += part)
    layer_norm_part(x + i, part, weight + i, weight + width + i, eps, out + i);
}

/* The cosines and then the sines of position * frequency, times `factor`, which grows with the
 * logarithm of the position if `growth` is not 0. */
static void rope_table(int32_t position, const float *frequencies, int half, float factor,
                       float growth, int32_t period, int32_t start, float *out) {
  if (growth != 0.0f)
    factor *= 1.0f + growth * (float)portable_log(1.0 + (double)((position + start) / period));
  for (int i = 0; i < half; i++) {
    double sine, cosine;
    sine_and_cosine((float)position * frequencies[i], &sine, &cosine);
    out[i] = (float)cosine * factor;
    out[half + i] = (float)sine * factor;
  }
}

/* Rotate numbers i and half + i of each head. */
static void rope(const float *x, int heads, int head_dim, const float *table, int half,
                 float *out) {
  for (int h = 0; h < heads; h++, x += head_dim, out += head_dim) {
    for (int i = 0; i < half; i += 8) {
      int left = half - i;
      f8 c = f8_load_part(table + i, left), s = f8_load_part(table + half + i, left);
      f8 a = f8_load_part(x + i, left), b = f8_load_part(x + half + i, left);
      f8_store_part(out + i, f8_sub(f8_mul(a, c), f8_mul(b, s)), left);
      f8_store_part(out + half + i, f8_add(f8_mul(b, c), f8_mul(a, s)), left);
    }
    if (out != x && head_dim > 2 * half)
      memcpy(out + 2 * half, x + 2 * half, (size_t)(head_dim - 2 * half) * 4);
  }
}

/* Rotate numbers 2 * i and 2 * i + 1 of the last 2 * half of each head. */
static void rope_pairs(const float *x, int heads, int head_dim, const float *table, int half,
                       float *out) {
  int first = head_dim - 2 * half;
  for (int h = 0; h < heads; h++, x += head_dim, out += head_dim) {
    if (out != x) memcpy(out, x, (size_t)first * 4);
    for (int i = 0; i < half; i++) {
      float c = table[i], s = table[half + i], a = x[first + 2 * i], b = x[first + 2 * i + 1];
      out[first + 2 * i] = a * c - b * s;
      out[first + 2 * i + 1] = b * c + a * s;
    }
  }
}

enum {
  SILU, GELU_TANH, GELU, CLAMPED_SWIGLU, SIGMOID, IDENTITY, RELU2, RELU, XIELU, SOFTPLUS,
  CAPPED_SWIGLU, LIMITED_SWIGLU, SITU_GLU, SIGNED_ROOT, EXP
};

/* x * (1 + erf(x / sqrt(2))) / 2, with erf from Abramowitz and Stegun 7.1.26. */
INLINE f8 f8_gelu(f8 x) {
  f8 zero = f8_set(0.0f), one = f8_set(1.0f), z = f8_mul(f8_abs(x), f8_set(0.70710678118654752f));
  f8 t = f8_div(one, f8_fma(f8_set(0.3275911f), z, one)), p = f8_set(1.061405429f);
  p = f8_fma(p, t, f8_set(-1.453152027f));
  p = f8_fma(p, t, f8_set(1.421413741f));
  p = f8_fma(p, t, f8_set(-0.284496736f));
  p = f8_fma(p, t, f8_set(0.254829592f));
  f8 tail = f8_mul(f8_mul(p, t), f8_mul(f8_set(0.5f), f8_exp(f8_sub(zero, f8_mul(z, z)))));
  return f8_mul(x, f8_select_below(x, zero, tail, f8_sub(one, tail)));
}

/* sqrt(max(|x|, 1e-6)) with the sign of x, and 0 at 0 */
INLINE f8 f8_signed_root(f8 x) {
  float v[8];
  f8_store(v, x);
  for (int i = 0; i < 8; i++) {
    float size = fabsf(v[i]), root = sqrtf(size > 1e-6f ? size : 1e-6f);
    v[i] = v[i] > 0.0f ? root : v[i] < 0.0f ? -root : 0.0f;
  }
  return f8_load(v);
}

/* gelu_tanh(x) = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3) */
INLINE f8 f8_activate(f8 x, int activation) {
  if (activation == SILU) return f8_mul(x, f8_sigmoid(x));
  if (activation == GELU) return f8_gelu(x);
  if (activation == SIGMOID) return f8_sigmoid(x);
  if (activation == IDENTITY) return x;
  if (activation == SOFTPLUS) return f8_softplus(x);
  if (activation == SIGNED_ROOT) return f8_signed_root(x);
  if (activation == EXP) return f8_exp(x);
  if (activation == RELU) return f8_max(x, f8_set(0.0f));
  if (activation == RELU2) {
    f8 positive = f8_max(x, f8_set(0.0f));
    return f8_mul(positive, positive);
  }
  f8 cube = f8_mul(f8_mul(x, x), f8_mul(x, f8_set(0.044715f)));
  return f8_mul(x, f8_sigmoid(f8_mul(f8_add(x, cube), f8_set(1.5957691216057308f))));
}

/* g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = up clamped to [-limit, limit] */
static void clamped_swiglu(const float *gate, const float *up, int width, float alpha, float limit,
                           float *out) {
  f8 high = f8_set(limit), low = f8_set(-limit);
  for (int i = 0; i < width; i += 8) {
    f8 g = f8_min(f8_load_part(gate + i, width - i), high);
    f8 u = f8_max(f8_min(f8_load_part(up + i, width - i), high), low);
    f8 y = f8_mul(g, f8_sigmoid(f8_mul(g, f8_set(alpha))));
    f8_store_part(out + i, f8_mul(f8_add(u, f8_set(1.0f)), y), width - i);
  }
}

/* min(silu(gate), limit) * up, or silu(min(gate, limit)) * up if `is_limited`; up is clamped to
 * [-limit, limit]. */
static void capped_swiglu(const float *gate, const float *up, int width, float limit,
                          int is_limited, float *out) {
  f8 high = f8_set(limit), low = f8_set(-limit);
  for (int i = 0; i < width; i += 8) {
    f8 g = f8_load_part(gate + i, width - i);
    g = is_limited ? f8_activate(f8_min(g, high), SILU) : f8_min(f8_activate(g, SILU), high);
    f8 u = f8_max(f8_min(f8_load_part(up + i, width - i), high), low);
    f8_store_part(out + i, f8_mul(g, u), width - i);
  }
}

/* cap * tanh(x / cap) */
INLINE f8 f8_softcap(f8 x, float cap) {
  return f8_mul(f8_set(cap), f8_tanh(f8_mul(x, f8_set(1.0f / cap))));
}

/* The softcap of gate, times its sigmoid and up, whose softcap it is if `up_cap` is not 0. */
static void situ_glu(const float *gate, const float *up, int width, float cap, float up_cap,
                     float *out) {
  for (int i = 0; i < width; i += 8) {
    f8 g = f8_load_part(gate + i, width - i), u = f8_load_part(up + i, width - i);
    if (up_cap > 0.0f) u = f8_softcap(u, up_cap);
    f8_store_part(out + i, f8_mul(f8_mul(f8_softcap(g, cap), f8_sigmoid(g)), u), width - i);
  }
}

static void gated(const float *gate, const float *up, int width, const Op *op, float *out) {
  int activation = op->activation;
  if (activation == CLAMPED_SWIGLU) {
    clamped_swiglu(gate, up, width, op->x, op->y, out);
    return;
  }
  if (activation == CAPPED_SWIGLU || activation == LIMITED_SWIGLU) {
    capped_swiglu(gate, up, width, op->y, activation == LIMITED_SWIGLU, out);
    return;
  }
  if (activation == SITU_GLU) {
    situ_glu(gate, up, width, op->x, op->y, out);
    return;
  }
  for (int i = 0; i < width; i += 8) {
    f8 y = f8_activate(f8_load_part(gate + i, width - i), activation);
    f8_store_part(out + i, f8_mul(y, f8_load_part(up + i, width - i)), width - i);
  }
}

static void activate(const float *x, int width, int activation, float *out) {
  for (int i = 0; i < width; i += 8)
    f8_store_part(out + i, f8_activate(f8_load_part(x + i, width - i), activation), width - i);
}

/* beta * x, plus positive * x^2 above 0 and negative * (exp(min(x, eps)) - 1 - x) elsewhere.
 * `numbers`: positive, negative, beta, eps. */
static void xielu(const float *x, int width, const float *numbers, float *out) {
  f8 positive = f8_set(numbers[0]), negative = f8_set(numbers[1]), beta = f8_set(numbers[2]);
  f8 eps = f8_set(numbers[3]), zero = f8_set(0.0f), one = f8_set(1.0f);
  for (int i = 0; i < width; i += 8) {
    f8 value = f8_load_part(x + i, width - i), linear = f8_mul(beta, value);
    f8 excess = f8_sub(f8_sub(f8_exp(f8_min(value, eps)), one), value);
    f8 above = f8_fma(f8_mul(positive, value), value, linear);
    f8 below = f8_fma(negative, excess, linear);
    f8_store_part(out + i, f8_select_below(value, zero, below, above), width - i);
  }
}

static void add_rows(const float *x, const float *y, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i += 8) {
    int left = count - i < 8 ? (int)(count - i) : 8;
    f8_store_part(out + i, f8_add(f8_load_part(x + i, left), f8_load_part(y + i, left)), left);
  }
}

static void scale_row(const float *x, int width, float factor, float *out) {
  for (int i = 0; i < width; i += 8)
    f8_store_part(out + i, f8_mul(f8_load_part(x + i, width - i), f8_set(factor)), width - i);
}

/* Each of `groups` equal parts of x [width] times the activation of its gate. */
static void gate_parts(const float *x, const float *gates, int width, int groups, int activation,
                       float *out) {
  int part = width / groups;
  for (int g = 0; g < groups; g++, x += part, out += part) {
    f8 factor = f8_activate(f8_set(gates[g]), activation);
    for (int i = 0; i < part; i += 8)
      f8_store_part(out + i, f8_mul(f8_load_part(x + i, part - i), factor), part - i);
  }
}

static void softcap_row(const float *x, int width, float cap, float *out) {
  for (int i = 0; i < width; i += 8)
    f8_store_part(out + i, f8_softcap(f8_load_part(x + i, width - i), cap), width - i);
}

static void multiply_row(const float *x, const float *factors, int width, float *out) {
  for (int i = 0; i < width; i += 8) {
    f8 y = f8_mul(f8_load_part(x + i, width - i), f8_load_part(factors + i, width - i));
    f8_store_part(out + i, y, width - i);
  }
}

/* max(x - mean - multiplier * standard deviation, 0) */
static void cut_off_row(const float *x, int width, float multiplier, float *out) {
  f8 sum = f8_set(0.0f);
  for (int i = 0; i < width; i += 8) sum = f8_add(sum, f8_load_part(x + i, width - i));
  f8 mean = f8_set(f8_sum(sum) / (float)width);
  for (int i = 0; i < width; i += 8)
    f8_store_part(out + i, f8_sub(f8_load_part(x + i, width - i), mean), width - i);
  f8 cut = f8_set(sqrtf(sum_of_squares(out, width) / (float)width) * multiplier);
  for (int i = 0; i < width; i += 8) {
    f8 y = f8_max(f8_sub(f8_load_part(out + i, width - i), cut), f8_set(0.0f));
    f8_store_part(out + i, y, width - i);
  }
}

/* x, scaled to the root mean square of `like`. */
static void match_magnitude(const float *x, const float *like, int width, float *out) {
  float size = sum_of_squares(x, width) / (float)width;
  float target = sum_of_squares(like, width) / (float)width;
  float factor = sqrtf(target) / sqrtf(size > 1e-5f ? size : 1e-5f);
  for (int i = 0; i < width; i += 8)
    f8_store_part(out + i, f8_mul(f8_load_part(x + i, width - i), f8_set(factor)), width - i);
}

/* Each of `groups` equal parts of x [width] plus the sum of all of them, times its `groups`
 * coefficients. */
static void mix(const float *x, const float *coefficients, int width, int groups, float *out) {
  int part = width / groups;
  for (int g = 0; g < groups; g++, coefficients += groups) {
    const float *own = x + (int64_t)g * part;
    for (int i = 0; i < part; i += 8) {
      f8 sum = f8_load_part(own + i, part - i);
      for (int k = 0; k < groups; k++)
        sum = f8_fma(f8_set(coefficients[k]), f8_load_part(x + (int64_t)k * part + i, part - i),
                     sum);
      f8_store_part(out + (int64_t)g * part + i, sum, part - i);
    }
  }
}

/* The sum of `groups` equal parts of x [width], times their factors. */
static void collapse(const float *x, const float *factors, int width, int groups, float *out) {
  int part = width / groups;
  for (int i = 0; i < part; i += 8) {
    f8 sum = f8_set(0.0f);
    for (int k = 0; k < groups; k++)
      sum = f8_fma(f8_set(factors[k]), f8_load_part(x + (int64_t)k * part + i, part - i), sum);
    f8_store_part(out + i, sum, part - i);
  }
}

/* Divide the numbers of each row, or of each column, of m [n, n] by their sum plus eps. */
static void balance(float *m, int n, int by_column, float eps) {
  int next = by_column ? n : 1, step = by_column ? 1 : n;
  for (int i = 0; i < n; i++, m += step) {
    float sum = 0.0f;
    for (int j = 0; j < n; j++) sum += m[j * next];
    for (int j = 0; j < n; j++) m[j * next] /= sum + eps;
  }
}

static void softmax_row(const float *x, int width, float *out) {
  float max = x[0], sum = 0.0f;
  for (int i = 1; i < width; i++) max = x[i] > max ? x[i] : max;
  for (int i = 0; i < width; i += 8)
    f8_store_part(out + i, f8_exp(f8_sub(f8_load_part(x + i, width - i), f8_set(max))), width - i);
  for (int i = 0; i < width; i++) sum += out[i];
  for (int i = 0; i < width; i++) out[i] /= sum;
}

/* The factors of hyper-connections, see `Backend.hyper_factors`. */
static void hyper_factors(const float *x, int width, int n, int iterations, float eps, float *out) {
  float m[MAX_STREAMS * MAX_STREAMS];
  for (int i = 0; i < n; i += 8) {
    f8 first = f8_sigmoid(f8_load_part(x + i, n - i));
    f8_store_part(out + i, f8_add(first, f8_set(eps)), n - i);
    if (width == n) continue;
    f8 second = f8_sigmoid(f8_load_part(x + n + i, n - i));
    f8_store_part(out + n + i, f8_mul(second, f8_set(2.0f)), n - i);
  }
  if (width == n) return;
  for (int r = 0; r < n; r++) {
    softmax_row(x + (2 + r) * n, n, m + r * n);
    for (int i = 0; i < n; i++) m[r * n + i] += eps;
  }
  balance(m, n, 1, eps);
  for (int i = 1; i < iterations; i++) {
    balance(m, n, 0, eps);
    balance(m, n, 1, eps);
  }
  for (int r = 0; r < n; r++)
    for (int i = 0; i < n; i++) out[(2 + r) * n + i] = m[i * n + r] - (r == i ? 1.0f : 0.0f);
}

/* The sum over t of row - t of x [rows, width] times the factors of `base` [taps, width] and of the
 * row's `kernels` [taps, groups], over the rows of its block: a row with the token `mask` is in the
 * block of the row before. */
static void block_convolve(const Op *op, const int32_t *tokens, int row, const float *x,
                           const float *kernels, float *out) {
  int width = op->width, part = width / op->groups, taps = 1;
  while (taps < op->count && taps <= row && tokens[row - taps + 1] == op->window) taps++;
  for (int g = 0; g < op->groups; g++) {
    for (int i = 0; i < part; i += 8) {
      int at = g * part + i, left = part - i;
      f8 sum = f8_set(0.0f);
      for (int t = 0; t < taps; t++) {
        f8 factor = f8_add(f8_load_part(op->weight + (int64_t)t * width + at, left),
                           f8_set(kernels[t * op->groups + g]));
        sum = f8_fma(factor, f8_load_part(x + (int64_t)(row - t) * width + at, left), sum);
      }
      f8_store_part(out + at, sum, left);
    }
  }
}

/* `groups` multiples of x [width], side by side. */
static void spread(const float *x, const float *factors, int width, int groups, float *out) {
  for (int g = 0; g < groups; g++, out += width)
    for (int i = 0; i < width; i += 8)
      f8_store_part(out + i, f8_mul(f8_load_part(x + i, width - i), f8_set(factors[g])), width - i);
}

static void clamp_row(const float *x, int width, float limit, float *out) {
  f8 high = f8_set(limit), low = f8_set(-limit);
  for (int i = 0; i < width; i += 8) {
    f8 y = f8_max(f8_min(f8_load_part(x + i, width - i), high), low);
    f8_store_part(out + i, y, width - i);
  }
}

/* y += up.T @ (down @ x), for one row. */
static void lora_row(const Lora *lora, const float *x, int width, int width_out, float *y) {
  for (int r = 0; r < lora->rank; r++) {
    const float *down = lora->down + (int64_t)r * width, *up = lora->up + (int64_t)r * width_out;
    f8 dot = f8_set(0.0f);
    for (int i = 0; i < width; i += 8)
      dot = f8_fma(f8_load_part(x + i, width - i), f8_load_part(down + i, width - i), dot);
    f8 factor = f8_set(f8_sum(dot));
    for (int i = 0; i < width_out; i += 8) {
      f8 sum = f8_load_part(y + i, width_out - i);
      sum = f8_fma(factor, f8_load_part(up + i, width_out - i), sum);
      f8_store_part(y + i, sum, width_out - i);
    }
  }
}

#endif
