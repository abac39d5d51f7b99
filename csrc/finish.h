// What closes a block: the figures of each row from its running ones, and output columns that become output rows.
#pragma once
#include "softmax.h"

namespace attemper {
namespace {

// The figures of each row from its sums, the sink merged last; output columns become output rows. In double: it costs nothing
// here, and in p3 each rounding of the total would count three times.
template <class Stored, class Real, bool statistics>
void finish_block(const Problem& p, const Block<Real>& block, const Running<Real>& running, const Real* output) {
  const int64_t rows_in_all = p.batch * p.heads * p.queries;
  const Real sink = p.sinks ? reinterpret_cast<const Real*>(p.sinks)[block.head] : Real(-kInfinity);
  const bool sinks = sink != Real(-kInfinity);
  alignas(64) Real shares[kBlock<Real>] = {};  // of the total, that a weight e^0 has
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = (block.batch * p.heads + block.head) * p.queries + block.first + r;
    const auto put = [row](int64_t address, double x) {  // some figures are not asked for
      if (address) reinterpret_cast<Real*>(address)[row] = static_cast<Real>(x);
    };
    const auto of_row = [r](const auto* figures) { return reinterpret_cast<const Real*>(figures)[r]; };
    const double keys_total = whole_of(of_row(running.total), of_row(running.total_rest));
    // A logit that is NaN spoils the sums but may be lost among the maxima: the row then is as one whose largest logit is NaN.
    const bool spoilt = keys_total != keys_total && of_row(running.pivot) != Real(kInfinity);
    const Real scale = block.raw ? block.scale[r] : Real(1), pivot = spoilt ? Real(keys_total) : of_row(running.pivot);
    const bool unseen = pivot == Real(-kInfinity);
    const Real top = unseen ? pivot : scale * pivot;
    const bool nothing = unseen && !sinks;
    const double shift = nothing ? 0.0 : (sink > top ? sink : top);
    const double key_weight = unseen ? 0.0 : !sinks ? 1.0 : std::exp(top - shift);
    const double sink_weight = !sinks ? 0.0 : std::exp(sink - shift);  // NaN where it is +∞
    const double total = nothing ? 1.0 : key_weight * keys_total + sink_weight, by_total = 1.0 / total;
    double weighted = unseen ? 0.0
                             : key_weight * (whole_of(of_row(running.weighted), of_row(running.weighted_rest)) * kLn2 +
                                             keys_total * (top - shift));
    if (sink_weight > 0) weighted += sink_weight * (sink - shift);
    const double log_total = std::log(total), entropy = nothing ? 0.0 : log_total - weighted * by_total;
    const double keys_1 = key_weight * by_total, sinks_1 = sink_weight * by_total;
    put(p.lse, nothing ? -kInfinity : shift + log_total);
    put(p.entropy, entropy);
    put(p.pivot, unseen ? 0.0 : pivot);
    put(p.peak, keys_1);
    put(p.surprise, unseen ? 0.0 : (top - shift) - log_total + entropy);
    put(p.sink, sinks_1);
    put(p.product_pivot, of_row(running.product_max));

    if (statistics) {
      const double no_number = __builtin_nan("");
      const double count = of_row(running.count), by_count = count > 0 ? 1.0 / count : 1.0;
      const double mean = whole_of(of_row(running.sum), of_row(running.sum_rest)) * by_count;
      const double spread = whole_of(of_row(running.sum_squares), of_row(running.sum_squares_rest)) * by_count - mean * mean;
      const Real smallest = spoilt ? pivot : of_row(running.smallest);
      // Logits of ±∞ have no mean. The sums passed over −∞ as if it were hidden, and what +∞ made of them depends on its place.
      const bool endless = smallest == Real(-kInfinity) || pivot == Real(kInfinity);
      const bool products_spoilt =
          reinterpret_cast<const typename LaneTypes<Real>::Integer*>(running.spoilt)[r] != 0 || (spoilt && block.monotone);
      Real* field = reinterpret_cast<Real*>(p.rest) + row;
      const auto next = [&field, rows_in_all](double x) {
        *field = static_cast<Real>(x);
        field += rows_in_all;
      };
      next(count);
      next(unseen ? -kInfinity : top);
      next(block.raw && count > 0 ? scale * smallest : smallest);
      next(count > 0 ? of_row(running.argmax) : -1.0);
      next(endless ? no_number : count > 0 ? scale * (of_row(running.centre) + mean) : 0.0);
      next(endless ? no_number : double(scale) * scale * (spread < 0 ? 0.0 : spread));
      next(nothing ? 0.0
                   : keys_1 * keys_1 * whole_of(of_row(running.squares), of_row(running.squares_rest)) + sinks_1 * sinks_1);
      next(nothing ? 0.0
                   : keys_1 * keys_1 * keys_1 * whole_of(of_row(running.cubes), of_row(running.cubes_rest)) +
                         sinks_1 * sinks_1 * sinks_1);
      next(products_spoilt ? no_number : of_row(running.product_max));
      next(products_spoilt ? no_number : of_row(running.product_min));
    }
    shares[r] = static_cast<Real>(keys_1);
  }
  if (p.output == 0) return;
  for (int64_t first = 0; first < block.rows; first += kLanes<Real>) {
    const int64_t row = (block.batch * p.heads + block.head) * p.queries + block.first + first;
    columns_to_rows<Real>(output + first, kBlock<Real>, load(shares + first), p.value_width,
                          least<int64_t>(kLanes<Real>, block.rows - first), [&](int64_t r, int64_t c, Vec<Real> x) {
                            const int64_t place = (row + r) * p.value_width + c, count = p.value_width - c;
                            write_some<Real>(reinterpret_cast<Stored*>(p.output) + place, x, count);
                            if (p.unrounded) write_some<Real>(reinterpret_cast<Real*>(p.unrounded) + place, x, count);
                          });
  }
}

}  // namespace
}  // namespace attemper
