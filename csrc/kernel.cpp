// The kernel for one instruction set: compiled once for each, with ATTEMPER_ISA as the name of its entry points.
#include <omp.h>

#include <cstdlib>

#include "backward.h"
#include "decode.h"
#include "forward.h"

namespace attemper {
namespace {

char* allocate(int64_t bytes) { return static_cast<char*>(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)); }

// Runs `work(unit, memory)` for every unit, each thread with scratch of its own. Units do not depend on one another, so which
// thread takes which changes nothing. False where there is no memory.
template <class Work>
bool for_each_unit(int64_t units, int64_t threads, int64_t scratch, Work work) {
  if (threads <= 1 || units <= 1) {  // entering OpenMP takes as long as a few rows
    char* memory = allocate(scratch);
    if (memory == nullptr) return false;
    for (int64_t unit = 0; unit < units; ++unit) work(unit, memory);
    free(memory);
    return true;
  }
  bool enough = true;
#pragma omp parallel num_threads(threads < units ? threads : units)
  {
    char* memory = allocate(scratch);
    if (memory == nullptr) {
#pragma omp atomic write
      enough = false;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; ++unit)
      if (memory != nullptr) work(unit, memory);
    free(memory);
  }
  return enough;
}

template <class Stored, class Real, bool statistics>
bool decode_of(const Problem& p) {
  Deal deal(p);
  const int64_t units = p.batch * p.kv_heads * deal.parts, shares = units * deal.rows;
  char* memory = static_cast<char*>(malloc(shares * (sizeof(Share) + p.value_width * sizeof(Real))));
  if (memory == nullptr) return false;
  deal.shares = reinterpret_cast<Share*>(memory);
  deal.outputs = memory + shares * sizeof(Share);
  const auto of_unit = [&](int64_t unit, char* scratch) {
    const int64_t head = unit / deal.parts;
    decode_unit<Stored, Real, statistics>(p, deal, head / p.kv_heads, head % p.kv_heads, unit % deal.parts, scratch);
  };
  const auto of_head = [&](int64_t unit, char* scratch) {
    finish_decode<Stored, Real, statistics>(p, deal, unit / p.heads, unit % p.heads, scratch);
  };
  const bool enough = for_each_unit(units, p.threads, decode_scratch<Real>(p), of_unit) &&
                      for_each_unit(p.batch * p.heads, p.threads, decode_scratch<Real>(p), of_head);
  free(memory);
  return enough;
}

template <class Stored>
bool forward_of(const Problem& p) {
  using Real = typename ComputeOf<Stored>::Type;
  if (few_queries<Real>(p) && p.kv_heads > 0)
    return p.statistics ? decode_of<Stored, Real, true>(p) : decode_of<Stored, Real, false>(p);
  const int64_t blocks = (p.queries + kBlock<Real> - 1) / kBlock<Real>;
  return for_each_unit(p.batch * p.heads * blocks, p.threads, forward_scratch<Real>(p), [&](int64_t unit, char* memory) {
    const int64_t head = unit / blocks % p.heads, batch = unit / blocks / p.heads;
    const int64_t first = (blocks - 1 - unit % blocks) * kBlock<Real>;  // under the causal rule the last block is the longest
    if (p.statistics)
      forward_block<Stored, Real, true>(p, batch, head, first, memory);
    else
      forward_block<Stored, Real, false>(p, batch, head, first, memory);
  });
}

template <class Stored>
bool backward_of(const Problem& p) {
  using Real = typename ComputeOf<Stored>::Type;
  const int64_t blocks = (p.queries + kBlock<Real> - 1) / kBlock<Real>;
  const int64_t units = p.units_of_head();
  bool enough = true;
  if (p.lse_gradient || p.unrounded.address)
    enough = for_each_unit(p.batch * p.heads * blocks, p.threads, 0, [&](int64_t unit, char*) {
      constants_of_block<Stored, Real>(p, unit / blocks / p.heads, unit / blocks % p.heads, unit % blocks * kBlock<Real>);
    });
  if (p.query_gradient.address || p.key_gradient.address || p.value_gradient.address || p.from_pivot)
    enough = enough && for_each_unit(p.batch * p.kv_heads * units, p.threads, backward_scratch<Stored, Real>(p),
                                     [&](int64_t unit, char* memory) {
                                       const int64_t kv_head = unit / units % p.kv_heads, batch = unit / units / p.kv_heads;
                                       backward_unit<Stored, Real>(p, batch, kv_head, unit % units, memory);
                                     });
  if (p.mask_gradient)
    enough = enough && for_each_unit(p.mask_batch * p.mask_heads, p.threads, backward_scratch<Stored, Real>(p),
                                     [&](int64_t unit, char* memory) {
                                       mask_gradient_unit<Stored, Real>(p, unit / p.mask_heads, unit % p.mask_heads, memory);
                                     });
  return enough;
}

}  // namespace

#define ATTEMPER_JOIN(a, b) a##b
#define ATTEMPER_NAME(prefix, isa) ATTEMPER_JOIN(prefix, isa)

bool ATTEMPER_NAME(rounds_weights_, ATTEMPER_ISA)() { return kInPairs<Bfloat16>; }

bool ATTEMPER_NAME(forward_, ATTEMPER_ISA)(const Problem& p) {
  switch (p.dtype) {
    case kFloat32:
      return forward_of<float>(p);
    case kFloat64:
      return forward_of<double>(p);
    case kBfloat16:
      return forward_of<Bfloat16>(p);
    default:
      return forward_of<Float16>(p);
  }
}

bool ATTEMPER_NAME(backward_, ATTEMPER_ISA)(const Problem& p) {
  switch (p.dtype) {
    case kFloat32:
      return backward_of<float>(p);
    case kFloat64:
      return backward_of<double>(p);
    case kBfloat16:
      return backward_of<Bfloat16>(p);
    default:
      return backward_of<Float16>(p);
  }
}

}  // namespace attemper
