// Figures as people read them.

export function bytes(count) {
  if (count === null || count === undefined) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${at ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
}

export function perSecond(value) {
  return value === null || value === undefined ? "-" : `${bytes(value)}/s`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (value === 0) return "0 s";
  if (Math.abs(value) < 0.001) return `${Math.round(value * 1e6)} µs`;
  return value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

export function share(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  return value > 0 && value < 0.0005 ? "under 0.1 %" : `${(100 * value).toFixed(1)} %`;
}

export function whole(value) {
  if (value === null || value === undefined) return "-";
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(2);
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");
}
