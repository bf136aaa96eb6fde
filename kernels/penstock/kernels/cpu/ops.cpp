// The operations of a model step on a CPU, in one thread, behind a C ABI.
//
// Every reduction runs in one fixed order over vectors of kLanes lanes, whatever the pointers' alignment and the rest of the batch, so that a
// token's result has the same bits in any batch. So no -ffast-math: it would let the compiler choose the order.
//
// dtype: 0 is float32, 1 is bfloat16. Sizes and strides are in elements.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "vector.h"

namespace {

using namespace penstock;

constexpr int kKeyTile = 64;    // keys that a query meets at a time; part of the result's bits
constexpr int kQueryTile = 32;  // tokens that share a converted tile of keys; not part of the bits
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t IntQuarter __attribute__((vector_size(16)));

// The first steps of a sum in a tree of fixed shape: halves are added until four lanes are left.
inline Quarter fold(Vec x) {
#if defined(__AVX512F__)
  const __m256 half = _mm512_castps512_ps256((__m512)x) + _mm512_extractf32x8_ps((__m512)x, 1);
  return (Quarter)(_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return (Quarter)(_mm256_castps256_ps128((__m256)x) + _mm256_extractf128_ps((__m256)x, 1));
#else
  return (Quarter)x;
#endif
}

inline float sum(Vec x) {
  const Quarter four = fold(x);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The sums of four vectors, in the same tree each.
inline Quarter sums(const Vec* x) {
  const Quarter a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
  const IntQuarter low{0, 4, 1, 5}, high{2, 6, 3, 7}, even{0, 1, 4, 5}, odd{2, 3, 6, 7};
  const Quarter ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
  const Quarter cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
  return __builtin_shuffle(ab, cd, even) + __builtin_shuffle(ab, cd, odd);
}

inline float maximum_of(const float* x, int64_t n) {
  Vec most = load(x);
  for (int64_t i = kLanes; i < n; i += kLanes) {
    const Vec next = load(x + i);
    most = next > most ? next : most;
  }
  float lanes[kLanes];
  store(lanes, most);
  return *std::max_element(lanes, lanes + kLanes);
}

inline int64_t round_up(int64_t x) { return (x + kLanes - 1) / kLanes * kLanes; }

// n elements to float, the rest up to whole vectors 0.
template <typename T>
inline void widen_row(const T* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i));
  for (; i < n; ++i) out[i] = widen(x[i]);
  for (; i < round_up(n); ++i) out[i] = 0.0f;
}

template <typename T>
inline void narrow_row(const float* x, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i));
  for (; i < n; ++i) narrow(x[i], out + i);
}

// The factor that normalises a padded row.
inline float inverse_rms(const float* row, int64_t d, float eps) {
  Vec squares{};
  for (int64_t i = 0; i < d; i += kLanes) squares += load(row + i) * load(row + i);
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(d) + eps);
}

template <typename T>
void rms_norm(const T* x, const T* residual, const float* weight, T* out, T* total, int64_t n, int64_t d, float eps) {
  std::vector<float> row(round_up(d));
  for (int64_t t = 0; t < n; ++t, x += d, out += d) {
    if (residual == nullptr) {
      widen_row(x, d, row.data());
    } else {
      int64_t i = 0;
      for (; i + kLanes <= d; i += kLanes) store(total + i, load(x + i) + load(residual + i));
      for (; i < d; ++i) narrow(widen(x[i]) + widen(residual[i]), total + i);
      widen_row(total, d, row.data());
      residual += d, total += d;
    }
    const float factor = inverse_rms(row.data(), d, eps);
    for (int64_t i = 0; i < d; ++i) row[i] = row[i] * factor * weight[i];
    narrow_row(row.data(), d, out);
  }
}

