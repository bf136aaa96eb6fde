// Linear layers whose weight and inputs are both whole numbers of eight bits, in one thread, behind a C ABI.
//
// `integer_linear/reference.py` describes the packed weight and says what is rounded: sums of products are exact, so that all instruction
// sets, numbers of rows and orders of additions have the same bits.
//
// Inputs are kept with 128 added, as numbers from 0 to 255: one instruction multiplies those by signed numbers. 128 times the sum of the
// weight's numbers is subtracted from the result, and with it what a zero point of the inputs adds.

#include <algorithm>
#include <memory>

#include "rounding.h"
#include "tiles.h"

namespace {

using namespace penstock;

constexpr int kPanel = 16, kTogether = 4;
constexpr int kQuad = kPanel * kTogether;  // bytes of a panel for a quad of inputs
constexpr int kOffset = 128;               // what is added to inputs
constexpr int64_t kBlock = 96;             // rows that meet all weights before the next rows
constexpr int kAhead = 2048;               // bytes that are fetched ahead of a panel's weights

// A panel's sums are kVectors vectors. `add_products` adds to one of them what its part of a quad's weights and the inputs give.
#if defined(__AVX512VNNI__)
constexpr int kVectors = 1, kMaxRows = 6, kSums = 24;
using Step = uint8_t;
using Inputs = IntVec;
inline Inputs load_inputs(const Step* at) { return splat_word(at); }
inline IntVec load_weights(const int8_t* at, int) { return load_words(at); }
inline IntVec add_products(IntVec sum, Inputs inputs, IntVec weights) {
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)inputs, (__m512i)weights);
}
#elif defined(__AVX2__)
// Pairs of products are added up in 32 bits: an output has two sums side by side.
constexpr int kVectors = 4, kMaxRows = 3, kSums = 12;
using Step = int16_t;
using Inputs = __m256i;
inline Inputs load_inputs(const Step* at) {
  int64_t quad;
  std::memcpy(&quad, at, sizeof quad);
  return _mm256_set1_epi64x(quad);
}
inline IntVec load_weights(const int8_t* at, int vector) {
  return (IntVec)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + vector));
}
inline IntVec add_products(IntVec sum, Inputs inputs, IntVec weights) {
  return (IntVec)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(inputs, (__m256i)weights));
}
#else
constexpr int kVectors = kPanel / kLanes, kMaxRows = 3, kSums = 12;
using Step = uint8_t;
using Inputs = const Step*;
inline Inputs load_inputs(const Step* at) { return at; }
inline IntVec load_weights(const int8_t* at, int vector) { return load_words(at + vector * kVectorBytes); }
inline IntVec add_products(IntVec sum, Inputs inputs, IntVec weights) {
  for (int i = 0; i < kTogether; ++i) sum += ((weights << (24 - 8 * i)) >> 24) * static_cast<int32_t>(inputs[i]);
  return sum;
}
#endif
constexpr int kParts = kPanel / kLanes;  // vectors of a panel's outputs

// The sums of a panel in the order of its outputs.
inline void in_order(const IntVec (&sums)[kVectors], IntVec (&out)[kParts]) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  for (int i = 0; i < kParts; ++i)
    out[i] = (IntVec)_mm256_permute4x64_epi64(_mm256_hadd_epi32((__m256i)sums[2 * i], (__m256i)sums[2 * i + 1]), 0xd8);
#else
  for (int i = 0; i < kParts; ++i) out[i] = sums[i];
#endif
}

// Panels beside so many rows.
constexpr int panels(int rows) {
  int found = 8;
  while (found > 1 && found * kVectors * rows > kSums) found /= 2;
  return found;
}

// A product that is rounded before anything is added to it.
inline Vec product(Vec a, Vec b) {
  Vec out = a * b;
  asm("" : "+m"(out));
  return out;
}

struct Weight {
  const int8_t* values;  // [panels, quads, 16, 4]
  const float* scales;   // [panels, groups, 16]
  const int32_t* sums;   // [panels, groups, 16]
  const int8_t* zeros;   // [panels, groups, 16] or null
  int64_t inputs, group, round_group;  // round_group: inputs of a row that share a scale

  int64_t groups() const { return (inputs + group - 1) / group; }
  int64_t group_quads() const { return (group + kTogether - 1) / kTogether; }
  int64_t quads() const { return (groups() - 1) * group_quads() + (inputs - (groups() - 1) * group + kTogether - 1) / kTogether; }
};

