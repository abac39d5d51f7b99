// One build of the kernel against the definition of attention, on a seeded series of random problems. It needs neither Python nor
// a tensor library, so that it runs where those do not: under emulators of other processors and under sanitizers.
//
//   harness [--count N] [--seed S] [--isa NAME] [--threads T] [--concurrent C]
//
// --threads is what the kernel may use, --concurrent how many callers there are at once. A failure names the seed that repeats
// it.
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include "../../csrc/dispatch.h"
#include "plain.h"

namespace {

// What is found for a case. Row figures are [batch, heads, queries]; `sums` see from_pivot in csrc/problem.h.
struct Results {
  Tensor output, unrounded, lse, entropy, rest, pivot, peak, surprise, sink, product_pivot, constant, sums;
  Tensor query_gradient, key_gradient, value_gradient, mask_gradient, scale_gradient, sink_gradient;
  bool ran = true;
};

template <class Work>
void for_each_row(const Problem& p, Work work) {
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < p.queries; ++i) work(b, h, i);
}

double sum_over_splits(const Case& c, const Results& r, int64_t which, int64_t b, int64_t h, int64_t i) {
  double sum = 0;
  for (int64_t split = 0; split < c.p.splits; ++split) sum += r.sums.get((which * c.p.splits + split) * c.p.batch + b, h, i);
  return sum;
}

// What csrc/ leaves to its caller, as src/attemper/kernels/cpu.py does it: D again where weights were rounded ...
void correct_constant(const Case& c, Results& r) {
  for_each_row(c.p, [&](int64_t b, int64_t h, int64_t i) {
    const double exact = c.lse_gradient.get(b, h, i) - sum_over_splits(c, r, 1, b, h, i);
    const double off = r.constant.get(b, h, i) - exact;
    r.sums.put(r.sums.get(b, h, i) - off * sum_over_splits(c, r, 2, b, h, i), b, h, i);
    r.constant.put(exact, b, h, i);
  });
}

// ... and the gradients of the sink and the scale, here row by row.
void finish_row_gradients(const Case& c, Results& r) {
  r.sink_gradient = r.scale_gradient = Tensor(c.compute, r.lse.shape);
  for_each_row(c.p, [&](int64_t b, int64_t h, int64_t i) {
    const double sink = r.sink.get(b, h, i), pivot = r.product_pivot.get(b, h, i);
    const double surprise = sink == 0 ? 0 : std::log(sink) + r.entropy.get(b, h, i);
    const double of_sink = sink * (r.constant.get(b, h, i) - c.entropy_gradient.get(b, h, i) * surprise);
    r.sink_gradient.put(of_sink, b, h, i);
    if (!c.wants_scale) return;
    const bool pivoted = c.p.softcap == 0 && std::isfinite(pivot) && r.lse.get(b, h, i) != -INFINITY;
    const double left = pivoted ? pivot * (c.lse_gradient.get(b, h, i) - of_sink) : 0;
    r.scale_gradient.put(sum_over_splits(c, r, 0, b, h, i) + left, b, h, i);
  });
  if (!c.wants_scale) r.scale_gradient = Tensor();
  if (!c.wants_sinks) r.sink_gradient = Tensor();
}

