// Mixture of experts in float32 and bfloat16, in one thread, behind a C ABI: routing, and the experts of each token.
//
// Tokens are sorted by expert, so that each expert's weights are read once a step, and those of an expert without tokens are not read at all.
// Rows of a linear layer do not depend on one another, and a token's results are added up in the order of its choices: so a token's result has
// the same bits in any batch.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "vector.h"

extern "C" {
void penstock_linear(int, const void*, const void*, const void*, void*, int64_t, int64_t, int64_t);
void penstock_quantized_linear(int, int, int, const void*, const void*, const void*, const int8_t*, const void*, void*, int64_t, int64_t,
                               int64_t, int64_t);
void penstock_rounded_inputs(int, const void*, const float*, const float*, void*, int64_t, int64_t, int64_t, int, int);
void penstock_integer_linear(int, const void*, const int8_t*, const float*, const int32_t*, const int8_t*, const void*, const float*,
                             const float*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int);
void penstock_silu_mul(int, const void*, void*, int64_t, int64_t);
void penstock_gelu_tanh_mul(int, const void*, void*, int64_t, int64_t);
void penstock_clamped_swiglu(int, const void*, void*, int64_t, int64_t, float, float);
}

namespace {

using namespace penstock;

// The places of the `count` greatest, the first of equal ones first.
void best(const float* values, int64_t size, int64_t count, int32_t* out) {
  std::vector<char> taken(size, 0);
  for (int64_t i = 0; i < count; ++i) {
    int64_t found = -1;
    for (int64_t at = 0; at < size; ++at)
      if (!taken[at] && (found < 0 || values[at] > values[found])) found = at;
    taken[found] = 1, out[i] = static_cast<int32_t>(found);
  }
}

// Groups other than the best ones are shut: their experts are chosen last.
void shut_groups(float* choice, int64_t experts, int64_t groups, int64_t top_groups, int64_t group_best) {
  const int64_t size = experts / groups;
  std::vector<float> ranks(groups, 0.0f);
  std::vector<int32_t> places(std::max(group_best, groups));
  for (int64_t g = 0; g < groups; ++g) {
    best(choice + g * size, size, group_best, places.data());
    for (int64_t i = 0; i < group_best; ++i) ranks[g] += choice[g * size + places[i]];
  }
  best(ranks.data(), groups, top_groups, places.data());
  std::vector<char> open(groups, 0);
  for (int64_t i = 0; i < top_groups; ++i) open[places[i]] = 1;
  for (int64_t g = 0; g < groups; ++g)
    if (!open[g]) std::fill_n(choice + g * size, size, -INFINITY);
}

template <typename T>
void route(const T* logits, const float* bias, int32_t* ids, float* weights, int64_t tokens, int64_t experts, int64_t k, bool sigmoid,
           bool renormalise, int64_t groups, int64_t top_groups, int64_t group_best, float scale) {
  std::vector<float> scores(experts), choice(experts);
  for (int64_t t = 0; t < tokens; ++t, logits += experts, ids += k, weights += k) {
    float greatest = -INFINITY, sum = 0.0f;
    for (int64_t e = 0; e < experts; ++e) greatest = std::max(greatest, widen(logits[e]));
    for (int64_t e = 0; e < experts; ++e) {
      const float x = widen(logits[e]);
      sum += scores[e] = sigmoid ? 1.0f / (1.0f + std::exp(-x)) : std::exp(x - greatest);
    }
    for (int64_t e = 0; e < experts; ++e) {
      if (!sigmoid) scores[e] /= sum;
      choice[e] = scores[e] + (bias == nullptr ? 0.0f : bias[e]);
    }
    if (groups > 1) shut_groups(choice.data(), experts, groups, top_groups, group_best);
    best(choice.data(), experts, k, ids);
    float total = 0.0f;
    for (int64_t i = 0; i < k; ++i) total += weights[i] = scores[ids[i]];
    for (int64_t i = 0; i < k; ++i) weights[i] = (renormalise ? weights[i] / (total + 1e-20f) : weights[i]) * scale;
  }
}

// out = the sum of the k rows of `results` at `places`, by weight.
template <typename T>
void combine(const T* results, const int64_t* places, const float* weights, int64_t k, int64_t hidden, T* out) {
  int64_t at = 0;
  for (; at + kLanes <= hidden; at += kLanes) {
    Vec sum{};
    for (int64_t i = 0; i < k; ++i) sum = multiply_add(load(results + places[i] * hidden + at), splat(weights[i]), sum);
    store(out + at, sum);
  }
  for (; at < hidden; ++at) {
    float sum = 0.0f;
    for (int64_t i = 0; i < k; ++i) sum += widen(results[places[i] * hidden + at]) * weights[i];
    narrow(sum, out + at);
  }
}

// The address of an expert's tensor, or none.
const void* of_expert(const int64_t* addresses, int64_t expert) {
  return addresses == nullptr ? nullptr : reinterpret_cast<const void*>(addresses[expert]);
}

// An expert's linear layer in the model's dtype: the addresses of all experts' weights and biases; `biases` is nullptr where there are none.
struct Plain {
  const int64_t *weights, *biases;

