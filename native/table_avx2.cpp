// fp8 to bfloat16 by table. A code is a 4-bit (e4m3) or 3-bit (e5m2) significand, leading bit included, and an exponent;
// multiplying by a power of two changes no rounding while everything stays normal, so bf16(scaled value) is the rounded
// scaled significand plus the exponent. Sixteen significands fit one byte shuffle for each half of the result.
#include "convert.hpp"

#if defined(__AVX2__)
#include "convert_avx2.hpp"
#include "scales.hpp"

namespace regauge::avx2 {
namespace {

using Int = std::int64_t;

template <class Src>
struct Shape;
template <>
struct Shape<E4M3> {
  static constexpr int kMantissa = 3;
  static constexpr std::uint32_t kSpecial = 0x7f;        // this magnitude and above: NaN
  static constexpr std::uint32_t kUnit = (127 - 9) << 23;   // smallest subnormal
};
template <>
struct Shape<E4M3Fnuz> {
  static constexpr int kMantissa = 3;
  static constexpr std::uint32_t kUnit = (127 - 10) << 23;
};
template <>
struct Shape<E5M2> {
  static constexpr int kMantissa = 2;
  static constexpr std::uint32_t kSpecial = 0x7c;        // infinity and NaN
  static constexpr std::uint32_t kUnit = (127 - 16) << 23;
};

struct Table {
  __m256i low, high;  // bytes of the sixteen entries, in both lanes
  __m256i flip;       // sign bit that the scales contribute
};

struct RowScales {
  float src = 1.0f, dst = 1.0f;
  bool has_src = false, has_dst = false, divide = false;

