"use strict";
// State is the address: #sweep=grid&precision=int8&method=qurl,flashrl&sort=-auc&few=1&run=<id>. Links and the back key
// work. Without an address the page opens at one comparison, DATA.opening.
const DATA = window.LOWBIT, $ = (id) => document.getElementById(id), LIMIT = 200, FEW = 24; // rows of the table; comparisons of a group that are shown unasked
const KEYS = ["sweep", "context", "precision", "verdict", "method", "find"], SORT = "-difference";
const kind = (verdict) => verdict.replace(/\d+ of \d+/, "x of n").replace(/more on \d+/, "more on y"); // counts are no kinds of their own
const ROWS = DATA.sweeps.flatMap((sweep) => sweep.rows.map((cells) => {
  const row = Object.fromEntries(sweep.columns.map((name, i) => [name, cells[i]]));
  return { ...row, sweep: sweep.name, kind: kind(row.verdict) };
}));
const text = (tag, words, attributes = {}) => {
  const node = document.createElement(tag);
  node.append(...[words].flat().filter((w) => w !== null && w !== undefined && w !== ""));
  for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
  return node;
};
const fixed = (value, digits = 3) => value === null || value === undefined ? "–" : value.toFixed(digits);
const short = (value) => value === null || value === undefined ? "–" : Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 || value === 0 ? String(+value.toPrecision(2)) : value.toExponential(0);
const marks = (row) => (row.is_preliminary ? "*" : "") + (row.reconstructed ? "†" : "") + (row.is_draft ? "‡" : "");

