// Rows of a tensor and columns of a block: squares of numbers are turned over within registers.
#pragma once
#include "lanes.h"

namespace attemper {
namespace {

// The numbers of `a` whose place has the bit `step` change places with those of `b` that lack it.
template <class Real, int step>
ATTEMPER_INLINE void exchange(Vec<Real>& a, Vec<Real>& b) {
  constexpr int lanes = kLanes<Real>;
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define ATTEMPER_LOW(l) ((l) & step ? lanes + (l) - step : (l))
#define ATTEMPER_HIGH(l) ((l) & step ? lanes + (l) : (l) + step)
#define ATTEMPER_2(of, l) of(l), of(l + 1)
#define ATTEMPER_4(of, l) ATTEMPER_2(of, l), ATTEMPER_2(of, l + 2)
#define ATTEMPER_8(of, l) ATTEMPER_4(of, l), ATTEMPER_4(of, l + 4)
  const Vec<Real> x = a, y = b;
  if constexpr (lanes == 2) {
    a = __builtin_shufflevector(x, y, ATTEMPER_2(ATTEMPER_LOW, 0));
    b = __builtin_shufflevector(x, y, ATTEMPER_2(ATTEMPER_HIGH, 0));
  } else if constexpr (lanes == 4) {
    a = __builtin_shufflevector(x, y, ATTEMPER_4(ATTEMPER_LOW, 0));
    b = __builtin_shufflevector(x, y, ATTEMPER_4(ATTEMPER_HIGH, 0));
  } else if constexpr (lanes == 8) {
    a = __builtin_shufflevector(x, y, ATTEMPER_8(ATTEMPER_LOW, 0));
    b = __builtin_shufflevector(x, y, ATTEMPER_8(ATTEMPER_HIGH, 0));
  } else {
    a = __builtin_shufflevector(x, y, ATTEMPER_8(ATTEMPER_LOW, 0), ATTEMPER_8(ATTEMPER_LOW, 8));
    b = __builtin_shufflevector(x, y, ATTEMPER_8(ATTEMPER_HIGH, 0), ATTEMPER_8(ATTEMPER_HIGH, 8));
  }
#undef ATTEMPER_LOW
#undef ATTEMPER_HIGH
#undef ATTEMPER_2
#undef ATTEMPER_4
#undef ATTEMPER_8
#else
  for (int l = 0; l < lanes; ++l)
    if (l & step) {
      const Real swapped = a[l];
      a[l] = b[l - step];
      b[l - step] = swapped;
    }
#endif
}

template <class Real, int step = kLanes<Real> / 2>
ATTEMPER_INLINE void transpose(Vec<Real> (&square)[kLanes<Real>]) {
#pragma GCC unroll 16
  for (int row = 0; row < kLanes<Real>; ++row)
    if ((row & step) == 0) exchange<Real, step>(square[row], square[row + step]);
  if constexpr (step > 1) transpose<Real, step / 2>(square);
}

// Fewer numbers than a vector has, noughts behind them; reads no further than they go.
template <class Real>
ATTEMPER_INLINE Vec<Real> load_some(const Real* from, int64_t count) {
  Vec<Real> x{};
  memcpy(&x, from, sizeof(Real) * count);
  return x;
}

// columns[c · stride + r] = row(r)[c] for the rows of one vector and `width` columns; row(r) may be null: noughts.
template <class Real, class Row>
ATTEMPER_INLINE void rows_to_columns(Row row, int64_t width, Real* columns, int64_t stride) {
  constexpr int lanes = kLanes<Real>;
  for (int64_t c = 0; c < width; c += lanes) {
    const int64_t count = width - c < lanes ? width - c : lanes;
    Vec<Real> square[lanes];
#pragma GCC unroll 16
    for (int r = 0; r < lanes; ++r) {
      const Real* from = row(r);
      square[r] = from == nullptr ? splat(Real(0)) : count == lanes ? load_unaligned(from + c) : load_some(from + c, count);
    }
    transpose<Real>(square);
    for (int64_t i = 0; i < count; ++i) store(columns + (c + i) * stride, square[i]);
  }
}

// The way back: calls put(r, c, x) with lanes numbers of row r from column c on, of which those beyond the width are noughts.
template <class Real, class Put>
ATTEMPER_INLINE void columns_to_rows(const Real* columns, int64_t stride, Vec<Real> factor, int64_t width, int64_t rows,
                                     Put put) {
  constexpr int lanes = kLanes<Real>;
  for (int64_t c = 0; c < width; c += lanes) {
    Vec<Real> square[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) square[i] = c + i < width ? load(columns + (c + i) * stride) * factor : splat(Real(0));
    transpose<Real>(square);
    for (int64_t r = 0; r < rows; ++r) put(r, c, square[r]);
  }
}

// The first `count` numbers of a vector, in the stored type.
template <class Real, class Stored>
ATTEMPER_INLINE void write_some(Stored* to, Vec<Real> x, int64_t count) {
  if constexpr (kSame<Stored, Real>) {
    if (count >= kLanes<Real>)
      store_unaligned(to, x);
    else
      memcpy(to, &x, sizeof(Real) * count);
  } else {
    Real numbers[kLanes<Real>];
    memcpy(numbers, &x, sizeof(x));
    if (count >= kLanes<Real>)
      for (int i = 0; i < kLanes<Real>; ++i) write(to + i, numbers[i]);
    else
      for (int64_t i = 0; i < count; ++i) write(to + i, numbers[i]);
  }
}

}  // namespace
}  // namespace attemper