// Rounded rows.
struct Rows {
  int64_t stride;                     // steps from row to row
  std::unique_ptr<Step[]> steps;      // [rows, stride]: of each quads times 4, and zeros
  std::unique_ptr<float[]> scales;    // [rows, groups]
  std::unique_ptr<int32_t[]> sums;    // [rows, groups]: of steps less the zero point, where the weight has zero points
};

template <typename T>
struct Job {
  Weight weight;
  const Rows* rows;
  int32_t zero;   // of the inputs
  const T* bias;  // [outputs] or null
  T* out;         // of the first row
  int64_t outputs;
};

// Adds to a row's outputs of a panel what the sums of a group of inputs come to.
template <typename T>
inline void add_group(const Job<T>& job, int64_t row, int64_t panel, int64_t group, const IntVec (&sums)[kParts], Vec* totals) {
  const Weight& weight = job.weight;
  const int64_t of_group = (panel * weight.groups() + group) * kPanel, of_row = row * weight.groups() + group;
  const Vec scale = splat(job.rows->scales[of_row]);
  for (int i = 0; i < kParts; ++i) {
    IntVec found = sums[i] - load_words(weight.sums + of_group + i * kLanes) * (kOffset + job.zero);
    if (weight.zeros != nullptr) found -= load_bytes(weight.zeros + of_group + i * kLanes) * job.rows->sums[of_row];
    totals[i] += product(__builtin_convertvector(found, Vec) * load(weight.scales + of_group + i * kLanes), scale);
  }
}

template <int kRows, int kPanels, typename T>
__attribute__((noinline)) void tile(const Job<T>& job, int64_t row, int64_t panel) {
  const Weight& weight = job.weight;
  const int64_t groups = weight.groups(), quads = weight.quads(), group_quads = weight.group_quads(), column = panel * kPanel;
  const int64_t count = std::min<int64_t>(kPanels * kPanel, job.outputs - column);
  float start[kPanels * kPanel];
  begin_sums(job.bias, column, job.outputs, kPanels * kPanel, start);
  Vec totals[kRows][kPanels * kParts];
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kPanels * kParts; ++i) totals[r][i] = load(start + i * kLanes);
  const Step* x = job.rows->steps.get() + row * job.rows->stride;
  const int8_t* values = weight.values + panel * quads * kQuad;
  for (int64_t group = 0; group < groups; ++group) {
    IntVec sums[kRows][kPanels][kVectors] = {};
    for (int64_t quad = group * group_quads; quad < std::min(quads, (group + 1) * group_quads); ++quad) {
      Inputs inputs[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) inputs[r] = load_inputs(x + r * job.rows->stride + quad * kTogether);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        const int8_t* at = values + (p * quads + quad) * kQuad;
        __builtin_prefetch(at + kAhead);  // no fault past the end
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const IntVec weights = load_weights(at, v);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sums[r][p][v] = add_products(sums[r][p][v], inputs[r], weights);
        }
      }
    }
    for (int p = 0; p < kPanels; ++p)
      for (int r = 0; r < kRows; ++r) {
        IntVec found[kParts];
        in_order(sums[r][p], found);
        add_group(job, row + r, panel + p, group, found, totals[r] + p * kParts);
      }
  }
  for (int r = 0; r < kRows; ++r) {
    T all[kPanels * kPanel];
    for (int i = 0; i < kPanels * kParts; ++i) store(all + i * kLanes, totals[r][i]);
    std::memcpy(job.out + (row + r) * job.outputs + column, all, count * sizeof(T));
  }
}

template <int kRows, typename T>
void tiles(const Job<T>& job, int64_t rows, int64_t row, int64_t panel, int64_t end) {
  if (rows == kRows) {
    for (; panel + panels(kRows) <= end; panel += panels(kRows)) tile<kRows, panels(kRows)>(job, row, panel);
    for (; panel < end; ++panel) tile<kRows, 1>(job, row, panel);
  } else if constexpr (kRows > 1) {
    tiles<kRows - 1>(job, rows, row, panel, end);
  }
}