Results run(const Case& c, int64_t threads) {
  Results r;
  Problem p = c.p;
  p.threads = threads;
  const Shape rows{p.batch, p.heads, p.queries, 1};
  const auto make = [](Tensor& tensor, int64_t dtype, Shape shape) {
    tensor = Tensor(dtype, shape);
    return tensor.address();
  };
  if (c.has_value()) p.output = make(r.output, p.dtype, {p.batch, p.heads, p.queries, p.value_width});
  p.lse = make(r.lse, c.compute, rows);
  p.entropy = make(r.entropy, c.compute, rows);
  if (p.statistics) p.rest = make(r.rest, c.compute, {10 * p.batch, p.heads, p.queries, 1});
  if (c.trains) {
    if (c.has_value() && p.dtype != c.compute) p.unrounded = make(r.unrounded, c.compute, r.output.shape);
    p.pivot = make(r.pivot, c.compute, rows);
    p.peak = make(r.peak, c.compute, rows);
    p.surprise = make(r.surprise, c.compute, rows);
    p.sink = make(r.sink, c.compute, rows);
    p.product_pivot = make(r.product_pivot, c.compute, rows);
  }
  r.ran = attemper::forward(p);
  if (!r.ran || !c.trains) return r;

  const bool rounded = p.dtype == attemper::kBfloat16 && attemper::rounds_weights();
  const bool again = rounded && (c.wants_scale || c.wants_sinks || c.wants_mask);
  if (p.unrounded == 0) p.unrounded = p.output;
  if (p.softcap != 0) p.product_pivot = 0;
  p.constant = make(r.constant, c.compute, rows);
  r.constant.fill([] { return 0.0; });
  const int64_t query_dtype = p.splits == 1 ? p.dtype : c.compute;
  if (c.wants_query) p.query_gradient = make(r.query_gradient, query_dtype, {p.splits * p.batch, p.heads, p.queries, p.width});
  if (c.wants_key) p.key_gradient = make(r.key_gradient, p.dtype, {p.batch, p.kv_heads, p.keys, p.width});
  if (c.wants_value) p.value_gradient = make(r.value_gradient, p.dtype, {p.batch, p.kv_heads, p.keys, p.value_width});
  if (c.wants_scale || again)
    p.from_pivot = make(r.sums, c.compute, {(rounded ? 3 : 1) * p.splits * p.batch, p.heads, p.queries, 1});
  const int64_t mask_gradient =
      c.wants_mask ? make(r.mask_gradient, c.compute, {p.mask_batch, p.mask_heads, p.mask_queries, p.mask_keys}) : 0;
  p.mask_gradient = again ? 0 : mask_gradient;
  r.ran = attemper::backward(p);
  if (again) {
    correct_constant(c, r);
    p.lse_gradient = p.unrounded = p.query_gradient = p.key_gradient = p.value_gradient = p.from_pivot = 0;
    p.mask_gradient = mask_gradient;
    if (mask_gradient) r.ran = attemper::backward(p) && r.ran;
  }
  finish_row_gradients(c, r);
  return r;
}

struct Options {
  int64_t count = 1000, seed = 1, threads = 1, concurrent = 1;
  std::string isa;
};

// The largest error of a result as a share of its bound; above 1 it is wrong. `parts` of it are added up. Nothing: nought.
double error_of(const Case& c, const Tensor& got, const Sums& expected, int64_t parts = 1) {
  const double nought = c.compute == attemper::kFloat32 ? 1e-30 : 1e-290;  // weights below it have no say
  const int64_t size = got.memory.empty() ? 0 : static_cast<int64_t>(expected.value.size());
  double worst = 0;
  for (int64_t n = 0; n < size; ++n) {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += got.nth(part * size + n);
    if (sum == expected.value[n]) continue;
    const double written = got.dtype == c.compute ? 0 : format_of(got.dtype).rounding(expected.value[n]);
    const double share = std::fabs(sum - expected.value[n]) / (expected.bound[n] + written + nought);
    worst = share == share ? std::max(worst, share) : INFINITY;
  }
  return worst;
}

void print_case(uint64_t seed, const Case& c) {
  const Problem& p = c.p;
  static const char* const dtypes[] = {"float32", "float64", "bfloat16", "float16", "bool"};
  std::printf("--seed %" PRIu64 " --count 1: %s, batch %" PRId64 ", heads %" PRId64 "/%" PRId64 ", queries %" PRId64
              ", keys %" PRId64 ", widths %" PRId64 " and %" PRId64 ", offset %" PRId64
              ", mask %s, softcap %g, dropout %g, splits %" PRId64 "\n",
              seed, dtypes[p.dtype], p.batch, p.heads, p.kv_heads, p.queries, p.keys, p.width, p.value_width, p.offset,
              p.mask.address ? dtypes[p.mask_dtype] : "none", p.softcap, p.dropout_p, p.splits);
}

