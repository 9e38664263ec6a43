#include "fluid.hpp"

#include <algorithm>
#include <limits>

namespace regauge {

namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kClose = 1e-12;     // as in reference.py: a share that misses what is produced by less is enough
constexpr double kSame = 1 + 1e-15;  // times this close are one
constexpr double kFull = 1 - 1e-9;   // a port that is full but for this is looked at as full: more work, the same result
}  // namespace

// A change touches the flows of the ports that were full before it or are full after it. All others keep the full port of theirs at which nobody has
// more, so together the shares are max-min fair, and such shares are unique (Bertsekas and Gallager, 6.5.2).
bool Fluid::full(const Port& port, double used) const { return used >= port.rate * kFull; }

int Fluid::add_port(double rate) {
  ports_.emplace_back();
  ports_.back().rate = rate;
  return static_cast<int>(ports_.size()) - 1;
}

double Fluid::set_port(int port, double rate, double now) {
  ++epoch_;
  for (int number : ports_[port].over) include(number);
  ports_[port].rate = rate;
  return settle(now);
}

int Fluid::open(const std::vector<int>& ports, int rank) {
  int number;
  if (free_.empty()) {
    number = static_cast<int>(flows_.size());
    flows_.emplace_back();
  } else {
    number = free_.back();
    free_.pop_back();
  }
  Flow& flow = flows_[number];
  flow.ports.assign(ports.begin(), ports.end());
  flow.making.clear();
  flow.order = ++opened_;
  flow.rest = flow.given = flow.sent = flow.counted = flow.made = flow.rate = flow.at = 0;
  flow.when = kInf;
  flow.rank = rank;
  flow.live = true;
  flow.over = flow.waits = flow.going = false;
  return number;
}

double Fluid::add(int number, double size, bool over, double now) {
  Flow& flow = flows_[number];
  advance(flow, now);
  flow.over |= over;
  const bool more = size > 0;
  if (more) flow.rest += size, flow.given += size;
  if (!more || flow.waits) {  // its share stays
    plan_event(number, now);
    return next();
  }
  flow.waits = true;
  changed(number);
  return settle(now);
}

double Fluid::produce(int number, double size, double seconds, bool over, double now) {
  const double end = now + seconds, rate = size / (end - now);  // so that it adds up to `size`
  if (!(end > now && rate < kInf)) return add(number, size, over, now);  // no time that a double could tell
  Flow& flow = flows_[number];
  advance(flow, now);
  flow.over |= over;
  flow.given += size;
  flow.making.emplace_back(end, rate);
  sum_made(flow);
  if (flow.waits || flow.made == 0) {
    plan_event(number, now);
    return next();
  }
  changed(number);
  return settle(now);
}

std::pair<double, double> Fluid::close(int number, double now) {
  ++epoch_;
  Flow& flow = flows_[number];
  advance(flow, now);
  if (flow.going) take(number);
  free_flow(number);
  const double sent = flow.sent;
  return {sent, settle(now)};
}

double Fluid::rerank(int number, int rank, double now) {
  Flow& flow = flows_[number];
  const bool same = flow.rank == rank || !flow.going;
  flow.rank = rank;
  if (same) return next();
  changed(number);
  return settle(now);
}

std::pair<std::vector<int>, double> Fluid::due(double now) {
  ++epoch_;
  std::vector<int> done, moved, again;
  while (!heap_.empty() && flows_[heap_[0]].when <= now * kSame) {
    const int number = heap_[0];
    Flow& flow = flows_[number];
    advance(flow, now);
    heap_set(number, kInf);
    const bool ended = end_production(flow, now);
    const bool same = ended && flow.waits;  // its share is
    if (!same) flow.rest = 0, flow.waits = false;
    if (flow.making.empty() && !flow.waits) flow.sent = flow.given;  // rounding ends here
    if (flow.going && !flow.waits && flow.made == 0) take(number);
    if (flow.over && flow.making.empty() && !flow.waits) {
      done.push_back(number);
    } else {
      moved.push_back(number);
      if (flow.going && !same) again.push_back(number);
    }
  }
  for (int number : again) include(number);
  settle(now);
  for (int number : moved)
    if (flows_[number].place < 0) plan_event(number, now);
  std::sort(done.begin(), done.end(), [&](int a, int b) { return flows_[a].order < flows_[b].order; });
  for (int number : done) free_flow(number);
  return {done, next()};
}

