// Copies of strided boxes: the order of the walk, the choice of kernel, and the portable kernels.
#include "copy.hpp"

#include <cstring>

#include "ahead.hpp"

namespace regauge {
namespace {

using Byte = std::uint8_t;
using Int = std::int64_t;

template <int Size>
void fixed_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int, const Byte*) {
  for (; rows > 0; --rows, s += ss, d += ds) std::memcpy(d, s, Size);
}

// Runs of Size+1 .. 2*Size bytes as two moves that may overlap.
template <int Size>
void two_moves(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int run, const Byte*) {
  const Int last = run - Size;
  for (; rows > 0; --rows, s += ss, d += ds) {
    Byte low[Size], high[Size];
    std::memcpy(low, s, Size), std::memcpy(high, s + last, Size);
    std::memcpy(d, low, Size), std::memcpy(d + last, high, Size);
  }
}

void any_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int run, const Byte*) {
  for (; rows > 0; --rows, s += ss, d += ds) std::memcpy(d, s, static_cast<std::size_t>(run));
}

// Blocks of 16 x 16, so that both sides stay in the first-level cache.
template <int Size>
void transpose_blocks(const Byte* s, Int ss, Byte* d, Int ds, Int ni, Int nj) {
  constexpr Int kBlock = 16;
  for (Int i0 = 0; i0 < ni; i0 += kBlock)
    for (Int j0 = 0; j0 < nj; j0 += kBlock)
      for (Int j = j0; j < nj && j < j0 + kBlock; ++j)
        for (Int i = i0; i < ni && i < i0 + kBlock; ++i)
          std::memcpy(d + i * Size + j * ds, s + i * ss + j * Size, Size);
}

// Index of the axis along which operand `o` is contiguous, or -1.
int contiguous_axis(const Boxes& b, Operand o) {
  for (int j = 0; j < b.axes; ++j)
    if (b.stride[o][j] == b.run && b.shape[j] >= 4) return j;
  return -1;
}

// Grow the run over axes that continue it on both sides, then order and join what is left.
void normalise(Boxes& b, bool stream) {
  b.drop_ones();
  for (bool grown = true; grown;) {
    grown = false;
    for (int j = 0; j < b.axes; ++j) {
      if (b.stride[kSrc][j] != b.run || b.stride[kDst][j] != b.run) continue;
      b.run *= b.shape[j];
      b.erase(j);
      grown = true;
      break;
    }
  }
  b.sort_by(stream && !SourceMap(b, b.run).useful() ? kSrc : kDst);
  b.merge();
}

// A few long runs give threads nothing to share: cut them into pieces along a new axis. Returns the bytes that are left
// at the end of every run.
Int cut_runs(Boxes& b, Int threads) {
  constexpr Int kPiece = 64 << 10;
  if (threads < 2 || b.run < 2 * kPiece || b.axes == kMaxAxes || b.rows() >= 8 * threads) return 0;
  const Int rest = b.run % kPiece;
  b.shape[b.axes] = b.run / kPiece;
  for (auto& s : b.stride) s[b.axes] = kPiece;
  ++b.axes;
  b.run = kPiece;
  return rest;
}

void copy_all_rows(const Boxes& b, const How& how, Int threads, bool stream) {
  const CopyRows kernel = copy_rows_for(b.run, stream, how.avx2);
  const int last = b.axes - 1;
  const Int ss = last < 0 ? 0 : b.stride[kSrc][last], ds = last < 0 ? 0 : b.stride[kDst][last];
  const SourceMap map(b, b.run);
  const bool fetch = stream && map.useful();
  parallel(b.rows(), threads, [&](Int lo, Int hi) {
    SourceMap::Cursor next(map);
    walk<2>(b, lo, hi, [&](const Place& p, Int n, Int tile) {
      kernel(p.at[kSrc], ss, p.at[kDst], ds, n, b.run, fetch ? next.advance(tile, n * b.run) : nullptr);
    });
    if (stream) fence_streams(how.avx2);
  });
}

// The last axis j is contiguous in the source; axis i, taken out of the boxes, is contiguous in the target.
struct Turn {
  Int ni, src_stride;  // axis i: its length and its stride in the source
  Int dst_stride;      // of axis j
};

