// The Python face of the fluid network: checks numbers, then works.
#include "fluid_python.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <string>

#include "fluid.hpp"

namespace nb = nanobind;

namespace regauge {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

void check_port(const Fluid& fluid, int port) {
  if (!fluid.has_port(port)) refuse("there is no port " + std::to_string(port));
}

void check_flow(const Fluid& fluid, int flow) {
  if (!fluid.has_flow(flow)) refuse("there is no flow " + std::to_string(flow));
}

void check_amount(double value, const char* what) {
  if (!(std::isfinite(value) && value >= 0)) refuse(std::string(what) + " is not a finite number of 0 or more");
}

void check_time(double now) {
  if (std::isnan(now)) refuse("now is not a number");
}

}  // namespace

void bind_fluid(nb::module_& m) {
  nb::class_<Fluid>(m, "Fluid")
      .def(nb::init<>())
      .def("add_port", [](Fluid& f, double rate) { return check_amount(rate, "rate"), f.add_port(rate); }, nb::arg("rate"))
      .def("set_port",
           [](Fluid& f, int port, double rate, double now) {
             return check_port(f, port), check_amount(rate, "rate"), check_time(now), f.set_port(port, rate, now);
           },
           nb::arg("port"), nb::arg("rate"), nb::arg("now"))
      .def("open",
           [](Fluid& f, const std::vector<int>& ports, int rank) {
             if (ports.empty()) refuse("a flow crosses at least one port");
             for (std::size_t i = 0; i < ports.size(); ++i) {
               check_port(f, ports[i]);
               for (std::size_t j = 0; j < i; ++j)
                 if (ports[i] == ports[j]) refuse("a flow crosses port " + std::to_string(ports[i]) + " twice");
             }
             return f.open(ports, rank);
           },
           nb::arg("ports"), nb::arg("rank"))
      .def("add",
           [](Fluid& f, int flow, double size, bool over, double now) {
             return check_flow(f, flow), check_amount(size, "size"), check_time(now), f.add(flow, size, over, now);
           },
           nb::arg("flow"), nb::arg("size"), nb::arg("over"), nb::arg("now"))
      .def("produce",
           [](Fluid& f, int flow, double size, double seconds, bool over, double now) {
             check_flow(f, flow), check_amount(size, "size"), check_amount(seconds, "seconds"), check_time(now);
             return f.produce(flow, size, seconds, over, now);
           },
           nb::arg("flow"), nb::arg("size"), nb::arg("seconds"), nb::arg("over"), nb::arg("now"))
      .def("close", [](Fluid& f, int flow, double now) { return check_flow(f, flow), check_time(now), f.close(flow, now); },
           nb::arg("flow"), nb::arg("now"))
      .def("rerank",
           [](Fluid& f, int flow, int rank, double now) { return check_flow(f, flow), check_time(now), f.rerank(flow, rank, now); },
           nb::arg("flow"), nb::arg("rank"), nb::arg("now"))
      .def("due", [](Fluid& f, double now) { return check_time(now), f.due(now); }, nb::arg("now"))
      .def("next", &Fluid::next)
      .def("rate", [](const Fluid& f, int flow) { return check_flow(f, flow), f.rate(flow); }, nb::arg("flow"))
      .def("sent", [](const Fluid& f, int flow, double now) { return check_flow(f, flow), f.sent(flow, now); }, nb::arg("flow"),
           nb::arg("now"))
      .def("ready", [](const Fluid& f, int flow, double now) { return check_flow(f, flow), f.ready(flow, now); }, nb::arg("flow"),
           nb::arg("now"))
      .def("carried", [](const Fluid& f, int port, double now) { return check_port(f, port), f.carried(port, now); },
           nb::arg("port"), nb::arg("now"))
      .def("backlog", [](const Fluid& f, int port, double now) { return check_port(f, port), f.backlog(port, now); },
           nb::arg("port"), nb::arg("now"))
      .def("used", [](const Fluid& f, int port) { return check_port(f, port), f.used(port); }, nb::arg("port"));
}

}  // namespace regauge
