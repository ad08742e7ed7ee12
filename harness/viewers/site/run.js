// The dialog: an arm's runs, a run's scores, settings and passport. Runs come from data/<sweep>.js, asked for once.
const LOADED = {}, WAITING = {};
window.lowbitRuns = (sweep, data) => { LOADED[sweep] = data; (WAITING[sweep] || []).forEach((done) => done(data)); };
function runsOf(sweep) {
  if (LOADED[sweep]) return Promise.resolve(LOADED[sweep]);
  return new Promise((done, lost) => {
    (WAITING[sweep] ||= []).push(done);
    if (WAITING[sweep].length > 1) return;
    const script = text("script", [], { src: `data/${sweep}.js` });
    script.onerror = () => { delete WAITING[sweep]; lost(new Error(`data/${sweep}.js is missing: run lowbit site`)); };
    document.head.append(script);
  });
}
const opened = (data, cells) => Object.fromEntries(data.fields.map((name, i) => [name, cells[i]]));
const pairs = (entries) => text("dl", entries.filter(([, v]) => v !== null && v !== undefined && v !== "").flatMap(([k, v]) => [text("dt", k), text("dd", v)]));
const grid = (heads, rows, words = 1) => text("div", text("table", [
  text("thead", text("tr", heads.map((h, i) => text("th", h, { scope: "col", class: i < words ? "w" : null })))),
  text("tbody", rows.map((row) => text("tr", row.map((cell, i) => text("td", cell === null || cell === undefined ? "–" : typeof cell === "number" ? String(cell) : cell, { class: i < words ? "w" : null })))))]), { class: "scroll", tabindex: "0" });

