// The dials: reads them, measures when the browser has time, and shows what came out.
const dials = document.getElementById("dials");
const { words, forms, steps } = JSON.parse(document.getElementById("dials-data").textContent);
const shape = (name, given) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
  return made;
};
const short = (value) => (value === null ? "—" : Number.isFinite(value) ? String(Number(value.toPrecision(3))).replace("-", "−") : "∞");
const rare = (value) => (value > 0 && value < 0.0005 ? "< 0.1%" : write(value, "percent")); // not 0, where something is
const show = (value, form) => (value !== null && form === "percent" ? rare(value) : short(value));
const filled = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
const control = (name) => document.getElementById(`dials-${name}`);

// A slider's place stands for a number; where there is no list of numbers it is the number.
const valueOf = (name) => (steps[name] ? steps[name][Number(control(name).value)] : Number(control(name).value));

function settings() {
  const numbers = Object.fromEntries(["d", "n", "tau", "rho", "sigma"].map((name) => [name, valueOf(name)]));
  return { ...numbers, rule: control("rule").value, dtype: control("dtype").value, softmax: control("softmax").value };
}

function values() {
  for (const name of ["d", "n", "tau", "rho", "sigma"]) {
    const text = String(valueOf(name));
    control(name).setAttribute("aria-valuetext", text);
    control(`${name}-value`).textContent = text;
  }
  control("tau").disabled = control("rule").value !== "cosine";
  control("sigma").disabled = !control("tau").disabled; // what is normalised has no size of its own
}

function bars(heights, names) {
  const most = Math.max(...heights, Number.MIN_VALUE);
  return heights.map((height, at) =>
    shape("rect", { x: at, width: 0.9, y: 100 - (100 * height) / most, height: (100 * height) / most, "data-value": names[at] }));
}

function drawHistogram({ low, high, counts }, { dtype }, std) {
  const drawn = bars(counts, counts);
  const limit = Math.log(DTYPES[dtype].largest);
  const beyond = low !== null && limit > low && limit < high;
  const at = (BINS * (limit - low)) / (high - low);
  if (beyond) drawn.push(shape("line", { x1: at, x2: at, y1: 0, y2: 100 }));
  const picture = control("histogram");
  picture.replaceChildren(...drawn);
  const texts = { low: short(low), high: short(high), std: short(std), limit: limit.toFixed(2) };
  control("low").textContent = texts.low;
  control("high").textContent = texts.high;
  picture.setAttribute("aria-label", filled(words.histogram_spoken, texts));
  control("histogram-note").textContent = beyond ? filled(words.limit, texts) : "";
}

function drawWeights(weights, { n }) {
  const shown = weights === null ? [] : [...weights.slice(0, BINS)];
  const picture = control("weights");
  picture.setAttribute("viewBox", `0 0 ${Math.min(n, BINS)} 100`);
  picture.replaceChildren(...bars(shown, shown));
  const rest = weights === null ? 0 : weights.slice(BINS).reduce((sum, each) => sum + each, 0);
  const texts = { first: shown.length ? short(shown[0]) : "", count: n - shown.length, share: rare(rest) };
  control("most").textContent = texts.first;
  picture.setAttribute("aria-label", weights === null ? words.lost : filled(words.weights_spoken, texts));
  control("weights-note").textContent = weights === null ? words.lost : n > BINS ? filled(words.rest, texts) : "";
}

let speaking = 0;
function speak(figures) {
  clearTimeout(speaking); // a reader who holds a key down is told once, at the end
  const texts = Object.fromEntries(Object.entries(figures).map(([name, value]) => [name, show(value, forms[name])]));
  speaking = setTimeout(() => { control("spoken").textContent = filled(words.spoken, texts); }, 500);
}

function update() {
  const given = settings();
  const begun = performance.now();
  const { histogram: found, weights, figures } = measure(given);
  drawHistogram(found, given, figures.logit_std);
  drawWeights(weights, given);
  for (const [name, value] of Object.entries(figures)) {
    const cell = control(`figure-${name}`);
    cell.textContent = show(value, forms[name]);
    cell.dataset.value = String(value);
  }
  speak(figures);
  dials.dataset.took = (performance.now() - begun).toFixed(1);
  dials.dataset.shown = JSON.stringify(given);
}

// Not within the event: the slider moves on while the numbers are made, and only the last setting is measured.
let waiting = 0;
dials.addEventListener("input", () => {
  values();
  clearTimeout(waiting);
  waiting = setTimeout(update, 0);
});
values();
update();
