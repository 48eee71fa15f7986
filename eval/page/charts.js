/* Charts of the rows that the filters leave. */
function drawSpeedups(rows) {
  rows = rows.filter(row => present(row.speedup) || present(row.predicted_speedup));
  const top = 1.05 * Math.max(1.2, ...rows.flatMap(row => [row.speedup, row.predicted_speedup, ...(row.speedup_ci95 ?? [])]).map(value => value ?? 0));
  const at = value => `${100 * value / top}%`;
  $("speedups").hidden = rows.length === 0;
  within("speedups", ".rows").replaceChildren(...rows.map(row => {
    const plot = svg("svg", { height: 20, style: "height:20px", role: "img", "aria-label": `measured ${row.text.speedup}, predicted ${row.text.predicted_speedup}` },
      svg("line", { x1: 0, x2: "100%", y1: 10, y2: 10, class: "axis" }), svg("line", { x1: at(1), x2: at(1), y1: 0, y2: 20, stroke: "var(--muted)" }));
    if (row.speedup_ci95) plot.append(svg("line", { x1: at(row.speedup_ci95[0]), x2: at(row.speedup_ci95[1]), y1: 10, y2: 10, stroke: color(row), "stroke-width": 4, "stroke-opacity": .5, "stroke-linecap": "round" }));
    if (present(row.speedup)) plot.append(svg("circle", { cx: at(row.speedup), cy: 10, r: 4.5, fill: color(row) }, hover(`measured ${row.text.speedup}`)));
    if (present(row.predicted_speedup)) plot.append(svg("circle", { cx: at(row.predicted_speedup), cy: 10, r: 7, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5 }, hover(`predicted ${row.text.predicted_speedup}`)));
    return el("div", {}, caption(row), el("div", {}, plot), el("div", {}, row.text.speedup.split(" ")[0]));
  }));
}
function drawSplits(rows) {
  rows = rows.filter(total);
  const scale = Math.max(...rows.map(total));
  $("splits").hidden = rows.length === 0;
  within("splits", ".legend").replaceChildren(...PARTS.filter(part => rows.some(row => present(row.split[part]))).map(part => el("span", {}, el("i", { class: `swatch ${part}` }), part)));
  within("splits", ".rows").replaceChildren(...rows.map(row => el("div", {}, caption(row), el("div", {}, bar(row, 100 * total(row) / scale)), el("div", {}, `${total(row).toFixed(1)} ms`))));
}
const alone = { y: 1, title: "the target alone" };
const measured = (row, x, key) => ({ x, y: row[key], low: row[`${key}_ci95`]?.[0], high: row[`${key}_ci95`]?.[1], title: `${row.text.drafter}, ${place(row)}: ${row.text[key]}` });

/* Speedup against the number drafted: the curve of the row that drafted most knows most positions. */
function drawDrafted(rows) {
  const groups = [...groupBy(rows.filter(row => present(row.speedup)), row => [comparable(row), row.temperature, row.batch_size].join("|")).values()];
  const charts = groups.filter(members => members.some(row => row.predicted_curve?.length) || unique(members.map(row => row.num_draft_tokens)).length > 1);
  legend(within("drafted", ".legend"), charts.flat(), charts.length ? [line("var(--muted)", "5 4", "predicted")] : []);
  fill("drafted", charts.map(members => {
    const lines = [...groupBy(members, row => row.text.drafter).values()].flatMap(arm => {
      const widest = arm.filter(row => row.predicted_curve?.length).sort((a, b) => b.num_draft_tokens - a.num_draft_tokens)[0];
      const curve = widest ? [{ row: widest, bare: true, dash: "5 4", points: widest.predicted_curve.map(p => ({ x: p.num_draft_tokens, y: p.speedup })) }] : [];
      return [...curve, { row: arm[0], points: arm.map(row => measured(row, row.num_draft_tokens, "speedup")) }];
    });
    const longest = Math.max(2, ...lines.flatMap(l => l.points.map(p => p.x))), step = Math.ceil(longest / 10);
    const ticks = [...Array(longest).keys()].map(i => i + 1).map(k => [k, (k - 1) % step ? "" : String(k)]);
    const title = place(members[0], ["task", "temperature", "batch_size", "settings"]);
    return figure(title, chart({ label: `Speedup against the number of drafted tokens, ${title}`, ticks, top: above(lines.flatMap(l => l.points.flatMap(p => [p.y, p.high])), 1.2), xTitle: "K, tokens drafted a round", format: times, lines, levels: [alone] }));
  }));
}

