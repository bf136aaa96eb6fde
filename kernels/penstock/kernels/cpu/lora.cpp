// Low-rank adapters on top of a layer's outputs, all adapters of a step in one call, in one thread, behind a C ABI.
//
// Tokens come sorted by slot; those of a slot are taken in blocks, and of each projection first low = x * A^T, then y += low * B^T. A number
// is a sum in an order that depends on the sizes of its own adapter alone, never on how many tokens stand beside it: so a token's result has
// the same bits in any batch.
//
// Factors are packed as weights in `linear/reference.py`: 16 outputs side by side, and of each a word of 32 bits, which is one float32 or a
// pair of bfloat16. dtype: 0 is float32, 1 is bfloat16. Sizes are in elements.

#include <algorithm>
#include <vector>

#include "vector.h"

namespace {

using namespace penstock;

constexpr int kPanel = 16;       // outputs side by side
constexpr int kSplits = 4;       // parts of a sum over the inputs: a lone chain would wait for each addition; part of the result's bits
constexpr int kWide = 4;         // vectors of outputs in a tile
constexpr int kRows = kRegisters == 32 ? 6 : 3;  // of a tile: with 4 vectors of sums each
constexpr int kAhead = 2048;     // bytes of factors that are fetched ahead: those of a decode step come from beyond the caches
constexpr int64_t kBlock = 96;   // tokens whose inputs stay in the cache

inline int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

template <typename T>
inline IntVec splat_part(const T* at, size_t bytes) {
  uint32_t word = 0;
  std::memcpy(&word, at, bytes);
  return IntVec{} + static_cast<int32_t>(word);
}

// low[r, 0..kLanes) = x[r] * A^T for kLanes ranks.
template <typename T, int kCount>
__attribute__((noinline)) void shrink(const T* x, int64_t inputs, const T* a, T* low, int64_t low_stride) {
  Vec sums[kCount][kSplits] = {};
  const auto add = [&](int64_t word, int split, size_t bytes) {
    const T* at = a + word * kWord<T> * kPanel;
    __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead);  // no fault past the end
    const IntVec weights = load_words(at);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r)
      sums[r][split] = add_product<T>(sums[r][split], splat_part(x + r * inputs + word * kWord<T>, bytes), weights);
  };
  const int64_t whole = inputs / kWord<T>;
  int64_t word = 0;
  for (; word + kSplits <= whole; word += kSplits)
#pragma GCC unroll 4
    for (int split = 0; split < kSplits; ++split) add(word + split, split, sizeof(uint32_t));
  for (; word < whole; ++word) add(word, 0, sizeof(uint32_t));
  if (inputs % kWord<T>) add(word, 0, sizeof(T));  // the last input has no neighbour
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) store(low + r * low_stride, (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
}

// The first `count` sums of each token, fewer than there are.
template <int kCount, int kVectors, typename T>
void add_rest(const Vec (&sums)[kCount][kVectors], T* y, int64_t stride, const int64_t* tokens, int64_t count) {
  for (int r = 0; r < kCount; ++r) {
    T part[kVectors * kLanes] = {};
    std::memcpy(part, y + tokens[r] * stride, count * sizeof(T));
    for (int v = 0; v < kVectors; ++v) store(part + v * kLanes, load(part + v * kLanes) + sums[r][v]);
    std::memcpy(y + tokens[r] * stride, part, count * sizeof(T));
  }
}

// y[tokens[r], 0..count) += low[r] * B^T for `count` of kVectors vectors of outputs.
template <typename T, int kCount, int kVectors>
__attribute__((noinline)) void expand(const T* low, int64_t low_stride, int64_t words, const T* b, T* y, int64_t y_stride, const int64_t* tokens, int64_t count) {
  Vec sums[kCount][kVectors] = {};
  for (int64_t word = 0; word < words; ++word) {
    IntVec weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const T* at = b + ((v * kLanes / kPanel * words + word) * kPanel + v * kLanes % kPanel) * kWord<T>;
      __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead);
      weights[v] = load_words(at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
      const IntVec input = splat_word(low + r * low_stride + word * kWord<T>);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = add_product<T>(sums[r][v], input, weights[v]);
    }
  }
  if (count < kVectors * kLanes) return add_rest<kCount, kVectors>(sums, y, y_stride, tokens, count);
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      T* out = y + tokens[r] * y_stride + v * kLanes;
      store(out, load(out) + sums[r][v]);
    }
}

