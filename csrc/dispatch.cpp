#include "dispatch.h"

#include <pthread.h>

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attemper {

// Weak: a build that was left out is null.
#define ATTEMPER_DECLARE(isa)                                  \
  bool forward_##isa(const Problem& p) __attribute__((weak));  \
  bool backward_##isa(const Problem& p) __attribute__((weak)); \
  bool rounds_weights_##isa() __attribute__((weak));
ATTEMPER_DECLARE(portable)
#if defined(__x86_64__)
ATTEMPER_DECLARE(avx2)
ATTEMPER_DECLARE(avx512)
ATTEMPER_DECLARE(avx512bf16)
#endif

namespace {

struct Build {
  const char* name;
  bool (*supported)();
  bool (*forward)(const Problem&);
  bool (*backward)(const Problem&);
  bool (*rounds_weights)();
};
#define ATTEMPER_PASSES(isa) forward_##isa, backward_##isa, rounds_weights_##isa

#if defined(__x86_64__)
bool has_f16c() {  // by hand: Clang 14 does not know the name in __builtin_cpu_supports
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && has_f16c();
}
#endif

// Best first.
const Build kBuilds[] = {
#if defined(__x86_64__)
    {"avx512bf16", [] { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }, ATTEMPER_PASSES(avx512bf16)},
    {"avx512", has_avx512, ATTEMPER_PASSES(avx512)},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }, ATTEMPER_PASSES(avx2)},
#endif
#if defined(__aarch64__)
    {"neon", [] { return true; }, ATTEMPER_PASSES(portable)},  // part of the architecture, so the portable build has it
#endif
    {"portable", [] { return true; }, ATTEMPER_PASSES(portable)},
};

const Build* chosen = nullptr;
bool forked = false;

template <class Record>
Record with_threads(Record problem) {
  if (forked) problem.threads = 1;
  return problem;
}

}  // namespace

bool choose_instruction_set(const char* name) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)registered;
  for (const Build& build : kBuilds)
    if ((name[0] == 0 || strcmp(name, build.name) == 0) && build.forward && build.supported()) {
      chosen = &build;
      return true;
    }
  return false;
}

const char* instruction_set() { return chosen->name; }
bool rounds_weights() { return chosen->rounds_weights(); }
bool forward(Problem problem) { return chosen->forward(with_threads(problem)); }
bool backward(Problem problem) { return chosen->backward(with_threads(problem)); }
void reduce_rows(Reduction reduction) { reduce_heads(with_threads(reduction)); }

}  // namespace attemper
