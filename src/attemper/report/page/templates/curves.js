// Lines over steps: painted by Vega; what the line under the pointer is, is said beside it.
class Curves {
  constructor(page, box, height) {
    this.page = page;
    this.box = box;
    this.height = height;
    this.tip = document.getElementById("tip");
    this.box.addEventListener("mousemove", (event) => this.hover(event));
    this.box.addEventListener("mouseleave", () => { this.tip.hidden = true; });
  }

  // shown: { label, form, share, logarithmic, steps, series: [{ name, values }], chosen, rules: [{ y, words }], marks: [{ x, series, severity, words }] }
  async draw(shown) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.shown = shown;
    this.box.ariaBusy = "true";
    const { charts, themes } = this.page;
    const kind = shown.share ? "share" : shown.logarithmic ? "log" : "linear";
    const height = (value) => { const number = finite(value); return Number.isFinite(number) && (kind !== "log" || number > 0) ? number : null; };
    const line = ({ values }, series) => values.map((value, at) => ({ x: shown.steps[at], y: height(value), series }));
    const points = shown.series.flatMap(line);
    const largest = points.reduce((most, { y }) => Math.max(most, y ?? -Infinity), -Infinity);
    const data = {
      points,
      chosen: known(shown.chosen) ? line(shown.series[shown.chosen], shown.chosen) : [],
      rules: shown.rules.filter(({ y }) => y <= 3 * largest),
      marks: shown.marks.map((mark) => ({ ...mark, y: this.at(mark, height) })).filter(({ y }) => y !== null),
    };
    const chart = structuredClone(charts[kind]);
    const domain = (name, ends) => { chart.scales.find((scale) => scale.name === name).domain = ends; };
    const heights = [...points, ...data.rules, ...data.marks].map(({ y }) => y).filter(known);
    domain("x", span([shown.steps[0], shown.steps.at(-1)]));
    if (kind !== "share") domain("y", heights.length ? span([heights.reduce((a, b) => Math.min(a, b)), heights.reduce((a, b) => Math.max(a, b))], kind) : [1, 2]);
    const width = Math.max(160, this.box.clientWidth - 64);
    const { view, finalize } = await paint(this.box, chart, themes, { width, height: this.height, count: shown.series.length }, data);
    if (turn !== this.turn) return finalize();
    this.finalize?.();
    [this.view, this.finalize] = [view, finalize];
    this.box.setAttribute("aria-label", this.sentence());
    this.box.ariaBusy = "false";
    return undefined;
  }

  // Where a mark stands: on its line, at the shown step that is nearest to its own.
  at({ x, series }, height) {
    const { values } = this.shown.series[series];
    return height(values[nearest(this.shown.steps, x)]);
  }

  sentence() {
    const { form, label, series, steps } = this.shown;
    const ends = series.map(({ name, values }) => ({ name, value: finite(values.at(-1)) })).filter(({ value }) => known(value));
    if (!ends.length) return `${label}: no number`;
    ends.sort((one, other) => one.value - other.value);
    const words = [ends[0], ends.at(-1)].map(({ name, value }) => `${write(value, form)} (${name})`);
    return `${label} over steps ${steps[0]} to ${steps.at(-1)}; at the end from ${words.join(" to ")}`;
  }

  hover(event) {
    const canvas = this.box.querySelector("canvas");
    if (!this.view || !canvas) return;
    const [left, top] = this.view.origin();
    const bounds = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left - left, event.clientY - bounds.top - top];
    const inside = x >= -4 && x <= this.view.width() + 4 && y >= -4 && y <= this.view.height() + 4;
    const at = nearest(this.shown.steps, this.view.scale("x").invert(x));
    const up = this.view.scale("y");
    const far = ({ values }) => { const value = finite(values[at]); return Number.isFinite(value) ? Math.abs(up(value) - y) : Infinity; };
    const line = this.shown.series.reduce((best, each) => (far(each) < far(best) ? each : best), this.shown.series[0]);
    const near = Number.isFinite(far(line));
    this.tip.hidden = !inside || !near;
    if (this.tip.hidden) return;
    const marks = this.shown.marks.filter((mark) => Math.abs(this.view.scale("x")(mark.x) - x) < 7).slice(0, 4);
    const lines = [line.name, `step ${this.shown.steps[at]}: ${write(line.values[at], this.shown.form)}`, ...marks.map(({ words }) => words)];
    this.tip.replaceChildren(...lines.map((words) => element("div", words)));
    const beside = Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8);
    this.tip.style.transform = `translate(${Math.max(8, beside)}px, ${event.clientY + 16}px)`;
  }
}

// An axis of no width has no place for anything.
const span = ([low, high], kind = "linear") => (low < high ? [low, high] : kind === "log" ? [low / 2, high * 2] : [low - 1, high + 1]);

const nearest = (steps, step) => steps.reduce((best, each, at) => (Math.abs(each - step) < Math.abs(steps[best] - step) ? at : best), 0);
