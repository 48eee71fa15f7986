"use strict";
/* Shared: the data, elements, colours and shapes, definitions on hover, one kind of chart. */
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const within = (id, selector) => $(id).querySelector(selector);
const unique = values => [...new Set(values)];
const present = value => value !== null && value !== undefined;
const several = key => unique(data.rows.map(row => row[key])).length > 1;
function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) { const name = key(item); if (!groups.has(name)) groups.set(name, []); groups.get(name).push(item); }
  return groups;
}

/* Elements: text always goes in as text, never as markup. */
function put(node, attributes, ...children) {
  for (const [name, value] of Object.entries(attributes ?? {})) if (present(value) && value !== false) node.setAttribute(name, value);
  node.append(...children.flat(2).filter(present));
  return node;
}
const el = (tag, attributes, ...children) => put(document.createElement(tag), attributes, ...children);
const svg = (tag, attributes, ...children) => put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, ...children);
const hover = text => svg("title", {}, text);
const option = (value, label) => el("option", { value }, label ?? value);

/* A drafter has one colour and one shape everywhere, a temperature one dash. */
const names = unique(data.rows.map(row => row.text.drafter));
const temperatures = unique(data.rows.map(row => row.temperature)).sort((a, b) => a - b);
const color = row => `var(--c${names.indexOf(row.text.drafter) % 8})`;
const dash = row => ["none", "6 4", "2 3", "9 3 2 3"][temperatures.indexOf(row.temperature) % 4];
const OUTLINES = ["M-4,0 A4,4 0 1 1 4,0 A4,4 0 1 1 -4,0Z", "M-4,-4H4V4H-4Z", "M0,-5L5,4H-5Z", "M0,-5.5L5,0L0,5.5L-5,0Z", "M0,5L5,-4H-5Z",
  "M-5,-2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z"];
const outline = row => OUTLINES[names.indexOf(row.text.drafter) % OUTLINES.length];
const point = (row, x, y, title) => svg("path", { d: outline(row), transform: `translate(${x},${y})`, fill: color(row), stroke: "var(--card)", "stroke-width": 1 }, hover(title));
const mark = row => svg("svg", { viewBox: "-6 -6 12 12", class: "mark", "aria-hidden": "true" }, svg("path", { d: outline(row), fill: color(row) }));
const setting = { task: row => row.task, temperature: row => `T=${row.temperature}`, batch_size: row => `batch ${row.batch_size}`, num_draft_tokens: row => `K=${row.num_draft_tokens}`, settings: row => row.settings };
const place = (row, keys = Object.keys(setting)) => keys.map(key => setting[key](row)).filter(present).join(", ");
const caption = (row, keys) => el("div", {}, mark(row), row.text.drafter, el("small", {}, place(row, keys)));
const decoded = row => JSON.stringify(row.compared_at); // all settings that are not themselves compared
const comparable = row => [row.target, row.task, row.task_hash, row.version, row.hardware, decoded(row)].join("|");

const PARTS = ["draft", "verify", "sampling", "bookkeeping", "other"];
const total = row => PARTS.some(part => present(row.split[part])) ? PARTS.reduce((sum, part) => sum + (row.split[part] ?? 0), 0) : null;
const times = (value, digits = 2) => `${value.toFixed(digits)}x`;

function legend(node, rows, extra = []) {
  const drafters = [...groupBy(rows, row => row.text.drafter)].map(([name, members]) => el("span", {}, mark(members[0]), name));
  node.replaceChildren(...drafters, ...extra);
}
function line(stroke, pattern, label) {
  return el("span", {}, svg("svg", { viewBox: "0 0 26 8", class: "line", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke, "stroke-width": 2.5, "stroke-dasharray": pattern })), label);
}
const dashes = rows => {
  const here = temperatures.filter(t => rows.some(row => row.temperature === t));
  return here.length > 1 ? here.map(t => line("var(--muted)", dash({ temperature: t }), `T=${t}`)) : [];
};

