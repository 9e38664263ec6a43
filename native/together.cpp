// Boxes whose targets interleave. One after the other each would fetch and write every line of the target again.
#include "together.hpp"

#include <algorithm>
#include <cstdlib>

namespace regauge {
namespace {

using Byte = std::uint8_t;
using Int = std::int64_t;

constexpr Int kBlockBytes = 48 << 10;  // of records in a block; on the stack, whose pages are there already
constexpr Int kFarBytes = 128 << 10;   // of target that parts go through in turn where records are not built apart

Int bytes_of(const Part& p, Operand o) {
  if (o == kDst) return p.converts ? size_of(p.conversion.dst) : 1;
  return p.conversion.scheme.dst_e8m0 ? 1 : 4;
}

bool writes_scales(const Part& p) { return p.converts && p.conversion.dynamic; }

// What the parts of a tile write: from `first` bytes after the first part's target on, `span` bytes.
struct Span {
  Int first = 0, end = 0, written = 0;
  bool alike = true;  // all tiles are laid out as the first one

  void add(const Part& p, Operand o, const Int* origin) {
    const Boxes& b = p.boxes;
    const Int at = b.base[o][0] - origin[0];
    for (Int i = 1; alike && i < b.tiles; ++i) alike = b.base[o][i] - origin[i] == at;
    Int low = at, high = at + bytes_of(p, o), count = 1;
    const auto along = [&](Int n, Int stride) {
      if (stride < 0) low += (n - 1) * stride;
      else high += (n - 1) * stride;
      count *= n;
    };
    for (int j = 0; j < b.axes; ++j)
      if (o == kDst || b.stride[o][j] != 0) along(b.shape[j], b.stride[o][j]);
    if (o == kDst) along(b.run, p.converts ? p.conversion.dst_step : 1);
    first = std::min(first, low), end = std::max(end, high), written += count * bytes_of(p, o);
  }
  Int size() const { return end - first; }
  bool filled() const { return alike && written > 0 && written == size(); }
};

Span span_of(const std::vector<Part>& parts) {
  Span span;
  for (const Part& p : parts) {
    span.add(p, kDst, parts[0].boxes.base[kDst]);
    if (writes_scales(p)) span.add(p, kDstScale, parts[0].boxes.base[kDst]);
  }
  return span;
}

// Whether scales are written between the codes.
bool holds_its_scales(const Part& p) {
  if (!writes_scales(p)) return false;
  const Boxes& b = p.boxes;
  const Int apart = b.base[kDstScale][0] - b.base[kDst][0];
  return std::abs(apart) < *std::max_element(b.stride[kDst], b.stride[kDst] + kMaxAxes);
}

// Whether every row is whole cache lines, which can be streamed as they are.
bool in_lines(const Part& p) {
  Int all = p.boxes.base[kDst][0] | p.boxes.run * bytes_of(p, kDst);
  for (int j = 0; j < p.boxes.axes; ++j) all |= p.boxes.stride[kDst][j];
  return all % 64 == 0 && !writes_scales(p);
}

void run_part(const Part& p, Boxes b, const How& how) {
  if (p.converts) convert_boxes(b, p.conversion, how);
  else copy_boxes(b, how);
}

// Tiles [lo, hi): their parts where they belong, a stretch of tiles at a time.
void run_in_place(const std::vector<Part>& parts, Int lo, Int hi, Int stretch, const How& how) {
  for (; lo < hi; lo += stretch)
    for (const Part& p : parts) run_part(p, p.boxes.some_tiles(lo, std::min(stretch, hi - lo)), how);
}

// The same by way of a block from which whole records are streamed.
void run_apart(const std::vector<Part>& parts, Int lo, Int hi, const Span& span, const How& how) {
  const Int pitch = (span.size() + 63) & ~Int{63}, block = kBlockBytes / pitch;
  alignas(64) Byte room[kBlockBytes];
  const CopyRows stream = copy_rows_for(span.size(), true, how.avx2);
  std::vector<Int> target(block), scales(block);
  const Int* origin = parts[0].boxes.base[kDst];
  for (; lo < hi; lo += block) {
    const Int count = std::min(block, hi - lo);
    for (const Part& p : parts) {
      Boxes b = p.boxes.some_tiles(lo, count);
      const auto move = [&](Operand o, std::vector<Int>& to) {
        const Int at = reinterpret_cast<Int>(room) + p.boxes.base[o][lo] - origin[lo] - span.first;
        for (Int k = 0; k < count; ++k) to[k] = at + k * pitch;
        b.base[o] = to.data();
      };
      move(kDst, target);
      if (writes_scales(p)) move(kDstScale, scales);
      run_part(p, b, {1, 0, how.avx2});
    }
    for (Int k = 0; k < count; ++k)
      stream(room + k * pitch, 0, reinterpret_cast<Byte*>(origin[lo + k] + span.first), 0, 1, span.size(), nullptr);
  }
  fence_streams(how.avx2);
}

}  // namespace

void run_together(const std::vector<Part>& parts, const How& how) {
  const Int tiles = parts[0].boxes.tiles;
  if (tiles == 0) return;
  // Nothing interleaves, or too few tiles to share: each part shares its own rows among the threads.
  if ((parts.size() == 1 && !holds_its_scales(parts[0])) || tiles < 2 * how.threads) {
    for (const Part& p : parts) run_part(p, p.boxes, how);
    return;
  }
  const Span span = span_of(parts);
  const bool lines = std::all_of(parts.begin(), parts.end(), in_lines);
  const bool apart = !lines && how.avx2 && how.total > kStreamBytes && span.filled() && span.size() <= kBlockBytes;
  const Int stretch = std::max<Int>(1, kFarBytes / std::max<Int>(1, span.size()));
  parallel(tiles, tiles * span.size() > kThreadBytes ? how.threads : 1, [&](Int lo, Int hi) {
    if (apart) run_apart(parts, lo, hi, span, how);
    else run_in_place(parts, lo, hi, stretch, {1, how.total, how.avx2});
  });
}

}  // namespace regauge
