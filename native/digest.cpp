// Digests of strided boxes: the order of the walk, staging of rows that are not contiguous, the sum modulo a prime.
#include "digest.hpp"

#include <cstring>
#include <mutex>

#include "ahead.hpp"

namespace regauge {
namespace {

using Byte = std::uint8_t;
using Int = std::int64_t;
using Wide = std::uint64_t;
using Double = unsigned __int128;

constexpr Wide kGap = 59;  // 2^64 - kGap is the prime
constexpr Wide kPrime = 0 - kGap;

// A sum of 128-bit products.
struct Sum {
  Wide low = 0, high = 0, top = 0;

  void add(Wide l, Wide h = 0, Wide t = 0) {
#if defined(__x86_64__)
    // Compilers keep carries of 128-bit sums in memory or in compares; this is three instructions.
    asm("addq %3, %0\n\tadcq %4, %1\n\tadcq %5, %2" : "+&r"(low), "+&r"(high), "+r"(top) : "r"(l), "r"(h), "re"(t) : "cc");
#else
    const Double lows = static_cast<Double>(low) + l, highs = static_cast<Double>(high) + h + static_cast<Wide>(lows >> 64);
    low = static_cast<Wide>(lows), high = static_cast<Wide>(highs), top += t + static_cast<Wide>(highs >> 64);
#endif
  }
  void add(const Sum& s) { add(s.low, s.high, s.top); }
  void add_product(Wide a, Wide b) {
    const Double v = static_cast<Double>(a) * b;
    add(static_cast<Wide>(v), static_cast<Wide>(v >> 64));
  }
  Wide reduced() const {
    const Double one = static_cast<Double>(high) * kGap + low + static_cast<Double>(top) * (kGap * kGap);
    const Double two = (one >> 64) * kGap + static_cast<Wide>(one);
    const Wide r = static_cast<Wide>(two) + static_cast<Wide>(two >> 64) * kGap;
    return r >= kPrime ? r - kPrime : r;
  }
};

// A sum of products of keys and sums, without a reduction on the way: one sum for every 64 bits of the factors.
struct Folded {
  Sum limb[3];

  void add_product(Wide key, const Sum& s) {
    limb[0].add_product(key, s.low);
    limb[1].add_product(key, s.high);
    limb[2].add_product(key, s.top);
  }
  Wide reduced() const {
    Sum all;
    all.add(limb[0].reduced());
    all.add_product(limb[1].reduced(), kGap);
    all.add_product(limb[2].reduced(), kGap * kGap);
    return all.reduced();
  }
};

inline Wide key_at(const Byte* p, int i = 0) {
  Wide v;
  std::memcpy(&v, p + 8 * i, 8);
  return v;
}

// Add b * (a0 x0 + a1 x1 + a2) of n rows. A key that all rows share is multiplied once.
void fold(Folded& all, const Wide* x, Int n, const Byte* row_key, Int row_step, const Byte* token_key, Int token_step) {
  if (row_step == 0) {
    Sum s0, s1, count;
    for (Int i = 0; i < n; ++i, token_key += token_step) {
      const Wide b = key_at(token_key);
      s0.add_product(b, x[2 * i]), s1.add_product(b, x[2 * i + 1]), count.add(b);
    }
    all.add_product(key_at(row_key, 0), s0);
    all.add_product(key_at(row_key, 1), s1);
    all.add_product(key_at(row_key, 2), count);
    return;
  }
  const Int together = token_step == 0 ? n : 1;
  for (Int i = 0; i < n; i += together, token_key += token_step) {
    Sum s0, s1, count;  // apart, so that their chains of carries overlap
    for (Int j = i; j < i + together; ++j, row_key += row_step) {
      s0.add_product(key_at(row_key, 0), x[2 * j]);
      s1.add_product(key_at(row_key, 1), x[2 * j + 1]);
      count.add(key_at(row_key, 2));
    }
    s0.add(s1), s0.add(count);
    all.add_product(key_at(token_key), s0);
  }
}

// A digest that several threads add to.
class Total {
 public:
  void add(const Folded& part) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sum_.add(part.reduced());
  }
  Wide reduced() const { return sum_.reduced(); }

