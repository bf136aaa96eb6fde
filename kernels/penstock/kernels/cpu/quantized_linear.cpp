// Linear layers over weights of eight or four bits, in one thread, behind a C ABI. Activations are float32 or bfloat16; weights are whole
// numbers, with or without zero points, or the floating-point formats E4M3 and E2M1.
//
// `quantized_linear/reference.py` describes the packed weight: panels of 16 outputs, and in each, pairs of inputs. A pair takes 32 bytes
// in eight bits (16 outputs of the first input, then of the second) and 16 bytes in four bits (the first input in the low half).
//
// Where one instruction adds the products of a pair of bfloat16, activations in bfloat16 take it: every number of a weight is exact in
// bfloat16. Elsewhere each output has two chains of additions in float32 within a group of inputs: over the first inputs of the pairs, and
// over the second.
// The group's scale multiplies their sum, less the zero point times the group's sum of inputs. The order never depends on the number of
// rows, so a token's result has the same bits in any batch.

#include <algorithm>
#include <memory>
#include <numeric>

#include "vector.h"

namespace {

using namespace penstock;

constexpr int kPanel = 16;      // outputs
constexpr int kMaxRows = 4;     // of a tile
constexpr int64_t kBlock = 64;  // rows that meet all weights before the next rows
constexpr int kAhead = 2048;    // bytes that are fetched ahead of a panel's weights
constexpr int kSums = kRegisters == 32 ? 24 : 12;

// Whether the products of a pair are added by one instruction.
template <typename T>
constexpr bool kDots = kDotsPairs && std::is_same_v<T, BFloat16>;

// What a tile reads its inputs as.
template <typename T>
using Input = std::conditional_t<kDots<T>, BFloat16, float>;

// Vectors of outputs beside so many rows; each has one sum per row, or two.
template <typename T>
constexpr int vectors(int rows) {
  int found = kDots<T> ? 8 : 4;
  while (found > 1 && (kDots<T> ? 1 : 2) * found * rows > kSums) found /= 2;
  return found;
}

// As `reference.NUMBERS` numbers them.
enum Number { kInt8, kInt4, kE4m3, kE2m1 };
constexpr int bits(Number number) { return number == kInt8 || number == kE4m3 ? 8 : 4; }

// What a number is multiplied by when it has been read.
constexpr float unit(Number number) { return number == kE4m3 ? kE4m3Unit : 1.0f; }

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

// The weights of a pair of inputs for kLanes outputs.
template <Number kNumber>
inline void pair_weights(const int8_t* at, Vec* first, Vec* second) {
  if constexpr (kNumber == kE4m3) {
    *first = load_e4m3(at);
    *second = load_e4m3(at + kPanel);
    return;
  }
  const IntVec bytes = load_bytes(at);
  if constexpr (kNumber == kInt8) {
    *first = __builtin_convertvector(bytes, Vec);
    *second = __builtin_convertvector(load_bytes(at + kPanel), Vec);
  } else if constexpr (kNumber == kE2m1) {
    *first = from_e2m1(bytes);
    *second = from_e2m1(bytes >> 4);
  } else {
#if defined(__AVX512F__)
    // A look-up takes the low four bits of an index and ignores the others.
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    *first = (Vec)_mm512_permutexvar_ps((__m512i)bytes, table);
    *second = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)bytes, 4), table);
#else
    *first = __builtin_convertvector((bytes << 28) >> 28, Vec);
    *second = __builtin_convertvector(bytes >> 4, Vec);
#endif
  }
}

// The same as pairs of bfloat16, the first in the low half of each word.
template <Number kNumber>
inline IntVec pair_words(const int8_t* at) {
#if defined(__AVX512F__)
  if constexpr (bits(kNumber) == 4) {
    // A look-up takes the low five bits of an index of 16 bits: four of the number, and one that must not count.
    static const uint16_t numbers[2][16] = {
        {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80},
        {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0}};
    const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers[kNumber == kE2m1])));
    const IntVec bytes = (IntVec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return (IntVec)_mm512_permutexvar_epi16((__m512i)(bytes | (bytes << 12)), table);
  }
