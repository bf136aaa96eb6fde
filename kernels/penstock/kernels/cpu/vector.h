// Vectors of float32 as wide as the instruction set has them, and bfloat16 beside them. What differs among instruction sets is here; all
// other code is the compiler's vector extensions.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace penstock {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kRegisters = 16;
#elif defined(__ARM_NEON)
constexpr int kVectorBytes = 16, kRegisters = 32;
#else
constexpr int kVectorBytes = 16, kRegisters = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));  // a 16-bit lane for each lane of a Vec

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

// Elements of T in a word of 32 bits.
template <typename T>
constexpr int64_t kWord = sizeof(uint32_t) / sizeof(T);

template <typename To, typename From>
inline To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

inline Vec splat(float x) { return x - Vec{}; }  // + would not be dropped: it changes -0
inline IntVec splat_word(const void* at) {
  int32_t word;
  std::memcpy(&word, at, sizeof word);
  return IntVec{} + word;
}
inline IntVec load_words(const void* at) {
  IntVec out;
  std::memcpy(&out, at, sizeof out);
  return out;
}

// a * b + c, rounded once where the instruction set can.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// e^x for x <= 0 with a relative error of about 1e-7: 2^n times a polynomial (Cephes' expf); 0 below the smallest normal number.
inline Vec exp_nonpositive(Vec x) {
  const Vec low = splat(-87.0f);
  const IntVec tiny = x < low;
  const Vec clamped = tiny ? low : x;
  const Vec shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded quotient
  const Vec n = shifted - 12582912.0f;
  const Vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  const Vec value = p * r * r + r + 1.0f;
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return tiny ? Vec{} : value * scale;
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kDotsPairs = true;
#else
constexpr bool kDotsPairs = false;
#endif

// The first and the second of each pair of bfloat16, as float32.
inline Vec first_of_pair(IntVec pairs) { return bit_cast<Vec>(pairs << 16); }
inline Vec second_of_pair(IntVec pairs) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Vec)_mm256_blend_epi16(_mm256_setzero_si256(), (__m256i)pairs, 0xaa);  // a mask would take one register more
#else
  return bit_cast<Vec>(pairs & static_cast<int32_t>(0xffff0000u));
#endif
}

// Adds to each lane of `sum` the product of two words: of one float32 each, or of two bfloat16 each.
template <typename T>
inline Vec add_product(Vec sum, IntVec a, IntVec b) {
  if constexpr (kWord<T> == 1) return multiply_add(bit_cast<Vec>(a), bit_cast<Vec>(b), sum);
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Vec)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_s32((int32x4_t)a), vreinterpretq_bf16_s32((int32x4_t)b));
#else
  return multiply_add(second_of_pair(a), second_of_pair(b), multiply_add(first_of_pair(a), first_of_pair(b), sum));
#endif
}

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, BFloat16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline Vec load(const float* p) {
  Vec out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
inline Vec load(const BFloat16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  return bit_cast<Vec>(__builtin_convertvector(half, IntVec) << 16);
#endif
}

inline Vec load(const Float16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__ARM_NEON)
  return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
#else
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  const IntVec wide = __builtin_convertvector(half, IntVec);
  // A float32 of the same exponent and mantissa, whose bias is greater by 112. No infinity or NaN is expected.
  return bit_cast<Vec>(((wide & 0x8000) << 16) | ((wide & 0x7fff) << 13)) * 0x1p112f;
#endif
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

// kLanes numbers in E4M3, each divided by kE4m3Unit: they are read as float16 of the same sign, exponent and mantissa. A NaN becomes 480.
constexpr float kE4m3Unit = 256.0f;
inline Vec load_e4m3(const int8_t* at) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return (Vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
#elif defined(__AVX2__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
  return (Vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
#else
  const IntVec bytes = load_bytes(at);
  return bit_cast<Vec>((bytes & static_cast<int32_t>(0x80000000u)) | ((bytes & 0x7f) << 20)) * 0x1p112f;
#endif
}

inline Vec load(const E4m3* p) { return load_e4m3(reinterpret_cast<const int8_t*>(p)) * kE4m3Unit; }

// E5M2 is the upper half of float16.
inline Vec load(const E5m2* p) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  return (Vec)_mm512_cvtph_ps(wide);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 8));
#else
  const IntVec bytes = load_bytes(reinterpret_cast<const int8_t*>(p)), magnitude = bytes & 0x7f;
  const IntVec sign = bytes & static_cast<int32_t>(0x80000000u), huge = magnitude > 0x7b;  // infinity and NaN
  const Vec finite = bit_cast<Vec>(magnitude << 21) * 0x1p112f;
  return bit_cast<Vec>((huge ? (magnitude << 21) | 0x7f800000 : bit_cast<IntVec>(finite)) | sign);
