// The panel of one head: its findings, how its rows are distributed, its figures and what they mean.
class HeadPanel {
  constructor(page, map) {
    this.page = page;
    this.map = map;
    this.unpacked = new Map();
  }

  async show(layer, head) {
    const { figures, layers } = this.page;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const { runs, values } = await this.unpack(layer);
    if (turn !== this.turn) return;
    const at = layers[layer];
    document.getElementById("head-title").textContent = `Head ${head}`;
    const scale = at.scale === null ? "scale varies" : `scale ${write(at.scale, "number")}`;
    document.getElementById("head-place").textContent = `${at.title} · ${scale} · seen by ${at.seam}`;
    document.getElementById("head-findings").replaceChildren(...this.map.findings(layer, head).map((each) => this.finding(each)));
    document.getElementById("head-figures").replaceChildren(
      ...figures.map(({ key, label, definition, form }) => {
        const line = element("div");
        line.dataset.key = key;
        const term = element("dt", label);
        term.append(element("small", definition));
        line.append(term, element("dd", write(values[key][head], form)));
        return line;
      }),
    );
    await this.draw(runs.map((heads) => heads[head]), turn);
  }

  finding({ group, message }) {
    const { code, severity, name, remedy, source } = this.page.groups[group];
    const made = element("div", "", `finding ${severity}`);
    const title = element("h4");
    title.append(element("span", severity, "badge"), " ", element("span", code, "code"), ` ${name}`);
    made.append(title, element("p", message), element("p", remedy, "remedy"), element("p", source, "quiet-text"));
    return made;
  }

  async unpack(layer) {
    if (!this.unpacked.has(layer)) this.unpacked.set(layer, await unpacked(`layer-data-${layer}`));
    return this.unpacked.get(layer);
  }

  // The outer bins are open: they are drawn as wide as the value at their edge.
  bins({ edges, share }, [first, ...counts]) {
    const total = counts.reduce((sum, count) => sum + count, 0);
    const ends = share ? [0, ...edges, 1] : [2 * edges[0], ...edges, 2 * edges.at(-1)];
    return counts.map((count, at) => ({ low: ends[first + at], high: ends[first + at + 1], height: count / total }));
  }

  // On an axis that is not their own, bins become no narrower than a bar can be drawn, and their height is share by width.
  even(bins) {
    const narrowest = (bins.at(-1).high - bins[0].low) / 40;
    const merged = [];
    for (const bin of bins) {
      const last = merged.at(-1);
      if (last && last.high - last.low < narrowest) [last.high, last.height] = [bin.high, last.height + bin.height];
      else merged.push({ ...bin });
    }
    return merged.map(({ low, high, height }) => ({ low, high, height: height / (high - low) }));
  }

  async draw(runs, turn) {
    const box = document.getElementById("head-histograms");
    const drawn = this.page.histograms.map((histogram, number) => ({ ...histogram, bins: this.bins(histogram, runs[number]) }));
    box.replaceChildren(
      ...drawn.map((each) => {
        const figure = element("figure");
        each.plot = element("div", each.bins.length ? "" : "no row to show", "plot quiet-text");
        figure.append(element("figcaption", each.label), each.plot);
        return figure;
      }),
    );
    for (const each of drawn.filter(({ bins }) => bins.length)) await this.plot(each, turn);
  }

  async plot({ bins, label, plot, share }, turn) {
    const [low, high] = [bins[0].low, bins.at(-1).high];
    const { charts, themes } = this.page;
    const kind = share ? "share" : low > 0 && high > 30 * low ? "log" : "linear";
    const best = bins.reduce((most, bin) => (bin.height > most.height ? bin : most));
    const words = [low, high, best.low, best.high].map((value) => write(value, "number"));
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${label}: from ${words[0]} to ${words[1]}, most often from ${words[2]} to ${words[3]}`);
    if (turn !== this.turn) return;
    const width = Math.max(120, plot.clientWidth - 28);
    const { finalize } = await paint(plot, structuredClone(charts[kind]), themes, { width }, { bins: kind === "linear" ? this.even(bins) : bins });
    finalize();
  }
}
