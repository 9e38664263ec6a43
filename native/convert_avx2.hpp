// The formats in AVX2: 32 elements as four vectors of fp32. Only for files compiled with -mavx2 -mfma -mf16c.
//
// Two orders occur. Sequential: vector k holds elements 8k..8k+7. Even-odd (what splitting bfloat16 in place gives):
// vectors 0 and 1 hold the even and the odd elements of the first sixteen, vectors 2 and 3 those of the last sixteen.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "formats.hpp"

namespace regauge::avx2 {
namespace {

using Byte = std::uint8_t;

// The blocks below are the bodies of loops: a call would reload every constant from memory.
#define REGAUGE_INLINE inline __attribute__((always_inline))

REGAUGE_INLINE __m256i load_bytes(const Byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
REGAUGE_INLINE __m256i words(std::uint32_t u) { return _mm256_set1_epi32(static_cast<int>(u)); }
REGAUGE_INLINE __m256i halves(std::uint32_t u) { return _mm256_set1_epi16(static_cast<short>(u)); }
REGAUGE_INLINE __m256i bytes(std::uint32_t u) { return _mm256_set1_epi8(static_cast<char>(u)); }
REGAUGE_INLINE __m256 floats(std::uint32_t u) { return _mm256_castsi256_ps(words(u)); }
REGAUGE_INLINE __m256 absolute(__m256 v) { return _mm256_and_ps(v, floats(kMagnitude)); }

// Sixteen bytes in both lanes.
REGAUGE_INLINE __m256i both_lanes(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

template <bool Stream>
REGAUGE_INLINE void put(Byte* p, __m256i v) {
  if constexpr (Stream) _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v);
  else _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}

// Sixteen fp16 to two vectors, sequential.
REGAUGE_INLINE void widen_half(__m256i h, __m256 v[2]) {
  v[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(h));
  v[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
}

// Signs of four sequential vectors as the top bits of 32 bytes, in the order in which fp8 codes are packed.
REGAUGE_INLINE __m256i packed_signs(const __m256 v[4]) {
  const __m256i a = _mm256_packs_epi32(_mm256_castps_si256(v[0]), _mm256_castps_si256(v[1]));
  const __m256i b = _mm256_packs_epi32(_mm256_castps_si256(v[2]), _mm256_castps_si256(v[3]));
  return _mm256_packs_epi16(a, b);
}

template <class Format>
struct Vector;  // load: 32 elements to fp32; store: fp32 to 32 elements

template <>
struct Vector<Float32> {
  static constexpr bool kEvenOdd = false, kCleanNan = false;
  REGAUGE_INLINE static void load(const Byte* p, __m256 v[4]) {
    for (int k = 0; k < 4; ++k) v[k] = _mm256_loadu_ps(reinterpret_cast<const float*>(p) + 8 * k);
  }
  template <bool Stream>
  REGAUGE_INLINE static void store(Byte* p, const __m256 v[4]) {
    for (int k = 0; k < 4; ++k) put<Stream>(p + 32 * k, _mm256_castps_si256(v[k]));
  }
};

template <>
struct Vector<Float16> {
  static constexpr bool kEvenOdd = false, kCleanNan = false;
  REGAUGE_INLINE static void load(const Byte* p, __m256 v[4]) {
    widen_half(load_bytes(p), v);
    widen_half(load_bytes(p + 32), v + 2);
  }
  // Clamp with the bound as first operand: minps and maxps return the second one when either is NaN.
  REGAUGE_INLINE static __m128i narrow(__m256 v) {
    const __m256 most = floats(0x477fe000u), least = floats(0xc77fe000u);
    return _mm256_cvtps_ph(_mm256_max_ps(least, _mm256_min_ps(most, v)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  template <bool Stream>
  REGAUGE_INLINE static void store(Byte* p, const __m256 v[4]) {
    for (int k = 0; k < 4; k += 2)
      put<Stream>(p + 16 * k, _mm256_inserti128_si256(_mm256_castsi128_si256(narrow(v[k])), narrow(v[k + 1]), 1));
  }
};

template <>
struct Vector<BFloat16> {
  static constexpr bool kEvenOdd = true, kCleanNan = true;  // a NaN's low 16 bits are zero after loading
  REGAUGE_INLINE static void load(const Byte* p, __m256 v[4]) {
    for (int k = 0; k < 4; k += 2) {
      const __m256i x = load_bytes(p + 16 * k);
      v[k] = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
      v[k + 1] = _mm256_castsi256_ps(_mm256_and_si256(x, words(0xffff0000u)));
    }
  }
  REGAUGE_INLINE static void load_absolute(const Byte* p, __m256 v[4]) {
    for (int k = 0; k < 4; k += 2) {
      const __m256i x = load_bytes(p + 16 * k);
      v[k] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(x, words(0x7fffu)), 16));
      v[k + 1] = _mm256_castsi256_ps(_mm256_and_si256(x, words(0x7fff0000u)));
    }
  }
  // RNE in the top half.
  REGAUGE_INLINE static __m256i round_number(__m256 v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), words(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, words(0x7fffu)), odd);
  }
  // The same where NaN may occur: it keeps its top payload bits and becomes quiet.
  REGAUGE_INLINE static __m256i round(__m256 v) {
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256 number = _mm256_castsi256_ps(round_number(v));
    return _mm256_castps_si256(_mm256_blendv_ps(number, _mm256_or_ps(v, floats(kQuiet)), nan));
  }
  template <bool Stream, bool EvenOdd>
  REGAUGE_INLINE static void store_pair(Byte* p, __m256i a, __m256i b) {
    a = _mm256_srli_epi32(a, 16);
    if constexpr (EvenOdd) put<Stream>(p, _mm256_blend_epi16(a, b, 0xaa));
    else put<Stream>(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, _mm256_srli_epi32(b, 16)), 0xd8));
  }
  template <bool Stream, bool EvenOdd>
  REGAUGE_INLINE static void store_ordered(Byte* p, const __m256 v[4]) {
    const __m256 nan = _mm256_or_ps(_mm256_cmp_ps(v[0], v[1], _CMP_UNORD_Q), _mm256_cmp_ps(v[2], v[3], _CMP_UNORD_Q));
    if (__builtin_expect(_mm256_movemask_ps(nan), 0)) {
      store_pair<Stream, EvenOdd>(p, round(v[0]), round(v[1]));
      store_pair<Stream, EvenOdd>(p + 32, round(v[2]), round(v[3]));
    } else {
      store_pair<Stream, EvenOdd>(p, round_number(v[0]), round_number(v[1]));
      store_pair<Stream, EvenOdd>(p + 32, round_number(v[2]), round_number(v[3]));
    }
  }
};

template <>
struct Vector<E5M2> {
  static constexpr bool kEvenOdd = false, kCleanNan = false;
  REGAUGE_INLINE static void load(const Byte* p, __m256 v[4]) {
    for (int k = 0; k < 4; k += 2) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * k));
      widen_half(_mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 8), v + k);
    }
  }
};

