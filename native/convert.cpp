// Conversion of strided boxes: the order of the walk, staging of rows that are not contiguous, the choice of kernel.
#include "convert.hpp"

#include "ahead.hpp"
#include "fpenv.hpp"
#include "scales.hpp"
#include "staged.hpp"

namespace regauge {
namespace {

using Byte = std::uint8_t;
using Int = std::int64_t;

// Move `n` elements of `size` bytes between two strides.
void move_elements(const Byte* s, Int ss, Byte* d, Int ds, Int n, Int size) {
  copy_rows_for(size, false, false)(s, ss, d, ds, n, size, nullptr);
}

// Converts batches of rows whose elements may lie apart: such rows pass through a small block in the cache, and a batch
// that is transposed in memory is transposed on the way.
class RowConverter {
 public:
  /// Rows follow one another along the last axis of `b`, batches of them along axis `outer` (-1: there is none).
  RowConverter(const Conversion& c, const How& how, const Boxes& b, bool stream, int outer = -1)
      : c_(c), src_size_(size_of(c.src)), dst_size_(size_of(c.dst)), stream_(stream),
        turn_src_(transpose_for(src_size_, how.avx2)), turn_dst_(transpose_for(dst_size_, how.avx2)),
        plain_(portable_kernels(c.src, c.dst)), kernels_(plain_) {
#if defined(__x86_64__)
    if (how.avx2) {
      plain_ = kernels_ = avx2::kernels(c.src, c.dst);
      for (const auto choose : {avx2::narrow_rows, avx2::table_rows, avx2::byte_rows})
        if (const ConvertRows faster = choose(c.src, c.dst)) kernels_.convert = faster;
      if (const DynamicRows faster = avx2::dynamic_rows(c.src, c.dst)) kernels_.dynamic = faster;
    }
#endif
    const int last = b.axes - 1;
    if (last >= 0)
      for (int o = 0; o < kOperands; ++o) stride_[o] = b.stride[o][last];
    if (outer >= 0)
      for (int o = 0; o < kOperands; ++o) outer_stride_[o] = b.stride[o][outer];
    has_src_scale_ = b.base[kSrcScale] != nullptr, has_dst_scale_ = b.base[kDstScale] != nullptr;
  }

  bool contiguous() const { return src_direct() && dst_direct(); }
  static constexpr Int most_staged() { return kChunk; }

  /// Convert `outer` batches of `rows` contiguous rows of `n` elements.
  void convert_batches(const Place& p, Int outer, Int rows, Int n, const Byte* ahead, Memo* memo) const {
    RowBatch b = batch(p, rows, n);
    b.outer = outer, b.ahead = ahead, b.memo = memo;
    for (int o = 0; o < kOperands; ++o) b.outer_stride[o] = outer_stride_[o];
    run(b, c_.dynamic);
  }

  /// Convert `rows` rows of `n` elements; the target scales are read, or (`dynamic`) computed and stored.
  void convert(const Place& p, Int rows, Int n, bool dynamic) const {
    if (contiguous()) {
      run(batch(p, rows, n), dynamic);
      return;
    }
    in_blocks(p, rows, n, [&](const Place& at, Int nr, Int nc) {
      alignas(64) Byte in[kScratch], out[kScratch];
      RowBatch b = batch(at, nr, nc);
      if (!src_direct()) {
        gather(at.at[kSrc], in, nr, nc);
        b.src = in, b.src_stride = nc * src_size_;
      }
      if (!dst_direct()) b.dst = out, b.dst_stride = nc * dst_size_, b.stream = false;
      run(b, dynamic);
      if (!dst_direct()) scatter(out, at.at[kDst], nr, nc);
    });
  }

  /// Largest |v| of the rows, as bits.
  std::uint32_t max(const Place& p, Int rows, Int n) const {
    if (src_direct()) return kernels_.max(batch(p, rows, n));
    std::uint32_t most = 0;
    in_blocks(p, rows, n, [&](const Place& at, Int nr, Int nc) {
      alignas(64) Byte in[kScratch];
      RowBatch b = batch(at, nr, nc);
      gather(at.at[kSrc], in, nr, nc);
      b.src = in, b.src_stride = nc * src_size_;
      const std::uint32_t m = kernels_.max(b);
      if (m > most) most = m;
    });
    return most;
  }

 private:
  static constexpr Int kChunk = 512, kScratch = 16 << 10;

  bool src_direct() const { return c_.src_step == src_size_; }
  bool dst_direct() const { return c_.dst_step == dst_size_; }

  void run(const RowBatch& b, bool dynamic) const { (dynamic ? kernels_.dynamic : kernels_.convert)(b); }

  RowBatch batch(const Place& p, Int rows, Int n) const {
    RowBatch b{};
    b.src = p.at[kSrc], b.dst = p.at[kDst], b.src_stride = stride_[kSrc], b.dst_stride = stride_[kDst];
    if (has_src_scale_) b.src_scale = p.at[kSrcScale], b.src_scale_stride = stride_[kSrcScale];
    if (has_dst_scale_) b.dst_scale = p.at[kDstScale], b.dst_scale_stride = stride_[kDstScale];
    b.rows = rows, b.n = n, b.outer = 1, b.src_size = src_size_;
    b.scheme = c_.scheme, b.stream = stream_, b.plain = &plain_;
    return b;
  }

