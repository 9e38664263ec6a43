// The number formats, one element at a time, in integer and IEEE fp32 arithmetic only: the same bits on every CPU.
// Sources: OCP 8-bit floating point specification 1.0 (e4m3fn, e5m2), IEEE 754 binary16, bfloat16 = top half of fp32;
// e4m3fnuz: Noune et al., 8-bit Numerical Formats for Deep Neural Networks, 2022 (bias 8, max 240, only NaN is 0x80).
#pragma once

#include <cstdint>
#include <cstring>

#include "dtypes.hpp"

namespace regauge {
namespace {  // kept out of the linker's sight: vector and portable files must not share compiled copies

inline std::uint32_t bits_of(float f) {
  std::uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float float_of(std::uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

constexpr std::uint32_t kSign = 0x80000000u, kMagnitude = 0x7fffffffu, kInf = 0x7f800000u, kQuiet = 0x00400000u;
constexpr std::uint32_t kMaxFinite = 0x7f7fffffu, kMinNormal = 0x00800000u;

/// binary16 to fp32, exact; NaN becomes quiet and keeps sign and payload (as F16C does).
inline float from_half(std::uint32_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude > 0x7c00u) return float_of(sign | kInf | kQuiet | (magnitude << 13 & 0x7fffffu));
  if (magnitude == 0x7c00u) return float_of(sign | kInf);
  // Put the bits under fp32's exponent field, then let one exact multiplication by 2^112 correct the bias (and
  // normalise subnormals).
  return float_of(sign | bits_of(float_of(magnitude << 13) * float_of((127u + 112u) << 23)));
}

/// fp32 to a narrower format, RNE, for |x| already clamped to the format's largest value, which must be finite.
/// Adding 2^(e+23-Mantissa) leaves exactly Mantissa fraction bits above the rounding point, also for subnormals.
template <int Mantissa, int MinExponent>
inline std::uint32_t round_magnitude(float a) {
  constexpr std::uint32_t kFloor = static_cast<std::uint32_t>(MinExponent + 127) << 23;
  constexpr int kShift = 23 - Mantissa;
  std::uint32_t e = bits_of(a) & kInf;
  e = (e < kFloor ? kFloor : e);
  const float magic = float_of(e + (static_cast<std::uint32_t>(kShift) << 23));
  const std::uint32_t n = bits_of(a + magic) & 0xffffu;  // 2^Mantissa .. 2^(Mantissa+1), less when subnormal
  return (((e - kFloor) >> 23) << Mantissa) + n;
}

struct Float32 {
  static constexpr int kSize = 4;
  using Bits = std::uint32_t;
  static float decode(Bits u) { return float_of(u); }
  static Bits encode(float f, std::uint32_t) { return bits_of(f); }
};

struct BFloat16 {
  static constexpr int kSize = 2;
  using Bits = std::uint16_t;
  static float decode(Bits u) { return float_of(static_cast<std::uint32_t>(u) << 16); }
  static Bits encode(float f, std::uint32_t) {
    const std::uint32_t u = bits_of(f);
    if ((u & kMagnitude) > kInf) return static_cast<Bits>(u >> 16 | 0x40u);
    return static_cast<Bits>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
  }
};

struct Float16 {
  static constexpr int kSize = 2;
  using Bits = std::uint16_t;
  static float decode(Bits u) { return from_half(u); }
  static Bits encode(float f, std::uint32_t) {
    constexpr std::uint32_t kMax = 0x477fe000u;  // 65504
    const std::uint32_t u = bits_of(f), sign = u >> 16 & 0x8000u;
    std::uint32_t a = u & kMagnitude;
    if (a > kInf) return static_cast<Bits>(sign | 0x7e00u | (a >> 13 & 0x1ffu));
    if (a > kMax) a = kMax;
    return static_cast<Bits>(sign | round_magnitude<10, -14>(float_of(a)));
  }
};

/// fp8: the sign of a code is the sign that multiplication gives, also where the value is NaN; the caller works it out.
struct E4M3 {
  static constexpr int kSize = 1;
  using Bits = std::uint8_t;
  static constexpr std::uint32_t kMax = 0x43e00000u;  // 448
  static float decode(Bits u) {
    const std::uint32_t sign = (u & 0x80u) << 24, magnitude = u & 0x7fu;
    if (magnitude == 0x7fu) return float_of(sign | kInf | kQuiet);
    return float_of(sign | bits_of(float_of(magnitude << 20) * float_of((127u + 120u) << 23)));
  }
  static Bits encode(float f, std::uint32_t sign) {
    std::uint32_t a = bits_of(f) & kMagnitude;
    if (a > kInf) return static_cast<Bits>(sign >> 24 | 0x7fu);
    if (a > kMax) a = kMax;
    return static_cast<Bits>(sign >> 24 | round_magnitude<3, -6>(float_of(a)));
  }
};

struct E5M2 {
  static constexpr int kSize = 1;
  using Bits = std::uint8_t;
  static constexpr std::uint32_t kMax = 0x47600000u;  // 57344
  static float decode(Bits u) { return from_half(static_cast<std::uint32_t>(u) << 8); }
  static Bits encode(float f, std::uint32_t sign) {
    std::uint32_t a = bits_of(f) & kMagnitude;
    if (a > kInf) return static_cast<Bits>(sign >> 24 | 0x7fu);
    if (a > kMax) a = kMax;
    return static_cast<Bits>(sign >> 24 | round_magnitude<2, -14>(float_of(a)));
  }
};

/// One zero and one NaN, neither with a sign; no infinity. A code is half of what it is in e4m3fn.
struct E4M3Fnuz {
  static constexpr int kSize = 1;
  using Bits = std::uint8_t;
  static constexpr std::uint32_t kMax = 0x43700000u;  // 240
  static float decode(Bits u) {
    if (u == 0x80u) return float_of(kInf | kQuiet);
    const std::uint32_t sign = (u & 0x80u) << 24, magnitude = u & 0x7fu;
    return float_of(sign | bits_of(float_of(magnitude << 20) * float_of((127u + 119u) << 23)));
  }
  static Bits encode(float f, std::uint32_t sign) {
    std::uint32_t a = bits_of(f) & kMagnitude;
    if (a > kInf) return 0x80u;
    if (a > kMax) a = kMax;
    const std::uint32_t magnitude = round_magnitude<3, -7>(float_of(a));
    return static_cast<Bits>(magnitude == 0 ? 0u : sign >> 24 | magnitude);
  }
};

/// Whole numbers of -127 .. 127 as targets; NaN, which int8 lacks, becomes 0.
struct Int8 {
  static constexpr int kSize = 1;
  using Bits = std::uint8_t;
  static constexpr std::uint32_t kMax = 0x42fe0000u;  // 127
  static float decode(Bits u) { return static_cast<float>(static_cast<std::int8_t>(u)); }
  static Bits encode(float f, std::uint32_t) {
    const std::uint32_t u = bits_of(f), a = u & kMagnitude;
    if (a > kInf) return 0;
    const float clamped = float_of((u & kSign) | (a < kMax ? a : kMax));
    return static_cast<Bits>(bits_of(clamped + 12582912.0f));  // 1.5 * 2^23: the sum's low bits are the rounded number
  }
};

/// Call `f` with an object of the format's type.
template <class F>
inline auto with_format(Dtype d, F&& f) {
  switch (d) {
    case Dtype::kFloat32: return f(Float32{});
    case Dtype::kBFloat16: return f(BFloat16{});
    case Dtype::kFloat16: return f(Float16{});
    case Dtype::kE4M3: return f(E4M3{});
    case Dtype::kE4M3Fnuz: return f(E4M3Fnuz{});
    case Dtype::kE5M2: return f(E5M2{});
    case Dtype::kInt8: break;
  }
  return f(Int8{});
}

}  // namespace
}  // namespace regauge
