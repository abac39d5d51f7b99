// Attention over seeded random queries and keys, as eager code computes it in a dtype: what the dials show.
// tests/report/page/dials_oracle.py has the same definitions in torch; whoever changes one changes both.
const WIDEST = 1024; // largest d and largest n
const KEYS = 0, QUERIES = 1, GRADIENTS = 2; // seeds
const BINS = 48;

// 32 random bits for (seed, index). Counter-based: an entry keeps its value when d or n changes.
function bits(seed, index) {
  let x = (index + Math.imul(seed, 0x9e3779b9)) | 0;
  x = Math.imul(x ^ (x >>> 16), 0x21f0aaad);
  x = Math.imul(x ^ (x >>> 15), 0xd35a2d97);
  return (x ^ (x >>> 15)) >>> 0;
}

// Two normal numbers for (seed, pair), by Box and Muller; the first uniform is never 0.
function normals(seed, pair, into, at) {
  const radius = Math.sqrt(-2 * Math.log((bits(seed, 2 * pair) + 0.5) / 4294967296));
  const angle = (2 * Math.PI * bits(seed, 2 * pair + 1)) / 4294967296;
  into[at] = radius * Math.cos(angle);
  into[at + 1] = radius * Math.sin(angle);
}

// Rows of normal numbers, made when they are asked for and kept: a million of them take longer than a slider may.
class Normals {
  constructor(seed) { this.seed = seed; this.rows = []; this.filled = []; }

  row(number, length) {
    const values = (this.rows[number] ??= new Float64Array(WIDEST));
    let done = this.filled[number] ?? 0;
    for (; done < length; done += 2) normals(this.seed, (number * WIDEST + done) / 2, values, done);
    this.filled[number] = done;
    return values;
  }
}

// To the nearest number of `digits` bits, ties to even: adding 1.5·2^52 quanta leaves no room for what is finer than one.
function rounder(digits, lowest, largest) {
  const double = new Float64Array(1);
  const halves = new Uint32Array(double.buffer);
  double[0] = 1;
  const high = halves[1] ? 1 : 0;
  return (value) => {
    const single = Math.fround(value); // as torch does: through float32, in which a 16-bit product is summed
    if (!Number.isFinite(single)) return single;
    double[0] = single;
    const exponent = Math.max(((halves[high] >>> 20) & 0x7ff) - 1023, lowest);
    halves[high] = ((exponent - digits + 1 + 52 + 1023) << 20) | 0x80000;
    halves[1 - high] = 0;
    const rounded = single + double[0] - double[0];
    if (rounded === 0) return single < 0 || Object.is(single, -0) ? -0 : 0;
    return Math.abs(rounded) > largest ? rounded * Infinity : rounded;
  };
}

const DTYPES = {
  float32: { round: Math.fround, largest: 3.4028234663852886e38 },
  float16: { round: rounder(11, -14, 65504), largest: 65504 },
  bfloat16: { round: rounder(8, -126, 3.3895313892515355e38), largest: 3.3895313892515355e38 },
};
const FACTORS = { none: () => 1, sqrt: ({ d }) => 1 / Math.sqrt(d), linear: ({ d }) => 1 / d, cosine: ({ tau }) => tau };

const kept = { keys: new Normals(KEYS), queries: new Normals(QUERIES), gradients: new Normals(GRADIENTS) };

// Fewer keys, more rows, so that there are always enough logits to look at; a multiple of four.
const rowsFor = (n) => Math.min(512, Math.max(16, 4 * Math.floor(4096 / n)));

// Keys as the dtype holds them. The last ones are kept: most dials leave them as they are.
let last = { name: "", key: new Float64Array(0) };
function keysOf({ d, n, rule, dtype, sigma }) {
  const name = [d, n, rule === "cosine", dtype, sigma].join();
  if (last.name === name) return last.key;
  const key = new Float64Array(n * d);
  for (let j = 0; j < n; j += 1) {
    const own = kept.keys.row(j, d);
    for (let i = 0; i < d; i += 1) key[j * d + i] = sigma * own[i];
  }
  last = { name, key: held(key, d, rule, dtype) };
  return key;
}

// Queries and keys as the dtype holds them; query r looks for key r mod n, with which each of its entries correlates by rho.
function entries(settings) {
  const { d, n, rule, dtype, rho, sigma } = settings;
  const rows = rowsFor(n);
  const rest = Math.sqrt(1 - rho * rho);
  const query = new Float64Array(rows * d);
  for (let r = 0; r < rows; r += 1) {
    const own = kept.keys.row(r % n, d);
    const other = kept.queries.row(r, d);
    for (let i = 0; i < d; i += 1) query[r * d + i] = sigma * (rho * own[i] + rest * other[i]);
  }
  return { query: held(query, d, rule, dtype), key: keysOf(settings), rows };
}

// Rounded to the dtype; before a cosine also divided by the norm, and rounded again.
function held(all, d, rule, dtype) {
  const { round } = DTYPES[dtype];
  for (let i = 0; i < all.length; i += 1) all[i] = round(all[i]);
  for (let at = 0; rule === "cosine" && at < all.length; at += d) {
    let squares = 0;
    for (let i = at; i < at + d; i += 1) squares += all[i] * all[i];
    const norm = Math.max(Math.sqrt(squares), 1e-12);
    for (let i = at; i < at + d; i += 1) all[i] = round(all[i] / norm);
  }
  return all;
}