function hashes(run) {
  const bytes = Uint8Array.from(atob(run.hashes), (c) => c.charCodeAt(0));
  return (i) => Array.from(bytes.slice(4 * i, 4 * i + 4), (b) => b.toString(16).padStart(2, "0")).join("");
}
function settingsOf(data, arm) {
  const absent = new Set(data.absent[arm]);
  return Object.entries({ ...data.base, ...data.settings[arm] }).filter(([name, value]) => !absent.has(name) && value !== null).sort(([a], [b]) => a < b ? -1 : 1);
}
function passport(data, run) {
  const planned = Object.entries(data.planned[run.planned]).map(([k, v]) => [k, typeof v === "string" ? v : JSON.stringify(v)]);
  const parts = [text("h3", "Planned"), planned.length ? pairs(planned) : text("p", "no format but the base precision"), text("h3", "Realized")];
  if (run.passport === null) return [...parts, text("p", "nothing was loaded")];
  const found = data.passport[run.passport], code = hashes(run);
  parts.push(pairs([["engine", found.engine], ["sampler", found.sampler], ["KV cache", found.kv || "base precision"], ["tensors", String(found.weights.length)]]));
  parts.push(grid(["tensor", "format", "codes", "scales", "inputs", "crc-32"], found.weights.map((place, i) => {
    const [name, format, dtype, scales, acts] = data.tensors[place];
    return [name, format, dtype, scales ? scales.join("×") : "–", acts || "–", text("code", code(i))];
  }), 6));
  return parts;
}
function tasksOf(data, run) {
  const asked = data.tasks && data.tasks[run.id];
  if (!asked) return [];
  const said = (scores) => typeof scores === "string" ? scores : Object.entries(scores).map(([name, value]) => `${name} ${fixed(value)}`).join(", ");
  return [text("h3", "Evaluations on tasks"), grid(["task", "step", "weights", "precision", "samples", "scores"], asked.map(([task, step, site, precision, k, scores]) => [task, String(step), site, precision, String(k), said(scores)]), 6)];
}
function drawRun(data, sweep, run) {
  const [commit, packages] = data.code[run.code], method = data.method[run.method], machine = data.machine[run.machine];
  const value = (v) => typeof v === "object" && v !== null ? JSON.stringify(v) : String(v);
  return [
    text("p", text("a", "all runs of this arm", { href: "#" + new URLSearchParams({ ...state(), run: "", of: sweep, arm: data.arms[run.arm] }) })),
    pairs([["run", text("code", run.id)], ["status", run.status + (run.reason ? ": " + run.reason : "")], ["seed, base seed", `${run.seed}, ${run.base_seed}`], ["steps", String(run.steps)],
      ["started", run.started], ["commit", [text("code", commit || "unknown"), run.draft ? " (draft: uncommitted changes)" : ""]], ["paper", method.paper], ["reconstructed", method.reconstructed],
      ["base model", text("code", data.hash[run.model] || "–")], ["task", text("code", data.hash[run.task] || "–")], ["questions", text("code", data.hash[run.question] || "–")], ["final weights", text("code", run.final || "–")],
      ["record", [text("code", `results/runs/${sweep}/${run.id}.json`), `; a packed sweep has it once it is unpacked: `, text("code", `lowbit runs ${sweep}`)]]]),
    text("h3", "Curves"), curvesOf(data, [[run, "this run"]]), text("h3", "Scores"), grid(["step", "accuracy, reference", "accuracy, as rolled"], run.evals.map(([step, a, b]) => [String(step), fixed(a), fixed(b)])), ...tasksOf(data, run),
    grid(data.summary, [run.summary.map((v) => v === null ? "–" : String(v))], 0),
    ...passport(data, run),
    text("h3", "Time"), grid(data.stages.map((s) => s + ", s"), [run.time.map((v) => v === null ? "–" : v.toFixed(1))], 0),
    pairs([["rollout tokens/s", run.rollout_tokens_per_s === null ? "–" : String(Math.round(run.rollout_tokens_per_s))], ["peak memory, GiB", run.memory === null ? "–" : String(run.memory)]]),
    text("h3", "Settings"), pairs(settingsOf(data, run.arm).map(([k, v]) => [k, text("code", value(v))])),
    text("h3", "Parts, code and machine"), pairs([...Object.entries(method.parts).map(([k, v]) => [k, text("code", value(v))]), ...Object.entries(packages), ...Object.entries(machine).map(([k, v]) => [k, value(v)])]),
  ];
}
function drawArm(data, sweep, label) {
  const runs = data.runs.map((cells) => opened(data, cells)).filter((run) => data.arms[run.arm] === label), at = (run, name) => run.summary[data.summary.indexOf(name)];
  const place = data.arms.indexOf(label), row = ROWS.find((r) => r.sweep === sweep && r.arm === label), scores = [["auc", "AUC"], ["final_accuracy", "final"], ["final_accuracy_rollout", "as rolled"], ["reward_last", "reward"], ["k3_max", "max k3"]];
  return [
    row ? text("p", [`${row.status}; verdict against ${row.control || "no control"}: `, text("span", row.verdict, { class: "badge " + row.verdict.split(" ")[0] }), row.reconstructed ? `; reconstructed: ${row.reconstructed}` : ""]) : "",
    grid(["run", "status", "seed", ...scores.map(([, heading]) => heading), "s"], runs.map((run) => [
      text("a", run.id, { href: "#" + new URLSearchParams({ ...state(), of: sweep, run: run.id }), class: "mono" }), text("span", run.status, { class: "badge " + run.status, title: run.reason }), `${run.seed}`,
      ...scores.map(([name]) => name === "k3_max" ? short(at(run, name)) : fixed(at(run, name))), run.time[data.stages.indexOf("total")] === null ? "–" : run.time[data.stages.indexOf("total")].toFixed(0)]), 2),
    text("h3", "Curves"), curvesOf(data, [...controlRuns(data, row), ...runs.map((run) => [run, `seed ${run.seed}${run.base_seed === run.seed ? "" : `, base ${run.base_seed}`}`])]),
    text("h3", "Settings that differ from the sweep's first arm"),
    pairs([...Object.entries(data.settings[place]).map(([k, v]) => [k, text("code", JSON.stringify(v))]), ...data.absent[place].map((k) => [k, "not set here"])]),
  ];
}
function drawDetail(s) {
  const dialog = $("detail");
  if (!s.of || !(s.run || s.arm)) { if (dialog.open) dialog.close(); return; }
  const show = (title, nodes) => { $("detail-title").textContent = title; $("detail-body").replaceChildren(...nodes.filter(Boolean)); if (!dialog.open) dialog.showModal(); dialog.scrollTop = 0; };
  runsOf(s.of).then((data) => {
    const cells = s.run && data.runs.find((run) => run[0] === s.run);
    if (s.run && !cells) return show("Not found", [text("p", `no run ${s.run} in ${s.of}`)]);
    const run = cells && opened(data, cells);
    show(run ? `${data.arms[run.arm]}, seed ${run.seed}` : `${s.arm} (${s.of})`, run ? drawRun(data, s.of, run) : drawArm(data, s.of, s.arm));
  }).catch((error) => show("Not available", [text("p", error.message)]));
}
let drawn = null;
function draw() {
  const s = state(), filters = JSON.stringify([...KEYS, "sort", "all", "few"].map((k) => s[k]));
  if (filters !== drawn) { drawBoard(s); drawComparisons(s); drawFigures(s); drawn = filters; }
  drawDetail(s);
  document.documentElement.dataset.ready = "yes";
}
for (const key of KEYS) $("f-" + key).addEventListener(["method", "find"].includes(key) ? "input" : "change", (event) => go({ [key]: event.target.value, all: "", ...(key === "sweep" ? { context: "", precision: "", verdict: "" } : {}) }));
$("f-few").addEventListener("change", (event) => go({ few: event.target.checked ? "1" : "", all: "" }));
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("reset").addEventListener("click", () => { $("f-method").value = $("f-find").value = ""; location.hash = "all"; });
$("more").addEventListener("click", () => go({ all: "1" }));
$("heads").addEventListener("click", (event) => {
  const name = event.target.dataset && event.target.dataset.sort, key = state().sort || SORT;
  if (name) { go({ sort: key === "-" + name ? name : key === name ? "-" + name : WORDY.has(name) || name === "p_adjusted" ? name : "-" + name }); document.querySelector(`[data-sort=${name}]`).focus(); }
});
$("rows").addEventListener("click", (event) => { const button = event.target.closest("[data-arm]"); if (button) go({ of: button.dataset.sweep, arm: button.dataset.arm, run: "" }); });
$("detail").addEventListener("close", () => { if (state().of) go({ of: "", run: "", arm: "" }); });
addEventListener("hashchange", draw);
document.querySelectorAll("nav a, a.skip").forEach((link) => link.addEventListener("click", (event) => { // the address keeps the filters
  event.preventDefault();
  const section = document.querySelector(link.getAttribute("href"));
  section.scrollIntoView(); section.setAttribute("tabindex", "-1"); section.focus({ preventScroll: true });
}));
$("summary").textContent = `${DATA.sweeps.length} ${DATA.sweeps.length === 1 ? "sweep" : "sweeps"}, ${ROWS.length} arms, ${ROWS.reduce((sum, r) => sum + r.n, 0)} runs. Every number comes from a result file; nothing is loaded from a network.`;
$("text-list").replaceChildren(...DATA.documents.map((doc) => { const box = text("details", text("summary", doc.title)), body = text("div", [], { class: "body" }); body.innerHTML = doc.html; box.append(body); return box; }));
if (!DATA.documents.length) $("text-list").append(text("p", "None yet: lowbit claims, lowbit search NAME", { class: "soft" }));
draw();
