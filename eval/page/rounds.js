/* Round viewer. Every token is [node, words]; one of them is current. */
const samplesOf = groupBy(data.samples, sample => sample.prompt);
const clip = text => { const flat = text.replace(/\s+/g, " ").trim(); return flat.length > 60 ? `${flat.slice(0, 57)}...` : flat; };
let cells = [], current = -1;
const seen = token => token.replace(/\n/g, "\u21b5");
const chance = value => value >= .0005 || value === 0 ? value.toFixed(3) : value.toExponential(1);
function odds(p, q, accepts) {
  const parts = [];
  if (present(p)) parts.push(`p = ${chance(p)}`);
  if (present(q)) parts.push(`q = ${chance(q)}`);
  if (accepts && present(p) && q > 0) parts.push(`accepted with chance min(1, p/q) = ${chance(Math.min(1, p / q))}`);
  return parts.length ? ` ${parts.join(", ")}.` : "";
}
function roundTokens(round, number, token_rule) {
  const proposed = [...round.accepted, ...round.rejected], kept = round.accepted.length, found = [];
  proposed.forEach((token, i) => {
    const unjudged = i > kept, state = i < kept ? "accepted" : i === kept ? "rejected" : "dropped unjudged, as it follows a rejection";
    const node = i < kept ? el("span", { class: "tok-accepted" }, token) : el("del", { class: unjudged ? "tok-rejected tok-unjudged" : "tok-rejected" }, seen(token));
    found.push([node, `Round ${number}, proposal ${i + 1} of ${proposed.length}: "${seen(token)}" ${state}.${odds(round.p?.[i], round.q?.[i], token_rule && !unjudged)}`]);
  });
  if (round.next) {
    const kind = number === 1 && !proposed.length ? "the first token, from the prefill" : round.rejected.length ? "the target's correction" : proposed.length ? "the target's bonus, all proposals accepted" : "the target's own, nothing was proposed";
    found.push([el("b", { class: "tok-next" }, round.next), `Round ${number}: "${seen(round.next)}" is ${kind}.${odds(round.next_p, null, false)}`]);
  }
  return found;
}
function select(index) {
  if (!cells.length) return;
  cells[current]?.[0].classList.remove("tok-current");
  current = Math.min(cells.length - 1, Math.max(0, index));
  cells[current][0].classList.add("tok-current");
  $("detail").textContent = cells[current][1];
}
function drawSample() {
  const sample = samplesOf.get($("sample").value)[Number($("sample-arm").value)];
  cells = []; current = -1;
  $("prompt").textContent = sample.prompt;
  $("detail").textContent = "";
  $("text").replaceChildren(...sample.rounds.map((round, i) => {
    const found = roundTokens(round, i + 1, sample.verification === "token");
    cells.push(...found);
    return el("span", { class: "round" }, found.map(([node]) => node));
  }));
  cells.forEach(([node, words], i) => { node.title = words; node.addEventListener("mouseenter", () => select(i)); node.addEventListener("click", () => select(i)); });
  const accepted = sample.rounds.reduce((sum, round) => sum + round.accepted.length, 0), rejected = sample.rounds.reduce((sum, round) => sum + round.rejected.length, 0);
  const emitted = accepted + sample.rounds.filter(round => round.next).length;
  $("counts").textContent = `${emitted} tokens in ${sample.rounds.length} rounds (${(emitted / sample.rounds.length).toFixed(2)} a round): ${accepted} proposals kept, ${rejected} dropped.`;
}
function listArms() {
  const before = $("sample-arm").selectedOptions[0]?.textContent, arms = samplesOf.get($("sample").value);
  $("sample-arm").replaceChildren(...arms.map((sample, i) => option(i, sample.label)));
  const same = arms.findIndex(sample => sample.label === before);
  if (same > 0) $("sample-arm").value = same;
  drawSample();
}
$("viewer").hidden = data.samples.length === 0;
if (data.samples.length) {
  $("sample").append(...[...samplesOf.keys()].map((prompt, i) => option(prompt, `${i + 1}. ${clip(prompt)}`)));
  $("sample").addEventListener("change", listArms);
  $("sample-arm").addEventListener("change", drawSample);
  $("show-rejected").addEventListener("change", event => $("text").classList.toggle("hide-rejected", !event.target.checked));
  $("text").addEventListener("keydown", event => {
    const to = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: cells.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); select(to); }
  });
  listArms();
}

/* Words, records, certificates. */
const listed = key => unique(data.rows.map(row => row[key]).filter(present));
const shared = [...CONTEXT].filter(key => !several(key)).map(key => setting[key](data.rows[0])).filter(present);
const numDrafters = unique(data.rows.map(row => `${row.drafter}|${row.method}`)).length;
$("summary").textContent = `${data.rows.length} results of ${numDrafters} drafter${numDrafters > 1 ? "s" : ""} for ${listed("target").join(", ")}, on ${listed("hardware").join("; ")}.` +
  `${shared.length ? ` All at ${shared.join(", ")}.` : ""} In order of ${data.order}.`;
$("definitions").append(...columns.map(column => el("div", {}, el("dt", {}, column.title), el("dd", {}, column.definition))));
const RECORD = [["source", "File"], ["drafter", "Drafter"], ["drafter_params", "Parameters"], ["trained_tokens", "Trained tokens"], ["train_minutes", "Trained minutes"], ["engine", "Engine"], ["dtype", "Dtype"], ["hardware", "Hardware"],
  ["commit", "Commit"], ["draft_sampling", "Drafting"], ["verification", "Verification"], ["tree", "Tree"], ["siblings", "Siblings"],
  ["max_new_tokens", "Max new tokens"], ["settings", "Settings"]].filter(([key]) => !["tree", "siblings", "settings"].includes(key) || data.rows.some(row => present(row[key])));
const records = [...new Map(data.rows.map(row => [row.source, row])).values()];
const heads = titles => el("thead", {}, el("tr", {}, titles.map(title => el("th", { scope: "col" }, title))));
const plain = value => typeof value === "number" ? value.toLocaleString("en") : value ?? "n/a";
$("records").tHead.replaceWith(heads(RECORD.map(([, title]) => title)));
$("records").tBodies[0].append(...records.map(row => el("tr", {}, RECORD.map(([key]) => el("td", {}, key === "commit" ? plain(row[key]).slice(0, 12) : plain(row[key]))))));
const certified = records.filter(row => row.certificate);
$("certificates").hidden = certified.length === 0;
const broke = certified.flatMap(row => (row.certificate.broken ?? []).map(one => el("tr", {}, el("td", {}, row.text.drafter), el("td", {}, String(row.temperature)), el("td", {}, row.certificate.verdict), el("td", {}, one.name),
  el("td", { class: present(one.p_value) && one.p_value < .001 ? null : "none" }, present(one.p_value) ? one.p_value.toPrecision(2) : "n/a"), el("td", {}, `${one.at_least ? "at least " : ""}${plain(one.tokens_needed)}`))));
within("certificates", ".tables").append(el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Broken verifiers" }, el("table", { class: "plain" }, heads(["Drafter", "T", "Verdict", "Broken verifier", "p-value", "Tokens needed"]), el("tbody", {}, broke))));

function draw() {
  const rows = shown();
  drawTable();
  for (const part of [drawServe, drawSpeedups, drawSplits, drawDrafted, drawBatches, drawSurvival, drawCosts, drawParts]) part(rows);
}
drawHead(); draw(); drawPlayground(); usePreset();
$("contents").append(...[...document.querySelectorAll("section[id]")].filter(section => !section.hidden).flatMap(section => [el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent), " "]));