// g times the logistic function of z. The exponential is of -|z|, which cannot overflow; a NaN stays one.
inline Vec logistic_times(Vec g, Vec z) {
  const Vec e = exp_nonpositive(z < 0.0f ? z : -z);
  return g * (z < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// What a gated MLP makes of its gate and its up projection.
struct SiluGate {
  Vec operator()(Vec g, Vec up) const { return logistic_times(g, g) * up; }
};
struct GeluTanhGate {
  Vec operator()(Vec g, Vec up) const { return logistic_times(g, 1.5957691216057308f * (g + 0.044715f * g * g * g)) * up; }
};
struct ClampedGate {
  float slope, limit;
  Vec operator()(Vec g, Vec up) const {
    const Vec gate = g > limit ? splat(limit) : g, low = up < -limit ? splat(-limit) : up;
    return logistic_times(gate, slope * gate) * ((low > limit ? splat(limit) : low) + 1.0f);
  }
};

template <typename T, typename Gate>
void gated_mul(const T* x, T* out, int64_t n, int64_t d, Gate gated) {
  std::vector<float> row(2 * round_up(d));
  float *gate = row.data(), *up = gate + round_up(d);
  for (int64_t t = 0; t < n; ++t, x += 2 * d, out += d) {
    widen_row(x, d, gate);
    widen_row(x + d, d, up);
    for (int64_t i = 0; i < d; i += kLanes) store(gate + i, gated(load(gate + i), load(up + i)));
    narrow_row(gate, d, out);
  }
}

// A row of a cache that has a scale for each token and head: its whole numbers, and behind them the scale, a float32.
struct ScaledInt8 {
  int8_t number;
};
constexpr float kInt8Most = 127.0f;

// Elements from one row of a cache to the next.
template <typename C>
constexpr int64_t row_size(int64_t d) {
  return std::is_same_v<C, ScaledInt8> ? d + static_cast<int64_t>(sizeof(float)) : d;
}

// Rows of the cache, from and to float; the rows in float have room for whole vectors.
template <typename C>
inline void keep_row(const float* row, int64_t d, C* out) {
  narrow_row(row, d, out);
}
inline void keep_row(float* row, int64_t d, ScaledInt8* out) {
  std::fill(row + d, row + round_up(d), 0.0f);
  Vec most{}, check{};  // whatever is not finite makes the check a NaN, and with it the scale
  for (int64_t i = 0; i < d; i += kLanes) {
    const Vec x = load(row + i), size = x < 0.0f ? -x : x;
    most = size > most ? size : most, check += x * 0.0f;
  }
  float lanes[kLanes];
  store(lanes, most);
  const float largest = *std::max_element(lanes, lanes + kLanes);
  const float scale = std::max(largest / kInt8Most, std::numeric_limits<float>::min()) + sum(check);
  // To nearest, ties to even: no number is beyond 127, since the largest is divided by its own 127th part.
  for (int64_t i = 0; i < d; i += kLanes) store(row + i, load(row + i) / scale + 12582912.0f);
  for (int64_t i = 0; i < d; ++i) out[i].number = static_cast<int8_t>(bit_cast<int32_t>(row[i]) - bit_cast<int32_t>(12582912.0f));
  std::memcpy(out + d, &scale, sizeof scale);
}
template <typename C>
inline void read_row(const C* from, int64_t d, float* row) {
  widen_row(from, d, row);
}
inline void read_row(const ScaledInt8* from, int64_t d, float* row) {
  float scale;
  std::memcpy(&scale, from + d, sizeof scale);
  const int8_t* numbers = reinterpret_cast<const int8_t*>(from);
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) store(row + i, __builtin_convertvector(load_bytes(numbers + i), Vec) * scale);
  for (; i < d; ++i) row[i] = static_cast<float>(numbers[i]) * scale;
  for (; i < round_up(d); ++i) row[i] = 0.0f;
}

// One head into `row`: normalised where there is a weight, and the first 2 * half elements rotated.
template <typename T>
void rotate(const T* x, const float* weight, float eps, const float* cos, const float* sin, int64_t d, int64_t half, float* row) {
  widen_row(x, d, row);
  if (weight != nullptr) {
    const float factor = inverse_rms(row, d, eps);
    for (int64_t i = 0; i < d; ++i) row[i] = row[i] * factor * weight[i];
  }
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec first = load(row + i), second = load(row + half + i);
    store(row + i, first * load(cos + i) - second * load(sin + i));
    store(row + half + i, second * load(cos + i) + first * load(sin + i));
  }
  for (; i < half; ++i) {
    const float first = row[i], second = row[i + half];
    row[i] = first * cos[i] - second * sin[i];
    row[i + half] = second * cos[i] + first * sin[i];
  }
}

