// The definition of attention and its gradients as loops in double precision, and how far rounding may take a kernel from it.
#pragma once
#include "cases.h"

// Numbers expected, and for each a bound on its error.
struct Sums {
  std::vector<double> value, bound;

  void resize(int64_t count) {
    value.assign(count, 0);
    bound.assign(count, 0);
  }
  void add(int64_t index, double term, double error) {
    value[index] += term;
    bound[index] += error;
  }
};

struct Expected {
  Sums output, lse, entropy, rest;                                                                  // in the layout of problem.h
  Sums query_gradient, key_gradient, value_gradient, mask_gradient, scale_gradient, sink_gradient;  // the last two: row figures
};

// `coarse`: by how large a share of itself the kernel may round a weight, or a logit's gradient, before a product.
// What is written in 16 bits may be off by that rounding on top.
Expected expected_of(const Case& c, double coarse);