#endif
  Vec first, second;
  pair_weights<kNumber>(at, &first, &second);
  const IntVec low = (bit_cast<IntVec>(first) >> 16) & 0xffff;
  return (bit_cast<IntVec>(second) & static_cast<int32_t>(0xffff0000u)) | low;
}

// Scales of any dtype. It is asked for at each group: code for each would take as long to compile as all the rest.
struct Scales {
  int dtype;
  const void* values;

  Vec load(int64_t at) const {
    switch (dtype) {
      case 0: return penstock::load(static_cast<const float*>(values) + at);
      case 1: return penstock::load(static_cast<const BFloat16*>(values) + at);
      default: return penstock::load(static_cast<const Float16*>(values) + at);
    }
  }
};

template <typename T>
struct Job {
  const Input<T>* x;  // [rows, 2 * pairs]
  const float* sums;  // [rows, groups]: of x, where there are zeros
  const int8_t* weight;
  Scales scales;        // [panels, groups, 16]
  const int8_t* zeros;  // [panels, groups, 16] or null
  const T* bias;    // [outputs] or null
  T* out;
  int64_t outputs, pairs, group;  // group: pairs that share a scale
};

template <Number kNumber, int kRows, int kVectors, typename T>
__attribute__((noinline)) void tile(const Job<T>& job, int64_t row, int64_t column) {
  constexpr int64_t kStep = kPanel * bits(kNumber) / 4;  // bytes of a panel for a pair
  const int64_t groups = (job.pairs + job.group - 1) / job.group, stride = 2 * job.pairs;
  const int8_t* weights[kVectors];
  int64_t of_groups[kVectors];  // where its scales and zeros begin
  Vec totals[kRows][kVectors];
  float start[kVectors * kLanes] = {};
  if (job.bias != nullptr)
    for (int64_t i = 0; i < std::min<int64_t>(kVectors * kLanes, job.outputs - column); ++i) start[i] = widen(job.bias[column + i]);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = column + v * kLanes, panel = at / kPanel, lane = at % kPanel;
    weights[v] = job.weight + panel * job.pairs * kStep + lane;
    of_groups[v] = panel * groups * kPanel + lane;
    for (int r = 0; r < kRows; ++r) totals[r][v] = load(start + v * kLanes);
  }
  const Input<T>* x = job.x + row * stride;
  for (int64_t group = 0; group < groups; ++group) {
    Vec first[kRows][kVectors] = {}, second[kRows][kVectors] = {};  // the second is not used where pairs are added at once
    for (int64_t pair = group * job.group; pair < std::min(job.pairs, (group + 1) * job.group); ++pair)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int8_t* at = weights[v] + pair * kStep;
        __builtin_prefetch(at + kAhead);  // no fault past the end
        if constexpr (kDots<T>) {
          const IntVec words = pair_words<kNumber>(at);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) first[r][v] = add_product<BFloat16>(first[r][v], splat_word(x + r * stride + 2 * pair), words);
        } else {
          Vec low, high;
          pair_weights<kNumber>(at, &low, &high);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const float* inputs = x + r * stride + 2 * pair;
            first[r][v] = multiply_add(splat(inputs[0]), low, first[r][v]);
            second[r][v] = multiply_add(splat(inputs[1]), high, second[r][v]);
          }
        }
      }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Vec scale = job.scales.load(of_groups[v] + group * kPanel) * unit(kNumber);
      if (job.zeros != nullptr) {
        const Vec zero = -__builtin_convertvector(load_bytes(job.zeros + of_groups[v] + group * kPanel), Vec);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) first[r][v] = multiply_add(zero, splat(job.sums[(row + r) * groups + group]), first[r][v]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Vec found = kDots<T> ? first[r][v] : first[r][v] + second[r][v];
        totals[r][v] = multiply_add(found, scale, totals[r][v]);
      }
    }
  }
  const int64_t count = std::min<int64_t>(kVectors * kLanes, job.outputs - column);
  for (int r = 0; r < kRows; ++r) {
    T all[kVectors * kLanes];
    for (int v = 0; v < kVectors; ++v) store(all + v * kLanes, totals[r][v]);
    std::memcpy(job.out + (row + r) * job.outputs + column, all, count * sizeof(T));
  }
}

