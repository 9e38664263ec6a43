// One contiguous copy: the roofline that the benchmarks compare with. Also the cpuid check that every family uses.
#include "memcpy.hpp"

#include <cstring>

#include "copy.hpp"

namespace regauge {

bool has_avx2() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

void copy_bytes(std::uint8_t* dst, const std::uint8_t* src, std::int64_t n, std::int64_t threads, bool stream) {
  constexpr std::int64_t kLine = 64;
  const bool ours = stream && has_avx2();
  parallel((n + kLine - 1) / kLine, threads, [&](std::int64_t lo, std::int64_t hi) {
    const std::int64_t begin = lo * kLine, end = hi * kLine < n ? hi * kLine : n;
#if defined(__x86_64__)
    if (ours) {
      avx2::stream_copy(src + begin, dst + begin, end - begin);
      avx2::fence();
      return;
    }
#endif
    std::memcpy(dst + begin, src + begin, static_cast<std::size_t>(end - begin));
  });
  (void)ours;
}

}  // namespace regauge
