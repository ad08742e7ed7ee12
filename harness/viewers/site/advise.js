// The first form: the recipes of `lowbit advise`, from the grid of answers in DATA.advice, in the same order. Its state is not in the address.
const ADVICE = DATA.advice;
function recipes(size, length, gpus, deploy, dose) {
  const { words, formats, corrections, control } = ADVICE, speeds = ADVICE.speeds[`${size} ${length} ${gpus}`], changes = ADVICE.accuracies[`${size} ${length} ${deploy} ${dose}`];
  const every = formats.flatMap((format, i) => corrections.map((correction, j) => {
    const [value, step, why] = speeds[i], [isKnown, change, shown, source] = changes[i * corrections.length + j];
    return { format, correction, value, step: words[step], change, isKnown, accuracy: words[shown], evidence: `Step: ${words[why]}. Accuracy: ${words[source]}.` };
  }));
  const last = { format: control, correction: "none", value: 1, step: "1, the control", change: 0, isKnown: true, accuracy: "0, the control", evidence: "BF16 rollouts are what is compared with." };
  const down = (a, b) => (a === null ? Infinity : -a) - (b === null ? Infinity : -b) || 0; // two infinities are equal
  const ordered = (rows) => rows.map((r, i) => [r, i]).sort(([a, i], [b, j]) => down(a.value, b.value) || down(a.change, b.change) || i - j).map(([r]) => r);
  return [ordered([last, ...every.filter((r) => r.isKnown)]), ordered(every.filter((r) => !r.isKnown))];
}
function drawAdvice() {
  const [size, length, gpus, dose, deploy] = ["size", "length", "gpus", "dose", "deploy"].map((name) => $("a-" + name).value), [answered, open] = recipes(size, length, gpus, deploy, dose);
  const line = (r) => {
    const more = text("tr", text("td", r.evidence, { colspan: 4 }), { class: "evidence", hidden: "" }), button = text("button", r.format, { class: "link", type: "button", "aria-expanded": "false" });
    button.addEventListener("click", () => { more.hidden = !more.hidden; button.setAttribute("aria-expanded", String(!more.hidden)); });
    return [text("tr", [text("th", button, { scope: "row" }), text("td", r.correction), text("td", r.step), text("td", r.accuracy)]), more];
  };
  const part = (title, rows) => [text("tr", text("th", title, { colspan: 4, scope: "rowgroup" }), { class: "part" }), ...rows.flatMap(line)];
  $("advice-rows").replaceChildren(text("thead", text("tr", ["format", "correction", "step against BF16", "accuracy against BF16"].map((name) => text("th", name, { scope: "col" })))),
    text("tbody", [...part("Accuracy measured on a like case", answered), ...part("Accuracy not known for your model, fastest first", open)]));
  const fast = answered.find((r) => r.value > 1), may = open.find((r) => r.value > 1);
  $("advice-words").textContent = fast ? `${fast.format}${fast.correction === "none" ? "" : " with " + fast.correction}: the fastest whose risk is answered, a step ${fast.step}; accuracy ${fast.accuracy}.`
    : "bf16: no faster format has a change of accuracy that is known here." + (may ? ` The fastest that may be: ${may.format}, a step ${may.step}; its accuracy is not known.` : "");
  const k3 = ADVICE.k3[dose] === undefined ? dose : ADVICE.k3[dose];
  $("advice-command").textContent = `lowbit advise --size ${size} --length ${length} --gpus ${gpus}${k3 ? " --k3 " + k3 : ""} --deploy ${deploy}`;
}
if (ADVICE) {
  const options = (name, pairs, chosen) => { $("a-" + name).replaceChildren(...pairs.map(([value, words]) => text("option", words, { value }))); $("a-" + name).value = chosen; };
  const same = (values) => values.map((value) => [value, String(value)]);
  options("size", same(ADVICE.sizes), "7b"); options("length", same(ADVICE.lengths), "8192"); options("gpus", same(ADVICE.gpus), "8");
  options("dose", same(ADVICE.doses), ADVICE.doses[1]); options("deploy", Object.entries(ADVICE.deploy), "bf16");
  $("question-form").addEventListener("change", drawAdvice);
  $("advice").hidden = false;
  drawAdvice();
}
