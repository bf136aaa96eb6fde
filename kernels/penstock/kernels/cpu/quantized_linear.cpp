// Linear layers over weights of eight or four bits, in one thread, behind a C ABI. Activations are float32 or bfloat16; weights are whole
// numbers, with or without zero points, or the floating-point formats E4M3 and E2M1.
//
// `quantized_linear/reference.py` describes the packed weight: panels of 16 outputs, and in each, steps of eight inputs.
//
// Each output has two chains of additions in float32 within a group of inputs: over the first inputs of pairs, and over the second. Where
// one instruction adds the products of a pair of bfloat16, and is quick, it adds both to one chain: every number of a weight is exact in
// bfloat16. The group's scale multiplies their sum, less the zero point times the group's sum of inputs. The order never depends on the number of
// rows, so a token's result has the same bits in any batch.
//
// Where the CPU has tiles, many rows of bfloat16 meet weights that are widened to it. Tiles add both chains up after every 32 inputs of a group
// and know no subnormal numbers, and so do vectors there.
//
// One row waits for the memory. A tile's panels are read side by side, so weights and scales are fetched ahead, also those of the next tile.

#include <algorithm>
#include <memory>
#include <numeric>

#include "tiles.h"
#include "vector.h"

namespace {

using namespace penstock;

constexpr int kPanel = 16;      // outputs
constexpr int kStep = 8;        // inputs of a step, which a word of four-bit numbers holds
constexpr int kMaxRows = 4;     // of a tile
constexpr int64_t kBlock = 64;  // rows that meet all weights before the next rows
constexpr int kAhead = 2048;    // bytes that are fetched ahead of a panel's weights
constexpr int kGroupsAhead = 16;  // groups of inputs by which scales are fetched ahead
constexpr int kLine = 64;       // bytes that are fetched at once
constexpr int kSums = kRegisters == 32 ? 24 : 12;

// Chains of additions of an output, for a tile that reads its inputs as X: as pairs of bfloat16, or as float32.
template <typename X>
constexpr int kChains = std::is_same_v<X, BFloat16> ? 1 : 2;

// Whether pairs of bfloat16 are read. Intel's processors multiply a pair in more time than two multiply-adds take.
inline bool multiplies_pairs() {
#if defined(__AVX512BF16__)
  return !__builtin_cpu_is("intel");
#else
  return kDotsPairs;
#endif
}

#if defined(__AMX_BF16__)
constexpr int64_t kSpan = kTileInputs;  // inputs after which the chains of a group are added up
#else
constexpr int64_t kSpan = INT64_MAX;
#endif

// Vectors of outputs beside so many rows.
template <typename X>
constexpr int vectors(int rows) {
  int found = 8;
  while (found > 1 && kChains<X> * found * rows > kSums) found /= 2;
  return found;
}

// As `reference.NUMBERS` numbers them.
enum Number { kInt8, kInt4, kE4m3, kE2m1 };
constexpr int bits(Number number) { return number == kInt8 || number == kE4m3 ? 8 : 4; }
constexpr int64_t input_bytes(Number number) { return kPanel * bits(number) / 8; }  // of a panel for an input

// Inputs that are read together. 16 registers do not suffice for a whole step in eight bits.
constexpr int together(Number number) { return kRegisters == 32 || bits(number) == 4 ? kStep : 2; }

// What a number is multiplied by when it has been read. Where no look-up reads four bits, they are the upper ones of a word.
#if defined(__AVX512F__)
constexpr float kInt4Unit = 1.0f;
#else
constexpr float kInt4Unit = 0x1p-28f;
#endif
constexpr float unit(Number number) { return number == kE4m3 ? kE4m3Unit : number == kInt4 ? kInt4Unit : 1.0f; }

// kLanes numbers in E2M1, in the lower four bits of each word.
inline Vec from_e2m1(IntVec codes) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6);
  return (Vec)_mm512_permutexvar_ps((__m512i)codes, table);
#elif defined(__AVX2__)
  const __m256 magnitudes = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6), (__m256i)codes);
  return bit_cast<Vec>(bit_cast<IntVec>(magnitudes) | ((codes << 28) & static_cast<int32_t>(0x80000000u)));
#else
  return bit_cast<Vec>(((codes << 28) & static_cast<int32_t>(0x80000000u)) | ((codes & 7) << 22)) * 0x1p126f;
#endif
}

// Number i of each word's eight signed whole numbers, divided by its unit.
inline Vec from_int4(IntVec words, int i) {
#if defined(__AVX512F__)
  // A look-up takes the low four bits of an index and ignores the others.
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return (Vec)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), table);
#else
  return __builtin_convertvector((words << (28 - 4 * i)) & static_cast<int32_t>(0xf0000000u), Vec);