// Takes away what is produced no more; returns whether anything was.
bool Fluid::end_production(Flow& flow, double now) {
  auto& making = flow.making;
  const auto ended = std::remove_if(making.begin(), making.end(), [&](const auto& part) { return part.first <= now * kSame; });
  if (ended == making.end()) return false;
  making.erase(ended, making.end());
  sum_made(flow);
  return true;
}

double Fluid::next() const { return heap_.empty() ? kInf : flows_[heap_[0]].when; }

double Fluid::sent(int number, double now) const {
  return flows_[number].sent + flows_[number].rate * std::max(0.0, now - flows_[number].at);
}

double Fluid::carried(int port, double now) const {
  double sum = ports_[port].carried;
  for (int number : ports_[port].over) sum += sent(number, now) - flows_[number].counted;
  return sum;
}

double Fluid::ready(int number, double now) const {
  const Flow& flow = flows_[number];
  if (!flow.going || !flow.waits) return 0;
  return std::max(0.0, flow.rest + (flow.made - flow.rate) * std::max(0.0, now - flow.at));
}

double Fluid::backlog(int port, double now) const {
  double sum = 0;
  for (int number : ports_[port].over) sum += ready(number, now);
  return sum;
}

void Fluid::advance(Flow& flow, double now) {
  const double seconds = now - flow.at;
  flow.at = now;
  if (seconds <= 0 || !flow.going) return;
  flow.sent += flow.rate * seconds;
  if (flow.waits) flow.rest = std::max(0.0, flow.rest + (flow.made - flow.rate) * seconds);
}

void Fluid::put(int number) {
  flows_[number].going = true;
  for (int port : flows_[number].ports) ports_[port].over.push_back(number);
}

// Takes a flow off its ports; those that were full have room for others now.
void Fluid::take(int number) {
  Flow& flow = flows_[number];
  for (int index : flow.ports) {
    Port& port = ports_[index];
    port.carried += flow.sent - flow.counted;
    port.over.erase(std::find(port.over.begin(), port.over.end(), number));
    left_.push_back(index);
  }
  flow.counted = flow.sent;
  flow.rate = 0;
  flow.going = false;
}

void Fluid::changed(int number) {
  ++epoch_;
  if (!flows_[number].going) put(number);
  include(number);
}

// Makes a flow part of the solve, and its ports touched.
void Fluid::include(int number) {
  Flow& flow = flows_[number];
  if (flow.mark == epoch_) return;
  flow.mark = epoch_;
  set_.push_back(number);
  for (int index : flow.ports) {
    Port& port = ports_[index];
    if (port.mark != epoch_) {
      port.mark = epoch_;
      port.within = 0;
      touched_.push_back(index);
    }
    ++port.within;
  }
}

// Includes all flows of touched ports that were full before, or are full with the new shares.
void Fluid::spread(bool after) {
  for (std::size_t i = 0; i < touched_.size(); ++i) {
    const Port& port = ports_[touched_[i]];
    if (port.within == static_cast<int>(port.over.size())) continue;
    if (full(port, port.used) || (after && full(port, port.rate - port.left)))
      for (int number : port.over) include(number);
  }
}

double Fluid::settle(double now) {
  for (int index : left_)
    if (full(ports_[index], ports_[index].used))
      for (int number : ports_[index].over) include(number);
  spread(false);
  for (std::size_t size = 0; size < set_.size();) {
    size = set_.size();
    fill();
    spread(true);
  }
  commit(now);
  return next();
}

// Progressive filling of the flows in the solve; the others' rates stand.
void Fluid::fill() {
  ranks_.clear();
  for (int index : touched_) {
    Port& port = ports_[index];
    port.left = port.rate;
    port.rising = 0;
    if (port.within == static_cast<int>(port.over.size())) continue;
    for (int number : port.over)
      if (flows_[number].mark != epoch_) port.left -= flows_[number].rate;
    port.left = std::max(0.0, port.left);
  }
  for (int number : set_) {
    flows_[number].fixed = false;
    if (std::find(ranks_.begin(), ranks_.end(), flows_[number].rank) == ranks_.end()) ranks_.push_back(flows_[number].rank);
  }
  std::sort(ranks_.begin(), ranks_.end());
  for (int rank : ranks_) fill_rank(rank);
}