// A row divided by what the checkpoint says of its head, once, before it is rounded.
template <typename C>
inline void keep_scaled(float* row, int64_t d, float scale, C* out) {
  if (scale != 1.0f)
    for (int64_t i = 0; i < d; ++i) row[i] /= scale;
  keep_row(row, d, out);
}

struct CacheShape {
  int64_t block_stride, kv_heads, block_size, d, row;  // row: elements from one token to the next
  const float* scales;  // [2, kv_heads], of what the cache holds keys and values are these times; null: all are 1
  float scale(int64_t kind, int64_t head) const { return scales == nullptr ? 1.0f : scales[kind * kv_heads + head]; }
  int64_t offset(int64_t block, int64_t kind, int64_t head, int64_t token) const {
    return block * block_stride + ((kind * kv_heads + head) * block_size + token) * row;
  }
};

// One head as it is, in the cache's dtype.
template <typename T, typename C>
void write(const T* x, int64_t d, float scale, float* row, C* out) {
  if constexpr (std::is_same_v<T, C>) {
    std::memcpy(out, x, d * sizeof(T));
  } else {
    widen_row(x, d, row);
    keep_scaled(row, d, scale, out);
  }
}

template <typename T, typename C>
void prepare_kv(const T* q, const T* k, const T* v, int64_t q_stride, int64_t k_stride, int64_t v_stride, T* q_out, C* cache,
                CacheShape shape, const int64_t* slots, const float* cos, const float* sin, int64_t angle_stride,
                const float* q_weight, const float* k_weight, float eps, int64_t n, int64_t heads, int64_t rotary_size) {
  const int64_t d = shape.d, half = rotary_size / 2;
  std::vector<float> room(round_up(d));
  float* row = room.data();
  for (int64_t t = 0; t < n; ++t, cos += angle_stride, sin += angle_stride) {
    for (int64_t h = 0; h < heads; ++h) {
      rotate(q + t * q_stride + h * d, q_weight, eps, cos, sin, d, half, row);
      narrow_row(row, d, q_out + (t * heads + h) * d);
    }
    const int64_t block = slots[t] / shape.block_size, token = slots[t] % shape.block_size;
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      rotate(k + t * k_stride + h * d, k_weight, eps, cos, sin, d, half, row);
      keep_scaled(row, d, shape.scale(0, h), cache + shape.offset(block, 0, h, token));
      if (v == nullptr) continue;  // latent attention: values are a part of the keys
      write(v + t * v_stride + h * d, d, shape.scale(1, h), row, cache + shape.offset(block, 1, h, token));
    }
  }
}

// Online softmax of one query: running maximum, sum and weighted values.
struct State {
  float maximum, total;
};

constexpr int kChains = 4;  // keys whose scores are added at a time: independent chains of additions hide an addition's latency
constexpr int kWide = 4;    // vectors of an accumulator that are added to at a time

// Scores of the keys [begin, end), and of up to three before and after, which mean nothing.
inline void score(const float* query, const float* keys, int64_t width, int64_t begin, int64_t end, float* scores) {
  for (int64_t j = begin / kChains * kChains; j < end; j += kChains) {
    Vec products[kChains] = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec q = load(query + i);
#pragma GCC unroll 8
      for (int c = 0; c < kChains; ++c) products[c] = multiply_add(q, load(keys + (j + c) * width + i), products[c]);
    }
    for (int c = 0; c < kChains; c += 4) {
      const Quarter found = sums(products + c);
      std::memcpy(scores + j + c, &found, sizeof found);
    }
  }
}

// Adds the weighted values of the keys [begin, end) to N vectors of the accumulator, each as two chains: every other key.
template <int N>
inline void accumulate(const float* weights, const float* values, int64_t width, int64_t begin, int64_t end, float shrink, float* acc) {
  Vec total[N], other[N] = {};
  for (int i = 0; i < N; ++i) total[i] = load(acc + i * kLanes) * shrink;
  int64_t j = begin;
  for (; j + 2 <= end; j += 2)
    for (int i = 0; i < N; ++i) {
      total[i] = multiply_add(splat(weights[j]), load(values + j * width + i * kLanes), total[i]);
      other[i] = multiply_add(splat(weights[j + 1]), load(values + (j + 1) * width + i * kLanes), other[i]);
    }
  if (j < end)
    for (int i = 0; i < N; ++i) total[i] = multiply_add(splat(weights[j]), load(values + j * width + i * kLanes), total[i]);
  for (int i = 0; i < N; ++i) store(acc + i * kLanes, total[i] + other[i]);
}

