// The page: scrapes the gateway every two seconds, and shows what came. Rates and percentiles are of two scrapes, a minute apart at most.

import { Chart } from "./charts.js";
import { all, buckets, parse, quantile, rate, sum } from "./prometheus.js";
import { fill } from "./table.js";
import { bytes, seconds, share, whole } from "./text.js";

const EVERY_MS = 2000, WINDOW_S = 60, PERCENTILES = [0.5, 0.9, 0.99], PATHS = ["DIRECT", "REMAP", "CONVERT"];
const part = (id) => document.getElementById(id);
const charts = {
  ttft: new Chart(part("ttft"), ["P50", "P90", "P99"], seconds),
  tpot: new Chart(part("tpot"), ["P50", "P90", "P99"], seconds),
  flows: new Chart(part("flows"), PATHS, bytes),
};
const looks = [];

async function look() {
  const [metrics, state] = await Promise.all([fetch("metrics"), fetch("debug/transfers?limit=200")]);
  if (!metrics.ok || !state.ok) throw new Error(`the gateway answers ${metrics.ok ? state.status : metrics.status}`);
  const series = parse(await metrics.text());
  return { at: performance.now() / 1000, series, state: await state.json(), begun: sum(series, "process_start_time_seconds") };
}

function show(now) {
  if (looks.length && looks.at(-1).begun !== now.begun) looks.length = 0; // another process counts anew
  looks.push(now);
  while (looks.length > 2 && now.at - looks[1].at > WINDOW_S) looks.shift();
  const then = looks[0], time = now.state.unix_s;
  part("title").textContent = `${now.state.version} · ${now.state.model} · ${now.state.path}`;
  tiles(now);
  for (const [id, name] of [["ttft", "regauge_time_to_first_token_seconds"], ["tpot", "regauge_time_per_output_token_seconds"]]) {
    const found = PERCENTILES.map((q) => (then === now ? null : quantile(q, buckets(then.series, name), buckets(now.series, name))));
    charts[id].add(time, found);
    part(`${id}-sum`).textContent = `P50 ${seconds(found[0])}, P90 ${seconds(found[1])}, P99 ${seconds(found[2])}`;
  }
  const before = looks.at(-2) ?? now;
  const flows = PATHS.map((path) => flow(before.series, now.series, path));
  charts.flows.add(time, flows);
  part("flows-sum").textContent = PATHS.map((path, i) => `${path} ${flows[i] === null ? "-" : `${bytes(flows[i])}/s`}`).join(", ");
  workers(now);
  links(now);
  planes(now, before);
  paths(now);
  trouble(now);
}

function tiles({ series }) {
  const shown = [
    ["Requests in the house", "regauge_requests_in_flight"],
    ["Prompt tokens", "regauge_prompt_tokens_total"],
    ["Generated tokens", "regauge_completion_tokens_total"],
    ["Transfers delivered", "regauge_transfer_bytes_count"],
    ["KV delivered", "regauge_transfer_bytes_sum", bytes],
    ["Begun again", "regauge_retries_total"],
    ["Gone on elsewhere", "regauge_resumed_answers_total"],
    ["Receipts", "regauge_receipts_total"],
  ];
  part("now").replaceChildren(...shown.flatMap(([title, name, write = whole]) => {
    const term = document.createElement("dt"), value = document.createElement("dd"), pair = document.createElement("div");
    term.textContent = title;
    value.textContent = write(sum(series, name));
    value.dataset.metric = name;
    value.dataset.value = sum(series, name);
    pair.append(term, value);
    return pair;
  }));
}

function workers({ series, state }) {
  const of = (name, worker) => sum(series, name, { worker });
  const pool = (worker, page) => worker.state?.pools.reduce((total, each) => total + (each[page] ?? 0), 0) ?? 0;
  fill(part("workers"), "Each worker; pages by who may touch them", [
    { title: "worker", get: (w) => w.name, word: true },
    { title: "role", get: (w) => w.role, word: true },
    { title: "state", get: (w) => (w.up ? { text: "up", kind: "good" } : { text: `down: ${w.reason}`, kind: "bad" }), word: true },
    { title: "running", get: (w) => whole(of("regauge_running_requests", w.name)) },
    { title: "waiting", get: (w) => whole(of("regauge_queue_depth", w.name)) },
    { title: "pages", get: (w) => whole(of("regauge_pool_pages", w.name)) },
    { title: "free", get: (w) => whole(of("regauge_pool_free_pages", w.name)), meter: (w) => of("regauge_pool_free_pages", w.name) / (of("regauge_pool_pages", w.name) || 1) },
    { title: "leased", get: (w) => whole(pool(w, "leased")) },
    { title: "committed", get: (w) => whole(pool(w, "committed")) },
    { title: "quarantined", get: (w) => { const n = of("regauge_pool_quarantined_pages", w.name); return { text: whole(n), kind: n ? "bad" : "" }; } },
  ], state.workers, "none is known");
}

