// bfloat16 to fp8 by steps. Only for files compiled with -mavx2.
//
// With one positive factor g * 2^k, 1 <= g < 2, a code depends on the 7 fraction bits of its source, and an exponent
// more adds 2^M to it (M: fraction bits of the target). Neighbouring codes lie at least 16 / g > 8 fractions apart, so
// that each of sixteen buckets of 8 fractions holds at most one step: a byte shuffle finds the bucket's first code,
// another one the fraction after which the next code begins. 32 elements are 32 bytes of one register all the way.
#pragma once

#include "convert_avx2.hpp"
#include "scales.hpp"

namespace regauge::avx2 {
namespace {

using Int = std::int64_t;

constexpr Int kBlock = 32, kGroup = 4;  // elements; blocks whose codes are checked together before they are stored
constexpr std::uint8_t kPause = 15;     // chunks done without steps after one in which they failed too often

template <class Dst>
struct Grid;
template <>
struct Grid<E4M3> {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr std::uint32_t kLargest = 0x7e;  // code
};
template <>
struct Grid<E4M3Fnuz> {
  static constexpr int kMantissa = 3, kBias = 8;
  static constexpr std::uint32_t kLargest = 0x7f;
};
template <>
struct Grid<E5M2> {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr std::uint32_t kLargest = 0x7b;
};

// Exponents count from `base`: up to kZero they are so small that the code is 0; up to kNormal codes may be subnormal,
// whose steps differ; from there on codes are normal, until they saturate.
template <class Dst>
struct Steps {
  static constexpr int kMantissa = Grid<Dst>::kMantissa;
  static constexpr std::uint32_t kZero = 2, kNormal = kZero + kMantissa + 2;
  static constexpr std::uint32_t kSaturated = kNormal + (1u << (7 - kMantissa));
  std::uint8_t first[16];  // of every bucket: its first code, less the code of 1.0
  std::int8_t last[16];    // the last fraction that has this code
  std::uint8_t base;
  bool usable;
  std::uint8_t pause;  // chunks to go before the steps are tried again

  /// For the scales of `b`, whose product is `factor`.
  static Steps make(const RowBatch& b, float factor) {
    Steps t{};
    const int k = static_cast<int>(bits_of(factor) >> 23) - 127;  // a sign makes it too large
    if (k < -100 || k > 100) return t;
    alignas(32) std::uint16_t in[128];
    alignas(32) Byte codes[128];
    for (int m = 0; m < 128; ++m) in[m] = static_cast<std::uint16_t>((127 - k) << 7 | m);  // products of 1.0 .. 4.0
    RowBatch part = b;
    part.src = reinterpret_cast<const Byte*>(in), part.dst = codes;
    part.outer = part.rows = 1, part.n = 128, part.stream = false, part.ahead = nullptr;
    b.plain->convert(part);
    for (int i = 0; i < 16; ++i) {
      const Byte* c = codes + 8 * i;
      if (c[7] - c[0] > 1) return t;
      int same = 1;
      while (same < 8 && c[same] == c[0]) ++same;
      t.first[i] = static_cast<std::uint8_t>(c[0] - (Grid<Dst>::kBias << kMantissa));
      t.last[i] = static_cast<std::int8_t>(8 * i + same - 1);
    }
    t.base = static_cast<std::uint8_t>(127 - k - Grid<Dst>::kBias - static_cast<int>(kNormal));
    t.usable = true;
    return t;
  }
};

// Hide where a constant comes from: else the compiler makes it anew for every row, from general registers.
REGAUGE_INLINE __m256i kept(__m256i v) {
  __asm__("" : "+x"(v));
  return v;
}

template <class Dst>
struct Constants;
template <>
struct Constants<Int8> {};
template <class Dst>
struct Constants {
  using S = Steps<Dst>;
  static constexpr std::uint32_t kZeroEnd = (S::kZero + 1) << S::kMantissa, kOffset = S::kNormal << S::kMantissa;
  __m256i split = kept(both_lanes("\x00\x02\x04\x06\x08\x0a\x0c\x0e\x01\x03\x05\x07\x09\x0b\x0d\x0f"));
  __m256i bucket = kept(bytes(0x0fu)), fraction = kept(bytes(0x7fu)), sign = kept(bytes(0x80u));
  __m256i zero_end = kept(bytes(kZeroEnd)), offset = kept(bytes(kOffset));
  __m256i doubtful = kept(bytes(kOffset + (1u << S::kMantissa) - 1u - kZeroEnd));
  __m256i saturated = kept(bytes(S::kSaturated)), largest = kept(bytes(Grid<Dst>::kLargest));
};

// The steps in registers, and what says whether they were right. Bounded: no element is NaN or saturates.
template <class Dst, bool Bounded>
struct Stepper {
  const Constants<Dst>& k;
  __m256i first, last, base;
  __m256i lowest, highest;  // code + kOffset - kZeroEnd, modulo 256; exponent