function range(row, name, from, to, hasZero) {
  const at = (v) => Math.max(0, Math.min(100, 100 * (v - from) / (to - from))), [point, low, high, ends] = ["", "_low", "_high", "_ends"].map((end) => row[name + end]);
  if (point === null || low === null) return "";
  const bar = text("span", [], { class: "range", role: "img", "aria-label": `interval ${ends}`, title: ends });
  if (hasZero) bar.append(document.createElement("u"));
  bar.append(text("i", [], { style: `left:${at(low)}%;width:${at(high) - at(low)}%` }), text("b", [], { style: `left:calc(${at(point)}% - 1px)` }));
  return bar;
}
const PRECISION_ORDER = ["fp32", "bf16", "fp16", "w8a16", "int8", "fp8_channel", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4", "nf4", "int4", "nvfp4_w4a4", "mxfp4_w4a4", "int3", "int2"];
const rank = (name) => { const i = PRECISION_ORDER.indexOf(name.replace("+kv8", "")); return (i < 0 ? 99 : i) + (name.endsWith("+kv8") ? 0.5 : 0); };
const bySize = (a, b) => a.localeCompare(b, "en", { numeric: true });

// key, heading, cell, hint; text columns sort as words
const COLUMNS = [
  ["arm", "arm", (r) => [text("button", [r.method, " ", r.precision, r.variant ? " " + r.variant : "", marks(r)], { class: "link", type: "button", "data-arm": r.arm, "data-sweep": r.sweep })], "method, precision, variant"],
  ["sweep", "sweep", (r) => r.sweep, "the sweep it is from"], ["context", "context", (r) => r.context || "–", "size, length and what else sets the experiment"],
  ["difference", "to control", (r) => [r.difference === null ? "–" : (r.difference > 0 ? "+" : "") + fixed(r.difference), range(r, "difference", -0.3, 0.3, true)], "AUC minus the control's, paired"],
  ["verdict", "verdict", (r) => [text("span", r.verdict, { class: "badge " + r.verdict.split(" ")[0] }), r.further ? " " + r.further : ""], "(+n): with n more seeds the chance of a verdict is 80 %"],
  ["seeds", "seeds", (r) => r.seeds === r.n ? r.n : `${r.seeds}/${r.n}`, "scored runs of all runs"],
  ["auc", "AUC", (r) => [fixed(r.auc), range(r, "auc", 0, 1)], "mean accuracy over training, reference precision"],
  ["accuracy", "final", (r) => fixed(r.accuracy), "last accuracy, reference precision"], ["rollout_accuracy", "as rolled", (r) => fixed(r.rollout_accuracy), "last accuracy in the rollout format"],
  ["reward", "reward", (r) => fixed(r.reward), "the sampler's, last five steps"],
  ["p_adjusted", "p", (r) => r.p_adjusted === null ? "–" : r.p_adjusted < 0.001 ? "<.001" : fixed(r.p_adjusted), "adjusted"],
  ["k3_max", "max k3", (r) => short(r.k3_max), "worst mismatch of any seed, nats"], ["ess_token_raw", "raw ESS", (r) => fixed(r.ess_token_raw, 2), "effective share of tokens before truncation"],
  ["rollout_tokens_per_s", "tokens/s", (r) => r.rollout_tokens_per_s === null ? "–" : Math.round(r.rollout_tokens_per_s), "rollout, this machine; emulated formats are slower than BF16"],
  ["total_s", "s/run", (r) => r.total_s === null ? "–" : Math.round(r.total_s), "wall time of a run"],
];
const WORDY = new Set(["arm", "sweep", "context", "verdict"]);

function state() { return location.hash ? Object.fromEntries(new URLSearchParams(location.hash.slice(1))) : { ...DATA.opening }; }
function go(changes) {
  const next = new URLSearchParams(Object.entries({ ...state(), ...changes }).filter(([name, value]) => value && (KEYS.includes(name) || ["sort", "run", "arm", "of", "all", "few"].includes(name))));
  location.hash = next.toString() || "all"; // no element has this id, so nothing scrolls
}
function fill(select, values, chosen, all) {
  select.replaceChildren(text("option", all, { value: "" }), ...values.map((v) => text("option", v, { value: v })));
  select.value = values.includes(chosen) ? chosen : "";
}
function chosenRows(s) {
  const methods = (s.method || "").split(",").map((m) => m.trim()).filter(Boolean), words = (s.find || "").toLowerCase().split(/\s+/).filter(Boolean);
  return ROWS.filter((r) => (!s.sweep || r.sweep === s.sweep) && (!s.context || r.context === s.context) && (!s.precision || r.precision === s.precision)
    && (!s.verdict || r.kind === s.verdict) && (!methods.length || methods.includes(r.method)) && words.every((w) => `${r.sweep} ${r.arm} ${r.verdict}`.toLowerCase().includes(w)));
}
function sorted(rows, key) {
  const name = key.replace(/^-/, ""), sign = key.startsWith("-") ? -1 : 1;
  const value = (r) => name === "arm" ? `${r.method} ${String(rank(r.precision)).padStart(5, "0")} ${r.variant} ${r.context}` : name !== "difference" ? r[name] : r.verdict === "control" ? 0 : r.verdict.startsWith("collapses") ? null : r[name];
  // By the difference the control stands at 0, and what collapses comes last: its difference is that of the runs that did not.
  return rows.map((r, i) => [r, i]).sort(([a, i], [b, j]) => {
    const x = value(a), y = value(b), isX = x === null || x === undefined, isY = y === null || y === undefined;
    if (isX || isY) return isX === isY ? i - j : isX ? 1 : -1;
    return (WORDY.has(name) ? sign * bySize(x, y) : sign * (x - y)) || i - j;
  }).map(([r]) => r);
}
function distinct(rows, name, compare = bySize) { return [...new Set(rows.map((r) => r[name]).filter(Boolean))].sort(compare); }

function drawBoard(s) {
  const inSweep = ROWS.filter((r) => !s.sweep || r.sweep === s.sweep);
  fill($("f-sweep"), DATA.sweeps.map((x) => x.name), s.sweep, "all sweeps"); fill($("f-context"), distinct(inSweep, "context"), s.context, "all");
  fill($("f-precision"), distinct(inSweep, "precision", (a, b) => rank(a) - rank(b)), s.precision, "all"); fill($("f-verdict"), distinct(inSweep, "kind"), s.verdict, "all");
  $("methods").replaceChildren(...distinct(inSweep, "method").map((m) => text("option", [], { value: m })));
  for (const key of ["method", "find"]) if (document.activeElement !== $("f-" + key)) $("f-" + key).value = s[key] || "";
  const key = s.sort || SORT, all = sorted(chosenRows(s), key), firm = all.filter((r) => !r.is_preliminary), rows = s.few || !firm.length ? all : firm, shown = s.all ? rows : rows.slice(0, LIMIT);
  const columns = COLUMNS.filter(([name]) => !(name === "sweep" && s.sweep) && !(name === "context" && rows.every((r) => r.context === rows[0].context && s.sweep)));
  $("heads").replaceChildren(...columns.map(([name, heading, , hint]) => {
    const order = key === name ? "ascending" : key === "-" + name ? "descending" : "none";
    return text("th", text("button", heading, { type: "button", "data-sort": name, title: hint }), { scope: "col", "aria-sort": order, class: WORDY.has(name) ? "w" : null });
  }));
  $("rows").replaceChildren(...shown.map((r) => text("tr", columns.map(([name, , cell]) =>
    name === "arm" ? text("th", cell(r), { scope: "row" }) : text("td", cell(r), { class: WORDY.has(name) ? "w" : null })))));
  $("count").textContent = `${rows.length} of ${ROWS.length} arms` + (shown.length < rows.length ? `, the first ${shown.length} shown` : "")
    + (rows.length < all.length ? `; ${all.length - rows.length} under 3 seeds are hidden` : "")
    + (new Set(rows.map((r) => r.sweep + " " + r.context)).size > 1 ? ". Scores are comparable within one sweep and context." : "");
  $("f-few").checked = !!s.few;
  drawSpeed(s, rows);
  $("more").hidden = shown.length === rows.length;
  const sweep = DATA.sweeps.find((x) => x.name === s.sweep);
  $("question").textContent = sweep ? sweep.question : "";
  $("setup").hidden = !sweep;
  if (sweep) $("setup-lines").replaceChildren(...[...sweep.setup, ...sweep.problems.map((p) => "left alone: " + p)].map((line) => text("li", line)));
}
function address(sweep, c) {
  const words = { sweep: sweep.name, context: c.context, precision: c.precision, method: c.methods.join(",") };
  return "#" + new URLSearchParams(Object.entries(words).filter(([, v]) => v));
}
function drawComparisons(s) {
  const mlflow = window.LOWBIT_MLFLOW, sweeps = DATA.sweeps.filter((x) => !s.sweep || x.name === s.sweep);
  $("comparisons-note").textContent = mlflow ? `Each opens above; "MLflow" opens it at ${mlflow.address} while lowbit browse runs.`
    : "Each opens above. The same ones are in MLflow: lowbit browse SWEEP --compare WORDS.";
  $("comparison-list").replaceChildren(...sweeps.map((sweep) => {
    const box = text("details", text("summary", `${sweep.name}: ${sweep.comparisons.length}`)), body = text("div", [], { class: "body" });
    const draw = () => { if (body.childNodes.length) return; for (const group of new Set(sweep.comparisons.map((c) => c.group))) {
      const own = sweep.comparisons.filter((c) => c.group === group);
      const part = text("details", [text("summary", `${group}: ${own.length}`), text("ul", own.map((c) => {
        const item = text("li", text("a", c.title, { href: address(sweep, c) })), id = mlflow && mlflow.experiments[sweep.name];
        if (id) item.append(" (", text("a", "MLflow", { href: `${mlflow.address}/#/experiments/${id}/runs?workflowType=machine_learning&startTime=ALL&searchFilter=${encodeURIComponent(c.filter)}` }), ")");
        return item;
      }), { class: "columns" })]);
      part.open = own.length <= FEW;
      body.append(part);
    } };
    box.append(body); box.addEventListener("toggle", draw);
    if (s.sweep || DATA.sweeps.length === 1) { box.open = true; draw(); }
    return box;
  }));
}
function drawFigures(s) {
  const show = (paths) => text("div", paths.map((path) => { const name = path.split("/").slice(-2).join("/").replace(".png", "");
    return text("figure", [text("a", text("img", [], { src: path, alt: "Figure " + name, loading: "lazy" }), { href: path }), text("figcaption", name)]); }), { class: "gallery" });
  const groups = DATA.sweeps.filter((x) => x.figures.length && (!s.sweep || x.name === s.sweep)).map((x) => [x.name, x.figures]);
  if (!s.sweep && DATA.figures.length) groups.push(["other figures", DATA.figures]);
  $("figure-list").replaceChildren(...groups.map(([name, paths]) => { const box = text("details", [text("summary", `${name}: ${paths.length}`), show(paths)]); box.open = !!s.sweep || groups.length === 1; return box; }));
  if (!groups.length) $("figure-list").append(text("p", "None were drawn for this sweep: lowbit report NAME", { class: "soft" }));
}
