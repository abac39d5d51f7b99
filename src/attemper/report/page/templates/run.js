// Puts the page of a run together, then says when it was ready.
const page = JSON.parse(document.getElementById("data").textContent);
const curvesOfLayers = await unpacked("layers-data");
const spoken = document.getElementById("spoken");
const slider = document.getElementById("at-step");
const heads = new Map(); // layer to the curves of its heads, unpacked when they are looked at
let pending = 0;
let shownKey = page.maps[0].key;

const map = new HeatMap(page, (layer, head) => {
  clearTimeout(pending);
  pending = setTimeout(() => { panel(); layers(); spoken.textContent = map.sentence(layer, head).join(". "); }, 40);
  history.replaceState(null, "", `#head-${layer}-${head}`);
});
const ofLayers = new Curves(page, document.getElementById("curves"), 280);
const ofHeads = new Curves(page, document.getElementById("head-curves"), 220);
const ofScalars = page.scalarNames.map((name, number) => ({ name, curves: new Curves(page, document.getElementById(`scalar-${number}`), 120) }));

const figure = () => page.figures.find((each) => each.key === shownKey);
const scale = () => page.maps.find((each) => each.key === shownKey);
// A logarithmic axis wherever sizes of logits are held against 100, 1e3 and 1e4.
const form = () => ({ label: figure().label, form: figure().form, share: scale().low === 0 && scale().high === 1, logarithmic: scale().kind === "log", rules: page.rules[shownKey] ?? [] });

function layers() {
  const series = curvesOfLayers[shownKey].map((values, layer) => ({ name: page.layers[layer].title, values }));
  const marks = page.alarms.filter(({ layer }) => layer !== null).map(({ layer, step, severity, words }) => ({ x: step, series: layer, severity, words }));
  return ofLayers.draw({ ...form(), steps: page.steps, series, chosen: series.length > 1 ? map.selected.layer : null, marks });
}

async function headsOf(layer) {
  if (!heads.has(layer)) heads.set(layer, await unpacked(`layer-data-${layer}`));
  return heads.get(layer);
}

async function panel() {
  const { layer, head } = map.selected;
  const curves = await headsOf(layer);
  if (map.selected.layer !== layer || map.selected.head !== head) return undefined;
  const at = page.layers[layer];
  document.getElementById("head-title").textContent = `Head ${head}`;
  document.getElementById("head-place").textContent = `${at.title}, ${at.heads === 1 ? "one head" : `${at.heads} heads`}`;
  document.getElementById("head-figures").replaceChildren(
    ...page.figures.map(({ key, label, form }) => {
      const line = element("div");
      line.dataset.key = key;
      line.append(element("dt", label), element("dd", write(at.values[key][head], form)));
      return line;
    }),
  );
  const series = curves[shownKey].map((values, number) => ({ name: `head ${number}`, values }));
  const marks = page.alarms.filter((each) => each.layer === layer && each.head !== null).map((each) => ({ x: each.step, series: each.head, severity: each.severity, words: each.words }));
  return ofHeads.draw({ ...form(), steps: page.headSteps, series, chosen: head, marks });
}

async function scalars() {
  for (const { name, curves } of ofScalars) {
    const values = page.scalars[name];
    await curves.draw({ label: name, form: "number", share: false, logarithmic: false, steps: page.steps, series: [{ name, values }], chosen: null, rules: [], marks: [] });
  }
}

async function show(key) {
  shownKey = key;
  document.getElementById("definition").textContent = `${figure().label}: ${figure().definition}. Of a layer: its worst head.`;
  if (document.getElementById("as-table").open) mapTable(page, key);
  await Promise.all([layers(), map.show(key), panel()]);
}

// The map at another step: of a bucket of steps, what the curves show there.
async function atStep() {
  const at = Number(slider.value);
  document.getElementById("which-step").textContent = `step ${page.headSteps[at]}`;
  for (const [number, each] of page.layers.entries()) {
    const curves = await headsOf(number);
    each.atEnd ??= each.values;
    const then = Object.fromEntries(Object.entries(curves).map(([key, all]) => [key, all.map((values) => values[at])]));
    each.values = at === page.headSteps.length - 1 ? each.atEnd : then;
  }
  if (document.getElementById("as-table").open) mapTable(page, shownKey);
  await Promise.all([map.draw(), panel()]);
}

function first() {
  const grave = page.alarms.find(({ layer, severity }) => layer !== null && severity === "error") ?? page.alarms.find(({ layer }) => layer !== null);
  return grave ? { layer: grave.layer, head: grave.head ?? 0 } : { layer: 0, head: 0 };
}

figureSelect(page, show);
severityBoxes(page, map);
slider.max = page.headSteps.length - 1;
slider.value = slider.max;
slider.addEventListener("input", () => { clearTimeout(pending); pending = setTimeout(atStep, 40); });
map.selected = first();
await Promise.all([show(shownKey), scalars()]);
followHash(map);
addEventListener("hashchange", () => followHash(map));
onRepaint(() => { map.draw(); layers(); panel(); scalars(); });
document.getElementById("as-table").addEventListener("toggle", (event) => { if (event.target.open) mapTable(page, shownKey); });
requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = performance.now().toFixed(0); }));
