// Controls that pages with a map of heads share: which figure, which severities, the map as a table, links to a head.
function figureSelect(page, onChange) {
  const select = document.getElementById("figure");
  for (const { key } of page.maps) {
    const option = element("option", page.figures.find((each) => each.key === key).label);
    option.value = key;
    select.append(option);
  }
  select.addEventListener("change", () => onChange(select.value));
}

// Descriptions are marked only where there is nothing graver, which they would hide.
function severityBoxes(page, map) {
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

function mapTable(page, key) {
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
function followHash(map) {
  const found = location.hash.match(/^#(?:head-(\d+)-(\d+)|layer-(\d+))$/);
  if (!found) return false;
  const layer = Number(found[1] ?? found[3]);
  map.select(layer, Number(found[2] ?? 0));
  document.querySelector(".tools").scrollIntoView({ block: "start" });
  map.box.focus({ preventScroll: true });
  return true;
}

// Charts are painted anew where the theme or the width changes.
function onRepaint(paint) {
  addEventListener("themechange", paint);
  let width = innerWidth;
  let resizing = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    clearTimeout(resizing);
    resizing = setTimeout(paint, 150);
  });
}