#endif
}

// The weights of inputs that are read together, for kLanes outputs, divided by their unit.
template <Number kNumber>
struct Weights {
  const int8_t* at;
  IntVec words;

  Weights() = default;
  explicit Weights(const int8_t* from) : at(from) {
    if constexpr (bits(kNumber) == 4) words = load_words(from);
  }
  Vec of_input(int i) const {
    if constexpr (kNumber == kInt8) return __builtin_convertvector(load_bytes(at + i * kPanel), Vec);
    if constexpr (kNumber == kE4m3) return load_e4m3(at + i * kPanel);
    return kNumber == kInt4 ? from_int4(words, i) : from_e2m1(words >> (4 * i));
  }

  // Those of inputs i and i + 1 as pairs of bfloat16, the first in the low half of each word.
  IntVec of_pair(int i) const {
#if defined(__AVX512F__)
    if constexpr (bits(kNumber) == 4) {
      // A look-up takes the low five bits of an index of 16 bits: four of the number, and one that must not count.
      static const uint16_t numbers[2][16] = {
          {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80},
          {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0}};
      const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers[kNumber == kE2m1])));
      const IntVec codes = words >> (4 * i);
      return (IntVec)_mm512_permutexvar_epi16((__m512i)((codes & 0xff) | (codes << 12)), table);
    }
#endif
    const IntVec low = (bit_cast<IntVec>(of_input(i)) >> 16) & 0xffff;
    return (bit_cast<IntVec>(of_input(i + 1)) & static_cast<int32_t>(0xffff0000u)) | low;
  }
};

// Scales of any dtype. It is asked for at each group: code for each would take as long to compile as all the rest.
struct Scales {
  int dtype;
  const void* values;

  template <int kCount>
  void fetch(const int64_t (&places)[kCount], int64_t beyond) const {
    const int64_t size = dtype == 0 ? sizeof(float) : sizeof(BFloat16);
    for (int i = 0; i < kCount; ++i) __builtin_prefetch(static_cast<const char*>(values) + (places[i] + beyond) * size);
  }

  // Those at so many places.
  template <int kCount>
  void load(const int64_t (&places)[kCount], int64_t beyond, Vec (&out)[kCount]) const {
    const auto each = [&](const auto* from) {
      for (int i = 0; i < kCount; ++i) out[i] = penstock::load(from + places[i] + beyond);
    };
    switch (dtype) {
      case 0: return each(static_cast<const float*>(values));
      case 1: return each(static_cast<const BFloat16*>(values));
      default: return each(static_cast<const Float16*>(values));
    }
  }
};

template <typename X, typename T>
struct Job {
  const X* x;         // [rows, inputs of whole steps]
  const float* sums;  // [rows, groups]: of x, where there are zeros
  const int8_t* weight;
  Scales scales;        // [panels, groups, 16]
  const int8_t* zeros;  // [panels, groups, 16] or null
  const T* bias;        // [outputs] or null
  T* out;
  int64_t outputs, inputs, group;  // inputs: of whole steps; group: those that share a scale

  int64_t groups() const { return (inputs + group - 1) / group; }
};