// e4m3 of either kind: the seven bits of a magnitude, shifted under fp16's exponent, are the value divided by kUnit,
// subnormals included; `mend` makes those that mean NaN one of fp16's.
template <class Kind>
REGAUGE_INLINE void load_e4m3(const Byte* p, __m256 v[4]) {
  for (int k = 0; k < 4; k += 2) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * k));
    const __m256i h = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 8), 1);
    widen_half(Kind::mend(_mm256_and_si256(h, halves(0xbf80u))), v + k);
    v[k] = _mm256_mul_ps(v[k], _mm256_set1_ps(Kind::kUnit));
    v[k + 1] = _mm256_mul_ps(v[k + 1], _mm256_set1_ps(Kind::kUnit));
  }
}

template <>
struct Vector<E4M3> {
  static constexpr bool kEvenOdd = false, kCleanNan = false;
  static constexpr float kUnit = 256.0f;
  REGAUGE_INLINE static __m256i mend(__m256i h) {
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(h, halves(0x3f80u)), halves(0x3f80u));
    return _mm256_add_epi16(h, _mm256_and_si256(nan, halves(0x7e00u - 0x3f80u)));
  }
  REGAUGE_INLINE static void load(const Byte* p, __m256 v[4]) { load_e4m3<Vector>(p, v); }
};

