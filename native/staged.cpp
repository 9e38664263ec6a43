// Conversions whose rows lie apart or in short pieces (K dim-major in a page, or in vector lanes): a few tiles at a time
// are copied into a dense block in the cache, converted there in long rows, and copied to where they belong.
#include <algorithm>

#include "staged.hpp"

namespace regauge {
namespace {

using Byte = std::uint8_t;
using Int = std::int64_t;

constexpr Int kShortest = 32;          // elements of a piece that kernels convert as it is
constexpr Int kBlockBytes = 112 << 10;  // of a block and its twin; on the stack, whose pages are there already
constexpr Int kTileBytes = 32 << 10;    // larger tiles are split where they can be

// Whether some axis continues the pieces of `o`.
bool goes_on(const Boxes& b, Operand o, Int size) {
  for (int j = 0; j < b.axes; ++j)
    if (b.stride[o][j] == b.run * size && b.shape[j] > 1 && b.one_scale(j)) return true;
  return false;
}

// Whether the row's axes continue its elements.
bool row_follows(const Boxes& b, const Conversion& c, Operand o, Int step, Int size) {
  Int next = b.run * size;
  for (int j = b.axes - 1; j >= b.axes - c.row_axes; --j) {
    if (b.stride[o][j] != next) return false;
    next *= b.shape[j];
  }
  return step == size;
}

// The elements' axis made an ordinary one, and the axes that do not belong to the row in the order of `o`.
Boxes in_order_of(Operand o, const Boxes& given, const Conversion& c) {
  Boxes b = given;
  b.sort_by(o, b.axes - c.row_axes);
  b.shape[b.axes] = b.run;
  for (auto& s : b.stride) s[b.axes] = 0;
  b.stride[kSrc][b.axes] = c.src_step, b.stride[kDst][b.axes] = c.dst_step;
  ++b.axes;
  b.run = 1;
  return b;
}

// Let `o` be dense, in the order of the axes.
void make_dense(Boxes& b, Operand o, Int size) {
  for (int j = b.axes - 1; j >= 0; --j) b.stride[o][j] = size, size *= b.shape[j];
}

class Stages {
 public:
  Stages(const Boxes& b, const Conversion& c, bool src, bool dst) : src_(src), dst_(dst), c_(c) {
    const Int in = size_of(c.src), out = size_of(c.dst);
    Boxes all = in_order_of(dst && !src ? kSrc : kDst, b, c);
    tile_ = all.rows() / b.tiles;
    gather_ = scatter_ = convert_ = all;
    if (src) make_dense(gather_, kDst, in), make_dense(convert_, kSrc, in);
    if (dst) make_dense(scatter_, kSrc, out), make_dense(convert_, kDst, out);
    for (Boxes* copy : {&gather_, &scatter_})
      for (Operand o : {kSrcScale, kDstScale}) {
        copy->base[o] = nullptr;
        for (Int& s : copy->stride[o]) s = 0;
      }
    gather_.run = in, scatter_.run = out;
    // The elements' axis becomes the row again, and with it the axes of a row whose scale is computed.
    const auto pop = [&] { convert_.run *= convert_.shape[--convert_.axes]; };
    c_.src_step = convert_.stride[kSrc][convert_.axes - 1], c_.dst_step = convert_.stride[kDst][convert_.axes - 1];
    pop();
    for (; c_.row_axes > 0; --c_.row_axes) pop();
  }

  Int tiles_in_block() const { return std::max<Int>(1, kBlockBytes / (tile_ * (size_of(c_.src) + size_of(c_.dst)))); }

  /// Tiles [lo, hi), block by block.
  void run(Int lo, Int hi, const How& how) const {
    const Int block = tiles_in_block();
    const Int in = tile_ * size_of(c_.src), out = tile_ * size_of(c_.dst);
    alignas(64) Byte at[kBlockBytes + 64];
    std::vector<Int> source(block), target(block);
    for (Int k = 0; k < block; ++k) {
      source[k] = reinterpret_cast<Int>(at + k * in);
      target[k] = reinterpret_cast<Int>(at + ((block * in + 63) & ~Int{63}) + k * out);
    }
    const How quiet{1, 0, how.avx2}, own{1, how.total, how.avx2};
    for (; lo < hi; lo += block) {
      const Int count = std::min(block, hi - lo);
      if (src_) copy_boxes(part(gather_, lo, count, nullptr, source.data()), quiet);
      convert_rows_of(part(convert_, lo, count, src_ ? source.data() : nullptr, dst_ ? target.data() : nullptr), c_,
                      dst_ ? quiet : own);
      if (dst_) copy_boxes(part(scatter_, lo, count, target.data(), nullptr), own);
    }
  }