// s becomes cap * tanh(s / cap).
inline void soft_cap(float* scores, float cap) {
  for (int64_t j = 0; j < kKeyTile; j += kLanes) {
    const Vec s = load(scores + j), e = exp_nonpositive((s < 0.0f ? s : -s) * (2.0f / cap));
    const Vec capped = cap * (1.0f - e) / (1.0f + e);
    store(scores + j, s < 0.0f ? -capped : capped);
  }
}

// Takes in the keys [begin, count) of a tile, rows of `width` floats in `keys` and `values`, of which those of a value are the first
// `value_width`; `query` is scaled.
inline void attend_tile(const float* query, const float* keys, const float* values, int64_t width, int64_t value_width, int64_t begin,
                        int64_t count, float softcap, State* state, float* acc) {
  alignas(64) float scores[kKeyTile];
  score(query, keys, width, begin, count, scores);
  if (softcap != 0.0f) {
    std::fill(scores, scores + begin, 0.0f);
    std::fill(scores + count, scores + kKeyTile, 0.0f);
    soft_cap(scores, softcap);
  }
  std::fill(scores, scores + begin, kMinusInfinity);
  std::fill(scores + count, scores + kKeyTile, kMinusInfinity);
  const float maximum = std::max(state->maximum, maximum_of(scores, kKeyTile));
  Vec total{};
  for (int64_t j = 0; j < kKeyTile; j += kLanes) {
    const Vec weights = exp_nonpositive(load(scores + j) - maximum);
    store(scores + j, weights);
    total += weights;
  }
  const float shrink = exp_nonpositive(splat(state->maximum - maximum))[0];
  state->maximum = maximum;
  state->total = state->total * shrink + sum(total);
  int64_t i = 0;
  for (; i + kWide * kLanes <= value_width; i += kWide * kLanes)
    accumulate<kWide>(scores, values + i, width, begin, count, shrink, acc + i);
  for (; i < value_width; i += kLanes) accumulate<1>(scores, values + i, width, begin, count, shrink, acc + i);
}

template <typename T, typename C>
struct Attention {
  const T* q;
  T* out;
  const C* cache;
  CacheShape shape;
  int64_t heads;
  const float* sinks;  // by head, the score of one more key, whose value is zero; nullptr: there is none
  const int32_t* ends;  // by query, the position after the last key that it sees; nullptr: each sees up to itself
  float scale, softcap;
  int64_t window;      // keys that a query sees, itself included; 0: all before it
  int64_t value_size;  // elements of a value that are the last of its key (latent attention); 0: values lie in the cache
  int64_t width, group;
  std::vector<float> queries, keys, values, acc;
  std::vector<State> states;

  // `tile`: tokens of a run at most.
  Attention(const T* q, T* out, const C* cache, CacheShape shape, int64_t tile, int64_t heads, const float* sinks,
            const int32_t* ends, int64_t window, int64_t value_size, float scale, float softcap)
      : q(q), out(out), cache(cache), shape(shape), heads(heads), sinks(sinks), ends(ends), scale(scale), softcap(softcap),
        window(window), value_size(value_size), width(round_up(shape.d)), group(heads / shape.kv_heads), queries(tile * group * width),
        keys(kKeyTile * width + kLanes), values(value_size ? 0 : kKeyTile * width),
        acc(queries.size()), states(tile * group) {}

  // The first key that a query at this position sees.
  int64_t window_begin(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }

  // The position after the last key that query `first + t` of the batch sees, which stands at `position + t`.
  int64_t seen_end(int64_t first, int64_t position, int64_t t) const { return ends != nullptr ? ends[first + t] : position + t + 1; }

