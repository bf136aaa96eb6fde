// A linear layer of each head's own in float32 and bfloat16, in one thread, behind a C ABI. A row's result does not depend on the other rows.

#include <cstring>
#include <vector>

#include "vector.h"

extern "C" void penstock_linear(int, const void*, const void*, const void*, void*, int64_t, int64_t, int64_t);

// x: [tokens, heads, inputs], whose tokens and heads lie apart by the strides; weight: a packed weight for each head, in bytes apart by its
// stride; out: [tokens, heads, outputs], contiguous.
extern "C" void penstock_head_linear(int dtype, const void* x, int64_t token_stride, int64_t head_stride, const void* weight,
                                     int64_t weight_stride, void* out, int64_t tokens, int64_t heads, int64_t outputs, int64_t inputs) {
  if (tokens == 0) return;
  const int64_t size = dtype == 0 ? sizeof(float) : sizeof(penstock::BFloat16);
  std::vector<char> rows(tokens * inputs * size), found(tokens * outputs * size);
  for (int64_t h = 0; h < heads; ++h) {
    const char* from = static_cast<const char*>(x) + h * head_stride * size;
    for (int64_t t = 0; t < tokens; ++t) std::memcpy(&rows[t * inputs * size], from + t * token_stride * size, inputs * size);
    penstock_linear(dtype, rows.data(), static_cast<const char*>(weight) + h * weight_stride, nullptr, found.data(), tokens, outputs, inputs);
    char* to = static_cast<char*>(out) + h * outputs * size;
    for (int64_t t = 0; t < tokens; ++t) std::memcpy(to + t * heads * outputs * size, &found[t * outputs * size], outputs * size);
  }
}
