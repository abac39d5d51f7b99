// The operands of the products where bfloat16 is multiplied in pairs: the counterparts of pack_rows and rows_of in tile.h.
//
// Both operands of a product pair up along its inner index, so each tensor is laid out once for each index it is summed over:
//
//   over the width (S, dP)     q, do: [⌈width/2⌉][block]           k, v: rows as they lie in memory
//   over keys (O, dQ)          weights, dU: [⌈keys/2⌉][block]      v, k: [⌈keys/2⌉][width]
//   over queries (dV, dK)      weights, dU: [keys][block/2]        do, q: [block/2][padded width]
//
// Over queries the partner is the query of the same lane in the next vector: packing two vectors lane by lane then does it all.
// Weights are rounded to bfloat16 where they are packed; their sums and everything else stay in float.
#pragma once
#include "tile.h"

namespace attemper {
namespace {

// What a stored type is multiplied in.
template <class Stored>
struct TermOf {
  typedef typename ComputeOf<Stored>::Type Type;
};
#if ATTEMPER_BF16_PAIRS
template <>
struct TermOf<Bfloat16> {
  typedef Pair Type;
};
#endif
template <class Stored>
constexpr bool kInPairs = kSame<typename TermOf<Stored>::Type, Pair>;

// to[i · step] = (row[2i], row[2i + 1])
ATTEMPER_INLINE void join_neighbours(const Bfloat16* row, int64_t stride, int64_t count, Pair* to, int64_t step) {
  if (stride == 1)  // they are a pair as they lie
    for (int64_t i = 0; i < count / 2; ++i) to[i * step] = fetch(reinterpret_cast<const Pair*>(row) + i);
  else
    for (int64_t i = 0; i < count / 2; ++i) to[i * step] = pair_of(row[2 * i * stride], row[(2 * i + 1) * stride]);
  if (count % 2) to[count / 2 * step] = pair_of(row[(count - 1) * stride], Bfloat16{0});
}

// to[i] = (low[i], high[i]); no row at all is a row of noughts.
ATTEMPER_INLINE void join_rows(const Bfloat16* low, const Bfloat16* high, int64_t stride, int64_t count, Pair* to) {
  const Bfloat16 nought{0};
  if (low && high && stride == 1)
    for (int64_t i = 0; i < count; ++i) to[i] = pair_of(low[i], high[i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = pair_of(low ? low[i * stride] : nought, high ? high[i * stride] : nought);
}

template <class Stored>
void pack_rows(const View& view, const Block<float>& block, int64_t width, Pair* packed) {
  for (int64_t r = 0; r < block.vectors * kLanes<float>; ++r)
    if (r < block.rows)
      join_neighbours(at<Stored>(view, block.batch, block.head, block.first + r), view.stride[3], width, packed + r,
                      kBlock<float>);
    else
      for (int64_t i = 0; i < terms_of<Pair>(width); ++i) packed[i * kBlock<float> + r] = 0;
}

template <class Stored>
Rows<Pair> rows_of(const View& view, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t columns, Pair* scratch,
                   bool once = false) {
  if (view.stride[3] == 1 && view.stride[2] % 2 == 0 && columns % 2 == 0 && !once)
    return {reinterpret_cast<const Pair*>(at<Stored>(view, batch, head, first)), view.stride[2] / 2};
  const int64_t stride = terms_of<Pair>(columns);
  for (int64_t r = 0; r < rows; ++r)
    join_neighbours(at<Stored>(view, batch, head, first + r), view.stride[3], columns, scratch + r * stride, 1);
  return {scratch, stride};
}

// Whether no bfloat16 of the pairs has an exponent of ones only: one more would carry into the place of the sign.
ATTEMPER_INLINE bool all_finite(const Pair* data, int64_t stride, int64_t rows, int64_t columns) {
  Pair carried = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) carried |= (fetch(data + r * stride + c) & 0x7f807f80u) + 0x00800080u;
  return (carried & 0x80008000u) == 0;
}

// Keys or values of a tile, paired over keys.
template <class Stored>
Rows<Pair> join_key_rows(const View& view, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t columns,
                         Pair* scratch) {
  for (int64_t r = 0; r < rows; r += 2)
    join_rows(at<Stored>(view, batch, head, first + r), r + 1 < rows ? at<Stored>(view, batch, head, first + r + 1) : nullptr,
              view.stride[3], columns, scratch + r / 2 * columns);
  return {scratch, columns};
}

// Weights [keys][block], rounded and paired over keys. `sums`, where wanted: those of each query before and after the rounding.
struct SumsOfWeights {
  Vec<float> exact[kVectors], rounded[kVectors];
};
ATTEMPER_INLINE void join_keys(const Block<float>& block, const float* weights, int64_t keys, Pair* to,
                               SumsOfWeights* sums = nullptr) {
  const Vec<Pair> ones = splat<Pair>(0x3f803f80u);
  for (int v = 0; v < block.vectors; ++v) {
    const float* from = weights + v * kLanes<float>;
    Pair* place = to + v * kLanes<float>;
    Vec<float> exact = splat(0.0f), rounded = splat(0.0f);
    for (int64_t j = 0; j < keys; j += 2, from += 2 * kBlock<float>, place += kBlock<float>) {
      const Vec<float> low = load(from), high = j + 1 < keys ? load(from + kBlock<float>) : splat(0.0f);
      const Vec<Pair> pairs = pack_pairs(low, high);
      store(place, pairs);
      exact += low + high;
      rounded += add_product(splat(0.0f), pairs, ones);  // not into `rounded`: that would wait for each before
    }
    if (sums) sums->exact[v] = exact, sums->rounded[v] = rounded;
  }
}

// Pairs over queries that a block has, noughts where one or both of them are beyond its last row.
ATTEMPER_INLINE int64_t query_pairs(const Block<float>& block) { return (block.vectors + 1) / 2 * kLanes<float>; }

// Queries or output gradients of a block, paired over queries: [block/2][stride].
template <class Stored>
void join_query_rows(const View& view, const Block<float>& block, int64_t width, int64_t stride, Pair* to) {
  for (int64_t i = 0; i < query_pairs(block); ++i, to += stride) {
    const int64_t low = i / kLanes<float> * 2 * kLanes<float> + i % kLanes<float>, high = low + kLanes<float>;
    const auto row = [&](int64_t r) {
      return r < block.rows ? at<Stored>(view, block.batch, block.head, block.first + r) : nullptr;
    };
    join_rows(row(low), row(high), view.stride[3], width, to);
    for (int64_t c = width; c < stride; ++c) to[c] = 0;
  }
}

// Weights [keys][block], rounded and paired over queries: [keys][block/2]. What stands in lanes beyond the last row may be NaN.
ATTEMPER_INLINE void join_queries(const Block<float>& block, const float* weights, int64_t keys, Pair* to) {
  Vec<float> number;
  for (int lane = 0; lane < kLanes<float>; ++lane) number[lane] = static_cast<float>(lane);
  const auto of_rows = [&](Vec<float> x, int64_t lane)
                           ATTEMPER_INLINED { return number < splat(static_cast<float>(block.rows - lane)) ? x : splat(0.0f); };
  for (int64_t pair = 0; pair < query_pairs(block); pair += kLanes<float>)
    for (int64_t j = 0; j < keys; ++j) {
      const float* low = weights + j * kBlock<float> + 2 * pair;
      store(to + j * kBlock<float> / 2 + pair,
            pack_pairs(of_rows(load(low), 2 * pair), of_rows(load(low + kLanes<float>), 2 * pair + kLanes<float>)));
    }
}

}  // namespace
}  // namespace attemper