  template <class Block>
  void in_blocks(const Place& p, Int rows, Int n, Block&& block) const {
    const Int chunk = n < kChunk ? n : kChunk, most = kScratch / (chunk * 4);
    for (Int r = 0; r < rows; r += most)
      for (Int i = 0; i < n; i += chunk) {
        Place at = p;
        for (int o = 0; o < kOperands; ++o) at.at[o] += r * stride_[o];
        at.at[kSrc] += i * c_.src_step, at.at[kDst] += i * c_.dst_step;
        block(at, rows - r < most ? rows - r : most, n - i < chunk ? n - i : chunk);
      }
  }

  void gather(const Byte* s, Byte* block, Int rows, Int n) const {
    if (stride_[kSrc] == src_size_) {
      turn_src_(s, c_.src_step, block, n * src_size_, n, rows);
      return;
    }
    for (Int r = 0; r < rows; ++r)
      move_elements(s + r * stride_[kSrc], c_.src_step, block + r * n * src_size_, src_size_, n, src_size_);
  }

  void scatter(const Byte* block, Byte* d, Int rows, Int n) const {
    if (stride_[kDst] == dst_size_) {
      turn_dst_(block, n * dst_size_, d, c_.dst_step, rows, n);
      return;
    }
    for (Int r = 0; r < rows; ++r)
      move_elements(block + r * n * dst_size_, dst_size_, d + r * stride_[kDst], c_.dst_step, n, dst_size_);
  }

