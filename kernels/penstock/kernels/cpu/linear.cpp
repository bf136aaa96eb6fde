// Linear layers in float32 and bfloat16, in one thread, behind a C ABI.
//
// A weight is packed as `linear/reference.py` says: panels of 16 outputs, and in each, for each word of inputs, 16 words side by side.
//
// An output is one chain of additions over the words of its inputs, in their order, in float32, whatever the number of rows: so a token's
// result has the same bits in any batch. Rows and outputs are cut into tiles whose sums stay in registers, and inputs into chunks between
// which sums are kept in memory; neither is part of a result's bits.
//
// Where the CPU has tiles, `tile_linear.h` takes bfloat16. Where it multiplies pairs of bfloat16, words of inputs and weights meet as they are. Elsewhere both are widened to float32: the
// inputs once, the weights in registers where few rows share them, and else panel by panel into a buffer that stays in the first cache.

#include <algorithm>
#include <memory>

#include "tile_linear.h"
#include "vector.h"

namespace {

using namespace penstock;

constexpr int kPanel = 16;      // outputs
constexpr int64_t kBlock = 96;   // rows that meet all weights before the next rows
template <typename W>
constexpr int64_t kChunk = kWord<W> == 1 ? 384 : 256;  // words of inputs that many rows meet at a time: a panel's fill most of the first cache
constexpr int64_t kColumns = 512;  // outputs whose sums of many rows stay in the second cache from chunk to chunk
constexpr int kAhead = 2048;     // bytes that are fetched ahead of a panel's weights that few rows meet
constexpr int kWordBytes = kPanel * 4;  // of a panel for one word of inputs

// Inputs X and weights W in a tile. Its sums stay in registers; the others hold weights and inputs, and what it takes to widen them.
template <typename X, typename W>
struct Tile {
  static constexpr bool kWidens = !std::is_same_v<X, W>;
  static constexpr int kSums = kRegisters == 32 ? 24 : kWidens ? 10 : 12;
  static constexpr int kRows = kRegisters == 32 || !kWidens ? 6 : 5;

  // Vectors of outputs beside so many rows: enough chains of additions to hide the latency of one.
  static constexpr int vectors(int rows) {
    int found = 8;
    while (found * rows > kSums) found /= 2;
    return found;
  }
};
constexpr int kManyRows = 5;  // of the tiles of more rows than kFewRows; the rest of many rows may make smaller ones
constexpr int64_t kFewRows = 2 * Tile<float, BFloat16>::kRows;  // rows for which weights are widened in registers

// The part of a layer's product that one pass over the weights adds: some rows and some words of their inputs.
template <typename X, typename W, typename T>
struct Pass {
  const X* x;          // of the first row and word
  int64_t x_stride;    // elements between rows
  const W* weight;     // of the first panel and word
  int64_t panel;       // elements between panels
  int64_t words;       // W's words in this pass
  float* sums;         // [rows, outputs in whole panels]: what passes before this one have added, and this one is to add to
  int64_t sums_stride;
  bool first, last;    // of the passes over these rows: the sums begin with the bias, end in `out`
  const T* bias;       // [outputs] or null
  T* out;
  int64_t outputs;
  const char* next;    // null: the next panels follow these; else where the next panel is, with half as many bytes for each word
};

// What a tile of many rows fetches word by word: `step` bytes further at each, in each of so many panels. It is a part of the next
// panels: the first tile to meet them would wait for the memory.
struct Fetch {
  const char* at;
  int64_t step, panel;
};

// Of the first of `tiles` tiles that meet the same weights, in so many panels.
template <typename X, typename W, typename T>
Fetch fetch(const Pass<X, W, T>& pass, const W* weight, int64_t panels, int64_t tiles) {
  if (pass.next != nullptr) return {pass.next, (kWordBytes / 2 + tiles - 1) / tiles, 0};
  return {reinterpret_cast<const char*>(weight + panels * pass.panel), (kWordBytes + tiles - 1) / tiles, pass.panel * static_cast<int64_t>(sizeof(W))};
}

// The first `count` sums of each row, fewer than there are.
template <int kRows, int kVectors, typename T>
void store_rest(const Vec (&sums)[kRows][kVectors], T* out, int64_t stride, int64_t count) {
  T all[kRows][kVectors * kLanes];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(all[r] + v * kLanes, sums[r][v]);
  for (int r = 0; r < kRows; ++r) std::memcpy(out + r * stride, all[r], count * sizeof(T));
}

// The sums of kRows rows from `row` on with kVectors vectors of outputs from `column` on. kMany: the weights stay in the first cache for
// other tiles.
template <int kRows, int kVectors, bool kMany, typename X, typename W, typename T>
__attribute__((noinline)) void tile(const Pass<X, W, T>& pass, const W* weight, int64_t row, int64_t column, Fetch fetched) {
  Vec sums[kRows][kVectors];
  if (!pass.first) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = load(pass.sums + (row + r) * pass.sums_stride + column + v * kLanes);
  } else {
    float start[kVectors * kLanes];
    begin_sums(pass.bias, column, pass.outputs, kVectors * kLanes, start);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = load(start + v * kLanes);
  }
  const auto weights_of = [&](int v, int64_t word) {
    return weight + v * kLanes / kPanel * pass.panel + v * kLanes % kPanel * kWord<W> + word * kPanel * kWord<W>;
  };
  const X* x = pass.x + row * pass.x_stride;
  const auto add = [&](int64_t word) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v += std::max(1, 64 / kVectorBytes))
      __builtin_prefetch(kMany ? fetched.at + v * kLanes / kPanel * fetched.panel + word * fetched.step
                               : reinterpret_cast<const char*>(weights_of(v, word)) + kAhead);  // no fault past the end
    if constexpr (std::is_same_v<X, BFloat16>) {
      IntVec weights[kVectors];
      for (int v = 0; v < kVectors; ++v) weights[v] = load_words(weights_of(v, word));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const IntVec input = splat_word(x + r * pass.x_stride + word * kWord<X>);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = add_product<W>(sums[r][v], input, weights[v]);
      }
    } else {
#pragma GCC unroll 2
      for (int part = 0; part < kWord<W>; ++part) {
        const auto weight_of = [&](int v) {
          const IntVec found = load_words(weights_of(v, word));
          return kWord<W> == 1 ? bit_cast<Vec>(found) : part == 0 ? first_of_pair(found) : second_of_pair(found);
        };
        const auto input_of = [&](int r) { return splat(x[r * pass.x_stride + word * kWord<W> + part]); };
        // Of inputs and weights the fewer stay in registers.
        if constexpr (kRows < kVectors) {
          Vec inputs[kRows];
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) inputs[r] = input_of(r);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const Vec found = weight_of(v);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) sums[r][v] = multiply_add(inputs[r], found, sums[r][v]);
          }
        } else {
          Vec weights[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) weights[v] = weight_of(v);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const Vec input = input_of(r);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(input, weights[v], sums[r][v]);
          }
        }
      }
    }
  };
  // Several words an iteration pay where sums are many, and words are not pairs.
  if constexpr (kWord<W> == 1 && kRows > 2)
