// The online softmax: what is found of a tile before its exponentials, its exponentials, and the running figures of the rows. Lanes
// need not be queries here: decode.h lets them be keys.
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

}  // namespace
}  // namespace attemper
