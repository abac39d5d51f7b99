// Vectors whose lanes are queries. One source serves every instruction set: the build gives the width in bytes, the compiler's
// vector extensions do the rest.
//
// No template of the standard library may be used in these headers: they are compiled once per instruction set, and a linker
// keeps one copy of a weak symbol for all of them. Everything lives in an anonymous namespace for the same reason.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef ATTEMPER_VECTOR_BYTES
#define ATTEMPER_VECTOR_BYTES 16
#endif
#define ATTEMPER_INLINED __attribute__((always_inline))  // for lambdas
#define ATTEMPER_INLINE ATTEMPER_INLINED inline
#define ATTEMPER_OUTLINED __attribute__((noinline))  // for products: within a longer function their sums would lose registers

namespace attemper {
namespace {

constexpr double kInfinity = __builtin_inf(), kLog2E = 1.44269504088896340736, kLn2 = 0.69314718055994530942;

template <class Real>
struct LaneTypes;
template <>
struct LaneTypes<float> {
  typedef float Vector __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), may_alias));
  typedef float Unaligned __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t Integers __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), may_alias));
  typedef int32_t Integer;
  // As many numbers as a vector has lanes of 64 bits, and a byte for each lane.
  typedef float Few __attribute__((vector_size(ATTEMPER_VECTOR_BYTES / 2), aligned(4), may_alias));
  typedef int32_t FewIntegers __attribute__((vector_size(ATTEMPER_VECTOR_BYTES / 2), aligned(4), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(ATTEMPER_VECTOR_BYTES / 4), aligned(1), may_alias));
};
template <>
struct LaneTypes<double> {
  typedef double Vector __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), may_alias));
  typedef double Unaligned __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t Integers __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), may_alias));
  typedef int64_t Integer;
  typedef double Few __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t FewIntegers __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), aligned(8), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(ATTEMPER_VECTOR_BYTES / 8), aligned(1), may_alias));
};

template <class Real>
using Vec = typename LaneTypes<Real>::Vector;
template <class Real>
using Ints = typename LaneTypes<Real>::Integers;
template <class Real>
constexpr int kLanes = ATTEMPER_VECTOR_BYTES / sizeof(Real);

template <class Real>
ATTEMPER_INLINE Vec<Real> splat(Real x) {
  return x - Vec<Real>{};
}
template <class Real>
ATTEMPER_INLINE Ints<Real> splat_int(typename LaneTypes<Real>::Integer x) {
  return x - Ints<Real>{};
}
template <class Real>
ATTEMPER_INLINE Vec<Real> load(const Real* p) {
  return *reinterpret_cast<const Vec<Real>*>(p);
}
template <class Real>
ATTEMPER_INLINE Vec<Real> load_unaligned(const Real* p) {
  return *reinterpret_cast<const typename LaneTypes<Real>::Unaligned*>(p);
}
template <class Real>
ATTEMPER_INLINE void store(Real* p, Vec<Real> x) {
  *reinterpret_cast<Vec<Real>*>(p) = x;
}
template <class Real>
ATTEMPER_INLINE void store_unaligned(Real* p, Vec<Real> x) {
  *reinterpret_cast<typename LaneTypes<Real>::Unaligned*>(p) = x;
}

// As the hardware's maximum and minimum have it: a NaN in the second operand wins, one in the first is lost.
template <class V>
ATTEMPER_INLINE V larger(V running, V x) {
  return running > x ? running : x;
}
template <class V>
ATTEMPER_INLINE V smaller(V running, V x) {
  return running < x ? running : x;
}