  Conversion c_;
  Int src_size_, dst_size_;
  bool stream_;
  Transpose turn_src_, turn_dst_;
  Kernels plain_, kernels_;
  Int stride_[kOperands] = {}, outer_stride_[kOperands] = {};
  bool has_src_scale_ = false, has_dst_scale_ = false;
};

// Make rows long and contiguous. Only where scales are read: computed scales fix what a row is.
void lengthen_rows(Boxes& b, Conversion& c) {
  const Int src_size = size_of(c.src), dst_size = size_of(c.dst);
  if (c.src_step != src_size || c.dst_step != dst_size)
    for (int j = 0; j < b.axes; ++j) {
      if (b.stride[kSrc][j] != src_size || b.stride[kDst][j] != dst_size || !b.one_scale(j)) continue;
      std::swap(b.shape[j], b.run);
      std::swap(b.stride[kSrc][j], c.src_step);
      std::swap(b.stride[kDst][j], c.dst_step);
      break;
    }
  for (bool grown = true; grown;) {
    grown = false;
    for (int j = 0; j < b.axes; ++j) {
      const bool follows = b.stride[kSrc][j] == b.run * c.src_step && b.stride[kDst][j] == b.run * c.dst_step;
      if (!follows || !b.one_scale(j)) continue;
      b.run *= b.shape[j];
      b.erase(j);
      grown = true;
      break;
    }
  }
}

// The same for a row with a computed scale, over the axes that belong to it.
void join_rows(Boxes& b, Conversion& c) {
  while (c.row_axes > 0) {
    const int j = b.axes - 1;
    if (b.stride[kSrc][j] != b.run * c.src_step || b.stride[kDst][j] != b.run * c.dst_step) return;
    b.run *= b.shape[j];
    --b.axes, --c.row_axes;
  }
}

// A few long rows give threads nothing to share: cut them along a new axis where the length divides.
void cut_rows(Boxes& b, const Conversion& c, Int threads) {
  constexpr Int kPiece = 16 << 10;
  if (threads < 2 || b.axes == kMaxAxes || b.rows() >= 8 * threads) return;
  for (Int piece = kPiece; piece >= 256; piece /= 2) {
    if (b.run < 2 * piece || b.run % piece) continue;
    b.shape[b.axes] = b.run / piece;
    for (auto& s : b.stride) s[b.axes] = 0;
    b.stride[kSrc][b.axes] = piece * c.src_step, b.stride[kDst][b.axes] = piece * c.dst_step;
    ++b.axes;
    b.run = piece;
    return;
  }
}

// The innermost axis decides whether staged rows can be transposed as a batch.
void favour_transposes(Boxes& b, const Conversion& c) {
  const auto inner = [&](Operand o, Int step, Int size) {
    for (int j = 0; step != size && j < b.axes; ++j)
      if (b.stride[o][j] == size) return b.move_last(j), true;
    return false;
  };
  if (!inner(kSrc, c.src_step, size_of(c.src))) inner(kDst, c.dst_step, size_of(c.dst));
}

void convert_all_rows(const Boxes& b, const Conversion& c, const How& how, Int threads, bool stream) {
  const RowConverter rows(c, how, b, stream);
  parallel(b.rows(), threads, [&](Int lo, Int hi) {
    const DefaultFloatEnvironment environment;
    walk<4>(b, lo, hi, [&](const Place& p, Int n, Int) { rows.convert(p, n, b.run, c.dynamic); });
    if (stream) fence_streams(how.avx2);
  });
}

// The same for contiguous rows, with the last two axes in one kernel call: a page's rows are few and short.
void convert_all_batches(const Boxes& b, const Conversion& c, const How& how, Int threads, bool stream) {
  const bool two = b.axes >= 2 && b.rows() / b.shape[b.axes - 1] >= 4 * threads;
  const RowConverter rows(c, how, b, stream, two ? b.axes - 2 : -1);
  const Int row_bytes = b.run * size_of(c.src);
  const SourceMap map(b, row_bytes);
  const bool fetch = stream && map.useful();
  Boxes batches = b;
  if (two) --batches.axes;
  const Int inner = two ? b.shape[b.axes - 1] : 1;
  parallel(batches.rows(), threads, [&](Int lo, Int hi) {
    const DefaultFloatEnvironment environment;
    SourceMap::Cursor next(map);
    Memo memo;
    walk<4>(batches, lo, hi, [&](const Place& p, Int n, Int tile) {
      const Byte* ahead = fetch ? next.advance(tile, n * inner * row_bytes) : nullptr;
      if (two) rows.convert_batches(p, n, inner, b.run, ahead, &memo);
      else rows.convert_batches(p, 1, n, b.run, ahead, &memo);
    });
    if (stream) fence_streams(how.avx2);
  });
}

// Scale rows that span the last c.row_axes axes (or that are too long to stage): look at all their elements, then
// convert them.
void convert_groups(Boxes b, const Conversion& c, const How& how, Int threads, bool stream) {
  Boxes group;
  group.tiles = 1, group.axes = c.row_axes, group.run = b.run;
  b.axes -= c.row_axes;
  for (int j = 0; j < c.row_axes; ++j) {
    group.shape[j] = b.shape[b.axes + j];
    for (int o = 0; o < kOperands; ++o) group.stride[o][j] = b.stride[o][b.axes + j];
  }
  const float most_code = with_format(c.dst, [](auto format) {
    if constexpr (format.kSize == 1) return float_of(format.kMax);
    else return 0.0f;  // takes no dynamic scales
  });
  const int last = b.axes - 1;
  parallel(b.rows(), threads, [&](Int lo, Int hi) {
    const DefaultFloatEnvironment environment;
    walk<4>(b, lo, hi, [&](Place p, Int n, Int) {
      for (; n > 0; --n) {
        Boxes one = group;
        Int at[kOperands];
        for (int o = 0; o < kOperands; ++o) {
          at[o] = reinterpret_cast<Int>(p.at[o]);
          one.base[o] = b.base[o] ? &at[o] : nullptr;
        }
        const RowConverter rows(c, how, one, stream);
        std::uint32_t amax = 0;
        walk<4>(one, 0, one.rows(), [&](const Place& q, Int nr, Int) {
          const std::uint32_t m = rows.max(q, nr, one.run);
          if (m > amax) amax = m;
        });
        write_scale(p.at[kDstScale], dynamic_scale(amax, most_code, c.scheme), c.scheme.dst_e8m0);
        walk<4>(one, 0, one.rows(), [&](const Place& q, Int nr, Int) { rows.convert(q, nr, one.run, false); });
        if (last >= 0)
          for (int o = 0; o < kOperands; ++o) p.at[o] += b.stride[o][last];
      }
    });
    if (stream) fence_streams(how.avx2);
  });
}

}  // namespace

void convert_boxes(Boxes b, const Conversion& given, const How& how) {
  Conversion c = given;
  if (b.rows() * b.run == 0) return;
  if (c.dynamic) join_rows(b, c);
  else c.row_axes = 0, b.drop_ones(), lengthen_rows(b, c);
  if (!convert_staged(b, c, how)) convert_rows_of(b, c, how);
}

void convert_rows_of(Boxes b, Conversion c, const How& how) {
  const Int bytes = b.rows() * b.run * size_of(c.dst);
  const bool stream = how.avx2 && how.total > kStreamBytes;
  const Int threads = bytes > kThreadBytes ? how.threads : 1;
  const bool staged = c.src_step != size_of(c.src) || c.dst_step != size_of(c.dst);
  if (c.dynamic && (c.row_axes > 0 || (staged && b.run > RowConverter::most_staged()))) {
    convert_groups(b, c, how, threads, stream);
    return;
  }
  b.drop_ones();
  if (!c.dynamic) lengthen_rows(b, c);
  b.sort_by(stream && !SourceMap(b, b.run * size_of(c.src)).useful() ? kSrc : kDst);
  b.merge();
  favour_transposes(b, c);
  if (!c.dynamic) cut_rows(b, c, threads);
  if (c.src_step == size_of(c.src) && c.dst_step == size_of(c.dst)) convert_all_batches(b, c, how, threads, stream);
  else convert_all_rows(b, c, how, threads, stream);
}

}  // namespace regauge
