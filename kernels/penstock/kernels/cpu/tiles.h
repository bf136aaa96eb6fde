// Tiles of AMX: registers of up to 16 rows of 64 bytes, whose products an instruction adds up. The compiler does not know that these
// instructions read memory: `written` stands between what is written and the first of them.

#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <cstdint>

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

}  // namespace penstock

#else

namespace penstock {
constexpr bool kHasTiles = false;
}

#endif