/* Charts beyond the sixth wait behind a button. */
function fill(section, charts, limit = 6) {
  const grid = within(section, ".grid");
  grid.nextElementSibling?.remove();
  grid.replaceChildren(...charts.slice(0, limit));
  $(section).hidden = charts.length === 0;
  if (charts.length <= limit) return;
  const button = el("button", { type: "button", class: "more" }, `show all ${charts.length}`);
  button.addEventListener("click", () => { grid.replaceChildren(...charts); button.remove(); });
  grid.after(button);
}

function niceStep(least) {
  const unit = 10 ** Math.floor(Math.log10(least) + 1e-9);
  return unit * [1, 2, 2.5, 5, 10].find(part => part * unit >= least * (1 - 1e-9));
}
/* ticks: [[x, label]]; y from bottom to top; lines: {row, points: [{x, y, low, high, title}], dash, bare};
   levels: [{y, stroke, title}] run across. */
function chart({ label, ticks, bottom = 0, top, xTitle, format, lines, levels = [], extra = null, size = [360, 210] }) {
  const [width, height] = size, left = 40, base = height - 34, right = width - 10;
  const step = niceStep((top - bottom) / 5), digits = (String(+step.toPrecision(3)).split(".")[1] ?? "").length;
  const steps = Math.ceil((top - bottom) / step - 1e-9);
  top = bottom + steps * step;
  const from = ticks[0][0], span = ticks[ticks.length - 1][0] - from || 1;
  const x = value => left + (right - left) * (value - from) / span, y = value => base - (base - 8) * (value - bottom) / (top - bottom || 1);
  const frame = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (let i = 0; i <= steps; i += 1) {
    const value = bottom + i * step;
    frame.append(svg("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "axis" }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value, digits)));
  }
  for (const [value, text] of ticks) frame.append(svg("text", { x: x(value), y: base + 15, "text-anchor": "middle" }, text));
  frame.append(svg("text", { x: right, y: height - 4, "text-anchor": "end" }, xTitle));
  for (const level of levels) frame.append(svg("line", { x1: left, x2: right, y1: y(level.y), y2: y(level.y), stroke: level.stroke ?? "var(--muted)", "stroke-width": 1.5, "stroke-dasharray": level.dash ?? "4 3" }, hover(level.title)));
  for (const { row, points, dash: pattern, bare } of lines) {
    if (pattern) frame.append(svg("polyline", { points: points.map(p => `${x(p.x)},${y(p.y)}`).join(" "), fill: "none", stroke: color(row), "stroke-width": 2, "stroke-dasharray": pattern }, hover(row.text.drafter)));
    if (bare) continue;
    for (const p of points) {
      if (present(p.low)) frame.append(svg("line", { x1: x(p.x), x2: x(p.x), y1: y(Math.max(p.low, bottom)), y2: y(Math.min(p.high, top)), stroke: color(row), "stroke-width": 3, "stroke-opacity": .4, "stroke-linecap": "round" }));
      frame.append(point(row, x(p.x), y(p.y), p.title));
    }
  }
  if (extra) frame.append(extra(x, y));
  return frame;
}
const figure = (title, node) => el("div", {}, el("h3", {}, title), node);
const above = (values, least) => 1.02 * Math.max(least, ...values.filter(present));

/* Definitions: on hover, on focus, on touch; Escape puts them away. */
const tip = $("tip");
let tipped = null;
function showTip(node) {
  if (node === tipped) return;
  tipped?.removeAttribute("aria-describedby");
  tipped = node;
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = node.dataset.tip;
  node.setAttribute("aria-describedby", "tip");
  const box = node.getBoundingClientRect(), room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(box.left, room)) + scrollX}px`;
  tip.style.top = `${(box.top > tip.offsetHeight + 8 ? box.top - tip.offsetHeight - 6 : box.bottom + 6) + scrollY}px`;
}
for (const event of ["mouseover", "focusin", "click"]) document.addEventListener(event, e => {
  const node = e.target.closest?.("[data-tip]") ?? null;
  if (node || event !== "focusin") showTip(node);
});
document.addEventListener("focusout", () => showTip(null));
document.addEventListener("keydown", e => { if (e.key === "Escape") showTip(null); });
