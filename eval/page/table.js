/* Filters, the table, and what to serve. */
const FILTERS = [["target", "Target"], ["task", "Task"], ["temperature", "Temperature"], ["batch_size", "Batch size"], ["num_draft_tokens", "Drafted K"],
  ["drafter", "Drafter"], ["verification", "Verification"], ["engine", "Engine"], ["hardware", "Hardware"], ["settings", "Settings"]];
const filters = {};
const filterText = (row, key) => key === "drafter" ? row.text.drafter : String(row[key] ?? "usual");
for (const [key, title] of FILTERS) {
  const values = unique(data.rows.map(row => filterText(row, key)));
  if (values.length < 2) continue;
  if (values.every(value => Number.isFinite(Number(value)))) values.sort((a, b) => a - b);
  filters[key] = el("select", { id: `filter-${key}` }, option("", "all"), values.map(value => option(value)));
  filters[key].addEventListener("change", draw);
  $("filters").append(el("label", { class: "field" }, title, filters[key]));
}
$("filters").addEventListener("submit", event => event.preventDefault());
const shown = () => data.rows.filter(row => Object.entries(filters).every(([key, select]) => !select.value || filterText(row, key) === select.value));

/* Columns: settings that all rows share are said once above; detail waits behind a box. */
const CONTEXT = new Set(["temperature", "batch_size", "num_draft_tokens", "settings"]);
const LEFT = new Set(["drafter", "task", "target", "settings", "lossless"]), WIDE = new Set(["settings", "ms_per_round", "lossless"]);
const extraColumns = [["target", "Target", "The model that the drafter drafts for."], ["task", "Task", "The set of prompts."]].map(([key, title, definition]) => ({ key, title, definition, main: true }));
const columns = data.columns.filter(column => !CONTEXT.has(column.key) || several(column.key));
columns.splice(1, 0, ...extraColumns.filter(column => several(column.key)));
const visible = () => columns.filter(column => column.main || $("all-columns").checked);
const smallerFirst = key => LEFT.has(key) || CONTEXT.has(key) || ["ms_per_round", "trained_tokens", "train_minutes", "cost_ratio"].includes(key);

let sort = { key: null, down: true };
function sortValue(row, key) {
  if (key === "ms_per_round") return total(row);
  if (key === "lossless") return row.pit_p_value ?? null;
  return key === "drafter" ? row.text.drafter : row[key] ?? null;
}
function sorted(rows) {
  if (!sort.key) return rows;
  return [...rows].sort((first, second) => {
    const a = sortValue(first, sort.key), b = sortValue(second, sort.key);
    if (a === null || b === null) return (a === null) - (b === null);
    return (a < b ? -1 : a > b ? 1 : 0) * (sort.down ? -1 : 1);
  });
}
function sortBy(key, down) {
  sort = { key: key || null, down };
  phoneSort.value = sort.key ?? "";
  const title = columns.find(column => column.key === sort.key)?.title;
  $("sorted").textContent = title ? `Sorted by ${title}, ${down ? "largest" : "smallest"} first.` : "";
  drawHead(); drawTable();
}
const phoneSort = el("select", {}, option("", "default order"), columns.map(column => option(column.key, column.title)));
phoneSort.addEventListener("change", () => sortBy(phoneSort.value, !smallerFirst(phoneSort.value)));
$("filters").append(el("label", { class: "field mobile" }, "Sort by", phoneSort));
$("all-columns").addEventListener("change", () => { drawHead(); drawTable(); });

