// A list of operations with their arguments, run one after the other by one call: what they cost without an interpreter between them.

#include <cstdint>
#include <cstring>
#include <utility>

extern "C" {

void penstock_rms_norm(int, const void*, const float*, void*, int64_t, int64_t, float);
void penstock_add_rms_norm(int, const void*, const void*, const float*, void*, void*, int64_t, int64_t, float);
void penstock_silu_mul(int, const void*, void*, int64_t, int64_t);
void penstock_gelu_tanh_mul(int, const void*, void*, int64_t, int64_t);
void penstock_clamped_swiglu(int, const void*, void*, int64_t, int64_t, float, float);
void penstock_prepare_kv(int, const void*, const void*, const void*, int64_t, int64_t, int64_t, void*, void*, int64_t, const int64_t*,
                         const float*, const float*, int64_t, const float*, const float*, const float*, float, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t);
void penstock_linear(int, const void*, const void*, const void*, void*, int64_t, int64_t, int64_t);
void penstock_head_linear(int, const void*, int64_t, int64_t, const void*, int64_t, void*, int64_t, int64_t, int64_t, int64_t);
void penstock_quantized_linear(int, int, int, const void*, const void*, const void*, const int8_t*, const void*, void*, int64_t, int64_t,
                               int64_t, int64_t);
void penstock_rounded_inputs(int, const void*, const float*, const float*, void*, int64_t, int64_t, int64_t, int, int);
void penstock_integer_linear(int, const void*, const int8_t*, const float*, const int32_t*, const int8_t*, const void*, const float*,
                             const float*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int);
void penstock_paged_attention(int, const void*, void*, const void*, int64_t, const int32_t*, const int32_t*, const int32_t*, const float*, const int32_t*,
                              const float*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float);
void penstock_gather_rows(const void*, const int64_t*, void*, int64_t, int64_t);
void penstock_add_lora(int, void*, const void*, const int64_t*, const int64_t*, int64_t, const void*, int64_t, const int64_t*, int64_t,
                       const int64_t*, int64_t, int64_t);
void penstock_route(int, const void*, const float*, int32_t*, float*, int64_t, int64_t, int64_t, int, int, int64_t, int64_t, int64_t, float);
void penstock_experts(int, const void*, const int32_t*, const float*, const int64_t*, const int64_t*, const int64_t*, const int64_t*, void*,
                      int64_t, int64_t, int64_t, int64_t, int64_t, int, float, float);
void penstock_packed_experts(int, const void*, const int32_t*, const float*, const int64_t*, const int64_t*, const int64_t*, void*, int64_t,
                             int64_t, int64_t, int64_t, int64_t, int, float, float);
void penstock_all_reduce(int, void*, const void*, void*, int64_t);
void penstock_all_gather(int, void*, const void*, void*, int64_t, int64_t);

}  // extern "C"

namespace {

// As `tape.py` packs it: pointers and integers as they are, a float's bits in the low half.
struct Call {
  int64_t op;
  int64_t arguments[24];
};

struct Argument {
  int64_t bits;
  template <typename T>
  operator T*() const {
    return reinterpret_cast<T*>(bits);
  }
  operator int() const { return static_cast<int>(bits); }
  operator int64_t() const { return bits; }
  operator float() const {
    const uint32_t low = static_cast<uint32_t>(bits);
    float out;
    std::memcpy(&out, &low, 4);
    return out;
  }
};

template <typename... Parameters, size_t... Index>
void call(void (*function)(Parameters...), const int64_t* bits, std::index_sequence<Index...>) {
  function(static_cast<Parameters>(Argument{bits[Index]})...);
}

template <typename... Parameters>
void call(void (*function)(Parameters...), const int64_t* bits) {
  static_assert(sizeof...(Parameters) <= 24);
  call(function, bits, std::index_sequence_for<Parameters...>{});
}

}  // namespace

extern "C" {

void penstock_gather_rows(const void* table, const int64_t* ids, void* out, int64_t rows, int64_t row_bytes) {
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(static_cast<char*>(out) + r * row_bytes, static_cast<const char*>(table) + ids[r] * row_bytes, row_bytes);
}

void penstock_replay(const void* calls, int64_t count) {
  const Call* one = static_cast<const Call*>(calls);
  for (int64_t i = 0; i < count; ++i, ++one) switch (one->op) {
      case 0: call(penstock_rms_norm, one->arguments); break;
      case 1: call(penstock_add_rms_norm, one->arguments); break;
      case 2: call(penstock_silu_mul, one->arguments); break;
      case 3: call(penstock_gelu_tanh_mul, one->arguments); break;
      case 4: call(penstock_prepare_kv, one->arguments); break;
      case 5: call(penstock_linear, one->arguments); break;
      case 6: call(penstock_paged_attention, one->arguments); break;
      case 7: call(penstock_gather_rows, one->arguments); break;
      case 8: call(penstock_add_lora, one->arguments); break;
      case 9: call(penstock_route, one->arguments); break;
      case 10: call(penstock_experts, one->arguments); break;
      case 11: call(penstock_all_reduce, one->arguments); break;
      case 12: call(penstock_all_gather, one->arguments); break;
      case 13: call(penstock_quantized_linear, one->arguments); break;
      case 14: call(penstock_clamped_swiglu, one->arguments); break;
      case 15: call(penstock_head_linear, one->arguments); break;
      case 16: call(penstock_rounded_inputs, one->arguments); break;
      case 17: call(penstock_packed_experts, one->arguments); break;
      case 18: call(penstock_integer_linear, one->arguments); break;
    }
}

}  // extern "C"
