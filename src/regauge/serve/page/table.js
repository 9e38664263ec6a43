// Tables whose rows keep their places from look to look: only what has changed is written, so that a reader's focus and selection stay.

export function fill(table, caption, columns, rows, none, key = (_, at) => String(at)) {
  (table.caption ?? table.createCaption()).textContent = rows.length ? caption : `${caption}: ${none}`;
  if (!rows.length) {
    table.tHead?.remove();
    table.tBodies[0]?.remove();
    return;
  }
  if (!table.tHead) head(table, columns);
  const body = table.tBodies[0] ?? table.createTBody();
  const known = new Map([...body.rows].map((line) => [line.dataset.key, line]));
  rows.forEach((row, at) => {
    const name = key(row, at), line = known.get(name) ?? made(columns, name);
    known.delete(name);
    if (body.rows[at] !== line) body.insertBefore(line, body.rows[at] ?? null);
    columns.forEach((column, i) => write(line.cells[i], column, row));
  });
  for (const line of known.values()) line.remove();
}

function head(table, columns) {
  const top = table.createTHead().insertRow();
  for (const { title, word, long } of columns) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = title;
    if (word || long) cell.className = "word";
    top.append(cell);
  }
}

function made(columns, name) {
  const line = document.createElement("tr");
  line.dataset.key = name;
  columns.forEach((_, i) => {
    const cell = document.createElement(i ? "td" : "th");
    if (!i) cell.scope = "row";
    line.append(cell);
  });
  return line;
}

// `get` gives a text, or {text, kind, href}; `meter` a part of one, or null.
function write(cell, { get, word, long, meter }, row) {
  const found = get(row), { text, kind = "", href } = typeof found === "object" && found !== null ? found : { text: found };
  const part = meter?.(row) ?? null;
  const now = JSON.stringify([text, kind, href, part]);
  if (cell.dataset.now === now) return;
  cell.dataset.now = now;
  cell.className = [word ? "word" : long ? "word long" : "", kind].join(" ").trim();
  const link = cell.querySelector("a");
  if (href && link) {
    link.href = href;
    link.textContent = text;
  } else if (href) {
    const made = document.createElement("a");
    made.href = href;
    made.textContent = text;
    cell.replaceChildren(made);
  } else cell.textContent = text;
  if (part !== null) cell.append(bar(part));
}

function bar(part) {
  const outer = document.createElement("span"), inner = document.createElement("i");
  outer.className = "meter";
  outer.setAttribute("aria-hidden", "true");
  inner.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  outer.append(inner);
  return outer;
}
