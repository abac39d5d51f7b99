// Draws a lesson's pictures, and again when the theme or the width changes; then says that the page is ready.
const { pictures, themes } = JSON.parse(document.getElementById("data").textContent);
const drawn = new Map();

async function draw(name) {
  const box = document.getElementById(`picture-${name}`);
  const { chart, points } = pictures[name];
  const width = Math.max(180, box.clientWidth - 76);
  const { finalize } = await paint(box, structuredClone(chart), themes, { width }, { points });
  drawn.get(name)?.();
  drawn.set(name, finalize);
}

const all = async () => { for (const name of Object.keys(pictures)) await draw(name); };
await all();
let pending = 0;
let seen = innerWidth;
addEventListener("themechange", all);
addEventListener("resize", () => {
  if (innerWidth === seen) return;
  seen = innerWidth;
  clearTimeout(pending);
  pending = setTimeout(all, 120);
});
requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = performance.now().toFixed(0); }));
