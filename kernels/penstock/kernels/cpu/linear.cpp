// Linear layers in bfloat16 on CPUs with the dot product of bfloat16 pairs (AVX512-BF16), in one thread, behind a C ABI.
//
// An output is one chain of dot products over pairs of inputs, in their order, whatever the number of rows: so that a token's result has the
// same bits in any batch. Rows and outputs are cut into tiles whose sums stay in registers; which tile a sum is in is not part of its bits.

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

constexpr int kLanes = 16;       // outputs side by side in a packed weight
constexpr int kWide = 4;         // vectors of outputs in a tile
constexpr int kWideRows = 6;     // 24 sums, 4 vectors of weights and one of inputs: of 32 registers
constexpr int kNarrowRows = 12;  // of a tile of one vector
constexpr int kAhead = 2048;     // bytes of a vector's weights that are fetched ahead: with few rows they come from beyond the caches
constexpr int64_t kBlock = 96;   // rows that meet all weights before the next, so that they stay in the cache

inline float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

struct Layer {
  const uint16_t* weight;  // [outputs / 16][pairs][16][2]
  const uint16_t* bias;    // [outputs] or null
  int64_t outputs, inputs, pairs;
};

// Rows [0, kRows) of x times kVectors vectors of outputs from `first` on.
template <int kRows, int kVectors>
void tile(const uint16_t* x, const Layer& layer, int64_t first, uint16_t* out) {
  alignas(64) float start[kVectors * kLanes] = {};
  const int64_t count = std::min<int64_t>(kVectors * kLanes, layer.outputs - first);
  if (layer.bias != nullptr)
    for (int64_t i = 0; i < count; ++i) start[i] = widen(layer.bias[first + i]);
  __m512 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_load_ps(start + v * kLanes);
  const uint16_t* weight = layer.weight + first * 2 * layer.pairs;
  const auto add = [&](int64_t p, size_t bytes) {
    __m512bh weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const uint16_t* from = weight + (v * layer.pairs + p) * 2 * kLanes;
      _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);  // no fault past the end
      weights[v] = (__m512bh)_mm512_loadu_si512(from);
    }
    for (int r = 0; r < kRows; ++r) {
      uint32_t pair = 0;
      std::memcpy(&pair, x + r * layer.inputs + 2 * p, bytes);
      const __m512bh input = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
      for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], input, weights[v]);
    }
  };
  for (int64_t p = 0; p < layer.inputs / 2; ++p) add(p, 4);
  if (layer.inputs % 2) add(layer.pairs - 1, 2);  // the last input has no neighbour
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      uint16_t narrow[kLanes];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(narrow), (__m256i)_mm512_cvtneps_pbh(sums[r][v]));
      const int64_t left = std::min<int64_t>(kLanes, count - v * kLanes);
      std::memcpy(out + r * layer.outputs + first + v * kLanes, narrow, left * sizeof(uint16_t));
    }
}

// The last `rows` rows, fewer than a whole tile has.
template <int kRows, int kVectors>
void rest(int64_t rows, const uint16_t* x, const Layer& layer, int64_t first, uint16_t* out) {
  if constexpr (kRows > 0) {
    if (rows == kRows)
      tile<kRows, kVectors>(x, layer, first, out);
    else
      rest<kRows - 1, kVectors>(rows, x, layer, first, out);
  }
}

template <int kRows, int kVectors>
void column(const uint16_t* x, int64_t rows, const Layer& layer, int64_t first, uint16_t* out) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) tile<kRows, kVectors>(x + r * layer.inputs, layer, first, out + r * layer.outputs);
  rest<kRows - 1, kVectors>(rows - r, x + r * layer.inputs, layer, first, out + r * layer.outputs);
}

}  // namespace

extern "C" {

int penstock_has_linear() { return 1; }

void penstock_linear(const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t outputs, int64_t inputs) {
  const Layer layer{static_cast<const uint16_t*>(weight), static_cast<const uint16_t*>(bias), outputs, inputs, (inputs + 1) / 2};
  for (int64_t r = 0; r < rows; r += kBlock) {
    const uint16_t* from = static_cast<const uint16_t*>(x) + r * inputs;
    uint16_t* to = static_cast<uint16_t*>(out) + r * outputs;
    const int64_t count = std::min(kBlock, rows - r);
    int64_t first = 0;
    for (; first + kWide * kLanes <= outputs; first += kWide * kLanes) column<kWideRows, kWide>(from, count, layer, first, to);
    for (; first < outputs; first += kLanes) column<kNarrowRows, 1>(from, count, layer, first, to);
  }
}

}  // extern "C"

#else

extern "C" {

int penstock_has_linear() { return 0; }

void penstock_linear(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t) {}

}  // extern "C"

#endif
