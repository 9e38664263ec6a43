// The element types that are converted between.
#pragma once

#include <cstdint>

namespace regauge {

enum class Dtype { kFloat32, kBFloat16, kFloat16, kE4M3, kE4M3Fnuz, kE5M2, kInt8 };
constexpr const char* kDtypeNames[] = {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8"};

constexpr std::int64_t size_of(Dtype d) {
  return d == Dtype::kFloat32 ? 4 : d == Dtype::kBFloat16 || d == Dtype::kFloat16 ? 2 : 1;
}

/// 8-bit targets take scales that are computed from the values.
constexpr bool takes_dynamic(Dtype d) { return size_of(d) == 1; }

}  // namespace regauge
