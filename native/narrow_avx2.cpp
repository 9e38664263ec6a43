// bfloat16 to fp8, what prefill sends most: by steps where rows share a scale, and in three passes where every row's scale
// is computed. Whatever these two cannot do goes to the kernels of convert_avx2.cpp.
//
// Steps. With one positive factor g * 2^k, 1 <= g < 2, a code depends on the 7 fraction bits of its source, and an
// exponent more adds 2^M to it (M: fraction bits of the target). Neighbouring codes lie at least 16 / g > 8 fractions
// apart, so that each of sixteen buckets of 8 fractions holds at most one step: a byte shuffle finds the bucket's first code,
// another one the fraction after which the next code begins. 32 elements are 32 bytes of one register all the way.
#include "convert.hpp"

#if defined(__AVX2__)
#include "convert_avx2.hpp"

namespace regauge::avx2 {
namespace {

using Int = std::int64_t;
constexpr Int kBlock = 32, kGroup = 4;  // elements; blocks whose codes are checked together before they are stored
constexpr std::uint8_t kPause = 15;       // chunks done without steps after one in which they failed too often

template <class Dst>
struct Grid;
template <>
struct Grid<E4M3> {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr std::uint32_t kLargest = 0x7e;  // code
};
template <>
struct Grid<E5M2> {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr std::uint32_t kLargest = 0x7b;
};

// Exponents count from `base`: up to kZero they are so small that the code is 0; up to kNormal codes may be subnormal, whose
// steps differ; from there on codes are normal, until they saturate.
template <class Dst>
struct Steps {
  static constexpr int kMantissa = Grid<Dst>::kMantissa;
  static constexpr std::uint32_t kZero = 2, kNormal = kZero + kMantissa + 2, kSaturated = kNormal + (1u << (7 - kMantissa));
  std::uint8_t first[16];  // of every bucket: its first code, less the code of 1.0
  std::int8_t last[16];    // the last fraction that has this code
  std::uint8_t base;
  bool usable;
  std::uint8_t pause;  // chunks to go before the steps are tried again

