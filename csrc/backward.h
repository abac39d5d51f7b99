// The backward pass. A unit is one key head (of one batch) and its share of the key tiles; it walks over all queries that read
// these keys, recomputes their weights and gathers the gradients of its own keys, so that no two units write to one place:
//
//   P = weights again, dP = V·dOᵀ, dZ = P·(dP·keep + constant − g·(ln p + H)), dU = dZ back through cap and scale,
//   dQᵀ += Kᵀ·dU (lanes are queries), dV += (P·keep)·dO and dK += dU·Q (lanes run along the width).
//
// Where keys are dealt to several units each has a dQ of its own; they are added up afterwards, in order. How many there are
// depends on the shape alone, so the result does not depend on the number of threads.
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
  const int64_t tiles = (p.keys + kTileKeys - 1) / kTileKeys;
  return (tiles + p.splits - 1) / p.splits * kTileKeys;
}
inline int64_t place_in_unit(const Problem& p, int64_t key) { return key / kTileKeys / p.splits * kTileKeys + key % kTileKeys; }

// The scratch of a unit.
template <class Real>
struct Desk {
  Real *query, *output_gradient;            // [width or value_width][block]
  Real *query_rows, *output_gradient_rows;  // [block][padded width]
  Real *products, *weights, *gradient;      // [tile keys][block]
  Real *bias, *keep;
  Real *key_rows, *value_rows, *clean;  // [tile keys][width or value_width]
  Real* query_gradient;                 // [width][block]
  Real *key_gradient, *value_gradient;  // [the unit's keys][padded width]

  Desk(const Problem& p, Arena& arena) {
    const int64_t tile = kTileKeys * kBlock<Real>, width = padded<Real>(p.width), value_width = padded<Real>(p.value_width);
    query = arena.take<Real>(p.width * kBlock<Real>);
    output_gradient = arena.take<Real>(p.value_width * kBlock<Real>);
    query_rows = arena.take<Real>(width * kBlock<Real>);
    output_gradient_rows = arena.take<Real>(value_width * kBlock<Real>);
    products = arena.take<Real>(tile);
    weights = arena.take<Real>(tile);
    gradient = arena.take<Real>(tile);
    bias = arena.take<Real>(tile);
    keep = arena.take<Real>(tile);
    key_rows = arena.take<Real>(kTileKeys * p.width);
    value_rows = arena.take<Real>(kTileKeys * p.value_width);
    clean = arena.take<Real>(kTileKeys * p.width);
    query_gradient = arena.take<Real>(p.width * kBlock<Real>);
    key_gradient = arena.take<Real>(p.key_gradient ? keys_of_unit(p) * width : 0);
    value_gradient = arena.take<Real>(p.value_gradient ? keys_of_unit(p) * value_width : 0);
  }
};

template <class Real>
int64_t backward_scratch(const Problem& p) {
  Arena arena(nullptr);
  Desk<Real> desk(p, arena);
  return arena.used(nullptr) + 64;
}

// Rows as they are, padded with noughts to whole vectors; says whether all of them are finite.
template <class Stored, class Real>
bool copy_rows(const View& view, const Block<Real>& block, int64_t width, Real* rows) {
  const int64_t stride = padded<Real>(width);
  for (int64_t r = 0; r < block.rows; ++r) {
    read_run(at<Stored>(view, block.batch, block.head, block.first + r), view.stride[3], width, rows + r * stride);
    for (int64_t c = width; c < stride; ++c) rows[r * stride + c] = 0;
  }
  return all_finite(rows, stride, block.rows, width);
}

template <class Stored, class Real>
void pack_block(const Problem& p, const Block<Real>& block, Desk<Real>& desk) {
  pack_rows<Stored>(p.query, block, p.width, desk.query);
  if (p.output_gradient.address) pack_rows<Stored>(p.output_gradient, block, p.value_width, desk.output_gradient);
}

