// The ceiling of this processor: multiply-adds in registers and nothing else, on several threads at once.
//
//   peak THREADS SECONDS
//
// prints "float32 R" and, where the build has a bfloat16 dot product, "bfloat16 R": operations a second of all threads together,
// a multiply-add being two. ATTEMPER_VECTOR_BYTES and the compiler's -m options say for which vector width.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kRepeats = 5;
constexpr int kLanes = ATTEMPER_VECTOR_BYTES / sizeof(float);
typedef float Lanes __attribute__((vector_size(ATTEMPER_VECTOR_BYTES)));

// A multiply-add takes about four cycles and two start in each, so eight sums must be under way at least; as many as leave the
// operands a register.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;
#else
constexpr int kSums = 12;
#endif

// Where results go, so that the compiler has to compute them; what operands come from, so that it cannot do so beforehand.
volatile float sink;
volatile float half = 0.5f, one = 1.0f;

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void use(const Lanes* sums) {
  Lanes total = sums[0];
  for (int i = 1; i < kSums; i++) total += sums[i];
  for (int lane = 0; lane < kLanes; lane++) sink = total[lane];
}

struct Float32 {
  static constexpr double kOperations = 2.0 * kLanes * kSums;

  static void run(long rounds) {
    const Lanes factor = Lanes{} + half, addend = Lanes{} + one;
    Lanes sums[kSums];
    for (int i = 0; i < kSums; i++) sums[i] = addend * static_cast<float>(i);  // all different, or one would do for all
    for (long round = 0; round < rounds; round++)
#pragma GCC unroll 32
      for (int i = 0; i < kSums; i++) sums[i] = sums[i] * factor + addend;
    use(sums);
  }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  static constexpr double kOperations = 4.0 * kLanes * kSums;  // a lane multiplies a pair and adds both products

  static void run(long rounds) {
    const __m512 ones = _mm512_set1_ps(one);
    const __m512bh left = _mm512_cvtne2ps_pbh(ones, ones), right = left;
    Lanes sums[kSums];
    for (int i = 0; i < kSums; i++) sums[i] = _mm512_set1_ps(one * static_cast<float>(i));
    for (long round = 0; round < rounds; round++)
#pragma GCC unroll 32
      for (int i = 0; i < kSums; i++) sums[i] = _mm512_dpbf16_ps(sums[i], left, right);
    use(sums);
  }
};
#endif

// Rounds that take about this long on one thread.
template <class Kernel>
long rounds_in(double seconds) {
  for (long rounds = 1000;; rounds *= 2) {
    const double began = seconds_now();
    Kernel::run(rounds);
    const double took = seconds_now() - began;
    if (took > 0.01) return std::max(1L, static_cast<long>(rounds * seconds / took));
  }
}

// Each thread's rate while all are running, added up; the best of several tries, since whatever else runs can only lower it.
template <class Kernel>
double rate(int threads, double seconds) {
  const long rounds = rounds_in<Kernel>(seconds);
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; repeat++) {
    std::vector<double> rates(threads);
    std::vector<std::thread> running;
    std::atomic<int> ready{0};
    for (int which = 0; which < threads; which++)
      running.emplace_back([&, which] {
        Kernel::run(rounds / 10 + 1);
        ready++;
        while (ready < threads) std::this_thread::yield();
        const double began = seconds_now();
        Kernel::run(rounds);
        rates[which] = Kernel::kOperations * rounds / (seconds_now() - began);
      });
    for (std::thread& thread : running) thread.join();
    double total = 0;
    for (double each : rates) total += each;
    best = std::max(best, total);
  }
  return best;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const int threads = std::max(1, atoi(arguments[1]));
  const double seconds = atof(arguments[2]);
  printf("float32 %.6e\n", rate<Float32>(threads, seconds));
#if defined(__AVX512BF16__)
  printf("bfloat16 %.6e\n", rate<Bfloat16>(threads, seconds));
#endif
  return 0;
}
