// Linear layers over weights of eight or four bits, in one thread, behind a C ABI. Activations are float32 or bfloat16.
//
// `quantized_linear/reference.py` describes the packed weight: panels of 16 outputs, and in each, pairs of inputs. A pair takes 32 bytes
// in eight bits (16 outputs of the first input, then of the second) and 16 bytes in four bits (the first input in the low half).
//
// Within a group of inputs each output has two chains of additions in float32: over the first inputs of the pairs, and over the second.
// The group's scale multiplies their sum. The order never depends on the number of rows, so a token's result has the same bits in any
// batch.

#include <algorithm>
#include <memory>

#include "vector.h"

namespace {

using namespace penstock;

constexpr int kPanel = 16;      // outputs
constexpr int kMaxRows = 4;     // of a tile
constexpr int64_t kBlock = 64;  // rows that meet all weights before the next rows
constexpr int kAhead = 1024;    // bytes that are fetched ahead of a panel's weights
constexpr int kSums = kRegisters == 32 ? 24 : 12;

// Vectors of outputs beside so many rows; each has two sums per row.
constexpr int vectors(int rows) {
  int found = 4;
  while (found > 1 && 2 * found * rows > kSums) found /= 2;
  return found;
}

// kLanes signed bytes as integers.
inline IntVec load_bytes(const int8_t* at) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
#else
  typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
  ByteVec bytes;
  std::memcpy(&bytes, at, sizeof bytes);
  return __builtin_convertvector(bytes, IntVec);
#endif
}

// The weights of a pair of inputs for kLanes outputs.
template <int kBits>
inline void pair_weights(const int8_t* at, Vec* first, Vec* second) {
  const IntVec bytes = load_bytes(at);
  if constexpr (kBits == 8) {
    *first = __builtin_convertvector(bytes, Vec);
    *second = __builtin_convertvector(load_bytes(at + kPanel), Vec);
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

template <typename S, typename T>
struct Job {
  const float* x;  // [rows, 2 * pairs]
  const int8_t* weight;
  const S* scales;  // [panels, groups, 16]
  const T* bias;    // [outputs] or null
  T* out;
  int64_t outputs, pairs, group;  // group: pairs that share a scale
};

template <int kBits, int kRows, int kVectors, typename S, typename T>
__attribute__((noinline)) void tile(const Job<S, T>& job, int64_t row, int64_t column) {
  constexpr int64_t kStep = kPanel * kBits / 4;  // bytes of a panel for a pair
  const int64_t groups = (job.pairs + job.group - 1) / job.group, stride = 2 * job.pairs;
  const int8_t* weights[kVectors];
  const S* scales[kVectors];
  Vec totals[kRows][kVectors];
  float start[kVectors * kLanes] = {};
  if (job.bias != nullptr)
    for (int64_t i = 0; i < std::min<int64_t>(kVectors * kLanes, job.outputs - column); ++i) start[i] = widen(job.bias[column + i]);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = column + v * kLanes, panel = at / kPanel, lane = at % kPanel;
    weights[v] = job.weight + panel * job.pairs * kStep + lane;
    scales[v] = job.scales + panel * groups * kPanel + lane;
    for (int r = 0; r < kRows; ++r) totals[r][v] = load(start + v * kLanes);
  }
  const float* x = job.x + row * stride;
  for (int64_t group = 0; group < groups; ++group) {
    Vec first[kRows][kVectors] = {}, second[kRows][kVectors] = {};
    for (int64_t pair = group * job.group; pair < std::min(job.pairs, (group + 1) * job.group); ++pair)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int8_t* at = weights[v] + pair * kStep;
        __builtin_prefetch(at + kAhead);  // no fault past the end
        Vec low, high;
        pair_weights<kBits>(at, &low, &high);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const float* inputs = x + r * stride + 2 * pair;
          first[r][v] = multiply_add(splat(inputs[0]), low, first[r][v]);
          second[r][v] = multiply_add(splat(inputs[1]), high, second[r][v]);
        }
      }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec scale = load(scales[v] + group * kPanel);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) totals[r][v] = multiply_add(first[r][v] + second[r][v], scale, totals[r][v]);
    }
  }
  const int64_t count = std::min<int64_t>(kVectors * kLanes, job.outputs - column);
  for (int r = 0; r < kRows; ++r) {
    T all[kVectors * kLanes];
    for (int v = 0; v < kVectors; ++v) store(all + v * kLanes, totals[r][v]);
    std::memcpy(job.out + (row + r) * job.outputs + column, all, count * sizeof(T));
  }
}

template <int kBits, int kRows, typename S, typename T>
void rows_of(const Job<S, T>& job, int64_t row, int64_t column, int count) {
  for (int v = 0; v < count;)
    if (count - v >= vectors(kRows))
      tile<kBits, kRows, vectors(kRows)>(job, row, column + v * kLanes), v += vectors(kRows);
    else
      tile<kBits, kRows, 1>(job, row, column + v * kLanes), ++v;
}

template <int kBits, typename S, typename T>
void quantized_linear(const T* x, Job<S, T> job, int64_t rows, int64_t inputs) {
  const int64_t stride = 2 * job.pairs, block = std::min(rows, kBlock);
  const std::unique_ptr<float[]> wide(new float[block * stride]());
  const int64_t vectors_there = (job.outputs + kLanes - 1) / kLanes;
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t i = 0; i < inputs; ++i) wide[r * stride + i] = widen(x[(begin + r) * inputs + i]);
    Job<S, T> part = job;
    part.x = wide.get(), part.out = job.out + begin * job.outputs;
    for (int64_t v = 0; v < vectors_there; v += vectors(1)) {
      const int here = static_cast<int>(std::min<int64_t>(vectors(1), vectors_there - v));
      int64_t row = 0;
      for (; row + kMaxRows <= count; row += kMaxRows) rows_of<kBits, kMaxRows>(part, row, v * kLanes, here);
      switch (count - row) {
        case 3: rows_of<kBits, 3>(part, row, v * kLanes, here); break;
        case 2: rows_of<kBits, 2>(part, row, v * kLanes, here); break;
        case 1: rows_of<kBits, 1>(part, row, v * kLanes, here); break;
      }
    }
  }
}

}  // namespace

extern "C" void penstock_quantized_linear(int dtype, int scale_dtype, int bits, const void* x, const void* weight, const void* scales,
                                          const void* bias, void* out, int64_t rows, int64_t outputs, int64_t inputs, int64_t group) {
  const auto run = [&](auto* to, auto* scale) {
    using T = std::remove_pointer_t<decltype(to)>;
    using S = std::remove_const_t<std::remove_pointer_t<decltype(scale)>>;
    const Job<S, T> job{nullptr, static_cast<const int8_t*>(weight), scale, static_cast<const T*>(bias), to,
                        outputs, (inputs + 1) / 2, group / 2};
    if (bits == 4)
      quantized_linear<4>(static_cast<const T*>(x), job, rows, inputs);
    else
      quantized_linear<8>(static_cast<const T*>(x), job, rows, inputs);
  };
  const auto with_scales = [&](auto* to) {
    if (scale_dtype == 0)
      run(to, static_cast<const float*>(scales));
    else
      run(to, static_cast<const BFloat16*>(scales));
  };
  if (dtype == 0)
    with_scales(static_cast<float*>(out));
  else
    with_scales(static_cast<BFloat16*>(out));
}