template <class Real, Layout layout>
void multiply_into(const Real* a, int64_t a_stride, const Real* b, int64_t b_stride, int64_t inner, int64_t rows, int64_t columns,
                   Real* to, int64_t to_stride, bool add) {
  multiply<Real, layout>(a, a_stride, b, b_stride, inner, rows, columns,
                         [&](int64_t row, int64_t column, auto& sums) ATTEMPER_INLINED {
                           constexpr int count = sizeof(sums) / sizeof(sums[0]), vectors = sizeof(sums[0]) / sizeof(sums[0][0]);
#pragma GCC unroll 16
                           for (int r = 0; r < count; ++r)
#pragma GCC unroll 8
                             for (int c = 0; c < vectors; ++c) {
                               Real* place = to + (row + r) * to_stride + column + c * kLanes<Real>;
                               store(place, add ? load(place) + sums[r][c] : sums[r][c]);
                             }
                         });
}

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
    const Vec<Real> scale = load(block.scale + lanes), scale_by_cap = load(block.scale_by_cap + lanes);
    const Vec<Real> factor = block.raw ? scale * splat(Real(kLog2E)) : splat(Real(kLog2E));
    const Vec<Real> pivot = load(rows.pivot + lanes), peak = load(rows.peak + lanes), constant = load(rows.constant + lanes);
    const Vec<Real> entropy_gradient = load(rows.entropy_gradient + lanes), surprise = load(rows.surprise + lanes);
    const Vec<Real> product_pivot = load(rows.product_pivot + lanes);
    Vec<Real> weighted = nought;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t place = j * kBlock<Real> + lanes;
      const Vec<Real> product = load(desk.products + place);
      const Vec<Real> x = block.raw ? product : logit_of(p, block, seen, product, j, v);
      const Vec<Real> depth = bounded((x - pivot) * factor);
      Vec<Real> weight = exp2_of(depth) * peak;
      Vec<Real> into = flows ? load(desk.gradient + place) : nought;
      Vec<Real> kept = weight;
      if (dropping) {
        const Vec<Real> keep = load(desk.keep + place);
        into *= keep;
        kept *= keep;
      }
      into += constant;
      if (p.entropy_gradient) {
        const Vec<Real> nats = weight == nought ? nought : depth * splat(Real(kLn2)) + surprise;
        into -= entropy_gradient * nats;
      }
      Vec<Real> gradient = weight * into, from = product - product_pivot;
      if (through && p.softcap != 0) gradient *= tanh_slope_of<Real>(product * scale_by_cap);
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

// Σ weight · row for rows that hold something not finite, of which the cleaned copy has noughts: only to keys that see them.
template <class Real>
void add_broken_rows(const Block<Real>& block, const Visibility<Real>& seen, const Real* rows, int64_t width, const Real* weights,
                     int64_t keys, Real* to) {
  const int64_t stride = padded<Real>(width);
  for (int64_t r = 0; r < block.rows; ++r) {
    if (all_finite(rows + r * stride, 0, 1, width)) continue;
    for (int64_t j = 0; j < keys; ++j)
      if (seen.of_lane(j, r))
        for (int64_t c = 0; c < width; ++c) {
          const Real x = rows[r * stride + c];
          if (!(x - x == 0)) to[j * stride + c] += weights[j * kBlock<Real> + r] * x;
        }
  }
}

// The same for the gradient of the queries, whose lanes are queries.
template <class Real>
void add_broken_keys(const Block<Real>& block, const Visibility<Real>& seen, const Rows<Real>& key, int64_t width,
                     const Real* weights, int64_t keys, Real* to) {
  for (int64_t j = 0; j < keys; ++j) {
    const Real* row = key.data + j * key.stride;
    if (all_finite(row, 0, 1, width)) continue;
    for (int64_t lane = 0; lane < block.rows; ++lane)
      if (seen.of_lane(j, lane))
        for (int64_t c = 0; c < width; ++c)
          if (!(row[c] - row[c] == 0)) to[c * kBlock<Real> + lane] += weights[j * kBlock<Real> + lane] * row[c];
  }
}

template <class Stored, class Real>
void write_row(const Real* from, int64_t width, Stored* to, int64_t row) {
  for (int64_t c = 0; c < width; ++c) write(to + row * width + c, from[c]);
}

template <class Real>
void clear_broken(Real* rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (!(rows[i] - rows[i] == 0)) rows[i] = 0;
}

// What every logit's gradient of a row has in common: the gradient of lse − Σ o·do. In double: where the weights are sharp, it is
// nearly the opposite of what a key adds to it.
template <class Stored, class Real>
void constants_of_block(const Problem& p, int64_t batch, int64_t head, int64_t first) {
  for (int64_t query = first; query < least(first + kBlock<Real>, p.queries); ++query) {
    const int64_t row = (batch * p.heads + head) * p.queries + query;
    double sums[4] = {};
    if (p.output_gradient.address) {
      const Stored* gradient = at<Stored>(p.output_gradient, batch, head, query);
      const Real* output = reinterpret_cast<const Real*>(p.unrounded) + row * p.value_width;
      for (int64_t c = 0; c < p.value_width; ++c)
        sums[c % 4] += double(output[c]) * double(read(gradient[c * p.output_gradient.stride[3]]));
    }
    const double of_lse = p.lse_gradient ? double(reinterpret_cast<const Real*>(p.lse_gradient)[row]) : 0.0;
    reinterpret_cast<Real*>(p.constant)[row] = static_cast<Real>(of_lse - ((sums[0] + sums[1]) + (sums[2] + sums[3])));
  }
}

