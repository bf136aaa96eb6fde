// Low-rank adapters on top of a layer's outputs, all adapters of a step in one call, in one thread, behind a C ABI.
//
// Tokens come sorted by slot; those of a slot are taken in blocks, and of each projection first low = x * A^T, then y += low * B^T. A number
// is a sum in an order that depends on the sizes of its own adapter alone, never on how many tokens stand beside it: so a token's result has
// the same bits in any batch.
//
// Factors are packed as weights in `linear/reference.py`: 16 outputs side by side, and of each a word of 32 bits, which is one float32 or a
// pair of bfloat16. dtype: 0 is float32, 1 is bfloat16. Sizes are in elements.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kRows = 6;         // of a tile: with 4 vectors each, 24 sums of 32 registers
constexpr int kSplits = 4;       // parts of a sum over the inputs: a lone chain would wait for each addition; part of the result's bits
constexpr int kWide = 4;         // vectors of outputs in a tile
constexpr int kAhead = 2048;     // bytes of factors that are fetched ahead: those of a decode step come from beyond the caches
constexpr int64_t kBlock = 96;   // tokens whose inputs stay in the cache

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));

struct BFloat16 {
  uint16_t bits;
};

template <typename T>
constexpr int64_t kWord = sizeof(uint32_t) / sizeof(T);  // elements

inline int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

template <typename To, typename From>
inline To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

// Adds products of one word of inputs with a word of weights in each lane.
template <typename T>
inline Vec multiply_add(Vec sum, int32_t word, IntVec weights) {
  const IntVec inputs = IntVec{} + word;
  if constexpr (kWord<T> == 1) return sum + bit_cast<Vec>(inputs) * bit_cast<Vec>(weights);
#ifdef __AVX512BF16__
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)inputs, (__m512bh)weights);
#else
  const int32_t high = static_cast<int32_t>(0xffff0000u);
  sum = sum + bit_cast<Vec>(inputs << 16) * bit_cast<Vec>(weights << 16);
  return sum + bit_cast<Vec>(inputs & high) * bit_cast<Vec>(weights & high);
#endif
}

inline Vec widen(const float* x) {
  Vec out;
  std::memcpy(&out, x, sizeof out);
  return out;
}

inline Vec widen(const BFloat16* x) {
  typedef uint16_t Narrow __attribute__((vector_size(32)));
  Narrow narrow;
  std::memcpy(&narrow, x, sizeof narrow);
  return bit_cast<Vec>(__builtin_convertvector(narrow, IntVec) << 16);
}

inline void narrow(Vec x, float* out) { std::memcpy(out, &x, sizeof x); }

inline void narrow(Vec x, BFloat16* out) {
#ifdef __AVX512BF16__
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(out, &rounded, sizeof rounded);
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(x[i]);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out[i].bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
#endif
}

inline IntVec load_words(const void* at) {
  __builtin_prefetch(static_cast<const char*>(at) + kAhead);  // no fault past the end
  IntVec out;
  std::memcpy(&out, at, sizeof out);
  return out;
}

template <typename T>
inline int32_t load_word(const T* at, size_t bytes) {
  int32_t out = 0;
  std::memcpy(&out, at, bytes);
  return out;
}

// low[r, 0..15] = x[r] * A^T for 16 ranks.
template <typename T, int kCount>
void shrink(const T* x, int64_t inputs, const T* a, T* low, int64_t low_stride) {
  Vec sums[kCount][kSplits] = {};
  const auto add = [&](int64_t word, int split, size_t bytes) {
    const IntVec weights = load_words(a + word * kWord<T> * kLanes);
    for (int r = 0; r < kCount; ++r)
      sums[r][split] = multiply_add<T>(sums[r][split], load_word(x + r * inputs + word * kWord<T>, bytes), weights);
  };
  const int64_t whole = inputs / kWord<T>;
  int64_t word = 0;
  for (; word + kSplits <= whole; word += kSplits)
    for (int split = 0; split < kSplits; ++split) add(word + split, split, sizeof(uint32_t));
  for (; word < whole; ++word) add(word, 0, sizeof(uint32_t));
  if (inputs % kWord<T>) add(word, 0, sizeof(T));  // the last input has no neighbour
  for (int r = 0; r < kCount; ++r) narrow((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]), low + r * low_stride);
}

// y[tokens[r], first..] += low[r] * B^T for kVectors vectors of outputs, of which `count` are there.
template <typename T, int kCount, int kVectors>
void expand(const T* low, int64_t low_stride, int64_t words, const T* b, T* y, int64_t y_stride, const int64_t* tokens, int64_t count) {
  Vec sums[kCount][kVectors] = {};
  for (int64_t word = 0; word < words; ++word) {
    IntVec weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = load_words(b + (v * words + word) * kWord<T> * kLanes);
    for (int r = 0; r < kCount; ++r) {
      const int32_t input = load_word(low + r * low_stride + word * kWord<T>, sizeof(uint32_t));
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add<T>(sums[r][v], input, weights[v]);
    }
  }
  for (int r = 0; r < kCount; ++r)
    for (int v = 0; v < kVectors; ++v) {
      T* out = y + tokens[r] * y_stride + v * kLanes;
      if (count >= (v + 1) * kLanes) {
        narrow(widen(out) + sums[r][v], out);
      } else {
        T part[kLanes] = {};
        const size_t bytes = (count - v * kLanes) * sizeof(T);
        std::memcpy(part, out, bytes);
        narrow(widen(part) + sums[r][v], part);
        std::memcpy(out, part, bytes);
      }
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
    const int64_t width = ceil_div(rank, kLanes) * kLanes, words = ceil_div(rank, kWord<T>);
    const int64_t a_stride = ceil_div(layer.inputs, kWord<T>) * kWord<T>, b_stride = words * kWord<T>;
    low.resize(rows * width);
    for (int64_t first = 0; first < width; first += kLanes)
      tiles(rows, 0, [&](int64_t r, auto count) {
        shrink<T, count()>(x + r * layer.inputs, layer.inputs, a + first * a_stride, low.data() + r * width + first, width);
      });
    T* out = y + part.offset;
    int64_t first = 0;
    for (; first + kWide * kLanes <= part.outputs; first += kWide * kLanes)
      tiles(rows, 0, [&](int64_t r, auto count) {
        const T* from = low.data() + r * width;
        expand<T, count(), kWide>(from, width, words, b + first * b_stride, out + first, layer.outputs, tokens + r, kWide * kLanes);
      });
    for (; first < part.outputs; first += kLanes)
      tiles(rows, 0, [&](int64_t r, auto count) {
        const T* from = low.data() + r * width;
        expand<T, count(), 1>(from, width, words, b + first * b_stride, out + first, layer.outputs, tokens + r, part.outputs - first);
      });
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
