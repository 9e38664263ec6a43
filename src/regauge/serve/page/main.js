// The page: asks the gateway every two seconds, and shows what came. When nothing comes it says so, and asks on.

import { Chart } from "./charts.js";
import { ask, interfaces, landed, Looks, NoAnswer, port } from "./looks.js";
import { links, nics, part, paths, planes, requests, tiles, trouble, workers } from "./sections.js";
import { buckets, quantile } from "./series.js";
import { perSecond, seconds } from "./text.js";
import { start } from "./timeline.js";
import { draw } from "./topology.js";

const EVERY_MS = 2000, PERCENTILES = [0.5, 0.9, 0.99], PATHS = ["DIRECT", "REMAP", "CONVERT"];
const LATENCIES = [["ttft", "regauge_time_to_first_token_seconds"], ["tpot", "regauge_time_per_output_token_seconds"], ["itl", "regauge_inter_token_seconds"]];
const charts = { flows: new Chart(part("flows"), PATHS, perSecond, { least: 1024, steps: Array.from({ length: 50 }, (_, power) => 2 ** power) }) };
for (const [id] of LATENCIES) charts[id] = new Chart(part(id), ["P50", "P90", "P99"], seconds);
const looks = new Looks();
let drawn = null;

function show(live, newest) {
  const { now, before, then } = looks.add(live);
  part("title").textContent = `${now.version} · ${now.model} · ${now.path}`;
  tiles(now);
  for (const [id, name] of LATENCIES) {
    const found = PERCENTILES.map((q) => (then === now ? null : quantile(q, buckets(then.metrics, name), buckets(now.metrics, name))));
    charts[id].add(now.unix_s, found);
    part(`${id}-sum`).textContent = `P50 ${seconds(found[0])}, P90 ${seconds(found[1])}, P99 ${seconds(found[2])}`;
  }
  const flows = PATHS.map((path) => landed(before, now, path));
  charts.flows.add(now.unix_s, flows);
  part("flows-sum").textContent = PATHS.map((path, i) => `${path} ${perSecond(flows[i])}`).join(", ");
  const found = interfaces(before, now);
  drawn = { workers: now.workers, requests: now.requests, ports: new Map(now.workers.map((w) => [w.name, port(before, w, found)])), planes: new Set(found.map(({ plane }) => plane)) };
  draw(part("topology"), drawn);
  workers(now);
  links(now);
  nics(now);
  planes(found);
  paths(then, now);
  trouble(now);
  requests(newest);
  part("content").dataset.at = now.unix_s;
}

function say(text, bad, old = bad) {
  const status = part("status");
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", bad);
  part("content").classList.toggle("old", old);
}

async function turn() {
  try {
    const told = await Promise.all([ask("debug/live?limit=50"), ask("debug/requests?limit=15")]);
    say(["live", ...told[0].silent].join("; "), told[0].silent.length > 0, false);
    show(...told);
  } catch (error) {
    if (!(error instanceof NoAnswer)) console.error(error);
    say(`no answer: ${error.message}; asking again`, true);
  }
  setTimeout(turn, EVERY_MS);
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  part("theme").setAttribute("aria-pressed", String(dark));
  Object.values(charts).forEach((chart) => chart.draw());
}

const system = matchMedia("(prefers-color-scheme: dark)");
part("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
system.addEventListener("change", ({ matches }) => theme(matches));
new ResizeObserver(() => drawn && draw(part("topology"), drawn)).observe(part("topology"));
theme(system.matches);
start();
turn();
