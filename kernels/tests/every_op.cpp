// Calls every compiled operation with made-up inputs in both dtypes and prints what it gives, a number a line: so that a build for another
// architecture can be held to this machine's.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

extern "C" {
void penstock_add_rms_norm(int, const void*, const void*, const float*, void*, void*, int64_t, int64_t, float);
void penstock_silu_mul(int, const void*, void*, int64_t, int64_t);
void penstock_gelu_tanh_mul(int, const void*, void*, int64_t, int64_t);
void penstock_clamped_swiglu(int, const void*, void*, int64_t, int64_t, float, float);
void penstock_prepare_kv(int, const void*, const void*, const void*, int64_t, int64_t, int64_t, void*, void*, int64_t, const int64_t*,
                         const float*, const float*, int64_t, const float*, const float*, const float*, float, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t);
void penstock_linear(int, const void*, const void*, const void*, void*, int64_t, int64_t, int64_t);
void penstock_integer_linear(int, const void*, const int8_t*, const float*, const int32_t*, const int8_t*, const void*, const float*,
                             const float*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int);
void penstock_head_linear(int, const void*, int64_t, int64_t, const void*, int64_t, void*, int64_t, int64_t, int64_t, int64_t);
void penstock_route(int, const void*, const float*, int32_t*, float*, int64_t, int64_t, int64_t, int, int, int64_t, int64_t, int64_t, float);
void penstock_experts(int, const void*, const int32_t*, const float*, const int64_t*, const int64_t*, const int64_t*, const int64_t*, void*,
                      int64_t, int64_t, int64_t, int64_t, int64_t, int, float, float);
void penstock_paged_attention(int, const void*, void*, const void*, int64_t, const int32_t*, const int32_t*, const int32_t*, const float*, const int32_t*,
                              const float*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float);
void penstock_add_lora(int, void*, const void*, const int64_t*, const int64_t*, int64_t, const void*, int64_t, const int64_t*, int64_t,
                       const int64_t*, int64_t, int64_t);
void penstock_sample(int, const void*, int64_t, int64_t, const int32_t*, const int32_t*, const void*, const int64_t*, int64_t, const uint32_t*,
                     int64_t, int, void*, float*, int32_t*);
}

namespace {

uint32_t state = 1;

float any() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
}

std::vector<float> floats(int64_t n) {
  std::vector<float> out(n);
  for (float& x : out) x = any();
  return out;
}

// Of either dtype, in its bytes.
struct Array {
  int dtype;
  std::vector<uint32_t> words;

  Array(int dtype, int64_t n) : dtype(dtype), words(n) {
    for (int64_t i = 0; i < n; ++i) {
      const float x = any();
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      bits &= 0xffff0000u;  // the same numbers in both dtypes
      std::memcpy(static_cast<char*>(data()) + i * size(), reinterpret_cast<char*>(&bits) + 4 - size(), size());
    }
  }
  int64_t size() const { return dtype == 0 ? 4 : 2; }
  void* data() { return words.data(); }

  void print(const char* name) {
    for (size_t i = 0; i < words.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size(), static_cast<char*>(data()) + i * size(), size());
      float x;
      std::memcpy(&x, &bits, 4);
      std::printf("%s %d %.9g\n", name, dtype, x);
    }
  }
};