  REGAUGE_INLINE Stepper(const Constants<Dst>& constants, const Steps<Dst>& t, int raise = 0)
      : k(constants), first(both_lanes(t.first)), last(both_lanes(t.last)),
        base(bytes(static_cast<std::uint32_t>(t.base + raise))) {
    restart();
  }
  REGAUGE_INLINE void restart() { lowest = _mm256_set1_epi8(-1), highest = _mm256_setzero_si256(); }
  /// False if an element since the last restart may be subnormal in the target, or is NaN or infinite.
  REGAUGE_INLINE bool right() const {
    __m256i bad = _mm256_cmpeq_epi8(_mm256_min_epu8(lowest, k.doubtful), lowest);
    if constexpr (!Bounded) bad = _mm256_or_si256(bad, _mm256_cmpeq_epi8(highest, _mm256_set1_epi8(-1)));
    return _mm256_testz_si256(bad, bad);
  }

  /// The codes of 32 elements.
  REGAUGE_INLINE __m256i codes(const Byte* s) {
    const __m256i x = _mm256_shuffle_epi8(load_bytes(s), k.split), y = _mm256_shuffle_epi8(load_bytes(s + 32), k.split);
    const __m256i low = _mm256_unpacklo_epi64(x, y), high = _mm256_unpackhi_epi64(x, y);
    const __m256i odd = _mm256_cmpgt_epi8(_mm256_setzero_si256(), low);
    const __m256i exponent = _mm256_sub_epi8(_mm256_add_epi8(high, high), odd);
    const __m256i bucket = _mm256_and_si256(_mm256_srli_epi16(low, 3), k.bucket);
    const __m256i next = _mm256_cmpgt_epi8(_mm256_and_si256(low, k.fraction), _mm256_shuffle_epi8(last, bucket));
    const __m256i step = _mm256_sub_epi8(_mm256_shuffle_epi8(first, bucket), next);
    __m256i e = _mm256_subs_epu8(exponent, base);
    if constexpr (!Bounded) {
      highest = _mm256_max_epu8(highest, exponent);
      e = _mm256_min_epu8(e, k.saturated);
    }
    __m256i c = _mm256_add_epi8(_mm256_slli_epi16(e, Grid<Dst>::kMantissa), step);
    lowest = _mm256_min_epu8(lowest, _mm256_sub_epi8(c, k.zero_end));
    c = _mm256_subs_epu8(c, k.offset);
    if constexpr (!Bounded) c = _mm256_min_epu8(c, k.largest);
    __m256i sign = _mm256_and_si256(high, k.sign);
    if constexpr (std::is_same_v<Dst, E4M3Fnuz>)
      sign = _mm256_andnot_si256(_mm256_cmpeq_epi8(c, _mm256_setzero_si256()), sign);
    return _mm256_permute4x64_epi64(_mm256_or_si256(c, sign), 0xd8);
  }
};

// Blocks blocks, stored unless one of them needs the plain kernel: a line that was streamed is dear to write again.
// Lines to fetch: one in `Every` of those that are read.
template <int Blocks, bool Stream, int Every = 1, class Steps>
REGAUGE_INLINE bool step_group(const Byte* s, Byte* d, const Byte* ahead, Steps& steps) {
  __m256i c[Blocks];
#pragma GCC unroll 4
  for (int k = 0; k < Blocks; ++k) {
    if (k % Every == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64 / Every * k), _MM_HINT_T0);
    c[k] = steps.codes(s + 64 * k);
  }
  const bool right = steps.right();
  steps.restart();
  if (__builtin_expect(!right, 0)) return false;
#pragma GCC unroll 4
  for (int k = 0; k < Blocks; ++k) put<Stream>(d + 32 * k, c[k]);
  return true;
}

}  // namespace
}  // namespace regauge::avx2