template <class Stored, class Real>
void backward_unit(const Problem& p, int64_t batch, int64_t kv_head, int64_t split, char* memory) {
  Arena arena(memory);
  Desk<Real> desk(p, arena);
  const int64_t width = padded<Real>(p.width), value_width = padded<Real>(p.value_width), groups = p.heads / p.kv_heads;
  const int64_t rows_in_all = p.batch * p.heads * p.queries;
  if (p.key_gradient) memset(desk.key_gradient, 0, sizeof(Real) * keys_of_unit(p) * width);
  if (p.value_gradient) memset(desk.value_gradient, 0, sizeof(Real) * keys_of_unit(p) * value_width);
  alignas(64) Real from_pivot[kBlock<Real>];

  for (int64_t head = kv_head * groups; head < (kv_head + 1) * groups; ++head)
    for (int64_t first = 0; first < p.queries; first += kBlock<Real>) {
      Block<Real> block;
      begin_block(p, batch, head, first, block);
      const RowTerms<Real> rows(p, block);
      pack_block<Stored>(p, block, desk);
      const bool query_finite = copy_rows<Stored>(p.query, block, p.width, desk.query_rows);
      const bool flows = p.output_gradient.address != 0;
      const bool gradient_finite =
          !flows || copy_rows<Stored>(p.output_gradient, block, p.value_width, desk.output_gradient_rows);
      memset(desk.query_gradient, 0, sizeof(Real) * p.width * kBlock<Real>);
      memset(from_pivot, 0, sizeof(from_pivot));

      int64_t begin, end;
      keys_in_reach(p, first, block.rows, begin, end);
      for (int64_t j = begin; j < end; j += kTileKeys) {
        if (j / kTileKeys % p.splits != split) continue;
        const int64_t keys = least(kTileKeys, end - j);
        Visibility<Real> seen;
        if (!find_visibility(p, block, j, keys, desk.bias, seen)) continue;
        Rows<Real> key = rows_of<Stored>(p.key, batch, kv_head, j, keys, p.width, desk.key_rows);
        multiply_into<Real, kInnerContiguous>(key.data, key.stride, desk.query, kBlock<Real>, p.width, keys,
                                              block.vectors * kLanes<Real>, desk.products, kBlock<Real>, false);
        if (flows) {
          const Rows<Real> value = rows_of<Stored>(p.value, batch, kv_head, j, keys, p.value_width, desk.value_rows);
          multiply_into<Real, kInnerContiguous>(value.data, value.stride, desk.output_gradient, kBlock<Real>, p.value_width, keys,
                                                block.vectors * kLanes<Real>, desk.gradient, kBlock<Real>, false);
        }
        if (p.dropout_p > 0) keep_factors(p, block, j, keys, desk.keep);
        logit_gradients<Real, true>(p, block, rows, seen, keys, desk, from_pivot);
        if (p.value_gradient && flows) {
          Real* to = desk.value_gradient + place_in_unit(p, j) * value_width;
          if (!seen.whole && !gradient_finite) {
            add_broken_rows(block, seen, desk.output_gradient_rows, p.value_width, desk.weights, keys, to);
            clear_broken(desk.output_gradient_rows, block.rows * value_width);
          }
          multiply_into<Real, kInnerContiguous>(desk.weights, kBlock<Real>, desk.output_gradient_rows, value_width, block.rows,
                                                keys, value_width, to, value_width, true);
          if (!seen.whole && !gradient_finite)
            copy_rows<Stored>(p.output_gradient, block, p.value_width, desk.output_gradient_rows);
        }
        if (p.query_gradient) {
          if (!seen.whole && !all_finite(key.data, key.stride, keys, p.width)) {
            add_broken_keys(block, seen, key, p.width, desk.gradient, keys, desk.query_gradient);
            for (int64_t r = 0; r < keys; ++r)
              memcpy(desk.clean + r * p.width, key.data + r * key.stride, sizeof(Real) * p.width);
            clear_broken(desk.clean, keys * p.width);
            key = {desk.clean, p.width};
          }
          multiply_into<Real, kRowContiguous>(key.data, key.stride, desk.gradient, kBlock<Real>, keys, p.width,
                                              block.vectors * kLanes<Real>, desk.query_gradient, kBlock<Real>, true);
        }
        if (p.key_gradient) {
          Real* to = desk.key_gradient + place_in_unit(p, j) * width;
          if (!seen.whole && !query_finite) {
            add_broken_rows(block, seen, desk.query_rows, p.width, desk.gradient, keys, to);
            clear_broken(desk.query_rows, block.rows * width);
          }
          multiply_into<Real, kInnerContiguous>(desk.gradient, kBlock<Real>, desk.query_rows, width, block.rows, keys, width, to,
                                                width, true);
          if (!seen.whole && !query_finite) copy_rows<Stored>(p.query, block, p.width, desk.query_rows);
        }
      }
      const int64_t row = (batch * p.heads + head) * p.queries + first;
      for (int64_t r = 0; r < block.rows; ++r) {
        if (p.query_gradient) {
          const int64_t to = (split * rows_in_all + row + r) * p.width;
          for (int64_t c = 0; c < p.width; ++c) {
            const Real x = desk.query_gradient[c * kBlock<Real> + r];
            if (p.splits == 1)
              write(reinterpret_cast<Stored*>(p.query_gradient) + to + c, x);
            else
              reinterpret_cast<Real*>(p.query_gradient)[to + c] = x;
          }
        }
        if (p.from_pivot) reinterpret_cast<Real*>(p.from_pivot)[split * rows_in_all + row + r] = from_pivot[r];
      }
    }

  for (int64_t j = split * kTileKeys; j < p.keys; j += p.splits * kTileKeys)
    for (int64_t r = j; r < least(j + kTileKeys, p.keys); ++r) {
      const int64_t row = (batch * p.kv_heads + kv_head) * p.keys + r;
      const int64_t place = place_in_unit(p, r);
      if (p.key_gradient) write_row(desk.key_gradient + place * width, p.width, reinterpret_cast<Stored*>(p.key_gradient), row);
      if (p.value_gradient)
        write_row(desk.value_gradient + place * value_width, p.value_width, reinterpret_cast<Stored*>(p.value_gradient), row);
    }
}