// Calls f(first row, number of rows as a constant) for tiles of all rows.
template <int kCount = kRows, typename F>
void tiles(int64_t rows, int64_t first, const F& f) {
  for (; rows - first >= kCount; first += kCount) f(first, std::integral_constant<int, kCount>{});
  if constexpr (kCount > 1)
    if (first < rows) tiles<kCount - 1>(rows, first, f);
}

// A projection's share of a layer, as `lora/packed.py` lays it out.
struct Part {
  int64_t offset, outputs;  // among the layer's outputs
  int64_t a, b;             // where its factors begin in a slot
};

template <typename T>
struct Layer {
  const T* factors;
  int64_t slot_size;
  const Part* parts;
  int64_t part_count;
  const int64_t* ranks;  // [slots, parts]
  int64_t inputs, outputs;
};

// One slot's adapter for `rows` tokens, whose inputs lie side by side.
template <typename T>
void add_block(const Layer<T>& layer, int64_t slot, const T* x, const int64_t* tokens, int64_t rows, T* y, std::vector<T>& low) {
  for (int64_t p = 0; p < layer.part_count; ++p) {
    const int64_t rank = layer.ranks[slot * layer.part_count + p];
    if (rank == 0) continue;
    const Part& part = layer.parts[p];
    const T *a = layer.factors + slot * layer.slot_size + part.a, *b = layer.factors + slot * layer.slot_size + part.b;
    const int64_t width = ceil_div(rank, kPanel) * kPanel, words = ceil_div(rank, kWord<T>);
    const int64_t a_stride = ceil_div(layer.inputs, kWord<T>) * kWord<T>, b_stride = words * kWord<T>;
    low.resize(rows * width);
    for (int64_t first = 0; first < width; first += kLanes)
      tiles(rows, 0, [&](int64_t r, auto count) {
        const T* from = a + first / kPanel * kPanel * a_stride + first % kPanel * kWord<T>;
        shrink<T, count()>(x + r * layer.inputs, layer.inputs, from, low.data() + r * width + first, width);
      });
    T* out = y + part.offset;
    for (int64_t first = 0; first < part.outputs;) {
      // In steps of kWide vectors as long as there are whole ones, then of a panel: what is beyond the outputs is 0 there.
      const bool wide = first + kWide * kLanes <= part.outputs;
      const int64_t left = part.outputs - first;
      tiles(rows, 0, [&](int64_t r, auto count) {
        const T *from = low.data() + r * width, *weights = b + first * b_stride;
        if (wide)
          expand<T, count(), kWide>(from, width, words, weights, out + first, layer.outputs, tokens + r, left);
        else
          expand<T, count(), kPanel / kLanes>(from, width, words, weights, out + first, layer.outputs, tokens + r, left);
      });
      first += wide ? kWide * kLanes : kPanel;
    }
  }
}

template <typename T>
void add_lora(const Layer<T>& layer, const T* x, T* y, const int64_t* order, const int64_t* starts, int64_t slots) {
  std::vector<T> low, gathered;
  for (int64_t slot = 0; slot < slots; ++slot)
    for (int64_t first = starts[slot]; first < starts[slot + 1]; first += kBlock) {
      const int64_t rows = std::min(kBlock, starts[slot + 1] - first);
      const int64_t* tokens = order + first;
      const T* from = x + tokens[0] * layer.inputs;
      if (tokens[rows - 1] - tokens[0] != rows - 1) {  // they ascend
        gathered.resize(rows * layer.inputs);
        for (int64_t r = 0; r < rows; ++r)
          std::memcpy(gathered.data() + r * layer.inputs, x + tokens[r] * layer.inputs, layer.inputs * sizeof(T));
        from = gathered.data();
      }
      add_block(layer, slot, from, tokens, rows, y, low);
    }
}

}  // namespace

extern "C" {

void penstock_add_lora(int dtype, void* y, const void* x, const int64_t* order, const int64_t* starts, int64_t slots, const void* factors,
                       int64_t slot_size, const int64_t* parts, int64_t part_count, const int64_t* ranks, int64_t inputs, int64_t outputs) {
  const auto run = [&](auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
    const Layer<T> layer{static_cast<const T*>(factors), slot_size, reinterpret_cast<const Part*>(parts), part_count, ranks, inputs, outputs};
    add_lora<T>(layer, static_cast<const T*>(x), out, order, starts, slots);
  };
  if (dtype == 0)
    run(static_cast<float*>(y));
  else
    run(static_cast<BFloat16*>(y));
}

}  // extern "C"