function drawBatches(rows) {
  const key = $("batch-metric").value;
  const swept = [...groupBy(rows.filter(row => present(row[key])), row => [comparable(row), row.temperature, row.text.drafter, row.num_draft_tokens].join("|")).values()].filter(arm => unique(arm.map(row => row.batch_size)).length > 1);
  const groups = [...groupBy(swept, ([row]) => [comparable(row), row.temperature].join("|")).values()];
  legend(within("batches", ".legend"), swept.flat(), key === "speedup" ? [] : [line("var(--muted)", "4 3", "target alone")]);
  fill("batches", groups.map(arms => {
    const members = arms.flat(), sizes = unique(members.map(row => row.batch_size)).sort((a, b) => a - b);
    for (const arm of arms) arm.sort((a, b) => a.batch_size - b.batch_size);
    const lines = arms.map(arm => ({ row: arm[0], dash: "none", points: arm.map(row => measured(row, Math.log2(row.batch_size), key)) }));
    const plain = [...groupBy(members, row => row.batch_size)].filter(([, found]) => present(found[0].baseline_tokens_per_second)).sort(([a], [b]) => a - b).map(([size, found]) => [Math.log2(size), found[0].baseline_tokens_per_second]);
    const baseline = key === "speedup" ? null : (x, y) => svg("polyline", { points: plain.map(([a, b]) => `${x(a)},${y(b)}`).join(" "), fill: "none", stroke: "var(--muted)", "stroke-width": 2, "stroke-dasharray": "4 3" }, hover("the target alone"));
    const title = place(members[0], ["task", "temperature", "settings"]), values = lines.flatMap(l => l.points.flatMap(p => [p.y, p.high]));
    return figure(title, chart({ label: `${key === "speedup" ? "Speedup" : "Tokens/s"} against batch size, ${title}`, ticks: sizes.map(size => [Math.log2(size), String(size)]), top: above(key === "speedup" ? values : [...values, ...plain.map(p => p[1])], 1.2),
      xTitle: "batch size", format: key === "speedup" ? times : (value, digits) => value.toFixed(digits), lines, levels: key === "speedup" ? [alone] : [], extra: baseline }));
  }));
}
$("batch-metric").addEventListener("change", () => drawBatches(shown()));

function drawSurvival(rows) {
  rows = rows.filter(row => row.survival?.length);
  legend(within("survival", ".legend"), rows, dashes(rows));
  fill("survival", [...groupBy(rows, row => [row.target, row.task, decoded(row)].join("|")).values()].map(members => {
    const title = place(members[0], ["task", "settings"]), longest = Math.max(...members.map(row => row.survival.length));
    const lines = members.map(row => ({ row, dash: dash(row), points: [1, ...row.survival].map((share, i) => ({ x: i, y: share, title: `${row.text.drafter}, ${place(row)}: ${(100 * share).toFixed(1)}% at i = ${i}` })) }));
    const step = Math.ceil(longest / 12), ticks = [...Array(longest + 1).keys()].map(i => [i, i % step ? "" : String(i)]);
    return figure(title, chart({ label: `Survival by position, ${title}`, ticks, top: 1, xTitle: "i, proposed tokens accepted", format: value => `${Math.round(100 * value)}%`, lines }));
  }));
}

