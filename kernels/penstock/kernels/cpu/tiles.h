// Tiles of AMX: registers of up to 16 rows of 64 bytes, whose products an instruction adds up. The compiler does not know that these
// instructions read memory: `written` stands between what is written and the first of them.

#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "vector.h"

namespace penstock {

constexpr bool kHasTiles = true;
constexpr int64_t kTileRows = 16, kTileBytes = 64;
constexpr int64_t kTileSize = kTileRows * kTileBytes;

// The shapes of the eight tiles: 0 to 3 are sums and 4 and 5 inputs, of so many rows each, 6 and 7 are weights.
//
// They are left as they were at the end: a thread that holds tiles is dear to switch from.
class Tiles {
 public:
  explicit Tiles(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.bytes[tile] = kTileBytes, shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileRows);
    written();
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  static void written() { asm volatile("" ::: "memory"); }
};

// A tile of weights at `at`, of which so many bytes are there. One that is not whole is copied: what follows it is not its own.
template <typename T>
const T* whole_tile(const T* at, int64_t bytes, T* rest) {
  if (bytes >= kTileSize) return at;
  std::memcpy(rest, at, bytes);
  std::memset(reinterpret_cast<char*>(rest) + bytes, 0, kTileSize - bytes);
  Tiles::written();
  return rest;
}

// Sums of one or two tiles of inputs with two tiles of weights side by side, of 16 numbers of four bytes a row. `lower`: of the second
// tile of inputs.
constexpr int64_t kPairStride = 2 * kTileBytes;

template <int kTiles, typename T>
inline void load_sums(const T* upper, const T* lower, int64_t stride = kPairStride) {
  _tile_loadd(0, upper, stride);
  _tile_loadd(1, upper + kTileRows, stride);
  if constexpr (kTiles == 2) {
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + kTileRows, stride);
  }
}

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <int kTiles, typename T>
inline void store_sums(T* upper, T* lower) {
  _tile_stored(0, upper, kPairStride);
  _tile_stored(1, upper + kTileRows, kPairStride);
  if constexpr (kTiles == 2) {
    _tile_stored(2, lower, kPairStride);
    _tile_stored(3, lower + kTileRows, kPairStride);
  }
}

// Adds products of the inputs at `x` and, of the second tile, at `y`, whose rows lie `stride` bytes apart, with the weights at `one` and
// `other`: whole numbers of eight bits, or bfloat16.
template <int kTiles, bool kIntegers>
inline void add_tiles(const void* x, const void* y, int64_t stride, const void* one, const void* other) {
  _tile_loadd(4, x, stride);
  _tile_loadd(6, one, kTileBytes);
  _tile_loadd(7, other, kTileBytes);
  if constexpr (kTiles == 2) _tile_loadd(5, y, stride);
  if constexpr (kIntegers) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    if constexpr (kTiles == 2) {
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
  } else {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// While it lives, vectors take numbers below the smallest normal one for 0, as tiles do.
class NoSubnormals {
 public:
  NoSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~NoSubnormals() { _mm_setcsr(before_); }
  NoSubnormals(const NoSubnormals&) = delete;
  NoSubnormals& operator=(const NoSubnormals&) = delete;

 private:
  unsigned before_;
};

constexpr int64_t kTileInputs = 32;  // of bfloat16, in a row of a tile
constexpr int64_t kTileElements = kTileRows * kTileInputs;

inline int64_t parts(int64_t all, int64_t size) { return (all + size - 1) / size; }

// Rows of a linear layer's inputs side by side as tiles read them, [tiles, steps, height, 32]; what is beyond them is 0.
struct TileInputs {
  int64_t inputs = 0, steps = 0;                // of a row; tiles side by side
  int64_t tiles = 0, height = 0, rows = 0;      // tiles of rows, rows of each, and how many of them all there are
  std::unique_ptr<BFloat16[]> all;

  TileInputs() = default;
  // Tiles of about as many rows: an instruction takes as long as its tile has rows.
  TileInputs(int64_t most, int64_t inputs)
      : inputs(inputs), steps(parts(inputs, kTileInputs)), tiles(parts(most, kTileRows)), height(parts(most, tiles)),
        all(new BFloat16[tiles * steps * height * kTileInputs]) {}

  BFloat16* at(int64_t tile, int64_t step) const { return all.get() + (tile * steps + step) * height * kTileInputs; }

  // Takes in `count` rows.
  void gather(const BFloat16* x, int64_t count) {
    rows = count;
    for (int64_t row = 0; row < tiles * height; ++row, x += inputs) {
      BFloat16* to = at(row / height, 0) + row % height * kTileInputs;
      const int64_t there = row < rows ? inputs : 0;
      int64_t from = 0;
      for (; from + kTileInputs <= there; from += kTileInputs, to += height * kTileInputs) std::memcpy(to, x + from, kTileBytes);
      for (; from < inputs; from += kTileInputs, to += height * kTileInputs) {
        const int64_t rest = std::max<int64_t>(0, there - from);
        std::copy_n(x + from, rest, to);
        std::fill(to + rest, to + kTileInputs, BFloat16{});
      }
    }
    Tiles::written();
  }
};

}  // namespace penstock

#else

namespace penstock {
constexpr bool kHasTiles = false;
}

#endif