// Transpose blocks of at most 64 target rows. When streaming, a block is built in the cache and leaves it in whole lines.
void transpose_rows(const Boxes& b, const How& how, Int threads, bool stream, const Turn& turn) {
  constexpr Int kRows = 64, kBytes = 512;
  const Transpose kernel = transpose_for(b.run, how.avx2);
  const Int size = b.run, most_i = kBytes / size;
  const Int step = kRows < b.shape[b.axes - 1] ? kRows : b.shape[b.axes - 1];
  parallel(b.rows(), threads, [&](Int lo, Int hi) {
    alignas(64) Byte block[kRows * kBytes];
    walk<2>(b, lo, hi, [&](const Place& p, Int n, Int) {
      for (Int j = 0; j < n; j += step)
        for (Int i = 0; i < turn.ni; i += most_i) {
          const Int nj = n - j < step ? n - j : step, ni = turn.ni - i < most_i ? turn.ni - i : most_i;
          const Byte* s = p.at[kSrc] + j * size + i * turn.src_stride;
          Byte* d = p.at[kDst] + j * turn.dst_stride + i * size;
          if (stream && ni * size >= 64) {
            kernel(s, turn.src_stride, block, kBytes, ni, nj);
            copy_rows_for(ni * size, true, how.avx2)(block, kBytes, d, turn.dst_stride, nj, ni * size, nullptr);
          } else {
            kernel(s, turn.src_stride, d, turn.dst_stride, ni, nj);
          }
        }
    });
    if (stream) fence_streams(how.avx2);
  });
}

}  // namespace

CopyRows copy_rows_for(std::int64_t run, bool stream, bool avx2) {
#if defined(__x86_64__)
  if (avx2)
    if (const CopyRows kernel = avx2::copy_rows_for(run, stream)) return kernel;
#else
  (void)stream, (void)avx2;
#endif
  switch (run) {
    case 1: return fixed_rows<1>;
    case 2: return fixed_rows<2>;
    case 4: return fixed_rows<4>;
    case 8: return fixed_rows<8>;
    case 16: return fixed_rows<16>;
    default: break;
  }
  if (run > 16 && run < 32) return two_moves<16>;
  if (run > 8 && run < 16) return two_moves<8>;
  if (run > 4 && run < 8) return two_moves<4>;
  return any_rows;
}

Transpose transpose_for(std::int64_t size, bool avx2) {
#if defined(__x86_64__)
  if (avx2) return avx2::transpose_for(size);
#else
  (void)avx2;
#endif
  switch (size) {
    case 1: return transpose_blocks<1>;
    case 2: return transpose_blocks<2>;
    case 4: return transpose_blocks<4>;
    case 8: return transpose_blocks<8>;
    default: return nullptr;
  }
}

void fence_streams(bool avx2) {
#if defined(__x86_64__)
  if (avx2) avx2::fence();
#else
  (void)avx2;
#endif
}

void copy_boxes(Boxes b, const How& how) {
  const Int bytes = b.rows() * b.run;
  if (bytes == 0) return;
  const bool stream = how.total > kStreamBytes;
  const Int threads = bytes > kThreadBytes ? how.threads : 1;
  normalise(b, stream);
  const int j = contiguous_axis(b, kSrc), i = contiguous_axis(b, kDst);
  if (i >= 0 && j >= 0 && transpose_for(b.run, how.avx2) != nullptr) {
    const Turn turn{b.shape[i], b.stride[kSrc][i], b.stride[kDst][j]};
    b.move_last(j);
    b.erase(i < j ? i : i - 1);
    transpose_rows(b, how, threads, stream, turn);
    return;
  }
  Boxes tail = b;
  const Int rest = cut_runs(b, threads);
  copy_all_rows(b, how, threads, stream);
  if (rest == 0) return;
  // The rest of every cut run: one short run at the end of each.
  std::vector<Int> src(tail.base[kSrc], tail.base[kSrc] + tail.tiles);
  std::vector<Int> dst(tail.base[kDst], tail.base[kDst] + tail.tiles);
  for (auto& at : src) at += tail.run - rest;
  for (auto& at : dst) at += tail.run - rest;
  tail.base[kSrc] = src.data(), tail.base[kDst] = dst.data(), tail.run = rest;
  copy_all_rows(tail, how, 1, false);
}

}  // namespace regauge