 private:
  std::mutex mutex_;
  Sum sum_;
};

constexpr Int kBatch = 32;  // rows between two folds

// The axes of a row, outermost first, and whether its elements are contiguous on each side.
struct Row {
  int axes;
  Int shape[kMaxAxes];
  Int stride[2][kMaxAxes];
  Int run, bytes;
  bool flat[2];

  Row(const Boxes& b, int row_axes) : axes(0), run(b.run) {
    for (int j = b.axes - row_axes; j < b.axes; ++j) {
      if (b.shape[j] == 1) continue;
      shape[axes] = b.shape[j];
      for (int o = 0; o < 2; ++o) stride[o][axes] = b.stride[o][j];
      ++axes;
    }
    // Grow the run over the axes that continue it on both sides: the order of elements stays.
    while (axes > 0 && stride[kSrc][axes - 1] == run && (!b.base[kDst] || stride[kDst][axes - 1] == run))
      run *= shape[--axes];
    bytes = run;
    for (int j = 0; j < axes; ++j) bytes *= shape[j];
    for (int o = 0; o < 2; ++o) {
      Int length = run;
      flat[o] = true;
      for (int j = axes - 1; j >= 0; length *= shape[j--]) flat[o] = flat[o] && stride[o][j] == length;
    }
  }
};

// Moves rows between their places and contiguous ones.
class RowMover {
 public:
  RowMover(const Row& row, const Boxes& b, bool avx2)
      : row_(row), turn_(row.axes == 1 ? transpose_for(row.run, avx2) : nullptr), copy_(copy_rows_for(row.run, false, avx2)) {
    for (int o = 0; o < 2; ++o) step_[o] = b.axes > 0 ? b.stride[o][b.axes - 1] : 0;
  }

  void gather(const Byte* s, Byte* block, Int rows) const {
    if (turn_ && step_[kSrc] == row_.run && rows > 1) {
      turn_(s, row_.stride[kSrc][0], block, row_.bytes, row_.shape[0], rows);
      return;
    }
    for (Int r = 0; r < rows; ++r)
      pieces(kSrc, [&](Int at, Int stride, Int n, Int flat) {
        copy_(s + r * step_[kSrc] + at, stride, block + r * row_.bytes + flat, row_.run, n, row_.run, nullptr);
      });
  }

  void scatter(const Byte* block, Int block_step, Byte* d, Int rows) const {
    if (turn_ && step_[kDst] == row_.run && rows > 1) {
      turn_(block, block_step, d, row_.stride[kDst][0], rows, row_.shape[0]);
      return;
    }
    for (Int r = 0; r < rows; ++r)
      pieces(kDst, [&](Int at, Int stride, Int n, Int flat) {
        copy_(block + r * block_step + flat, row_.run, d + r * step_[kDst] + at, stride, n, row_.run, nullptr);
      });
  }

 private:
  // visit(offset of a line of runs, stride of its runs, their number, offset in the contiguous row)
  template <class Visit>
  void pieces(Operand o, Visit&& visit) const {
    const Int inner = row_.axes > 0 ? row_.shape[row_.axes - 1] : 1, stride = row_.axes > 0 ? row_.stride[o][row_.axes - 1] : 0;
    for (Int flat = 0; flat < row_.bytes; flat += inner * row_.run) {
      Int left = flat / (inner * row_.run), at = 0;
      for (int j = row_.axes - 2; j >= 0; --j) at += left % row_.shape[j] * row_.stride[o][j], left /= row_.shape[j];
      visit(at, stride, inner, flat);
    }
  }

