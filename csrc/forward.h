// The forward pass of one block of queries: S = K·Qᵀ, the online softmax down its columns, O = Vᵀ·P, tile after tile; lanes are
// queries throughout, so maxima, sums and statistics never cross lanes.
//
// A `raw` block works on products x = q·k and multiplies (x − pivot) by scale·log2 e inside the exponent, after the subtraction:
// the fused form x·c − pivot·c overflows. Other blocks work on logits, x = z. `pivot` is the running maximum of x.
#pragma once
#include "operands.h"

namespace attemper {
namespace {

// Running figures of a block, one vector for each group of lanes.
template <class Real>
struct Running {
  Vec<Real> pivot[kVectors], total[kVectors], squares[kVectors], cubes[kVectors], weighted[kVectors];
  Vec<Real> product_max[kVectors], product_min[kVectors], smallest[kVectors], count[kVectors], argmax[kVectors];
  // Σ (x − centre) and Σ (x − centre)²: the centre is the mean of the first tiles, so that neither sum grows large.
  Vec<Real> centre[kVectors], sum[kVectors], sum_squares[kVectors];
  // What the sums of that name lost in rounding, tile after tile.
  Vec<Real> total_rest[kVectors], squares_rest[kVectors], cubes_rest[kVectors], weighted_rest[kVectors], sum_rest[kVectors],
      sum_squares_rest[kVectors];
  Ints<Real> spoilt[kVectors];  // rows that see a NaN among their products; extremes lose it

