// Inputs of linear layers rounded to eight bits, in one thread, behind a C ABI: the same numbers, bit by bit, as
// `quantized_linear/rounding.py`.

#include "rounding.h"

namespace {

using namespace penstock;

inline Vec rounded(Vec x, Vec scale, Vec zero, bool float8) {
  if (!float8) return (whole_steps(x, scale, zero) - zero) * scale;
  const Vec steps = x / scale;
  E4m3 codes[kLanes];
  store(codes, steps);
  return (steps == steps ? load(codes) : steps) * scale;
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
