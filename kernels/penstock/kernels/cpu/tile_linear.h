// Linear layers in bfloat16 by the tiles of AMX: the same packed weight as in `linear.cpp`, whose 16 words of 16 outputs are a tile.
//
// An output is one chain of additions in float32 over tiles of 32 inputs, in their order. What an instruction adds for a row does not depend
// on its other rows, so a token's result has the same bits in any batch.

#pragma once

#include "tiles.h"
#include "vector.h"

#if defined(__AMX_BF16__)
#include <algorithm>
#include <cstring>
#include <memory>

namespace penstock {

class TileLinear {
 public:
  TileLinear(const BFloat16* weight, const BFloat16* bias, int64_t outputs, int64_t inputs)
      : weight_(weight), bias_(bias), outputs_(outputs), inputs_(inputs), words_((inputs + 1) / 2), steps_(parts(inputs, kTileInputs)) {}

  void run(const BFloat16* x, BFloat16* out, int64_t rows) {
    if (rows == 0) return;
    if (rows == 1) return one_row(x, out);
    const int64_t block = parts(rows, parts(rows, kBlock));  // blocks of about as many rows
    x_ = TileInputs(block, inputs_);
    if (x_.tiles > 2 && steps_ > kChunk) sums_.reset(new float[x_.tiles * x_.height * kColumns]);
    const Tiles shapes(x_.height);
    for (int64_t row = 0; row < rows; row += block) {
      x_.gather(x + row * inputs_, std::min(block, rows - row));
      multiply(out + row * outputs_);
    }
  }

 private:
  static constexpr int64_t kPanel = 16;    // outputs
  static constexpr int64_t kColumns = 32;  // outputs of two panels, which many rows meet at a time
  static constexpr int64_t kBlock = 128;   // rows that meet all weights before the next rows
  static constexpr int64_t kChunk = 8;     // tiles of inputs that many rows meet at a time: those of two panels stay in the first cache

  void multiply(BFloat16* out) {
    if (x_.tiles == 1) {
      for (int64_t column = 0; column < outputs_; column += 4 * kPanel) four_panels(column, out);
      return;
    }
    const int64_t chunk = x_.tiles > 2 ? parts(steps_, parts(steps_, kChunk)) : steps_;  // two tiles of rows read each weight once
    alignas(64) float start[kColumns];
    for (int64_t column = 0; column < outputs_; column += kColumns) {
      begin(column, kColumns, start);
      for (int64_t step = 0; step < steps_; step += chunk) {
        const int64_t last = std::min(step + chunk, steps_);
        int64_t tile = 0;
        for (; tile + 1 < x_.tiles; tile += 2) two_panels<2>(start, tile, column, step, last, out);
        if (tile < x_.tiles) two_panels<1>(start, tile, column, step, last, out);
      }
    }
  }

  // A panel's tile of weights.
  const BFloat16* weights_at(int64_t column, int64_t step, BFloat16* rest) const {
    column = std::min(column, (outputs_ - 1) / kPanel * kPanel);  // of a panel that is not there, any: its sums are dropped
    const int64_t begin = step * kTileElements, end = words_ * 2 * kPanel;
    return whole_tile(weight_ + column / kPanel * end + begin, (end - begin) * static_cast<int64_t>(sizeof(BFloat16)), rest);
  }

  // What the sums of so many outputs begin with, the same for all rows.
  void begin(int64_t column, int64_t count, float* out) const {
    begin_sums(bias_, column, outputs_, count, out);
    Tiles::written();
  }

  // Of the sums of a tile's rows, [height, panels, 16], the rows and outputs that there are.
  void end(const float* sums, int64_t tile, int64_t column, int64_t panels, BFloat16* out) const {
    const int64_t first = tile * x_.height;
    for (int64_t row = first; row < std::min(first + x_.height, x_.rows); ++row)
      for (int64_t panel = 0; panel < panels; ++panel, sums += kPanel) narrow_panel(load(sums), out + row * outputs_, column + panel * kPanel);
  }

  // A panel's outputs of a row, as many as there are.
  void narrow_panel(Vec sums, BFloat16* row, int64_t column) const {
    if (column + kPanel <= outputs_) return store(row + column, sums);
    BFloat16 narrowed[kPanel];
    store(narrowed, sums);
    if (column < outputs_) std::copy_n(narrowed, outputs_ - column, row + column);
  }

