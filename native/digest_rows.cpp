// x0 and x1 of rows: the portable kernels, and the choice between them and the vector ones.
#include <cstring>

#include "digest.hpp"

namespace regauge {
namespace {

using Byte = std::uint8_t;
using Int = std::int64_t;
using Word = std::uint32_t;
using Wide = std::uint64_t;

inline Word word_at(const Byte* p) {
  return static_cast<Word>(p[0]) | static_cast<Word>(p[1]) << 8 | static_cast<Word>(p[2]) << 16 |
         static_cast<Word>(p[3]) << 24;
}

inline Wide product(Word a, Word b, Word ka, Word kb) {
  return static_cast<Wide>(static_cast<Word>(a + ka)) * static_cast<Word>(b + kb);
}

// Four pairs of words.
inline void add_pairs(const Byte* s, const Word* k, Wide& x0, Wide& x1) {
  for (int i = 0; i < 4; ++i, s += 8, k += 2) {
    const Word a = word_at(s), b = word_at(s + 4);
    x0 += product(a, b, k[0], k[1]);
    x1 += product(a, b, k[2], k[3]);
  }
}

void rows_portable(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int bytes, const Byte*, const Word* words, Wide* out) {
  const bool writes = d != nullptr;
  for (; rows > 0; --rows, s += ss, d += ds, out += 2) {
    Wide x0 = 0, x1 = 0;
    Int at = 0;
    for (; at + 32 <= bytes; at += 32) add_pairs(s + at, words + at / 4, x0, x1);
    if (at < bytes) {
      Byte rest[32] = {};
      std::memcpy(rest, s + at, static_cast<std::size_t>(bytes - at));
      add_pairs(rest, words + at / 4, x0, x1);
    }
    if (writes) std::memcpy(d, s, static_cast<std::size_t>(bytes));
    out[0] = x0, out[1] = x1;
  }
}

// Rows of one pair of words or less (scales): the padding adds the same to every row.
void short_rows(const Byte* s, Int ss, Byte* d, Int ds, Int rows, Int bytes, const Byte*, const Word* words, Wide* out) {
  Wide pad0 = 0, pad1 = 0;
  for (int i = 2; i < 8; i += 2) {
    pad0 += product(0, 0, words[i], words[i + 1]);
    pad1 += product(0, 0, words[i + 2], words[i + 3]);
  }
  const bool writes = d != nullptr;
  for (; rows > 0; --rows, s += ss, d += ds, out += 2) {
    Byte pair[8] = {};
    if (bytes == 4) std::memcpy(pair, s, 4);
    else std::memcpy(pair, s, static_cast<std::size_t>(bytes));
    const Word a = word_at(pair), b = word_at(pair + 4);
    out[0] = pad0 + product(a, b, words[0], words[1]);
    out[1] = pad1 + product(a, b, words[2], words[3]);
    if (!writes) continue;
    if (bytes == 4) std::memcpy(d, pair, 4);
    else std::memcpy(d, pair, static_cast<std::size_t>(bytes));
  }
}

}  // namespace

DigestRows digest_rows_for(std::int64_t bytes, bool stream, bool avx2) {
  if (bytes <= 8) return short_rows;
#if defined(__x86_64__)
  if (avx2) return avx2::digest_rows_for(stream);
#else
  (void)stream, (void)avx2;
#endif
  return rows_portable;
}

}  // namespace regauge
