#include "heads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "problem.h"

namespace attemper {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kFewRows = 4096;  // entering OpenMP takes as long as so many
constexpr int kShareCells = 128;

// Fields of RowStats.rest that are read, by their place.
enum Field { kCount = 0, kMax = 1, kMin = 2, kMean = 4, kSquares = 6, kCubes = 7, kProductMax = 8, kProductMin = 9 };

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

template <class Real>
struct CellsOf;
template <>
struct CellsOf<float> {
  typedef uint32_t Bits;
  static constexpr int kBits = 12;  // sign, exponent, three bits of the mantissa
};
template <>
struct CellsOf<double> {
  typedef uint64_t Bits;
  static constexpr int kBits = 15;
};

// How many of the edges are at or below a number, as Cells.bins finds it.
template <class Real>
int64_t bin_of_logit(const int64_t* below, const Real* edge, Real value) {
  typename CellsOf<Real>::Bits bits;
  value += Real(0);  // the negative zero becomes the other one, whose cell is the last
  memcpy(&bits, &value, sizeof(bits));
  const int64_t cell = static_cast<int64_t>((bits - 1) >> (8 * sizeof(bits) - CellsOf<Real>::kBits));
  return below[cell] + (value >= edge[cell]);
}
template <class Real>
int64_t bin_of_share(const int64_t* below, const Real* edge, Real value) {
  const Real place = value * kShareCells;
  const int cell = place > 0 ? static_cast<int>(place < kShareCells - 1 ? place : Real(kShareCells - 1)) : 0;
  return below[cell] + (value >= edge[cell]);
}

// NaN is left out.
template <class Real>
void raise(double& running, Real value) {
  if (value > running) running = value;
}

template <class Real>
void reduce_head(const Reduction& p, int64_t head) {
  const Real* const lses = at<const Real>(p.lse) + head * p.lse_stride;
  const Real* const entropies = at<const Real>(p.entropy) + head * p.entropy_stride;
  const Real* const rest = at<const Real>(p.rest) + head * p.rest_stride;
  const uint8_t* const real = p.real ? at<const uint8_t>(p.real) + head * p.real_stride : nullptr;
  const auto* const logit_below = at<const int64_t>(p.logit_below);
  const auto* const share_below = at<const int64_t>(p.share_below);
  const auto* const logit_edge = at<const Real>(p.logit_edge);
  const auto* const share_edge = at<const Real>(p.share_edge);
  int64_t* const of_max = at<int64_t>(p.max_bins) + head * p.logit_bins;
  int64_t* const of_centred = at<int64_t>(p.centred_bins) + head * p.logit_bins;
  int64_t* const of_entropy = at<int64_t>(p.entropy_bins) + head * p.share_bins;
  int64_t* const of_peak = at<int64_t>(p.peak_bins) + head * p.share_bins;
  std::fill_n(of_max, p.logit_bins, 0);
  std::fill_n(of_centred, p.logit_bins, 0);
  std::fill_n(of_entropy, p.share_bins, 0);
  std::fill_n(of_peak, p.share_bins, 0);

  int64_t counts[5] = {};
  double extremes[5] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity, -kInfinity}, sums[6] = {}, products = -kInfinity;
  for (int64_t row = 0; row < p.rows; ++row) {
    if (real && !real[row]) continue;
    const auto field = [&](Field which) { return rest[which * p.field_stride + row]; };
    const Real count = field(kCount), largest = field(kMax), mean = field(kMean), lse = lses[row];
    const Real product_max = field(kProductMax), product_min = field(kProductMin);
    const Real product = product_max > -product_min ? product_max : -product_min;
    // A NaN stays, whichever of the two it is.
    if (product_max != product_max || product != product)
      products = std::numeric_limits<double>::quiet_NaN();
    else
      raise(products, product);
    if (!(count > 0)) {
      ++counts[1];
      continue;
    }
    ++counts[0];
    const Real centred = largest - mean;
    raise(extremes[0], largest);
    raise(extremes[1], -field(kMin));
    raise(extremes[2], product_max);
    raise(extremes[3], -product_min);
    raise(extremes[4], centred);
    // Of an infinite negative logit lse knows nothing; the mean does.
    if (!(std::isfinite(lse) && std::isfinite(mean))) {
      ++counts[4];
      continue;
    }
    const Real squares = field(kSquares), peak = std::exp(largest - lse), entropy = entropies[row];
    const Real under_root = squares - 2 * field(kCubes) + squares * squares;
    sums[0] += centred;
    sums[1] += entropy;
    sums[3] += Real(1) - squares;
    sums[4] += peak;
    sums[5] += std::sqrt(under_root < 0 ? Real(0) : under_root);
    ++of_max[bin_of_logit(logit_below, logit_edge, largest)];
    ++of_centred[bin_of_logit(logit_below, logit_edge, centred)];
    if (!(count > 1)) continue;
    const Real normalized = entropy / std::log(p.sink ? count + 1 : count);
    ++counts[2];
    counts[3] += peak > Real(0.99);
    sums[2] += normalized;
    ++of_entropy[bin_of_share(share_below, share_edge, normalized)];
    ++of_peak[bin_of_share(share_below, share_edge, peak)];
  }
  for (int i = 0; i < 5; ++i) at<int64_t>(p.counts)[i * p.heads + head] = counts[i];
  for (int i = 0; i < 5; ++i) at<double>(p.extremes)[i * p.heads + head] = extremes[i];
  for (int i = 0; i < 6; ++i) at<double>(p.sums)[i * p.heads + head] = sums[i];
  at<double>(p.products)[head] = products;
}

template <class Real>
void reduce_each(const Reduction& p) {
#pragma omp parallel for num_threads(p.threads) if (p.threads > 1 && p.heads * p.rows > kFewRows)
  for (int64_t head = 0; head < p.heads; ++head) reduce_head<Real>(p, head);
}

}  // namespace

void reduce_heads(const Reduction& p) {
  if (p.dtype == kFloat64)
    reduce_each<double>(p);
  else
    reduce_each<float>(p);
}

}  // namespace attemper
