// Pairs of bfloat16, two to a 32-bit lane: the processor's dot product multiplies both and adds them to one float.
//
// Builds that have the instruction multiply all bfloat16 so. ATTEMPER_BF16_PAIRS=1 turns it on in the others as well, with the
// instruction put together from ordinary ones: slower than floats, but it shows on any machine that the pairs are right.
// (cmake -DATTEMPER_EMULATE_BF16_PAIRS=ON, or the same through pip install . -C cmake.define.ATTEMPER_EMULATE_BF16_PAIRS=ON.)
#pragma once
#include "lanes.h"

#if defined(__AVX512BF16__) && ATTEMPER_VECTOR_BYTES == 64
#include <immintrin.h>
#define ATTEMPER_BF16_DOT 1
#else
#define ATTEMPER_BF16_DOT 0
#endif
#ifndef ATTEMPER_BF16_PAIRS
#define ATTEMPER_BF16_PAIRS ATTEMPER_BF16_DOT
#endif

namespace attemper {
namespace {

// Two neighbours along the inner index of a product, the earlier one in the lower half. The last of an odd number is paired
// with nought on both sides.
typedef uint32_t Pair;
template <>
struct LaneTypes<Pair> {
  typedef Pair Vector __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), may_alias));
};

ATTEMPER_INLINE Pair pair_of(Bfloat16 low, Bfloat16 high) { return low.bits | static_cast<Pair>(high.bits) << 16; }

// What a product is made of (`Term`): floats, doubles or pairs. How many factors one holds, and what they add up in.
template <class Term>
constexpr int kFactors = kSame<Term, Pair> ? 2 : 1;
template <class Term>
struct SumOf {
  typedef Term Type;
};
template <>
struct SumOf<Pair> {
  typedef float Type;
};
template <class Term>
constexpr int64_t terms_of(int64_t factors) {
  return (factors + kFactors<Term> - 1) / kFactors<Term>;
}

// Pairs are read in place from rows of bfloat16, so they need not be aligned as 32-bit numbers are.
template <class Term>
ATTEMPER_INLINE Term fetch(const Term* p) {
  Term x;
  memcpy(&x, p, sizeof(x));
  return x;
}

// sum + a · b in each lane, of pairs sum + a.low · b.low + a.high · b.high. The instruction takes numbers below 2^-126 for
// nought; the upper halves come first in it.
template <class V>
ATTEMPER_INLINE V add_product(V sum, V a, V b) {
  return sum + a * b;
}
ATTEMPER_INLINE Vec<float> add_product(Vec<float> sum, Vec<Pair> a, Vec<Pair> b) {
#if ATTEMPER_BF16_DOT
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const Vec<Pair> upper = splat<Pair>(0xffff0000u);
  sum += (Vec<float>)(a & upper) * (Vec<float>)(b & upper);
  return sum + (Vec<float>)(a << 16) * (Vec<float>)(b << 16);
#endif
}

// Lane by lane (low, high), each rounded to the nearest bfloat16, ties to even; NaN stays NaN.
ATTEMPER_INLINE Vec<Pair> pack_pairs(Vec<float> low, Vec<float> high) {
#if ATTEMPER_BF16_DOT
  // The conversion puts the 16 of `low` before the 16 of `high`: word 2i comes from i, word 2i + 1 from 16 + i.
  const Vec<Pair> lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec<Pair> words = lane | (lane + 16) << 16;
  return (Vec<Pair>)_mm512_permutexvar_epi16((__m512i)words, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  const auto rounded = [](Vec<float> x) ATTEMPER_INLINED {  // in the upper half
    const Vec<Pair> bits = (Vec<Pair>)x, up = bits + 0x7fff + ((bits >> 16) & 1);
    return x == x ? up : splat<Pair>(0x7fc00000u);
  };
  return rounded(low) >> 16 | (rounded(high) & 0xffff0000u);
#endif
}

}  // namespace
}  // namespace attemper