void Fluid::fill_rank(int rank) {
  wanting_.clear();  // flows that want no more than they produce, least last
  std::size_t rising = 0;
  for (int number : set_) {
    const Flow& flow = flows_[number];
    if (flow.rank != rank) continue;
    ++rising;
    if (!flow.waits) wanting_.push_back(number);
    for (int port : flow.ports) ++ports_[port].rising;
  }
  std::sort(wanting_.begin(), wanting_.end(), [&](int a, int b) {
    const Flow &x = flows_[a], &y = flows_[b];
    return x.made != y.made ? x.made > y.made : x.order > y.order;
  });
  while (rising > 0) {
    double share = kInf;
    int tightest = -1;
    for (int index : touched_) {
      const Port& port = ports_[index];
      if (port.rising == 0) continue;
      const double each = port.left / port.rising;
      if (each < share) share = each, tightest = index;
    }
    bool some = false;  // who wants no more than the least share gets it, and leaves the others no less
    while (!wanting_.empty()) {
      const int number = wanting_.back();
      const Flow& flow = flows_[number];
      if (!flow.fixed && flow.made > share) break;
      wanting_.pop_back();
      if (flow.fixed) continue;
      fix(number, flow.made);
      some = true;
      --rising;
    }
    if (some) continue;
    for (int number : ports_[tightest].over) {
      const Flow& flow = flows_[number];
      if (flow.mark != epoch_ || flow.fixed || flow.rank != rank) continue;
      fix(number, share);
      --rising;
    }
  }
}

void Fluid::fix(int number, double share) {
  Flow& flow = flows_[number];
  flow.fixed = true;
  flow.share = share;
  for (int index : flow.ports) {
    Port& port = ports_[index];
    port.left = std::max(0.0, port.left - share);
    --port.rising;
  }
}

void Fluid::commit(double now) {
  for (int number : set_) {
    Flow& flow = flows_[number];
    const bool enough = !flow.waits && flow.share >= flow.made * (1 - kClose);
    advance(flow, now);
    flow.rate = enough ? flow.made : flow.share;
    flow.waits = !enough;
    plan_event(number, now);
  }
  touched_.insert(touched_.end(), left_.begin(), left_.end());
  for (int index : touched_) {
    Port& port = ports_[index];
    port.used = 0;
    for (int number : port.over) port.used += flows_[number].rate;
  }
  set_.clear();
  touched_.clear();
  left_.clear();
}

// The time at which a flow changes by itself: it has nothing left, or something is produced no more.
void Fluid::plan_event(int number, double now) {
  const Flow& flow = flows_[number];
  double when = flow.making.empty() && flow.over && !flow.waits ? now : kInf;
  for (const auto& part : flow.making) when = std::min(when, part.first);
  if (flow.waits && flow.rate > flow.made) when = std::min(when, now + flow.rest / (flow.rate - flow.made));
  heap_set(number, when);
}

void Fluid::free_flow(int number) {
  heap_set(number, kInf);
  flows_[number].live = false;
  free_.push_back(number);
}

// Moves the flow at a place of the heap to where it belongs.
void Fluid::sift(int place) {
  const int number = heap_[place], size = static_cast<int>(heap_.size());
  while (place > 0) {
    const int parent = (place - 1) / 2;
    if (!before(number, heap_[parent])) break;
    flows_[heap_[parent]].place = place;
    heap_[place] = heap_[parent];
    place = parent;
  }
  for (;;) {
    int child = 2 * place + 1;
    if (child >= size) break;
    if (child + 1 < size && before(heap_[child + 1], heap_[child])) ++child;
    if (!before(heap_[child], number)) break;
    flows_[heap_[child]].place = place;
    heap_[place] = heap_[child];
    place = child;
  }
  heap_[place] = number;
  flows_[number].place = place;
}

void Fluid::heap_set(int number, double when) {
  Flow& flow = flows_[number];
  if (when == flow.when && (flow.place >= 0 || when == kInf)) return;
  flow.when = when;
  if (when < kInf) {
    if (flow.place < 0) {
      flow.place = static_cast<int>(heap_.size());
      heap_.push_back(number);
    }
    sift(flow.place);
  } else if (flow.place >= 0) {
    const int place = flow.place, last = heap_.back();
    flow.place = -1;
    heap_.pop_back();
    if (last != number) {
      heap_[place] = last;
      flows_[last].place = place;
      sift(place);
    }
  }
}

}  // namespace regauge
