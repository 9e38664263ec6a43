// Figures of one or two looks: sums of series, rates, percentiles of a histogram's growth. Pure; `tests/real_browser` compares it with Python's.

export function all(metrics, name, wanted = {}) {
  const keys = Object.keys(wanted);
  return (metrics[name] ?? []).filter(({ labels }) => keys.every((key) => labels[key] === wanted[key]));
}

export function sum(metrics, name, wanted = {}) {
  return all(metrics, name, wanted).reduce((total, { value }) => total + value, 0);
}

// Both ends of a rate are of one counter by one clock; what went back, or no time, says nothing.
export function rate(before, after, seconds) {
  return before === undefined || after < before || !(seconds > 0) ? null : (after - before) / seconds;
}

// What a counter has grown by; null where it went back.
export function grown(before, after) {
  return after < before ? null : after - before;
}

export function buckets(metrics, name) {
  const found = new Map();
  for (const { labels, value } of metrics[`${name}_bucket`] ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    found.set(bound, (found.get(bound) ?? 0) + value);
  }
  return found;
}

// As PromQL's histogram_quantile: linear within a bucket; null where nothing came between the looks, or a counter went back.
export function quantile(q, before, after) {
  const counts = [...after.keys()].sort((a, b) => a - b).map((bound) => [bound, after.get(bound) - (before?.get(bound) ?? 0)]);
  if (!counts.length || counts.some(([, count], i) => count < (i ? counts[i - 1][1] : 0))) return null;
  const total = counts[counts.length - 1][1];
  if (total <= 0) return null;
  const rank = q * total;
  const at = counts.findIndex(([, count]) => count >= rank);
  const [upper, count] = counts[at];
  const [lower, below] = at ? counts[at - 1] : [0, 0];
  if (upper === Infinity) return lower;
  return count === below ? upper : lower + ((upper - lower) * (rank - below)) / (count - below);
}
