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
// Outputs are contiguous: row figures are [batch, heads, queries] of the compute type, gradients as noted.
struct Problem {
  int64_t dtype, mask_dtype;
  int64_t batch, heads, kv_heads, queries, keys, width, value_width;
  View query, key, value;       // value.address 0: statistics only
  View mask;                    // address 0: none
  View scale;                   // compute type, stride[3] unused
  int64_t sinks;                // [heads], compute type; 0: none
  int64_t offset, left, right;  // key j is visible to query i where −left <= j − (i + offset) <= right
  int64_t seed, threads, statistics;

  // Forward: what is written.
  int64_t output;                       // [batch, heads, queries, value_width], input type
  int64_t lse, entropy, rest;           // rest: [10, batch, heads, queries], order as RowStats.rest
  int64_t unrounded;                    // the output in the compute type, for the backward pass of 16-bit inputs; 0: not wanted
  int64_t pivot, peak, surprise, sink;  // kept for the backward pass: see RowTerms in backward.h

  // Backward: what flows in, and what is written.
  View output_gradient;                               // address 0: the loss does not depend on the output
  int64_t constant, entropy_gradient, product_pivot;  // row figures; the last two may be 0: none
  int64_t splits;                                     // parts into which the keys are dealt
  int64_t query_gradient;                             // [splits, batch, heads, queries, width], compute type; 0: not wanted
  int64_t key_gradient, value_gradient;  // [batch, kv_heads, keys, width or value_width], compute type; 0: not wanted
  // [1, splits, batch, heads, queries], for the gradient of the scale: Σ dz·(u − pivot). Of bfloat16 [3, …]: next to it the two
  // sums of sum_flow in backward.h. 0: not wanted.
  int64_t from_pivot;
  int64_t mask_gradient, mask_batch, mask_heads, mask_queries, mask_keys;  // compute type, contiguous; 0: not wanted

  double softcap;  // 0: none
  double dropout_p;
  double invisible_below;  // a float mask at or below this hides the pair
};

}  // namespace attemper
