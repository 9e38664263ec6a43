// The tables: each is one question, answered from one look or from two.

import { all, grown, sum } from "./series.js";
import { fill } from "./table.js";
import { bytes, clock, perSecond, seconds, share, whole } from "./text.js";

export const part = (id) => document.getElementById(id);

const TILES = [
  ["Requests in the house", "regauge_requests_in_flight", whole],
  ["Prompt tokens", "regauge_prompt_tokens_total", whole],
  ["Generated tokens", "regauge_completion_tokens_total", whole],
  ["Transfers delivered", "regauge_transfer_bytes_count", whole],
  ["KV delivered", "regauge_transfer_bytes_sum", bytes],
  ["Begun again", "regauge_retries_total", whole],
  ["Gone on elsewhere", "regauge_resumed_answers_total", whole],
  ["Receipts handed over", "regauge_receipts_total", whole],
];

export function tiles({ metrics }) {
  const list = part("now");
  if (!list.children.length) {
    for (const [title, name] of TILES) {
      const term = document.createElement("dt"), value = document.createElement("dd"), pair = document.createElement("div");
      term.textContent = title;
      value.dataset.metric = name;
      pair.append(term, value);
      list.append(pair);
    }
  }
  TILES.forEach(([, name, write], at) => {
    const value = list.children[at].lastElementChild;
    value.textContent = write(sum(metrics, name));
    value.dataset.value = sum(metrics, name);
  });
}

export function workers({ metrics, workers }) {
  const of = (name, worker) => (worker.up ? sum(metrics, name, { worker: worker.name }) : null);
  const pool = (worker, page) => worker.state?.pools.reduce((total, each) => total + (each[page] ?? 0), 0) ?? null;
  fill(part("workers"), "Each worker; pages by who may touch them", [
    { title: "worker", get: (w) => w.name, word: true },
    { title: "role", get: (w) => w.role, word: true },
    { title: "state", get: (w) => (w.up ? { text: "up", kind: "good" } : { text: `down: ${w.reason}`, kind: "bad" }), long: true },
    { title: "running", get: (w) => whole(of("regauge_running_requests", w)) },
    { title: "waiting", get: (w) => whole(of("regauge_queue_depth", w)) },
    { title: "pages", get: (w) => whole(of("regauge_pool_pages", w)) },
    { title: "free", get: (w) => whole(of("regauge_pool_free_pages", w)), meter: (w) => { const pages = of("regauge_pool_pages", w); return pages ? of("regauge_pool_free_pages", w) / pages : null; } },
    { title: "leased", get: (w) => whole(pool(w, "leased")) },
    { title: "committed", get: (w) => whole(pool(w, "committed")) },
    { title: "quarantined", get: (w) => { const n = of("regauge_pool_quarantined_pages", w); return { text: whole(n), kind: n ? "bad" : "" }; } },
  ], workers, "none is known", (w) => w.name);
}

export function links({ workers }) {
  const rows = workers.flatMap((worker) => (worker.state?.links ?? []).map((link) => ({ worker, link })));
  const sends = ({ worker }) => worker.role === "prefill";
  fill(part("links"), "Links, as each end sees them", [
    { title: "from", get: (row) => (sends(row) ? row.worker.name : row.link.peer), word: true },
    { title: "to", get: (row) => (sends(row) ? row.link.peer : row.worker.name), word: true },
    { title: "seen by", get: ({ worker }) => worker.role, word: true },
    { title: "state", get: ({ link }) => ({ text: link.state, kind: link.state === "up" ? "good" : "bad" }), word: true },
    { title: "path", get: ({ link }) => link.path, word: true },
    { title: "modes", get: ({ link }) => link.modes.join(" "), word: true },
    { title: "chunks in flight", get: ({ link }) => whole(link.in_flight) },
    { title: "sent again", get: ({ link }) => ({ text: whole(link.resent), kind: link.resent ? "warn" : "" }) },
    { title: "resumed", get: ({ link }) => whole(link.resumed) },
  ], rows, "none yet: the first request makes one", ({ worker, link }) => `${worker.name} ${link.peer} ${link.session}`);
}

export function nics({ workers }) {
  const rows = workers.flatMap((worker) => (worker.state?.nics ?? []).map((nic) => ({ worker, nic })));
  fill(part("nics"), "NICs that KV comes in by, as flow control sees them", [
    { title: "worker", get: ({ worker }) => worker.name, word: true },
    { title: "NIC", get: ({ nic }) => nic.nic, word: true },
    { title: "transfers", get: ({ nic }) => whole(nic.transfers) },
    { title: "granted", get: ({ nic }) => bytes(nic.granted_bytes) },
    { title: "of a window of", get: ({ nic }) => bytes(nic.window_bytes) },
    { title: "waits for credit", get: ({ nic }) => bytes(nic.queued_bytes) },
    { title: "backlog", get: ({ nic }) => seconds(nic.backlog_s) },
  ], rows, "none", ({ worker, nic }) => `${worker.name} ${nic.nic}`);
}

