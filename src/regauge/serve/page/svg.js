// Elements of a drawing.

const SPACE = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, typeof value === "number" ? Math.round(value * 10) / 10 : value);
  made.append(...children);
  return made;
}

export function label(x, y, text, attributes = {}) {
  return element("text", { x, y, ...attributes }, text);
}

// Names differ at their ends: what is cut out is the middle.
export function cut(text, most) {
  if (text.length <= most) return text;
  const first = Math.floor((most - 1) / 3);
  return `${text.slice(0, first)}…${text.slice(text.length - (most - 1 - first))}`;
}