  void clear() {
    for (int v = 0; v < kVectors; ++v) {
      total[v] = squares[v] = cubes[v] = weighted[v] = count[v] = centre[v] = sum[v] = sum_squares[v] = splat(Real(0));
      total_rest[v] = squares_rest[v] = cubes_rest[v] = weighted_rest[v] = sum_rest[v] = sum_squares_rest[v] = splat(Real(0));
      pivot[v] = product_max[v] = splat(Real(-kInfinity));
      smallest[v] = product_min[v] = splat(Real(kInfinity));
      argmax[v] = splat(Real(-1));
      spoilt[v] = Ints<Real>{};
    }
  }
};

// What is found of a tile before its exponentials.
template <class Real>
struct TileFigures {
  Vec<Real> largest[kVectors], smallest[kVectors], count[kVectors];
  alignas(64) Real risen[kBlock<Real>];  // the key at which, or in the six from which, the largest was first met
};

// S of a tile in which everybody sees everything and x is the product: extremes come with it for next to nothing.
template <class Term, class Real, bool statistics>
ATTEMPER_OUTLINED void products_of_whole_tile(const Rows<Term>& key, const Term* query, int64_t width, int64_t keys, int vectors,
                                              Real* x, TileFigures<Real>& found) {
  for (int v = 0; v < vectors; ++v) {
    found.largest[v] = splat(Real(-kInfinity));
    found.smallest[v] = splat(Real(kInfinity));
    found.count[v] = splat(static_cast<Real>(keys));
    store(found.risen + v * kLanes<Real>, splat(Real(0)));
  }
  multiply<Term, kInnerContiguous>(key.data, key.stride, query, kBlock<Real>, terms_of<Term>(width), keys, vectors * kLanes<Real>,
                                   [&](int64_t row, int64_t column, auto& sums) ATTEMPER_INLINED {
                                     constexpr int rows = sizeof(sums) / sizeof(sums[0]),
                                                   columns = sizeof(sums[0]) / sizeof(sums[0][0]);
#pragma GCC unroll 8
                                     for (int c = 0; c < columns; ++c) {
                                       const int64_t v = column / kLanes<Real> + c;
                                       Vec<Real> high = sums[0][c], low = sums[0][c];
#pragma GCC unroll 16
                                       for (int r = 0; r < rows; ++r) {
                                         store(x + (row + r) * kBlock<Real> + column + c * kLanes<Real>, sums[r][c]);
                                         high = larger(high, sums[r][c]);
                                         if (statistics) low = smaller(low, sums[r][c]);
                                       }
                                       if (statistics) {
                                         found.smallest[v] = smaller(found.smallest[v], low);
                                         Real* risen = found.risen + v * kLanes<Real>;
                                         store(risen, high > found.largest[v] ? splat(static_cast<Real>(row)) : load(risen));
                                       }
                                       found.largest[v] = larger(found.largest[v], high);
                                     }
                                   });
}

// Products → capped logits in a tile in which everybody sees everything. The cap keeps their order, so that the extremes of the
// products become those of the logits; but it may make equals of them, so that the largest may stand earlier.
template <class Real>
void cap_whole_tile(const Problem& p, const Block<Real>& block, int64_t keys, Real* x, TileFigures<Real>& found) {
  const Real cap = static_cast<Real>(p.softcap);
  for (int v = 0; v < block.vectors; ++v) {
    const Vec<Real> scale = load(block.scale_by_cap + v * kLanes<Real>);
    Real* column = x + v * kLanes<Real>;
    for (int64_t j = 0; j < keys; ++j, column += kBlock<Real>) store(column, capped(load(column), scale, cap));
    found.largest[v] = capped(found.largest[v], scale, cap);
    found.smallest[v] = capped(found.smallest[v], scale, cap);
    store(found.risen + v * kLanes<Real>, splat(Real(0)));
  }
}

// Products → x with −∞ at hidden places, and the figures of those that are visible.
template <class Real, bool statistics>
void look_at_tile(const Problem& p, const Block<Real>& block, const Visibility<Real>& seen, int64_t keys, Real* x,
                  Running<Real>& running, TileFigures<Real>& found) {
  const Vec<Real> hidden = splat(Real(-kInfinity)), beyond = splat(Real(kInfinity));
  for (int v = 0; v < block.vectors; ++v) {
    Vec<Real> largest = hidden, smallest = beyond, count = splat(Real(0)), risen = splat(Real(0));
    Vec<Real> product_max = running.product_max[v], product_min = running.product_min[v];
    for (int64_t j = 0; j < keys; ++j) {
      Real* place = x + j * kBlock<Real> + v * kLanes<Real>;
      const Ints<Real> visible = seen.of(j, v);
      const Vec<Real> product = load(place);
      const Vec<Real> z = block.raw ? product : logit_of(p, block, seen, product, j, v);
      const Vec<Real> shown = visible ? z : hidden;
      if (statistics) {
        risen = shown > largest ? splat(static_cast<Real>(j)) : risen;
        smallest = smaller(smallest, visible ? z : beyond);
      }
      product_max = larger(product_max, visible ? product : hidden);
      product_min = smaller(product_min, visible ? product : beyond);
      if (statistics) running.spoilt[v] |= visible & (product != product);
      count += visible ? splat(Real(1)) : splat(Real(0));
      largest = larger(largest, shown);
      store(place, shown);
    }
    found.largest[v] = largest;
    found.smallest[v] = smallest;
    found.count[v] = count;
    store(found.risen + v * kLanes<Real>, risen);
    running.product_max[v] = product_max;
    running.product_min[v] = product_min;
  }
}

// The lowest key at which a lane's largest x stands, where that is larger than all before. `span` keys from `risen` on hold it.
// Where many lanes look, as they do in their first tile, all keys are compared with all lanes at once.
template <class Real>
void find_argmax(const Block<Real>& block, const TileFigures<Real>& found, const Real* x, int64_t key, int64_t keys, int64_t span,
                 Running<Real>& running) {
  for (int v = 0; v < block.vectors; ++v) {
    const Vec<Real> largest = found.largest[v];
    const Ints<Real> looks =
        ((running.argmax[v] < splat(Real(0))) & (found.count[v] > splat(Real(0)))) | (largest > running.pivot[v]);
    int many = 0;
    for (int lane = 0; lane < kLanes<Real>; ++lane) many += looks[lane] != 0;
    if (many == 0) continue;
    const Real* column = x + v * kLanes<Real>;
    if (many * 4 > kLanes<Real>) {
      Vec<Real> place = splat(static_cast<Real>(keys - 1));
      for (int64_t j = keys - 1; j-- > 0;)
        place = load(column + j * kBlock<Real>) == largest ? splat(static_cast<Real>(j)) : place;
      running.argmax[v] = looks ? place + splat(static_cast<Real>(key)) : running.argmax[v];
      continue;
    }
    for (int lane = 0; lane < kLanes<Real>; ++lane) {
      if (!looks[lane]) continue;
      int64_t j = static_cast<int64_t>(found.risen[v * kLanes<Real> + lane]);
      const int64_t end = least<int64_t>(keys, j + span);
      while (j + 1 < end && column[j * kBlock<Real> + lane] != largest[lane]) ++j;
      running.argmax[v][lane] = static_cast<Real>(key + j);
    }
  }
}

// sum ← shrink · sum + more; `rest` gathers what the addition rounds off, so that thousands of tiles lose no more than one.
template <class V>
ATTEMPER_INLINE void add_to(V& sum, V& rest, V shrink, V more) {
  const V before = shrink * sum, after = before + more, added = after - before;
  rest = shrink * rest + ((before - (after - added)) + (more - added));
  sum = after;
}

// Moves the centre to the mean while a tile still weighs in it. What the rounded centre misses stays in the sum.
template <class Real>
void recentre(Running<Real>& running, Vec<Real> added, int v) {
  const Vec<Real> nought = splat(Real(0)), count = running.count[v];
  const Vec<Real> step = running.sum[v] / (count > nought ? count : splat(Real(1)));
  const Vec<Real> before = running.centre[v], after = before + (added * splat(Real(4)) >= count ? step : nought);
  const Vec<Real> moved = after - before;
  running.centre[v] = after;
  running.sum_squares[v] += moved * (count * moved - splat(Real(2)) * running.sum[v]);
  running.sum[v] -= count * moved;
}

// x → e^(z − pivot) in place, and the sums of it; rescale[] is what the output so far must be multiplied by.
template <class Real, bool statistics, bool masked>
void exponentials_of_tile(const Block<Real>& block, int64_t keys, Real* x, const TileFigures<Real>& found, Running<Real>& running,
                          Real* rescale) {
  const Vec<Real> nothing = splat(Real(-kInfinity)), nought = splat(Real(0));
  for (int v = 0; v < block.vectors; ++v) {
    Real* column = x + v * kLanes<Real>;
    const Vec<Real> factor = block.raw ? load(block.scale + v * kLanes<Real>) * splat(Real(kLog2E)) : splat(Real(kLog2E));
    const Vec<Real> before = running.pivot[v], pivot = larger(before, found.largest[v]);
    const Vec<Real> shift = pivot == nothing ? nought : pivot;
    const Vec<Real> fall = before == nothing ? nought : bounded((before - shift) * factor);
    const Vec<Real> shrink = before == nothing ? nought : exp2_of(fall);
    store(rescale + v * kLanes<Real>, shrink);
    running.pivot[v] = pivot;

    if (statistics) {
      const Ints<Real> fresh = (running.count[v] == nought) & (found.count[v] > nought);
      bool any = false;
      for (int lane = 0; lane < kLanes<Real>; ++lane) any |= fresh[lane] != 0;
      if (any) {
        Vec<Real> sum = nought;
        for (int64_t j = 0; j < keys; ++j) {
          const Vec<Real> each = load(column + j * kBlock<Real>);
          sum += masked ? (each == nothing ? nought : each) : each;
        }
        running.centre[v] = fresh ? sum / (found.count[v] > nought ? found.count[v] : splat(Real(1))) : running.centre[v];
      }
    }
    const Vec<Real> centre = running.centre[v];
    Vec<Real> total = nought, squares = nought, cubes = nought, weighted = nought, sum = nought, sum_squares = nought;
    for (int64_t run = 0; run < keys; run += kRunKeys) {
      Vec<Real> run_total = nought, run_squares = nought, run_cubes = nought, run_weighted = nought, run_sum = nought,
                run_sum_squares = nought;
      const int64_t end = least(run + kRunKeys, keys);
      for (int64_t j = run; j < end; ++j, column += kBlock<Real>) {
        const Vec<Real> each = load(column);
        if (statistics) {
          Vec<Real> from_centre = each - centre;
          if (masked) from_centre = each == nothing ? nought : from_centre;
          run_sum += from_centre;
          run_sum_squares += from_centre * from_centre;
        }
        Vec<Real> depth = bounded((each - shift) * factor);
        Vec<Real> e = exp2_of(depth);
        if (masked) {
          e = each == nothing ? nought : e;
          depth = each == nothing ? nought : depth;
        }
        store(column, e);
        run_total += e;
        run_weighted += e * depth;
        if (statistics) {
          const Vec<Real> square = e * e;
          run_squares += square;
          run_cubes += square * e;
        }
      }
      total += run_total;
      weighted += run_weighted;
      if (statistics) {
        squares += run_squares;
        cubes += run_cubes;
        sum += run_sum;
        sum_squares += run_sum_squares;
      }
    }
    add_to(running.weighted[v], running.weighted_rest[v], shrink, shrink * running.total[v] * fall + weighted);
    add_to(running.total[v], running.total_rest[v], shrink, total);
    if (statistics) {
      add_to(running.squares[v], running.squares_rest[v], shrink * shrink, squares);
      add_to(running.cubes[v], running.cubes_rest[v], shrink * shrink * shrink, cubes);
      add_to(running.sum[v], running.sum_rest[v], splat(Real(1)), sum);
      add_to(running.sum_squares[v], running.sum_squares_rest[v], splat(Real(1)), sum_squares);
      running.count[v] += found.count[v];
      recentre(running, found.count[v], v);
      running.smallest[v] = smaller(running.smallest[v], found.smallest[v]);
    }
  }
}

// O ← O · rescale + Vᵀ · P. An invisible value has no say even if it is NaN: its weight is 0, but 0 · NaN is not.
template <class Term, class Real>
ATTEMPER_OUTLINED void add_values(const Block<Real>& block, const Rows<Term>& value, const Term* weights, const Real* rescale,
                                  int64_t keys, int64_t width, Real* output) {
  multiply<Term, kRowContiguous>(value.data, value.stride, weights, kBlock<Real>, terms_of<Term>(keys), width,
                                 block.vectors * kLanes<Real>, [&](int64_t row, int64_t column, auto& sums) ATTEMPER_INLINED {
                                   constexpr int rows = sizeof(sums) / sizeof(sums[0]);
                                   constexpr int columns = sizeof(sums[0]) / sizeof(sums[0][0]);
#pragma GCC unroll 16
                                   for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
                                     for (int c = 0; c < columns; ++c) {
                                       const int64_t lane = column + c * kLanes<Real>;
                                       Real* place = output + (row + r) * kBlock<Real> + lane;
                                       store(place, load(place) * load(rescale + lane) + sums[r][c]);
                                     }
                                 });
}

template <class Real>
void add_values_carefully(const Block<Real>& block, const Visibility<Real>& seen, const Rows<Real>& value, const Real* weights,
                          const Real* rescale, int64_t keys, int64_t width, Real* scratch, Real* output) {
  for (int64_t j = 0; j < keys; ++j) {
    const Real* row = value.data + j * value.stride;
    const bool finite = all_finite(row, 0, 1, width);
    for (int64_t d = 0; d < width; ++d) scratch[j * width + d] = finite ? row[d] : Real(0);
  }
  add_values(block, Rows<Real>{scratch, width}, weights, rescale, keys, width, output);
  for (int64_t j = 0; j < keys; ++j) {
    const Real* row = value.data + j * value.stride;
    if (all_finite(row, 0, 1, width)) continue;
    for (int64_t lane = 0; lane < block.rows; ++lane)
      if (seen.of_lane(j, lane))
        for (int64_t d = 0; d < width; ++d) output[d * kBlock<Real> + lane] += weights[j * kBlock<Real> + lane] * row[d];
  }
}

// Weights that were rounded no longer add up to the total that the output is divided by. Making up for it here keeps what is
// common to all values exact: equal values come out as they went in.
ATTEMPER_INLINE void undo_rounding(const Block<float>& block, const SumsOfWeights& sums, int64_t width, float* output) {
  for (int v = 0; v < block.vectors; ++v) {
    const Vec<float> ratio = sums.rounded[v] > splat(0.0f) ? sums.exact[v] / sums.rounded[v] : splat(1.0f);
    for (int64_t d = 0; d < width; ++d) {
      float* place = output + d * kBlock<float> + v * kLanes<float>;
      store(place, load(place) * ratio);
    }
  }
}

// The figures of each row from its sums, the sink merged last; output columns become output rows. In double: it costs nothing
// here, and in p3 each rounding of the total would count three times.
template <class Stored, class Real, bool statistics>
void finish_block(const Problem& p, const Block<Real>& block, const Running<Real>& running, const Real* output) {
  const int64_t rows_in_all = p.batch * p.heads * p.queries;
  const Real sink = p.sinks ? reinterpret_cast<const Real*>(p.sinks)[block.head] : Real(-kInfinity);
  const bool sinks = sink != Real(-kInfinity);
  alignas(64) Real shares[kBlock<Real>] = {};  // of the total, that a weight e^0 has
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = (block.batch * p.heads + block.head) * p.queries + block.first + r;
    const auto put = [row](int64_t address, double x) {  // some figures are not asked for
      if (address) reinterpret_cast<Real*>(address)[row] = static_cast<Real>(x);
    };
    const auto of_row = [r](const auto* figures) { return reinterpret_cast<const Real*>(figures)[r]; };
    const auto rest_of = [&](const auto* figures) {  // ∞ − ∞ where the sum itself says all
      const double rest = of_row(figures);
      return rest - rest == 0 ? rest : 0.0;
    };
    const double keys_total = double(of_row(running.total)) + rest_of(running.total_rest);
    // A logit that is NaN spoils the sums but may be lost among the maxima: the row then is as one whose largest logit is NaN.
    const bool spoilt = keys_total != keys_total && of_row(running.pivot) != Real(kInfinity);
    const Real scale = block.raw ? block.scale[r] : Real(1), pivot = spoilt ? Real(keys_total) : of_row(running.pivot);
    const bool unseen = pivot == Real(-kInfinity);
    const Real top = unseen ? pivot : scale * pivot;
    const bool nothing = unseen && !sinks;
    const double shift = nothing ? 0.0 : (sink > top ? sink : top);
    const double key_weight = unseen ? 0.0 : !sinks ? 1.0 : std::exp(top - shift);
    const double sink_weight = !sinks ? 0.0 : std::exp(sink - shift);  // NaN where it is +∞
    const double total = nothing ? 1.0 : key_weight * keys_total + sink_weight, by_total = 1.0 / total;
    double weighted = unseen ? 0.0
                             : key_weight * ((double(of_row(running.weighted)) + rest_of(running.weighted_rest)) * kLn2 +
                                             keys_total * (top - shift));
    if (sink_weight > 0) weighted += sink_weight * (sink - shift);
    const double log_total = std::log(total), entropy = nothing ? 0.0 : log_total - weighted * by_total;
    const double keys_1 = key_weight * by_total, sinks_1 = sink_weight * by_total;
    put(p.lse, nothing ? -kInfinity : shift + log_total);
    put(p.entropy, entropy);
    put(p.pivot, unseen ? 0.0 : pivot);
    put(p.peak, keys_1);
    put(p.surprise, unseen ? 0.0 : (top - shift) - log_total + entropy);
    put(p.sink, sinks_1);
    put(p.product_pivot, of_row(running.product_max));

    if (statistics) {
      const double no_number = __builtin_nan("");
      const double count = of_row(running.count), by_count = count > 0 ? 1.0 / count : 1.0;
      const double mean = (double(of_row(running.sum)) + rest_of(running.sum_rest)) * by_count;
      const double spread = (double(of_row(running.sum_squares)) + rest_of(running.sum_squares_rest)) * by_count - mean * mean;
      const Real smallest = spoilt ? pivot : of_row(running.smallest);
      // Logits of ±∞ have no mean. The sums passed over −∞ as if it were hidden, and what +∞ made of them depends on its place.
      const bool endless = smallest == Real(-kInfinity) || pivot == Real(kInfinity);
      const bool products_spoilt =
          reinterpret_cast<const typename LaneTypes<Real>::Integer*>(running.spoilt)[r] != 0 || (spoilt && block.monotone);
      Real* field = reinterpret_cast<Real*>(p.rest) + row;
      const auto next = [&field, rows_in_all](double x) {
        *field = static_cast<Real>(x);
        field += rows_in_all;
      };
      next(count);
      next(unseen ? -kInfinity : top);
      next(block.raw && count > 0 ? scale * smallest : smallest);
      next(count > 0 ? of_row(running.argmax) : -1.0);
      next(endless ? no_number : count > 0 ? scale * (of_row(running.centre) + mean) : 0.0);
      next(endless ? no_number : double(scale) * scale * (spread < 0 ? 0.0 : spread));
      next(nothing ? 0.0
                   : keys_1 * keys_1 * (double(of_row(running.squares)) + rest_of(running.squares_rest)) + sinks_1 * sinks_1);
      next(nothing ? 0.0
                   : keys_1 * keys_1 * keys_1 * (double(of_row(running.cubes)) + rest_of(running.cubes_rest)) +
                         sinks_1 * sinks_1 * sinks_1);
      next(products_spoilt ? no_number : of_row(running.product_max));
      next(products_spoilt ? no_number : of_row(running.product_min));
    }
    shares[r] = static_cast<Real>(keys_1);
  }
  if (p.output == 0) return;
  for (int64_t first = 0; first < block.rows; first += kLanes<Real>) {
    const int64_t row = (block.batch * p.heads + block.head) * p.queries + block.first + first;
    columns_to_rows<Real>(output + first, kBlock<Real>, load(shares + first), p.value_width,
                          least<int64_t>(kLanes<Real>, block.rows - first), [&](int64_t r, int64_t c, Vec<Real> x) {
                            const int64_t place = (row + r) * p.value_width + c, count = p.value_width - c;
                            write_some<Real>(reinterpret_cast<Stored*>(p.output) + place, x, count);
                            if (p.unrounded) write_some<Real>(reinterpret_cast<Real*>(p.unrounded) + place, x, count);
                          });
  }
}

// The output of many tiles: the sum of a few is put aside before it is so large that a tile's share is rounded off. It shrinks
// with the maximum as the rest does, but only when it is looked at again.
template <class Real>
struct Aside {
  static constexpr int64_t kTiles = 16;
  Real* output;  // [value_width][block]
  int64_t tiles = 0;
  Vec<Real> shrink[kVectors];

