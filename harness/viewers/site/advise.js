// The first form: the recipes of `lowbit advise`, from the grid of answers in DATA.advice, in the same order. Its state is not in the address.
const ADVICE = DATA.advice;
function recipes(size, length, gpus, deploy, mismatch) {
  const { words, formats, pairs, none, standings } = ADVICE, speeds = ADVICE.speeds[`${size} ${length} ${gpus}`], found = ADVICE.accuracies[`${deploy} ${mismatch}`];
  const row = (format, correction, [value, step, why], [standing, cells, source]) =>
    ({ format, correction, value, standing, cells: [format, correction, step, ...cells.map((i) => words[i])], evidence: `Step: ${why}. Accuracy: ${words[source]}.` });
  const every = [row("bf16", none, [1, "1, the control", "the control"], found.at(-1)), ...pairs.map(([format, correction], i) => {
    const [value, step, why] = speeds[formats.indexOf(format)];
    return row(format, correction, [value, words[step], words[why]], found[i]);
  })];
  const place = (r) => [Object.keys(standings).indexOf(r.standing), r.value === null ? Infinity : -r.value, Number(r.correction === none)];
  const order = (a, b) => { const [x, y] = [place(a), place(b)], i = x.findIndex((value, k) => value !== y[k]); return i < 0 ? 0 : x[i] < y[i] ? -1 : 1; };
  return every.sort(order);
}
function drawAdvice() {
  const [size, length, gpus, mismatch, deploy] = ["size", "length", "gpus", "mismatch", "deploy"].map((name) => $("a-" + name).value), rows = recipes(size, length, gpus, deploy, mismatch), width = ADVICE.header.length;
  const line = (r) => {
    const more = text("tr", text("td", r.evidence, { colspan: width }), { class: "evidence", hidden: "" }), button = text("button", r.format, { class: "link", type: "button", "aria-expanded": "false" });
    button.addEventListener("click", () => { more.hidden = !more.hidden; button.setAttribute("aria-expanded", String(!more.hidden)); });
    return [text("tr", [text("th", button, { scope: "row" }), ...r.cells.slice(1).map((cell) => text("td", cell))]), more];
  };
  const part = ([standing, title]) => {
    const own = rows.filter((r) => r.standing === standing);
    return own.length ? [text("tr", text("th", title, { colspan: width, scope: "rowgroup" }), { class: "part" }), ...own.flatMap(line)] : [];
  };
  $("advice-rows").replaceChildren(text("thead", text("tr", ADVICE.header.map((name) => text("th", name, { scope: "col" })))), text("tbody", Object.entries(ADVICE.standings).flatMap(part)));
  const fast = rows.find((r) => r.standing === "held" && r.value > 1);
  $("advice-words").textContent = fast ? `${fast.format}${fast.correction === ADVICE.none ? "" : " with " + fast.correction}: the fastest that equals BF16 rollouts on word problems. Step: ${fast.cells[2]}.`
    : "bf16: no faster format is known that equals BF16 rollouts on word problems.";
  $("advice-command").textContent = `lowbit advise --size ${size} --length ${length} --gpus ${gpus}${mismatch === ADVICE.mismatches[0] ? "" : " --k3 " + mismatch} --deploy ${deploy}`;
}
if (ADVICE) {
  const options = (name, pairs, chosen) => { $("a-" + name).replaceChildren(...pairs.map(([value, words]) => text("option", words, { value }))); $("a-" + name).value = chosen; };
  const same = (values) => values.map((value) => [value, String(value)]);
  options("size", same(ADVICE.sizes), "7b"); options("length", same(ADVICE.lengths), "8192"); options("gpus", same(ADVICE.gpus), "8");
  options("mismatch", same(ADVICE.mismatches), ADVICE.mismatches[0]); options("deploy", Object.entries(ADVICE.deploy), "bf16");
  $("question-form").addEventListener("change", drawAdvice);
  $("advice").hidden = false;
  drawAdvice();
}
