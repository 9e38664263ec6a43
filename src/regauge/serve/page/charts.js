// Lines over time. Colours come from the page's, so that they follow its light and dark; each line has a name in the legend.

import { clock } from "./text.js";
import uPlot from "./uplot/uPlot.esm.js";

const SPAN_S = 300;

export class Chart {
  constructor(element, names, write, { least = 1, steps } = {}) {
    this.element = element;
    this.names = names;
    this.write = write;
    this.least = least; // of the axis, where there is nothing
    this.steps = steps;
    this.data = [[], ...names.map(() => [])];
    this.draw();
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(element);
  }

  size() {
    return { width: Math.max(220, this.element.clientWidth), height: 170 };
  }

  draw() {
    this.plot?.destroy();
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const strokes = ["--one", "--two", "--three"].map(colour), dashes = [[], [8, 4], [2, 3]];
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    const series = this.names.map((label, i) => ({ label, stroke: strokes[i], dash: dashes[i], width: 2, points: { show: false } }));
    this.plot = new uPlot({ ...this.size(), series: [{}, ...series], axes: [{ ...axis, values: (_, marks) => marks.map((at) => clock(at).slice(0, 5)) }, { ...axis, size: 88, ...(this.steps ? { incrs: this.steps } : {}), values: (_, marks) => marks.map(this.write) }],
      scales: { x: { range: () => [(this.data[0].at(-1) ?? Date.now() / 1000) - SPAN_S, this.data[0].at(-1) ?? Date.now() / 1000] }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : this.least] } }, cursor: { show: false }, legend: { live: false, markers: { width: 3, dash: (_, i) => ["solid", "dashed", "dotted"][i - 1] } } }, this.data, this.element);
    this.element.querySelector("canvas")?.setAttribute("aria-hidden", "true");
  }

  add(time, values, keep = 300) {
    this.data.forEach((column, i) => {
      column.push(i ? values[i - 1] : time);
      if (column.length > keep) column.shift();
    });
    this.plot.setData(this.data);
  }
}
