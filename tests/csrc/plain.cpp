#include "plain.h"

namespace {

// Philox4x32-10; csrc/tile.h says which word belongs to which weight.
uint32_t random_word(uint64_t seed, int64_t batch, int64_t head, int64_t query, int64_t key) {
  uint64_t c[4] = {static_cast<uint64_t>(key / 4), static_cast<uint64_t>(query), static_cast<uint64_t>(head),
                   static_cast<uint64_t>(batch)};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
    const uint64_t even = c[0] * 0xD2511F53, odd = c[2] * 0xCD9E8D57;
    const uint64_t next[4] = {(odd >> 32) ^ c[1] ^ k0, odd & 0xFFFFFFFF, (even >> 32) ^ c[3] ^ k1, even & 0xFFFFFFFF};
    std::copy(next, next + 4, c);
  }
  return static_cast<uint32_t>(c[key % 4]);
}

// One key in sight of one query. Errors are bounds: absolute, but a share of itself for the weight.
struct Pair {
  int64_t key;
  double product, product_error, logit, logit_error;
  double slope;  // of the logit, by scale · product
  double weight, weight_error, keep;
};

struct Row {
  int64_t b, h, i, kv, at;  // kv: the key head; at: place among all rows
  double scale, sink, sink_weight = 0, sink_error = 0, lse = -INFINITY, entropy = 0, entropy_error = 0;
  double off = 0;   // how far any logit may be from its true value
  double many = 0;  // the rounding of a sum over the keys
  std::vector<Pair> pairs = {};
};

// The rows of a tensor, decoded once: emulators are slow.
class Rows {
 public:
  explicit Rows(const Tensor& tensor) : shape_(tensor.shape) {
    numbers_.resize(shape_[0] * shape_[1] * shape_[2] * shape_[3]);
    for (size_t n = 0; n < numbers_.size(); ++n) numbers_[n] = tensor.nth(static_cast<int64_t>(n));
  }
  const double* at(int64_t b, int64_t h, int64_t r) const {
    return numbers_.data() + ((b * shape_[1] + h) * shape_[2] + r) * shape_[3];
  }

 private:
  Shape shape_;
  std::vector<double> numbers_;
};

class Plain {
 public:
  Plain(const Case& c, double coarse)
      : c_(c),
        p_(c.p),
        query_(c.query),
        key_(c.key),
        value_(c.value),
        output_gradient_(c.output_gradient),
        unit_(format_of(c.compute).unit()),
        coarse_(coarse) {
    const int64_t rows = p_.batch * p_.heads * p_.queries, kv_rows = p_.batch * p_.kv_heads * p_.keys;
    for (Sums* sums : {&e_.lse, &e_.entropy, &e_.scale_gradient, &e_.sink_gradient}) sums->resize(rows);
    e_.output.resize(rows * p_.value_width);
    e_.rest.resize(10 * rows);
    e_.query_gradient.resize(rows * p_.width);
    e_.key_gradient.resize(kv_rows * p_.width);
    e_.value_gradient.resize(kv_rows * p_.value_width);
    e_.mask_gradient.resize(p_.mask_batch * p_.mask_heads * p_.mask_queries * p_.mask_keys);
    for (int64_t at = 0; at < rows; ++at) {
      const int64_t h = at / p_.queries % p_.heads, b = at / p_.queries / p_.heads, i = at % p_.queries;
      Row r{b, h, i, h / (p_.heads / p_.kv_heads), at, c_.scale.get(b, h, i), p_.sinks ? c_.sinks.get(0, h, 0) : -INFINITY};
      look(r);
      weigh(r);
      describe(r);
      if (c_.has_value()) add_values(r);
      flow_back(r);
    }
  }
  Expected result() && { return std::move(e_); }

 private:
  // The rounding of a sum, as a share of its terms' sizes: as many roundings as terms, which mostly cancel.
  double sum_of(int64_t terms) const { return unit_ * (4 + std::sqrt(static_cast<double>(terms))); }

  void look(Row& r) {
    for (int64_t j = 0; j < p_.keys; ++j) {
      if (!c_.visible(r.b, r.h, r.i, j)) continue;
      const double *query = query_.at(r.b, r.h, r.i), *key = key_.at(r.b, r.kv, j);
      double product = 0, size = 0;
      for (int64_t d = 0; d < p_.width; ++d) {
        const double term = query[d] * key[d];
        product += term;
        size += std::fabs(term);
      }
      const bool biased = p_.mask.address && p_.mask_dtype != attemper::kBool;
      const double error = sum_of(p_.width) * size, bias = biased ? c_.mask.get(r.b, r.h, r.i, j) : 0;
      double logit = r.scale * product, slope = 1, keep = 1;
      if (p_.softcap != 0) {
        const double bent = std::tanh(logit / p_.softcap);
        logit = p_.softcap * bent;
        slope = 1 - bent * bent;
      }
      const double logit_error = std::fabs(r.scale) * error + 4 * unit_ * (std::fabs(logit) + std::fabs(bias));
      if (p_.dropout_p > 0) {
        const bool kept = random_word(p_.seed, r.b, r.h, r.i, j) >= std::nearbyint(p_.dropout_p * 0x1p32);
        keep = kept ? 1 / (1 - p_.dropout_p) : 0;
      }
      r.pairs.push_back({j, product, error, logit + bias, logit_error, slope, 0, 0, keep});
      r.off = std::max(r.off, logit_error);
    }
    r.many = sum_of(static_cast<int64_t>(r.pairs.size()));
  }

