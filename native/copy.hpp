// Copies of strided boxes in one data type.
#pragma once

#include "boxes.hpp"

namespace regauge {

/// How one call runs. `total`: bytes of output of everything the caller does in this go; it decides on streaming.
struct How {
  std::int64_t threads = 1;
  std::int64_t total = 0;
  bool avx2 = false;
};

/// Copy every run of `b` (b.run in bytes). Boxes must not overlap.
void copy_boxes(Boxes b, const How& how);

/// `rows` runs of `run` bytes, `src_stride` and `dst_stride` bytes apart. `ahead`, unless null: rows * run bytes that the
/// caller will read soon.
using CopyRows = void (*)(const std::uint8_t* src, std::int64_t src_stride, std::uint8_t* dst, std::int64_t dst_stride,
                          std::int64_t rows, std::int64_t run, const std::uint8_t* ahead);

/// Transpose: element (i, j) of `size` bytes goes from src + i*src_stride + j*size to dst + i*size + j*dst_stride.
using Transpose = void (*)(const std::uint8_t* src, std::int64_t src_stride, std::uint8_t* dst, std::int64_t dst_stride,
                           std::int64_t ni, std::int64_t nj);

/// The copy kernel for runs of `run` bytes; `stream`: stores bypass the cache.
CopyRows copy_rows_for(std::int64_t run, bool stream, bool avx2);
/// The transpose for elements of 1, 2, 4 or 8 bytes.
Transpose transpose_for(std::int64_t size, bool avx2);
/// Order this thread's streaming stores before whatever it does next.
void fence_streams(bool avx2);

#if defined(__x86_64__)
namespace avx2 {
CopyRows copy_rows_for(std::int64_t run, bool stream);
Transpose transpose_for(std::int64_t size);
void fence();
/// Copy n bytes with streaming stores.
void stream_copy(const std::uint8_t* src, std::uint8_t* dst, std::int64_t n);
}  // namespace avx2
#endif

}  // namespace regauge
