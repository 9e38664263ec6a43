// Conversion of rows of elements between number formats, with scales.
#pragma once

#include "copy.hpp"
#include "dtypes.hpp"

namespace regauge {

/// How the target scale is applied: v * (1 / s), v / s, or v / s rounded to the source's dtype.
enum class Rule : std::uint8_t { kReciprocal, kDivide, kDivideSource };

/// How scales are computed, stored and applied: see `Convert` in plan/tiles.py.
struct ScaleScheme {
  Rule rule = Rule::kReciprocal;
  bool pow2 = false;                             // computed scales are rounded up to powers of two
  bool src_e8m0 = false, dst_e8m0 = false;       // else float32
  float floor = 1.17549435e-38f;                 // of computed scales; 2^-126

  bool divides() const { return rule != Rule::kReciprocal; }
};

/// What happens to the elements of one row: see `Convert` in plan/tiles.py.
struct Conversion {
  Dtype src, dst;
  std::int64_t src_step, dst_step;  // bytes between elements
  ScaleScheme scheme;
  bool dynamic = false;             // compute the target scale of a row and store it
  int row_axes = 0;
};

/// What a kernel has worked out for the scales it met lately; one per thread, empty at first. The heads of a layer, each
/// with its own scale, fit.
struct Memo {
  static constexpr int kSlots = 32, kBytes = 288;
  struct alignas(32) Slot {
    std::uint8_t data[kBytes];  // valid if full
    std::uint32_t key[2];
    int seen = 0;  // batches with these scales so far, up to 2
    bool full = false;
  };
  Slot slots[kSlots];
  std::uint8_t pause = 0;  // see kPause

  /// The slot of a pair of scales, emptied if it held others.
  Slot& of(std::uint32_t a, std::uint32_t b) {
    Slot& slot = slots[((a ^ b * 0x9e3779b9u) * 0x85ebca6bu) >> 27];
    if (slot.seen == 0 || slot.key[0] != a || slot.key[1] != b) slot.key[0] = a, slot.key[1] = b, slot.seen = 0, slot.full = false;
    if (slot.seen < 2) ++slot.seen;
    return slot;
  }
};

struct Kernels;

/// `outer` times `rows` rows of `n` contiguous elements. A null scale pointer means no scale; strides are in bytes.
struct RowBatch {
  const std::uint8_t* src;
  std::uint8_t* dst;
  std::int64_t src_stride, dst_stride;
  const std::uint8_t* src_scale;
  std::uint8_t* dst_scale;
  std::int64_t src_scale_stride, dst_scale_stride;
  std::int64_t rows, n;
  std::int64_t outer;
  std::int64_t outer_stride[kOperands];
  std::int64_t src_size;  // bytes of one source element
  ScaleScheme scheme;
  bool stream;
  const std::uint8_t* ahead;  // unless null: as many source bytes that the caller will read soon
  Memo* memo;                 // unless null: for the kernel to remember things in
  const Kernels* plain;       // which can do everything, for what a faster kernel cannot
};

/// Convert rows with the scales read from memory.
using ConvertRows = void (*)(const RowBatch&);
/// Compute every row's scale, store it, convert.
using DynamicRows = void (*)(const RowBatch&);
/// Largest |v| of the rows, v with the source scale applied, as the bits of a float (may be those of infinity or a NaN).
using MaxRows = std::uint32_t (*)(const RowBatch&);

/// The rows of one outer index.
inline RowBatch inner_batch(const RowBatch& b, std::int64_t index) {
  RowBatch part = b;
  part.outer = 1;
  part.src += index * b.outer_stride[kSrc], part.dst += index * b.outer_stride[kDst];
  if (b.src_scale) part.src_scale += index * b.outer_stride[kSrcScale];
  if (b.dst_scale) part.dst_scale += index * b.outer_stride[kDstScale];
  if (b.ahead) part.ahead += index * b.rows * b.n * b.src_size;
  for (auto& stride : part.outer_stride) stride = 0;
  return part;
}

/// Up to `most` rows from row `first` on, of a batch with one outer index.
inline RowBatch some_rows(const RowBatch& b, std::int64_t first, std::int64_t most) {
  RowBatch part = b;
  part.src += first * b.src_stride, part.dst += first * b.dst_stride;
  if (b.src_scale) part.src_scale += first * b.src_scale_stride;
  if (b.dst_scale) part.dst_scale += first * b.dst_scale_stride;
  if (b.ahead) part.ahead += first * b.n * b.src_size;
  part.rows = b.rows - first < most ? b.rows - first : most;
  return part;
}

/// The rows of index r of every outer index, as one batch.
inline RowBatch outer_batch(const RowBatch& b, std::int64_t r) {
  RowBatch part = b;
  part.src += r * b.src_stride, part.dst += r * b.dst_stride;
  part.src_stride = b.outer_stride[kSrc], part.dst_stride = b.outer_stride[kDst];
  if (b.src_scale) part.src_scale += r * b.src_scale_stride, part.src_scale_stride = b.outer_stride[kSrcScale];
  if (b.dst_scale) part.dst_scale += r * b.dst_scale_stride, part.dst_scale_stride = b.outer_stride[kDstScale];
  if (b.ahead) part.ahead += r * b.outer * b.n * b.src_size;
  part.rows = b.outer, part.outer = 1;
  for (auto& stride : part.outer_stride) stride = 0;
  return part;
}

/// Call `f` with parts that share their scales where there are large ones, as scales per head give; else return false.
template <class F>
inline bool split_by_scales(const RowBatch& b, F&& f) {
  constexpr std::int64_t kMany = 8;
  if (b.rows >= kMany && (b.src_scale_stride | b.dst_scale_stride) == 0) {
    for (std::int64_t o = 0; o < b.outer; ++o) f(inner_batch(b, o));
    return true;
  }
  if (b.outer < kMany || (b.outer_stride[kSrcScale] | b.outer_stride[kDstScale]) != 0) return false;
  for (std::int64_t r = 0; r < b.rows; ++r) f(outer_batch(b, r));
  return true;
}

/// True when all rows of the batch share their scales.
inline bool one_scale(const RowBatch& b) {
  return (b.src_scale_stride | b.dst_scale_stride | b.outer_stride[kSrcScale] | b.outer_stride[kDstScale]) == 0;
}

/// True when the first `row_bytes` bytes of every target row are to be streamed and are whole cache lines.
inline bool whole_lines(const RowBatch& b, std::int64_t row_bytes) {
  const std::int64_t steps = b.dst_stride | b.outer_stride[kDst] | row_bytes;
  return b.stream && ((reinterpret_cast<std::intptr_t>(b.dst) | steps) & 63) == 0;
}

/// What to fetch while a row is worked on: what the caller asked for, else this batch's own source some way ahead.
struct Fetch {
  const std::uint8_t* at;
  std::int64_t stride, outer_stride;

