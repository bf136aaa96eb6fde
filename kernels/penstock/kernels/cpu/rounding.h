// Inputs of linear layers as numbers of eight bits: what is common to layers that multiply in the model's dtype and in whole numbers.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector.h"

namespace penstock {

constexpr float kFloat8Max = 448.0f, kInt8Steps = 127.5f;
constexpr float kWhole = 0x1.8p23f;  // added and subtracted, it leaves a whole number, ties to even

struct Rule {
  bool float8, powers;
};

// Of dynamic scales: NaN where an input is none.
template <typename T>
float scale_of(const T* x, int64_t size, const Rule& rule) {
  float largest = 0.0f;
  bool numbers = true;
  for (int64_t i = 0; i < size; ++i) {
    const float magnitude = std::abs(widen(x[i]));
    largest = std::max(largest, magnitude), numbers = numbers && magnitude == magnitude;
  }
  if (!numbers) return std::numeric_limits<float>::quiet_NaN();
  float scale = std::max(largest / (rule.float8 ? kFloat8Max : kInt8Steps), std::numeric_limits<float>::min());
  if (rule.powers && std::isfinite(scale)) {
    int exponent;
    const float fraction = std::frexp(scale, &exponent);
    scale = std::ldexp(1.0f, exponent - (fraction == 0.5f));
  }
  return scale;
}

inline Vec between(Vec x, float low, float high) {
  x = x < low ? splat(low) : x;
  return x > high ? splat(high) : x;
}

// The nearest whole numbers of eight bits, or NaN; the zero point is added, not subtracted again.
inline Vec whole_steps(Vec x, Vec scale, Vec zero) {
  const Vec moved = between(x / scale + zero, -129.0f, 128.0f);
  return between((moved + kWhole) - kWhole, -128.0f, 127.0f);
}

}  // namespace penstock