  // Queries [first, first + count) of the batch, at positions from `position` on, against one key head.
  // Attention is linear in the values, and its scores in the keys, so that scales meet the queries and the results alone.
  void run(int64_t first, int64_t count, int64_t position, const int32_t* blocks, int64_t head) {
    const float query_scale = scale * shape.scale(0, head), value_scale = shape.scale(value_size ? 0 : 1, head);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t g = 0; g < group; ++g) {
        float* query = &queries[(t * group + g) * width];
        widen_row(q + ((first + t) * heads + head * group + g) * shape.d, shape.d, query);
        for (int64_t i = 0; i < shape.d; ++i) query[i] *= query_scale;
        states[t * group + g] = {kMinusInfinity, 0.0f};
      }
    std::fill(acc.begin(), acc.begin() + count * group * width, 0.0f);
    const int64_t out_size = value_size ? value_size : shape.d, value_width = round_up(out_size);
    const float* tile_values = value_size ? keys.data() + (shape.d - value_size) : values.data();
    // Tiles begin at multiples of their size, wherever the window does, so that a query's tiles are the same in every chunk.
    // Neither the first nor the last key that a query sees lies before those of the query before it.
    const int64_t oldest = window_begin(position), last = seen_end(first, position, count - 1);
    for (int64_t start = oldest / kKeyTile * kKeyTile; start < last; start += kKeyTile) {
      const int64_t present = std::min<int64_t>(kKeyTile, last - start);
      convert(start, std::max<int64_t>(0, oldest - start), present, blocks, head);
      for (int64_t t = ends != nullptr ? 0 : std::max<int64_t>(0, start - position); t < count; ++t) {
        const int64_t begin = std::max<int64_t>(0, window_begin(position + t) - start);
        const int64_t end = std::min<int64_t>(present, seen_end(first, position, t) - start);
        if (end <= 0) continue;  // this query sees nothing of the tile yet
        if (begin >= end) break;  // this query's window has left the tile behind, and so have those after it
        for (int64_t row = t * group; row < (t + 1) * group; ++row)
          attend_tile(&queries[row * width], keys.data(), tile_values, width, value_width, begin, end, softcap, &states[row],
                      &acc[row * width]);
      }
    }
    for (int64_t row = 0; row < count * group; ++row) {
      T* target = out + ((first + row / group) * heads + head * group + row % group) * out_size;
      float* result = &acc[row * width];
      if (sinks != nullptr) add_sink(sinks[head * group + row % group], &states[row], result);
      for (int64_t i = 0; i < out_size; ++i) result[i] = result[i] / states[row].total * value_scale;
      narrow_row(result, out_size, target);
    }
  }

  void add_sink(float sink, State* state, float* result) const {
    const float maximum = std::max(state->maximum, sink);
    const float shrink = exp_nonpositive(splat(state->maximum - maximum))[0];
    state->total = state->total * shrink + exp_nonpositive(splat(sink - maximum))[0];
    for (int64_t i = 0; i < shape.d; ++i) result[i] *= shrink;
  }

  void convert(int64_t start, int64_t begin, int64_t count, const int32_t* blocks, int64_t head) {
    for (int64_t j = begin; j < count; ++j) {
      const int64_t block = blocks[(start + j) / shape.block_size], token = (start + j) % shape.block_size;
      read_row(cache + shape.offset(block, 0, head, token), shape.d, &keys[j * width]);
      if (!value_size) read_row(cache + shape.offset(block, 1, head, token), shape.d, &values[j * width]);
    }
  }
};

template <typename T, typename C>
void paged_attention(const T* q, T* out, const C* cache, CacheShape shape, const int32_t* query_start_loc, const int32_t* seq_lens,
                     const int32_t* block_table, const float* sinks, const int32_t* ends, int64_t table_width, int64_t requests,
                     int64_t heads, int64_t window, int64_t value_size, float scale, float softcap) {
  int64_t longest = 0;
  for (int64_t r = 0; r < requests; ++r) longest = std::max<int64_t>(longest, query_start_loc[r + 1] - query_start_loc[r]);
  Attention<T, C> attention(q, out, cache, shape, std::min<int64_t>(kQueryTile, longest), heads, sinks, ends, window, value_size, scale,
                            softcap);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t begin = query_start_loc[r], end = query_start_loc[r + 1], computed = seq_lens[r] - (end - begin);
    for (int64_t head = 0; head < shape.kv_heads; ++head)
      for (int64_t first = begin; first < end; first += kQueryTile)
        attention.run(first, std::min<int64_t>(kQueryTile, end - first), computed + first - begin, block_table + r * table_width, head);
  }
}

}  // namespace