export function planes(interfaces) {
  fill(part("planes"), "Interfaces of the planes", [
    { title: "plane", get: ({ plane }) => plane, word: true },
    { title: "host", get: ({ host }) => host, word: true },
    { title: "interface", get: ({ name }) => name, word: true },
    { title: "direction", get: ({ direction }) => direction, word: true },
    { title: "carried", get: ({ total }) => bytes(total) },
    { title: "rate", get: ({ rate }) => perSecond(rate) },
    { title: "line rate", get: ({ line }) => perSecond(line) },
    { title: "load", get: ({ load }) => share(load), meter: ({ load }) => load },
  ], interfaces, "no planes are declared", (each) => `${each.plane} ${each.host} ${each.name} ${each.direction}`);
}

export function paths(then, { metrics }) {
  const more = (name, labels) => grown(sum(then.metrics, name, labels), sum(metrics, name, labels));
  const count = "regauge_transfer_bytes_count", size = "regauge_transfer_bytes_sum", time = "regauge_transfer_seconds_sum";
  fill(part("paths"), "Delivered, in the last minute and since the gateway began", [
    { title: "path", get: ({ labels }) => labels.path, word: true },
    { title: "mode", get: ({ labels }) => labels.mode, word: true },
    { title: "last minute", get: ({ labels }) => whole(more(count, labels)) },
    { title: "bytes", get: ({ labels }) => bytes(more(size, labels)) },
    { title: "mean time", get: ({ labels }) => { const n = more(count, labels); return seconds(n ? more(time, labels) / n : null); } },
    { title: "in all", get: ({ value }) => whole(value) },
    { title: "bytes", get: ({ labels }) => bytes(sum(metrics, size, labels)) },
    { title: "mean time", get: ({ labels, value }) => seconds(sum(metrics, time, labels) / value) },
  ], all(metrics, count).filter(({ value }) => value), "none yet", ({ labels }) => `${labels.path} ${labels.mode}`);
}

const TROUBLE = [
  ["regauge_transfer_failures_total", "transfers failed", ({ worker, reason }) => `${worker}: ${reason}`],
  ["regauge_transfer_resent_chunks_total", "chunks sent again", ({ worker }) => worker],
  ["regauge_transfer_resumed_legs_total", "legs resumed", ({ worker }) => worker],
  ["regauge_off_plane_bytes", "bytes of KV off the compute plane", ({ worker }) => worker],
  ["regauge_receipts_troubled", "receipts in trouble", ({ status }) => status],
  ["regauge_receipts_refused_total", "receipts refused", () => "gateway"],
  ["regauge_client_faults_total", "connections ended for the client's fault", ({ reason }) => reason],
];
const ENDED = { cancelled: "answers that the client did not wait for", failed: "answers failed" };

export function trouble({ metrics }) {
  const ended = all(metrics, "regauge_answers_total").filter(({ labels, value }) => ENDED[labels.outcome] && value)
    .map(({ labels, value }) => ({ what: ENDED[labels.outcome], where: "gateway", value }));
  const rows = [...ended, ...TROUBLE.flatMap(([name, what, where]) => all(metrics, name).filter(({ value }) => value).map(({ labels, value }) => ({ what, where: where(labels), value })))];
  fill(part("trouble"), "What is not 0", [
    { title: "what", get: ({ what }) => what, word: true },
    { title: "where", get: ({ where }) => where, word: true },
    { title: "count", get: ({ value }) => ({ text: whole(value), kind: "warn" }) },
  ], rows, "nothing", ({ what, where }) => `${what} ${where}`);
}

export function requests({ requests, hidden, silent }) {
  fill(part("requests"), `The newest; open one for its time line${silent.map((each) => `; ${each}: its requests are not here`).join("")}${hidden ? ` (${whole(hidden)} older ones are kept)` : ""}`, [
    { title: "request", get: ({ id }) => ({ text: id, href: `#request=${encodeURIComponent(id)}` }), word: true },
    { title: "came", get: ({ unix_s: at }) => clock(at), word: true },
    { title: "outcome", get: ({ outcome, error }) => ({ text: error ? `${outcome}: ${error}` : outcome, kind: outcome === "failed" ? "bad" : "" }), long: true },
    { title: "first token", get: ({ ttft_s: value }) => seconds(value) },
    { title: "took", get: ({ seconds: value }) => seconds(value) },
    { title: "tokens in", get: ({ prompt_tokens: n }) => whole(n) },
    { title: "out", get: ({ completion_tokens: n }) => whole(n) },
    { title: "KV", get: ({ wire_bytes: n }) => bytes(n) },
    { title: "path", get: ({ path }) => path, word: true },
    { title: "prefill", get: ({ prefill }) => prefill || "-", word: true },
    { title: "decode", get: ({ decode }) => decode || "-", word: true },
    { title: "attempts", get: ({ attempts }) => whole(attempts) },
  ], requests, "none yet", ({ id }) => id);
}
