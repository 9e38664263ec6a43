// A network as a fluid: flows over ports share each port max-min fairly, rank by rank. What src/regauge/sim/reference.py says plainly,
// with work only for what a change touches. Times are seconds, sizes bytes, rates bytes per second.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace regauge {

class Fluid {
 public:
  int add_port(double rate);
  double set_port(int port, double rate, double now);
  int open(const std::vector<int>& ports, int rank);
  double add(int number, double size, bool over, double now);
  double produce(int number, double size, double seconds, bool over, double now);
  std::pair<double, double> close(int number, double now);
  double rerank(int number, int rank, double now);
  std::pair<std::vector<int>, double> due(double now);
  double next() const;
  double rate(int number) const { return flows_[number].rate; }
  double sent(int number, double now) const;
  double ready(int number, double now) const;
  double carried(int port, double now) const;
  double backlog(int port, double now) const;
  double used(int port) const { return ports_[port].used; }
  bool has_port(int port) const { return port >= 0 && port < static_cast<int>(ports_.size()); }
  bool has_flow(int number) const { return number >= 0 && number < static_cast<int>(flows_.size()) && flows_[number].live; }

 private:
  struct Port {
    double rate = 0, carried = 0, used = 0;
    std::vector<int> over;  // flows that have bytes, or become some
    int mark = 0;           // the solve that it was last part of
    int within = 0;         // flows of it that are part of the solve
    double left = 0;
    int rising = 0;  // flows whose share is not fixed yet
  };
  struct Flow {
    std::vector<int> ports;
    std::vector<std::pair<double, double>> making;  // end, bytes per second
    std::uint64_t order = 0;                        // of opening
    double rest = 0, given = 0, sent = 0, counted = 0, made = 0, rate = 0, at = 0, when = 0, share = 0;
    int rank = 0, mark = 0, place = -1;  // place in the heap
    bool live = false, over = false, waits = false, going = false, fixed = false;
  };

  void advance(Flow& flow, double now);
  void put(int number);
  void take(int number);
  static void sum_made(Flow& flow) {
    flow.made = 0;
    for (const auto& part : flow.making) flow.made += part.second;
  }
  static bool end_production(Flow& flow, double now);
  void changed(int number);
  double settle(double now);
  void include(int number);
  void spread(bool after);
  void fill();
  void fill_rank(int rank);
  void fix(int number, double share);
  void commit(double now);
  void plan_event(int number, double now);
  bool full(const Port& port, double used) const;
  void free_flow(int number);

  void heap_set(int number, double when);
  bool before(int a, int b) const {
    const Flow &x = flows_[a], &y = flows_[b];
    return x.when != y.when ? x.when < y.when : x.order < y.order;
  }
  void sift(int place);

  std::vector<Port> ports_;
  std::vector<Flow> flows_;
  std::vector<int> free_, heap_;
  std::vector<int> set_, touched_, left_, wanting_, ranks_;  // of the solve; left_: ports that a flow has left
  std::uint64_t opened_ = 0;
  int epoch_ = 0;
};

}  // namespace regauge