#define PENSTOCK_BOTH(call)  \
  if (dtype == 0) {          \
    using T = float;         \
    call;                    \
  } else {                   \
    using T = BFloat16;      \
    call;                    \
  }
// The same of a model and its cache, T and C, as `native.py` numbers the pairs.
#define PENSTOCK_PAIR(number, model, kept, call) \
  case number: {                                 \
    using T = model;                             \
    using C = kept;                              \
    call;                                        \
  } break;
#define PENSTOCK_WITH_CACHE(call)                    \
  switch (dtype) {                                   \
    PENSTOCK_PAIR(0, float, float, call)             \
    PENSTOCK_PAIR(1, BFloat16, BFloat16, call)       \
    PENSTOCK_PAIR(2, float, BFloat16, call)          \
    PENSTOCK_PAIR(3, BFloat16, float, call)          \
    PENSTOCK_PAIR(4, float, E4m3, call)              \
    PENSTOCK_PAIR(5, BFloat16, E4m3, call)           \
    PENSTOCK_PAIR(6, float, E5m2, call)              \
    PENSTOCK_PAIR(7, BFloat16, E5m2, call)           \
    PENSTOCK_PAIR(8, float, ScaledInt8, call)        \
    PENSTOCK_PAIR(9, BFloat16, ScaledInt8, call)     \
  }
#define IN(x) static_cast<const T*>(x)
#define OUT(x) static_cast<T*>(x)

extern "C" {

void penstock_rms_norm(int dtype, const void* x, const float* weight, void* out, int64_t n, int64_t d, float eps) {
  PENSTOCK_BOTH(rms_norm<T>(IN(x), nullptr, weight, OUT(out), nullptr, n, d, eps))
}

void penstock_add_rms_norm(int dtype, const void* x, const void* residual, const float* weight, void* out, void* total, int64_t n,
                           int64_t d, float eps) {
  PENSTOCK_BOTH(rms_norm<T>(IN(x), IN(residual), weight, OUT(out), OUT(total), n, d, eps))
}

void penstock_silu_mul(int dtype, const void* x, void* out, int64_t n, int64_t d) {
  PENSTOCK_BOTH(gated_mul(IN(x), OUT(out), n, d, SiluGate{}))
}

void penstock_gelu_tanh_mul(int dtype, const void* x, void* out, int64_t n, int64_t d) {
  PENSTOCK_BOTH(gated_mul(IN(x), OUT(out), n, d, GeluTanhGate{}))
}

void penstock_clamped_swiglu(int dtype, const void* x, void* out, int64_t n, int64_t d, float slope, float limit) {
  PENSTOCK_BOTH(gated_mul(IN(x), OUT(out), n, d, (ClampedGate{slope, limit})))
}

void penstock_prepare_kv(int dtype, const void* q, const void* k, const void* v, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                         void* q_out, void* cache, int64_t block_stride, const int64_t* slots, const float* cos, const float* sin,
                         int64_t angle_stride, const float* q_weight, const float* k_weight, const float* scales, float eps, int64_t n,
                         int64_t heads, int64_t kv_heads, int64_t block_size, int64_t d, int64_t rotary_size) {
  PENSTOCK_WITH_CACHE((prepare_kv<T, C>(IN(q), IN(k), IN(v), q_stride, k_stride, v_stride, OUT(q_out), static_cast<C*>(cache),
                                        CacheShape{block_stride, kv_heads, block_size, d, row_size<C>(d), scales}, slots, cos, sin,
                                        angle_stride, q_weight, k_weight, eps, n, heads, rotary_size)))
}

void penstock_paged_attention(int dtype, const void* q, void* out, const void* cache, int64_t block_stride,
                              const int32_t* query_start_loc, const int32_t* seq_lens, const int32_t* block_table, const float* sinks,
                              const int32_t* ends, const float* scales, int64_t table_width, int64_t requests, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t d,
                              int64_t window, int64_t value_size, float scale, float softcap) {
  PENSTOCK_WITH_CACHE((paged_attention<T, C>(IN(q), OUT(out), static_cast<const C*>(cache),
                                             CacheShape{block_stride, kv_heads, block_size, d, row_size<C>(d), scales}, query_start_loc, seq_lens,
                                             block_table, sinks, ends, table_width, requests, heads, window, value_size, scale, softcap)))
}

}  // extern "C"
