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

export function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
