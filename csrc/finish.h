// What closes a block: the figures of each row from its running ones, and output columns that become output rows.
//
// All of it is done in double, in vectors of rows: in p3 each rounding of the total would count three times. Figures
// leave in runs of a block's length: those of one row may lie whole pages apart, in one set of the cache.
#pragma once
#include "softmax.h"

namespace attemper {
namespace {

// As many rows as a vector holds numbers of 64 bits: their figures are widened to double on the way in, and narrowed on the way
// out.
typedef Vec<double> Doubles;
typedef Ints<double> Holds;
constexpr int kFewRows = kLanes<double>;

// In each lane the function of the C library.
template <class Function>
ATTEMPER_INLINE Doubles each(Doubles x, Function function) {
  for (int lane = 0; lane < kFewRows; ++lane) x[lane] = function(x[lane]);
  return x;
}

// The figures of a block's rows that the caller asked for, before they go where they belong.
enum Figure { kLse, kEntropy, kPivot, kPeak, kSurprise, kSink, kProductPivot, kRest };  // then those of RowStats.rest
constexpr int kFigures = kRest + 10;

template <class Real>
struct Figures {
  using Few = typename LaneTypes<Real>::Few;
  alignas(64) Real of[kFigures][kBlock<Real>];

  ATTEMPER_INLINE void put(int figure, int64_t row, Doubles x) {
    *reinterpret_cast<Few*>(of[figure] + row) = __builtin_convertvector(x, Few);
  }
  void write(const Problem& p, const Block<Real>& block, bool statistics) const {
    const int64_t row = (block.batch * p.heads + block.head) * p.queries + block.first,
                  rows_in_all = p.batch * p.heads * p.queries;
    const int64_t addresses[] = {p.lse, p.entropy, p.pivot, p.peak, p.surprise, p.sink, p.product_pivot};
    for (int figure = 0; figure < (statistics ? kFigures : kRest); ++figure) {
      const int64_t address = figure < kRest ? addresses[figure] : p.rest, run = figure < kRest ? 0 : figure - kRest;
      if (address) memcpy(reinterpret_cast<Real*>(address) + run * rows_in_all + row, of[figure], sizeof(Real) * block.rows);
    }
  }
};

// The figures of a few rows of a block from row `first` on, the sink merged last.
template <class Real, bool statistics>
ATTEMPER_INLINE void finish_rows(const Block<Real>& block, const Running<Real>& running, int64_t first, double sink,
                                 Figures<Real>& figures) {
  using Few = typename LaneTypes<Real>::Few;
  const auto own = [first](const auto* of_rows)
                       ATTEMPER_INLINED { return *reinterpret_cast<const Few*>(reinterpret_cast<const Real*>(of_rows) + first); };
  const auto wide = [&](const auto* of_rows) ATTEMPER_INLINED { return __builtin_convertvector(own(of_rows), Doubles); };
  const auto whole = [&](const auto* sums, const auto* rests) ATTEMPER_INLINED { return whole_of(wide(sums), wide(rests)); };
  const auto put = [&](int figure, Doubles x) ATTEMPER_INLINED { figures.put(figure, first, x); };
  const Doubles nought = splat(0.0), one = splat(1.0), lowest = splat(-kInfinity), endless = splat(kInfinity);
  const bool sinks = sink != -kInfinity;
  const Doubles keys_total = whole(running.total, running.total_rest), highest = wide(running.pivot);
  // A logit that is NaN spoils the sums but may be lost among the maxima: the row then is as one whose largest logit is NaN.
  const Holds spoilt = (keys_total != keys_total) & (highest != endless);
  const Doubles pivot = spoilt ? keys_total : highest, scale = block.raw ? wide(block.scale) : one;
  const Holds unseen = pivot == lowest;
  // A logit as it is anywhere else: scale · product, rounded to the compute type.
  const auto logit = [&](const void* products)
                         ATTEMPER_INLINED { return __builtin_convertvector(own(block.scale) * own(products), Doubles); };
  const Doubles top = spoilt ? keys_total : block.raw ? (unseen ? lowest : logit(running.pivot)) : pivot;
  const Holds nothing = sinks ? Holds{} : unseen;
  const Doubles from = splat(sink), shift = nothing ? nought : from > top ? from : top;
  Doubles key_weight = unseen ? nought : one, sink_weight = nought;
  if (sinks) {
    const auto exp = [](double x) { return std::exp(x); };
    key_weight = unseen ? nought : each(top - shift, exp);
    sink_weight = each(from - shift, exp);  // NaN where it is +∞
  }
  const Doubles total = nothing ? one : key_weight * keys_total + sink_weight, by_total = one / total;
  Doubles weighted = whole(running.weighted, running.weighted_rest) * splat(kLn2);
  if (sinks) weighted = key_weight * (weighted + keys_total * (top - shift));
  weighted = unseen ? nought : weighted;
  if (sinks) weighted += sink_weight > nought ? sink_weight * (from - shift) : nought;
  const Doubles log_total = each(total, [](double x) { return std::log(x); });
  const Doubles entropy = nothing ? nought : log_total - weighted * by_total;
  const Doubles keys_1 = key_weight * by_total, sinks_1 = sink_weight * by_total;
  put(kLse, nothing ? lowest : shift + log_total);
  put(kEntropy, entropy);
  put(kPivot, unseen ? nought : pivot);
  put(kPeak, keys_1);
  put(kSurprise, unseen ? nought : (top - shift) - log_total + entropy);
  put(kSink, sinks_1);
  const Doubles product_max = wide(running.product_max);
  put(kProductPivot, product_max);
  if (!statistics) return;

  const Doubles no_number = splat(__builtin_nan("")), count = wide(running.count);
  const Holds some = count > nought;
  const Doubles by_count = one / (some ? count : one);
  const Doubles mean = whole(running.sum, running.sum_rest) * by_count;
  const Doubles spread = whole(running.sum_squares, running.sum_squares_rest) * by_count - mean * mean;
  const Doubles least_x = spoilt ? pivot : wide(running.smallest);
  const Doubles smallest = block.raw ? (some & ~spoilt ? logit(running.smallest) : least_x) : least_x;
  // Logits of ±∞ have no mean. The sums passed over −∞ as if it were hidden, and what +∞ made of them depends on its place.
  const Holds unbounded = (least_x == lowest) | (pivot == endless);
  const auto broken = *reinterpret_cast<const typename LaneTypes<Real>::FewIntegers*>(
      reinterpret_cast<const typename LaneTypes<Real>::Integer*>(running.spoilt) + first);
  const Holds products_spoilt = (__builtin_convertvector(broken, Holds) != 0) | (block.monotone ? spoilt : Holds{});
  const Doubles keys_2 = keys_1 * keys_1, sinks_2 = sinks_1 * sinks_1;
  int figure = kRest;
  const auto next = [&](Doubles x) ATTEMPER_INLINED { put(figure++, x); };
  next(count);
  next(unseen ? lowest : top);
  next(smallest);
  next(some ? wide(running.argmax) : -one);
  next(unbounded ? no_number : some ? scale * (wide(running.centre) + mean) : nought);
  next(unbounded ? no_number : scale * scale * (spread < nought ? nought : spread));
  next(nothing ? nought : keys_2 * whole(running.squares, running.squares_rest) + sinks_2);
  next(nothing ? nought : keys_2 * keys_1 * whole(running.cubes, running.cubes_rest) + sinks_2 * sinks_1);
  next(products_spoilt ? no_number : product_max);
  next(products_spoilt ? no_number : wide(running.product_min));
}

template <class Stored, class Real, bool statistics>
void finish_block(const Problem& p, const Block<Real>& block, const Running<Real>& running, const Real* output) {
  const double sink = p.sinks ? double(reinterpret_cast<const Real*>(p.sinks)[block.head]) : -kInfinity;
  Figures<Real> figures;
  for (int64_t first = 0; first < block.vectors * kLanes<Real>; first += kFewRows)
    finish_rows<Real, statistics>(block, running, first, sink, figures);
  figures.write(p, block, statistics);
  if (p.output.address == 0) return;
  for (int64_t first = 0; first < block.rows; first += kLanes<Real>) {
    const auto row = [&](int64_t r) { return block.first + first + r; };
    columns_to_rows<Real>(output + first, kBlock<Real>, load(figures.of[kPeak] + first), p.value_width,
                          least<int64_t>(kLanes<Real>, block.rows - first), [&](int64_t r, int64_t c, Vec<Real> x) {
                            const int64_t count = p.value_width - c;
                            write_some<Real>(at<Stored>(p.output, block.batch, block.head, row(r)) + c, x, count);
                            if (p.unrounded.address)
                              write_some<Real>(at<Real>(p.unrounded, block.batch, block.head, row(r)) + c, x, count);
                          });
  }
}

}  // namespace
}  // namespace attemper