function links({ state }) {
  const rows = state.workers.flatMap((worker) => (worker.state?.links ?? []).map((link) => ({ worker, link })));
  const nics = new Map(state.workers.flatMap((worker) => (worker.state?.nics ?? []).map((nic) => [worker.name, nic])));
  fill(part("links"), "Links, as each end sees them", [
    { title: "from", get: ({ worker, link }) => (worker.role === "prefill" ? worker.name : link.peer), word: true },
    { title: "to", get: ({ worker, link }) => (worker.role === "prefill" ? link.peer : worker.name), word: true },
    { title: "seen by", get: ({ worker }) => worker.role, word: true },
    { title: "state", get: ({ link }) => ({ text: link.state, kind: link.state === "up" ? "good" : "bad" }), word: true },
    { title: "path", get: ({ link }) => link.path, word: true },
    { title: "modes", get: ({ link }) => link.modes.join(" "), word: true },
    { title: "in flight", get: ({ link }) => whole(link.in_flight) },
    { title: "sent again", get: ({ link }) => ({ text: whole(link.resent), kind: link.resent ? "warn" : "" }) },
    { title: "NIC rate", get: ({ worker }) => (nics.has(worker.name) ? `${bytes(nics.get(worker.name).bytes_per_s)}/s` : "-") },
    { title: "waits for credit", get: ({ worker }) => (nics.has(worker.name) ? bytes(nics.get(worker.name).queued_bytes) : "-") },
  ], rows, "no link yet: the first request makes one");
}

// Bytes and seconds of each worker are of the same answers of it: a transfer's bytes count as they land, not when it is over.
function flow(before, now, path) {
  const found = all(now, "regauge_kv_landed_bytes_total").filter(({ labels }) => labels.path === path).map(({ labels: { worker }, value }) => {
    const seconds = (series) => sum(series, "regauge_worker_observed_seconds_total", { worker });
    return rate(sum(before, "regauge_kv_landed_bytes_total", { worker, path }), value, seconds(now) - seconds(before));
  }).filter((each) => each !== null);
  return found.length ? found.reduce((total, each) => total + each, 0) : null;
}

function planes(now, before) {
  const key = ({ labels }) => `${labels.host} ${labels.interface} ${labels.direction}`;
  const was = new Map(all(before.series, "regauge_plane_bytes_total").map((each) => [key(each), each.value]));
  const speed = (labels) => sum(now.series, "regauge_plane_speed_bytes_per_second", { host: labels.host, interface: labels.interface });
  const watched = (look, { host, interface: name }) => sum(look.series, "regauge_plane_observed_seconds_total", { host, interface: name });
  const load = (each) => { const found = rate(was.get(key(each)), each.value, watched(now, each.labels) - watched(before, each.labels)); return found === null || !speed(each.labels) ? null : found / speed(each.labels); };
  fill(part("planes"), "Interfaces of the planes", [
    { title: "plane", get: ({ labels }) => labels.plane, word: true },
    { title: "host", get: ({ labels }) => labels.host, word: true },
    { title: "interface", get: ({ labels }) => labels.interface, word: true },
    { title: "direction", get: ({ labels }) => labels.direction, word: true },
    { title: "carried", get: ({ value }) => bytes(value) },
    { title: "line rate", get: ({ labels }) => (speed(labels) ? `${bytes(speed(labels))}/s` : "-") },
    { title: "load", get: (each) => share(load(each)), meter: load },
  ], all(now.series, "regauge_plane_bytes_total"), "no planes are declared");
}

function paths({ series }) {
  const rows = all(series, "regauge_transfer_bytes_count").filter(({ value }) => value);
  fill(part("paths"), "Delivered since the gateway began", [
    { title: "path", get: ({ labels }) => labels.path, word: true },
    { title: "written", get: ({ labels }) => labels.mode, word: true },
    { title: "transfers", get: ({ value }) => whole(value) },
    { title: "bytes", get: ({ labels }) => bytes(sum(series, "regauge_transfer_bytes_sum", labels)) },
    { title: "mean time", get: ({ labels, value }) => seconds(sum(series, "regauge_transfer_seconds_sum", labels) / value) },
  ], rows, "none yet");
}

function trouble({ series }) {
  const named = [
    ["regauge_transfer_failures_total", "transfers failed", ({ worker, reason }) => `${worker}: ${reason}`],
    ["regauge_transfer_resent_chunks_total", "chunks sent again", ({ worker }) => worker],
    ["regauge_transfer_resumed_legs_total", "legs resumed", ({ worker }) => worker],
    ["regauge_off_plane_bytes", "bytes of KV off the compute plane", ({ worker }) => worker],
    ["regauge_receipts_troubled", "receipts in trouble", ({ status }) => status],
    ["regauge_receipts_refused_total", "receipts refused", () => "gateway"],
    ["regauge_client_faults_total", "connections ended for the client's fault", ({ reason }) => reason],
  ];
  const rows = named.flatMap(([name, what, where]) => all(series, name).filter(({ value }) => value).map(({ labels, value }) => ({ what, where: where(labels), value })));
  fill(part("trouble"), "What is not 0", [
    { title: "what", get: ({ what }) => what, word: true },
    { title: "where", get: ({ where }) => where, word: true },
    { title: "count", get: ({ value }) => ({ text: whole(value), kind: "warn" }) },
  ], rows, "nothing");
}

function say(text, bad) {
  const status = part("status");
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", bad);
}

async function turn() {
  try {
    show(await look());
    say("live", false);
  } catch (error) {
    say(`no answer: ${error.message}; asking again`, true);
  }
  setTimeout(turn, EVERY_MS);
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  part("theme").setAttribute("aria-pressed", String(dark));
  for (const chart of Object.values(charts)) chart.draw();
}

const system = matchMedia("(prefers-color-scheme: dark)");
part("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
system.addEventListener("change", ({ matches }) => theme(matches));
theme(system.matches);
turn();
