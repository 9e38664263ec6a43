// 8 bits to 8 bits through a table of all 256 codes: from one fp8 to another, to or from int8, from scale to scale.
#include "convert.hpp"

#if defined(__AVX2__)
#include "convert_avx2.hpp"
#include "scales.hpp"

namespace regauge::avx2 {
namespace {

using Int = std::int64_t;

// How the upper half of the table follows from the lower one: copied sign, sign where not zero, not at all.
enum class Half { kSigned, kSignedNotZero, kOwn };

struct Table {
  Byte code[256];
  Half half;
};
static_assert(sizeof(Table) <= Memo::kBytes);

// Entries of eight tables of sixteen, chosen by the low seven bits; `low`: x without its top bit.
REGAUGE_INLINE __m256i one_of_128(const __m256i t[8], __m256i low) {
  const __m256i bit4 = _mm256_slli_epi16(low, 3), bit5 = _mm256_slli_epi16(low, 2), bit6 = _mm256_slli_epi16(low, 1);
  __m256i a[4];
  for (int k = 0; k < 4; ++k)
    a[k] = _mm256_blendv_epi8(_mm256_shuffle_epi8(t[2 * k], low), _mm256_shuffle_epi8(t[2 * k + 1], low), bit4);
  return _mm256_blendv_epi8(_mm256_blendv_epi8(a[0], a[1], bit5), _mm256_blendv_epi8(a[2], a[3], bit5), bit6);
}

template <Half H>
struct Lookup {
  __m256i low[8], high[8];

  explicit Lookup(const Table& t) {
    for (int k = 0; k < 8; ++k) low[k] = both_lanes(t.code + 16 * k), high[k] = both_lanes(t.code + 128 + 16 * k);
  }
  REGAUGE_INLINE __m256i codes(__m256i x) const {
    const __m256i seven = _mm256_and_si256(x, bytes(0x7fu));
    const __m256i c = one_of_128(low, seven);
    if constexpr (H == Half::kOwn) return _mm256_blendv_epi8(c, one_of_128(high, seven), x);
    const __m256i sign = _mm256_and_si256(x, bytes(0x80u));
    if constexpr (H == Half::kSigned) return _mm256_xor_si256(c, sign);
    return _mm256_or_si256(c, _mm256_andnot_si256(_mm256_cmpeq_epi8(c, _mm256_setzero_si256()), sign));
  }
};

template <Half H, bool Stream>
void look_up_rows(const RowBatch& b, const Table& table) {
  const Lookup<H> lookup(table);
  const Fetch fetch(b, b.n);
  for (Int o = 0; o < b.outer; ++o)
    for (Int r = 0; r < b.rows; ++r) {
      const Byte *s = b.src + o * b.outer_stride[kSrc] + r * b.src_stride, *ahead = fetch.row(o, r);
      Byte* d = b.dst + o * b.outer_stride[kDst] + r * b.dst_stride;
      Int i = 0;
      for (; i + 64 <= b.n; i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T0);
        const __m256i x = lookup.codes(load_bytes(s + i)), y = lookup.codes(load_bytes(s + i + 32));
        put<Stream>(d + i, x), put<Stream>(d + i + 32, y);
      }
      for (; i < b.n; ++i) d[i] = table.code[s[i]];
    }
}

template <Half H>
void look_up(const RowBatch& b, const Table& table) {
  if (whole_lines(b, b.n)) look_up_rows<H, true>(b, table);
  else look_up_rows<H, false>(b, table);
}

// Of the scales of `b`.
void table_of(const RowBatch& b, Table& table) {
  alignas(32) Byte in[256];
  for (int i = 0; i < 256; ++i) in[i] = static_cast<Byte>(i);
  RowBatch part = b;
  part.src = in, part.dst = table.code, part.n = 256;
  part.outer = part.rows = 1, part.stream = false, part.ahead = nullptr;
  b.plain->convert(part);
  bool same = true, not_zero = true;
  for (int i = 0; i < 128; ++i) {
    const Byte lower = table.code[i], upper = table.code[128 + i];
    same = same && upper == (lower ^ 0x80u), not_zero = not_zero && upper == (lower ? lower | 0x80u : 0u);
  }
  table.half = same ? Half::kSigned : not_zero ? Half::kSignedNotZero : Half::kOwn;
}

void rows_of(const RowBatch& b) {
  constexpr Int kWorthATable = 2048;  // elements
  if (!one_scale(b)) {
    if (!split_by_scales(b, rows_of)) b.plain->convert(b);
    return;
  }
  Memo::Slot own;
  Memo::Slot& slot = slot_of(b, own);
  if (!slot.full && slot.seen < 2 && b.outer * b.rows * b.n < kWorthATable) {
    b.plain->convert(b);
    return;
  }
  Table table;
  if (slot.full) std::memcpy(&table, slot.data, sizeof table);
  else table_of(b, table), std::memcpy(slot.data, &table, sizeof table), slot.full = true;
  switch (table.half) {
    case Half::kSigned: look_up<Half::kSigned>(b, table); break;
    case Half::kSignedNotZero: look_up<Half::kSignedNotZero>(b, table); break;
    case Half::kOwn: look_up<Half::kOwn>(b, table); break;
  }
}

}  // namespace

ConvertRows byte_rows(Dtype src, Dtype dst) { return size_of(src) == 1 && size_of(dst) == 1 ? rows_of : nullptr; }

}  // namespace regauge::avx2
#endif