  /// For the scales of `b`, whose product is `factor`; `plain` makes the codes.
  static Steps make(const RowBatch& b, float factor, ConvertRows plain) {
    Steps t{};
    const int k = static_cast<int>(bits_of(factor) >> 23) - 127;  // a sign makes it too large
    if (k < -100 || k > 100) return t;
    alignas(32) std::uint16_t in[128];
    alignas(32) Byte codes[128];
    for (int m = 0; m < 128; ++m) in[m] = static_cast<std::uint16_t>((127 - k) << 7 | m);  // products of 1.0 .. 4.0
    RowBatch part = b;
    part.src = reinterpret_cast<const Byte*>(in), part.dst = codes;
    part.outer = part.rows = 1, part.n = 128, part.stream = false, part.ahead = nullptr;
    plain(part);
    for (int i = 0; i < 16; ++i) {
      const Byte* c = codes + 8 * i;
      if (c[7] - c[0] > 1) return t;
      int same = 1;
      while (same < 8 && c[same] == c[0]) ++same;
      t.first[i] = static_cast<std::uint8_t>(c[0] - (Grid<Dst>::kBias << kMantissa));
      t.last[i] = static_cast<std::int8_t>(8 * i + same - 1);
    }
    t.base = static_cast<std::uint8_t>(127 - k - Grid<Dst>::kBias - static_cast<int>(kNormal));
    t.usable = true;
    return t;
  }
};

REGAUGE_INLINE __m256i both_lanes(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

// Hide where a constant comes from: else the compiler makes it anew for every row, from general registers.
REGAUGE_INLINE __m256i kept(__m256i v) {
  __asm__("" : "+x"(v));
  return v;
}

template <class Dst>
struct Constants {
  using S = Steps<Dst>;
  static constexpr std::uint32_t kZeroEnd = (S::kZero + 1) << S::kMantissa, kOffset = S::kNormal << S::kMantissa;
  __m256i split = kept(both_lanes("\x00\x02\x04\x06\x08\x0a\x0c\x0e\x01\x03\x05\x07\x09\x0b\x0d\x0f"));
  __m256i bucket = kept(bytes(0x0fu)), fraction = kept(bytes(0x7fu)), sign = kept(bytes(0x80u));
  __m256i zero_end = kept(bytes(kZeroEnd)), offset = kept(bytes(kOffset));
  __m256i doubtful = kept(bytes(kOffset + (1u << S::kMantissa) - 1u - kZeroEnd));
  __m256i saturated = kept(bytes(S::kSaturated)), largest = kept(bytes(Grid<Dst>::kLargest));
};

// The steps in registers, and what says whether they were right. Bounded: no element is NaN or saturates.
template <class Dst, bool Bounded>
struct Stepper {
  const Constants<Dst>& k;
  __m256i first, last, base;
  __m256i lowest, highest;  // code + kOffset - kZeroEnd, modulo 256; exponent

  REGAUGE_INLINE Stepper(const Constants<Dst>& constants, const Steps<Dst>& t, int raise = 0)
      : k(constants), first(both_lanes(t.first)), last(both_lanes(t.last)),
        base(bytes(static_cast<std::uint32_t>(t.base + raise))) {
    restart();
  }
  REGAUGE_INLINE void restart() { lowest = _mm256_set1_epi8(-1), highest = _mm256_setzero_si256(); }
  /// False if an element since the last restart may be subnormal in the target, or is NaN or infinite.
  REGAUGE_INLINE bool right() const {
    __m256i bad = _mm256_cmpeq_epi8(_mm256_min_epu8(lowest, k.doubtful), lowest);
    if constexpr (!Bounded) bad = _mm256_or_si256(bad, _mm256_cmpeq_epi8(highest, _mm256_set1_epi8(-1)));
    return _mm256_testz_si256(bad, bad);
  }

  /// The codes of 32 elements.
  REGAUGE_INLINE __m256i codes(const Byte* s) {
    const __m256i x = _mm256_shuffle_epi8(load_bytes(s), k.split), y = _mm256_shuffle_epi8(load_bytes(s + 32), k.split);
    const __m256i low = _mm256_unpacklo_epi64(x, y), high = _mm256_unpackhi_epi64(x, y);
    const __m256i odd = _mm256_cmpgt_epi8(_mm256_setzero_si256(), low);
    const __m256i exponent = _mm256_sub_epi8(_mm256_add_epi8(high, high), odd);
    const __m256i bucket = _mm256_and_si256(_mm256_srli_epi16(low, 3), k.bucket);
    const __m256i next = _mm256_cmpgt_epi8(_mm256_and_si256(low, k.fraction), _mm256_shuffle_epi8(last, bucket));
    const __m256i step = _mm256_sub_epi8(_mm256_shuffle_epi8(first, bucket), next);
    __m256i e = _mm256_subs_epu8(exponent, base);
    if constexpr (!Bounded) {
      highest = _mm256_max_epu8(highest, exponent);
      e = _mm256_min_epu8(e, k.saturated);
    }
    __m256i c = _mm256_add_epi8(_mm256_slli_epi16(e, Grid<Dst>::kMantissa), step);
    lowest = _mm256_min_epu8(lowest, _mm256_sub_epi8(c, k.zero_end));
    c = _mm256_subs_epu8(c, k.offset);
    if constexpr (!Bounded) c = _mm256_min_epu8(c, k.largest);
    return _mm256_permute4x64_epi64(_mm256_or_si256(c, _mm256_and_si256(high, k.sign)), 0xd8);
  }
};

// A part of one row by the plain kernel; all rows share their scales.
__attribute__((noinline)) void plain_part(const RowBatch& b, const Byte* s, Byte* d, Int count, ConvertRows plain) {
  RowBatch part = b;
  part.src = s, part.dst = d;
  part.outer = part.rows = 1, part.n = count, part.stream = b.stream && count % 64 == 0, part.ahead = nullptr;
  plain(part);
}

// Blocks blocks, stored unless one of them needs the plain kernel: a line that was streamed is dear to write again.
template <int Blocks, bool Stream, class Steps>
REGAUGE_INLINE bool step_group(const Byte* s, Byte* d, const Byte* ahead, Steps& steps) {
  __m256i c[Blocks];
#pragma GCC unroll 4
  for (int k = 0; k < Blocks; ++k) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead + 64 * k), _MM_HINT_T0);
    c[k] = steps.codes(s + 64 * k);
  }
  const bool right = steps.right();
  steps.restart();
  if (__builtin_expect(!right, 0)) return false;
#pragma GCC unroll 4
  for (int k = 0; k < Blocks; ++k) put<Stream>(d + 32 * k, c[k]);
  return true;
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

// Largest magnitude of `blocks` blocks, as bfloat16 bits, which order as integers.
REGAUGE_INLINE std::uint16_t largest(const Byte* s, Int blocks) {
  __m256i a = _mm256_setzero_si256(), b = a;
  for (; blocks > 0; --blocks, s += 2 * kBlock) {
    a = _mm256_max_epu16(a, _mm256_and_si256(load_bytes(s), halves(0x7fffu)));
    b = _mm256_max_epu16(b, _mm256_and_si256(load_bytes(s + 32), halves(0x7fffu)));
  }
  a = _mm256_max_epu16(a, b);
  const __m128i m = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  // minpos finds the smallest of eight words: look for it among the complements.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1)));
  return static_cast<std::uint16_t>(~_mm_cvtsi128_si32(least));
}

// The scales of kRows rows and their reciprocals (`dynamic_scale`, eight at a time).
template <class Dst>
REGAUGE_INLINE void scales_of(const std::uint16_t* most, float* scale, float* factor) {
  for (Int r = 0; r < kRows; r += 8) {
    const __m128i m = _mm_load_si128(reinterpret_cast<const __m128i*>(most + r));
    const __m256i amax = _mm256_min_epu32(_mm256_slli_epi32(_mm256_cvtepu16_epi32(m), 16), words(kMaxFinite));
    __m256 s = _mm256_div_ps(_mm256_castsi256_ps(amax), floats(Dst::kMax));
    s = _mm256_max_ps(s, floats(kMinNormal));
    _mm256_store_ps(scale + r, s);
    _mm256_store_ps(factor + r, _mm256_div_ps(_mm256_set1_ps(1.0f), s));
  }
}

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
  static constexpr int kExponent = 127, kLeast = 40;  // of amax: that of the tables; below this one scales get too small
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

// Up to kRows rows. `pause`: as in Steps, for the whole thread.
template <class Dst, bool Stream>
void scale_rows(const RowBatch& b, const ScaleSteps<Dst>& tables, Byte& pause, DynamicRows plain) {
  constexpr std::uint32_t kInfinite = kInf >> 16, kLeast = ScaleSteps<Dst>::kLeast << 7;
  alignas(32) std::uint16_t most[kRows] = {};
  alignas(32) float scale[kRows], factor[kRows];
  const Fetch fetch(b, 2 * b.n);
  const Int blocks = b.n / kBlock;
  for (Int r = 0; r < b.rows; ++r) most[r] = largest(b.src + r * b.src_stride, blocks);
  scales_of<Dst>(most, scale, factor);
  for (Int r = 0; r < b.rows; ++r) std::memcpy(b.dst_scale + r * b.dst_scale_stride, scale + r, 4);
  const Constants<Dst> constants;
  const bool stepping = pause == 0;
  Int slow = 0;
  const Byte *s = b.src, *ahead = fetch.at;
  Byte* d = b.dst;
  for (Int r = 0; r < b.rows; ++r, s += b.src_stride, d += b.dst_stride, ahead += fetch.stride) {
    const std::uint32_t amax = most[r];
    if (__builtin_expect(amax >= kInfinite, 0)) plain(some_rows(b, r, 1));
    else if (stepping && amax >= kLeast)
      slow += scaled_steps<Dst, Stream>(s, d, ahead, blocks, amax, factor[r], tables, constants);
    else bounded_row<Dst, Stream>(s, d, ahead, blocks, factor[r]);
  }
  if (!stepping) --pause;
  else if (5 * slow * kGroup > b.rows * blocks) pause = kPause;
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
      if (lines) scale_rows<Dst, true>(some_rows(inner, r, kRows), tables, pause, plain.dynamic);
      else scale_rows<Dst, false>(some_rows(inner, r, kRows), tables, pause, plain.dynamic);
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