template <>
struct Vector<E4M3Fnuz> {
  static constexpr bool kEvenOdd = false, kCleanNan = false;
  static constexpr float kUnit = 128.0f;
  // The one NaN would be a negative zero.
  REGAUGE_INLINE static __m256i mend(__m256i h) {
    const __m256i nan = _mm256_cmpeq_epi16(h, halves(0x8000u));
    return _mm256_xor_si256(h, _mm256_and_si256(nan, halves(0x8000u ^ 0x7e00u)));
  }
  REGAUGE_INLINE static void load(const Byte* p, __m256 v[4]) { load_e4m3<Vector>(p, v); }
};

template <>
struct Vector<Int8> {
  static constexpr bool kEvenOdd = true, kCleanNan = false;  // bfloat16, the usual target, takes this order as it is
  REGAUGE_INLINE static void load(const Byte* p, __m256 v[4]) {
    for (int k = 0; k < 4; k += 2) {
      const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * k)));
      v[k] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16));
      v[k + 1] = _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 16));
    }
  }
  // NaN passes the bounds (see Float16), converts to the smallest integer and alone is packed to -128.
  REGAUGE_INLINE static __m256i round(__m256 v) {
    const __m256 most = floats(Int8::kMax), least = floats(kSign | Int8::kMax);
    return _mm256_cvtps_epi32(_mm256_max_ps(least, _mm256_min_ps(most, v)));
  }
  // 32 integers within -127 .. 127 to bytes in element order.
  REGAUGE_INLINE static __m256i pack_even_odd(const __m256i n[4]) {
    const __m256i even = _mm256_packs_epi32(n[0], n[2]), odd = _mm256_packs_epi32(n[1], n[3]);
    const __m128i pairs = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m256i codes = _mm256_shuffle_epi8(_mm256_packs_epi16(even, odd), _mm256_broadcastsi128_si256(pairs));
    return _mm256_permute4x64_epi64(codes, 0xd8);
  }
  template <bool Stream, bool EvenOdd>
  REGAUGE_INLINE static void store_ordered(Byte* p, const __m256 v[4]) {
    __m256i n[4], codes;
    for (int k = 0; k < 4; ++k) n[k] = round(v[k]);
    if constexpr (EvenOdd) {
      codes = pack_even_odd(n);
    } else {
      codes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
      codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
    put<Stream>(p, _mm256_andnot_si256(_mm256_cmpeq_epi8(codes, bytes(0x80u)), codes));
  }
};

// The encoder for fp8 targets. With e = max(exponent of a, smallest normal exponent), a + 2^(e+23-M) rounds a to the
// format's grid (RNE, subnormals too) and leaves n, the steps above 2^e's own, in the low bits of the sum q; q's high
// half is the exponent. One multiply-add of the two halves of q then gives 256 * code: kBias in the low bits of the
// magic constant makes its constant term vanish. The fused multiply-add forms e * magic exactly, so it rounds once.
template <class Format, int Mantissa, int MinExponent>
struct Encoder {
  static constexpr std::uint32_t kShift = 23 - Mantissa;
  static constexpr std::uint32_t kFloor = static_cast<std::uint32_t>(MinExponent + 127) << 23;
  // 256 * code = 256 * (n + (e - MinExponent) * 2^M) and q >> 16 = (e + kShift + 127) * 128.
  static constexpr std::uint32_t kBias = (kShift + 127 + MinExponent) << Mantissa;
  static constexpr std::uint32_t kMagic = (127 + kShift) << 23 | (0x10000u - kBias);
  static constexpr std::uint32_t kWeights = 256u | (2u << Mantissa) << 16;

