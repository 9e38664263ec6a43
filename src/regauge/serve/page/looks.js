// Looks at the gateway, and what two of them say: the newest, the one before for rates, and the oldest of the last minute for percentiles.

import { all, rate, sum } from "./series.js";

export const WINDOW_S = 60;
const PAIR_S = 8, SLOW_MS = 10000;

export class NoAnswer extends Error {}

// Raises NoAnswer, in words for people, where the gateway does not give what was asked for.
export async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(SLOW_MS) }).catch((error) => { throw new NoAnswer(error.name === "TimeoutError" ? `nothing within ${SLOW_MS / 1000} s` : "the gateway cannot be reached"); });
  const told = await answer.json().catch(() => null);
  if (answer.ok && told) return told;
  throw new NoAnswer(told?.error?.message ?? `the gateway answers ${answer.status}`);
}

export class Looks {
  list = [];

  add(live) {
    const now = { ...live, at: performance.now() / 1000 };
    const last = this.list.at(-1);
    if (last && this.#anew(last, now)) this.list = [];
    this.list.push(now);
    this.list = this.list.filter((each) => now.at - each.at <= WINDOW_S + 5);
    while (this.list.length > 2 && now.at - this.list[1].at >= WINDOW_S) this.list.shift();
    return { now, before: this.#since(PAIR_S), then: this.list[0] };
  }

  // Another gateway process counts anew.
  #anew(last, now) {
    const begun = ({ metrics }) => sum(metrics, "process_start_time_seconds");
    const answered = ({ metrics }) => sum(metrics, "regauge_requests_total");
    return begun(last) !== begun(now) || answered(now) < answered(last);
  }

  #since(seconds) {
    const now = this.list.at(-1);
    return this.list.find((each) => now.at - each.at <= seconds) ?? now;
  }
}

// Bytes per second that a worker's transfers have sent and received, by its own clock; null: two looks do not say.
export function moved(before, worker) {
  const was = before.workers.find(({ name }) => name === worker.name)?.state, state = worker.state;
  if (!was || !state || was.pid !== state.pid) return null;
  const total = ({ totals }) => totals.sent + Object.values(totals.landed).reduce((a, b) => a + b, 0);
  return rate(total(was), total(state), state.clock_s - was.clock_s);
}

// Bytes per second of KV that lands by a path. Bytes and seconds of each worker are of the same answers of it.
export function landed(before, now, path) {
  const rates = all(now.metrics, "regauge_kv_landed_bytes_total", { path }).map(({ labels: { worker }, value }) => {
    const seconds = ({ metrics }) => sum(metrics, "regauge_worker_observed_seconds_total", { worker });
    return rate(sum(before.metrics, "regauge_kv_landed_bytes_total", { worker, path }), value, seconds(now) - seconds(before));
  }).filter((each) => each !== null);
  return rates.length ? rates.reduce((total, each) => total + each, 0) : null;
}

// Each direction of each interface of a plane: bytes so far, bytes per second by its host's clock, line rate, load.
export function interfaces(before, now) {
  return all(now.metrics, "regauge_plane_bytes_total").map(({ labels, value }) => {
    const { host, plane, interface: name, direction } = labels;
    const seconds = ({ metrics }) => sum(metrics, "regauge_plane_observed_seconds_total", { host, plane, interface: name });
    const was = all(before.metrics, "regauge_plane_bytes_total", labels)[0]?.value;
    const found = rate(was, value, seconds(now) - seconds(before));
    const line = sum(now.metrics, "regauge_plane_speed_bytes_per_second", { host, plane, interface: name }) || null;
    return { host, plane, name, direction, total: value, rate: found, line, load: found === null || !line ? null : found / line };
  });
}

// How a worker's port on the compute plane is loaded: of its host's interfaces where these tell their speed, else of its own transfers and the line rate
// that its flow control was given; prefill has none.
export function port(before, worker, ports) {
  const own = worker.host ? ports.filter(({ host, plane, load }) => host === worker.host && plane === "compute" && load !== null) : [];
  if (own.length) {
    const busiest = own.reduce((most, each) => (each.load > most.load ? each : most));
    return { rate: busiest.rate, load: busiest.load, of: `${busiest.name} ${busiest.direction}` };
  }
  const found = moved(before, worker);
  const line = (worker.state?.nics ?? []).reduce((total, nic) => total + nic.line_bytes_per_s, 0);
  return { rate: found, load: found === null || !line ? null : found / line, of: "its transfers" };
}