// The same numbers, of which the compiler no longer knows that they are constant: only so it makes one instruction of `larger`.
template <class V>
ATTEMPER_INLINE V opaque(V x) {
#if ATTEMPER_VECTOR_BYTES == 16 && defined(__SSE2__) || ATTEMPER_VECTOR_BYTES == 32 && defined(__AVX__) || \
    ATTEMPER_VECTOR_BYTES == 64 && defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

// The lanes in which a comparison holds, a bit each.
template <class Real>
ATTEMPER_INLINE uint32_t lanes_where(Ints<Real> holds) {
  constexpr bool narrow [[maybe_unused]] = sizeof(Real) == 4;
#if defined(__AVX512DQ__) && ATTEMPER_VECTOR_BYTES == 64
  return narrow ? _mm512_movepi32_mask((__m512i)holds) : _mm512_movepi64_mask((__m512i)holds);
#elif defined(__AVX__) && ATTEMPER_VECTOR_BYTES == 32
  return narrow ? _mm256_movemask_ps((__m256)holds) : _mm256_movemask_pd((__m256d)holds);
#elif defined(__SSE2__) && ATTEMPER_VECTOR_BYTES == 16
  return narrow ? _mm_movemask_ps((__m128)holds) : _mm_movemask_pd((__m128d)holds);
#else
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes<Real>; ++lane) lanes |= static_cast<uint32_t>(holds[lane] & 1) << lane;
  return lanes;
#endif
}

// An exponent as exp2_of takes it. At the bound the power is nought, and with it what it is multiplied by: the exponent itself,
// and values of any finite size. NaN stays NaN.
ATTEMPER_INLINE Vec<float> bounded(Vec<float> x) { return larger(opaque(splat(-127.0f)), x); }
ATTEMPER_INLINE Vec<double> bounded(Vec<double> x) { return larger(opaque(splat(-1100.0)), x); }

// 2^x for bounded x <= 0, nought below 2^-126.5; exactly 1 at 0, so that rescaling by it does not drift; NaN stays NaN.
// The exponent is rounded off by adding a large number whose low bits then hold it, already biased. The polynomial has the least
// largest relative error, 2e-9, of those of degree 6 on [−½, ½] that are 1 at 0.
ATTEMPER_INLINE Vec<float> exp2_of(Vec<float> x) {
  const Vec<float> magic = splat(12582912.0f + 127.0f);
  const Vec<float> shifted = x + magic;
  const Vec<float> rest = x - (shifted - magic);
  Vec<float> p = splat(1.535336194e-4f);
  p = p * rest + splat(1.339887440e-3f);
  p = p * rest + splat(9.618437357e-3f);
  p = p * rest + splat(5.550332471e-2f);
  p = p * rest + splat(2.402264791e-1f);
  p = p * rest + splat(6.931472029e-1f);
  p = p * rest + splat(1.0f);
  return p * (Vec<float>)((Ints<float>)shifted << 23);
}
ATTEMPER_INLINE Vec<double> exp2_of(Vec<double> x) {
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = ::exp2(x[lane]);
  return x;
}

// tanh x as x·P(x²) / Q(x²), the quotient of the least largest relative error, 2e-8, on [−9, 9]; beyond it is ±1. Roundings
// may carry it an ulp past 1, hence the last line. NaN stays NaN.
ATTEMPER_INLINE Vec<float> tanh_of(Vec<float> x) {
  const Vec<float> one = splat(1.0f);
  x = smaller(opaque(splat(9.0f)), larger(opaque(splat(-9.0f)), x));
  const Vec<float> square = x * x;
  Vec<float> p = splat(1.335751614e-8f), q = splat(7.778046122e-7f);
  p = p * square + splat(2.061224086e-5f);
  q = q * square + splat(3.285995301e-4f);
  p = p * square + splat(3.495830750e-3f);
  q = q * square + splat(2.587796034e-2f);
  p = p * square + splat(1.338124793e-1f);
  q = q * square + splat(4.671456442e-1f);
  p = p * square + one;
  q = q * square + one;
  return smaller(opaque(one), larger(opaque(-one), x * p / q));
}
ATTEMPER_INLINE Vec<double> tanh_of(Vec<double> x) {
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = ::tanh(x[lane]);
  return x;
}

