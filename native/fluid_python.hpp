// Adds the class Fluid to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace regauge {

void bind_fluid(nanobind::module_& m);

}  // namespace regauge