#pragma GCC unroll 4
    for (int64_t word = 0; word < pass.words; ++word) add(word);
  else
    for (int64_t word = 0; word < pass.words; ++word) add(word);
  const bool whole = column + kVectors * kLanes <= pass.outputs;
  if (pass.last && !whole) return store_rest<kRows, kVectors>(sums, pass.out + row * pass.outputs + column, pass.outputs, pass.outputs - column);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      if (pass.last)
        store(pass.out + (row + r) * pass.outputs + column + v * kLanes, sums[r][v]);
      else
        store(pass.sums + (row + r) * pass.sums_stride + column + v * kLanes, sums[r][v]);
}

// `rows` rows, in tiles of kRows or one less, with the outputs [column, end), which are whole panels.
template <int kRows, int kVectors, bool kMany, typename X, typename W, typename T>
void tiles(const Pass<X, W, T>& pass, int64_t rows, int64_t column, int64_t end) {
  const int64_t count = (rows + kRows - 1) / kRows, whole = rows - count * (kRows - 1);  // tiles, and those of kRows rows
  for (; column + kVectors * kLanes <= end && column < pass.outputs; column += kVectors * kLanes) {
    const W* weight = pass.weight + column / kPanel * pass.panel + column % kPanel * kWord<W>;
    Fetch part = fetch(pass, weight, std::max(1, kVectors * kLanes / kPanel), count);
    int64_t row = 0;
    for (; row < whole * kRows; row += kRows, part.at += part.step * pass.words) tile<kRows, kVectors, kMany>(pass, weight, row, column, part);
    if constexpr (kRows > 1)
      for (; row < rows; row += kRows - 1, part.at += part.step * pass.words)
        tile<kRows - 1, kVectors, kMany>(pass, weight, row, column, part);
  }
  if constexpr (kVectors * kLanes > kPanel)
    if (column < end) tiles<kRows, kVectors / 2, kMany>(pass, rows, column, end);
}

// The same in the fewest tiles, of kRows rows where that is what it takes.
template <int kRows, typename X, typename W, typename T>
void fewest_tiles(const Pass<X, W, T>& pass, bool many, int64_t rows, int64_t column, int64_t end) {
  const int64_t count = (rows + Tile<X, W>::kRows - 1) / Tile<X, W>::kRows;
  constexpr int kVectors = Tile<X, W>::vectors(kRows);
  if ((rows + count - 1) / count == kRows) {
    if constexpr (kRows >= kManyRows)
      if (many) return tiles<kRows, kVectors, true>(pass, rows, column, end);
    tiles<kRows, kVectors, false>(pass, rows, column, end);
  } else if constexpr (kRows > 1) {
    fewest_tiles<kRows - 1>(pass, many, rows, column, end);
  }
}