void run(int dtype) {
  {
    Array x(dtype, 3 * 74), residual(dtype, 3 * 74), out(dtype, 3 * 74), total(dtype, 3 * 74);
    penstock_add_rms_norm(dtype, x.data(), residual.data(), floats(74).data(), out.data(), total.data(), 3, 74, 1e-5f);
    out.print("norm"), total.print("total");
  }
  {
    Array x(dtype, 3 * 148), silu(dtype, 3 * 74), gelu(dtype, 3 * 74), clamped(dtype, 3 * 74);
    penstock_silu_mul(dtype, x.data(), silu.data(), 3, 74);
    penstock_gelu_tanh_mul(dtype, x.data(), gelu.data(), 3, 74);
    penstock_clamped_swiglu(dtype, x.data(), clamped.data(), 3, 74, 1.7f, 0.5f);
    silu.print("silu"), gelu.print("gelu"), clamped.print("clamped");
  }
  for (int64_t rows : {1, 2, 3, 4, 5, 6, 11, 40})
    for (int64_t inputs : {7, 600}) {
      const int64_t padded = (inputs + 1) / 2 * 2;
      Array x(dtype, rows * inputs), weight(dtype, 112 * padded), bias(dtype, 100), out(dtype, rows * 100);
      penstock_linear(dtype, x.data(), weight.data(), bias.data(), out.data(), rows, 100, inputs);
      out.print("linear");
    }
  {
    constexpr int64_t kRows = 7, kOutputs = 37, kPanels = 3, kInputs = 70, kQuads = 18;
    Array x(dtype, kRows * kInputs), bias(dtype, kOutputs), out(dtype, kRows * kOutputs);
    std::vector<int8_t> values(kPanels * kQuads * 64), zeros(kPanels * 16);
    for (int8_t& value : values) value = static_cast<int8_t>(any() * 128.0f);
    for (int8_t& zero : zeros) zero = static_cast<int8_t>(any() * 8.0f);
    std::vector<int32_t> sums(kPanels * 16);
    for (size_t i = 0; i < values.size(); ++i) sums[i / (kQuads * 64) * 16 + i / 4 % 16] += values[i];
    const std::vector<float> scales = floats(kPanels * 16);
    penstock_integer_linear(dtype, x.data(), values.data(), scales.data(), sums.data(), zeros.data(), bias.data(), nullptr, nullptr,
                            out.data(), kRows, kOutputs, kInputs, kInputs, 0, 0);
    out.print("integers");
  }
  {
    constexpr int64_t kTokens = 6, kExperts = 4, kChosen = 2, kHidden = 34, kInner = 24;
    Array logits(dtype, kTokens * kExperts), x(dtype, kTokens * kHidden), out(dtype, kTokens * kHidden);
    const std::vector<float> bias = floats(kExperts);
    std::vector<int32_t> ids(kTokens * kChosen);
    std::vector<float> weights(kTokens * kChosen);
    penstock_route(dtype, logits.data(), bias.data(), ids.data(), weights.data(), kTokens, kExperts, kChosen, 1, 1, 2, 1, 2, 1.5f);
    std::vector<Array> gate_up, down, biases;
    std::vector<int64_t> gate_up_at, down_at, biases_at;
    for (int64_t e = 0; e < kExperts; ++e) gate_up.emplace_back(dtype, 48 * kHidden), down.emplace_back(dtype, 48 * kInner);
    for (int64_t e = 0; e < kExperts; ++e) biases.emplace_back(dtype, 48);
    for (int64_t e = 0; e < kExperts; ++e) {
      gate_up_at.push_back(reinterpret_cast<int64_t>(gate_up[e].data()));
      down_at.push_back(reinterpret_cast<int64_t>(down[e].data()));
      biases_at.push_back(reinterpret_cast<int64_t>(biases[e].data()));
    }
    penstock_experts(dtype, x.data(), ids.data(), weights.data(), gate_up_at.data(), down_at.data(), biases_at.data(), biases_at.data(),
                     out.data(), kTokens, kChosen, kExperts, kHidden, kInner, 2, 1.7f, 0.5f);
    out.print("experts");
  }
  {
    constexpr int64_t kHeads = 4, kKeyHeads = 2, kSize = 40, kBlock = 16, kTokens = 5, kBlocks = 8;
    Array q(dtype, kTokens * kHeads * kSize), k(dtype, kTokens * kKeyHeads * kSize), v(dtype, kTokens * kKeyHeads * kSize);
    Array rotated(dtype, kTokens * kHeads * kSize), cache(dtype, kBlocks * 2 * kKeyHeads * kBlock * kSize), out(dtype, kTokens * kHeads * kSize);
    const int64_t stride = 2 * kKeyHeads * kBlock * kSize, slots[] = {3 * kBlock + 1, 17, 18, 19, 20};
    const std::vector<float> cos = floats(kTokens * 18), sin = floats(kTokens * 18), norm = floats(kSize);
    penstock_prepare_kv(dtype, q.data(), k.data(), v.data(), kHeads * kSize, kKeyHeads * kSize, kKeyHeads * kSize, rotated.data(),
                        cache.data(), stride, slots, cos.data(), sin.data(), 18, norm.data(), norm.data(), nullptr, 1e-5f, kTokens, kHeads, kKeyHeads,
                        kBlock, kSize, 36);
    rotated.print("rotated"), cache.print("cache");
    const int32_t starts[] = {0, 1, 5}, lens[] = {90, 30}, table[] = {1, 2, 3, 4, 5, 6, 7, 1, 0, 0, 0, 0};
    const std::vector<float> sinks = floats(kHeads);
    penstock_paged_attention(dtype, rotated.data(), out.data(), cache.data(), stride, starts, lens, table, sinks.data(), nullptr, nullptr, 6, 2, kHeads,
                             kKeyHeads, kBlock, kSize, 70, 0, 0.2f, 5.0f);
    out.print("attention");
    constexpr int64_t kRank = 24;
    Array latent(dtype, kTokens * kHeads * kRank), weight(dtype, kHeads * 48 * kRank), heads(dtype, kTokens * kHeads * 40);
    penstock_paged_attention(dtype, rotated.data(), latent.data(), cache.data(), stride, starts, lens, table, nullptr, nullptr, nullptr, 6, 2, kHeads, 1, kBlock,
                             kSize, 0, kRank, 0.2f, 0.0f);
    penstock_head_linear(dtype, latent.data(), kHeads * kRank, kRank, weight.data(), 48 * kRank * weight.size(), heads.data(), kTokens, kHeads,
                         40, kRank);
    latent.print("latent"), heads.print("heads");
  }
  {
    constexpr int64_t kRank = 5, kInputs = 33, kOutputs = 40, kTokens = 9;
    const int64_t a = 16 * (kInputs + 1), b = 48 * (kRank + 1), slot = a + b;
    Array x(dtype, kTokens * kInputs), y(dtype, kTokens * kOutputs), factors(dtype, 2 * slot);
    const int64_t order[] = {0, 2, 3, 4, 5, 6, 1, 7, 8}, starts[] = {0, 6, 9}, parts[] = {0, kOutputs, 0, a}, ranks[] = {kRank, kRank};
    penstock_add_lora(dtype, y.data(), x.data(), order, starts, 2, factors.data(), slot, parts, 1, ranks, kInputs, kOutputs);
    y.print("lora");
  }
  {
    constexpr int64_t kRows = 12, kVocab = 700, kWords = 22, kMasked = 4;
    struct {
      int64_t seed;
      double top_p;
      float temperature, log_min_p;
      int32_t top_k, unused;
    } params[] = {{5, 1.0, 0.0f, -INFINITY, 0, 0}, {6, 1.0, 0.7f, -INFINITY, 0, 0}, {7, 0.9, 0.3f, -INFINITY, 300, 0}, {8, 0.8, 0.2f, -5.0f, 0, 0}};
    Array logits(dtype, kRows * kVocab);
    int32_t rows[kRows], positions[kRows], results[4 * kRows], last_ids[kRows];
    const int64_t masked_at[kMasked] = {2, 5, 8, 11};
    uint32_t masks[kMasked * kWords];
    float thresholds[kRows];
    for (int32_t i = 0; i < kRows; ++i) rows[i] = i % 4, positions[i] = 90 + i;
    for (uint32_t& word : masks) word = 0x5a5a1234u;
    penstock_sample(dtype, logits.data(), kRows, kVocab, rows, positions, params, masked_at, kMasked, masks, kWords, 0, results, thresholds,
                    last_ids);
    for (int64_t i = 0; i < kRows; ++i) std::printf("sampled %d %d\n", dtype, results[4 * i]), std::printf("last id %d %d\n", dtype, last_ids[i]);
  }
}

}  // namespace

int main() {
  run(0);
  run(1);
}