#endif
}

inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline void store(BFloat16* p, Vec x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
  // To nearest, ties to even.
  const IntVec bits = bit_cast<IntVec>(x), rounded = bits + 0x7fff + ((bits >> 16) & 1), nan = IntVec{} + 0x7fc00000;
  const IntVec high = x == x ? rounded : nan;
#if defined(__AVX2__)
  const __m256i words = _mm256_srli_epi32((__m256i)high, 16);
  const __m128i half = _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08));
#else
  const HalfVec half = __builtin_convertvector(high >> 16, HalfVec);
#endif
#endif
  std::memcpy(p, &half, sizeof half);
}

typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));

// Codes of floating-point numbers in eight bits, to nearest, ties to even. What is beyond the greatest number becomes it, and NaN
// becomes `nan`.
//
// `kMantissa`: bits after the point. `kBias`: of the exponent; the smallest normal number is 2^(1 - kBias), and below it a code counts
// 2^(1 - kBias - kMantissa).
template <int kMantissa, int kBias>
inline ByteVec to_eight_bits(Vec x, float greatest, int32_t nan) {
  constexpr int kDropped = 23 - kMantissa;
  const IntVec sign = (bit_cast<IntVec>(x) >> 24) & 0x80;
  Vec magnitude = bit_cast<Vec>(bit_cast<IntVec>(x) & 0x7fffffff);
  magnitude = magnitude < greatest ? magnitude : splat(greatest);
  const IntVec bits = bit_cast<IntVec>(magnitude);
  const IntVec normal = ((bits + ((1 << (kDropped - 1)) - 1) + ((bits >> kDropped) & 1)) >> kDropped) - ((127 - kBias) << kMantissa);
  const float shift = bit_cast<float>((127 + 24 - kBias - kMantissa) << 23);  // its last bit is worth one code
  const IntVec small = bit_cast<IntVec>(magnitude + shift) - bit_cast<int32_t>(shift);
  const IntVec code = magnitude < bit_cast<float>((128 - kBias) << 23) ? small : normal;
  return __builtin_convertvector((x == x ? code : IntVec{} + nan) | sign, ByteVec);
}
inline void store(E4m3* p, Vec x) {
  const ByteVec bytes = to_eight_bits<3, 7>(x, 448.0f, 0x7f);
  std::memcpy(p, &bytes, sizeof bytes);
}
inline void store(E5m2* p, Vec x) {
  const ByteVec bytes = to_eight_bits<2, 15>(x, 57344.0f, 0x7f);
  std::memcpy(p, &bytes, sizeof bytes);
}

// One number, by way of a vector.
template <typename T>
inline float widen(T x) {
  T all[kLanes] = {x};
  return load(all)[0];
}
template <typename T>
inline void narrow(float x, T* out) {
  T all[kLanes];
  store(all, splat(x));
  *out = all[0];
}

// What the sums of `count` columns from `column` on begin with: the bias, or 0 where there is none and beyond the last column.
template <typename T>
inline __attribute__((always_inline)) void begin_sums(const T* bias, int64_t column, int64_t outputs, int64_t count, float* start) {
  const int64_t given = bias == nullptr ? 0 : std::min(count, outputs - column);
  for (int64_t i = 0; i < count; ++i) start[i] = 0.0f;
  for (int64_t i = 0; i < given; ++i) start[i] = widen(bias[column + i]);
}

}  // namespace penstock
