// The weights of a tile again, and what flows through them: from the gradient of the weights to that of the logits and products.
#pragma once
#include "tile.h"

namespace attemper {
namespace {

// What the backward pass needs of each row of a block. The weight of a key is e^(z − pivot) · peak, and ln p + H is
// (z − pivot) + surprise: the two large parts of a logarithm never meet.
template <class Real>
struct RowTerms {
  alignas(64) Real pivot[kBlock<Real>], peak[kBlock<Real>], surprise[kBlock<Real>];
  alignas(64) Real constant[kBlock<Real>];          // see constants_of_block
  alignas(64) Real entropy_gradient[kBlock<Real>];  // 0 where there is none
  alignas(64) Real product_pivot[kBlock<Real>];     // any number near the products

  RowTerms(const Problem& p, const Block<Real>& block) {
    for (int64_t r = 0; r < kBlock<Real>; ++r) {
      const int64_t row = (block.batch * p.heads + block.head) * p.queries + block.first + r;
      const bool real = r < block.rows;
      pivot[r] = real ? reinterpret_cast<const Real*>(p.pivot)[row] : Real(0);
      peak[r] = real ? reinterpret_cast<const Real*>(p.peak)[row] : Real(0);
      surprise[r] = real ? reinterpret_cast<const Real*>(p.surprise)[row] : Real(0);
      constant[r] = real ? reinterpret_cast<const Real*>(p.constant)[row] : Real(0);
      entropy_gradient[r] = real && p.entropy_gradient ? reinterpret_cast<const Real*>(p.entropy_gradient)[row] : Real(0);
      product_pivot[r] = real && p.product_pivot ? reinterpret_cast<const Real*>(p.product_pivot)[row] : Real(0);
      if (!(product_pivot[r] - product_pivot[r] == 0)) product_pivot[r] = 0;
    }
  }
};

// Tiles are dealt to the units of a key head in turn: how many keys the first of them has, and where a tile's stand with its
// unit.
inline int64_t keys_of_unit(const Problem& p) {
  const int64_t tiles = (p.keys + kTileKeys - 1) / kTileKeys, units = p.units_of_head();
  return (tiles + units - 1) / units * kTileKeys;
}
inline int64_t place_in_unit(const Problem& p, int64_t key) {
  return key / kTileKeys / p.units_of_head() * kTileKeys + key % kTileKeys;
}

// The scratch of a unit.
template <class Real>
struct Desk {
  Real *products, *weights, *gradient;  // [tile keys][block]
  Real *bias, *keep;
  Real* clean;                          // [tile keys][width]
  Real* query_gradient;                 // [width][block]
  Real* part_gradient;                  // the same of one part, where a unit takes several
  Real *key_gradient, *value_gradient;  // [the unit's keys][padded width]

  Desk(const Problem& p, Arena& arena) {
    const int64_t tile = kTileKeys * kBlock<Real>, width = padded<Real>(p.width), value_width = padded<Real>(p.value_width);
    products = arena.take<Real>(tile);
    weights = arena.take<Real>(tile);
    gradient = arena.take<Real>(tile);
    bias = arena.take<Real>(tile);
    keep = arena.take<Real>(tile);
    clean = arena.take<Real>(kTileKeys * p.width);
    query_gradient = arena.take<Real>(p.width * kBlock<Real>);
    part_gradient = arena.take<Real>(p.together && p.splits > 1 ? p.width * kBlock<Real> : 0);
    key_gradient = arena.take<Real>(p.key_gradient.address ? keys_of_unit(p) * width : 0);
    value_gradient = arena.take<Real>(p.value_gradient.address ? keys_of_unit(p) * value_width : 0);
  }
};

// A vector of weights, found again as the forward pass had them.
template <class Real>
struct Again {
  Vec<Real> depth, weight;  // (z − pivot) · log2 e, at least what exp2_of takes; the weight
  Vec<Real> slope;          // of the logit as a function of scale · product