  Fetch(const RowBatch& b, std::int64_t row_bytes)
      : at(b.ahead), stride(b.ahead ? row_bytes : b.src_stride),
        outer_stride(b.ahead ? b.rows * row_bytes : b.outer_stride[kSrc]) {
    constexpr std::int64_t kLeap = 4096;
    if (!at) at = b.src + (b.src_stride == row_bytes || b.rows == 1 ? kLeap : 2 * b.src_stride);
  }
  const std::uint8_t* row(std::int64_t outer, std::int64_t r) const { return at + outer * outer_stride + r * stride; }
};

struct Kernels {
  ConvertRows convert;
  DynamicRows dynamic;  // null unless the target takes dynamic scales
  MaxRows max;
};

Kernels portable_kernels(Dtype src, Dtype dst);
#if defined(__x86_64__)
namespace avx2 {
Kernels kernels(Dtype src, Dtype dst);
/// Faster ones, which leave what they cannot do to the batch's `plain` ones; null where there are none. bfloat16 to fp8 with shared scales:
ConvertRows narrow_rows(Dtype src, Dtype dst);
/// bfloat16 to 8 bits with computed scales.
DynamicRows dynamic_rows(Dtype src, Dtype dst);
/// fp8 to bfloat16 through a table of the 16 scaled mantissas.
ConvertRows table_rows(Dtype src, Dtype dst);
/// 8 bits to 8 bits with shared scales through a table of all codes.
ConvertRows byte_rows(Dtype src, Dtype dst);
}  // namespace avx2
#endif

/// Convert every row of `b` (b.run in elements).
void convert_boxes(Boxes b, const Conversion& c, const How& how);

}  // namespace regauge
