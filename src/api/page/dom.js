// Making elements, and numbers as people read them. All text is put in as text, never as markup.

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, attributes, children);
  return element;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
}

const count = (number) => Math.round(number).toLocaleString("en");

function bytes(number) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; number >= 1024 && unit < units.length - 1; unit++) number /= 1024;
  return `${unit && number < 100 ? number.toFixed(1) : count(number)} ${units[unit]}`;
}

function seconds(number) {
  if (number < 0.0995) return `${count(number * 1000)} ms`;
  if (number < 60) return `${number.toFixed(number < 10 ? 2 : 1)} s`;
  return age(number);
}

function age(number) {
  if (number < 60) return `${count(number)} s`;
  if (number < 3600) return `${count(number / 60)} min`;
  if (number < 2 * 86400) return `${(number / 3600).toFixed(1)} h`;
  return `${count(number / 86400)} days`;
}

const rate = (number) => (number > 0 && number < 9.95 ? number.toFixed(1) : count(number));
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "0 %");
const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

const SOURCES = {
  live: "the live session of the slot",
  checkpoint: "a checkpoint of the slot",
  root: "a system prompt kept apart",
  slot: "another slot",
  parked: "a parked conversation",
  disk: "the disk",
  none: "nothing",
};

// Set the parts of a bar: [class, share of the whole]. What they leave stays empty.
function setBar(bar, parts) {
  const rest = 1 - parts.reduce((sum, [, share]) => sum + share, 0);
  [...parts, ["rest", Math.max(0, rest)]].forEach(([kind, share], index) => {
    const part = bar.children[index] ?? bar.appendChild(make("span"));
    part.className = kind;
    part.hidden = share <= 0;
    part.style.flexGrow = share;
  });
}

// A table. columns: [heading, is a number]. Each cell is text or an element.
function table(columns, rows, empty, caption) {
  if (!rows.length) return make("p", { class: "quiet" }, empty);
  const kind = (index) => (columns[index][1] ? "number" : null);
  const heads = columns.map(([name], index) => make("th", { scope: "col", class: kind(index) }, name));
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((cell, index) =>
      index ? make("td", { class: kind(index) }, cell) : make("th", { scope: "row" }, cell))));
  return make("div", { class: "table" },
    make("table", {},
      make("caption", { class: "hidden" }, caption),
      make("thead", {}, make("tr", {}, ...heads)),
      make("tbody", {}, ...body)));
}

// Put new content in, unless it says the same. A button that has the focus keeps it, by its data-name.
function show(place, ...content) {
  const next = make("div", {}, ...content);
  if (next.innerHTML === place.innerHTML) return;
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.name : undefined;
  place.replaceChildren(...next.childNodes);
  if (focused) place.querySelector(`[data-name="${CSS.escape(focused)}"]`)?.focus();
}