  RowScales(const RowBatch& b, Int o, Int r) : has_src(b.src_scale != nullptr), has_dst(b.dst_scale != nullptr), divide(b.scheme.divides()) {
    if (has_src)
      src = read_scale(b.src_scale + o * b.outer_stride[kSrcScale] + r * b.src_scale_stride, b.scheme.src_e8m0);
    if (has_dst)
      dst = read_scale(b.dst_scale + o * b.outer_stride[kDstScale] + r * b.dst_scale_stride, b.scheme.dst_e8m0);
  }
  /// Scales of 2^-40 .. 2^40: no product of theirs with an fp8 value leaves the normal numbers.
  bool moderate() const {
    const auto fits = [](float f) {
      const std::uint32_t e = bits_of(f) >> 23 & 0xffu;
      return e - (127u - 40u) < 80u;
    };
    return fits(src) && fits(dst);
  }
};

template <class Src>
REGAUGE_INLINE Table make_table(const RowScales& s) {
  const __m256 low = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 v[2] = {low, _mm256_add_ps(low, _mm256_set1_ps(8.0f))};
  const __m256 unit = floats(Shape<Src>::kUnit);
  const float reciprocal = s.divide || !s.has_dst ? 1.0f : 1.0f / s.dst;
  const __m256 src = absolute(_mm256_set1_ps(s.src)), dst = absolute(_mm256_set1_ps(s.divide ? s.dst : reciprocal));
  __m256i r[2];
  for (int k = 0; k < 2; ++k) {
    v[k] = _mm256_mul_ps(_mm256_mul_ps(v[k], unit), src);
    if (s.has_dst) v[k] = s.divide ? _mm256_div_ps(v[k], dst) : _mm256_mul_ps(v[k], dst);
    r[k] = _mm256_srli_epi32(Vector<BFloat16>::round(v[k]), 16);
  }
  __m256i entries = _mm256_permute4x64_epi64(_mm256_packus_epi32(r[0], r[1]), 0xd8);
  // Normal codes come with an exponent of at least 1, subnormal ones with 0: take that 1 off the normal entries.
  const __m256i index = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i normal = _mm256_cmpgt_epi16(index, halves((1u << Shape<Src>::kMantissa) - 1u));
  entries = _mm256_sub_epi16(entries, _mm256_and_si256(normal, halves(0x80u)));
  const __m256i low_bytes = _mm256_and_si256(entries, halves(0xffu)), high_bytes = _mm256_srli_epi16(entries, 8);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(low_bytes, high_bytes), 0xd8);
  const std::uint32_t flip = (bits_of(s.src) ^ bits_of(s.dst)) >> 24 & 0x80u;
  return {_mm256_permute2x128_si256(packed, packed, 0x00), _mm256_permute2x128_si256(packed, packed, 0x11), bytes(flip)};
}

// Whether a special code is among those of some blocks: the largest magnitude tells, or e4m3fnuz's one NaN is there.
template <class Src>
struct Special {
  __m256i found = _mm256_setzero_si256();
  REGAUGE_INLINE void look_at(__m256i x) {
    if constexpr (std::is_same_v<Src, E4M3Fnuz>) found = _mm256_or_si256(found, _mm256_cmpeq_epi8(x, bytes(0x80u)));
    else found = _mm256_max_epu8(found, _mm256_and_si256(x, bytes(0x7fu)));
  }
  REGAUGE_INLINE bool any() const {
    if constexpr (std::is_same_v<Src, E4M3Fnuz>) return !_mm256_testz_si256(found, found);
    else {
      const __m256i at = _mm256_cmpeq_epi8(_mm256_max_epu8(found, bytes(Shape<Src>::kSpecial)), found);
      return !_mm256_testz_si256(at, at);
    }
  }
};

// 32 codes to 32 bfloat16.
template <class Src, bool Stream>
REGAUGE_INLINE void table_block(__m256i x, Byte* d, const Table& t) {
  constexpr std::uint32_t kLead = 1u << Shape<Src>::kMantissa;
  x = _mm256_permute4x64_epi64(x, 0xd8);
  const __m256i exponent = _mm256_and_si256(x, bytes(0x80u - kLead));
  const __m256i index = _mm256_or_si256(_mm256_and_si256(x, bytes(kLead - 1u)), _mm256_min_epu8(exponent, bytes(kLead)));
  const __m256i sign = _mm256_xor_si256(_mm256_and_si256(x, bytes(0x80u)), t.flip);
  const __m256i low = _mm256_shuffle_epi8(t.low, index), high = _mm256_or_si256(_mm256_shuffle_epi8(t.high, index), sign);
  const __m256i zero = _mm256_setzero_si256();
  constexpr int kMove = 7 - Shape<Src>::kMantissa;
  const __m256i e0 = _mm256_slli_epi16(_mm256_unpacklo_epi8(exponent, zero), kMove);
  const __m256i e1 = _mm256_slli_epi16(_mm256_unpackhi_epi8(exponent, zero), kMove);
  put<Stream>(d, _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), e0));
  put<Stream>(d + 32, _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), e1));
}

constexpr Int kNoTails = 0;  // what ends a row and fills no line is not streamed

// What the table cannot do: special codes, tails, extreme scales. Part of row r of outer index o.
__attribute__((noinline)) void plain_part(const RowBatch& b, Int o, Int r, Int at, Int count) {
  RowBatch part = inner_batch(b, o);
  part.src += r * b.src_stride + at, part.dst += r * b.dst_stride + 2 * at;
  if (b.src_scale) part.src_scale += r * b.src_scale_stride;
  if (b.dst_scale) part.dst_scale += r * b.dst_scale_stride;
  part.rows = 1, part.n = count, part.stream = b.stream && count % 32 == 0, part.ahead = nullptr;
  b.plain->convert(part);
}

// Blocks blocks of 32 codes; false, and nothing stored, if a special code is among them.
template <class Src, bool Stream, int Blocks>
REGAUGE_INLINE bool table_group(const Byte* s, Byte* d, const Byte* ahead, const Table& t) {
  __m256i x[Blocks];
  Special<Src> special;
#pragma GCC unroll 4
  for (int k = 0; k < Blocks; ++k) {
    if (k % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead + 32 * k), _MM_HINT_T0);
    x[k] = load_bytes(s + 32 * k);
    special.look_at(x[k]);
  }
  if (__builtin_expect(special.any(), 0)) return false;
