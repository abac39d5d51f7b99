// The backward pass. A unit is one key head (of one batch) and its share of the key tiles; it walks over all queries that read
// these keys, recomputes their weights and gathers the gradients of its own keys, so that no two units write to one place:
//
//   P = weights again, dP = V·dOᵀ, dZ = P·(dP·keep + constant − g·(ln p + H)), dU = dZ back through cap and scale,
//   dQᵀ += Kᵀ·dU (lanes are queries), dV += (P·keep)·dO and dK += dU·Q (lanes run along the width).
//
// Where keys are dealt to several units each has a dQ of its own; they are added up afterwards, in order. How many there are
// depends on the shape alone, so the result does not depend on the number of threads.
#pragma once
#include "dots.h"
#include "gradients.h"
#include "operands.h"

namespace attemper {
namespace {

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

template <class Term, Layout layout, class Real>
ATTEMPER_OUTLINED void multiply_into(const Term* a, int64_t a_stride, const Term* b, int64_t b_stride, int64_t inner,
                                     int64_t rows, int64_t columns, Real* to, int64_t to_stride, bool add) {
  multiply<Term, layout>(a, a_stride, b, b_stride, inner, rows, columns,
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
void write_row(const Real* from, int64_t width, Stored* to) {
  for (int64_t c = 0; c < width; ++c) write(to + c, from[c]);
}

template <class Real>
void clear_broken(Real* rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (!(rows[i] - rows[i] == 0)) rows[i] = 0;
}

// The rows of a block, queries or output gradients, as the sum over queries reads them.
template <class Stored, class Real>
struct BlockRows {
  const View& view;
  const int64_t width, stride;
  Real* rows;   // [block][stride]; in pairs only where something is not finite
  Pair* pairs;  // [block/2][stride]
  bool finite = true;

  BlockRows(const View& from, int64_t columns, Arena& arena) : view(from), width(columns), stride(padded<Real>(columns)) {
    rows = arena.take<Real>(stride * kBlock<Real>);
    pairs = arena.take<Pair>(kInPairs<Stored> ? stride * kBlock<Real> / 2 : 0);
  }

  void begin_block(const Block<Real>& block) {
    if constexpr (kInPairs<Stored>) {
      join_query_rows<Stored>(view, block, width, stride, pairs);
      finite = all_finite(pairs, stride, query_pairs(block), width);
    } else {
      finite = copy_rows<Stored>(view, block, width, rows);
    }
  }

  // to += weightsᵀ · rows, a row for each key of a tile.
  void add_to_keys(const Block<Real>& block, const Visibility<Real>& seen, const Real* weights, int64_t keys, Pair* weight_pairs,
                   Real* to) {
    const bool careful = !seen.whole && !finite;
    if constexpr (kInPairs<Stored>) {
      if (!careful) {
        join_queries(block, weights, keys, weight_pairs);
        return multiply_into<Pair, kInnerContiguous>(weight_pairs, kBlock<Real> / 2, pairs, stride, query_pairs(block), keys,
                                                     stride, to, stride, true);
      }
      copy_rows<Stored>(view, block, width, rows);
    }
    if (careful) {
      add_broken_rows(block, seen, rows, width, weights, keys, to);
      clear_broken(rows, block.rows * stride);
    }
    multiply_into<Real, kInnerContiguous>(weights, kBlock<Real>, rows, stride, block.rows, keys, stride, to, stride, true);
    if (careful) copy_rows<Stored>(view, block, width, rows);
  }
};

// What is multiplied for a block of queries and a tile of keys, laid out for each product.
template <class Stored, class Real>
struct Operands {
  typedef typename TermOf<Stored>::Type Term;
  const Problem& p;
  Term *query, *output_gradient;                               // [terms of the width][block]
  Term *key_rows, *value_rows;                                 // [tile keys][terms of the width]
  Pair *weights_over_queries, *weights_over_keys, *key_pairs;  // [tile keys][block/2], [tile keys/2][block or width]
  Real* few_rows;                                              // [queries][padded width], where there are few
  BlockRows<Stored, Real> query_rows, output_gradient_rows;
  Rows<Term> key;

  Operands(const Problem& problem, Arena& arena)
      : p(problem), query_rows(p.query, p.width, arena), output_gradient_rows(p.output_gradient, p.value_width, arena) {
    const int64_t terms = terms_of<Term>(p.width), value_terms = terms_of<Term>(p.value_width);
    const int64_t key_pairs_in_tile = kInPairs<Stored> ? kTileKeys / 2 : 0;
    query = arena.take<Term>(terms * kBlock<Real>);
    output_gradient = arena.take<Term>(value_terms * kBlock<Real>);
    key_rows = arena.take<Term>(kTileKeys * terms);
    value_rows = arena.take<Term>(kTileKeys * value_terms);
    weights_over_queries = arena.take<Pair>(key_pairs_in_tile * kBlock<Real>);
    weights_over_keys = arena.take<Pair>(key_pairs_in_tile * kBlock<Real>);
    key_pairs = arena.take<Pair>(key_pairs_in_tile * p.width);
    few_rows = arena.take<Real>(few_queries<Real>(p) ? p.queries * padded<Real>(p.width) : 0);
  }

  void begin_block(const Block<Real>& block) {
    pack_rows<Stored>(p.query, block, p.width, query);
    if (few_queries<Real>(p)) copy_rows<Stored>(p.query, block, p.width, few_rows);
    if (p.output_gradient.address) pack_rows<Stored>(p.output_gradient, block, p.value_width, output_gradient);
  }

  // S = K·Qᵀ and dP = V·dOᵀ of a tile.
  void multiply_tile(const Block<Real>& block, int64_t first, int64_t keys, Desk<Real>& desk) {
    key = rows_of<Stored>(p.key, block.batch, block.kv_head, first, keys, p.width, key_rows);
    if (few_queries<Real>(p))
      multiply_few(block, first, keys, desk);
    else
      multiply_into<Term, kInnerContiguous>(key.data, key.stride, query, kBlock<Real>, terms_of<Term>(p.width), keys,
                                            block.vectors * kLanes<Real>, desk.products, kBlock<Real>, false);
    if (p.output_gradient.address == 0) return;
    const Rows<Term> value = rows_of<Stored>(p.value, block.batch, block.kv_head, first, keys, p.value_width, value_rows);
    multiply_into<Term, kInnerContiguous>(value.data, value.stride, output_gradient, kBlock<Real>, terms_of<Term>(p.value_width),
                                          keys, block.vectors * kLanes<Real>, desk.gradient, kBlock<Real>, false);
  }

  // S of a tile as decode.h has it.
  void multiply_few(const Block<Real>& block, int64_t first, int64_t keys, Desk<Real>& desk) {
    const Rows<Real> rows = rows_of<Stored>(p.key, block.batch, block.kv_head, first, keys, p.width, desk.clean);
    for (int64_t r = 0; r < block.rows; ++r) {
      const Real* query_row = few_rows + r * padded<Real>(p.width);
      for (int64_t j = 0; j < keys; ++j)
        dot<Real, 1, 1>({rows.data + j * rows.stride, rows.stride}, query_row, 0, p.width,
                        [&](int, int, Real product) { desk.products[j * kBlock<Real> + r] = product; });
    }
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t r = block.rows; r < block.vectors * kLanes<Real>; ++r) desk.products[j * kBlock<Real> + r] = 0;
  }

  // dQᵀ += Kᵀ·dU of the tile.
  void add_to_queries(const Block<Real>& block, const Visibility<Real>& seen, int64_t first, int64_t keys, Desk<Real>& desk) {
    const int64_t lanes = block.vectors * kLanes<Real>;
    Rows<Real> rows;
    if (!seen.whole && !all_finite(key.data, key.stride, keys, terms_of<Term>(p.width))) {
      rows = rows_of<Stored>(p.key, block.batch, block.kv_head, first, keys, p.width, desk.clean, true);
      add_broken_keys(block, seen, rows, p.width, desk.gradient, keys, desk.query_gradient);
      clear_broken(desk.clean, keys * p.width);
    } else if constexpr (kInPairs<Stored>) {
      const Rows<Pair> pairs = join_key_rows<Stored>(p.key, block.batch, block.kv_head, first, keys, p.width, key_pairs);
      join_keys(block, desk.gradient, keys, weights_over_keys);
      return multiply_into<Pair, kRowContiguous>(pairs.data, pairs.stride, weights_over_keys, kBlock<Real>, terms_of<Pair>(keys),
                                                 p.width, lanes, desk.query_gradient, kBlock<Real>, true);
    } else {
      rows = key;
    }
    multiply_into<Real, kRowContiguous>(rows.data, rows.stride, desk.gradient, kBlock<Real>, keys, p.width, lanes,
                                        desk.query_gradient, kBlock<Real>, true);
  }
};

// Whether a number of a float mask serves a whole row or column of logits: sums of so many terms are kept in double.
inline bool mask_serves_many(const Problem& p) { return p.mask_gradient && (p.mask_queries == 1 || p.mask_keys == 1); }

template <class Stored, class Real>
int64_t backward_scratch(const Problem& p) {
  Arena arena(nullptr);
  Desk<Real> desk(p, arena);
  Operands<Stored, Real> operands(p, arena);
  arena.take<double>(mask_serves_many(p) ? p.mask_queries * p.mask_keys : 0);
  return arena.used() + 64;
}

// What every logit's gradient of a row has in common: the gradient of lse − Σ o·do. In double: where the weights are sharp, it is
// nearly the opposite of what a key adds to it.
template <class Stored, class Real>
void constants_of_block(const Problem& p, int64_t batch, int64_t head, int64_t first) {
  for (int64_t query = first; query < least(first + kBlock<Real>, p.queries); ++query) {
    const int64_t row = (batch * p.heads + head) * p.queries + query;
    double sums[4] = {};
    if (p.output_gradient.address && p.unrounded.address) {
      const Stored* gradient = at<Stored>(p.output_gradient, batch, head, query);
      const Real* output = at<Real>(p.unrounded, batch, head, query);
      for (int64_t c = 0; c < p.value_width; ++c)
        sums[c % 4] += double(output[c]) * double(read(gradient[c * p.output_gradient.stride[3]]));
    }
    const double of_lse = p.lse_gradient ? double(reinterpret_cast<const Real*>(p.lse_gradient)[row]) : 0.0;
    reinterpret_cast<Real*>(p.constant)[row] = static_cast<Real>(of_lse - ((sums[0] + sums[1]) + (sums[2] + sums[3])));
  }
}

// The unit `unit` of a key head.
template <class Stored, class Real>
void backward_unit(const Problem& p, int64_t batch, int64_t kv_head, int64_t unit, char* memory) {
  Arena arena(memory);
  Desk<Real> desk(p, arena);
  Operands<Stored, Real> operands(p, arena);
  const int64_t width = padded<Real>(p.width), value_width = padded<Real>(p.value_width), groups = p.heads / p.kv_heads;
  const int64_t rows_in_all = p.batch * p.heads * p.queries, numbers = p.width * kBlock<Real>;
  if (p.key_gradient.address) memset(desk.key_gradient, 0, sizeof(Real) * keys_of_unit(p) * width);
  if (p.value_gradient.address) memset(desk.value_gradient, 0, sizeof(Real) * keys_of_unit(p) * value_width);
  const bool sums_flow = kInPairs<Stored> && p.from_pivot != 0;
  alignas(64) Real sums[3][kBlock<Real>];  // in the order of Problem::from_pivot

  for (int64_t head = kv_head * groups; head < (kv_head + 1) * groups; ++head)
    for (int64_t first = 0; first < p.queries; first += kBlock<Real>) {
      Block<Real> block;
      begin_block(p, batch, head, first, block);
      const RowTerms<Real> rows(p, block);
      const bool flows = p.output_gradient.address != 0;
      operands.begin_block(block);
      operands.query_rows.begin_block(block);
      if (flows) operands.output_gradient_rows.begin_block(block);
      const int64_t row = (batch * p.heads + head) * p.queries + first;
      int64_t begin, end;
      keys_in_reach(p, first, block.rows, begin, end);

      const int64_t first_part = p.together ? 0 : unit, parts_end = p.together ? p.splits : unit + 1;
      for (int64_t part = first_part; part < parts_end; ++part) {
        memset(desk.query_gradient, 0, sizeof(Real) * numbers);
        memset(sums, 0, sizeof(sums));
        for (int64_t j = begin; j < end; j += kTileKeys) {
          if (j / kTileKeys % p.splits != part) continue;
          const int64_t keys = least(kTileKeys, end - j);
          Visibility<Real> seen;
          if (!find_visibility(p, block, j, keys, desk.bias, seen)) continue;
          operands.multiply_tile(block, j, keys, desk);
          if (p.dropout_p > 0) keep_factors(p, block, j, keys, desk.keep);
          if (sums_flow) sum_flow(p, block, rows, seen, keys, desk, sums[1], sums[2]);
          logit_gradients<Real, true>(p, block, rows, seen, keys, desk, sums[0]);
          if (p.value_gradient.address && flows)
            operands.output_gradient_rows.add_to_keys(block, seen, desk.weights, keys, operands.weights_over_queries,
                                                      desk.value_gradient + place_in_unit(p, j) * value_width);
          if (p.query_gradient.address) operands.add_to_queries(block, seen, j, keys, desk);
          if (p.key_gradient.address)
            operands.query_rows.add_to_keys(block, seen, desk.gradient, keys, operands.weights_over_queries,
                                            desk.key_gradient + place_in_unit(p, j) * width);
        }
        for (int64_t r = 0; r < block.rows; ++r)
          for (int64_t i = 0; i < (sums_flow ? 3 : p.from_pivot ? 1 : 0); ++i)
            reinterpret_cast<Real*>(p.from_pivot)[(i * p.splits + part) * rows_in_all + row + r] = sums[i][r];
        if (part > first_part)
          for (int64_t i = 0; i < numbers; ++i) desk.query_gradient[i] = desk.part_gradient[i] + desk.query_gradient[i];
        if (part + 1 < parts_end) memcpy(desk.part_gradient, desk.query_gradient, sizeof(Real) * numbers);
      }
      const bool whole = p.units_of_head() == 1;
      for (int64_t at_lane = 0; p.query_gradient.address && at_lane < block.rows; at_lane += kLanes<Real>)
        columns_to_rows<Real>(desk.query_gradient + at_lane, kBlock<Real>, splat(Real(1)), p.width,
                              least<int64_t>(kLanes<Real>, block.rows - at_lane), [&](int64_t r, int64_t c, Vec<Real> x) {
                                const int64_t query = first + at_lane + r, from = unit * p.between_splits + c;
                                if (whole)
                                  write_some<Real>(at<Stored>(p.query_gradient, batch, head, query) + c, x, p.width - c);
                                else
                                  write_some<Real>(at<Real>(p.query_gradient, batch, head, query) + from, x, p.width - c);
                              });
    }

  const int64_t units = p.units_of_head();
  for (int64_t j = unit * kTileKeys; j < p.keys; j += units * kTileKeys)
    for (int64_t r = j; r < least(j + kTileKeys, p.keys); ++r) {
      const int64_t place = place_in_unit(p, r);
      if (p.key_gradient.address)
        write_row(desk.key_gradient + place * width, p.width, at<Stored>(p.key_gradient, batch, kv_head, r));
      if (p.value_gradient.address)
        write_row(desk.value_gradient + place * value_width, p.value_width, at<Stored>(p.value_gradient, batch, kv_head, r));
    }
}

// The gradient of a float mask, one plane of it: every (batch, head) that the plane serves adds to it in order.
template <class Stored, class Real>
void mask_gradient_unit(const Problem& p, int64_t mask_batch, int64_t mask_head, char* memory) {
  Arena arena(memory);
  Desk<Real> desk(p, arena);
  Operands<Stored, Real> operands(p, arena);
  const int64_t numbers = p.mask_queries * p.mask_keys;
  Real* plane = reinterpret_cast<Real*>(p.mask_gradient) + (mask_batch * p.mask_heads + mask_head) * numbers;
  const bool serves_many = mask_serves_many(p);
  double* sums = arena.take<double>(serves_many ? numbers : 0);
  memset(plane, 0, sizeof(Real) * numbers);
  if (serves_many) memset(sums, 0, sizeof(double) * numbers);
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t head = 0; head < p.heads; ++head) {
      if ((p.mask_batch > 1 && batch != mask_batch) || (p.mask_heads > 1 && head != mask_head)) continue;
      for (int64_t first = 0; first < p.queries; first += kBlock<Real>) {
        Block<Real> block;
        begin_block(p, batch, head, first, block);
        const RowTerms<Real> rows(p, block);
        operands.begin_block(block);
        int64_t begin, end;
        keys_in_reach(p, first, block.rows, begin, end);
        for (int64_t j = begin; j < end; j += kTileKeys) {
          const int64_t keys = least(kTileKeys, end - j);
          Visibility<Real> seen;
          if (!find_visibility(p, block, j, keys, desk.bias, seen)) continue;
          operands.multiply_tile(block, j, keys, desk);
          if (p.dropout_p > 0) keep_factors(p, block, j, keys, desk.keep);
          logit_gradients<Real, false>(p, block, rows, seen, keys, desk, nullptr);
          for (int64_t r = 0; r < block.rows; ++r) {
            const int64_t row = (p.mask_queries > 1 ? first + r : 0) * p.mask_keys;
            for (int64_t k = 0; k < keys; ++k) {
              const int64_t place = row + (p.mask_keys > 1 ? j + k : 0);
              if (serves_many)
                sums[place] += desk.gradient[k * kBlock<Real> + r];
              else
                plane[place] += desk.gradient[k * kBlock<Real> + r];
            }
          }
        }
      }
    }
  for (int64_t i = 0; serves_many && i < numbers; ++i) plane[i] = static_cast<Real>(sums[i]);
}

}  // namespace
}  // namespace attemper
