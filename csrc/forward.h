// The forward pass of one block of queries: S = K·Qᵀ, the online softmax down its columns, O = Vᵀ·P, tile after tile; lanes are
// queries throughout, so maxima, sums and statistics never cross lanes.
#pragma once
#include "finish.h"
#include "operands.h"

namespace attemper {
namespace {

// The keys that share a rectangle of a tile's products.
ATTEMPER_INLINE int64_t whole_tile_rows(int vectors) { return vectors < kColumns ? 2 * kRows : kRows; }

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
      look_at_tile<Real, statistics>(p, block, seen, x, running, found);
    }
    if (statistics)
      find_argmax(block, found, x, j, keys, !ordered ? 1 : !block.raw ? keys : whole_tile_rows(block.vectors), running);
    exponentials_of_tile<Real, statistics>(block, seen, keys, x, found, running, rescale);
    if (p.output.address == 0) continue;
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