 private:
  // Some tiles, with a block in the place of the source or the target.
  static Boxes part(const Boxes& whole, Int lo, Int count, const Int* source, const Int* target) {
    Boxes b = whole.some_tiles(lo, count);
    if (source) b.base[kSrc] = source;
    if (target) b.base[kDst] = target;
    return b;
  }

  bool src_, dst_;
  Conversion c_;
  Int tile_ = 0;  // elements
  Boxes gather_, convert_, scatter_;
};

struct Sides {
  bool src, dst;
};

// Which side to make dense where rows are too short or their elements lie apart.
Sides in_pieces(const Boxes& b, const Conversion& c) {
  const Int in = size_of(c.src), out = size_of(c.dst);
  Sides s{c.src_step != in, c.dst_step != out};
  if (s.src || s.dst || b.run >= kShortest || b.rows() == b.tiles) return s;
  s.src = goes_on(b, kDst, out), s.dst = !s.src && goes_on(b, kSrc, in);
  return s.src || s.dst ? s : Sides{true, true};
}

// The same where a row has a computed scale and is to be one piece.
Sides rows_apart(const Boxes& b, const Conversion& c) {
  return {!row_follows(b, c, kSrc, c.src_step, size_of(c.src)), !row_follows(b, c, kDst, c.dst_step, size_of(c.dst))};
}

// Boxes of which axes can be made tiles.
class Split {
 public:
  explicit Split(const Boxes& b) : b_(b) {}
  const Boxes& boxes() const { return b_; }
  Int elements() const { return b_.rows() / b_.tiles * b_.run; }

  /// Make the longest step of the target a tile, unless it belongs to a row or lies densely on either side.
  bool split_one(const Conversion& c) {
    const auto size = [](Int s) { return s < 0 ? -s : s; };
    int axis = -1;
    for (int j = 0; j < b_.axes - c.row_axes; ++j) {
      if (b_.stride[kSrc][j] == size_of(c.src) || b_.stride[kDst][j] == size_of(c.dst) || b_.shape[j] == 1) continue;
      if (axis < 0 || size(b_.stride[kDst][j]) > size(b_.stride[kDst][axis])) axis = j;
    }
    if (axis < 0) return false;
    const Int n = b_.shape[axis];
    for (int o = 0; o < kOperands; ++o) {
      if (!b_.base[o]) continue;
      std::vector<Int> more(b_.tiles * n);
      for (Int i = 0; i < b_.tiles * n; ++i) more[i] = b_.base[o][i / n] + i % n * b_.stride[o][axis];
      base_[o].swap(more);
      b_.base[o] = base_[o].data();
    }
    b_.tiles *= n;
    b_.erase(axis);
    return true;
  }

 private:
  Boxes b_;
  std::vector<Int> base_[kOperands];
};

}  // namespace

bool convert_staged(const Boxes& given, const Conversion& c, const How& how) {
  const Int in = size_of(c.src), out = size_of(c.dst);
  const Sides apart = c.dynamic ? rows_apart(given, c) : in_pieces(given, c);
  if (!apart.src && !apart.dst) return false;
  Split tiles(given);
  while (tiles.elements() * (in + out) > kTileBytes)
    if (!tiles.split_one(c)) break;
  const Boxes& b = tiles.boxes();
  if (tiles.elements() * (in + out) > kBlockBytes) return false;
  const Stages stages(b, c, apart.src, apart.dst);
  const Int block = stages.tiles_in_block(), blocks = (b.tiles + block - 1) / block;
  parallel(blocks, b.rows() * b.run * out > kThreadBytes ? how.threads : 1, [&](Int lo, Int hi) {
    stages.run(lo * block, std::min(hi * block, b.tiles), how);
  });
  return true;
}

}  // namespace regauge
