// AVX2 row kernels, one template over source format, target format and kind of scaling. Rows end with a padded block.
#include "convert.hpp"

#if defined(__AVX2__)
#include <type_traits>

#include "convert_avx2.hpp"
#include "scales.hpp"

namespace regauge::avx2 {
namespace {

using Int = std::int64_t;
constexpr Int kBlock = 32;  // elements

enum class Scaling { kNone, kOne, kFull };  // no scale | one factor | any combination

// The scales of one row, ready to apply.
struct Factors {
  float src = 1.0f, dst = 1.0f;  // kOne: `src` is the one factor
  bool has_src = false, has_dst = false;
  Rule rule = Rule::kReciprocal;
  std::uint32_t flip = 0;  // sign bit that the scales contribute

  void set_src(float s) { src = s, has_src = true, flip ^= bits_of(s) & kSign; }
  bool divides() const { return rule != Rule::kReciprocal; }
  void set_dst(float s) { dst = divides() ? s : 1.0f / s, has_dst = true, flip ^= bits_of(s) & kSign; }
  /// The same with a lone factor as `src`.
  Factors folded() const {
    Factors f = *this;
    if (!has_src && has_dst && !divides()) f.src = dst;
    return f;
  }
  /// kOne needs a factor for which |x| * |factor| hides nothing: neither zero nor infinite nor NaN.
  Scaling kind() const {
    if (!has_src && !has_dst) return Scaling::kNone;
    const bool plain = (bits_of(src) & kMagnitude) - 1u < kMaxFinite;
    return (has_src && has_dst) || (has_dst && divides()) || !plain ? Scaling::kFull : Scaling::kOne;
  }
};

inline Factors factors_of(const RowBatch& b, Int row, bool use_dst) {
  Factors f;
  f.rule = b.scheme.rule;
  if (b.src_scale) f.set_src(read_scale(b.src_scale + row * b.src_scale_stride, b.scheme.src_e8m0));
  if (use_dst && b.dst_scale) f.set_dst(read_scale(b.dst_scale + row * b.dst_scale_stride, b.scheme.dst_e8m0));
  return f.folded();
}

// Quotients in the source's own precision.
template <class Src>
REGAUGE_INLINE __m256 rounded_to(__m256 w) {
  if constexpr (std::is_same_v<Src, BFloat16>)
    return _mm256_and_ps(_mm256_castsi256_ps(Vector<BFloat16>::round(w)), floats(0xffff0000u));
  else if constexpr (std::is_same_v<Src, Float16>)
    return _mm256_cvtph_ps(_mm256_cvtps_ph(w, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else return w;
}

template <class Src, Scaling S>
REGAUGE_INLINE __m256 apply(__m256 v, const Factors& f) {
  if constexpr (S == Scaling::kOne) v = _mm256_mul_ps(v, _mm256_set1_ps(f.src));
  if constexpr (S == Scaling::kFull) {
    if (f.has_src) v = _mm256_mul_ps(v, _mm256_set1_ps(f.src));
    if (!f.has_dst) return v;
    if (!f.divides()) return _mm256_mul_ps(v, _mm256_set1_ps(f.dst));
    v = _mm256_div_ps(v, _mm256_set1_ps(f.dst));
    if (f.rule == Rule::kDivideSource) v = rounded_to<Src>(v);
  }
  return v;
}

template <class Dst>
constexpr bool kFp8 = Dst::kSize == 1 && !std::is_same_v<Dst, Int8>;

// bfloat16 to fp8 with at most one factor: signs are handled as bytes, magnitudes as magnitudes.
template <class Dst, Scaling S, bool Stream>
REGAUGE_INLINE void lean_block(const Byte* s, Byte* d, const Factors& f) {
  using Code = EncoderOf<Dst>;
  __m256 v[4];
  Vector<BFloat16>::load_absolute(s, v);
  const __m256 factor = absolute(_mm256_set1_ps(f.src));
  __m256i q[4];
  for (int k = 0; k < 4; ++k)
    q[k] = Code::template scaled_codes<true>(S == Scaling::kOne ? _mm256_mul_ps(v[k], factor) : v[k]);
  const __m256i signs = _mm256_packs_epi16(load_bytes(s), load_bytes(s + 32));
  Code::template store<Stream, true>(d, q, _mm256_xor_si256(signs, bytes(f.flip >> 24)));
}

template <class Src, class Dst, Scaling S, bool Stream>
REGAUGE_INLINE void block(const Byte* s, Byte* d, const Factors& f) {
  using In = Vector<Src>;
  __m256 v[4];
  In::load(s, v);
  if constexpr (kFp8<Dst>) {
    using Code = EncoderOf<Dst>;
    if constexpr (In::kEvenOdd) interleave(v);
    const __m256i signs = _mm256_xor_si256(packed_signs(v), bytes(f.flip >> 24));
    __m256i q[4];
    for (int k = 0; k < 4; ++k) q[k] = Code::template scaled_codes<false>(absolute(apply<Src, S>(v[k], f)));
    Code::template store<Stream, false>(d, q, signs);
  } else {
    for (int k = 0; k < 4; ++k) v[k] = apply<Src, S>(v[k], f);
    if constexpr (std::is_same_v<Dst, BFloat16> || std::is_same_v<Dst, Int8>) {
      Vector<Dst>::template store_ordered<Stream, In::kEvenOdd>(d, v);
    } else {
      if constexpr (In::kEvenOdd) interleave(v);
      Vector<Dst>::template store<Stream>(d, v);
    }
  }
}

template <class Src, class Dst, Scaling S, bool Stream>
REGAUGE_INLINE void any_block(const Byte* s, Byte* d, const Factors& f) {
  if constexpr (std::is_same_v<Src, BFloat16> && kFp8<Dst> && S != Scaling::kFull) lean_block<Dst, S, Stream>(s, d, f);
  else block<Src, Dst, S, Stream>(s, d, f);
}

// Elements before the first cache line of a streamed row, -1 when the row cannot be streamed.
inline Int head_of(const Byte* d, Int n, Int size) {
  const Int head = -reinterpret_cast<std::intptr_t>(d) & 63;
  if (head == 0) return n * size >= 64 ? 0 : -1;
  return n * size >= 1024 && head % size == 0 ? head / size : -1;
}

template <class Src, class Dst, Scaling S>
__attribute__((noinline)) void part(const Byte* s, Byte* d, Int n, const Factors& f) {
  alignas(64) Byte in[kBlock * Src::kSize] = {}, out[kBlock * Dst::kSize];
  std::memcpy(in, s, n * Src::kSize);
  any_block<Src, Dst, S, false>(in, out, f);
  std::memcpy(d, out, n * Dst::kSize);
}

template <class Src, class Dst, Scaling S, bool Stream>
REGAUGE_INLINE void blocks(const Byte* s, Byte* d, Int count, Factors f) {
  for (; count > 0; --count, s += kBlock * Src::kSize, d += kBlock * Dst::kSize)
    any_block<Src, Dst, S, Stream>(s, d, f);
}

template <class Src, class Dst, Scaling S>
void plain_row(const Byte* s, Byte* d, Int n, const Factors& f) {
  const Int whole = n / kBlock;
  blocks<Src, Dst, S, false>(s, d, whole, f);
  if (n % kBlock) part<Src, Dst, S>(s + whole * kBlock * Src::kSize, d + whole * kBlock * Dst::kSize, n % kBlock, f);
}

template <class Src, class Dst, Scaling S>
void stream_row(const Byte* s, Byte* d, Int n, const Factors& f) {
  const Int head = head_of(d, n, Dst::kSize);
  if (head != 0) {
    const Int h = head < 0 ? n : head;
    plain_row<Src, Dst, S>(s, d, h, f);
    s += h * Src::kSize, d += h * Dst::kSize, n -= h;
    if (n == 0) return;
  }
  constexpr Int kLine = 64 / Dst::kSize;  // elements; a line that is not full must not be streamed
  const Int whole = n - n % (kLine < kBlock ? kBlock : kLine);
  blocks<Src, Dst, S, true>(s, d, whole / kBlock, f);
  if (whole < n) plain_row<Src, Dst, S>(s + whole * Src::kSize, d + whole * Dst::kSize, n - whole, f);
}

template <class Src, class Dst, Scaling S>
inline void row(const Byte* s, Byte* d, Int n, const Factors& f, bool stream) {
  if (stream) stream_row<Src, Dst, S>(s, d, n, f);
  else plain_row<Src, Dst, S>(s, d, n, f);
}

// One row with whatever scales it has.
template <class Src, class Dst>
__attribute__((noinline)) void scaled_row(const Byte* s, Byte* d, Int n, const Factors& f, bool stream) {
  if (f.kind() == Scaling::kNone) row<Src, Dst, Scaling::kNone>(s, d, n, f, stream);
  else if (f.kind() == Scaling::kOne) row<Src, Dst, Scaling::kOne>(s, d, n, f, stream);
  else row<Src, Dst, Scaling::kFull>(s, d, n, f, stream);
}

// Rows of whole blocks, at most one factor each: one loop nest that keeps its constants in registers. `step` is 0 when
// all rows share f[0]. Fetches ahead, a line for a line.
template <class Src, class Dst, Scaling S, bool Stream>
void block_rows(const RowBatch& b, const Factors* f, Int step) {
  constexpr Int kIn = kBlock * Src::kSize, kOut = kBlock * Dst::kSize;
  const Fetch fetch(b, b.n * Src::kSize);
  for (Int o = 0; o < b.outer; ++o)
    for (Int r = 0; r < b.rows; ++r) {
      const Byte *s = b.src + o * b.outer_stride[kSrc] + r * b.src_stride, *ahead = fetch.row(o, r);
      Byte* d = b.dst + o * b.outer_stride[kDst] + r * b.dst_stride;
      const Factors own = f[r * step];  // a copy: bytes written might alias the array
      for (Int i = b.n; i > 0; i -= kBlock, s += kIn, d += kOut, ahead += kIn) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
        if constexpr (kIn > 64) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T0);
        any_block<Src, Dst, S, Stream>(s, d, own);
      }
    }
}

// A batch whose scales are known; with several outer indices all rows share f[0].
template <class Src, class Dst>
void factored_rows(const RowBatch& b, const Factors* f, Int step) {
  bool even = b.n % kBlock == 0;
  for (Int r = 0; even && r < (step ? b.rows : 1); ++r)
    even = f[r].kind() == f[0].kind() && f[r].kind() != Scaling::kFull;
  if (!even) {
    for (Int o = 0; o < b.outer; ++o)
      for (Int r = 0; r < b.rows; ++r)
        scaled_row<Src, Dst>(b.src + o * b.outer_stride[kSrc] + r * b.src_stride,
                             b.dst + o * b.outer_stride[kDst] + r * b.dst_stride, b.n, f[r * step], b.stream);
    return;
  }
  const bool lines = whole_lines(b, b.n * Dst::kSize);
  if (f[0].kind() == Scaling::kOne) {
    if (lines) block_rows<Src, Dst, Scaling::kOne, true>(b, f, step);
    else block_rows<Src, Dst, Scaling::kOne, false>(b, f, step);
  } else {
    if (lines) block_rows<Src, Dst, Scaling::kNone, true>(b, f, step);
    else block_rows<Src, Dst, Scaling::kNone, false>(b, f, step);
  }
}

constexpr Int kBatch = 32;

template <class Src, class Dst>
void convert_rows(const RowBatch& whole) {
  if (one_scale(whole)) {
    const Factors f = factors_of(whole, 0, true);
    factored_rows<Src, Dst>(whole, &f, 0);
    return;
  }
  Factors f[kBatch];
  for (Int o = 0; o < whole.outer; ++o) {
    const RowBatch b = inner_batch(whole, o);
    for (Int first = 0; first < b.rows; first += kBatch) {
      const RowBatch part = some_rows(b, first, kBatch);
      for (Int r = 0; r < part.rows; ++r) f[r] = factors_of(part, r, true);
      factored_rows<Src, Dst>(part, f, 1);
    }
  }
}

inline std::uint32_t most_of(__m256i v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1))));
}

