// What the kernel is asked to do, as plain numbers: addresses, sizes and strides. No Python and no templates here.
#pragma once
#include <cstdint>

namespace attemper {

enum Dtype : int64_t { kFloat32 = 0, kFloat64 = 1, kBfloat16 = 2, kFloat16 = 3, kBool = 4 };

constexpr int64_t kUnlimited = INT64_MAX;  // a side of the window that is open; no offset reaches it

// A tensor of up to four dimensions [batch, heads, rows, columns], strides in elements; a stride of 0 repeats.
struct View {
  int64_t address;
  int64_t stride[4];
};

// The request, in the order in which the binding receives it: whole numbers first, then three doubles.
// Row figures are contiguous, [batch, heads, queries] of the compute type. What is written through a view has rows without gaps.
struct Problem {
  int64_t dtype, mask_dtype;
  int64_t batch, heads, kv_heads, queries, keys, width, value_width;
  View query, key, value;    // value.address 0: statistics only
  View mask;                 // address 0: none
  View scale;                // compute type, stride[3] unused
  int64_t sinks;             // [heads], compute type; 0: none
  int64_t offset, row_step;  // query i stands at key i · row_step + offset
  int64_t left, right;       // and sees key j where −left <= j − its place <= right
  int64_t seed, threads, statistics;

  // Forward: what is written; 0 where one is not wanted, but for rest where there are statistics.
  View output;                          // [batch, heads, queries, value_width], input type
  int64_t lse, entropy, rest;           // rest: [10, batch, heads, queries], order as RowStats.rest
  View unrounded;                       // the output in the compute type, for the backward pass of 16-bit inputs
  int64_t pivot, peak, surprise, sink;  // kept for the backward pass: see RowTerms in gradients.h

  // Backward: what flows in, and what is written.
  View output_gradient;  // address 0: the loss does not depend on the output; else `unrounded` is the output
  int64_t lse_gradient, entropy_gradient, product_pivot;  // row figures; 0: none
  int64_t constant;        // row figures: gradient of lse − Σ output · its gradient, found here if either of them is given
  int64_t splits;          // parts into which the keys are dealt
  int64_t together;        // whether one unit takes all parts of a head, one after the other: the sums are the same
  View query_gradient;     // [batch, heads, queries, width], compute type; input type where a unit has all; address 0: not wanted
  int64_t between_splits;  // numbers from the query gradient of a part to that of the next
  View key_gradient, value_gradient;  // [batch, kv_heads, keys, width or value_width], input type; address 0: not wanted
  // [1, splits, batch, heads, queries], for the gradient of the scale: Σ dz·(u − pivot). Where weights are rounded to bfloat16
  // [3, …]: next to it the two sums of sum_flow in gradients.h. 0: not wanted.
  int64_t from_pivot;
  int64_t mask_gradient, mask_batch, mask_heads, mask_queries, mask_keys;  // compute type, contiguous; 0: not wanted

  double softcap;  // 0: none
  double dropout_p;
  double invisible_below;  // a float mask at or below this hides the pair

  int64_t units_of_head() const { return together ? 1 : splits; }
  int64_t place_of(int64_t query) const { return query * row_step + offset; }
};

}  // namespace attemper
