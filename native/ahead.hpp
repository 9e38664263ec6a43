// Prefetch of the next tile. A kernel that writes in target order reads its source in jumps that the hardware does not
// foresee; but tiles are alike, so while one is converted the next one's source can be fetched, from front to back.
#pragma once

#include "boxes.hpp"

namespace regauge {

/// The source bytes of a tile as contiguous segments, relative to its base; the same for all tiles.
class SourceMap {
 public:
  SourceMap(const Boxes& b, std::int64_t row_bytes) : base_(b.base[kSrc]), tiles_(b.tiles), length_(row_bytes) {
    Boxes s = b;
    s.drop_ones();
    s.sort_by(kSrc);
    int axes = s.axes;
    while (axes > 0 && s.stride[kSrc][axes - 1] == 0) --axes;  // read again, not fetched again
    while (axes > 0 && s.stride[kSrc][axes - 1] == length_) length_ *= s.shape[--axes];
    count_ = 1;
    for (int j = 0; j < axes; ++j) count_ *= s.shape[j];
    if (!useful()) return;
    segments_.reserve(count_);
    for (std::int64_t i = 0; i < count_; ++i) {
      std::int64_t left = i, at = 0;
      for (int j = axes - 1; j >= 0; --j) at += left % s.shape[j] * s.stride[kSrc][j], left /= s.shape[j];
      segments_.push_back(at);
    }
  }

  /// Worth it, and fit for half of a second-level cache.
  bool useful() const {
    const std::int64_t bytes = count_ * length_;
    return tiles_ > 1 && count_ <= kMost && length_ >= 64 && bytes >= (4 << 10) && bytes <= (192 << 10);
  }

  /// Walks through the next tile's source in step with the work on the current one.
  class Cursor {
   public:
    explicit Cursor(const SourceMap& map) : map_(map) {}
    /// Where to fetch the next `bytes` from while tile `tile` is worked on; null when there is nothing to fetch or it does
    /// not lie in one piece.
    const std::uint8_t* advance(std::int64_t tile, std::int64_t bytes) {
      if (tile != tile_) tile_ = tile, segment_ = 0, offset_ = 0;
      if (tile + 1 >= map_.tiles_ || segment_ >= map_.count_ || bytes > map_.length_) return nullptr;
      const std::int64_t at = map_.base_[tile + 1] + map_.segments_[segment_] + offset_;
      offset_ += bytes;
      if (offset_ >= map_.length_) ++segment_, offset_ = 0;
      return reinterpret_cast<const std::uint8_t*>(at);
    }

   private:
    const SourceMap& map_;
    std::int64_t tile_ = -1, segment_ = 0, offset_ = 0;
  };

 private:
  static constexpr std::int64_t kMost = 256;
  const std::int64_t* base_;
  std::int64_t tiles_, length_, count_ = 0;
  std::vector<std::int64_t> segments_;
};

}  // namespace regauge
