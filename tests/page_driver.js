/* Uses the page as a reader would, in frames of several sizes, and writes what it saw as JSON. */
const facts = {};
const frame = name => document.getElementById(name);
const texts = nodes => [...nodes].map(node => node.textContent);

function tools(name) {
  const page = frame(name).contentDocument, view = frame(name).contentWindow;
  const $ = selector => page.querySelector(selector);
  const all = selector => [...page.querySelectorAll(selector)];
  const set = (selector, value, event = "change") => {
    $(selector).value = value;
    $(selector).dispatchEvent(new view.Event(event, { bubbles: true }));
  };
  const key = (node, name) => node.dispatchEvent(new view.KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
  const column = title => {
    const at = texts(all("#board thead th")).indexOf(title);
    return all("#board tbody tr").map(row => row.cells[at].textContent);
  };
  const sections = all("section[id]").filter(section => !section.hidden).map(section => section.id);
  return { page, view, $, all, set, key, column, sections };
}
/* What sticks out of the page's width, outside boxes that scroll by themselves. */
function overflow({ page, all }) {
  const wide = all("body *").filter(node => !node.closest(".scroll, .rows, svg, .hidden") && node.getBoundingClientRect().right > page.documentElement.clientWidth + 0.5);
  return { scroll: page.documentElement.scrollWidth - page.documentElement.clientWidth, nodes: wide.map(node => `${node.tagName}.${node.className}#${node.id}`).slice(0, 5) };
}
function table(name) {
  const t = tools(name), seen = {}, { $, all, view } = t;
  seen.sections = t.sections;
  seen.rows = t.column("Drafter").length;
  const head = title => all("#board thead th button").find(button => button.textContent === title);
  head("tau").click();
  seen.tau_down = t.column("tau").map(parseFloat);
  seen.aria_down = head("tau").closest("th").getAttribute("aria-sort");
  head("tau").click();
  seen.tau_up = t.column("tau").map(parseFloat);
  seen.aria_up = head("tau").closest("th").getAttribute("aria-sort");
  head("Drafter").click();
  seen.drafters = t.column("Drafter");
  head("alpha").focus();
  seen.tip = { text: $("#tip").textContent, hidden: $("#tip").hidden, described: head("alpha").getAttribute("aria-describedby") };
  t.key(head("alpha"), "Escape");
  seen.tip_after_escape = $("#tip").hidden;
  head("Speedup").dispatchEvent(new view.MouseEvent("mouseover", { bubbles: true }));
  seen.tip_on_hover = $("#tip").textContent;
  const before = all("#board thead th").length;
  $("#all-columns").click();
  seen.more_columns = all("#board thead th").length - before;
  seen.wide_overflow = overflow(t);
  $("#all-columns").click();
  return seen;
}
function filter(name) {
  const t = tools(name), seen = {}, { all, set } = t;
  seen.filters = all("#filters select[id]").map(select => select.id);
  const count = () => ({ rows: all("#board tbody tr").length, cards: all("#serve .card").length, bars: all("#splits .rows > div").length, temperatures: [...new Set(t.column("T"))] });
  seen.all = count();
  set("#filter-temperature", "1");
  seen.hot = count();
  set("#filter-task", "humaneval");
  set("#filter-batch_size", "8");
  seen.narrow = count();
  seen.narrow_batches_hidden = t.page.getElementById("batches").hidden;
  set("#filter-verification", "block");
  seen.nothing = texts(all("#board tbody tr"));
  for (const select of ["task", "temperature", "batch_size", "verification"]) set(`#filter-${select}`, "");
  seen.again = count();
  return seen;
}
function mixed(name) {
  const t = tools(name), seen = {}, { all, set } = t;
  const drafters = t.column("Drafter"), settings = t.column("Settings");
  seen.rows = drafters.map((drafter, i) => [drafter, settings[i]]);
  seen.cards = texts(all("#serve .card h3"));
  seen.choices = texts(all("#filter-settings option"));
  set("#filter-settings", "seed 7, top_p 0.5");
  seen.filtered = t.column("Settings");
  set("#filter-settings", "usual");
  seen.usual = t.column("Settings");
  seen.records = texts(all("#records th")).slice(-5);
  return seen;
}
function charts(name) {
  const { $, all, set } = tools(name), seen = {};
  seen.drafted = { curves: all("#drafted .charts > div:first-child polyline").length, points: all("#drafted .charts > div:first-child path").length, titles: texts(all("#drafted h3")) };
  $("#drafted .more")?.click();
  seen.drafted_all = all("#drafted h3").length;
  seen.batch_ticks = texts(all("#batches .charts > div:first-child text")).slice(-3, -1);
  set("#batch-metric", "tokens_per_second");
  seen.throughput = $("#batches svg[role=img]").getAttribute("aria-label");
  seen.costs = texts(all("#costs h3"));
  set("#cost-metric", "train_minutes");
  seen.hours = $("#costs svg[role=img]").getAttribute("aria-label");
  seen.parts = texts(all("#parts table:first-of-type thead th")).slice(0, 5);
  seen.part = texts($("#parts tbody tr").cells).slice(1);
  seen.split = all("#splits .rows > div:first-child .bar i").map(part => part.className);
  seen.cards = texts(all("#serve .card"));
  seen.certificates = texts(all("#certificates tbody tr")).slice(0, 2);
  return seen;
}
function playground(name) {
  const { $, all, set } = tools(name), seen = { predicted: [] };
  for (const [alpha, cost, verify, num] of [[0.8, 0.05, 1.2, 6], [0.3, 0.5, 1, 4], [1, 0, 1, 16]]) {
    for (const [id, value] of Object.entries({ alpha, cost, verify, num })) set(`#${id}`, value, "input");
    seen.predicted.push([alpha, cost, verify, num, $("#predicted").textContent, $("#verdict").textContent]);
  }
  for (const [id, value] of Object.entries({ alpha: 0.8, cost: 0.2, verify: 1, num: 5 })) set(`#${id}`, value, "input");
  $("#parallel").click();
  seen.parallel = $("#predicted").textContent;
  $("#parallel").click();
  set("#start", "0");
  seen.start = [all("#start option")[1]?.textContent, $("#predicted").textContent];
  return seen;
}
function acceptance(name) {
  const { $, all, set, key, view, page } = tools(name), seen = {};
  const law = which => texts([...$(`#rule-table tr[data-law="${which}"]`).cells].slice(1)).map(Number);
  const state = () => ({ alpha: Number($("#rule-alpha").textContent), p: law("p, target"), residual: law("residual"), emitted: law("emitted"), naive: law("redraw from p") });
  set("#preset", "two tokens");
  seen.start = state();
  seen.handles = all("#bars [role=slider]").map(node => node.getAttribute("aria-label"));
  key(all("#bars [role=slider]")[0], "ArrowUp");
  seen.key = state();
  const handle = all('#bars [data-law="q"]')[0], bar = handle.querySelector(".grip").getBoundingClientRect(), base = $("#bars line.axis").getBoundingClientRect().top;
  const at = (kind, node, y) => node.dispatchEvent(new view.PointerEvent(kind, { bubbles: true, cancelable: true, pointerId: 1, clientX: bar.left, clientY: y }));
  at("pointerdown", handle, bar.top + bar.height / 2);
  at("pointermove", page, base - (base - bar.top - bar.height / 2) / 2);
  at("pointerup", page, 0);
  at("pointermove", page, base);
  seen.dragged = law("q, drafter");
  return seen;
}
function rounds(name) {
  const { $, all, key, view } = tools(name), seen = {};
  const node = selector => all(`#text ${selector}`);
  seen.accepted = texts(node(".tok-accepted"));
  seen.rejected = texts(node("del.tok-rejected"));
  seen.unjudged = texts(node(".tok-unjudged"));
  seen.next = texts(node("b.tok-next"));
  seen.prompt = $("#prompt").textContent;
  seen.counts = $("#counts").textContent;
  key($("#text"), "ArrowRight");
  key($("#text"), "ArrowRight");
  seen.after_arrows = $("#detail").textContent;
  if (node("del").length) {
    node("del")[0].dispatchEvent(new view.MouseEvent("mouseenter"));
    seen.on_rejected = $("#detail").textContent;
    seen.title = node("del")[0].title;
  }
  node("b.tok-next").at(-1).click();
  seen.on_last = $("#detail").textContent;
  const style = selector => view.getComputedStyle($(`#text ${selector}`));
  seen.marks = [style(".tok-accepted").textDecorationLine, node("del").length ? style("del").textDecorationLine : null, style(".tok-next").boxShadow !== "none"];
  seen.arms = texts(all("#sample-arm option"));
  $("#show-rejected").click();
  seen.hidden = node("del").length ? style("del").display : null;
  $("#show-rejected").click();
  return seen;
}
/* Print rules apply everywhere, screen rules nowhere. */
function print(name) {
  const t = tools(name);
  for (const sheet of t.page.styleSheets) for (const rule of sheet.cssRules) {
    if (!rule.media) continue;
    rule.media.mediaText = rule.media.mediaText === "print" ? "all" : "not all";
  }
  const visible = selector => t.all(selector).some(node => node.getClientRects().length);
  return { overflow: overflow(t), shown: Object.fromEntries(["#board", "#survival svg", "#text", "#definitions", "#filters", "#playground", "#rule", ".detail"].map(selector => [selector, visible(selector)])),
    paper: t.view.getComputedStyle(t.page.body).backgroundColor };
}
function run() {
  facts.table = table("desktop");
  facts.filter = filter("desktop");
  facts.mixed = mixed("mixed");
  facts.charts = charts("desktop");
  facts.playground = playground("desktop");
  facts.acceptance = acceptance("desktop");
  facts.rounds = rounds("desktop");
  facts.old = { table: table("old"), rounds: rounds("old"), playground: playground("old") };
  facts.phone = { overflow: overflow(tools("phone")), old: overflow(tools("phone-old")), wide: table("phone").wide_overflow };
  facts.print = print("print");
  facts.desktop = overflow(tools("desktop"));
  facts.errors = [...document.querySelectorAll("iframe")].map(node => node.contentWindow.errors);
}
window.addEventListener("load", () => {
  try { run(); } catch (error) { facts.failed = String(error.stack ?? error); }
  const result = document.createElement("script");
  result.type = "application/json";
  result.id = "facts";
  result.textContent = JSON.stringify(facts).replace(/</g, "\\u003c");
  document.body.append(result);
});
