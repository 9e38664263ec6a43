// The Python face: checks every argument, then works without the GIL. Addresses are trusted: the planner keeps bounds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "convert.hpp"
#include "digest.hpp"
#include "fluid_python.hpp"
#include "memcpy.hpp"
#include "together.hpp"

namespace nb = nanobind;
using namespace regauge;

namespace {

using Int = std::int64_t;
using Addresses = nb::ndarray<const Int, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = std::vector<Int>;

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

void set_operand(Boxes& b, Operand o, const Addresses& base, const Ints& stride, const char* name) {
  if (static_cast<Int>(base.shape(0)) != b.tiles)
    refuse(std::string(name) + " has " + std::to_string(base.shape(0)) + " addresses, src has " + std::to_string(b.tiles));
  if (static_cast<int>(stride.size()) != b.axes)
    refuse(std::string(name) + " has " + std::to_string(stride.size()) + " strides for " + std::to_string(b.axes) + " axes");
  b.base[o] = base.data();
  for (int j = 0; j < b.axes; ++j) b.stride[o][j] = stride[j];
}

Boxes boxes_of(const Addresses& src, const Addresses& dst, const Ints& shape, const Ints& src_stride, const Ints& dst_stride,
               Int run, int most_axes = 8) {
  if (static_cast<int>(shape.size()) > most_axes)
    refuse("shape has " + std::to_string(shape.size()) + " axes; at most " + std::to_string(most_axes) + " are supported");
  if (run < 0) refuse("run is negative: " + std::to_string(run));
  Boxes b;
  b.tiles = static_cast<Int>(src.shape(0));
  b.axes = static_cast<int>(shape.size());
  b.run = run;
  for (int j = 0; j < b.axes; ++j) {
    if (shape[j] < 0) refuse("shape[" + std::to_string(j) + "] is negative: " + std::to_string(shape[j]));
    b.shape[j] = shape[j];
  }
  set_operand(b, kSrc, src, src_stride, "src");
  set_operand(b, kDst, dst, dst_stride, "dst");
  return b;
}

How how_of(Int threads, Int total, const std::string& isa) {
  if (threads < 1) refuse("threads must be at least 1, not " + std::to_string(threads));
  if (isa != "auto" && isa != "avx2" && isa != "portable") refuse("isa must be auto, avx2 or portable, not " + isa);
  if (isa == "avx2" && !has_avx2()) refuse("isa avx2: this CPU lacks AVX2, FMA or F16C; use auto");
  return {threads, total, isa != "portable" && has_avx2()};
}

Dtype dtype_of(const std::string& name) {
  int index = 0;
  std::string known;
  for (const char* own : kDtypeNames) {
    if (name == own) return static_cast<Dtype>(index);
    known += std::string(index++ ? ", " : "") + own;
  }
  refuse("unknown dtype " + name + "; known: " + known);
}

Rule rule_of(const std::string& name) {
  if (name == "reciprocal") return Rule::kReciprocal;
  if (name == "divide") return Rule::kDivide;
  if (name == "divide_source") return Rule::kDivideSource;
  refuse("rule must be reciprocal, divide or divide_source, not " + name);
}

void check_dynamic(const Boxes& b, const Conversion& c) {
  if (c.row_axes < 0 || c.row_axes > b.axes) refuse("row_axes is " + std::to_string(c.row_axes) + ", out of range");
  for (int j = b.axes - c.row_axes; j < b.axes; ++j)
    if (b.stride[kSrcScale][j] != 0 || b.stride[kDstScale][j] != 0) refuse("a scale stride of a row axis is not 0");
  if (!c.dynamic) return;
  if (!takes_dynamic(c.dst)) refuse("dynamic scales need an 8-bit target");
  if (!b.base[kDstScale]) refuse("dynamic scales need dst_scale, where they are stored");
  if (!(c.scheme.floor >= 0x1p-126f && c.scheme.floor <= 0x1p127f)) refuse("floor must lie between 2**-126 and 2**127");
  if (c.scheme.dst_e8m0 && !c.scheme.pow2) refuse("computed e8m0 scales need pow2");
}

// A copy or a conversion, and the arrays that its addresses lie in.
struct HeldPart {
  Part part;
  std::vector<Addresses> held;
};

HeldPart convert_part(const Addresses& src, const Addresses& dst, const Ints& shape, const Ints& src_stride,
                      const Ints& dst_stride, Int run, const std::string& src_dtype, const std::string& dst_dtype, Int src_step,
                      Int dst_step, const std::string& rule, int row_axes, const std::optional<Addresses>& src_scale,
                      const Ints& src_scale_stride, const std::optional<Addresses>& dst_scale, const Ints& dst_scale_stride,
                      bool dynamic, double floor, bool pow2, bool src_e8m0, bool dst_e8m0) {
  const ScaleScheme scheme{rule_of(rule), pow2, src_e8m0, dst_e8m0, static_cast<float>(floor)};
  const Conversion c{dtype_of(src_dtype), dtype_of(dst_dtype), src_step, dst_step, scheme, dynamic, row_axes};
  HeldPart p{{boxes_of(src, dst, shape, src_stride, dst_stride, run), true, c}, {src, dst}};
  if (src_scale) set_operand(p.part.boxes, kSrcScale, *src_scale, src_scale_stride, "src_scale"), p.held.push_back(*src_scale);
  if (dst_scale) set_operand(p.part.boxes, kDstScale, *dst_scale, dst_scale_stride, "dst_scale"), p.held.push_back(*dst_scale);
  check_dynamic(p.part.boxes, c);
  return p;
}

HeldPart copy_part(const Addresses& src, const Addresses& dst, const Ints& shape, const Ints& src_stride, const Ints& dst_stride,
                   Int run) {
  return {{boxes_of(src, dst, shape, src_stride, dst_stride, run)}, {src, dst}};
}

void run_parts(const std::vector<const HeldPart*>& held, Int threads, Int total, const std::string& isa) {
  std::vector<Part> parts;
  for (const HeldPart* h : held) {
    if (!h) refuse("a part is None");
    parts.push_back(h->part);
    if (h->part.boxes.tiles != parts[0].boxes.tiles) refuse("parts have unequal numbers of tiles");
  }
  const How how = how_of(threads, total, isa);
  nb::gil_scoped_release release;
  if (!parts.empty()) run_together(parts, how);
}

using Words = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
/// Addresses and strides of a box's row keys, the same of its token keys, and the number of axes of a row.
using KeyOperands = std::tuple<Addresses, Ints, Addresses, Ints, int>;

std::uint64_t digest_tiles(const Addresses& src, const std::optional<Addresses>& dst, const Ints& shape, const Ints& src_stride,
                           const Ints& dst_stride, Int run, const KeyOperands& keys, const Words& words, Int threads, Int total,
                           const std::string& isa) {
  Boxes b = boxes_of(src, dst ? *dst : src, shape, src_stride, dst_stride, run, dst ? 8 : kMaxAxes);
  if (!dst) {
    b.base[kDst] = nullptr;
    for (auto& stride : b.stride[kDst]) stride = 0;
  }
  const auto& [row, row_stride, token, token_stride, row_axes] = keys;
  if (row_axes < 0 || row_axes > b.axes) refuse("keys: row_axes is " + std::to_string(row_axes) + ", out of range");
  set_operand(b, kRowKey, row, row_stride, "keys.row");
  set_operand(b, kTokenKey, token, token_stride, "keys.token");
  Int row_bytes = run;
  for (int j = b.axes - row_axes; j < b.axes; ++j) {
    if (row_stride[j] != 0 || token_stride[j] != 0) refuse("keys: a key's stride along an axis of its row is not 0");
    row_bytes *= b.shape[j];
  }
  if (row_bytes > kRowBytes)
    refuse("keys: a row of " + std::to_string(row_bytes) + " bytes; at most " + std::to_string(kRowBytes) + " are digested");
  const Int count = static_cast<Int>(words.shape(0));
  if (count < kWords) refuse("words has " + std::to_string(count) + " words, not " + std::to_string(kWords));
  const How how = how_of(threads, total, isa);
  const std::uint32_t* key = words.data();
  nb::gil_scoped_release release;
  return digest_boxes(b, row_axes, key, how);
}

void memcpy_bytes(Int dst, Int src, Int nbytes, Int threads, bool streaming) {
  if (nbytes < 0 || threads < 1) refuse("memcpy needs nbytes >= 0 and threads >= 1");
  nb::gil_scoped_release release;
  copy_bytes(reinterpret_cast<std::uint8_t*>(dst), reinterpret_cast<const std::uint8_t*>(src), nbytes, threads, streaming);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native kernels of regauge: copies and conversions of strided boxes of bytes.";
  nb::class_<HeldPart>(m, "Part");
  m.def("copy_part", &copy_part, nb::arg("src"), nb::arg("dst"), nb::arg("shape"), nb::arg("src_stride"), nb::arg("dst_stride"),
        nb::arg("run"));
  m.def("convert_part", &convert_part, nb::arg("src"), nb::arg("dst"), nb::arg("shape"), nb::arg("src_stride"),
        nb::arg("dst_stride"), nb::arg("run"), nb::arg("src_dtype"), nb::arg("dst_dtype"), nb::arg("src_step"),
        nb::arg("dst_step"), nb::arg("rule"), nb::arg("row_axes"), nb::arg("src_scale").none(), nb::arg("src_scale_stride"),
        nb::arg("dst_scale").none(), nb::arg("dst_scale_stride"), nb::arg("dynamic"), nb::arg("floor"), nb::arg("pow2"),
        nb::arg("src_e8m0"), nb::arg("dst_e8m0"));
  m.def("run_together", &run_parts, nb::arg("parts"), nb::arg("threads"), nb::arg("total"), nb::arg("isa"));
  m.def("digest_tiles", &digest_tiles, nb::arg("src"), nb::arg("dst").none(), nb::arg("shape"), nb::arg("src_stride"),
        nb::arg("dst_stride"), nb::arg("run"), nb::arg("keys"), nb::arg("words"), nb::arg("threads"), nb::arg("total"),
        nb::arg("isa"));
  m.def("memcpy", &memcpy_bytes, nb::arg("dst"), nb::arg("src"), nb::arg("nbytes"), nb::arg("threads"), nb::arg("streaming"));
  bind_fluid(m);
  m.def("isa", [] { return has_avx2() ? "avx2" : "portable"; });
}
