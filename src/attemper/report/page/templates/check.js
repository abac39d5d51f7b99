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

function show(key) {
  const { label, definition } = page.figures.find((each) => each.key === key);
  document.getElementById("definition").textContent = `${label}: ${definition}.`;
  if (document.getElementById("as-table").open) mapTable(page, key);
  return map.show(key);
}

function first() {
  const marked = page.findings.find(({ group }) => map.marked.has(page.groups[group].severity));
  return marked ? { layer: marked.layer, head: marked.heads[0] ?? 0 } : { layer: 0, head: 0 };
}

figureSelect(page, show);
severityBoxes(page, map);
map.selected = first();
await show(page.maps[0].key);
if (!followHash(map)) await panel.show(map.selected.layer, map.selected.head);
addEventListener("hashchange", () => followHash(map));
onRepaint(() => { map.draw(); panel.show(map.selected.layer, map.selected.head); });
document.getElementById("as-table").addEventListener("toggle", (event) => { if (event.target.open) mapTable(page, map.map.key); });
requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = performance.now().toFixed(0); }));
