// Inputs of linear layers rounded to eight bits, in one thread, behind a C ABI: the same numbers, bit by bit, as
// `quantized_linear/rounding.py`.

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector.h"

namespace {

using namespace penstock;

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

inline Vec rounded(Vec x, Vec scale, Vec zero, bool float8) {
  const Vec steps = x / scale;
  if (float8) {
    E4m3 codes[kLanes];
    store(codes, steps);
    return (steps == steps ? load(codes) : steps) * scale;
  }
  const Vec moved = between(steps + zero, -129.0f, 128.0f);
  return (between((moved + kWhole) - kWhole, -128.0f, 127.0f) - zero) * scale;
}

template <typename T>
void round_group(const T* x, T* out, int64_t size, float scale, float zero, bool float8) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, rounded(load(x + i), splat(scale), splat(zero), float8));
  if (i == size) return;
  T tail[kLanes] = {};
  std::memcpy(tail, x + i, (size - i) * sizeof(T));
  store(tail, rounded(load(tail), splat(scale), splat(zero), float8));
  std::memcpy(out + i, tail, (size - i) * sizeof(T));
}

template <typename T>
void round_rows(const T* x, T* out, int64_t rows, int64_t size, int64_t group, const Rule& rule, const float* scale, const float* zero) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t at = 0; at < size; at += group) {
      const int64_t first = r * size + at, count = std::min(group, size - at);
      const float own = scale == nullptr ? scale_of(x + first, count, rule) : *scale;
      round_group(x + first, out + first, count, own, zero == nullptr ? 0.0f : *zero, rule.float8);
    }
}

}  // namespace

// `group`: inputs that share a scale, 0 for all. Without `scale` each group finds its own. `out` may be `x`.
extern "C" void penstock_rounded_inputs(int dtype, const void* x, const float* scale, const float* zero, void* out, int64_t rows, int64_t size,
                                        int64_t group, int float8, int powers) {
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    const Rule rule{float8 != 0, powers != 0};
    round_rows(static_cast<const T*>(x), to, rows, size, group > 0 ? group : std::max<int64_t>(size, 1), rule, scale, zero);
  };
  if (dtype == 0)
    run(static_cast<float*>(out));
  else
    run(static_cast<BFloat16*>(out));
}
