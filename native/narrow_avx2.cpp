// bfloat16 to fp8, what prefill sends most: by steps (steps_avx2.hpp) where rows share a scale, and in three passes
// where every row's scale is computed. Whatever these two cannot do goes to the kernels of convert_avx2.cpp.
#include "convert.hpp"

#if defined(__AVX2__)
#include "steps_avx2.hpp"

namespace regauge::avx2 {
namespace {

constexpr Int kBlock = 32, kGroup = 4;  // elements; blocks whose codes are checked together before they are stored
constexpr std::uint8_t kPause = 15;     // chunks done without steps after one in which they failed too often

// A part of one row by the plain kernel; all rows share their scales.
__attribute__((noinline)) void plain_part(const RowBatch& b, const Byte* s, Byte* d, Int count, ConvertRows plain) {
  RowBatch part = b;
  part.src = s, part.dst = d;
  part.outer = part.rows = 1, part.n = count, part.stream = b.stream && count % 64 == 0, part.ahead = nullptr;
  plain(part);
}

// One row; returns how many elements the plain kernel had to do.
template <class Dst, bool Stream>
REGAUGE_INLINE Int step_row(const Byte* s, Byte* d, const Byte* ahead, Stepper<Dst, false>& steps, const RowBatch& b,
                            ConvertRows plain) {
  constexpr Int kWide = kGroup * kBlock, kLine = 2 * kBlock;
  Int i = 0, slow = 0;
  for (; i + kWide <= b.n; i += kWide) {
    if (step_group<kGroup, Stream>(s + 2 * i, d + i, ahead + 2 * i, steps)) continue;
    plain_part(b, s + 2 * i, d + i, kWide, plain);
    slow += kWide;
  }
  if (__builtin_expect(i == b.n, 1)) return slow;
  for (; i + kLine <= b.n; i += kLine) {
    if (step_group<2, Stream>(s + 2 * i, d + i, ahead + 2 * i, steps)) continue;
    plain_part(b, s + 2 * i, d + i, kLine, plain);
    slow += kLine;
  }
  if (i < b.n) plain_part(b, s + 2 * i, d + i, b.n - i, plain);
  return slow;
}

template <class Dst, bool Stream>
Int step_rows(const RowBatch& b, const Steps<Dst>& table, ConvertRows plain) {
  const Constants<Dst> constants;
  Stepper<Dst, false> steps(constants, table);
  const Fetch fetch(b, 2 * b.n);
  Int slow = 0;
  for (Int o = 0; o < b.outer; ++o) {
    const Byte *s = b.src + o * b.outer_stride[kSrc], *ahead = fetch.row(o, 0);
    Byte* d = b.dst + o * b.outer_stride[kDst];
    for (Int r = b.rows; r > 0; --r, s += b.src_stride, d += b.dst_stride, ahead += fetch.stride)
      slow += step_row<Dst, Stream>(s, d, ahead, steps, b, plain);
  }
  return slow;
}

inline RowBatch some_rows(const RowBatch& b, Int first, Int most) {
  RowBatch part = b;
  part.src += first * b.src_stride, part.dst += first * b.dst_stride;
  if (b.src_scale) part.src_scale += first * b.src_scale_stride;
  if (b.dst_scale) part.dst_scale += first * b.dst_scale_stride;
  if (b.ahead) part.ahead += first * b.n * b.src_size;
  part.rows = b.rows - first < most ? b.rows - first : most;
  return part;
}

inline bool whole_lines(const RowBatch& b) {
  const Int steps = b.dst_stride | b.outer_stride[kDst] | b.n;
  return b.stream && ((reinterpret_cast<std::intptr_t>(b.dst) | steps) & 63) == 0;
}

// Where many codes are subnormal the steps only cost time: leave them alone for some chunks, then look again.
template <class Dst>
void step_chunk(const RowBatch& b, bool lines, Steps<Dst>& table, ConvertRows plain) {
  if (table.pause > 0) {
    --table.pause;
    plain(b);
    return;
  }
  const Int slow = lines ? step_rows<Dst, true>(b, table, plain) : step_rows<Dst, false>(b, table, plain);
  if (5 * slow > b.outer * b.rows * b.n) table.pause = kPause;
}

template <class Dst>
void step_batch(const RowBatch& b, Steps<Dst>& table, ConvertRows plain) {
  constexpr Int kChunk = 32 << 10;  // elements
  const bool lines = whole_lines(b);
  if (b.outer * b.rows * b.n <= kChunk) {
    step_chunk(b, lines, table, plain);
    return;
  }
  const Int rows = b.n < kChunk ? kChunk / b.n : 1;
  for (Int o = 0; o < b.outer; ++o) {
    const RowBatch inner = inner_batch(b, o);
    for (Int r = 0; r < b.rows; r += rows) step_chunk(some_rows(inner, r, rows), lines, table, plain);
  }
}

template <class Dst>
void narrow_rows(const RowBatch& b, ConvertRows plain) {
  constexpr Int kWorthATable = 4096;  // elements
  const bool both = b.src_scale && b.dst_scale;
  if (!one_scale(b) || both || (b.divide && b.dst_scale) || b.n < 2 * kBlock) {
    plain(b);
    return;
  }
  float factor = 1.0f;
  if (b.src_scale) std::memcpy(&factor, b.src_scale, 4);
  if (b.dst_scale) std::memcpy(&factor, b.dst_scale, 4), factor = 1.0f / factor;
  Memo own;
  Memo& memo = b.memo ? *b.memo : own;
  static_assert(sizeof(Steps<Dst>) <= sizeof memo.data);
  Steps<Dst> table;
  if (memo.full && memo.key[0] == bits_of(factor)) {
    std::memcpy(&table, memo.data, sizeof table);
  } else {
    const bool again = b.memo && memo.key[0] == bits_of(factor) && memo.key[1] == 1;
    memo.full = false, memo.key[0] = bits_of(factor), memo.key[1] = 1;
    if (!again && b.outer * b.rows * b.n < kWorthATable) {
      plain(b);
      return;
    }
    table = Steps<Dst>::make(b, factor, plain);
    memo.full = true;
  }
  if (table.usable) step_batch(b, table, plain);
  else plain(b);
  std::memcpy(memo.data, &table, sizeof table);
}

// ---- computed scales

constexpr Int kRows = 16;

// Largest magnitudes of `blocks` blocks, as bfloat16 bits, which order as integers: the row's is the largest of the
// eight.
REGAUGE_INLINE __m128i largest(const Byte* s, Int blocks) {
  const __m256i magnitude = halves(0x7fffu);
  __m256i a = _mm256_setzero_si256(), b = a;
  const auto take = [&](const Byte* p) {
    a = _mm256_max_epu16(a, _mm256_and_si256(load_bytes(p), magnitude));
    b = _mm256_max_epu16(b, _mm256_and_si256(load_bytes(p + 32), magnitude));
  };
  for (; blocks >= 4; blocks -= 4, s += 256) take(s), take(s + 64), take(s + 128), take(s + 192);
  for (; blocks > 0; --blocks, s += 64) take(s);
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

  REGAUGE_INLINE RowScales(const __m128i* most, float most_code) {
    for (Int r = 0; r < kRows; r += 8) {
      const __m128i m = largest_of_each(most + r);
      _mm_store_si128(reinterpret_cast<__m128i*>(amax + r), m);
      const __m256i a = _mm256_min_epu32(_mm256_slli_epi32(_mm256_cvtepu16_epi32(m), 16), words(kMaxFinite));
      const __m256 whole = _mm256_div_ps(_mm256_castsi256_ps(a), _mm256_set1_ps(most_code));
      const __m256 s = _mm256_max_ps(whole, floats(kMinNormal));
      _mm256_store_ps(scale + r, s);
      _mm256_store_ps(factor + r, _mm256_div_ps(_mm256_set1_ps(1.0f), s));
    }
  }
};

// A row of finite numbers with its own scale: no code can saturate.
template <class Dst, bool Stream>
__attribute__((noinline)) void bounded_row(const Byte* s, Byte* d, const Byte* ahead, Int blocks, float scale) {
  using Code = EncoderOf<Dst>;
  const __m256 factor = _mm256_set1_ps(scale);
  for (; blocks > 0; --blocks, s += 2 * kBlock, d += kBlock, ahead += 2 * kBlock) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
    __m256 v[4];
    Vector<BFloat16>::load_absolute(s, v);
    __m256i q[4];
    for (int k = 0; k < 4; ++k) q[k] = Code::template scaled_codes<true, false>(_mm256_mul_ps(v[k], factor));
    Code::template store<Stream, true>(d, q, _mm256_packs_epi16(load_bytes(s), load_bytes(s + 32)));
  }
}

// A computed scale is amax / MAX, and amax is a bfloat16: up to a power of two there are 128 scales.
template <class Dst>
struct ScaleSteps {
  static constexpr int kExponent = 127, kLeast = 40;  // of amax: that of the tables; the least they are used for
  Steps<Dst> of[128];

