// Conversion by way of dense blocks in the cache.
#pragma once

#include "convert.hpp"

namespace regauge {

/// Convert `b` by way of dense blocks if its rows lie apart or in short pieces; false, and nothing done, if they do not.
bool convert_staged(const Boxes& b, const Conversion& c, const How& how);

/// Convert `b` without that.
void convert_rows_of(Boxes b, Conversion c, const How& how);

}  // namespace regauge
