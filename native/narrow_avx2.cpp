// bfloat16 to fp8 by steps (steps_avx2.hpp) where rows share a scale: what prefill sends most. Whatever steps cannot do
// goes to the kernels of convert_avx2.cpp.
#include "convert.hpp"

#if defined(__AVX2__)
#include "steps_avx2.hpp"

namespace regauge::avx2 {
namespace {

// A part of one row by the plain kernel; all rows share their scales.
__attribute__((noinline)) void plain_part(const RowBatch& b, const Byte* s, Byte* d, Int count) {
  RowBatch part = b;
  part.src = s, part.dst = d;
  part.outer = part.rows = 1, part.n = count, part.stream = b.stream && count % 64 == 0, part.ahead = nullptr;
  b.plain->convert(part);
}

// One row; returns how many elements the plain kernel had to do.
template <class Dst, bool Stream>
REGAUGE_INLINE Int step_row(const Byte* s, Byte* d, const Byte* ahead, Stepper<Dst, false>& steps, const RowBatch& b) {
  constexpr Int kWide = kGroup * kBlock, kLine = 2 * kBlock;
  Int i = 0, slow = 0;
  for (; i + kWide <= b.n; i += kWide) {
    if (step_group<kGroup, Stream>(s + 2 * i, d + i, ahead + 2 * i, steps)) continue;
    plain_part(b, s + 2 * i, d + i, kWide);
    slow += kWide;
  }
  if (__builtin_expect(i == b.n, 1)) return slow;
  for (; i + kLine <= b.n; i += kLine) {
    if (step_group<2, Stream>(s + 2 * i, d + i, ahead + 2 * i, steps)) continue;
    plain_part(b, s + 2 * i, d + i, kLine);
    slow += kLine;
  }
  if (i < b.n) plain_part(b, s + 2 * i, d + i, b.n - i);
  return slow;
}

template <class Dst, bool Stream>
Int step_rows(const RowBatch& b, const Steps<Dst>& table) {
  const Constants<Dst> constants;
  Stepper<Dst, false> steps(constants, table);
  const Fetch fetch(b, 2 * b.n);
  Int slow = 0;
  for (Int o = 0; o < b.outer; ++o) {
    const Byte *s = b.src + o * b.outer_stride[kSrc], *ahead = fetch.row(o, 0);
    Byte* d = b.dst + o * b.outer_stride[kDst];
    for (Int r = b.rows; r > 0; --r, s += b.src_stride, d += b.dst_stride, ahead += fetch.stride)
      slow += step_row<Dst, Stream>(s, d, ahead, steps, b);
  }
  return slow;
}

// Where many codes are subnormal the steps only cost time: leave them alone for some chunks, then look again.
template <class Dst>
void step_chunk(const RowBatch& b, bool lines, Steps<Dst>& table) {
  if (table.pause > 0) {
    --table.pause;
    b.plain->convert(b);
    return;
  }
  const Int slow = lines ? step_rows<Dst, true>(b, table) : step_rows<Dst, false>(b, table);
  if (5 * slow > b.outer * b.rows * b.n) table.pause = kPause;
}

template <class Dst>
void step_batch(const RowBatch& b, Steps<Dst>& table) {
  constexpr Int kChunk = 32 << 10;  // elements
  const bool lines = whole_lines(b, b.n);
  if (b.outer * b.rows * b.n <= kChunk) {
    step_chunk(b, lines, table);
    return;
  }
  const Int rows = b.n < kChunk ? kChunk / b.n : 1;
  for (Int o = 0; o < b.outer; ++o) {
    const RowBatch inner = inner_batch(b, o);
    for (Int r = 0; r < b.rows; r += rows) step_chunk(some_rows(inner, r, rows), lines, table);
  }
}

// Of the scale that all rows share; there is at most one.
template <class Dst>
Steps<Dst> steps_of(const RowBatch& b) {
  float factor = 1.0f;
  if (b.src_scale) factor = read_scale(b.src_scale, b.scheme.src_e8m0);
  if (b.dst_scale) factor = 1.0f / read_scale(b.dst_scale, b.scheme.dst_e8m0);
  return Steps<Dst>::make(b, factor);
}

template <class Dst>
void rows_of(const RowBatch& b) {
  constexpr Int kWorthATable = 4096;  // elements
  const bool both = b.src_scale && b.dst_scale;
  if (both || b.n < 2 * kBlock) {
    b.plain->convert(b);
    return;
  }
  if (!one_scale(b)) {
    if (!split_by_scales(b, rows_of<Dst>)) b.plain->convert(b);
    return;
  }
  Memo::Slot own;
  Memo::Slot& slot = slot_of(b, own);
  static_assert(sizeof(Steps<Dst>) <= Memo::kBytes);
  if (!slot.full && slot.seen < 2 && b.outer * b.rows * b.n < kWorthATable) {
    b.plain->convert(b);
    return;
  }
  Steps<Dst> table;
  if (slot.full) std::memcpy(&table, slot.data, sizeof table);
  else table = steps_of<Dst>(b);
  if (table.usable) step_batch(b, table);
  else b.plain->convert(b);
  std::memcpy(slot.data, &table, sizeof table);
  slot.full = true;
}

}  // namespace

ConvertRows narrow_rows(Dtype src, Dtype dst) {
  if (src != Dtype::kBFloat16) return nullptr;
  switch (dst) {
    case Dtype::kE4M3: return rows_of<E4M3>;
    case Dtype::kE4M3Fnuz: return rows_of<E4M3Fnuz>;
    case Dtype::kE5M2: return rows_of<E5M2>;
    default: return nullptr;
  }
}

}  // namespace regauge::avx2
#endif