  explicit Aside(Real* memory) : output(memory) {
    for (Vec<Real>& each : shrink) each = splat(Real(1));
  }

  void shrink_by(const Block<Real>& block, const Real* rescale) {
    ++tiles;
    for (int v = 0; v < block.vectors; ++v) shrink[v] *= load(rescale + v * kLanes<Real>);
  }

  // Adds the output to what was put aside; with `back`, the whole comes back as the output.
  void add(const Block<Real>& block, int64_t width, Real* sums, bool back) {
    for (int64_t d = 0; d < width; ++d)
      for (int v = 0; v < block.vectors; ++v) {
        const int64_t place = d * kBlock<Real> + v * kLanes<Real>;
        const Vec<Real> whole = load(output + place) * shrink[v] + load(sums + place);
        store(output + place, whole);
        store(sums + place, back ? whole : splat(Real(0)));
      }
    for (Vec<Real>& each : shrink) each = splat(Real(1));
    tiles = 0;
  }
};

template <class Real>
int64_t forward_scratch(const Problem& p) {
  const int64_t tile = kTileKeys * kBlock<Real>;
  const int64_t numbers = (p.width + 2 * p.value_width) * (kBlock<Real> + 3 * kTileKeys) + 4 * tile;
  return numbers * static_cast<int64_t>(sizeof(Real)) + 16 * 64;
}

template <class Stored, class Real, bool statistics>
void forward_block(const Problem& p, int64_t batch, int64_t head, int64_t first, char* memory) {
  using Term = typename TermOf<Stored>::Type;
  Arena arena(memory);
  Term* query = arena.take<Term>(terms_of<Term>(p.width) * kBlock<Real>);
  Real* output = arena.take<Real>(p.value_width * kBlock<Real>);
  Real* x = arena.take<Real>(kTileKeys * kBlock<Real>);
  Real* bias = arena.take<Real>(kTileKeys * kBlock<Real>);
  Real* keep = arena.take<Real>(kTileKeys * kBlock<Real>);
  Term* key_rows = arena.take<Term>(kTileKeys * terms_of<Term>(p.width));
  Real* value_rows = arena.take<Real>(kTileKeys * p.value_width);
  Real* clean = arena.take<Real>(kTileKeys * p.value_width);
  Pair* weight_pairs = arena.take<Pair>(kInPairs<Stored> ? kTileKeys / 2 * kBlock<Real> : 0);
  Pair* value_pairs = arena.take<Pair>(kInPairs<Stored> ? kTileKeys / 2 * p.value_width : 0);
  alignas(64) Real rescale[kBlock<Real>];
  [[maybe_unused]] SumsOfWeights sums = {}, added;
  const bool long_sums = p.keys > Aside<Real>::kTiles * kTileKeys;
  Real* memory_aside = arena.take<Real>(long_sums ? p.value_width * kBlock<Real> : 0);
  Aside<Real> aside(memory_aside);

  Block<Real> block;
  begin_block(p, batch, head, first, block);
  Running<Real> running;
  running.clear();
  pack_rows<Stored>(p.query, block, p.width, query);
  memset(output, 0, sizeof(Real) * p.value_width * kBlock<Real>);
  if (long_sums) memset(aside.output, 0, sizeof(Real) * p.value_width * kBlock<Real>);

  int64_t begin, end;
  keys_in_reach(p, first, block.rows, begin, end);
  for (int64_t j = begin; j < end; j += kTileKeys) {
    const int64_t keys = least(kTileKeys, end - j);
    if (long_sums && aside.tiles == Aside<Real>::kTiles) aside.add(block, p.value_width, output, false);
    Visibility<Real> seen;
    if (!find_visibility(p, block, j, keys, bias, seen)) continue;
    const Rows<Term> key = rows_of<Stored>(p.key, batch, block.kv_head, j, keys, p.width, key_rows, block.vectors == 1);
    TileFigures<Real> found;
    const bool ordered = seen.whole && block.monotone;
    products_of_whole_tile<Term, Real, statistics>(key, query, p.width, keys, block.vectors, x, found);
    if (ordered) {
      for (int v = 0; v < block.vectors; ++v) {
        running.product_max[v] = larger(running.product_max[v], found.largest[v]);
        running.product_min[v] = smaller(running.product_min[v], found.smallest[v]);
      }
      if (!block.raw) cap_whole_tile(p, block, keys, x, found);
    } else {
      look_at_tile<Real, statistics>(p, block, seen, keys, x, running, found);
    }
    if (statistics) find_argmax(block, found, x, j, keys, !ordered ? 1 : block.raw ? 2 * kRows : keys, running);
    if (seen.whole)
      exponentials_of_tile<Real, statistics, false>(block, keys, x, found, running, rescale);
    else
      exponentials_of_tile<Real, statistics, true>(block, keys, x, found, running, rescale);
    if (p.output == 0) continue;
    if (long_sums) aside.shrink_by(block, rescale);
    if (p.dropout_p > 0) {
      keep_factors(p, block, j, keys, keep);
      for (int64_t row = 0; row < keys * kBlock<Real>; row += kBlock<Real>)
        for (int64_t i = row; i < row + block.vectors * kLanes<Real>; i += kLanes<Real>)
          store(x + i, load(x + i) * load(keep + i));
    }
    if constexpr (kInPairs<Stored>) {
      const Rows<Pair> value = join_key_rows<Stored>(p.value, batch, block.kv_head, j, keys, p.value_width, value_pairs);
      const bool careful = !seen.whole && !all_finite(value.data, value.stride, terms_of<Pair>(keys), p.value_width);
      join_keys(block, x, keys, weight_pairs, &added);
      for (int v = 0; v < block.vectors; ++v) {
        const Vec<Real> shrink = load(rescale + v * kLanes<Real>);
        sums.exact[v] = sums.exact[v] * shrink + added.exact[v];
        sums.rounded[v] = sums.rounded[v] * shrink + (careful ? added.exact[v] : added.rounded[v]);
      }
      if (!careful) {
        add_values(block, value, weight_pairs, rescale, keys, p.value_width, output);
        continue;
      }
    }
    const Rows<Real> value =
        rows_of<Stored>(p.value, batch, block.kv_head, j, keys, p.value_width, value_rows, block.vectors == 1);
    if (seen.whole || all_finite(value.data, value.stride, keys, p.value_width))
      add_values(block, value, x, rescale, keys, p.value_width, output);
    else
      add_values_carefully(block, seen, value, x, rescale, keys, p.value_width, clean, output);
  }
  if (long_sums) aside.add(block, p.value_width, output, true);
  if constexpr (kInPairs<Stored>) undo_rounding(block, sums, p.value_width, output);
  finish_block<Stored, Real, statistics>(p, block, running, output);
}

}  // namespace
}  // namespace attemper