  // kTiles tiles of rows with two panels, and the inputs of the steps [first, last).
  template <int kTiles>
  void two_panels(const float* start, int64_t tile, int64_t column, int64_t first, int64_t last, BFloat16* out) {
    alignas(64) float ended[kTiles * kTileRows * kColumns];
    alignas(64) BFloat16 rest[2][kTileElements];
    const bool ends = last == steps_;
    const int64_t below = x_.height * kColumns, apart = x_.height * kTileInputs;
    float* kept = sums_ == nullptr ? ended : sums_.get() + tile * below;
    if (first == 0)
      load_sums<kTiles>(start, start, 0);
    else
      load_sums<kTiles>(kept, kept + below);
    const BFloat16 *x = x_.at(tile, first), *y = x_.at(tile + 1, first);
    const BFloat16 *one = weights_at(column, first, rest[0]), *other = weights_at(column + kPanel, first, rest[1]);
    for (int64_t step = first; step < last; ++step, x += apart, y += apart, one += kTileElements, other += kTileElements) {
      if (step == words_ / (kTileInputs / 2)) one = weights_at(column, step, rest[0]), other = weights_at(column + kPanel, step, rest[1]);
      add_tiles<kTiles, false>(x, y, kTileBytes, one, other);
    }
    float* to = ends ? ended : kept;
    store_sums<kTiles>(to, to + below);
    for (int at = 0; at < kTiles && ends; ++at) end(ended + at * below, tile + at, column, 2, out);
  }

  // The only tile of rows with four panels, and all inputs.
  void four_panels(int64_t column, BFloat16* out) {
    alignas(64) float start[4 * kPanel], ended[kTileRows * 4 * kPanel];
    alignas(64) BFloat16 rest[4][kTileElements];
    constexpr int64_t kStride = 4 * kTileBytes;
    begin(column, 4 * kPanel, start);
    _tile_loadd(0, start, 0);
    _tile_loadd(1, start + kPanel, 0);
    _tile_loadd(2, start + 2 * kPanel, 0);
    _tile_loadd(3, start + 3 * kPanel, 0);
    const BFloat16 *x = x_.at(0, 0), *weights[4];
    const auto find = [&](int64_t step) {
      for (int64_t panel = 0; panel < 4; ++panel) weights[panel] = weights_at(column + panel * kPanel, step, rest[panel]);
    };
    find(0);
    for (int64_t step = 0; step < steps_; ++step, x += x_.height * kTileInputs) {
      if (step == words_ / (kTileInputs / 2)) find(step);
      _tile_loadd(4, x, kTileBytes);
      _tile_loadd(6, weights[0], kTileBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights[1], kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, weights[2], kTileBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, weights[3], kTileBytes);
      _tile_dpbf16ps(3, 4, 7);
      for (const BFloat16*& at : weights) at += kTileElements;
    }
    _tile_stored(0, ended, kStride);
    _tile_stored(1, ended + kPanel, kStride);
    _tile_stored(2, ended + 2 * kPanel, kStride);
    _tile_stored(3, ended + 3 * kPanel, kStride);
    end(ended, 0, column, 4, out);
  }

  // One row: a tile's instruction would wait for the memory, and vectors take less time to read it. They add up what it does, as it does:
  // of 32 inputs the products of all first ones of a word and of all second ones, then both, to what there was; no subnormal numbers.
  void one_row(const BFloat16* x, BFloat16* out) const {
    const NoSubnormals guard;
    const int64_t panels = parts(outputs_, kPanel);
    int64_t panel = 0;
    for (; panel + 4 <= panels; panel += 4) vectors<4>(x, panel, out);
    for (; panel < panels; ++panel) vectors<1>(x, panel, out);
  }

  template <int kVectors>
  void vectors(const BFloat16* x, int64_t panel, BFloat16* out) const {
    alignas(64) float start[kVectors * kPanel];
    begin(panel * kPanel, kVectors * kPanel, start);
    Vec sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = load(start + v * kPanel);
    const BFloat16* weight = weight_ + panel * words_ * 2 * kPanel;
    for (int64_t word = 0; word < words_; word += kTileInputs / 2) {
      Vec first[kVectors] = {}, second[kVectors] = {};
      for (int64_t at = word; at < std::min(word + kTileInputs / 2, words_); ++at) {
        const Vec one = splat(widen(x[2 * at])), other = splat(2 * at + 1 < inputs_ ? widen(x[2 * at + 1]) : 0.0f);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const BFloat16* from = weight + (v * words_ + at) * 2 * kPanel;
          __builtin_prefetch(reinterpret_cast<const char*>(from) + 2048);
          const IntVec pairs = load_words(from);
          first[v] = multiply_add(one, first_of_pair(pairs), first[v]);
          second[v] = multiply_add(other, second_of_pair(pairs), second[v]);
        }
      }
      for (int v = 0; v < kVectors; ++v) sums[v] += first[v] + second[v];
    }
    for (int v = 0; v < kVectors; ++v) narrow_panel(sums[v], out, (panel + v) * kPanel);
  }

  const BFloat16 *weight_, *bias_;
  int64_t outputs_, inputs_;
  int64_t words_;   // of two inputs
  int64_t steps_;   // tiles of inputs
  TileInputs x_;
  std::unique_ptr<float[]> sums_;  // [tiles, height, 32]: of two panels, from chunk to chunk of inputs
};

}  // namespace penstock
#endif
