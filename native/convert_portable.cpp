// Portable row kernels: one element at a time. They define the bytes that the vector kernels must give.
#include "scales.hpp"

namespace regauge {
namespace {

template <class T>
T read(const std::uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

// The scales of one row: v * src, then what the rule says about dst.
template <class Src>
struct Scales {
  bool has_src, has_dst;
  Rule rule;
  float src = 1.0f, dst = 1.0f;
  std::uint32_t flip = 0;  // sign bit that the scales contribute

  Scales(const RowBatch& b, std::int64_t row, bool use_dst)
      : has_src(b.src_scale != nullptr), has_dst(use_dst && b.dst_scale != nullptr), rule(b.scheme.rule) {
    if (has_src) src = read_scale(b.src_scale + row * b.src_scale_stride, b.scheme.src_e8m0);
    if (has_dst) set_dst(read_scale(b.dst_scale + row * b.dst_scale_stride, b.scheme.dst_e8m0));
    if (has_src) flip ^= bits_of(src) & kSign;
  }
  void set_dst(float s) {
    has_dst = true;
    flip ^= bits_of(s) & kSign;
    dst = rule == Rule::kReciprocal ? 1.0f / s : s;
  }
  float apply(float v) const {
    if (has_src) v = v * src;
    if (!has_dst) return v;
    if (rule == Rule::kReciprocal) return v * dst;
    return rule == Rule::kDivide ? v / dst : round_to<Src>(v / dst);
  }
};

template <class Src, class Dst>
void convert_row(const std::uint8_t* s, std::uint8_t* d, std::int64_t n, const Scales<Src>& scales) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float x = Src::decode(read<typename Src::Bits>(s + i * Src::kSize));
    const std::uint32_t sign = (bits_of(x) & kSign) ^ scales.flip;
    const typename Dst::Bits code = Dst::encode(scales.apply(x), sign);
    std::memcpy(d + i * Dst::kSize, &code, Dst::kSize);
  }
}

template <class Src>
std::uint32_t max_row(const std::uint8_t* s, std::int64_t n, const Scales<Src>& scales) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = scales.apply(Src::decode(read<typename Src::Bits>(s + i * Src::kSize)));
    const std::uint32_t a = bits_of(v) & kMagnitude;
    if (a > most) most = a;
  }
  return most;
}

template <class Src, class Dst>
void convert_rows(const RowBatch& whole) {
  for (std::int64_t o = 0; o < whole.outer; ++o) {
    const RowBatch b = inner_batch(whole, o);
    for (std::int64_t r = 0; r < b.rows; ++r)
      convert_row<Src, Dst>(b.src + r * b.src_stride, b.dst + r * b.dst_stride, b.n, Scales<Src>(b, r, true));
  }
}

template <class Src, class Dst>
void dynamic_row(const RowBatch& b, std::int64_t r) {
  Scales<Src> scales(b, r, false);
  const std::uint32_t amax = max_row<Src>(b.src + r * b.src_stride, b.n, scales);
  const float s = dynamic_scale(amax, float_of(Dst::kMax), b.scheme);
  write_scale(b.dst_scale + r * b.dst_scale_stride, s, b.scheme.dst_e8m0);
  scales.set_dst(s);
  convert_row<Src, Dst>(b.src + r * b.src_stride, b.dst + r * b.dst_stride, b.n, scales);
}

template <class Src, class Dst>
void dynamic_rows(const RowBatch& b) {
  for (std::int64_t o = 0; o < b.outer; ++o)
    for (std::int64_t r = 0; r < b.rows; ++r) dynamic_row<Src, Dst>(inner_batch(b, o), r);
}

template <class Src>
std::uint32_t max_rows(const RowBatch& b) {
  std::uint32_t most = 0;
  for (std::int64_t r = 0; r < b.rows; ++r) {
    const std::uint32_t m = max_row<Src>(b.src + r * b.src_stride, b.n, Scales<Src>(b, r, false));
    if (m > most) most = m;
  }
  return most;
}

template <class Src, class Dst>
Kernels kernels_of() {
  if constexpr (Dst::kSize == 1) return {convert_rows<Src, Dst>, dynamic_rows<Src, Dst>, max_rows<Src>};
  else return {convert_rows<Src, Dst>, nullptr, max_rows<Src>};
}

}  // namespace

Kernels portable_kernels(Dtype src, Dtype dst) {
  return with_format(src, [dst](auto s) {
    return with_format(dst, [](auto d) { return kernels_of<decltype(s), decltype(d)>(); });
  });
}

}  // namespace regauge
