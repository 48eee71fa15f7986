/* What if: predicted speedup from alpha, c, v and K, as eval/theory.py has it with the target's step as the unit. */
function tokensPerRound(alpha, num) {
  let tokens = 1, survival = 1;
  for (let i = 0; i < num; i += 1) { survival *= alpha; tokens += survival; }
  return tokens;
}
const roundCost = (cost, verify, num, parallel) => (parallel ? cost : num * cost) + verify;
const predict = (alpha, cost, verify, num, parallel) => tokensPerRound(alpha, num) / roundCost(cost, verify, num, parallel);
const SLIDERS = ["alpha", "cost", "verify", "num"];
function drawPlayground() {
  const [alpha, cost, verify, num] = SLIDERS.map(id => Number($(id).value)), parallel = $("parallel").checked;
  for (const id of SLIDERS) $(id).nextElementSibling.textContent = id === "num" ? num : Number($(id).value).toFixed(id === "cost" ? 3 : 2);
  const most = Number($("num").max), counts = [...Array(most).keys()].map(i => i + 1), points = counts.map(k => ({ x: k, y: predict(alpha, cost, verify, k, parallel) }));
  const best = points.reduce((a, b) => b.y > a.y + 1e-12 ? b : a), here = predict(alpha, cost, verify, num, parallel);
  $("predicted").textContent = times(here);
  $("verdict").textContent = `${tokensPerRound(alpha, num).toFixed(2)} tokens a round, which costs ${roundCost(cost, verify, num, parallel).toFixed(2)} target steps. ` +
    (best.y <= 1 ? "No number of drafted tokens is faster than the target alone." : `Best up to K=${most}: K=${best.x} with ${times(best.y)}.`);
  $("curve").replaceChildren(chart({ label: `Predicted speedup for 1 to ${most} drafted tokens; ${times(here)} with ${num}`, ticks: counts.map(k => [k, String(k)]), top: above([best.y], 1.5), xTitle: "K, tokens drafted a round", format: times, size: [480, 250], levels: [alone], lines: [],
    extra: (x, y) => svg("g", {}, svg("polyline", { points: points.map(p => `${x(p.x)},${y(p.y)}`).join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 2 }),
      points.map(p => svg("circle", { cx: x(p.x), cy: y(p.y), r: 3, fill: "var(--accent)" }, hover(`K=${p.x}: ${times(p.y)}`))),
      svg("circle", { cx: x(num), cy: y(here), r: 8, fill: "none", stroke: "var(--ink)", "stroke-width": 2 })) }));
}
const startable = data.rows.filter(row => present(row.alpha) && present(row.split.draft) && present(row.split.verify) && row.baseline_ms_per_token && row.num_draft_tokens);
$("start").append(option("", startable.length ? "choose" : "no row has alpha and its times"), ...startable.map((row, i) => option(i, `${row.text.drafter}, ${place(row)}`)));
$("start").addEventListener("change", () => {
  const row = startable[$("start").value];
  if (!row) return;
  const wanted = { alpha: row.alpha, num: row.num_draft_tokens, cost: row.split.draft / row.num_draft_tokens / row.baseline_ms_per_token, verify: (total(row) - row.split.draft) / row.baseline_ms_per_token };
  for (const [id, value] of Object.entries(wanted)) {
    const slider = $(id);
    if (value > Number(slider.max)) slider.max = Math.ceil(value);
    if (value < Number(slider.min)) slider.min = Math.floor(10 * value) / 10;
    slider.value = value;
  }
  $("parallel").checked = false;
  drawPlayground();
});
for (const id of [...SLIDERS, "parallel"]) $(id).addEventListener("input", () => { $("start").value = ""; drawPlayground(); });

