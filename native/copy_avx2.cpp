// AVX2 copies: plain and streaming rows, transposes in registers. Compiled with -mavx2; only called after a cpuid check.
#include "copy.hpp"

#if defined(__AVX2__)
#include <immintrin.h>

#include <cstring>

namespace regauge::avx2 {
namespace {

using Byte = std::uint8_t;
using Int = std::int64_t;

inline __m256i load(const Byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store(Byte* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline void stream(Byte* p, __m256i v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }

// One run of at least 32 bytes; the last vector overlaps the one before it.
inline void copy_run(const Byte* s, Byte* d, Int n) {
  Int i = 0;
  for (; i + 128 <= n; i += 128) {
    const __m256i a = load(s + i), b = load(s + i + 32), c = load(s + i + 64), e = load(s + i + 96);
    store(d + i, a), store(d + i + 32, b), store(d + i + 64, c), store(d + i + 96, e);
  }
  for (; i + 32 <= n; i += 32) store(d + i, load(s + i));
  if (i < n) store(d + n - 32, load(s + n - 32));
}

inline void fetch(const Byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// One cache line; `d` is aligned to one.
template <bool Ahead>
inline void stream_line(const Byte* s, Byte* d, const Byte* ahead) {
  if constexpr (Ahead) fetch(ahead);
  const __m256i a = load(s), b = load(s + 32);
  stream(d, a), stream(d + 32, b);
}

template <bool Ahead>
inline void stream_lines(const Byte* s, Byte* d, Int lines, const Byte* ahead) {
  Int i = 0;
  for (; i + 4 <= lines; i += 4) {
    stream_line<Ahead>(s + 64 * i, d + 64 * i, ahead + 64 * i);
    stream_line<Ahead>(s + 64 * i + 64, d + 64 * i + 64, ahead + 64 * i + 64);
    stream_line<Ahead>(s + 64 * i + 128, d + 64 * i + 128, ahead + 64 * i + 128);
    stream_line<Ahead>(s + 64 * i + 192, d + 64 * i + 192, ahead + 64 * i + 192);
  }
  for (; i < lines; ++i) stream_line<Ahead>(s + 64 * i, d + 64 * i, ahead + 64 * i);
}

// One run with streaming stores of whole cache lines; what does not fill a line goes through the cache.
template <bool Ahead>
inline void stream_run(const Byte* s, Byte* d, Int n, const Byte* ahead) {
  const Int head = -reinterpret_cast<std::intptr_t>(d) & 63;
  if (head) {
    const Int h = head < n ? head : n;
    std::memcpy(d, s, h);
    s += h, d += h, n -= h;
  }
  stream_lines<Ahead>(s, d, n / 64, ahead);
  if (n % 64) std::memcpy(d + n / 64 * 64, s + n / 64 * 64, n % 64);
}

void plain_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int run, const Byte*) {
  for (; rows > 0; --rows, s += ss, d += ds) copy_run(s, d, run);
}

template <bool Ahead>
void stream_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int run, const Byte* ahead) {
  for (; rows > 0; --rows, s += ss, d += ds, ahead += run) stream_run<Ahead>(s, d, run, ahead);
}

// Rows of Lines whole cache lines in an aligned target: the shape of a head's row in a KV cache.
template <bool Ahead, int Lines>
void line_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, const Byte* ahead) {
  for (; rows > 0; --rows, s += ss, d += ds, ahead += 64 * Lines)
#pragma GCC unroll 8
    for (int i = 0; i < Lines; ++i) stream_line<Ahead>(s + 64 * i, d + 64 * i, ahead + 64 * i);
}

// A line written in part through the cache and in part around it costs more than streaming saves.
constexpr Int kWorthAligning = 2048;

template <bool Ahead>
inline void any_stream_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int run, const Byte* ahead) {
  const bool aligned = ((reinterpret_cast<std::intptr_t>(d) | ds) & 63) == 0;
  if (aligned && run == 128) line_rows<Ahead, 2>(s, ss, d, ds, rows, ahead);
  else if (aligned && run == 256) line_rows<Ahead, 4>(s, ss, d, ds, rows, ahead);
  else if (aligned || run >= kWorthAligning) stream_rows<Ahead>(s, ss, d, ds, rows, run, ahead);
  else plain_rows(s, ss, d, ds, rows, run, nullptr);
}

void stream_rows_ahead(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int run, const Byte* ahead) {
  if (ahead) any_stream_rows<true>(s, ss, d, ds, rows, run, ahead);
  else any_stream_rows<false>(s, ss, d, ds, rows, run, s);
}

inline __m256i pair(const Byte* low, const Byte* high) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(a), _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

template <int Size>
inline __m256i unpack_low(__m256i a, __m256i b) {
  if constexpr (Size == 1) return _mm256_unpacklo_epi8(a, b);
  if constexpr (Size == 2) return _mm256_unpacklo_epi16(a, b);
  if constexpr (Size == 4) return _mm256_unpacklo_epi32(a, b);
  if constexpr (Size == 8) return _mm256_unpacklo_epi64(a, b);
}

template <int Size>
inline __m256i unpack_high(__m256i a, __m256i b) {
  if constexpr (Size == 1) return _mm256_unpackhi_epi8(a, b);
  if constexpr (Size == 2) return _mm256_unpackhi_epi16(a, b);
  if constexpr (Size == 4) return _mm256_unpackhi_epi32(a, b);
  if constexpr (Size == 8) return _mm256_unpackhi_epi64(a, b);
}

// 2N rows of N elements (N = 16 / Size) become N rows of 2N elements. Each 128-bit lane is an N x N transpose: log2(N)
// rounds of interleaving register r with register r + N/2.
template <int Size>
inline void transpose_tile(const Byte* s, Int ss, Byte* d, Int ds) {
  constexpr int kN = 16 / Size;
  __m256i a[kN], b[kN];
#pragma GCC unroll 16
  for (int r = 0; r < kN; ++r) a[r] = pair(s + r * ss, s + (r + kN) * ss);
#pragma GCC unroll 4
  for (int round = kN; round > 1; round /= 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kN / 2; ++r) {
      b[2 * r] = unpack_low<Size>(a[r], a[r + kN / 2]);
      b[2 * r + 1] = unpack_high<Size>(a[r], a[r + kN / 2]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kN; ++r) a[r] = b[r];
  }
#pragma GCC unroll 16
  for (int r = 0; r < kN; ++r) store(d + r * ds, a[r]);
}

template <int Size>
void transpose(const Byte* s, Int ss, Byte* d, Int ds, Int ni, Int nj) {
  constexpr Int kJ = 16 / Size, kI = 2 * kJ;
  const Int whole_i = ni - ni % kI, whole_j = nj - nj % kJ;
  const auto scalar = [=](Int i0, Int i1, Int j0, Int j1) {
    for (Int j = j0; j < j1; ++j)
      for (Int i = i0; i < i1; ++i) std::memcpy(d + i * Size + j * ds, s + i * ss + j * Size, Size);
  };
  for (Int i = 0; i < whole_i; i += kI)
    for (Int j = 0; j < whole_j; j += kJ) transpose_tile<Size>(s + i * ss + j * Size, ss, d + i * Size + j * ds, ds);
  scalar(whole_i, ni, 0, whole_j);
  scalar(0, ni, whole_j, nj);
}

}  // namespace

CopyRows copy_rows_for(std::int64_t run, bool streaming) {
  if (streaming && run >= 64) return stream_rows_ahead;
  return run >= 32 ? plain_rows : nullptr;
}

Transpose transpose_for(std::int64_t size) {
  switch (size) {
    case 1: return transpose<1>;
    case 2: return transpose<2>;
    case 4: return transpose<4>;
    case 8: return transpose<8>;
    default: return nullptr;
  }
}

void fence() { _mm_sfence(); }

void stream_copy(const std::uint8_t* src, std::uint8_t* dst, std::int64_t n) { stream_run<false>(src, dst, n, src); }

}  // namespace regauge::avx2
#endif
