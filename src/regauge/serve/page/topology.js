// The deployment as a drawing: the gateway above, prefill left, decode right, the compute plane between; each worker's line is as thick as it is loaded,
// and the load stands in its box. The tables below it say the same in words.

import { cut, element, label } from "./svg.js";
import { perSecond, share, whole } from "./text.js";

const BOX = 44, GAP = 10, TOP = 74, MOST = 24, CHARACTER = 8.2;

export function level(load) {
  if (load === null || load === undefined) return "unknown";
  return load < 0.01 ? "idle" : load < 0.5 ? "low" : load < 0.8 ? "high" : "full";
}

export function draw(host, { workers, requests, ports, planes }) {
  const width = Math.max(280, host.clientWidth), roles = { prefill: [], decode: [] };
  for (const worker of workers) roles[worker.role]?.push(worker);
  const rows = Math.max(1, ...Object.values(roles).map((list) => Math.min(list.length, MOST + 1)));
  const side = Math.min(230, (width - 130) / 2), height = TOP + rows * (BOX + GAP) + 6;
  const middle = { x: width / 2, top: TOP, bottom: height - GAP - 6, width: Math.min(110, width - 2 * side - 40) };
  const drawing = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words(roles, ports) });
  drawing.append(...bus(width, side, roles), gateway(width, requests), plane(middle, planes));
  for (const [role, list] of Object.entries(roles)) {
    const left = role === "prefill";
    list.slice(0, MOST).forEach((worker, at) => drawing.append(...box(worker, ports.get(worker.name), left ? 16 : width - 16 - side, TOP + at * (BOX + GAP), side, middle, left)));
    if (list.length > MOST) drawing.append(label(left ? 16 : width - 16 - side, TOP + MOST * (BOX + GAP) + 20, `and ${list.length - MOST} more, below`));
    if (!list.length) drawing.append(label(left ? 16 : width - 16, TOP + 26, `no ${role} worker`, { class: "trouble", "text-anchor": left ? "start" : "end" }));
  }
  host.replaceChildren(drawing);
}

function gateway(width, requests) {
  const half = Math.min(110, width / 2 - 60), x = width / 2;
  return element("g", {}, element("rect", { x: x - half, y: 4, width: 2 * half, height: BOX, rx: 5, class: "box" }),
    label(x, 22, "gateway", { "text-anchor": "middle", class: "name" }),
    label(x, 39, `${whole(requests)} in the house`, { "text-anchor": "middle" }));
}

// Requests and tokens: from the gateway along both edges to every worker.
function bus(width, side, roles) {
  const reach = (list) => TOP + (Math.min(list.length, MOST) - 1) * (BOX + GAP) + BOX / 2;
  return [[roles.prefill, 6, 1], [roles.decode, width - 6, -1]].filter(([list]) => list.length).flatMap(([list, x, way]) => [
    element("path", { d: `M ${width / 2} ${4 + BOX / 2} H ${x} V ${reach(list)}`, class: "bus" }),
    ...list.slice(0, MOST).map((_, at) => element("path", { d: `M ${x} ${TOP + at * (BOX + GAP) + BOX / 2} h ${10 * way}`, class: "bus" })),
  ]);
}

function plane({ x, top, bottom, width }, planes) {
  const made = element("g", {}, element("rect", { x: x - width / 2, y: top, width, height: bottom - top, rx: 5, class: "plane" }));
  if (width >= 60) {
    made.append(label(x, (top + bottom) / 2 - 2, planes.has("compute") ? "compute" : "KV", { "text-anchor": "middle", class: "name" }));
    if (width >= 100) made.append(label(x, (top + bottom) / 2 + 15, planes.has("compute") ? "plane" : "links", { "text-anchor": "middle" }));
  }
  return made;
}

function box(worker, port, x, y, side, middle, left) {
  const at = y + BOX / 2, from = left ? x + side : x, to = left ? middle.x - middle.width / 2 : middle.x + middle.width / 2;
  const kind = worker.up ? level(port.load) : "down", room = Math.floor((side - 34) / CHARACTER);
  const said = !worker.up ? "down" : port.load === null ? perSecond(port.rate) : `${share(port.load)}, ${perSecond(port.rate)}`;
  const short = said.length > room && port.load !== null ? share(port.load) : said;
  return [element("path", { d: `M ${from} ${at} H ${to}`, class: `link ${kind}` }),
    element("g", {}, element("title", {}, `${worker.name}: ${worker.up ? `up, ${said}${port.of ? ` (${port.of})` : ""}` : `down: ${worker.reason}`}`),
      element("rect", { x, y, width: side, height: BOX, rx: 5, class: worker.up ? "box" : "box down" }),
      mark(x + 14, y + 17, worker.up),
      label(x + 26, y + 19, cut(worker.name, room), { class: "name" }), label(x + 26, y + 36, worker.up ? short : "down", { class: worker.up ? "" : "trouble" }))];
}

// A disc is up, a cross is down: not by colour alone.
function mark(x, y, up) {
  return up ? element("circle", { cx: x, cy: y, r: 5, class: "up" }) : element("path", { d: `M ${x - 5} ${y - 5} l 10 10 m 0 -10 l -10 10`, class: "cross" });
}

function words(roles, ports) {
  const said = ({ name, up }) => `${name} ${up ? `up, link load ${share(ports.get(name).load)}, ${perSecond(ports.get(name).rate)}` : "down"}`;
  return Object.entries(roles).map(([role, list]) => `${role}: ${list.slice(0, MOST).map(said).join("; ") || "none"}`).join(". ");
}
