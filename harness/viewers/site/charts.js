// Charts as SVG: curves of runs over their steps, and speed against accuracy of the arms in the table.
const svg = (tag, attributes = {}, children = []) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...[children].flat());
  return node;
};
const WIDE = { width: 480, height: 210, left: 52, right: 12, top: 8, bottom: 34 };

function scale(values, from, to, isLog) {
  const f = isLog ? Math.log10 : (v) => v;
  let low = Math.min(...values.map(f)), high = Math.max(...values.map(f));
  if (isLog) { low -= 0.05; high += 0.05; }
  if (high - low < 1e-12) { low -= isLog ? 0.3 : 0.05; high += isLog ? 0.3 : 0.05; }
  const at = (v) => from + (to - from) * (f(v) - low) / (high - low), found = [];
  if (isLog && high - low > 1) for (let e = Math.ceil(low); e <= high; e += Math.ceil((high - low) / 6)) found.push(10 ** e);
  else if (isLog) for (let i = 0; i < 3; i++) found.push(+(10 ** (low + (high - low) * (0.05 + 0.45 * i))).toPrecision(2));
  else {
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(6));
  }
  return { at, ticks: [...new Set(found)] };
}
function axes(box, x, y, labels) {
  const bottom = box.height - box.bottom, brief = (v) => v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(0) : v.toLocaleString("en");
  return [
    ...y.ticks.flatMap((v) => [svg("line", { class: "axis", x1: box.left, x2: box.width - box.right, y1: y.at(v), y2: y.at(v) }), svg("text", { x: box.left - 5, y: y.at(v) + 4, "text-anchor": "end" }, brief(v))]),
    ...x.ticks.map((v) => svg("text", { x: x.at(v), y: bottom + 15, "text-anchor": "middle" }, brief(v))),
    svg("text", { x: (box.left + box.width - box.right) / 2, y: box.height - 4, "text-anchor": "middle" }, labels.x),
  ];
}
const picture = (box, words, nodes) => svg("svg", { viewBox: `0 0 ${box.width} ${box.height}`, role: "img", "aria-label": words }, nodes);

// lines: [{ name, kind, points: [[step, value], ...] }]; a value that is missing, or not positive on a log axis, is a gap.
function lineChart(title, lines, isLog) {
  const can = (v) => v !== null && v !== undefined && (!isLog || v > 0), box = WIDE;
  const all = lines.flatMap((line) => line.points).filter(([, v]) => can(v));
  if (!all.length) return null;
  const x = scale([0, ...all.map(([step]) => step)], box.left, box.width - box.right), y = scale(all.map(([, v]) => v), box.height - box.bottom, box.top, isLog);
  const path = (points) => { let pen = "M"; return points.map(([step, v]) => { if (!can(v)) { pen = "M"; return ""; } const part = `${pen}${x.at(step).toFixed(1)} ${y.at(v).toFixed(1)}`; pen = "L"; return part; }).join(""); };
  const order = [...lines].sort((a, b) => (b.kind === "control") - (a.kind === "control"));
  return text("figure", [text("figcaption", title), picture(box, `${title}, ${lines.length} lines`, [...axes(box, x, y, { x: "step" }),
    ...order.map((line) => svg("path", { class: `line ${line.kind || ""}`, d: path(line.points) }, svg("title", {}, line.name)))])], { class: "chart" });
}
// The runs of the control in the context of an arm, as [run, name, kind]; none for the control itself.
function controlRuns(data, row) {
  if (!row || row.verdict === "control") return [];
  const control = ROWS.find((r) => r.sweep === row.sweep && r.context === row.context && r.verdict === "control"), place = control ? data.arms.indexOf(control.arm) : -1;
  return data.runs.map((cells) => opened(data, cells)).filter((run) => run.arm === place).map((run) => [run, `${control.arm}, seed ${run.seed}`, "control"]);
}
const CURVE_TITLES = { "reward/mean": "Reward of the sampler", "mismatch/kl_k3": "Mismatch k3, nats per token", "train/entropy": "Entropy, nats per token" };
function curvesOf(data, members) {
  const evals = members.flatMap(([run, name, kind]) => [{ name, kind, points: run.evals.map(([step, a]) => [step, a]) },
    ...(members.length === 1 ? [{ name: "as rolled", kind: "rolled", points: run.evals.map(([step, , b]) => [step, b]) }] : [])]);
  const steps = data.curves.map((column, i) => lineChart(CURVE_TITLES[column] || column, members.map(([run, name, kind]) =>
    ({ name, kind, points: data.points[run.points].map((step, k) => [step, run.curves[i][k]]) })), column === "mismatch/kl_k3"));
  const found = [lineChart(members.length === 1 ? "Accuracy; orange: as rolled" : "Accuracy, reference precision", evals), ...steps].filter(Boolean);
  if (!found.length) return text("p", "no curve was recorded", { class: "soft" });
  const hasControl = members.some(([, , kind]) => kind === "control");
  return text("div", [hasControl ? text("p", "A line per seed; dashed: the control's.", { class: "soft" }) : "", text("div", found, { class: "charts" })]);
}

