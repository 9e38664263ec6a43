// Boxes whose targets interleave: parts of one record, such as codes, their scales and what is copied beside them.
#pragma once

#include <vector>

#include "convert.hpp"

namespace regauge {

/// One copy or conversion among several.
struct Part {
  Boxes boxes;
  bool converts = false;
  Conversion conversion{};  // if converts
};

/// Run all parts, which have the same number of tiles and must not overlap, tile by tile, so that a record is complete
/// before the next one is begun. Where the parts fill what they span, records are built in the cache and streamed out.
void run_together(const std::vector<Part>& parts, const How& how);

}  // namespace regauge
