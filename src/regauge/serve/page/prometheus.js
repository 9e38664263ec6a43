// What a scrape says: series by name, differences of two scrapes, percentiles of a histogram's differences.
// The gateway's /metrics is the page's only source of figures, so that both say the same.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(["\\])/g, "$1");
    if (!series.has(found[1])) series.set(found[1], []);
    series.get(found[1]).push({ labels, value: Number(found[3].replace("+Inf", "Infinity")) });
  }
  return series;
}

export function all(series, name) {
  return series.get(name) ?? [];
}

export function sum(series, name, wanted = {}) {
  return all(series, name).filter((each) => Object.entries(wanted).every(([key, value]) => each.labels[key] === value))
    .reduce((total, each) => total + each.value, 0);
}

// Both ends of a rate are of one counter of one process; what went back says nothing.
export function rate(before, after, seconds) {
  return before === undefined || after < before || seconds <= 0 ? null : (after - before) / seconds;
}

export function buckets(series, name) {
  const found = new Map();
  for (const { labels, value } of all(series, `${name}_bucket`)) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    found.set(bound, (found.get(bound) ?? 0) + value);
  }
  return found;
}

// As PromQL's histogram_quantile: linear within a bucket; null where nothing came between the scrapes, or a counter went back.
export function quantile(q, before, after) {
  const grown = [...after.keys()].sort((a, b) => a - b).map((bound) => [bound, after.get(bound) - (before?.get(bound) ?? 0)]);
  if (!grown.length || grown.some(([, count], i) => count < (i ? grown[i - 1][1] : 0))) return null;
  const total = grown[grown.length - 1][1];
  if (total <= 0) return null;
  const rank = q * total;
  const at = grown.findIndex(([, count]) => count >= rank);
  const [upper, count] = grown[at];
  const [lower, below] = at ? grown[at - 1] : [0, 0];
  if (upper === Infinity) return lower;
  return count === below ? upper : lower + ((upper - lower) * (rank - below)) / (count - below);
}
