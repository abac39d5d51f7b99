// The online softmax: what is found of a tile before its exponentials, its exponentials, and the running figures of the rows.
// Lanes need not be queries here: decode.h lets them be keys.
//
// A `raw` block works on products x = q·k and multiplies (x − pivot) by scale·log2 e inside the exponent, after the subtraction:
// the fused form x·c − pivot·c overflows. Other blocks work on logits, x = z. `pivot` is the running maximum of x.
#pragma once
#include "tile.h"

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

// A running sum with what it lost in rounding, which is ∞ − ∞ where the sum itself says all.
inline double whole_of(double sum, double rest) { return sum + (rest - rest == 0 ? rest : 0.0); }
ATTEMPER_INLINE Vec<double> whole_of(Vec<double> sum, Vec<double> rest) {
  return sum + (rest - rest == splat(0.0) ? rest : splat(0.0));
}

// What is found of a tile before its exponentials.
template <class Real>
struct TileFigures {
  Vec<Real> largest[kVectors], smallest[kVectors], count[kVectors];
  alignas(64) Real risen[kBlock<Real>];  // the key at which, or in the six from which, the largest was first met
};

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

// Products → x with −∞ at hidden places, within reach of a vector; beyond it nothing is looked at. And the figures of those that
// are visible.
template <class Real, bool statistics, bool raw>
void look_at_products(const Problem& p, const Block<Real>& block, const Visibility<Real>& seen, Real* x, Running<Real>& running,
                      TileFigures<Real>& found) {
  const Vec<Real> hidden = splat(Real(-kInfinity)), beyond = splat(Real(kInfinity)), nought = splat(Real(0)),
                  one = splat(Real(1));
  for (int v = 0; v < block.vectors; ++v) {
    const auto& reach = seen.reach[v];
    Vec<Real> largest = hidden, smallest = beyond, risen = nought, product_max = hidden, product_min = beyond;
    Vec<Real> count = __builtin_convertvector(seen.keys_by_position(v), Vec<Real>);
    if (seen.bias) count = nought;
    Ints<Real> spoilt{};
    const auto look = [&](int64_t j, auto all_see) ATTEMPER_INLINED {
      Real* place = x + j * kBlock<Real> + v * kLanes<Real>;
      const Vec<Real> product = load(place), z = raw ? product : logit_of(p, block, seen, product, j, v);
      Vec<Real> shown = z, low = z, high_product = product, low_product = product;
      Ints<Real> broken = product != product;
      if constexpr (!all_see.value) {
        const Ints<Real> visible = seen.of(j, v);
        shown = visible ? z : hidden;
        low = visible ? z : beyond;
        if (!raw) {
          high_product = visible ? product : hidden;
          low_product = visible ? product : beyond;
        }
        broken &= visible;
        if (seen.bias) count += visible ? one : nought;
      }
      if (statistics) {
        risen = shown > largest ? splat(static_cast<Real>(j)) : risen;
        smallest = smaller(smallest, low);
        spoilt |= broken;
      }
      largest = larger(largest, shown);
      if (!raw) {
        product_max = larger(product_max, high_product);
        product_min = smaller(product_min, low_product);
      }
      if (!raw || !all_see.value) store(place, shown);
    };
    for (int64_t j = reach.first; j < reach.whole_first; ++j) look(j, Is<false>());
    for (int64_t j = reach.whole_first; j < reach.whole_end; ++j) look(j, Is<true>());
    for (int64_t j = reach.whole_end; j < reach.end; ++j) look(j, Is<false>());
    found.largest[v] = largest;
    found.smallest[v] = smallest;
    found.count[v] = count;
    store(found.risen + v * kLanes<Real>, risen);
    running.product_max[v] = larger(running.product_max[v], raw ? largest : product_max);
    running.product_min[v] = smaller(running.product_min[v], raw ? smallest : product_min);
    running.spoilt[v] |= spoilt;
  }
}

