// Puts the page of a check together, then says when it was ready.
const page = JSON.parse(document.getElementById("data").textContent);
const spoken = document.getElementById("spoken");
let pending = 0;

const map = new HeatMap(page, (layer, head) => {
  clearTimeout(pending); // a held arrow key passes heads faster than their histograms are drawn
  pending = setTimeout(() => { panel.show(layer, head); spoken.textContent = map.sentence(layer, head).join(". "); }, 40);
  history.replaceState(null, "", `#head-${layer}-${head}`);
});
const panel = new HeadPanel(page, map);

function figures() {
  const select = document.getElementById("figure");
  for (const { key } of page.maps) {
    const option = element("option", page.figures.find((each) => each.key === key).label);
    option.value = key;
    select.append(option);
  }
  select.addEventListener("change", () => show(select.value));
}

function show(key) {
  const { label, definition } = page.figures.find((each) => each.key === key);
  document.getElementById("definition").textContent = `${label}: ${definition}.`;
  if (document.getElementById("as-table").open) table(key);
  return map.show(key);
}

// Descriptions are marked only where there is nothing graver, which they would hide.
function severities() {
  const box = document.getElementById("severities");
  const present = WORST.filter((severity) => page.findings.some(({ group }) => page.groups[group].severity === severity));
  const chosen = new Set(present.some((severity) => severity !== "info") ? present.filter((severity) => severity !== "info") : present);
  for (const severity of present) {
    const label = element("label");
    const input = element("input");
    input.type = "checkbox";
    input.checked = chosen.has(severity);
    input.addEventListener("change", () => {
      if (input.checked) chosen.add(severity); else chosen.delete(severity);
      map.mark(chosen);
    });
    label.append(input, ` ${severity}`);
    box.append(label);
  }
  box.hidden = !present.length;
  map.marked = chosen;
}

function table(key) {
  const { label, form } = page.figures.find((each) => each.key === key);
  const most = Math.max(...page.layers.map(({ heads }) => heads));
  const made = element("table", "", "layers");
  made.append(element("caption", label));
  const top = made.createTHead().insertRow();
  const head = (text, scope) => { const cell = element("th", text); cell.scope = scope; return cell; };
  top.append(head("layer", "col"), ...Array.from({ length: most }, (_, number) => head(`head ${number}`, "col")));
  const body = made.createTBody();
  for (const { label: name, values } of page.layers) {
    const row = body.insertRow();
    row.append(head(name, "row"), ...values[key].map((value) => element("td", write(value, form), "num")));
  }
  document.querySelector("#as-table > div").replaceChildren(made);
}

// #head-3-5 and #layer-3: where a finding's link leads.
function follow() {
  const found = location.hash.match(/^#(?:head-(\d+)-(\d+)|layer-(\d+))$/);
  if (!found) return false;
  const layer = Number(found[1] ?? found[3]);
  map.select(layer, Number(found[2] ?? 0));
  document.querySelector(".tools").scrollIntoView({ block: "start" });
  map.box.focus({ preventScroll: true });
  return true;
}

function first() {
  const marked = page.findings.find(({ group }) => map.marked.has(page.groups[group].severity));
  return marked ? { layer: marked.layer, head: marked.heads[0] ?? 0 } : { layer: 0, head: 0 };
}

figures();
severities();
map.selected = first();
await show(page.maps[0].key);
if (!follow()) await panel.show(map.selected.layer, map.selected.head);
addEventListener("hashchange", follow);
addEventListener("themechange", () => { map.draw(); panel.show(map.selected.layer, map.selected.head); });
let width = innerWidth;
let resizing = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone's address bar comes and goes
  width = innerWidth;
  clearTimeout(resizing);
  resizing = setTimeout(() => { map.draw(); panel.show(map.selected.layer, map.selected.head); }, 150);
});
document.getElementById("as-table").addEventListener("toggle", (event) => { if (event.target.open) table(map.map.key); });
requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = performance.now().toFixed(0); }));