// The gradient of a float mask, one plane of it: every (batch, head) that the plane serves adds to it in order.
template <class Stored, class Real>
void mask_gradient_unit(const Problem& p, int64_t mask_batch, int64_t mask_head, char* memory) {
  Arena arena(memory);
  Desk<Real> desk(p, arena);
  Real* plane = reinterpret_cast<Real*>(p.mask_gradient) + (mask_batch * p.mask_heads + mask_head) * p.mask_queries * p.mask_keys;
  memset(plane, 0, sizeof(Real) * p.mask_queries * p.mask_keys);
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t head = 0; head < p.heads; ++head) {
      if ((p.mask_batch > 1 && batch != mask_batch) || (p.mask_heads > 1 && head != mask_head)) continue;
      for (int64_t first = 0; first < p.queries; first += kBlock<Real>) {
        Block<Real> block;
        begin_block(p, batch, head, first, block);
        const RowTerms<Real> rows(p, block);
        pack_block<Stored>(p, block, desk);
        int64_t begin, end;
        keys_in_reach(p, first, block.rows, begin, end);
        for (int64_t j = begin; j < end; j += kTileKeys) {
          const int64_t keys = least(kTileKeys, end - j);
          Visibility<Real> seen;
          if (!find_visibility(p, block, j, keys, desk.bias, seen)) continue;
          const Rows<Real> key = rows_of<Stored>(p.key, batch, block.kv_head, j, keys, p.width, desk.key_rows);
          multiply_into<Real, kInnerContiguous>(key.data, key.stride, desk.query, kBlock<Real>, p.width, keys,
                                                block.vectors * kLanes<Real>, desk.products, kBlock<Real>, false);
          if (p.output_gradient.address) {
            const Rows<Real> value = rows_of<Stored>(p.value, batch, block.kv_head, j, keys, p.value_width, desk.value_rows);
            multiply_into<Real, kInnerContiguous>(value.data, value.stride, desk.output_gradient, kBlock<Real>, p.value_width,
                                                  keys, block.vectors * kLanes<Real>, desk.gradient, kBlock<Real>, false);
          }
          if (p.dropout_p > 0) keep_factors(p, block, j, keys, desk.keep);
          logit_gradients<Real, false>(p, block, rows, seen, keys, desk, nullptr);
          for (int64_t r = 0; r < block.rows; ++r) {
            Real* row = plane + (p.mask_queries > 1 ? first + r : 0) * p.mask_keys;
            for (int64_t k = 0; k < keys; ++k) row[p.mask_keys > 1 ? j + k : 0] += desk.gradient[k * kBlock<Real> + r];
          }
        }
      }
    }
}

}  // namespace
}  // namespace attemper