// kLanes inputs as steps, with the offset; those that are not numbers are marked in `wrong`.
inline void keep_steps(Vec steps, Step* out, IntVec* wrong) {
  typedef Step StepVec __attribute__((vector_size(kLanes * sizeof(Step))));
  const Vec numbers = steps == steps ? steps : Vec{};
  const StepVec kept = __builtin_convertvector(__builtin_convertvector(numbers, IntVec) + kOffset, StepVec);
  std::memcpy(out, &kept, sizeof kept);
  *wrong |= steps != steps;
}

// One group of a row; returns its scale, NaN where an input is not a number.
template <typename T>
float round_group(const T* x, int64_t size, float scale, float zero, Step* out) {
  IntVec wrong{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) keep_steps(whole_steps(load(x + i), splat(scale), splat(zero)), out + i, &wrong);
  if (i < size) {
    T tail[kLanes] = {};
    Step kept[kLanes];
    std::memcpy(tail, x + i, (size - i) * sizeof(T));
    keep_steps(whole_steps(load(tail), splat(scale), splat(zero)), kept, &wrong);
    std::memcpy(out + i, kept, (size - i) * sizeof(Step));
  }
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= wrong[lane];
  return any ? std::numeric_limits<float>::quiet_NaN() : scale;
}

template <typename T>
void round_rows(const T* x, int64_t count, const Weight& weight, const Rule& rule, const float* scale, float zero, const Rows& rows) {
  const int64_t groups = weight.groups();
  for (int64_t r = 0; r < count; ++r, x += weight.inputs) {
    float own = scale == nullptr ? 0.0f : *scale;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = group * weight.group, size = std::min(weight.group, weight.inputs - at);
      if (scale == nullptr && at % weight.round_group == 0)
        own = scale_of(x + at, std::min(weight.round_group, weight.inputs - at), rule);
      Step* steps = rows.steps.get() + r * rows.stride + group * weight.group_quads() * kTogether;
      rows.scales[r * groups + group] = round_group(x + at, size, own, zero, steps);
      if (weight.zeros == nullptr) continue;
      int32_t sum = 0;
      for (int64_t i = 0; i < size; ++i) sum += steps[i] - kOffset - static_cast<int32_t>(zero);
      rows.sums[r * groups + group] = sum;
    }
  }
}

#if defined(__AMX_INT8__)
// Rows from which on tiles take less time than vectors. The sums are the same.
constexpr int64_t kLeastRows = 8;
constexpr int64_t kTileQuads = kTileRows, kColumns = 2 * kPanel;

bool suit_tiles(const Weight& weight, int64_t rows) {
  return rows >= kLeastRows && (weight.groups() == 1 || weight.group_quads() % kTileQuads == 0);
}

// A panel's tile of weights.
const int8_t* weights_at(const Weight& weight, int64_t panel, int64_t quad, int8_t* rest) {
  const int64_t quads = weight.quads();
  return whole_tile(weight.values + (panel * quads + quad) * kQuad, (quads - quad) * kQuad, rest);
}

// The sums of one or two tiles of `height` rows from `row` on, with two panels (the second may be the first again), of the quads
// [first, last): [rows, 32].
template <int kTiles>
void tile_sums(const Weight& weight, const Rows& rows, int64_t row, int64_t height, const int64_t (&panels)[2], int64_t first, int64_t last,
               int32_t* out) {
  alignas(64) int8_t rest[2][kTileSize];
  const Step *x = rows.steps.get() + row * rows.stride + first * kTogether, *y = x + height * rows.stride;
  zero_sums();
  for (int64_t quad = first; quad < last; quad += kTileQuads, x += kTileBytes, y += kTileBytes)
    add_tiles<kTiles, true>(x, y, rows.stride, weights_at(weight, panels[0], quad, rest[0]), weights_at(weight, panels[1], quad, rest[1]));
  store_sums<kTiles>(out, out + height * kColumns);
}