/* The rule: two distributions over a few tokens, dragged by their tops. */
const PRESETS = {
  "a fair drafter": [["the", "a", "this", "our", "no"], [.45, .25, .15, .1, .05], [.3, .4, .1, .05, .15]],
  "a good drafter": [["the", "a", "this", "our", "no"], [.5, .25, .15, .07, .03], [.46, .27, .17, .06, .04]],
  "overconfident": [["the", "a", "this", "our", "no"], [.4, .3, .15, .1, .05], [.92, .05, .01, .01, .01]],
  "of no use": [["the", "a", "this", "our", "no"], [.6, .35, .03, .01, .01], [.01, .02, .07, .3, .6]],
  "two tokens": [["yes", "no"], [.4, .6], [.7, .3]],
};
let tokens, laws, sliders = {}, highest = 1; // highest: what the bars' height stands for; it only grows while dragging
/* One probability takes a new value, the others share the rest in their old proportions. */
function setOne(law, i, value) {
  const wanted = Math.min(1, Math.max(0, value)), rest = law.reduce((sum, part, j) => sum + (j === i ? 0 : part), 0);
  return law.map((part, j) => j === i ? wanted : rest > 0 ? part * (1 - wanted) / rest : (1 - wanted) / (law.length - 1));
}
function rule({ p, q }) {
  const both = p.map((part, i) => Math.min(part, q[i])), alpha = both.reduce((a, b) => a + b, 0), left = p.map((part, i) => Math.max(0, part - q[i]));
  const residual = alpha < 1 - 1e-9 ? left.map(part => part / (1 - alpha)) : null;
  return { both, alpha, residual, emitted: both.map((part, i) => part + left[i]), naive: both.map((part, i) => part + (1 - alpha) * p[i]) };
}
function change(name, i, value) { laws[name] = setOne(laws[name], i, value); drawRule(); }
let dragged = null;
document.addEventListener("pointermove", event => {
  if (!dragged) return;
  const box = dragged.frame.getBoundingClientRect();
  change(dragged.name, dragged.i, highest * (BASE - (event.clientY - box.top) * 214 / box.height) / (BASE - 16));
});
for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => { dragged = null; });
const BASE = 190; // where the bars stand, of 214 units of height
function makeBars() {
  const width = 480, slot = width / tokens.length, thick = Math.min(64, slot * .62);
  const frame = svg("svg", { viewBox: `0 0 ${width} 214`, role: "group", "aria-label": "Bars of p and q" },
    svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("rect", { width: 6, height: 6, fill: "var(--good-bg)" }), svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, stroke: "var(--good)", "stroke-width": 3 }))),
    svg("line", { x1: 0, x2: width, y1: BASE, y2: BASE, class: "axis" }));
  sliders = { p: [], q: [], both: [], left: [] };
  tokens.forEach((token, i) => {
    const middle = slot * (i + .5), start = { p: middle - thick / 2 - 7, q: middle - thick / 2 + 7 };
    for (const name of ["p", "q"]) {
      const bar = svg("rect", { x: start[name], width: thick, fill: `var(--${name === "p" ? "c0" : "c1"})`, "fill-opacity": .3, stroke: `var(--${name === "p" ? "c0" : "c1"})`, "stroke-width": 1.5 });
      sliders[name].push({ bar }); frame.append(bar);
    }
    sliders.both.push(svg("rect", { x: start.q, width: thick - 14, fill: "url(#hatch)" })); sliders.left.push(svg("rect", { x: start.p, width: thick, fill: "var(--c0)", "fill-opacity": .75, class: "left-over" })); frame.append(sliders.left[i], sliders.both[i]);
    for (const name of ["p", "q"]) {
      const side = name === "p" ? start.p + 7 : start.q + thick - 7;
      const grip = svg("circle", { cx: side, r: 7, fill: `var(--${name === "p" ? "c0" : "c1"})`, stroke: "var(--card)", "stroke-width": 2, class: "grip" });
      const handle = svg("g", { role: "slider", tabindex: 0, "aria-label": `${name} of ${token}`, "aria-valuemin": 0, "aria-valuemax": 1, "data-law": name, "data-token": i }, svg("circle", { cx: side, r: 18, fill: "transparent", class: "reach" }), grip);
      handle.addEventListener("keydown", event => {
        const by = { ArrowUp: .01, ArrowRight: .01, ArrowDown: -.01, ArrowLeft: -.01, PageUp: .1, PageDown: -.1, Home: -1, End: 1 }[event.key];
        if (by) { event.preventDefault(); change(name, i, laws[name][i] + by); }
      });
      handle.addEventListener("pointerdown", event => { dragged = { frame, name, i }; event.preventDefault(); handle.focus({ preventScroll: true }); });
      sliders[name][i].handle = handle; frame.append(handle);
    }
    frame.append(svg("text", { x: middle, y: BASE + 17, "text-anchor": "middle", class: "strong" }, token));
  });
  $("bars").replaceChildren(frame);
}
function drawRule() {
  const found = rule(laws);
  highest = Math.max(highest, ...laws.p, ...laws.q);
  const y = value => BASE - (BASE - 16) * value / highest;
  const stand = (bar, value) => put(bar, { y: y(value), height: BASE - y(value) });
  tokens.forEach((_, i) => {
    for (const name of ["p", "q"]) {
      const { bar, handle } = sliders[name][i], value = laws[name][i];
      stand(bar, value);
      handle.setAttribute("aria-valuenow", value.toFixed(3));
      for (const circle of handle.children) circle.setAttribute("cy", y(value));
    }
    stand(sliders.both[i], found.both[i]);
    put(sliders.left[i], { y: y(laws.p[i]), height: Math.max(0, y(found.both[i]) - y(laws.p[i])) });
  });
  $("rule-alpha").textContent = found.alpha.toFixed(3);
  const number = value => value.toFixed(3), lines = [["p, target", laws.p], ["q, drafter", laws.q], ["min(p, q)", found.both], ["residual", found.residual], ["emitted", found.emitted], ["redraw from p", found.naive]];
  $("rule-table").replaceChildren(el("thead", {}, el("tr", {}, el("td"), tokens.map(token => el("th", { scope: "col" }, token)))),
    el("tbody", {}, lines.map(([name, law]) => el("tr", { "data-law": name }, el("th", { scope: "row" }, name), tokens.map((_, i) => el("td", { class: name === "redraw from p" && Math.abs(law[i] - laws.p[i]) > .0005 ? "warn" : null }, law ? number(law[i]) : "n/a"))))));
  $("rule-words").textContent = (found.residual ? `Rejected in ${(100 * (1 - found.alpha)).toFixed(1)}% of rounds, then drawn from the residual max(0, p - q) / (1 - alpha). ` : "Never rejected, so nothing is redrawn. ") +
    "Emitted is p, whatever q is. The last line is what a redraw from p itself would emit: wrong wherever it is not p.";
}
function usePreset() { const [words, p, q] = PRESETS[$("preset").value]; tokens = words; laws = { p: [...p], q: [...q] }; highest = Math.min(1, .1 + Math.max(...p, ...q)); makeBars(); drawRule(); }
$("preset").append(...Object.keys(PRESETS).map(name => option(name)));
$("preset").addEventListener("change", usePreset);
