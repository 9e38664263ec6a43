// How scales are stored, computed and applied: see move/reference.py, which defines it.
#pragma once

#include <type_traits>

#include "convert.hpp"
#include "formats.hpp"

namespace regauge {
namespace {  // kept out of the linker's sight, as in formats.hpp

/// A scale in memory. e8m0 (OCP Microscaling formats 1.0): 2^(code - 127), 0xff is NaN; 2^-127 is a subnormal float.
inline float read_scale(const std::uint8_t* p, bool e8m0) {
  std::uint32_t u;
  if (e8m0) u = *p == 0 ? kMinNormal >> 1 : *p == 0xffu ? kInf | kQuiet : static_cast<std::uint32_t>(*p) << 23;
  else std::memcpy(&u, p, 4);
  return float_of(u);
}

/// What is remembered for the scales that all rows of `b` share; `own` where nothing can be.
inline Memo::Slot& slot_of(const RowBatch& b, Memo::Slot& own) {
  if (!b.memo) return own;
  const std::uint32_t src = b.src_scale ? bits_of(read_scale(b.src_scale, b.scheme.src_e8m0)) : 0;
  const std::uint32_t dst = b.dst_scale ? bits_of(read_scale(b.dst_scale, b.scheme.dst_e8m0)) : 0;
  return b.memo->of(src, dst);
}

inline void write_scale(std::uint8_t* p, float s, bool e8m0) {
  if (e8m0) *p = static_cast<std::uint8_t>(bits_of(s) >> 23);
  else std::memcpy(p, &s, 4);
}

/// The scale of a row whose largest |v| has the bits `amax` (NaN and infinity count as the largest finite value).
inline float dynamic_scale(std::uint32_t amax, float most, const ScaleScheme& scheme) {
  float s = float_of(amax < kMaxFinite ? amax : kMaxFinite) / most;
  if (s < scheme.floor) s = scheme.floor;
  return scheme.pow2 ? float_of((bits_of(s) + 0x7fffffu) & kInf) : s;
}

/// A quotient in the source's own precision, as IEEE rounds it: beyond the range lies infinity.
template <class Src>
inline float round_to(float w) {
  if constexpr (std::is_same_v<Src, BFloat16>) return Src::decode(Src::encode(w, 0));
  if constexpr (std::is_same_v<Src, Float16>) {
    constexpr std::uint32_t kOverflow = 0x477ff000u;  // 65520
    const std::uint32_t u = bits_of(w), a = u & kMagnitude;
    return a >= kOverflow && a <= kInf ? float_of((u & kSign) | kInf) : Src::decode(Src::encode(w, 0));
  }
  return w;
}

}  // namespace
}  // namespace regauge