// The slope of tanh at x, given y = tanh x: 1 − y². Where y is near 1 that cancels; there it is 4e / (1 + e)² with e = e^−2|x|.
template <class Real>
ATTEMPER_INLINE Vec<Real> tanh_slope_of(Vec<Real> x, Vec<Real> y) {
  const Vec<Real> near = splat(Real(1)) - y * y, size = x < splat(Real(0)) ? -x : x;
  const Ints<Real> steep = size > splat(Real(1.25));
  if (lanes_where<Real>(steep) == 0) return near;  // caps are wide: most logits are far below theirs
  const Vec<Real> decay = exp2_of(bounded(size * splat(static_cast<Real>(-2.0 * kLog2E)))), whole = splat(Real(1)) + decay;
  return steep ? splat(Real(4)) * decay / (whole * whole) : near;
}

// Whole numbers of 64 bits, and the product of their low halves: one instruction on x86, where it has a name of its own.
typedef uint64_t Wide __attribute__((vector_size(ATTEMPER_VECTOR_BYTES), may_alias));
constexpr int kWideLanes = ATTEMPER_VECTOR_BYTES / 8;
ATTEMPER_INLINE Wide splat_wide(uint64_t x) { return x - Wide{}; }
ATTEMPER_INLINE Wide product_of_low_halves(Wide x, uint32_t y) {
#if defined(__AVX512F__) && ATTEMPER_VECTOR_BYTES == 64
  return (Wide)_mm512_maskz_mul_epu32(0xff, (__m512i)x, (__m512i)splat_wide(y));
#elif defined(__AVX2__) && ATTEMPER_VECTOR_BYTES == 32
  return (Wide)_mm256_mul_epu32((__m256i)x, (__m256i)splat_wide(y));
#elif defined(__SSE2__) && ATTEMPER_VECTOR_BYTES == 16
  return (Wide)_mm_mul_epu32((__m128i)x, (__m128i)splat_wide(y));
#else
  return (x & splat_wide(0xffffffff)) * splat_wide(y);
#endif
}

// The types in which tensors are stored, and how they are read and written one number at a time.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

ATTEMPER_INLINE float read(float x) { return x; }
ATTEMPER_INLINE double read(double x) { return x; }
ATTEMPER_INLINE uint8_t read(uint8_t x) { return x; }
ATTEMPER_INLINE float read(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
ATTEMPER_INLINE float read(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  __fp16 half;
  memcpy(&half, &x.bits, 2);
  return half;
#else
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023;
  if (exponent == 0) {  // nought and subnormal numbers, exact in float
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u | fraction << 13 : (exponent + 112) << 23 | fraction << 13);
  float result;
  memcpy(&result, &bits, 4);
  return result;
#endif
}
ATTEMPER_INLINE void write(float* p, float x) { *p = x; }
ATTEMPER_INLINE void write(double* p, double x) { *p = x; }
ATTEMPER_INLINE void write(Bfloat16* p, float x) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  p->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
ATTEMPER_INLINE void write(Float16* p, float x) {
#if defined(__F16C__)
  p->bits = _cvtss_sh(x, 0);
#elif defined(__aarch64__)
  const __fp16 half = static_cast<__fp16>(x);
  memcpy(&p->bits, &half, 2);
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x47800000u) {  // 65536 and beyond, infinity, NaN
    half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below the smallest normal number: adding ½ leaves the rounded fraction in the low bits
    float shifted;
    memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    memcpy(&half, &shifted, 4);
    half -= 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  p->bits = static_cast<uint16_t>(sign | half);
#endif
}

template <class Stored>
struct ComputeOf {
  typedef float Type;
};
template <>
struct ComputeOf<double> {
  typedef double Type;
};
// A condition that is known when the kernel is compiled, as an argument.
template <bool holds>
struct Is {
  static constexpr bool value = holds;
};
template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// A run of numbers, widened to the compute type.
template <class Stored, class Real>
ATTEMPER_INLINE void read_run(const Stored* from, int64_t stride, int64_t count, Real* to) {
  int64_t i = 0;
#if defined(__F16C__) && ATTEMPER_VECTOR_BYTES >= 32
  if (kSame<Stored, Float16> && stride == 1)
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(reinterpret_cast<float*>(to) + i,
                       _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  if (stride == 1)
    for (; i < count; ++i) to[i] = read(from[i]);
  else
    for (; i < count; ++i) to[i] = read(from[i * stride]);
}

}  // namespace
}  // namespace attemper