  const Row& row_;
  Transpose turn_;
  CopyRows copy_;
  Int step_[2];
};

// Rows that are contiguous on both sides: one pass.
void flat_rows(const Boxes& b, DigestRows kernel, const std::uint32_t* words, Int lo, Int hi, const SourceMap& map, bool fetch,
               Folded& sum) {
  const int last = b.axes - 1;
  Int step[kOperands] = {};
  for (int o = 0; o < kOperands; ++o) step[o] = last < 0 ? 0 : b.stride[o][last];
  SourceMap::Cursor next(map);
  walk<4>(b, lo, hi, [&](Place p, Int n, Int tile) {
    Wide x[2 * kBatch];
    for (Int some; n > 0; n -= some) {
      some = n < kBatch ? n : kBatch;
      const Byte* ahead = fetch ? next.advance(tile, some * b.run) : nullptr;
      kernel(p.at[kSrc], step[kSrc], p.at[kDst], step[kDst], some, b.run, ahead, words, x);
      fold(sum, x, some, p.at[kRowKey], step[kRowKey], p.at[kTokenKey], step[kTokenKey]);
      for (int o = 0; o < kOperands; ++o) p.at[o] += some * step[o];
    }
  });
}

// Rows that are scattered on a side pass through a block in the cache.
void staged_rows(const Boxes& b, const Row& row, DigestRows kernel, const std::uint32_t* words, const How& how, Int lo, Int hi,
                 Folded& sum) {
  constexpr Int kScratch = 32 << 10;
  const bool writes = b.base[kDst] != nullptr;
  const RowMover mover(row, b, how.avx2);
  const int last = b.axes - 1;
  Int step[kOperands] = {};
  for (int o = 0; o < kOperands; ++o) step[o] = last < 0 ? 0 : b.stride[o][last];
  const Int fit = kScratch / row.bytes, most = fit < kBatch ? fit : kBatch;
  alignas(64) Byte block[kScratch];
  walk<4>(b, lo, hi, [&](Place p, Int n, Int) {
    Wide x[2 * kBatch];
    for (Int some; n > 0; n -= some) {
      some = n < most ? n : most;
      const Byte* s = p.at[kSrc];
      Int s_step = step[kSrc];
      if (!row.flat[kSrc]) mover.gather(s, block, some), s = block, s_step = row.bytes;
      const bool direct = writes && row.flat[kDst];
      kernel(s, s_step, direct ? p.at[kDst] : nullptr, step[kDst], some, row.bytes, nullptr, words, x);
      if (writes && !direct) mover.scatter(s, s_step, p.at[kDst], some);
      fold(sum, x, some, p.at[kRowKey], step[kRowKey], p.at[kTokenKey], step[kTokenKey]);
      for (int o = 0; o < kOperands; ++o) p.at[o] += some * step[o];
    }
  });
}

// Rows one after the other along the axis whose steps are single runs can be transposed as a batch.
void favour_transposes(Boxes& b, const Row& row) {
  for (const Operand o : {kSrc, kDst})
    for (int j = 0; !row.flat[o] && j < b.axes; ++j)
      if (b.stride[o][j] == row.run && b.shape[j] >= 4) return b.move_last(j);
}

}  // namespace

Wide digest_boxes(Boxes b, int row_axes, const std::uint32_t* words, const How& how) {
  const Row row(b, row_axes);
  const bool writes = b.base[kDst] != nullptr, flat = row.flat[kSrc] && (!writes || row.flat[kDst]);
  const Int bytes = b.rows() * b.run;
  if (bytes == 0) return 0;
  const bool stream = how.total > kStreamBytes;
  const Int threads = bytes > kThreadBytes ? how.threads : 1;
  const SourceMap map(b, b.run);
  const bool fetch = flat && stream && map.useful();
  b.axes -= row_axes;
  b.run = row.bytes;
  b.drop_ones();
  b.sort_by(!writes || (stream && !map.useful()) ? kSrc : kDst);
  b.merge();
  if (!flat) favour_transposes(b, row);
  const DigestRows kernel = digest_rows_for(row.bytes, stream, how.avx2);
  Total total;
  parallel(b.rows(), threads, [&](Int lo, Int hi) {
    Folded sum;
    if (flat) flat_rows(b, kernel, words, lo, hi, map, fetch, sum);
    else staged_rows(b, row, kernel, words, how, lo, hi, sum);
    if (stream && writes) fence_streams(how.avx2);
    total.add(sum);
  });
  return total.reduced();
}

}  // namespace regauge