template <class Real, bool statistics>
void look_at_tile(const Problem& p, const Block<Real>& block, const Visibility<Real>& seen, Real* x, Running<Real>& running,
                  TileFigures<Real>& found) {
  if (block.raw)
    look_at_products<Real, statistics, true>(p, block, seen, x, running, found);
  else
    look_at_products<Real, statistics, false>(p, block, seen, x, running, found);
}

// The lowest key at which a lane's largest x stands, where that is larger than all before. `span` keys from `risen` on hold it.
// Where many lanes look at a whole tile, all keys are compared with all lanes at once.
template <class Real>
void find_argmax(const Block<Real>& block, const TileFigures<Real>& found, const Real* x, int64_t key, int64_t keys, int64_t span,
                 Running<Real>& running) {
  for (int v = 0; v < block.vectors; ++v) {
    const Vec<Real> largest = found.largest[v];
    const Ints<Real> looks =
        ((running.argmax[v] < splat(Real(0))) & (found.count[v] > splat(Real(0)))) | (largest > running.pivot[v]);
    const uint32_t lookers = lanes_where<Real>(looks);
    if (lookers == 0) continue;
    const Real* column = x + v * kLanes<Real>;
    Vec<Real> place = load(found.risen + v * kLanes<Real>);
    if (span == keys && __builtin_popcount(lookers) * 4 > kLanes<Real>) {
      place = splat(static_cast<Real>(keys - 1));
      for (int64_t j = keys - 1; j-- > 0;)
        place = load(column + j * kBlock<Real>) == largest ? splat(static_cast<Real>(j)) : place;
    } else if (span > 1) {
      alignas(64) Real places[kLanes<Real>], of_lanes[kLanes<Real>];
      store(places, place);
      store(of_lanes, largest);
      for (uint32_t rest = lookers; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        const int64_t begin = static_cast<int64_t>(places[lane]), end = least<int64_t>(keys, begin + span);
        int64_t lowest = end - 1;
        for (int64_t j = end - 1; j-- > begin;)  // to the end: where it stands nobody could predict
          lowest = column[j * kBlock<Real> + lane] >= of_lanes[lane] ? j : lowest;
        places[lane] = static_cast<Real>(lowest);
      }
      place = load(places);
    }
    running.argmax[v] = looks ? place + splat(static_cast<Real>(key)) : running.argmax[v];
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

// A number near the mean of what a lane sees of its first tile: that of some of its keys, a step apart. The mean of 32 is off by
// a sixth of the spread or so, which costs the sums about it nothing; where a lane meets fewer, all are taken. `count`: keys that
// a lane sees, 0 where it does not ask.
template <class Real>
ATTEMPER_OUTLINED Vec<Real> centre_of(const Real* column, const typename Visibility<Real>::Reach& reach, Vec<Real> count) {
  const Vec<Real> nothing = splat(Real(-kInfinity)), nought = splat(Real(0)), one = splat(Real(1)), enough = splat(Real(32));
  int64_t step = 8;
  while (step > 1 && lanes_where<Real>((count > nought) & (count < enough * splat(static_cast<Real>(step))))) step /= 2;
  for (;; step = 1) {
    Vec<Real> sum = nought, taken = nought;
    for (int64_t j = reach.first; j < reach.end; j += step) {
      const Vec<Real> x = load(column + j * kBlock<Real>);
      sum += x == nothing ? nought : x;
      taken += x == nothing ? nought : one;
    }
    if (step == 1 || !lanes_where<Real>((taken < count) & (taken < enough))) return sum / (taken > nought ? taken : one);
  }
}

// Sums over the keys of a tile, one lane each.
template <class Real>
struct TileSums {
  Vec<Real> total, squares, cubes, weighted, sum, sum_squares;

  ATTEMPER_INLINE void clear() { total = squares = cubes = weighted = sum = sum_squares = splat(Real(0)); }
  ATTEMPER_INLINE void add(const TileSums& more, bool statistics) {
    total += more.total;
    weighted += more.weighted;
    if (!statistics) return;
    squares += more.squares;
    cubes += more.cubes;
    sum += more.sum;
    sum_squares += more.sum_squares;
  }

  // x → e^(z − shift) in place for keys from `begin` to `end`, and the sums of it. `masked`: some may be −∞, hidden.
  template <bool statistics, bool masked>
  ATTEMPER_INLINE void take(Real* column, int64_t begin, int64_t end, Vec<Real> shift, Vec<Real> factor, Vec<Real> centre) {
    const Vec<Real> nothing = splat(Real(-kInfinity)), nought = splat(Real(0));
    column += begin * kBlock<Real>;
    for (int64_t run = begin; run < end; run += kRunKeys) {
      TileSums of_run;
      of_run.clear();
      const int64_t run_end = least(run + kRunKeys, end);
      for (int64_t j = run; j < run_end; ++j, column += kBlock<Real>) {
        const Vec<Real> each = load(column);
        if (statistics) {
          Vec<Real> from_centre = each - centre;
          if (masked) from_centre = each == nothing ? nought : from_centre;
          of_run.sum += from_centre;
          of_run.sum_squares += from_centre * from_centre;
        }
        Vec<Real> depth = bounded((each - shift) * factor);
        Vec<Real> e = exp2_of(depth);
        if (masked) {
          e = each == nothing ? nought : e;
          depth = each == nothing ? nought : depth;
        }
        store(column, e);
        of_run.total += e;
        of_run.weighted += e * depth;
        if (statistics) {
          const Vec<Real> square = e * e;
          of_run.squares += square;
          of_run.cubes += square * e;
        }
      }
      add(of_run, statistics);
    }
  }
};

// x → e^(z − pivot) in place, 0 where hidden, and the sums of it; rescale[] is what the output so far must be multiplied by.
template <class Real, bool statistics>
void exponentials_of_tile(const Block<Real>& block, const Visibility<Real>& seen, int64_t keys, Real* x,
                          const TileFigures<Real>& found, Running<Real>& running, Real* rescale) {
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

    const auto& reach = seen.reach[v];
    if (statistics) {
      const Ints<Real> fresh = (running.count[v] == nought) & (found.count[v] > nought);
      if (lanes_where<Real>(fresh)) {
        const Vec<Real> centre = centre_of(column, reach, fresh ? found.count[v] : nought);
        running.centre[v] = fresh ? centre : running.centre[v];
      }
    }
    TileSums<Real> sums;
    sums.clear();
    const Vec<Real> centre = running.centre[v];
    for (int64_t j = 0; j < reach.first; ++j) store(column + j * kBlock<Real>, nought);
    for (int64_t j = reach.end; j < keys; ++j) store(column + j * kBlock<Real>, nought);
    if (reach.first < reach.whole_first)
      sums.template take<statistics, true>(column, reach.first, reach.whole_first, shift, factor, centre);
    sums.template take<statistics, false>(column, reach.whole_first, reach.whole_end, shift, factor, centre);
    if (reach.whole_end < reach.end)
      sums.template take<statistics, true>(column, reach.whole_end, reach.end, shift, factor, centre);
    add_to(running.weighted[v], running.weighted_rest[v], shrink, shrink * running.total[v] * fall + sums.weighted);
    add_to(running.total[v], running.total_rest[v], shrink, sums.total);
    if (statistics) {
      add_to(running.squares[v], running.squares_rest[v], shrink * shrink, sums.squares);
      add_to(running.cubes[v], running.cubes_rest[v], shrink * shrink * shrink, sums.cubes);
      add_to(running.sum[v], running.sum_rest[v], splat(Real(1)), sums.sum);
      add_to(running.sum_squares[v], running.sum_squares_rest[v], splat(Real(1)), sums.sum_squares);
      running.count[v] += found.count[v];
      recentre(running, found.count[v], v);
      running.smallest[v] = smaller(running.smallest[v], found.smallest[v]);
    }
  }
}

}  // namespace
}  // namespace attemper