  template <typename T>
  void operator()(int dtype, int64_t expert, const T* x, T*, T* out, int64_t rows, int64_t outputs, int64_t inputs) const {
    penstock_linear(dtype, x, of_expert(weights, expert), of_expert(biases, expert), out, rows, outputs, inputs);
  }
};

// An expert's linear layer in few bits, as `experts/table.py` lays out what all experts have in common, and what each has.
struct Form {
  int64_t number, scale_dtype, group, rounds, rounds_group, float8, powers;
};
struct Tensors {
  int64_t values, scales, zeros, bias, input_scale, input_zero, sums;
};
constexpr int64_t kIntegers = 4;  // a form's number where weights and inputs meet as whole numbers, as `experts/table.py` has it
struct Packed {
  const Form* form;
  const Tensors* experts;

  // `own` has room for the rows, and may be where they are: rounded inputs go there.
  template <typename T>
  void operator()(int dtype, int64_t expert, const T* x, T* own, T* out, int64_t rows, int64_t outputs, int64_t inputs) const {
    const auto at = [](int64_t address) { return reinterpret_cast<const void*>(address); };
    const Tensors& of = experts[expert];
    const auto *scale = static_cast<const float*>(at(of.input_scale)), *zero = static_cast<const float*>(at(of.input_zero));
    const auto* zeros = static_cast<const int8_t*>(at(of.zeros));
    if (form->number == kIntegers) {
      penstock_integer_linear(dtype, x, static_cast<const int8_t*>(at(of.values)), static_cast<const float*>(at(of.scales)),
                              static_cast<const int32_t*>(at(of.sums)), zeros, at(of.bias), scale, zero, out, rows, outputs, inputs,
                              form->group, form->rounds_group, form->powers != 0);
      return;
    }
    if (form->rounds) {
      penstock_rounded_inputs(dtype, x, scale, zero, own, rows, inputs, form->rounds_group, form->float8 != 0, form->powers != 0);
      x = own;
    }
    penstock_quantized_linear(dtype, static_cast<int>(form->scale_dtype), static_cast<int>(form->number), x, at(of.values), at(of.scales),
                              zeros, at(of.bias), out, rows, outputs, inputs, form->group);
  }
};

struct Gate {
  int kind;  // 0 silu, 1 gelu in its tanh form, 2 clamped SwiGLU
  float slope, limit;
  void operator()(int dtype, const void* x, void* out, int64_t n, int64_t d) const {
    if (kind == 2)
      penstock_clamped_swiglu(dtype, x, out, n, d, slope, limit);
    else
      (kind == 0 ? penstock_silu_mul : penstock_gelu_tanh_mul)(dtype, x, out, n, d);
  }
};

template <typename T, typename Linear>
void run_experts(int dtype, const T* x, const int32_t* ids, const float* weights, const Linear& gate_up, const Linear& down, T* out,
                 int64_t tokens, int64_t k, int64_t experts, int64_t hidden, int64_t inner, const Gate& gate) {
  const int64_t choices = tokens * k;
  std::vector<int64_t> starts(experts + 1, 0), places(choices), order(choices);
  for (int64_t i = 0; i < choices; ++i) ++starts[ids[i] + 1];
  const int64_t most = *std::max_element(starts.begin(), starts.end());
  for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t i = 0; i < choices; ++i) order[places[i] = next[ids[i]]++] = i;
  const std::unique_ptr<T[]> inputs(new T[most * hidden]), projected(new T[most * 2 * inner]), gated(new T[most * inner]);
  const std::unique_ptr<T[]> results(new T[choices * hidden]);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t first = starts[e], count = starts[e + 1] - first;
    if (count == 0) continue;
    const T* rows = inputs.get();
    if (count == 1)
      rows = x + order[first] / k * hidden;
    else
      for (int64_t r = 0; r < count; ++r) std::memcpy(inputs.get() + r * hidden, x + order[first + r] / k * hidden, hidden * sizeof(T));
    gate_up(dtype, e, rows, inputs.get(), projected.get(), count, 2 * inner, hidden);
    gate(dtype, projected.get(), gated.get(), count, inner);
    down(dtype, e, gated.get(), gated.get(), results.get() + first * hidden, count, hidden, inner);
  }
  for (int64_t t = 0; t < tokens; ++t)
    combine(results.get(), places.data() + t * k, weights + t * k, k, hidden, out + t * hidden);
}

}  // namespace