  // Weights, lse and entropy.
  void weigh(Row& r) {
    double top = r.sink, total = 0;
    for (const Pair& pair : r.pairs) top = std::max(top, pair.logit);
    e_.lse.add(r.at, 0, 0);
    if (top == -INFINITY) {
      e_.lse.value[r.at] = -INFINITY;
      return;
    }
    for (const Pair& pair : r.pairs) total += std::exp(pair.logit - top);
    total += std::exp(r.sink - top);
    r.lse = top + std::log(total);
    r.entropy_error = r.many + 4 * unit_ * (1 + std::log(total));
    const auto add = [&](double logit, double& weight, double& error) {
      weight = std::exp(logit - r.lse);
      error = 2 * r.off + r.many + unit_ * (8 + 4 * (top - logit));
      r.entropy -= weight * (logit - r.lse);
      r.entropy_error += weight * error * (1 + 2 * (r.lse - logit));
    };
    for (Pair& pair : r.pairs) add(pair.logit, pair.weight, pair.weight_error);
    if (r.sink > -INFINITY) add(r.sink, r.sink_weight, r.sink_error);
    e_.lse.add(r.at, r.lse, r.off + r.many + 4 * unit_ * (1 + std::fabs(r.lse) + std::fabs(top)));
    e_.entropy.add(r.at, r.entropy, r.entropy_error);
  }

  // The ten statistics, as src/attemper/stats/rows.py defines them.
  void describe(const Row& r) {
    double mean = 0, size = 0, variance = 0, argmax = -1, largest = -INFINITY, second = -INFINITY, smallest = INFINITY;
    double product_max = -INFINITY, product_min = INFINITY, product_error = 0;
    double squares = r.sink_weight * r.sink_weight, cubes = squares * r.sink_weight;
    double squares_error = 2 * squares * r.sink_error, cubes_error = 3 * cubes * r.sink_error;
    const double count = static_cast<double>(r.pairs.size());
    for (const Pair& pair : r.pairs) {
      mean += pair.logit / count;
      size += std::fabs(pair.logit) / count;
      if (pair.logit > largest) argmax = static_cast<double>(pair.key);
      second = std::max(second, std::min(largest, pair.logit));
      largest = std::max(largest, pair.logit);
      smallest = std::min(smallest, pair.logit);
      product_max = std::max(product_max, pair.product);
      product_min = std::min(product_min, pair.product);
      product_error = std::max(product_error, pair.product_error);
      const double square = pair.weight * pair.weight;
      squares += square;
      cubes += square * pair.weight;
      squares_error += 2 * square * pair.weight_error;
      cubes_error += 3 * square * pair.weight * pair.weight_error;
    }
    for (const Pair& pair : r.pairs) variance += (pair.logit - mean) * (pair.logit - mean) / count;
    const double mean_error = r.off + (r.many + 4 * unit_) * size;
    const double fields[10][2] = {
        {count, 0},
        {largest, r.off},
        {smallest, r.off},
        {argmax, second < largest - 2 * r.off ? 0 : INFINITY},  // keys that are equal but for rounding may change places
        {mean, mean_error},
        {variance, 4 * mean_error * (std::sqrt(variance) + mean_error) + 4 * r.many * variance},
        {squares, squares_error + r.many * squares},
        {cubes, cubes_error + r.many * cubes},
        {product_max, product_error},
        {product_min, product_error},
    };
    const int64_t rows = p_.batch * p_.heads * p_.queries;
    for (int64_t field = 0; field < 10; ++field) e_.rest.add(field * rows + r.at, fields[field][0], fields[field][1]);
  }

  void add_values(const Row& r) {
    for (int64_t d = 0; d < p_.value_width; ++d) {
      double sum = 0, error = 0;
      for (const Pair& pair : r.pairs) {
        const double term = pair.weight * pair.keep * value_.at(r.b, r.kv, pair.key)[d];
        sum += term;
        error += (pair.weight_error + r.many + coarse_) * std::fabs(term);
      }
      e_.output.add(r.at * p_.value_width + d, sum, error);
    }
  }

