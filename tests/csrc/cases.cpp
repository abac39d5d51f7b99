#include "cases.h"

namespace {

constexpr int64_t kWork = 3000000;  // multiplications of a product: emulators take seconds for it

void draw_sizes(Random& random, Problem& p) {
  do {
    p.batch = random.between(1, 2);
    p.kv_heads = random.between(1, 3);
    p.heads = p.kv_heads * random.between(1, 3);
    p.queries = random.chance(0.2) ? 1 : random.size(260);
    p.keys = random.chance(0.02) ? 0 : random.size(p.queries == 1 ? 2000 : 700);
    p.width = random.size(300);
    p.value_width = random.chance(0.5) ? p.width : random.size(300);
  } while (p.batch * p.heads * p.queries * p.keys * (p.width + p.value_width) > kWork);
}

void draw_positions(Random& random, Problem& p) {
  p.row_step = random.chance(0.9) ? 1 : random.between(2, 5);
  p.offset = random.chance(0.5) ? 0 : random.between(-p.queries, p.keys);
  p.left = random.chance(0.25) ? random.between(0, p.keys) : attemper::kUnlimited;
  p.right = random.chance(0.35) ? 0 : random.chance(0.2) ? random.between(0, p.keys) : attemper::kUnlimited;
}

void draw_mask(Random& random, Case& c) {
  Problem& p = c.p;
  const auto one_or = [&](int64_t n) { return random.chance(0.5) ? 1 : n; };
  const int64_t dtypes[] = {attemper::kBool, p.dtype, random.between(0, 3)};
  p.mask_dtype = dtypes[random.between(0, 2)];
  const Format& format = format_of(p.mask_dtype);
  const double hidden = random.chance(0.5) ? -INFINITY : format.lowest, share = random.chance(0.2) ? 0.99 : 0.2;
  c.mask = strided(random, p.mask_dtype, {one_or(p.batch), one_or(p.heads), one_or(p.queries), one_or(p.keys)});
  const auto draw = [&] {
    const bool shown = !random.chance(share);
    return format.bytes == 1 ? shown : shown ? random.uniform(-3, 3) : hidden;
  };
  p.mask_batch = c.mask.shape[0];
  p.mask_heads = c.mask.shape[1];
  p.mask_queries = c.mask.shape[2];
  p.mask_keys = c.mask.shape[3];
  p.mask = c.mask.fill(draw).expand({p.batch, p.heads, p.queries, p.keys}).view();
  if (p.mask_dtype != attemper::kBool) p.invisible_below = std::max(format.lowest, format_of(c.compute).lowest) / 2;
}

// What no query sees may be anything.
void spoil_unseen_keys(Case& c) {
  const int64_t groups = c.p.heads / c.p.kv_heads;
  for (int64_t b = 0; b < c.p.batch; ++b)
    for (int64_t kv = 0; kv < c.p.kv_heads; ++kv)
      for (int64_t j = 0; j < c.p.keys; ++j) {
        bool seen = false;
        for (int64_t h = kv * groups; h < (kv + 1) * groups; ++h)
          for (int64_t i = 0; i < c.p.queries && !seen; ++i) seen = c.visible(b, h, i, j);
        if (seen) continue;
        c.key.put(NAN, b, kv, j, c.p.width - 1);
        if (c.has_value()) c.value.put(INFINITY, b, kv, j, 0);
      }
}

}  // namespace

Case random_case(Random& random) {
  Case c;
  Problem& p = c.p;
  p.dtype = random.between(0, 3);
  c.compute = p.dtype == attemper::kFloat64 ? attemper::kFloat64 : attemper::kFloat32;
  draw_sizes(random, p);
  draw_positions(random, p);
  if (random.chance(0.4))
    draw_mask(random, c);
  else
    p.mask_batch = p.mask_heads = p.mask_queries = p.mask_keys = 1;

  const double sharpness = random.chance(0.1) ? 4 : 1;
  const bool values = random.chance(0.9), repeated = random.chance(0.1);
  const int64_t batch = repeated ? 1 : p.batch;
  const auto normal = [&] { return random.normal(); };
  c.query = strided(random, p.dtype, {p.batch, p.heads, p.queries, p.width}).fill([&] { return sharpness * random.normal(); });
  c.key = strided(random, p.dtype, {batch, p.kv_heads, p.keys, p.width}).fill(normal);
  c.value = strided(random, p.dtype, {batch, p.kv_heads, p.keys, p.value_width}).fill(normal);
  p.query = c.query.view();
  p.key = c.key.expand({p.batch, p.kv_heads, p.keys, p.width}).view();
  if (values)
    p.value = c.value.expand({p.batch, p.kv_heads, p.keys, p.value_width}).view();
  else
    p.value_width = 0;
  if (!repeated) spoil_unseen_keys(c);

  const bool by_head = random.chance(0.3), by_query = random.chance(0.3), either_sign = random.chance(0.1);
  c.scale = strided(random, c.compute, {by_query ? p.batch : 1, by_head ? p.heads : 1, by_query ? p.queries : 1, 1});
  const auto scale = [&] { return random.uniform(either_sign ? -1.5 : 0.5, 1.5) / std::sqrt(p.width); };
  p.scale = c.scale.fill(scale).expand({p.batch, p.heads, p.queries, 1}).view();
  if (random.chance(0.3)) {
    c.sinks = Tensor(c.compute, {1, p.heads, 1, 1}).fill([&] { return random.chance(0.1) ? -INFINITY : 2 * random.normal(); });
    p.sinks = c.sinks.address();
  }
  if (random.chance(0.25)) p.softcap = random.uniform(0.5, 5);
  if (random.chance(0.2)) p.dropout_p = random.uniform(0, 1);
  p.seed = static_cast<int64_t>(random.bits());
  p.statistics = random.chance(0.7);
  p.splits = random.between(1, std::clamp<int64_t>((p.keys + 127) / 128, 1, 4));

  c.output_gradient = strided(random, p.dtype, {p.batch, p.heads, p.queries, p.value_width}).fill(normal);
  if (values && random.chance(0.9)) p.output_gradient = c.output_gradient.view();
  const bool with_lse = random.chance(0.5), with_entropy = random.chance(0.5);
  c.lse_gradient = Tensor(c.compute, {p.batch, p.heads, p.queries, 1}).fill([&] { return with_lse * random.normal(); });
  c.entropy_gradient = Tensor(c.compute, {p.batch, p.heads, p.queries, 1}).fill([&] { return with_entropy * random.normal(); });
  c.trains = random.chance(0.75);
  c.wants_query = random.chance(0.85);
  c.wants_key = random.chance(0.85);
  c.wants_value = p.output_gradient.address && random.chance(0.85);
  c.wants_mask = p.mask.address && p.mask_dtype != attemper::kBool && random.chance(0.85);
  c.wants_scale = random.chance(0.85);
  c.wants_sinks = p.sinks && random.chance(0.85);
  if (with_lse) p.lse_gradient = c.lse_gradient.address();
  if (with_entropy) p.entropy_gradient = c.entropy_gradient.address();
  return c;
}
