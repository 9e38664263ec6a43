// One request's time line, in a dialog that the address names (#request=ID): a bar for each step, a mark for each token, and the same as a table.

import { ask, NoAnswer } from "./looks.js";
import { part } from "./sections.js";
import { cut, element, label } from "./svg.js";
import { fill } from "./table.js";
import { bytes, clock, seconds, whole } from "./text.js";

const ROW = 24, LEFT = 14, AXIS = 24, AGAIN_MS = 1000;
let shown = null, timer = 0, opener = null;

export function start() {
  addEventListener("hashchange", follow);
  part("line").addEventListener("close", () => {
    clearTimeout(timer);
    shown = null;
    if (location.hash) history.pushState(null, "", location.pathname);
    opener?.focus();
  });
  part("line-close").addEventListener("click", () => part("line").close());
  follow();
}

function follow() {
  const name = /^#request=(.+)$/.exec(location.hash)?.[1];
  if (!name) return part("line").open ? part("line").close() : undefined;
  shown = decodeURIComponent(name);
  opener = document.activeElement === document.body ? null : document.activeElement;
  part("line-title").textContent = shown;
  part("line-state").textContent = "asking";
  part("line-drawing").replaceChildren();
  part("line-why").textContent = "";
  part("line-facts").replaceChildren();
  fill(part("line-steps"), "Steps", [], [], "none");
  part("line-file").href = `debug/trace/${encodeURIComponent(shown)}?format=perfetto`;
  if (!part("line").open) part("line").showModal();
  look(shown);
}

async function look(name) {
  clearTimeout(timer);
  try {
    const found = await ask(`debug/trace/${encodeURIComponent(name)}`);
    if (name !== shown) return;
    show(found);
    if (found.request.outcome === "running") timer = setTimeout(() => look(name), AGAIN_MS);
    else why(name);
  } catch (error) {
    if (!(error instanceof NoAnswer)) console.error(error);
    if (name === shown) part("line-state").textContent = error.message;
  }
}

async function why(name) {
  const found = await ask(`debug/why/${encodeURIComponent(name)}`).catch(() => null);
  if (name === shown && found) part("line-why").textContent = found.requests.map(({ text }) => text).join("\n\n");
}

function show({ request, tries }) {
  part("line-state").textContent = request.error ? `${request.outcome}: ${request.error}` : request.outcome;
  part("line-state").className = request.outcome === "failed" ? "bad" : "";
  facts([["came", clock(request.unix_s)], ["first token", seconds(request.ttft_s)], ["took", seconds(request.seconds)], ["tokens in", whole(request.prompt_tokens)],
    ["tokens out", whole(request.completion_tokens)], ["KV on the wire", bytes(request.wire_bytes)], ["path", [request.path, request.mode].filter(Boolean).join(", ") || "-"], ["attempts", whole(request.attempts)]]);
  const steps = tries.flatMap((tried, at) => tried.spans.map((span) => ({ ...span, tried, at })));
  draw(part("line-drawing"), request, tries, steps);
  fill(part("line-steps"), "Steps; workers' are as long as they say, placed by when their word came", [
    { title: "attempt", get: ({ at }) => whole(at + 1) },
    { title: "where", get: ({ where }) => where, word: true },
    { title: "step", get: ({ name, tried }) => (name === "attempt" && tried.error ? { text: `attempt: ${tried.error}`, kind: "bad" } : name), long: true },
    { title: "from", get: ({ begin_s: at }) => seconds(at) },
    { title: "length", get: ({ begin_s: begin, end_s: end }) => seconds(end - begin) },
  ], steps, "none yet");
}

function facts(pairs) {
  part("line-facts").replaceChildren(...pairs.map(([title, value]) => {
    const pair = document.createElement("div"), term = document.createElement("dt"), told = document.createElement("dd");
    term.textContent = title;
    told.textContent = value;
    pair.append(term, told);
    return pair;
  }));
}

function draw(host, request, tries, steps) {
  const width = Math.max(240, host.clientWidth), height = AXIS + steps.length * ROW + (2 * tries.length * ROW) + 4;
  const low = Math.min(0, ...steps.map(({ begin_s: at }) => at)), high = Math.max(request.seconds, ...steps.map(({ end_s: at }) => at), 0.001);
  const x = (at) => LEFT + ((at - low) / (high - low)) * (width - 2 * LEFT);
  const drawing = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Time line of ${seconds(high - low)}; its steps are in the table below` });
  for (const mark of marks(low, high, width)) drawing.append(element("path", { d: `M ${x(mark)} ${AXIS - 6} V ${height}`, class: "grid" }), label(x(mark), 12, seconds(mark), { "text-anchor": x(mark) > width - 40 ? "end" : x(mark) < 30 ? "start" : "middle", class: "soft" }));
  let y = AXIS;
  tries.forEach((tried, at) => {
    for (const { name, where, begin_s: begin, end_s: end } of steps.filter((step) => step.at === at)) {
      const from = x(begin), long = Math.max(2, x(end) - from), text = cut(`${name === "attempt" ? `attempt ${at + 1}` : name}, ${where}: ${seconds(end - begin)}`, Math.floor((width - 2 * LEFT) / 7));
      const wide = 7 * text.length + 8, [start, anchor] = wide < long ? [from + 4, "start"] : from + long + wide < width ? [from + long + 4, "start"] : from > wide ? [from - 4, "end"] : [width - LEFT, "end"];
      drawing.append(element("rect", { x: from, y: y + 3, width: long, height: ROW - 6, rx: 2, class: `step ${kind(where, tried)}` }), label(start, y + ROW - 8, text, { "text-anchor": anchor }));
      y += ROW;
    }
    drawing.append(label(LEFT, y + ROW - 8, `${whole(tried.tokens_s.length + tried.more_tokens)} tokens, as they came to the gateway`, { class: "soft" }));
    y += ROW;
    for (const at of tried.tokens_s) drawing.append(element("path", { d: `M ${x(at)} ${y + 3} V ${y + ROW - 6}`, class: "token" }));
    y += ROW;
  });
  host.replaceChildren(drawing);
}

function kind(where, tried) {
  return where === tried.prefill ? "prefill" : where === tried.decode ? "decode" : "gateway";
}

function marks(low, high, width) {
  const most = Math.max(2, Math.floor(width / 110)), raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= raw);
  return Array.from({ length: most + 2 }, (_, n) => Math.ceil(low / step) * step + n * step).filter((at) => at <= high);
}