function drawHead() {
  const focused = document.activeElement?.closest?.("#board th")?.dataset.key;
  $("board").tHead.replaceChildren(el("tr", {}, visible().map(column => {
    const button = el("button", { type: "button", "data-tip": column.definition }, column.title);
    button.addEventListener("click", () => sortBy(column.key, sort.key === column.key ? !sort.down : !smallerFirst(column.key)));
    const direction = column.key === sort.key ? (sort.down ? "descending" : "ascending") : null;
    return el("th", { scope: "col", "data-key": column.key, "aria-sort": direction, class: LEFT.has(column.key) ? "left" : null }, button);
  })));
  if (focused) $("board").querySelector(`th[data-key="${focused}"] button`)?.focus();
}
function bar(row, share) {
  return el("div", { class: "bar", style: share === null ? null : `width:${share}%` }, PARTS.filter(part => row.split[part]).map(part => el("i", {
    class: part, style: `flex:${row.split[part]}`, title: `${part}: ${row.split[part].toFixed(2)} ms` })));
}
const broken = row => {
  const [same, checked] = (row.greedy_identical ?? "0/0").split("/");
  return same !== checked || row.certificate?.verdict === "failed" || (present(row.pit_p_value) && row.pit_p_value < 0.001);
};
function cell(row, column) {
  const text = row.text[column.key] ?? String(row[column.key]), body = el("div");
  if (column.key === "drafter") return el("th", { scope: "row" }, mark(row), text);
  const classes = [LEFT.has(column.key) ? "left" : "", WIDE.has(column.key) ? "wide" : "", text === "n/a" ? "none" : ""];
  if (column.key === "lossless") {
    const run = text.split(/, (?=PIT|certificate)/).filter(part => !part.endsWith(" n/a"));
    for (const part of run.length ? run : ["not tested"]) body.append(el("small", {}, part));
    if (broken(row)) { classes.push("warn"); body.prepend("not lossless"); }
  } else if (column.key === "ms_per_round") {
    const ms = total(row);
    body.append(ms === null ? "n/a" : ms.toFixed(1));
    if (ms !== null) body.append(bar(row, null), $("all-columns").checked ? el("small", {}, text) : "");
  } else {
    const [value, interval] = text.split(/ (?=[[(])/);
    body.append(value, ...(interval ? [el("small", {}, interval)] : []));
  }
  if (column.key === "tau" || column.key === "speedup") classes.push("strong");
  const card = matchMedia("(max-width: 760px)").matches;
  return el("td", { class: classes.join(" ").trim() || null, "data-label": column.title, "data-tip": card ? column.definition : null }, body);
}
function drawTable() {
  const rows = sorted(shown()), group = row => [row.target, row.task, row.temperature, row.batch_size, row.settings].join();
  const lines = rows.map((row, i) => el("tr", { class: !sort.key && i && group(row) !== group(rows[i - 1]) ? "group" : null }, visible().map(column => cell(row, column))));
  $("board").tBodies[0].replaceChildren(...(lines.length ? lines : [el("tr", {}, el("td", { colspan: visible().length, class: "left none" }, "No result matches these filters."))]));
}

/* What to serve: the fastest of each group, and how sure that is. */
const overlaps = (a, b) => a.speedup_ci95 && b.speedup_ci95 && a.speedup_ci95[1] >= b.speedup_ci95[0] && b.speedup_ci95[1] >= a.speedup_ci95[0];
function verdict(best) {
  if (!best.speedup_ci95) return best.speedup > 1 ? "Faster than the target alone, but no interval says how surely." : "Serve the target alone: no drafter is faster.";
  const [low, high] = best.speedup_ci95;
  if (low > 1) return "Faster than the target alone.";
  return high < 1 ? "Serve the target alone: every drafter is slower." : "Not told apart from the target alone: the interval holds 1x.";
}
function serveCard(members) {
  const ranked = members.filter(row => present(row.speedup) && !broken(row)).sort((a, b) => b.speedup - a.speedup);
  const title = el("h3", {}, place(members[0], ["task", "temperature", "batch_size", "settings"]));
  const refused = members.filter(broken).map(row => el("div", { class: "warn" }, `${row.text.drafter}, K=${row.num_draft_tokens}: not lossless, do not serve.`));
  if (!ranked.length) return el("div", { class: "card" }, title, el("div", { class: "none" }, "No lossless row with a speedup."), refused);
  const [best, ...rest] = ranked, ties = rest.filter(row => overlaps(best, row));
  const [value, interval] = best.text.speedup.split(/ (?=\[)/), better = best.best_num_draft_tokens;
  return el("div", { class: "card" }, title,
    el("div", {}, el("span", { class: "big" }, value), " ", el("span", { class: "note" }, interval ?? "")),
    el("div", {}, mark(best), el("b", {}, best.text.drafter), `, K=${best.num_draft_tokens}`),
    el("div", {}, verdict(best)),
    ties.length ? el("div", { class: "note" }, `Within noise of it: ${unique(ties.map(row => `${row.text.drafter}, K=${row.num_draft_tokens}`)).join("; ")}.`) : null,
    present(better) && better > 0 && better !== best.num_draft_tokens ? el("div", { class: "note" }, `Predicted best: K=${better}. Measure that too.`) : null, refused);
}
const drawServe = rows => fill("serve", [...groupBy(rows, row => [comparable(row), row.temperature, row.batch_size].join("|")).values()].map(serveCard), 8);