#pragma GCC unroll 4
  for (int k = 0; k < Blocks; ++k) table_block<Src, Stream>(x[k], d + 64 * k, t);
  return true;
}

// Row r of outer index o.
template <class Src, bool Stream>
REGAUGE_INLINE void row_with(const RowBatch& b, Int o, Int r, const Byte* ahead, const Table& t) {
  constexpr Int kWide = 128;  // codes
  const Byte* s = b.src + o * b.outer_stride[kSrc] + r * b.src_stride;
  Byte* d = b.dst + o * b.outer_stride[kDst] + r * b.dst_stride;
  Int i = 0;
  for (; i + kWide <= b.n; i += kWide)
    if (!table_group<Src, Stream, 4>(s + i, d + 2 * i, ahead + i, t)) plain_part(b, o, r, i, kWide);
  for (; i + 32 <= b.n; i += 32)
    if (!table_group<Src, Stream, 1>(s + i, d + 2 * i, ahead + i, t)) plain_part(b, o, r, i, 32);
  if (i < b.n) plain_part(b, o, r, i, b.n - i);
}

// Rows that share a table.
template <class Src, bool Stream>
void rows_with(const RowBatch& b, const Table& shared) {
  const Table t = shared;
  const Fetch fetch(b, b.n);
  for (Int o = 0; o < b.outer; ++o)
    for (Int r = 0; r < b.rows; ++r) row_with<Src, Stream>(b, o, r, fetch.row(o, r), t);
}

// Rows with a table each.
template <class Src, bool Stream>
void rows_apart(const RowBatch& b) {
  const Fetch fetch(b, b.n);
  for (Int o = 0; o < b.outer; ++o)
    for (Int r = 0; r < b.rows; ++r) {
      const RowScales scales(b, o, r);
      if (__builtin_expect(scales.moderate(), 1))
        row_with<Src, Stream>(b, o, r, fetch.row(o, r), make_table<Src>(scales));
      else plain_part(b, o, r, 0, b.n);
    }
}

// Small batches with one scale throughout, as page tables give, share the table of the batch before.
template <class Src>
REGAUGE_INLINE Table remembered_table(const RowScales& s, Memo* memo) {
  static_assert(sizeof(Table) <= Memo::kBytes);
  if (!memo) return make_table<Src>(s);
  Memo::Slot& slot = memo->of(bits_of(s.src), bits_of(s.dst));
  Table t;
  if (slot.full) std::memcpy(&t, slot.data, sizeof t);
  else t = make_table<Src>(s), std::memcpy(slot.data, &t, sizeof t), slot.full = true;
  return t;
}

// A batch whose rows share their scales.
template <class Src>
void alike_rows(const RowBatch& b) {
  const RowScales scales(b, 0, 0);
  if (!scales.moderate()) {
    b.plain->convert(b);
    return;
  }
  const Table table = remembered_table<Src>(scales, b.memo);
  if (whole_lines(b, kNoTails)) rows_with<Src, true>(b, table);
  else rows_with<Src, false>(b, table);
}

template <class Src>
void rows(const RowBatch& b) {
  if (one_scale(b)) {
    alike_rows<Src>(b);
    return;
  }
  if (split_by_scales(b, alike_rows<Src>)) return;
  if (whole_lines(b, kNoTails)) rows_apart<Src, true>(b);
  else rows_apart<Src, false>(b);
}

}  // namespace

ConvertRows table_rows(Dtype src, Dtype dst) {
  if (dst != Dtype::kBFloat16) return nullptr;
  switch (src) {
    case Dtype::kE4M3: return rows<E4M3>;
    case Dtype::kE4M3Fnuz: return rows<E4M3Fnuz>;
    case Dtype::kE5M2: return rows<E5M2>;
    default: return nullptr;
  }
}

}  // namespace regauge::avx2
#endif