  explicit ScaleSteps(ConvertRows plain) {
    for (std::uint32_t m = 0; m < 128; ++m) {
      float s = float_of(static_cast<std::uint32_t>(kExponent) << 23 | m << 16) / float_of(Dst::kMax);
      RowBatch b{};
      b.dst_scale = reinterpret_cast<Byte*>(&s), b.src_size = 2;
      of[m] = Steps<Dst>::make(b, 1.0f / s, plain);
    }
  }
};

// A row by its steps; returns how many of its groups had to be done again.
template <class Dst, bool Stream>
REGAUGE_INLINE Int scaled_steps(const Byte* s, Byte* d, const Byte* ahead, Int blocks, std::uint32_t amax, float factor,
                                const ScaleSteps<Dst>& tables, const Constants<Dst>& constants) {
  const int raise = static_cast<int>(amax >> 7) - ScaleSteps<Dst>::kExponent;
  Stepper<Dst, true> steps(constants, tables.of[amax & 127u], raise);
  Int slow = 0;
  for (; blocks >= kGroup; blocks -= kGroup, s += 64 * kGroup, d += 32 * kGroup, ahead += 64 * kGroup) {
    if (__builtin_expect(step_group<kGroup, Stream>(s, d, ahead, steps), 1)) continue;
    bounded_row<Dst, Stream>(s, d, ahead, kGroup, factor);
    ++slow;
  }
  if (blocks > 0) bounded_row<Dst, Stream>(s, d, ahead, blocks, factor);
  return slow;
}

// Rows first .. first + count - 1 of one outer index, at most kRows. `pause`: as in Steps, for the whole thread.
template <class Dst, bool Stream>
void scale_rows(const RowBatch& b, Int first, Int count, const ScaleSteps<Dst>& tables, Byte& pause,
                DynamicRows plain) {
  constexpr std::uint32_t kInfinite = kInf >> 16, kLeast = ScaleSteps<Dst>::kLeast << 7;
  const Fetch fetch(b, 2 * b.n);
  const Int blocks = b.n / kBlock;
  const Byte *s = b.src + first * b.src_stride, *ahead = fetch.row(0, first);
  Byte *d = b.dst + first * b.dst_stride, *scales = b.dst_scale + first * b.dst_scale_stride;
  __m128i most[kRows];
  for (Int r = 0; r < count; ++r) most[r] = largest(s + r * b.src_stride, blocks);
  for (Int r = count; r < kRows; ++r) most[r] = _mm_setzero_si128();
  const RowScales found(most, float_of(Dst::kMax));
  for (Int r = 0; r < count; ++r) std::memcpy(scales + r * b.dst_scale_stride, found.scale + r, 4);
  const Constants<Dst> constants;
  const bool stepping = pause == 0;
  Int slow = 0;
  for (Int r = 0; r < count; ++r, s += b.src_stride, d += b.dst_stride, ahead += fetch.stride) {
    const std::uint32_t amax = found.amax[r];
    if (__builtin_expect(amax >= kInfinite, 0)) plain(some_rows(b, first + r, 1));
    else if (stepping && amax >= kLeast)
      slow += scaled_steps<Dst, Stream>(s, d, ahead, blocks, amax, found.factor[r], tables, constants);
    else bounded_row<Dst, Stream>(s, d, ahead, blocks, found.factor[r]);
  }
  if (!stepping) --pause;
  else if (5 * slow * kGroup > count * blocks) pause = kPause;
}

template <class Dst>
void scale_batch(const RowBatch& b, const Kernels& plain) {
  constexpr Int kLongest = 1024;  // elements: kRows such rows stay in the caches between the passes
  if (b.n % kBlock || b.n > kLongest || b.divide || b.src_scale) {
    plain.dynamic(b);
    return;
  }
  static const ScaleSteps<Dst> tables(plain.convert);
  Memo own{};
  Byte& pause = (b.memo ? b.memo : &own)->data[0];
  const bool lines = whole_lines(b);
  for (Int o = 0; o < b.outer; ++o) {
    const RowBatch inner = inner_batch(b, o);
    for (Int r = 0; r < b.rows; r += kRows) {
      const Int count = b.rows - r < kRows ? b.rows - r : kRows;
      if (lines) scale_rows<Dst, true>(inner, r, count, tables, pause, plain.dynamic);
      else scale_rows<Dst, false>(inner, r, count, tables, pause, plain.dynamic);
    }
  }
}

void e4m3_rows(const RowBatch& b) { narrow_rows<E4M3>(b, kernels(Dtype::kBFloat16, Dtype::kE4M3).convert); }
void e5m2_rows(const RowBatch& b) { narrow_rows<E5M2>(b, kernels(Dtype::kBFloat16, Dtype::kE5M2).convert); }
void e4m3_scales(const RowBatch& b) { scale_batch<E4M3>(b, kernels(Dtype::kBFloat16, Dtype::kE4M3)); }
void e5m2_scales(const RowBatch& b) { scale_batch<E5M2>(b, kernels(Dtype::kBFloat16, Dtype::kE5M2)); }

}  // namespace

Kernels narrow_kernels(Dtype src, Dtype dst) {
  Kernels k = kernels(src, dst);
  if (src != Dtype::kBFloat16) return k;
  if (dst == Dtype::kE4M3) k.convert = e4m3_rows, k.dynamic = e4m3_scales;
  if (dst == Dtype::kE5M2) k.convert = e5m2_rows, k.dynamic = e5m2_scales;
  return k;
}

}  // namespace regauge::avx2
#endif