// `count` rows, in one or two tiles of `height` rows from `row` on, with two panels.
template <int kTiles, typename T>
void tile_pair(const Job<T>& job, int64_t row, int64_t count, int64_t height, int64_t panel) {
  const Weight& weight = job.weight;
  const int64_t column = panel * kPanel, there = std::min(kColumns, job.outputs - column);
  const int64_t panels[2] = {panel, there > kPanel ? panel + 1 : panel}, quads = weight.quads();
  alignas(64) int32_t sums[2 * kTileRows * kColumns];
  alignas(64) float start[kColumns], totals[2 * kTileRows][kColumns];
  begin_sums(job.bias, column, job.outputs, kColumns, start);
  for (int64_t r = 0; r < count; ++r) std::copy_n(start, kColumns, totals[r]);
  for (int64_t group = 0; group < weight.groups(); ++group) {
    const int64_t first = group * weight.group_quads(), last = std::min(quads, first + weight.group_quads());
    tile_sums<kTiles>(weight, *job.rows, row, height, panels, first, last, sums);
    for (int64_t r = 0; r < count; ++r)
      for (int p = 0; p < 2; ++p) {
        const IntVec found[kParts] = {load_words(sums + r * kColumns + p * kPanel)};
        Vec total[kParts] = {load(totals[r] + p * kPanel)};
        add_group(job, row + r, panels[p], group, found, total);
        store(totals[r] + p * kPanel, total[0]);
      }
  }
  for (int64_t r = 0; r < count; ++r) {
    T all[kColumns];
    for (int p = 0; p < 2; ++p) store(all + p * kPanel, load(totals[r] + p * kPanel));
    std::copy_n(all, there, job.out + (row + r) * job.outputs + column);
  }
}

template <typename T>
void multiply_tiles(const Job<T>& job, int64_t rows, int64_t all) {
  const int64_t count = (rows + kTileRows - 1) / kTileRows, height = (rows + count - 1) / count;
  const Tiles shapes(height);
  for (int64_t panel = 0; panel < all; panel += 2)
    for (int64_t row = 0; row < rows; row += 2 * height) {
      if (rows - row > height)
        tile_pair<2>(job, row, std::min(2 * height, rows - row), height, panel);
      else
        tile_pair<1>(job, row, rows - row, height, panel);
    }
}
#endif

template <typename T>
void multiply(const Job<T>& job, int64_t rows, int64_t all) {
#if defined(__AMX_INT8__)
  if (suit_tiles(job.weight, rows)) return multiply_tiles(job, rows, all);
#endif
  const int64_t in_tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t panel = 0; panel < all; panel += panels(1))
    for (int64_t tile = 0, row = 0; tile < in_tiles; ++tile) {
      const int64_t here = rows / in_tiles + (tile < rows % in_tiles);
      tiles<kMaxRows>(job, here, row, panel, std::min<int64_t>(panel + panels(1), all));
      row += here;
    }
}

template <typename T>
void integer_linear(const T* x, const Weight& weight, const Rule& rule, const float* scale, float zero, const T* bias, T* out, int64_t rows,
                    int64_t outputs) {
  const int64_t block = std::min(rows, kBlock), all = (outputs + kPanel - 1) / kPanel;
  // A tile reads whole lines, also of rows that are not there. Rows whose distance is a power of two would meet in a few sets of the cache.
  const int64_t stride = kHasTiles ? (weight.quads() * kTogether + 63) / 64 * 64 + 64 : weight.quads() * kTogether;
  const int64_t kept = kHasTiles ? block + 16 : block;
  Rows rounded{stride, std::unique_ptr<Step[]>(new Step[kept * stride]()),
               std::unique_ptr<float[]>(new float[block * weight.groups()]),
               std::unique_ptr<int32_t[]>(weight.zeros == nullptr ? nullptr : new int32_t[block * weight.groups()])};
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    round_rows(x + begin * weight.inputs, count, weight, rule, scale, zero, rounded);
    const Job<T> job{weight, &rounded, static_cast<int32_t>(zero), bias, out + begin * outputs, outputs};
    multiply(job, count, all);
  }
}

}  // namespace

// `group` and `round_group`: inputs that share a scale of both, and of a row. Without `input_scale` each row or group of it finds its own.
extern "C" void penstock_integer_linear(int dtype, const void* x, const int8_t* values, const float* scales, const int32_t* sums,
                                        const int8_t* zeros, const void* bias, const float* input_scale, const float* input_zero, void* out,
                                        int64_t rows, int64_t outputs, int64_t inputs, int64_t group, int64_t round_group, int powers) {
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    const Weight weight{values, scales, sums, zeros, inputs, group, round_group > 0 ? round_group : inputs};
    integer_linear(static_cast<const T*>(x), weight, Rule{false, powers != 0}, input_scale, input_zero == nullptr ? 0.0f : *input_zero,
                   static_cast<const T*>(bias), to, rows, outputs);
  };
  if (dtype == 0)
    run(static_cast<float*>(out));
  else
    run(static_cast<BFloat16*>(out));
}
