// Conversion of rows of elements between number formats, with scales.
#pragma once

#include "copy.hpp"
#include "dtypes.hpp"

namespace regauge {

/// What happens to the elements of one row: see `Convert` in plan/tiles.py.
struct Conversion {
  Dtype src, dst;
  std::int64_t src_step, dst_step;  // bytes between elements
  bool divide = false;              // apply the target scale by division instead of by its reciprocal
  bool dynamic = false;             // compute the target scale of a row and store it
  int row_axes = 0;
};

/// What a kernel has worked out for the last scales it met; one per thread, empty at first.
struct alignas(32) Memo {
  std::uint8_t data[96] = {};
  std::uint32_t key[2];
  bool full = false;
};

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
  bool divide, stream;
  const std::uint8_t* ahead;  // unless null: as many source bytes that the caller will read soon
  Memo* memo;                 // unless null: for the kernel to remember things in
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
  return part;
}

/// True when all rows of the batch share their scales.
inline bool one_scale(const RowBatch& b) {
  return (b.src_scale_stride | b.dst_scale_stride | b.outer_stride[kSrcScale] | b.outer_stride[kDstScale]) == 0;
}

/// What to fetch while a row is worked on: what the caller asked for, else this batch's own source some way ahead.
struct Fetch {
  const std::uint8_t* at;
  std::int64_t stride, outer_stride;

  Fetch(const RowBatch& b, std::int64_t row_bytes)
      : at(b.ahead), stride(b.ahead ? row_bytes : b.src_stride),
        outer_stride(b.ahead ? b.rows * row_bytes : b.outer_stride[kSrc]) {
    constexpr std::int64_t kLeap = 2048;
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
/// The same with faster ones for bfloat16 to e4m3fn and e5m2.
Kernels narrow_kernels(Dtype src, Dtype dst);
/// e4m3fn and e5m2 to bfloat16 through a table of the 16 scaled mantissas, where the scale allows it; else null.
ConvertRows table_rows(Dtype src, Dtype dst);
}  // namespace avx2
#endif

/// Convert every row of `b` (b.run in elements).
void convert_boxes(Boxes b, const Conversion& c, const How& how);

}  // namespace regauge