// The largest share of a bound that any result took up.
double run_problem(uint64_t seed, int64_t threads) {
  Random random(seed);
  const Case c = random_case(random);
  const Results r = run(c, threads);
  const bool rounded = c.p.dtype == attemper::kBfloat16 && attemper::rounds_weights();
  const Expected e = expected_of(c, rounded ? 2 * format_of(c.p.dtype).unit() : 0);
  const std::pair<const char*, double> errors[] = {
      {"memory", r.ran ? 0 : INFINITY},
      {"output", error_of(c, r.output, e.output)},
      {"lse", error_of(c, r.lse, e.lse)},
      {"entropy", error_of(c, r.entropy, e.entropy)},
      {"statistics", error_of(c, r.rest, e.rest)},
      {"gradient of the query", error_of(c, r.query_gradient, e.query_gradient, c.p.splits)},
      {"gradient of the key", error_of(c, r.key_gradient, e.key_gradient)},
      {"gradient of the value", error_of(c, r.value_gradient, e.value_gradient)},
      {"gradient of the mask", error_of(c, r.mask_gradient, e.mask_gradient)},
      {"gradient of the scale", error_of(c, r.scale_gradient, e.scale_gradient)},
      {"gradient of the sink", error_of(c, r.sink_gradient, e.sink_gradient)},
  };
  double worst = 0;
  for (const auto& [name, error] : errors) {
    worst = std::max(worst, error);
    if (error <= 1) continue;
    print_case(seed, c);
    std::printf("  %s: off by %.3g times what rounding explains\n", name, error);
  }
  return worst;
}

Options parsed(int argc, char** argv) {
  Options options;
  const std::map<std::string, int64_t*> numbers = {{"--count", &options.count},
                                                   {"--seed", &options.seed},
                                                   {"--threads", &options.threads},
                                                   {"--concurrent", &options.concurrent}};
  for (int i = 1; i < argc; i += 2) {
    const auto number = numbers.find(argv[i]);
    if (i + 1 < argc && number != numbers.end()) {
      *number->second = std::strtoll(argv[i + 1], nullptr, 10);
    } else if (i + 1 < argc && std::string(argv[i]) == "--isa") {
      options.isa = argv[i + 1];
    } else {
      std::fprintf(stderr, "got %s; expected --count, --seed, --isa, --threads or --concurrent, each with a value\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parsed(argc, argv);
  if (!attemper::choose_instruction_set(options.isa.c_str())) {
    std::fprintf(stderr, "got --isa %s, which was not built or which this processor lacks\n", options.isa.c_str());
    return 2;
  }
  std::atomic<int64_t> next{0}, failures{0};
  std::vector<double> worst(options.concurrent, 0);
  const auto work = [&](int64_t caller) {
    for (int64_t n; (n = next++) < options.count;) {
      const double share = run_problem(options.seed + n, options.threads);
      worst[caller] = std::max(worst[caller], share);
      failures += share > 1;
      if ((n + 1) % 100 == 0) std::fprintf(stderr, "%" PRId64 " ...\n", n + 1);
    }
  };
  std::vector<std::thread> callers;
  for (int64_t caller = 1; caller < options.concurrent; ++caller) callers.emplace_back(work, caller);
  work(0);
  for (std::thread& caller : callers) caller.join();
  std::printf("largest error: %.2f of its bound\n", *std::max_element(worst.begin(), worst.end()));
  std::printf("%" PRId64 " problems, %" PRId64 " failures, instruction set %s\n", options.count, failures.load(),
              attemper::instruction_set());
  return failures != 0;
}
