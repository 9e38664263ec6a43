// N equal strided boxes, the unit that every kernel works on: how they are normalised, walked and split over threads.
#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace regauge {

/// The caller's eight, and one that a kernel may add.
constexpr int kMaxAxes = 9;

/// Which of the (at most) four operands of a box an address or a stride belongs to.
enum Operand { kSrc, kDst, kSrcScale, kDstScale, kOperands };

/// The addresses of one row.
struct Place {
  std::uint8_t* at[kOperands];

  template <class T>
  T* as(Operand o) const {
    return reinterpret_cast<T*>(at[o]);
  }
};

/// Tile i at index (a0, a1, ...) starts at base[o][i] + sum(a_j * stride[o][j]) for each operand o.
struct Boxes {
  std::int64_t tiles = 0;
  const std::int64_t* base[kOperands] = {};  // null: the operand is absent
  int axes = 0;
  std::int64_t shape[kMaxAxes] = {};
  std::int64_t stride[kOperands][kMaxAxes] = {};
  std::int64_t run = 0;  // bytes (copy) or elements (convert) of one row

  std::int64_t rows() const {
    std::int64_t count = tiles;
    for (int j = 0; j < axes; ++j) count *= shape[j];
    return count;
  }

  /// Whether all rows along `axis` share their scales.
  bool one_scale(int axis) const { return stride[kSrcScale][axis] == 0 && stride[kDstScale][axis] == 0; }

  /// The same boxes, of `count` tiles from tile `first` on.
  Boxes some_tiles(std::int64_t first, std::int64_t count) const {
    Boxes b = *this;
    b.tiles = count;
    for (auto& at : b.base)
      if (at) at += first;
    return b;
  }

  void erase(int axis) {
    for (int j = axis; j + 1 < axes; ++j) {
      shape[j] = shape[j + 1];
      for (auto& s : stride) s[j] = s[j + 1];
    }
    --axes;
  }

  void swap_axes(int a, int b) {
    std::swap(shape[a], shape[b]);
    for (auto& s : stride) std::swap(s[a], s[b]);
  }

  /// Make `axis` the innermost one and keep the order of the others.
  void move_last(int axis) {
    for (int j = axis; j + 1 < axes; ++j) swap_axes(j, j + 1);
  }

  void drop_ones() {
    for (int j = axes - 1; j >= 0; --j)
      if (shape[j] == 1) erase(j);
  }

  /// Order the axes so that `o` is walked as sequentially as it can be (largest stride outermost; stable).
  void sort_by(Operand o) { sort_by(o, axes); }
  /// The same for the first `count` axes.
  void sort_by(Operand o, int count) {
    const auto size = [](std::int64_t s) { return s < 0 ? -s : s; };
    for (int i = 1; i < count; ++i)
      for (int j = i; j > 0 && size(stride[o][j - 1]) < size(stride[o][j]); --j) swap_axes(j - 1, j);
  }

  /// Join neighbouring axes that are one longer axis for every operand.
  void merge() {
    for (int j = axes - 2; j >= 0; --j) {
      bool one = true;
      for (const auto& s : stride) one = one && s[j] == shape[j + 1] * s[j + 1];
      if (!one) continue;
      shape[j + 1] *= shape[j];
      erase(j);
    }
  }
};

/// Visit rows [lo, hi) of all tiles in order. `visit(place, n, tile)` gets the first row's addresses and the number of
/// rows that follow along the innermost axis (1 when there is no axis). Only the first `Count` operands are followed.
template <int Count, class Visit>
void walk(const Boxes& b, std::int64_t lo, std::int64_t hi, Visit&& visit) {
  const int outer = b.axes > 0 ? b.axes - 1 : 0;
  const std::int64_t inner = b.axes > 0 ? b.shape[b.axes - 1] : 1;
  std::int64_t index[kMaxAxes] = {};
  std::int64_t left = lo / inner, skip = lo % inner;
  for (int j = outer - 1; j >= 0; --j) {
    index[j] = left % b.shape[j];
    left /= b.shape[j];
  }
  std::int64_t tile = left;
  Place outer_place{};
  const auto seek = [&] {
    for (int o = 0; o < Count; ++o) {
      std::int64_t at = b.base[o] ? b.base[o][tile] : 0;
      for (int j = 0; j < outer; ++j) at += index[j] * b.stride[o][j];
      outer_place.at[o] = reinterpret_cast<std::uint8_t*>(at);
    }
  };
  seek();
  while (lo < hi) {
    const std::int64_t n = inner - skip < hi - lo ? inner - skip : hi - lo;
    Place p = outer_place;
    if (skip)
      for (int o = 0; o < Count; ++o) p.at[o] += skip * b.stride[o][b.axes - 1];
    visit(p, n, tile);
    lo += n;
    skip = 0;
    int j = outer - 1;
    for (; j >= 0; --j) {
      if (++index[j] < b.shape[j]) {
        for (int o = 0; o < Count; ++o) outer_place.at[o] += b.stride[o][j];
        break;
      }
      index[j] = 0;
      for (int o = 0; o < Count; ++o) outer_place.at[o] -= (b.shape[j] - 1) * b.stride[o][j];
    }
    if (j < 0 && lo < hi) {
      ++tile;
      seek();
    }
  }
}

/// Run work(lo, hi) over [0, units) on `threads` threads, the caller among them. A thread that the system refuses to
/// start costs speed, not correctness: the caller does its share.
template <class Work>
void parallel(std::int64_t units, std::int64_t threads, Work&& work) {
  if (threads > units) threads = units;
  const auto edge = [=](std::int64_t t) {
    return static_cast<std::int64_t>(static_cast<__int128>(units) * t / threads);
  };
  std::vector<std::thread> others;
  std::int64_t started = 1;
  try {
    others.reserve(threads > 1 ? threads - 1 : 0);
    for (; started < threads; ++started)
      others.emplace_back([&work, lo = edge(started), hi = edge(started + 1)] { work(lo, hi); });
  } catch (const std::system_error&) {
    work(edge(started), units);
  }
  if (units > 0) work(0, edge(1));
  for (auto& thread : others) thread.join();
}

/// Bytes of output below which one call stays on the caller's thread: starting a thread costs some 20-50 us.
constexpr std::int64_t kThreadBytes = 512 << 10;
/// Bytes of output above which stores bypass the cache: the output would evict itself before anyone reads it.
constexpr std::int64_t kStreamBytes = 1 << 20;

/// True when this CPU has what the vector kernels need (AVX2, FMA, F16C).
bool has_avx2();

}  // namespace regauge