// Products are summed in double, rounded once, then multiplied by the factor and rounded again.
function logits(settings) {
  const { d, n, rule, dtype } = settings;
  const { round } = DTYPES[dtype];
  const { query, key, rows } = entries(settings);
  const factor = Math.fround(FACTORS[rule](settings));
  const products = new Float64Array(rows * n);
  const scaled = new Float64Array(rows * n);
  for (let r = 0; r < rows; r += 4) { // four sums side by side: one alone waits for each of its additions
    for (let j = 0; j < n; j += 1) {
      let one = 0, two = 0, three = 0, four = 0;
      for (let i = 0, a = r * d, b = j * d; i < d; i += 1) {
        const entry = key[b + i];
        one += query[a + i] * entry;
        two += query[a + d + i] * entry;
        three += query[a + 2 * d + i] * entry;
        four += query[a + 3 * d + i] * entry;
      }
      products[r * n + j] = one;
      products[(r + 1) * n + j] = two;
      products[(r + 2) * n + j] = three;
      products[(r + 3) * n + j] = four;
    }
  }
  for (let at = 0; at < products.length; at += 1) {
    products[at] = round(products[at]);
    scaled[at] = round(Math.fround(products[at] * factor));
  }
  return { products, scaled, rows };
}

// A row's weights as the code writes them: e^(z − max) / Σ, or e^z / Σ in which each step is rounded.
function weightsOf(z, softmax, round) {
  if (softmax === "plain") {
    const raised = z.map((each) => round(Math.exp(each)));
    const total = round(raised.reduce((sum, each) => sum + each, 0));
    return raised.map((each) => round(each / total));
  }
  const most = z.reduce((a, b) => Math.max(a, b));
  const raised = z.map((each) => Math.exp(each - most));
  const total = raised.reduce((sum, each) => sum + each, 0);
  return raised.map((each) => round(each / total));
}

// What one row says: attemper's record (docs/statistics.md), and the gradient dz = p·(dp − Σ p·dp) for given dp.
function record(z, dp) {
  const n = z.length;
  const most = z.reduce((a, b) => Math.max(a, b));
  const p = new Float64Array(n);
  let total = 0, mean = 0, square = 0, entropy = 0, p2 = 0, p3 = 0, inner = 0, norm = 0;
  for (let j = 0; j < n; j += 1) { p[j] = Math.exp(z[j] - most); total += p[j]; mean += z[j] / n; }
  for (let j = 0; j < n; j += 1) {
    p[j] /= total;
    square += (z[j] - mean) ** 2 / n;
    if (p[j] > 0) entropy += p[j] * (Math.log(total) - (z[j] - most));
    p2 += p[j] ** 2;
    p3 += p[j] ** 3;
    inner += p[j] * dp[j];
  }
  for (let j = 0; j < n; j += 1) norm += (p[j] * (dp[j] - inner)) ** 2;
  const jacobian = Math.sqrt(Math.max(0, p2 - 2 * p3 + p2 * p2));
  return { variance: square, entropy: entropy / Math.log(n), peak: 1 / total, gain: 1 - p2, jacobian, squares: norm };
}

function histogram(values) {
  const finite = values.filter(Number.isFinite);
  const counts = new Array(BINS).fill(0);
  if (!finite.length) return { low: null, high: null, counts };
  const low = finite.reduce((a, b) => Math.min(a, b));
  const high = finite.reduce((a, b) => Math.max(a, b));
  const width = high - low;
  for (const each of finite) counts[width > 0 ? Math.min(BINS - 1, Math.floor(((each - low) / width) * BINS)) : 0] += 1;
  return { low, high, counts };
}

function middle(values) {
  const sorted = values.slice().sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Everything that is shown. A row is lost, and left out of the means, if a product is infinite, a weight NaN,
// or all weights are 0, since their sum is infinite although no term is.
function measure(settings) {
  const { n, dtype, softmax } = settings;
  const { round } = DTYPES[dtype];
  const { products, scaled, rows } = logits(settings);
  const records = [];
  let first = null;
  for (let r = 0; r < rows; r += 1) {
    const z = scaled.subarray(r * n, (r + 1) * n);
    const weights = weightsOf(z, softmax, round);
    if (!products.subarray(r * n, (r + 1) * n).every(Number.isFinite) || !weights.every(Number.isFinite)) continue;
    if (!weights.some((each) => each > 0)) continue;
    records.push(record(z, kept.gradients.row(r, n)));
    if (r === 0) first = weights.sort().reverse();
  }
  const mean = (name) => (records.length ? records.reduce((sum, each) => sum + each[name], 0) / records.length : null);
  const share = (values, holds) => values.reduce((count, each) => count + (holds(each) ? 1 : 0), 0) / values.length;
  const root = (value) => (value === null ? null : Math.sqrt(value));
  return {
    histogram: histogram(scaled),
    weights: first,
    figures: {
      logit_std: root(mean("variance")),
      product_absmax: products.reduce((most, each) => Math.max(most, Math.abs(each)), 0),
      normalized_entropy: mean("entropy"),
      peak: mean("peak"),
      gain: mean("gain"),
      jacobian_norm: mean("jacobian"),
      gradient_rms: records.length ? Math.sqrt(mean("squares") / n) : null,
      gradient_median: records.length ? middle(records.map(({ squares }) => Math.sqrt(squares))) : null,
      product_overflow: share(products, (each) => !Number.isFinite(each)),
      exp_overflow: share(scaled, (each) => round(Math.exp(each)) === Infinity),
      lost_rows: 1 - records.length / rows,
    },
  };
}