// Largest |v| of a row. Zero padding cannot win unless a scale turns 0 into NaN, so scaled tails repeat an element.
template <class Src>
inline std::uint32_t row_max(const Byte* s, Int n, const Factors& f) {
  __m256i most = _mm256_setzero_si256();
  const auto take = [&](const Byte* p) {
    __m256 v[4];
    Vector<Src>::load(p, v);
    for (int k = 0; k < 4; ++k)
      most = _mm256_max_epu32(most, _mm256_castps_si256(absolute(apply<Src, Scaling::kFull>(v[k], f))));
  };
  Int i = 0;
  for (; i + kBlock <= n; i += kBlock) take(s + i * Src::kSize);
  if (i < n) {
    alignas(64) Byte in[kBlock * Src::kSize];
    for (Int k = 0; k < kBlock; ++k)
      std::memcpy(in + k * Src::kSize, s + (i + k < n ? i + k : i) * Src::kSize, Src::kSize);
    take(in);
  }
  return most_of(most);
}

// Unscaled bfloat16 compares as 16-bit integers.
inline std::uint32_t bfloat_max(const Byte* s, Int n) {
  __m256i most = _mm256_setzero_si256();
  Int i = 0;
  for (; i + 16 <= n; i += 16)
    most = _mm256_max_epu16(most, _mm256_and_si256(load_bytes(s + 2 * i), halves(0x7fffu)));
  const __m128i m = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  // minpos finds the smallest of eight words: look for it among the complements.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1)));
  std::uint32_t best = ~static_cast<std::uint32_t>(_mm_cvtsi128_si32(least)) & 0xffffu;
  for (; i < n; ++i) {
    std::uint16_t x;
    std::memcpy(&x, s + 2 * i, 2);
    const std::uint32_t a = x & 0x7fffu;
    if (a > best) best = a;
  }
  return best << 16;
}

