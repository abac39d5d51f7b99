// The heat map: one cell for each head, painted by Vega; selection, tooltip and keys are added here.
const MARGIN = 44; // around cells and names, in pixels
const PANEL = 400; // what the panel of a head takes at the side of the map, gap included
const WORST = ["error", "warning", "info"];

class HeatMap {
  constructor(page, onSelect) {
    this.page = page;
    this.onSelect = onSelect;
    this.box = document.getElementById("map");
    this.tip = document.getElementById("tip");
    this.byHead = new Map(); // "layer-head" and "layer--1" to the findings there
    for (const finding of page.findings) {
      for (const head of finding.heads.length ? finding.heads : [-1]) {
        const key = `${finding.layer}-${head}`;
        this.byHead.set(key, [...(this.byHead.get(key) ?? []), finding]);
      }
    }
    this.marked = new Set(WORST);
    this.selected = { layer: 0, head: 0 };
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  // Those of the head itself first, then those of its whole layer.
  findings(layer, head) {
    return [...(this.byHead.get(`${layer}-${head}`) ?? []), ...(this.byHead.get(`${layer}--1`) ?? [])];
  }

  show(key) {
    this.map = this.page.maps.find((each) => each.key === key);
    this.figure = this.page.figures.find((each) => each.key === key);
    return this.draw();
  }

  async draw() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.box.ariaBusy = "true";
    const { charts, labelWidth, layers, themes } = this.page;
    const most = Math.max(...layers.map((each) => each.heads));
    const names = layers.map((each) => each.label);
    // Vega cuts a label; a letter takes about six pixels.
    const room = this.width() - Math.min(labelWidth, 6 * Math.max(...names.map((name) => name.length))) - MARGIN;
    const step = Math.max(4, Math.min(36, Math.floor(room / most)));
    const height = Math.max(7, Math.min(26, step, Math.floor(1400 / layers.length)));
    const chart = structuredClone(charts.map);
    const { kind, low, high, reverse } = this.map;
    Object.assign(chart.scales.find(({ name }) => name === "color"), { type: kind, domain: [low, high], reverse });
    chart.legends[0].title = this.figure.label;
    const signals = { labels: names, layers: layers.length, heads: most, step: Math.min(step, height), x_step: step, y_step: height };
    const { view, finalize } = await paint(this.box, chart, themes, signals, { ...this.cells(), marks: this.marks(), selected: [this.selected] });
    if (turn !== this.turn) return finalize();
    this.finalize?.();
    [this.view, this.finalize] = [view, finalize];
    view.addEventListener("click", (_, item) => { if (item?.datum && known(item.datum.layer)) this.select(item.datum.layer, Math.max(0, item.datum.head)); });
    view.addEventListener("mousemove", (event, item) => this.hover(event, item?.datum));
    view.addEventListener("mouseout", () => { this.tip.hidden = true; });
    this.box.ariaBusy = "false";
    return undefined;
  }

  // What there is for the map: all, or what the panel beside it leaves.
  width() {
    const whole = this.box.closest(".explorer").clientWidth;
    return whole > 880 ? whole - PANEL : whole;
  }

  value(layer, head) {
    return this.page.layers[layer].values[this.map.key][head];
  }

  // A logarithmic scale has no place for zero or an infinity: they take the colour of the nearer end.
  cells() {
    const [cells, blanks] = [[], []];
    const { low, high } = this.map;
    this.page.layers.forEach(({ heads }, layer) => {
      for (let head = 0; head < heads; head += 1) {
        const value = finite(this.value(layer, head));
        if (!known(value)) blanks.push({ layer, head });
        else cells.push({ layer, head, value: Math.max(low, Math.min(high, value)) });
      }
    });
    return { cells, blanks };
  }

  marks() {
    const marks = [];
    for (const [key, found] of this.byHead) {
      const severity = WORST.find((each) => this.marked.has(each) && found.some(({ group }) => this.page.groups[group].severity === each));
      const [layer, head] = key.split(/-(.*)/s).map(Number);
      if (severity) marks.push({ layer, head, severity });
    }
    return marks;
  }

  async mark(severities) {
    this.marked = severities;
    this.box.ariaBusy = "true";
    await this.view.data("marks", this.marks()).runAsync();
    this.box.ariaBusy = "false";
  }

  select(layer, head) {
    layer = Math.max(0, Math.min(this.page.layers.length - 1, layer));
    head = Math.max(0, Math.min(this.page.layers[layer].heads - 1, head));
    this.selected = { layer, head };
    this.view?.data("selected", [this.selected]).runAsync();
    this.onSelect(layer, head);
  }

  key(event) {
    const { layer, head } = this.selected;
    const to = {
      ArrowLeft: [layer, head - 1], ArrowRight: [layer, head + 1], ArrowUp: [layer - 1, head], ArrowDown: [layer + 1, head],
      Home: [layer, 0], End: [layer, Infinity], PageUp: [layer - 10, head], PageDown: [layer + 10, head],
    }[event.key];
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.select(...to);
  }

  sentence(layer, head) {
    const { title } = this.page.layers[layer];
    const found = this.findings(layer, head).map(({ group }) => this.page.groups[group]);
    const names = [...new Set(found.map(({ code, name }) => `${code} ${name}`.trim()))];
    return [`${title}, head ${head}`, `${this.figure.label} ${write(this.value(layer, head), this.figure.form)}`, ...names];
  }

  hover(event, datum) {
    this.tip.hidden = !datum || !known(datum.layer) || datum.head < 0;
    if (this.tip.hidden) return;
    this.tip.replaceChildren(...this.sentence(datum.layer, datum.head).map((line) => element("div", line)));
    const left = Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8);
    this.tip.style.transform = `translate(${Math.max(8, left)}px, ${event.clientY + 16}px)`;
  }
}