template <Number kNumber, int kRows, int kVectors, typename X, typename T>
__attribute__((noinline)) void tile(const Job<X, T>& job, int64_t row, int64_t column) {
  constexpr int kTogether = together(kNumber);
  const int64_t groups = job.groups(), panel_bytes = job.inputs * input_bytes(kNumber);
  const int64_t others = std::max(0, kVectors * kLanes / kPanel - 1) * panel_bytes;  // from a panel's end to the same panel of the next tile
  const int8_t* weights[kVectors];
  int64_t of_groups[kVectors];  // where its scales and zeros begin
  Vec totals[kRows][kVectors];
  float start[kVectors * kLanes];
  begin_sums(job.bias, column, job.outputs, kVectors * kLanes, start);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = column + v * kLanes, panel = at / kPanel, lane = at % kPanel;
    weights[v] = job.weight + panel * panel_bytes + (bits(kNumber) == 4 ? 4 : 1) * lane;
    of_groups[v] = panel * groups * kPanel + lane;
    for (int r = 0; r < kRows; ++r) totals[r][v] = load(start + v * kLanes);
  }
  const X* x = job.x + row * job.inputs;
  for (int64_t group = 0; group < groups; ++group) {
    Vec sums[kRows][kVectors] = {};
    job.scales.fetch(of_groups, (group + kGroupsAhead) * kPanel);
    const int64_t end = std::min(job.inputs, (group + 1) * job.group);
    for (int64_t span = group * job.group, next; span < end; span = next) {
      next = end - span > kSpan ? span + kSpan : end;
      Vec chains[kRows][kVectors][kChains<X>] = {};
      for (int64_t first = span; first < next; first += kTogether) {
        const int64_t place = first * input_bytes(kNumber), ahead = kAhead + (place + kAhead < panel_bytes ? 0 : others);
        Weights<kNumber> found[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const int8_t* at = weights[v] + place;
          if (v * kLanes % kPanel == 0)
            for (int64_t line = 0; line < kTogether * input_bytes(kNumber); line += kLine) __builtin_prefetch(at + ahead + line);  // no fault past the end
          found[v] = Weights<kNumber>(at);
        }
        const auto input_of = [&](int r, int i) { return x + r * job.inputs + first + i; };
        if constexpr (kChains<X> == 1) {
#pragma GCC unroll 8
          for (int i = 0; i < kTogether; i += 2) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              const IntVec pair = found[v].of_pair(i);
#pragma GCC unroll 8
              for (int r = 0; r < kRows; ++r) chains[r][v][0] = add_product<X>(chains[r][v][0], splat_word(input_of(r, i)), pair);
            }
          }
        } else {
#pragma GCC unroll 8
          for (int i = 0; i < kTogether; ++i) {
            Vec inputs[kRows];
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) inputs[r] = splat(*input_of(r, i));
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              const Vec weights_of = found[v].of_input(i);
#pragma GCC unroll 8
              for (int r = 0; r < kRows; ++r) chains[r][v][i % 2] = multiply_add(inputs[r], weights_of, chains[r][v][i % 2]);
            }
          }
        }
      }
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sums[r][v] += kChains<X> == 1 ? chains[r][v][0] : chains[r][v][0] + chains[r][v][kChains<X> - 1];
    }
    Vec scales[kVectors];
    job.scales.load(of_groups, group * kPanel, scales);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if (job.zeros != nullptr) {
        const Vec zero = __builtin_convertvector(load_bytes(job.zeros + of_groups[v] + group * kPanel), Vec) * (-1.0f / unit(kNumber));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sums[r][v] = multiply_add(zero, splat(job.sums[(row + r) * groups + group]), sums[r][v]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) totals[r][v] = multiply_add(sums[r][v], scales[v] * unit(kNumber), totals[r][v]);
    }
  }
  const int64_t count = std::min<int64_t>(kVectors * kLanes, job.outputs - column);
  for (int r = 0; r < kRows; ++r) {
    T all[kVectors * kLanes];
    for (int v = 0; v < kVectors; ++v) store(all + v * kLanes, totals[r][v]);
    std::memcpy(job.out + (row + r) * job.outputs + column, all, count * sizeof(T));
  }
}

// `rows` rows from `row` on, kRows at most, with `count` vectors of outputs.
template <Number kNumber, int kRows, typename X, typename T>
void tiles(const Job<X, T>& job, int64_t rows, int64_t row, int64_t column, int64_t count) {
  if (rows == kRows) {
    for (; count >= vectors<X>(kRows); count -= vectors<X>(kRows), column += vectors<X>(kRows) * kLanes)
      tile<kNumber, kRows, vectors<X>(kRows)>(job, row, column);
    for (; count > 0; --count, column += kLanes) tile<kNumber, kRows, 1>(job, row, column);
  } else if constexpr (kRows > 1) {
    tiles<kNumber, kRows - 1>(job, rows, row, column, count);
  }
}

template <typename X, typename T>
inline X as_input(T x) {
  if constexpr (std::is_same_v<X, T>)
    return x;
  else
    return widen(x);
}

// In their order.
template <typename X>
float sum_of(const X* first, const X* last) {
  return std::accumulate(first, last, 0.0f, [](float sum, X input) { return sum + widen(input); });
}

#if defined(__AMX_BF16__)
// Rows from which on tiles take less time than vectors. The sums are the same.
constexpr int64_t kLeastRows = 6;
constexpr int64_t kTileBlock = 256;  // rows that meet weights that were widened once
constexpr int64_t kChunk = 8;        // tiles of inputs whose widened weights, of two panels, stay in the first cache
constexpr int64_t kColumns = 2 * kPanel;

// A layer over weights that are widened for tiles, panels by panels.
template <Number kNumber>
class TiledLinear {
 public:
  TiledLinear(const Job<float, BFloat16>& job, int64_t inputs) : job_(job), inputs_(inputs) {}

