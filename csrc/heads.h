// Rows of a record reduced to heads: what HeadStats.reduce defines, in one pass over the rows.
#pragma once
#include <cstdint>

namespace attemper {

// The request, in the order in which the binding receives it. Addresses, and strides in elements; of each row figure the rows lie
// beside one another.
struct Reduction {
  int64_t dtype, heads, rows, sink, threads;
  int64_t lse, entropy, rest;  // [heads, rows] twice, and [10, heads, rows], in the order of RowStats.rest
  int64_t lse_stride, entropy_stride, field_stride, rest_stride;  // from head to head, but for field_stride
  int64_t real, real_stride;                                      // bytes, 0 where a row is padding; address 0: none is
  // Cells of logits and of shares, as Cells has them: int64 `below`, and `edge` in the dtype of the rows.
  int64_t logit_below, logit_edge, logit_bins, share_below, share_edge, share_bins;

  // Written, all of it: int64 [5, heads]; float64 [5, heads], [6, heads] and [heads], the largest |q·k|; int64 [heads, bins].
  int64_t counts, extremes, sums, products;
  int64_t max_bins, centred_bins, entropy_bins, peak_bins;
};

void reduce_heads(const Reduction& p);

}  // namespace attemper
