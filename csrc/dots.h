// Products of a few rows with a few keys, each along its width, where there are too few queries to be lanes. The backward pass of
// such queries finds its products here as the forward pass did: weights then come out as they were.
#pragma once
#include "tile.h"

namespace attemper {
namespace {

template <class Real>
bool few_queries(const Problem& p) {
  return p.queries * 2 <= kLanes<Real>;
}

// By halves; the compiler makes shuffles of it.
template <class Real>
ATTEMPER_INLINE Real sum_of_lanes(Vec<Real> x) {
  Real lanes[kLanes<Real>];
  memcpy(lanes, &x, sizeof(x));
#pragma GCC unroll 4
  for (int half = kLanes<Real> / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// put(key, row, query · key) for `rows` queries, padded with noughts, and `keys` keys. The bits of a product do not depend on how
// many there are at once.
template <class Real, int rows, int keys, class Put>
ATTEMPER_INLINE void dot(const Rows<Real>& key, const Real* query, int64_t padded_width, int64_t width, Put put) {
  Vec<Real> sums[keys][rows];
#pragma GCC unroll 4
  for (int j = 0; j < keys; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) sums[j][r] = splat(Real(0));
  const auto add = [&](const Vec<Real>(&of_key)[keys], int64_t c) ATTEMPER_INLINED {
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vec<Real> of_query = load(query + r * padded_width + c);
#pragma GCC unroll 4
      for (int j = 0; j < keys; ++j) sums[j][r] += of_key[j] * of_query;
    }
  };
  const int64_t whole = width / kLanes<Real> * kLanes<Real>;
  Vec<Real> of_key[keys];
  for (int64_t c = 0; c < whole; c += kLanes<Real>) {
#pragma GCC unroll 4
    for (int j = 0; j < keys; ++j) of_key[j] = load_unaligned(key.data + j * key.stride + c);
    add(of_key, c);
  }
  if (whole < width) {
#pragma GCC unroll 4
    for (int j = 0; j < keys; ++j) of_key[j] = load_some(key.data + j * key.stride + whole, width - whole);
    add(of_key, whole);
  }
#pragma GCC unroll 4
  for (int j = 0; j < keys; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) put(j, r, sum_of_lanes<Real>(sums[j][r]));
}

}  // namespace
}  // namespace attemper