  static bool suits(const Job<float, BFloat16>& job, int64_t rows) {
    return rows >= kLeastRows && (job.groups() == 1 || job.group % kTileInputs == 0);
  }

  void run(const BFloat16* x, int64_t rows) {
    const int64_t block = parts(rows, parts(rows, kTileBlock)), groups = job_.groups();
    x_ = TileInputs(block, inputs_);
    widened_.reset(new BFloat16[2 * kChunk * kTileElements]);
    sums_.reset(new float[x_.tiles * x_.height * kColumns]);
    totals_.reset(new float[block * kColumns]);
    if (job_.zeros != nullptr) of_inputs_.reset(new float[block * groups]);
    const Tiles shapes(x_.height);
    for (int64_t row = 0; row < rows; row += block) {
      const BFloat16* first = x + row * inputs_;
      x_.gather(first, std::min(block, rows - row));
      for (int64_t r = 0; job_.zeros != nullptr && r < x_.rows; ++r)
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t begin = g * job_.group, end = std::min(inputs_, begin + job_.group);
          of_inputs_[r * groups + g] = sum_of(first + r * inputs_ + begin, first + r * inputs_ + end);
        }
      for (int64_t column = 0; column < job_.outputs; column += kColumns) columns(column, job_.out + row * job_.outputs);
    }
  }

 private:
  // All rows of the block with two panels.
  void columns(int64_t column, BFloat16* out) {
    const int64_t there = std::min(kColumns, job_.outputs - column);
    const int64_t panels[2] = {column / kPanel, (column + (there > kPanel ? kPanel : 0)) / kPanel};
    float start[kColumns];
    begin_sums(job_.bias, column, job_.outputs, kColumns, start);
    for (int64_t r = 0; r < x_.rows; ++r) std::copy_n(start, kColumns, &totals_[r * kColumns]);
    for (int64_t group = 0; group < job_.groups(); ++group) {
      const int64_t first = group * job_.group, end = std::min(job_.inputs, first + job_.group);
      for (int64_t begin = first; begin < end; begin += kChunk * kTileInputs) {
        const int64_t last = std::min(end, begin + kChunk * kTileInputs);
        for (int p = 0; p < 2; ++p) widen_panel(panels[p], begin, last, &widened_[p * kChunk * kTileElements]);
        Tiles::written();
        int64_t tile = 0;
        for (; tile + 1 < x_.tiles; tile += 2) add<2>(tile, begin, last, begin == first);
        if (tile < x_.tiles) add<1>(tile, begin, last, begin == first);
      }
      scale(panels, group);
    }
    for (int64_t r = 0; r < x_.rows; ++r) {
      BFloat16 narrowed[kColumns];
      for (int p = 0; p < 2; ++p) store(narrowed + p * kPanel, load(&totals_[r * kColumns + p * kPanel]));
      std::copy_n(narrowed, there, out + r * job_.outputs + column);
    }
  }

  // A panel's weights of the inputs [begin, last), as tiles.
  void widen_panel(int64_t panel, int64_t begin, int64_t last, BFloat16* out) const {
    const int8_t* from = job_.weight + (panel * job_.inputs + begin) * input_bytes(kNumber);
    for (int64_t input = begin; input < last; input += kStep, from += kStep * input_bytes(kNumber)) {
      const Weights<kNumber> found(from);
      for (int i = 0; i < kStep; i += 2, out += 2 * kPanel) {
        const IntVec pair = found.of_pair(i);
        std::memcpy(out, &pair, sizeof pair);
      }
    }
    const int64_t rest = (last - begin) % kTileInputs;
    if (rest != 0) std::fill_n(out, (kTileInputs - rest) * kPanel, BFloat16{});
  }

  // Adds the inputs [begin, last) of one or two tiles to their sums.
  template <int kTiles>
  void add(int64_t tile, int64_t begin, int64_t last, bool first) {
    float *upper = &sums_[tile * x_.height * kColumns], *lower = upper + x_.height * kColumns;
    if (first)
      zero_sums();
    else
      load_sums<kTiles>(upper, lower);
    const int64_t steps = parts(last - begin, kTileInputs), step = begin / kTileInputs;
    const BFloat16 *one = widened_.get(), *other = one + kChunk * kTileElements;
    for (int64_t at = 0; at < steps; ++at, one += kTileElements, other += kTileElements)
      add_tiles<kTiles, false>(x_.at(tile, step + at), x_.at(tile + 1, step + at), kTileBytes, one, other);
    store_sums<kTiles>(upper, lower);
  }

  // Takes the sums of a group into the totals, as `tile` does.
  void scale(const int64_t (&panels)[2], int64_t group) {
    const int64_t groups = job_.groups(), of_groups[2] = {panels[0] * groups * kPanel, panels[1] * groups * kPanel};
    Vec scales[2];
    job_.scales.load(of_groups, group * kPanel, scales);
    for (int p = 0; p < 2; ++p) {
      Vec zero{};
      if (job_.zeros != nullptr)
        zero = __builtin_convertvector(load_bytes(job_.zeros + of_groups[p] + group * kPanel), Vec) * (-1.0f / unit(kNumber));
      for (int64_t r = 0; r < x_.rows; ++r) {
        float* total = &totals_[r * kColumns + p * kPanel];
        Vec sum = load(&sums_[r * kColumns + p * kPanel]);
        if (job_.zeros != nullptr) sum = multiply_add(zero, splat(of_inputs_[r * groups + group]), sum);
        store(total, multiply_add(sum, scales[p] * unit(kNumber), load(total)));
      }
    }
  }

  const Job<float, BFloat16> job_;
  int64_t inputs_;
  TileInputs x_;
  std::unique_ptr<BFloat16[]> widened_;                 // [2, steps, 16, 16, 2]
  std::unique_ptr<float[]> sums_, totals_, of_inputs_;  // [rows, 32] both, and [rows, groups]: sums of inputs
};
#endif