// `words` words of each row's inputs from element `begin` on, as X, side by side; what is beyond the inputs is 0.
template <typename X, typename T>
void gather(const T* x, int64_t inputs, int64_t begin, int64_t words, int64_t rows, X* out) {
  const int64_t size = words * kWord<T>, there = std::min(size, inputs - begin);
  for (int64_t r = 0; r < rows; ++r, x += inputs, out += size) {
    for (int64_t i = 0; i < there; ++i)
      if constexpr (std::is_same_v<X, T>)
        out[i] = x[begin + i];
      else
        out[i] = widen(x[begin + i]);
    std::fill(out + there, out + size, X{});
  }
}

// `words` words of a panel's pairs of bfloat16, as float32: all first ones of a word, then all second ones.
void widen_panel(const BFloat16* weight, int64_t words, float* out) {
  for (int64_t i = 0; i < words; ++i, weight += 2 * kPanel, out += 2 * kPanel)
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      const IntVec pairs = load_words(weight + 2 * lane);
      store(out + lane, first_of_pair(pairs));
      store(out + kPanel + lane, second_of_pair(pairs));
    }
}

template <typename T>
void linear(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t outputs, int64_t inputs) {
  constexpr bool kWiden = !std::is_same_v<T, float> && !kDotsPairs;
  using X = std::conditional_t<kWiden, float, T>;
  const int64_t words = (inputs + kWord<T> - 1) / kWord<T>, end = (outputs + kPanel - 1) / kPanel * kPanel;
  const int64_t blocks = (rows + kBlock - 1) / kBlock, block = (rows + blocks - 1) / std::max<int64_t>(1, blocks);
  const bool many = block > kFewRows;
  const int64_t chunk = many ? kChunk<T> : words, columns = many ? std::min(kColumns, end) : end;
  // Many rows are read side by side: rows whose distance is a power of two would meet in a few sets of the cache.
  const bool direct = !kWiden && inputs % kWord<T> == 0 && !many;
  const std::unique_ptr<X[]> gathered(direct ? nullptr : new X[block * words * kWord<T>]);
  const std::unique_ptr<float[]> sums(words > chunk ? new float[block * columns] : nullptr);
  const std::unique_ptr<float[]> panel(kWiden && many ? new float[chunk * kWord<T> * kPanel] : nullptr);
  for (int64_t row = 0; row < rows; row += block) {
    const int64_t count = std::min(block, rows - row);
    for (int64_t begin = 0; begin < words && !direct; begin += chunk)
      gather(x + row * inputs, inputs, begin * kWord<T>, std::min(chunk, words - begin), count, gathered.get() + count * begin * kWord<T>);
    for (int64_t from = 0; from < end; from += columns) {
      const int64_t to = std::min(from + columns, end);
      for (int64_t begin = 0; begin < words; begin += chunk) {
        // Columns are counted from the layer's first.
        Pass<X, T, T> pass{nullptr, inputs, weight + begin * kWord<T> * kPanel, words * kWord<T> * kPanel, std::min(chunk, words - begin),
                           sums == nullptr ? nullptr : sums.get() - from, columns, begin == 0, begin + chunk >= words, bias,
                           out + row * outputs, outputs, nullptr};
        if constexpr (!kWiden) pass.x = x + row * inputs + begin * kWord<T>;
        if (!direct) pass.x = gathered.get() + count * begin * kWord<T>, pass.x_stride = pass.words * kWord<T>;
        if constexpr (kWiden) {
          if (panel != nullptr) {
            Pass<float, float, T> wide{pass.x, pass.x_stride, panel.get(), 0, pass.words * kWord<T>, pass.sums, pass.sums_stride,
                                       pass.first, pass.last, bias, pass.out, outputs, nullptr};
            for (int64_t column = from; column < to; column += kPanel) {
              const T* weights = pass.weight + column / kPanel * pass.panel;
              widen_panel(weights, pass.words, panel.get());
              wide.next = reinterpret_cast<const char*>(weights + pass.panel);
              fewest_tiles<Tile<float, float>::kRows>(wide, true, count, column, column + kPanel);
            }
            continue;
          }
        }
        fewest_tiles<Tile<X, T>::kRows>(pass, many, count, from, to);
      }
    }
  }
}

}  // namespace

extern "C" void penstock_linear(int dtype, const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t outputs,
                                int64_t inputs) {
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    linear(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias), to, rows, outputs, inputs);
  };
  if (dtype == 0) return run(static_cast<float*>(out));
#if defined(__AMX_BF16__)
  TileLinear(static_cast<const BFloat16*>(weight), static_cast<const BFloat16*>(bias), outputs, inputs)
      .run(static_cast<const BFloat16*>(x), static_cast<BFloat16*>(out), rows);
#else
  run(static_cast<BFloat16*>(out));
#endif
}
