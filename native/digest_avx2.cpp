// x0 and x1 of rows in vectors, four rows at a time so that they share the loads of their keys, and the copy of the same
// rows in the same pass. Compiled with -mavx2; only called after a cpuid check.
#include "digest.hpp"

#if defined(__AVX2__)
#include <immintrin.h>

#include <cstring>

namespace regauge::avx2 {
namespace {

using Byte = std::uint8_t;
using Int = std::int64_t;
using Word = std::uint32_t;
using Wide = std::uint64_t;

enum class Copy { kNone, kPlain, kStream };

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

struct Pair {
  __m256i x0 = _mm256_setzero_si256(), x1 = _mm256_setzero_si256();

  void add(__m256i m, __m256i k0, __m256i k1) {
    const __m256i a = _mm256_add_epi32(m, k0), b = _mm256_add_epi32(m, k1);
    x0 = _mm256_add_epi64(x0, _mm256_mul_epu32(a, _mm256_srli_epi64(a, 32)));
    x1 = _mm256_add_epi64(x1, _mm256_mul_epu32(b, _mm256_srli_epi64(b, 32)));
  }

  void store(Wide* out) const {
    const __m256i sums = _mm256_add_epi64(_mm256_unpacklo_epi64(x0, x1), _mm256_unpackhi_epi64(x0, x1));
    const __m128i both = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), both);
  }
};

template <Copy Mode>
inline void put(Byte* d, __m256i v) {
  if constexpr (Mode == Copy::kPlain) _mm256_storeu_si256(reinterpret_cast<__m256i*>(d), v);
  if constexpr (Mode == Copy::kStream) _mm256_stream_si256(reinterpret_cast<__m256i*>(d), v);
}

// The bytes of a row after its last whole vector.
template <Copy Mode>
inline void add_rest(Pair& p, const Byte* s, Byte* d, Int n, const Word* words) {
  alignas(32) Byte rest[32] = {};
  std::memcpy(rest, s, static_cast<std::size_t>(n));
  p.add(load(rest), load(words), load(words + 2));
  if constexpr (Mode != Copy::kNone) std::memcpy(d, rest, static_cast<std::size_t>(n));
}

template <Copy Mode, bool Ahead, int Rows>
inline void some_rows(const Byte* s, Int ss, Byte* d, Int ds, Int bytes, const Byte* ahead, const Word* words, Wide* out) {
  Pair p[Rows];
  Int at = 0;
  for (; at + 64 <= bytes; at += 64, words += 16) {
    const __m256i k0 = load(words), k1 = load(words + 2), k2 = load(words + 8), k3 = load(words + 10);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      if constexpr (Ahead) _mm_prefetch(reinterpret_cast<const char*>(ahead + at * Rows + 64 * r), _MM_HINT_T1);
      const __m256i a = load(s + r * ss + at), b = load(s + r * ss + at + 32);
      put<Mode>(d + r * ds + at, a), put<Mode>(d + r * ds + at + 32, b);
      p[r].add(a, k0, k1), p[r].add(b, k2, k3);
    }
  }
  if (at < bytes) {
    constexpr Copy kMode = Mode == Copy::kNone ? Copy::kNone : Copy::kPlain;
    for (int r = 0; r < Rows; ++r) {
      Int from = at;
      const Word* k = words;
      for (; from + 32 <= bytes; from += 32, k += 8) {
        const __m256i a = load(s + r * ss + from);
        put<kMode>(d + r * ds + from, a);
        p[r].add(a, load(k), load(k + 2));
      }
      if (from < bytes) add_rest<kMode>(p[r], s + r * ss + from, d + r * ds + from, bytes - from, k);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) p[r].store(out + 2 * r);
}

template <Copy Mode, bool Ahead>
void all_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int bytes, const Byte* ahead, const Word* words, Wide* out) {
  for (; rows >= 4; rows -= 4, s += 4 * ss, d += 4 * ds, ahead += 4 * bytes, out += 8)
    some_rows<Mode, Ahead, 4>(s, ss, d, ds, bytes, ahead, words, out);
  for (; rows > 0; --rows, s += ss, d += ds, ahead += bytes, out += 2)
    some_rows<Mode, Ahead, 1>(s, ss, d, ds, bytes, ahead, words, out);
}

template <bool MayStream>
void digest_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int bytes, const Byte* ahead, const Word* words, Wide* out) {
  const bool stream = MayStream && d && ((reinterpret_cast<std::intptr_t>(d) | ds | bytes) & 63) == 0;
  const auto kernel = !d       ? (ahead ? all_rows<Copy::kNone, true> : all_rows<Copy::kNone, false>)
                      : stream ? (ahead ? all_rows<Copy::kStream, true> : all_rows<Copy::kStream, false>)
                               : (ahead ? all_rows<Copy::kPlain, true> : all_rows<Copy::kPlain, false>);
  kernel(s, ss, d, ds, rows, bytes, ahead ? ahead : s, words, out);
}

}  // namespace

DigestRows digest_rows_for(bool stream) { return stream ? digest_rows<true> : digest_rows<false>; }

}  // namespace regauge::avx2
#endif