/* Cost on a logarithmic axis; what needs no training runs across. */
const COSTS = { trained_tokens: ["trained tokens", row => row.trained_tokens], train_minutes: ["hours of training", row => present(row.train_minutes) ? row.train_minutes / 60 : null] };
const short = value => value >= 1e9 ? `${value / 1e9}G` : value >= 1e6 ? `${value / 1e6}M` : value >= 1e3 ? `${value / 1e3}k` : String(+value.toPrecision(3));
function drawCosts(rows) {
  const [xTitle, cost] = COSTS[$("cost-metric").value];
  rows = rows.filter(row => present(row.tau));
  const paid = rows.filter(row => cost(row) > 0), chosen = rows.filter(row => cost(row) > 0 || row.trained_tokens === 0);
  legend(within("costs", ".legend"), paid.length ? chosen : []);
  const groups = [...groupBy(chosen, row => [row.target, row.task, row.temperature, decoded(row)].join("|")).values()].filter(members => members.some(row => cost(row) > 0));
  fill("costs", groups.map(members => {
    const logs = members.filter(row => cost(row) > 0).map(row => Math.log10(cost(row))), from = Math.floor(Math.min(...logs)), to = Math.max(from + 1, Math.ceil(Math.max(...logs)));
    const lines = members.filter(row => cost(row) > 0).map(row => ({ row, points: [measured(row, Math.log10(cost(row)), "tau")] }));
    const levels = members.filter(row => row.trained_tokens === 0).map(row => ({ y: row.tau, stroke: color(row), title: `${row.text.drafter}, ${place(row)}: tau ${row.text.tau}` }));
    const ticks = [...Array(to - from + 1).keys()].map(i => [from + i, short(10 ** (from + i))]), title = place(members[0], ["task", "temperature", "settings"]);
    return figure(title, chart({ label: `tau against ${xTitle}, ${title}`, ticks, bottom: 1, top: above(members.flatMap(row => [row.tau, row.tau_ci95?.[1]]), 1.5), xTitle, format: (value, digits) => value.toFixed(digits), lines, levels }));
  }));
  $("costs").hidden = !data.rows.some(row => row.trained_tokens > 0 || row.train_minutes > 0);
}
if (!data.rows.some(row => row.train_minutes > 0)) within("costs", "label").hidden = true;
$("cost-metric").addEventListener("change", () => drawCosts(shown()));

/* tau by category and by turn, one table a task. */
function drawParts(rows) {
  rows = rows.filter(row => Object.keys(row.per_category ?? {}).length > 1 || (row.per_turn ?? []).length > 1);
  $("parts").hidden = rows.length === 0;
  within("parts", ".tables").replaceChildren(...[...groupBy(rows, row => `${row.target}|${row.task}`).values()].map(members => {
    const parts = row => new Map([...Object.entries(row.per_category ?? {}), ...(row.per_turn ?? []).map(turn => [`turn ${turn.turn}`, turn])]);
    const heads = unique(members.flatMap(row => [...parts(row).keys()]));
    const lines = members.map(row => el("tr", {}, el("th", { scope: "row" }, caption(row, ["temperature", "batch_size", "num_draft_tokens", "settings"])), heads.map(head => {
      const part = parts(row).get(head), interval = part?.tau_ci95;
      return el("td", {}, present(part?.tau) ? part.tau.toFixed(2) : "n/a", interval ? el("small", {}, `[${interval[0].toFixed(2)}, ${interval[1].toFixed(2)}]`) : null, present(part?.speedup) ? el("small", {}, times(part.speedup)) : null);
    })));
    return figure(members[0].task, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `tau by category, ${members[0].task}` },
      el("table", {}, el("thead", {}, el("tr", {}, [el("th", { class: "left", scope: "col" }, "Drafter"), heads.map(head => el("th", { scope: "col" }, head))])), el("tbody", {}, lines))));
  }));
}