template <Number kNumber, typename X, typename T>
void quantized_linear(const T* x, Job<X, T> job, int64_t rows, int64_t inputs) {
#if defined(__AMX_BF16__)
  const NoSubnormals guard;
  if constexpr (std::is_same_v<X, float> && std::is_same_v<T, BFloat16>)
    if (TiledLinear<kNumber>::suits(job, rows)) return TiledLinear<kNumber>(job, inputs).run(x, rows);
#endif
  const int64_t stride = job.inputs, groups = job.groups(), block = std::min(rows, kBlock);
  const std::unique_ptr<X[]> own(new X[block * stride]());
  const std::unique_ptr<float[]> sums(job.zeros == nullptr ? nullptr : new float[block * groups]);
  const int64_t vectors_there = (job.outputs + kLanes - 1) / kLanes;
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin), in_tiles = (count + kMaxRows - 1) / kMaxRows;
    for (int64_t r = 0; r < count; ++r)
      for (int64_t i = 0; i < inputs; ++i) own[r * stride + i] = as_input<X>(x[(begin + r) * inputs + i]);
    for (int64_t r = 0; job.zeros != nullptr && r < count; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const X* first = &own[r * stride + g * job.group];
        sums[r * groups + g] = sum_of(first, first + std::min(job.group, job.inputs - g * job.group));
      }
    Job<X, T> part = job;
    part.x = own.get(), part.sums = sums.get(), part.out = job.out + begin * job.outputs;
    for (int64_t v = 0; v < vectors_there; v += vectors<X>(1))
      for (int64_t tile = 0, row = 0; tile < in_tiles; ++tile) {
        const int64_t here = count / in_tiles + (tile < count % in_tiles);
        tiles<kNumber, kMaxRows>(part, here, row, v * kLanes, std::min<int64_t>(vectors<X>(1), vectors_there - v));
        row += here;
      }
  }
}

}  // namespace

extern "C" void penstock_quantized_linear(int dtype, int scale_dtype, int number, const void* x, const void* weight, const void* scales,
                                          const int8_t* zeros, const void* bias, void* out, int64_t rows, int64_t outputs,
                                          int64_t inputs, int64_t group) {
  const int64_t padded = (inputs + kStep - 1) / kStep * kStep;
  const auto run = [&](auto* to, auto read_as) {
    using T = std::remove_pointer_t<decltype(to)>;
    using X = decltype(read_as);
    const Job<X, T> job{nullptr, nullptr, static_cast<const int8_t*>(weight), {scale_dtype, scales}, zeros, static_cast<const T*>(bias), to,
                        outputs, padded, group < inputs ? group : padded};
    const T* from = static_cast<const T*>(x);
    switch (number) {
      case kInt8: quantized_linear<kInt8>(from, job, rows, inputs); break;
      case kInt4: quantized_linear<kInt4>(from, job, rows, inputs); break;
      case kE4m3: quantized_linear<kE4m3>(from, job, rows, inputs); break;
      case kE2m1: quantized_linear<kE2m1>(from, job, rows, inputs); break;
    }
  };
  if (dtype == 0) return run(static_cast<float*>(out), float{});
  BFloat16* to = static_cast<BFloat16*>(out);
  if constexpr (kDotsPairs && !kHasTiles)
    if (multiplies_pairs()) return run(to, BFloat16{});
  run(to, float{});
}