  // dz = p · (dp · keep − Σ p · dp · keep + dlse − dH · (ln p + H)), and from there to everything.
  void flow_back(const Row& r) {
    const int64_t members = p_.heads / p_.kv_heads * p_.queries;  // rows that add to the gradient of a key
    const double d_lse = c_.lse_gradient.get(r.b, r.h, r.i), d_entropy = c_.entropy_gradient.get(r.b, r.h, r.i);
    std::vector<double> passed(r.pairs.size()), passed_size(r.pairs.size());
    double drawn = 0, drawn_size = 0, drawn_error = 0;
    for (size_t n = 0; n < r.pairs.size() && p_.output_gradient.address; ++n) {
      const Pair& pair = r.pairs[n];
      const int64_t row = (r.b * p_.kv_heads + r.kv) * p_.keys + pair.key;
      for (int64_t d = 0; d < p_.value_width; ++d) {
        const double upstream = output_gradient_.at(r.b, r.h, r.i)[d], kept = pair.weight * pair.keep * upstream;
        const double term = pair.keep * upstream * value_.at(r.b, r.kv, pair.key)[d];
        passed[n] += term;
        passed_size[n] += std::fabs(term);
        const double error = (pair.weight_error + sum_of(members) + coarse_) * std::fabs(kept);
        e_.value_gradient.add(row * p_.value_width + d, kept, error);
      }
      drawn += pair.weight * passed[n];
      drawn_size += pair.weight * passed_size[n];
      drawn_error += pair.weight * (pair.weight_error + r.many) * passed_size[n];
    }
    struct Gradient {
      double value, error, coarse;  // coarse: the error on top, where products take it rounded
    };
    const auto logit_gradient = [&](double weight, double weight_error, double pass, double pass_size, double logit) {
      const double surprise = weight > 0 ? logit - r.lse + r.entropy : 0;
      const double surprise_size = weight > 0 ? r.lse - logit + 2 + r.entropy : 0;
      const double size = pass_size + drawn_size + std::fabs(d_lse) + std::fabs(d_entropy) * surprise_size;
      const double error =
          (weight_error + sum_of(p_.value_width)) * size + drawn_error + std::fabs(d_entropy) * (weight_error + r.entropy_error);
      return Gradient{weight * (pass - drawn + d_lse - d_entropy * surprise), weight * error, weight * coarse_ * size};
    };
    const auto [sink, sink_error, unused] = logit_gradient(r.sink_weight, r.sink_error, 0, 0, r.sink);
    e_.sink_gradient.add(r.at, sink, sink_error);

    double largest = 0, scale_gradient = 0, scale_error = 0;
    for (const Pair& pair : r.pairs) largest = std::max(largest, std::fabs(pair.product));
    for (size_t n = 0; n < r.pairs.size(); ++n) {
      const Pair& pair = r.pairs[n];
      const auto [gradient, error, coarse] =
          logit_gradient(pair.weight, pair.weight_error, passed[n], passed_size[n], pair.logit);
      const int64_t mask_row = ((p_.mask_batch > 1 ? r.b : 0) * p_.mask_heads + (p_.mask_heads > 1 ? r.h : 0)) * p_.mask_queries +
                               (p_.mask_queries > 1 ? r.i : 0);
      const int64_t repeats = p_.batch * p_.heads * p_.queries * p_.keys / static_cast<int64_t>(e_.mask_gradient.value.size());
      e_.mask_gradient.add(mask_row * p_.mask_keys + (p_.mask_keys > 1 ? pair.key : 0), gradient,
                           error + sum_of(repeats) * std::fabs(gradient));
      // Back through the cap, whose slope 1 − t² has the error of t, to scale · product.
      const double bend = p_.softcap != 0 ? 2 * pair.slope * r.off / p_.softcap + 8 * unit_ : 0;
      const double bent = gradient * pair.slope, bent_error = error * (pair.slope + bend) + std::fabs(gradient) * bend;
      scale_gradient += bent * pair.product;
      scale_error +=
          (bent_error + r.many * std::fabs(bent)) * (std::fabs(pair.product) + largest) + std::fabs(bent) * pair.product_error;
      const int64_t row = (r.b * p_.kv_heads + r.kv) * p_.keys + pair.key;
      for (int64_t d = 0; d < p_.width; ++d) {
        const double to_query = r.scale * key_.at(r.b, r.kv, pair.key)[d], to_key = r.scale * query_.at(r.b, r.h, r.i)[d];
        const double size = std::fabs(bent), rounded = bent_error + coarse * pair.slope;
        e_.query_gradient.add(r.at * p_.width + d, bent * to_query, (rounded + r.many * size) * std::fabs(to_query));
        e_.key_gradient.add(row * p_.width + d, bent * to_key, (rounded + sum_of(members) * size) * std::fabs(to_key));
      }
    }
    // With a sink, Σ dz over the keys is known only as what the sink leaves of dlse.
    if (r.sink > -INFINITY) scale_error += largest * (4 * unit_ * std::fabs(d_lse) + sink_error);
    e_.scale_gradient.add(r.at, scale_gradient, scale_error);
  }

  Expected e_;
  const Case& c_;
  const Problem& p_;
  Rows query_, key_, value_, output_gradient_;
  double unit_, coarse_;
};

}  // namespace

Expected expected_of(const Case& c, double coarse) { return Plain(c, coarse).result(); }
