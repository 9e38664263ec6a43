// Tables that keep their rows' places: what changes is text, so that a reader's place is not lost.

export function fill(table, caption, columns, rows, none) {
  table.replaceChildren();
  const head = table.createCaption();
  head.textContent = rows.length ? caption : `${caption}: ${none}`;
  if (!rows.length) return;
  const top = table.createTHead().insertRow();
  for (const { title, word } of columns) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = title;
    if (word) cell.className = "word";
    top.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    columns.forEach(({ get, word, meter }, i) => {
      const cell = i ? document.createElement("td") : document.createElement("th");
      if (!i) cell.scope = "row";
      const found = get(row);
      const { text, kind } = typeof found === "object" && found !== null ? found : { text: found, kind: "" };
      cell.textContent = text;
      cell.className = [word ? "word" : "", kind ?? ""].join(" ").trim();
      const part = meter?.(row);
      if (part !== undefined && part !== null) cell.append(bar(part));
      line.append(cell);
    });
  }
}

function bar(part) {
  const outer = document.createElement("span"), inner = document.createElement("i");
  outer.className = "meter";
  outer.setAttribute("aria-hidden", "true");
  inner.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  outer.append(inner);
  return outer;
}
