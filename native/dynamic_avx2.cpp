// bfloat16 to 8 bits with a scale computed for every row, in three passes over a few rows at a time: largest magnitudes,
// scales, codes. Whatever this cannot do goes to the kernels of convert_avx2.cpp.
#include "convert.hpp"

#if defined(__AVX2__)
#include "steps_avx2.hpp"

namespace regauge::avx2 {
namespace {

constexpr Int kRows = 16;
constexpr std::uint32_t kInfinite = kInf >> 16;

REGAUGE_INLINE void fetch(const Byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Largest magnitudes of a row of `blocks` blocks, as bfloat16 bits, which order as integers: the row's is the largest of
// the eight. Fetches half of the lines ahead; the other half is for the pass that codes.
REGAUGE_INLINE __m128i largest(const Byte* s, const Byte* ahead, Int blocks) {
  const __m256i magnitude = halves(0x7fffu);
  __m256i a = _mm256_setzero_si256(), b = a;
  const auto take = [&](const Byte* p) {
    a = _mm256_max_epu16(a, _mm256_and_si256(load_bytes(p), magnitude));
    b = _mm256_max_epu16(b, _mm256_and_si256(load_bytes(p + 32), magnitude));
  };
  for (; blocks >= 4; blocks -= 4, s += 256, ahead += 128)
    fetch(ahead), fetch(ahead + 64), take(s), take(s + 64), take(s + 128), take(s + 192);
  for (; blocks > 0; --blocks, s += 64, ahead += 32) fetch(ahead), take(s);
  a = _mm256_max_epu16(a, b);
  return _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}

// The largest of eight words for each of eight rows.
REGAUGE_INLINE __m128i largest_of_each(const __m128i m[8]) {
  __m128i two[4], four[2];
  for (int k = 0; k < 4; ++k)
    two[k] = _mm_max_epu16(_mm_unpacklo_epi16(m[2 * k], m[2 * k + 1]), _mm_unpackhi_epi16(m[2 * k], m[2 * k + 1]));
  for (int k = 0; k < 2; ++k)
    four[k] = _mm_max_epu16(_mm_unpacklo_epi32(two[2 * k], two[2 * k + 1]),
                            _mm_unpackhi_epi32(two[2 * k], two[2 * k + 1]));
  return _mm_max_epu16(_mm_unpacklo_epi64(four[0], four[1]), _mm_unpackhi_epi64(four[0], four[1]));
}

// What pass two finds out about kRows rows: amax as bfloat16 bits, the scale (`dynamic_scale`, eight at a time) and
// 1 / scale.
struct RowScales {
  alignas(32) std::uint16_t amax[kRows];
  alignas(32) float scale[kRows], factor[kRows];

  REGAUGE_INLINE RowScales(const __m128i* most, float most_code, const ScaleScheme& scheme) {
    for (Int r = 0; r < kRows; r += 8) {
      const __m128i m = largest_of_each(most + r);
      _mm_store_si128(reinterpret_cast<__m128i*>(amax + r), m);
      const __m256i a = _mm256_min_epu32(_mm256_slli_epi32(_mm256_cvtepu16_epi32(m), 16), words(kMaxFinite));
      __m256 s = _mm256_div_ps(_mm256_castsi256_ps(a), _mm256_set1_ps(most_code));
      s = _mm256_max_ps(s, _mm256_set1_ps(scheme.floor));
      if (scheme.pow2) {
        const __m256i up = _mm256_add_epi32(_mm256_castps_si256(s), words(0x7fffffu));
        s = _mm256_castsi256_ps(_mm256_and_si256(up, words(kInf)));
      }
      _mm256_store_ps(scale + r, s);
      _mm256_store_ps(factor + r, _mm256_div_ps(_mm256_set1_ps(1.0f), s));
    }
  }
};

// Blocks of finite numbers times the reciprocal of their own scale: no code can saturate.
template <class Dst, bool Stream>
REGAUGE_INLINE void bounded_blocks(const Byte* s, Byte* d, const Byte* ahead, Int blocks, float reciprocal) {
  const __m256 factor = _mm256_set1_ps(reciprocal);
  for (; blocks > 0; --blocks, s += 2 * kBlock, d += kBlock, ahead += kBlock) {
    fetch(ahead);
    __m256 v[4];
    if constexpr (std::is_same_v<Dst, Int8>) {
      Vector<BFloat16>::load(s, v);
      __m256i n[4];
      for (int k = 0; k < 4; ++k) n[k] = _mm256_cvtps_epi32(_mm256_mul_ps(v[k], factor));
      put<Stream>(d, Vector<Int8>::pack_even_odd(n));
    } else {
      using Code = EncoderOf<Dst>;
      Vector<BFloat16>::load_absolute(s, v);
      __m256i q[4];
      for (int k = 0; k < 4; ++k) q[k] = Code::template scaled_codes<true, false>(_mm256_mul_ps(v[k], factor));
      Code::template store<Stream, true>(d, q, _mm256_packs_epi16(load_bytes(s), load_bytes(s + 32)));
    }
  }
}

// A computed scale is amax / MAX, and amax is a bfloat16: up to a power of two there are 128 scales. The last table is
// that of the scale 1, for scales that are powers of two.
template <class Dst>
struct ScaleSteps {
  static constexpr int kExponent = 127, kLeast = 40;  // of amax: that of the tables; the least they are used for
  Steps<Dst> of[129];

  ScaleSteps(const Kernels& plain, Rule rule) {
    for (std::uint32_t m = 0; m <= 128; ++m) {
      float s = float_of(static_cast<std::uint32_t>(kExponent) << 23 | m << 16) / float_of(Dst::kMax);
      if (m == 128) s = 1.0f;
      RowBatch b{};
      b.dst_scale = reinterpret_cast<Byte*>(&s), b.src_size = 2, b.scheme.rule = rule, b.plain = &plain;
      of[m] = Steps<Dst>::make(b, 1.0f / s);
    }
  }

  /// `plain`: those from bfloat16 to Dst.
  static const ScaleSteps& with(const Kernels& plain, Rule rule) {
    static const ScaleSteps reciprocal(plain, Rule::kReciprocal), divide(plain, Rule::kDivide);
    static const ScaleSteps source(plain, Rule::kDivideSource);
    return rule == Rule::kReciprocal ? reciprocal : rule == Rule::kDivide ? divide : source;
  }
};
template <>
struct ScaleSteps<Int8> {  // has none
  static const ScaleSteps& with(const Kernels&, Rule) {
    static const ScaleSteps none;
    return none;
  }
};

// The rows of one batch. Blocks: of a row, 0 when only the batch tells.
template <class Dst, bool Stream, Int Blocks>
class Scaler {
 public:
  Scaler(const RowBatch& b, Rule rule, Byte& pause)
      : b_(b), rule_(rule), fetch_(b, 2 * b.n), tables_(ScaleSteps<Dst>::with(*b.plain, rule)), pause_(pause) {}

  // Groups of rows one after the other; the largest magnitudes of the next group are looked for while this one is coded,
  // so that reading, fetching and arithmetic overlap.
  void scale_rows() {
    const Int rows = b_.outer * b_.rows;
    Group groups[2], *now = &groups[0], *next = &groups[1];
    place(*now, 0, rows);
    for (Int k = 0; k < now->count; ++k) now->most[k] = largest(now->s[k], now->ahead[k], blocks());
    for (Int first = 0; first < rows; first += kRows) {
      place(*next, first + kRows, rows);
      code_group(*now, *next);
      std::swap(now, next);
    }
  }

 private:
  struct Group {
    Int count;
    const Byte *s[kRows], *ahead[kRows];
    Byte *d[kRows], *scale[kRows];
    __m128i most[kRows];
  };

  REGAUGE_INLINE Int blocks() const { return Blocks ? Blocks : b_.n / kBlock; }

  // Rows first .. first + kRows - 1 of all rows of all outer indices.
  REGAUGE_INLINE void place(Group& g, Int first, Int rows) const {
    g.count = rows - first < kRows ? rows - first : kRows;
    Int o = first / b_.rows, r = first % b_.rows;
    for (Int k = 0; k < g.count; ++k) {
      g.s[k] = b_.src + o * b_.outer_stride[kSrc] + r * b_.src_stride, g.ahead[k] = fetch_.row(o, r);
      g.d[k] = b_.dst + o * b_.outer_stride[kDst] + r * b_.dst_stride;
      g.scale[k] = b_.dst_scale + o * b_.outer_stride[kDstScale] + r * b_.dst_scale_stride;
      if (++r == b_.rows) r = 0, ++o;
    }
  }

  REGAUGE_INLINE void code_group(Group& now, Group& next) {
    for (Int k = now.count; k < kRows; ++k) now.most[k] = _mm_setzero_si128();
    const RowScales found(now.most, float_of(Dst::kMax), b_.scheme);
    for (Int k = 0; k < now.count; ++k) write_scale(now.scale[k], found.scale[k], b_.scheme.dst_e8m0);
    const Constants<Dst> constants{};
    const bool stepping = pause_ == 0;
    Int slow = 0;
    for (Int k = 0; k < now.count; ++k) {
      const Byte* ahead = fetch_.row(k / b_.rows, k % b_.rows) + b_.n;  // the first group's: no group before it did that
      if (k < next.count) next.most[k] = largest(next.s[k], next.ahead[k], blocks()), ahead = next.ahead[k] + b_.n;
      if (__builtin_expect(found.amax[k] >= kInfinite, 0)) b_.plain->dynamic(one_row(now, k, 0, blocks()));
      else slow += code_row(now, k, ahead, found, stepping ? &constants : nullptr);
    }
    if (!stepping) --pause_;
    else if (5 * slow * kGroup > now.count * blocks()) pause_ = kPause;
  }

  // Row k of a group; returns how many groups of blocks had to be done again.
  REGAUGE_INLINE Int code_row(const Group& g, Int k, const Byte* ahead, const RowScales& found, const Constants<Dst>* stepping) {
    const float factor = found.factor[k];
    Int i = 0, slow = 0;
    if constexpr (!std::is_same_v<Dst, Int8>) {
      const std::uint32_t amax = found.amax[k], scale = bits_of(found.scale[k]);
      const int exponent = static_cast<int>(b_.scheme.pow2 ? scale >> 23 : amax >> 7);
      const bool own = b_.scheme.pow2 || scale != bits_of(b_.scheme.floor);
      if (stepping && own && exponent >= ScaleSteps<Dst>::kLeast) {
        const Steps<Dst>& table = tables_.of[b_.scheme.pow2 ? 128 : amax & 127u];
        Stepper<Dst, true> steps(*stepping, table, exponent - ScaleSteps<Dst>::kExponent);
        const Byte* s = g.s[k];
        for (; i + kGroup <= blocks(); i += kGroup) {
          if (__builtin_expect((step_group<kGroup, Stream, 2>(s + 64 * i, g.d[k] + 32 * i, ahead + 32 * i, steps)), 1))
            continue;
          rest_of_row(g, k, ahead, i, kGroup, factor);
          ++slow;
        }
      }
    }
    if (Blocks == 0 || std::is_same_v<Dst, Int8> || i == 0) rest_of_row(g, k, ahead, i, blocks() - i, factor);
    return slow;
  }

  // Blocks i .. i + count - 1 of row k.
  REGAUGE_INLINE void rest_of_row(const Group& g, Int k, const Byte* ahead, Int i, Int count, float factor) const {
    if (__builtin_expect(rule_ != Rule::kReciprocal, 0)) b_.plain->convert(one_row(g, k, i, count));
    else if constexpr (std::is_same_v<Dst, Int8>)
      bounded_blocks<Dst, Stream>(g.s[k] + 64 * i, g.d[k] + 32 * i, ahead + 32 * i, count, factor);
    else bounded_part(g, k, ahead, i, count, factor);
  }
  __attribute__((noinline)) void bounded_part(const Group& g, Int k, const Byte* ahead, Int i, Int count, float factor) const {
    bounded_blocks<Dst, Stream>(g.s[k] + 64 * i, g.d[k] + 32 * i, ahead + 32 * i, count, factor);
  }

  __attribute__((noinline)) RowBatch one_row(const Group& g, Int k, Int i, Int count) const {
    RowBatch part = b_;
    part.src = g.s[k] + 64 * i, part.dst = g.d[k] + 32 * i, part.dst_scale = g.scale[k], part.n = count * kBlock;
    part.outer = part.rows = 1, part.stream = Stream, part.ahead = nullptr;
    return part;
  }

  const RowBatch& b_;
  const Rule rule_;
  const Fetch fetch_;
  const ScaleSteps<Dst>& tables_;
  Byte& pause_;  // as in Steps, for the whole thread
};

template <class Dst, bool Stream>
void scale_batch(const RowBatch& b, Rule rule, Byte& pause) {
  if (b.n == 4 * kBlock) Scaler<Dst, Stream, 4>(b, rule, pause).scale_rows();
  else Scaler<Dst, Stream, 0>(b, rule, pause).scale_rows();
}

template <class Dst>
void rows_of(const RowBatch& b) {
  constexpr Int kLongest = 1024;  // elements: kRows such rows stay in the caches between the passes
  if (b.n % kBlock || b.n > kLongest || b.src_scale) {
    b.plain->dynamic(b);
    return;
  }
  // Dividing by a power of two is multiplying by another one, and loses nothing of a bfloat16 but what rounds to 0.
  const Rule rule = b.scheme.pow2 ? Rule::kReciprocal : b.scheme.rule;
  Byte own = 0;
  Byte& pause = b.memo ? b.memo->pause : own;
  if (whole_lines(b, b.n)) scale_batch<Dst, true>(b, rule, pause);
  else scale_batch<Dst, false>(b, rule, pause);
}

}  // namespace

DynamicRows dynamic_rows(Dtype src, Dtype dst) {
  if (src != Dtype::kBFloat16) return nullptr;
  switch (dst) {
    case Dtype::kE4M3: return rows_of<E4M3>;
    case Dtype::kE4M3Fnuz: return rows_of<E4M3Fnuz>;
    case Dtype::kE5M2: return rows_of<E5M2>;
    case Dtype::kInt8: return rows_of<Int8>;
    default: return nullptr;
  }
}

}  // namespace regauge::avx2
#endif