// Arms of one sweep and context: rollout tokens/s against AUC, and the line of those that no other arm beats in both.
function drawSpeed(s, rows) {
  const figure = $("speed"), sweep = DATA.sweeps.find((x) => x.name === s.sweep);
  const arms = rows.filter((r) => r.auc !== null && r.rollout_tokens_per_s > 0);
  figure.hidden = !sweep || arms.length < 2 || new Set(arms.map((r) => r.context)).size > 1;
  if (figure.hidden) return figure.replaceChildren();
  const isPhone = matchMedia("(max-width: 640px)").matches;
  const box = isPhone ? { width: 380, height: 300, left: 46, right: 14, top: 10, bottom: 36 } : { width: 760, height: 330, left: 52, right: 120, top: 10, bottom: 36 };
  const x = scale(arms.map((r) => r.rollout_tokens_per_s), box.left + 8, box.width - box.right - 8, true), y = scale(arms.map((r) => r.auc), box.height - box.bottom - 6, box.top + 6);
  const front = arms.filter((r) => !arms.some((o) => o !== r && o.auc >= r.auc && o.rollout_tokens_per_s >= r.rollout_tokens_per_s && (o.auc > r.auc || o.rollout_tokens_per_s > r.rollout_tokens_per_s)))
    .sort((a, b) => a.rollout_tokens_per_s - b.rollout_tokens_per_s);
  const name = (r) => `${r.method} ${r.precision}${r.variant ? " " + r.variant : ""}`, place = (r) => `${x.at(r.rollout_tokens_per_s).toFixed(1)} ${y.at(r.auc).toFixed(1)}`;
  const named = new Set([...arms.filter((r) => r.verdict === "control"), ...front]), taken = [];
  const label = (r) => {
    const px = x.at(r.rollout_tokens_per_s), py = y.at(r.auc), isRight = px > box.width * 0.6 && isPhone, words = name(r), from = isRight ? px - 8 - words.length * 6.4 : px + 8, to = from + words.length * 6.4;
    if (taken.some((t) => from < t.to && to > t.from && Math.abs(py - t.y) < 13)) return [];
    taken.push({ from, to, y: py });
    return [svg("text", { class: "name", x: isRight ? px - 8 : px + 8, y: py + 4, "text-anchor": isRight ? "end" : "start" }, words)];
  };
  const dot = (r) => svg("a", { href: "#" + new URLSearchParams({ ...s, of: r.sweep, arm: r.arm, run: "" }), class: r.verdict.split(" ")[0] }, [svg("circle", { cx: x.at(r.rollout_tokens_per_s), cy: y.at(r.auc), r: 5 }),
    svg("title", {}, `${name(r)}: AUC ${fixed(r.auc)}, ${Math.round(r.rollout_tokens_per_s)} tokens/s, ${r.verdict}`)]);
  const emulated = sweep.engines.includes("embedded");
  figure.replaceChildren(text("figcaption", "Accuracy against speed"), picture(box, `AUC against rollout tokens per second of ${arms.length} arms`, [
    ...axes(box, x, y, { x: "rollout tokens/s, logarithmic; upwards: AUC" }), svg("path", { class: "front", d: front.map((r, i) => (i ? "L" : "M") + place(r)).join("") }),
    ...arms.map(dot), ...[...named].flatMap(label)]),
  text("p", `Dashed: arms that no other beats in both. Green and red: better and worse than the control, black: the control, blue: the rest. ${emulated ? "The formats are emulated here, which is slower than BF16: the speed is this machine's and says nothing about a GPU." : "Measured with real kernels."}`));
}
