// One contiguous copy: the roofline that the benchmarks compare with.
#pragma once

#include <cstdint>

namespace regauge {

/// Copy n bytes on `threads` threads; `stream`: our own streaming copy instead of the C library's memcpy.
void copy_bytes(std::uint8_t* dst, const std::uint8_t* src, std::int64_t n, std::int64_t threads, bool stream);

}  // namespace regauge