  ATTEMPER_INLINE Again(const Problem& p, const Block<Real>& block, const RowTerms<Real>& rows, const Visibility<Real>& seen,
                        Vec<Real> product, int64_t key, int vector) {
    const int lanes = vector * kLanes<Real>;
    const Vec<Real> scale = load(block.scale + lanes);
    Vec<Real> x = product;
    slope = splat(Real(1));
    if (p.softcap != 0) {
      const Vec<Real> inside = product * load(block.scale_by_cap + lanes), bent = tanh_of(inside);
      x = splat(static_cast<Real>(p.softcap)) * bent;
      slope = tanh_slope_of<Real>(inside, bent);
    } else if (!block.raw) {
      x *= scale;
    }
    if (seen.bias && !block.raw) x += load(seen.bias + key * kBlock<Real> + lanes);
    const Vec<Real> factor = block.raw ? scale * splat(Real(kLog2E)) : splat(Real(kLog2E));
    depth = bounded((x - load(rows.pivot + lanes)) * factor);
    weight = exp2_of(depth) * load(rows.peak + lanes);
  }
};

// Weights of one tile, dropout applied, in desk.weights; in desk.gradient the gradient of the logits or, with `through`, that of
// the products, back through the cap and the scale. Then Σ dz·(u − pivot) of each row is added to from_pivot on the way, which
// the gradient of the scale wants. Needs desk.products, and in desk.gradient that of the weights.
template <class Real, bool through>
void logit_gradients(const Problem& p, const Block<Real>& block, const RowTerms<Real>& rows, const Visibility<Real>& seen,
                     int64_t keys, Desk<Real>& desk, Real* from_pivot) {
  const Vec<Real> nought = splat(Real(0));
  const bool flows = p.output_gradient.address != 0, dropping = p.dropout_p > 0;
  for (int v = 0; v < block.vectors; ++v) {
    const int lanes = v * kLanes<Real>;
    const Vec<Real> scale = load(block.scale + lanes), constant = load(rows.constant + lanes);
    const Vec<Real> entropy_gradient = load(rows.entropy_gradient + lanes), surprise = load(rows.surprise + lanes);
    const Vec<Real> product_pivot = load(rows.product_pivot + lanes);
    Vec<Real> weighted = nought;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t place = j * kBlock<Real> + lanes;
      const Vec<Real> product = load(desk.products + place);
      const Again<Real> again(p, block, rows, seen, product, j, v);
      Vec<Real> into = flows ? load(desk.gradient + place) : nought;
      Vec<Real> kept = again.weight;
      if (dropping) {
        const Vec<Real> keep = load(desk.keep + place);
        into *= keep;
        kept *= keep;
      }
      into += constant;
      if (p.entropy_gradient) {
        const Vec<Real> nats = again.weight == nought ? nought : again.depth * splat(Real(kLn2)) + surprise;
        into -= entropy_gradient * nats;
      }
      Vec<Real> gradient = again.weight * into, from = product - product_pivot;
      if (through && p.softcap != 0) gradient *= again.slope;
      if (!seen.whole) {
        const Ints<Real> visible = seen.of(j, v);
        kept = visible ? kept : nought;
        gradient = visible ? gradient : nought;
        from = visible ? from : nought;
      }
      if (through) {
        weighted += gradient * from;
        gradient *= scale;
      }
      store(desk.weights + place, kept);
      store(desk.gradient + place, gradient);
    }
    if (through) store(from_pivot + lanes, load(from_pivot + lanes) + weighted);
  }
}

// Σ p·dp·keep and Σ p·(u − pivot), the latter back through the cap: row figures from which the caller takes the error of
// `constant` out of gradients that are kept in float. Where the forward pass rounded the weights, D = Σ o·do has that error.
// Needs desk.products, and dP in desk.gradient.
template <class Real>
void sum_flow(const Problem& p, const Block<Real>& block, const RowTerms<Real>& rows, const Visibility<Real>& seen, int64_t keys,
              const Desk<Real>& desk, Real* flow, Real* swing) {
  const Vec<Real> nought = splat(Real(0));
  for (int v = 0; v < block.vectors; ++v) {
    const int lanes = v * kLanes<Real>;
    const Vec<Real> product_pivot = load(rows.product_pivot + lanes);
    Vec<Real> flowing = nought, swinging = nought;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t place = j * kBlock<Real> + lanes;
      const Vec<Real> product = load(desk.products + place);
      const Again<Real> again(p, block, rows, seen, product, j, v);
      Vec<Real> into = p.output_gradient.address ? again.weight * load(desk.gradient + place) : nought;
      if (p.dropout_p > 0) into *= load(desk.keep + place);
      Vec<Real> from = again.weight * (product - product_pivot);
      if (p.softcap != 0) from *= again.slope;
      const Ints<Real> visible = seen.of(j, v);
      flowing += visible ? into : nought;
      swinging += visible ? from : nought;
    }
    store(flow + lanes, load(flow + lanes) + flowing);
    store(swing + lanes, load(swing + lanes) + swinging);
  }
}

}  // namespace
}  // namespace attemper