template <Number kNumber, int kRows, typename T>
void rows_of(const Job<T>& job, int64_t row, int64_t column, int count) {
  for (int v = 0; v < count;)
    if (count - v >= vectors<T>(kRows))
      tile<kNumber, kRows, vectors<T>(kRows)>(job, row, column + v * kLanes), v += vectors<T>(kRows);
    else
      tile<kNumber, kRows, 1>(job, row, column + v * kLanes), ++v;
}

template <typename To, typename T>
inline To as_input(T x) {
  if constexpr (std::is_same_v<To, T>)
    return x;
  else
    return widen(x);
}

template <Number kNumber, typename T>
void quantized_linear(const T* x, Job<T> job, int64_t rows, int64_t inputs) {
  const int64_t stride = 2 * job.pairs, block = std::min(rows, kBlock);
  const int64_t groups = (job.pairs + job.group - 1) / job.group;
  const std::unique_ptr<Input<T>[]> wide(new Input<T>[block * stride]());
  const std::unique_ptr<float[]> sums(job.zeros == nullptr ? nullptr : new float[block * groups]);
  const int64_t vectors_there = (job.outputs + kLanes - 1) / kLanes;
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t i = 0; i < inputs; ++i) wide[r * stride + i] = as_input<Input<T>>(x[(begin + r) * inputs + i]);
    for (int64_t r = 0; job.zeros != nullptr && r < count; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const Input<T>* first = &wide[r * stride + 2 * g * job.group];
        const auto add = [](float sum, Input<T> input) { return sum + widen(input); };
        sums[r * groups + g] = std::accumulate(first, first + 2 * std::min(job.group, job.pairs - g * job.group), 0.0f, add);
      }
    Job<T> part = job;
    part.x = wide.get(), part.sums = sums.get(), part.out = job.out + begin * job.outputs;
    for (int64_t v = 0; v < vectors_there; v += vectors<T>(1)) {
      const int here = static_cast<int>(std::min<int64_t>(vectors<T>(1), vectors_there - v));
      int64_t row = 0;
      for (; row + kMaxRows <= count; row += kMaxRows) rows_of<kNumber, kMaxRows>(part, row, v * kLanes, here);
      switch (count - row) {
        case 3: rows_of<kNumber, 3>(part, row, v * kLanes, here); break;
        case 2: rows_of<kNumber, 2>(part, row, v * kLanes, here); break;
        case 1: rows_of<kNumber, 1>(part, row, v * kLanes, here); break;
      }
    }
  }
}

}  // namespace

extern "C" void penstock_quantized_linear(int dtype, int scale_dtype, int number, const void* x, const void* weight, const void* scales,
                                          const int8_t* zeros, const void* bias, void* out, int64_t rows, int64_t outputs,
                                          int64_t inputs, int64_t group) {
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    const Job<T> job{nullptr, nullptr, static_cast<const int8_t*>(weight), {scale_dtype, scales}, zeros,
                     static_cast<const T*>(bias), to, outputs, (inputs + 1) / 2, group / 2};
    const T* from = static_cast<const T*>(x);
    switch (number) {
      case kInt8: quantized_linear<kInt8>(from, job, rows, inputs); break;
      case kInt4: quantized_linear<kInt4>(from, job, rows, inputs); break;
      case kE4m3: quantized_linear<kE4m3>(from, job, rows, inputs); break;
      case kE2m1: quantized_linear<kE2m1>(from, job, rows, inputs); break;
    }
  };
  if (dtype == 0)
    run(static_cast<float*>(out));
  else
    run(static_cast<BFloat16*>(out));
}
