// Paints a chart that was compiled when the page was written: signals and data are put in, colours are the theme's.
async function paint(box, chart, themes, values, data) {
  const { config, inks } = themes[document.documentElement.dataset.theme];
  const given = { ...inks, ...values };
  for (const size of ["width", "height"]) if (size in chart && size in values) chart[size] = values[size];
  for (const signal of chart.signals) if (signal.name in given) signal.value = given[signal.name];
  for (const set of chart.data) if (set.name in data) set.values = data[set.name];
  // `ast`: expressions are interpreted; the page's policy forbids to make code of text.
  const painted = await vegaEmbed(box, chart, { actions: false, ast: true, config, defaultStyle: false, hover: false, mode: "vega", renderer: "canvas", tooltip: false });
  for (const canvas of box.querySelectorAll("canvas")) canvas.setAttribute("aria-hidden", "true");
  return painted;
}

// Deflated JSON in an element of the page.
async function unpacked(id) {
  const bytes = Uint8Array.from(atob(JSON.parse(document.getElementById(id).textContent)), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}
