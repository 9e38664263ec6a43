// The keyed digest of rows, taken while they are moved. Defined in plan/digest.py, argued in docs/digest.md.
#pragma once

#include "copy.hpp"

namespace regauge {

/// Operands of a box whose rows are digested: the address of each row's key (a0, a1, a2, unused: 64 bits each) and of
/// its token's key (64 bits). Copies have no scales, so the places are free.
constexpr Operand kRowKey = kSrcScale, kTokenKey = kDstScale;

constexpr std::int64_t kSegment = 1024;           // most elements of a row
constexpr std::int64_t kRowBytes = 4 * kSegment;  // most bytes of a row
constexpr std::int64_t kWords = kSegment + 2;     // words of the row key

/// x0 and x1 of `rows` rows of `bytes` bytes, 2 * rows numbers to `out`. Unless `dst` is null the rows are copied there.
/// `ahead`, unless null: rows * bytes that the caller will read soon.
using DigestRows = void (*)(const std::uint8_t* src, std::int64_t src_stride, std::uint8_t* dst, std::int64_t dst_stride,
                            std::int64_t rows, std::int64_t bytes, const std::uint8_t* ahead, const std::uint32_t* words,
                            std::uint64_t* out);

/// Copy boxes (or, without a target, only read them) and return the digest of their rows. The last `row_axes` axes and
/// the run are one row: at most kSegment elements, in order. `words`: kWords of them.
std::uint64_t digest_boxes(Boxes b, int row_axes, const std::uint32_t* words, const How& how);

/// The fastest kernel for rows of so many bytes.
DigestRows digest_rows_for(std::int64_t bytes, bool stream, bool avx2);

#if defined(__x86_64__)
namespace avx2 {
DigestRows digest_rows_for(bool stream);
}
#endif

}  // namespace regauge