template <class Src>
inline std::uint32_t any_max(const Byte* s, Int n, const Factors& f) {
  if constexpr (std::is_same_v<Src, BFloat16>)
    if (!f.has_src) return bfloat_max(s, n);
  return row_max<Src>(s, n, f);
}

template <class Src>
std::uint32_t max_rows(const RowBatch& b) {
  std::uint32_t most = 0;
  for (Int r = 0; r < b.rows; ++r) {
    const std::uint32_t m = any_max<Src>(b.src + r * b.src_stride, b.n, factors_of(b, r, false));
    if (m > most) most = m;
  }
  return most;
}

// Scales and factors of up to kBatch rows, in steps that each run over all rows: so the divisions overlap.
template <class Src, class Dst>
inline void find_scales(const RowBatch& b, Factors* f) {
  std::uint32_t most[kBatch];
  float scale[kBatch];
  for (Int r = 0; r < b.rows; ++r) {
    f[r] = factors_of(b, r, false);
    most[r] = any_max<Src>(b.src + r * b.src_stride, b.n, f[r]);
  }
  for (Int r = 0; r < b.rows; ++r) scale[r] = dynamic_scale(most[r], float_of(Dst::kMax), b.scheme);
  for (Int r = 0; r < b.rows; ++r) {
    write_scale(b.dst_scale + r * b.dst_scale_stride, scale[r], b.scheme.dst_e8m0);
    f[r].set_dst(scale[r]);
    f[r] = f[r].folded();
  }
}

template <class Src, class Dst>
void dynamic_rows(const RowBatch& whole) {
  Factors f[kBatch];
  for (Int o = 0; o < whole.outer; ++o) {
    const RowBatch b = inner_batch(whole, o);
    for (Int first = 0; first < b.rows; first += kBatch) {
      const RowBatch part = some_rows(b, first, kBatch);
      find_scales<Src, Dst>(part, f);
      factored_rows<Src, Dst>(part, f, 1);
    }
  }
}

template <class Src, class Dst>
Kernels kernels_of() {
  if constexpr (Dst::kSize == 1) return {convert_rows<Src, Dst>, dynamic_rows<Src, Dst>, max_rows<Src>};
  else return {convert_rows<Src, Dst>, nullptr, max_rows<Src>};
}

}  // namespace

Kernels kernels(Dtype src, Dtype dst) {
  return with_format(src, [dst](auto s) {
    return with_format(dst, [](auto d) { return kernels_of<decltype(s), decltype(d)>(); });
  });
}

}  // namespace regauge::avx2
#endif