extern "C" {

void penstock_route(int dtype, const void* logits, const float* bias, int32_t* ids, float* weights, int64_t tokens, int64_t experts, int64_t k,
                    int sigmoid, int renormalise, int64_t groups, int64_t top_groups, int64_t group_best, float scale) {
  const auto run = [&](auto* of) {
    route(of, bias, ids, weights, tokens, experts, k, sigmoid != 0, renormalise != 0, groups, top_groups, group_best, scale);
  };
  if (dtype == 0)
    run(static_cast<const float*>(logits));
  else
    run(static_cast<const BFloat16*>(logits));
}

void penstock_experts(int dtype, const void* x, const int32_t* ids, const float* weights, const int64_t* gate_up, const int64_t* down,
                      const int64_t* gate_up_bias, const int64_t* down_bias, void* out, int64_t tokens, int64_t k, int64_t experts,
                      int64_t hidden, int64_t inner, int gate, float slope, float limit) {
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    const Plain first{gate_up, gate_up_bias}, second{down, down_bias};
    run_experts(dtype, static_cast<const T*>(x), ids, weights, first, second, to, tokens, k, experts, hidden, inner, Gate{gate, slope, limit});
  };
  if (dtype == 0)
    run(static_cast<float*>(out));
  else
    run(static_cast<BFloat16*>(out));
}

// `results`: rows [.., hidden]; `places` and `weights`: [tokens, k].
void penstock_combine_experts(int dtype, const void* results, const int64_t* places, const float* weights, void* out, int64_t tokens, int64_t k,
                              int64_t hidden) {
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    for (int64_t t = 0; t < tokens; ++t)
      combine(static_cast<const T*>(results), places + t * k, weights + t * k, k, hidden, to + t * hidden);
  };
  if (dtype == 0)
    run(static_cast<float*>(out));
  else
    run(static_cast<BFloat16*>(out));
}

// `forms`: of both layers. `gate_up` and `down`: Tensors by expert.
void penstock_packed_experts(int dtype, const void* x, const int32_t* ids, const float* weights, const int64_t* forms, const int64_t* gate_up,
                             const int64_t* down, void* out, int64_t tokens, int64_t k, int64_t experts, int64_t hidden, int64_t inner,
                             int gate, float slope, float limit) {
  const Form* form = reinterpret_cast<const Form*>(forms);
  const Packed first{form, reinterpret_cast<const Tensors*>(gate_up)}, second{form + 1, reinterpret_cast<const Tensors*>(down)};
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    run_experts(dtype, static_cast<const T*>(x), ids, weights, first, second, to, tokens, k, experts, hidden, inner, Gate{gate, slope, limit});
  };
  if (dtype == 0)
    run(static_cast<float*>(out));
  else
    run(static_cast<BFloat16*>(out));
}

}  // extern "C"