  /// Codes times 256 in 32-bit lanes; NaN gives more than 0x7f00. `w` must not be negative. CleanNan: the low half of
  /// every NaN is 0. Clamp: needed unless all of `w` round to finite codes.
  template <bool CleanNan, bool Clamp = true>
  REGAUGE_INLINE static __m256i scaled_codes(__m256 w) {
    if constexpr (Clamp) w = _mm256_min_ps(floats(Format::kMax), w);  // in this order NaN passes
    const __m256i e = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(w), words(kInf)), words(kFloor));
    __m256i q = _mm256_castps_si256(_mm256_fmadd_ps(_mm256_castsi256_ps(e), floats(kMagic), w));
    if constexpr (!CleanNan) q = _mm256_min_epu32(q, words(kInf | kQuiet));
    return _mm256_madd_epi16(q, words(kWeights));
  }

  /// Pack 32 codes, give them their signs, store. `signs`: one byte per code, in packing order.
  template <bool Stream, bool EvenOdd>
  REGAUGE_INLINE static void store(Byte* p, const __m256i q[4], __m256i signs) {
    const __m256i top = _mm256_and_si256(signs, bytes(0x80));
    if constexpr (EvenOdd) {
      const __m256i even = _mm256_packs_epi32(q[0], q[2]), odd = _mm256_packs_epi32(q[1], q[3]);
      const __m256i codes = _mm256_blendv_epi8(_mm256_srli_epi16(even, 8), odd, halves(0xff00u));
      const __m256i nan = _mm256_blendv_epi8(not_finite(even), not_finite(odd), halves(0xff00u));
      put<Stream>(p, _mm256_permute4x64_epi64(signed_codes(codes, top, nan), 0xd8));
    } else {
      const __m256i a = _mm256_packs_epi32(q[0], q[1]), b = _mm256_packs_epi32(q[2], q[3]);
      const __m256i codes = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
      const __m256i nan = _mm256_packs_epi16(not_finite(a), not_finite(b));
      put<Stream>(p, _mm256_permutevar8x32_epi32(signed_codes(codes, top, nan), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
  }

 private:
  static constexpr bool kFnuz = std::is_same_v<Format, E4M3Fnuz>;

  // Sixteen codes times 256, saturated: which are NaN. Only asked where 0x7f is a number.
  REGAUGE_INLINE static __m256i not_finite(__m256i q) {
    return kFnuz ? _mm256_cmpgt_epi16(q, halves(0x7f00u)) : _mm256_setzero_si256();
  }
  REGAUGE_INLINE static __m256i signed_codes(__m256i codes, __m256i top, __m256i nan) {
    if constexpr (!kFnuz) return _mm256_or_si256(codes, top);
    const __m256i zero = _mm256_cmpeq_epi8(codes, _mm256_setzero_si256());
    return _mm256_blendv_epi8(_mm256_or_si256(codes, _mm256_andnot_si256(zero, top)), bytes(0x80u), nan);
  }
};

template <class Format>
struct EncoderOf;
template <>
struct EncoderOf<E4M3> : Encoder<E4M3, 3, -6> {};
template <>
struct EncoderOf<E4M3Fnuz> : Encoder<E4M3Fnuz, 3, -7> {};
template <>
struct EncoderOf<E5M2> : Encoder<E5M2, 2, -14> {};

// Even-odd to sequential.
REGAUGE_INLINE void interleave(__m256 v[4]) {
  for (int k = 0; k < 4; k += 2) {
    const __m256 low = _mm256_unpacklo_ps(v[k], v[k + 1]), high = _mm256_unpackhi_ps(v[k], v[k + 1]);
    v[k] = _mm256_permute2f128_ps(low, high, 0x20);
    v[k + 1] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}

}  // namespace
}  // namespace regauge::avx2
