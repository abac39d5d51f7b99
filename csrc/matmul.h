// The two products that all of attention is made of, on tiles that stay in cache.
//
// A is read one number at a time and repeated over the lanes; B and the result have lanes along their rows. Registers hold a
// rectangle of kRows × kColumns vectors of the result while the inner index runs. The numbers of A and B may be pairs (pairs.h).
#pragma once
#include "pairs.h"

namespace attemper {
namespace {

#if ATTEMPER_VECTOR_BYTES >= 64 || defined(__aarch64__)
constexpr int kColumns = 4;  // 32 registers: 6 × 4 sums, 4 of B, 1 of A
#else
constexpr int kColumns = 2;  // 16 registers: 6 × 2 sums, 2 of B, 1 of A
#endif
constexpr int kRows = 6;
// Numbers that are added up in one go, 128 factors; the sums of more are added up apart, which bounds their error.
template <class Term>
constexpr int64_t kInner = 128 / kFactors<Term>;
template <class Term>
using Sums = Vec<typename SumOf<Term>::Type>;

// How A is laid out: its rows along memory (A[row][inner]), or its columns (A[inner][row]).
enum Layout { kInnerContiguous, kRowContiguous };

// sums[r][c] += Σ_i A(r, i) · B[i][c]
template <class Term, int Rows, int Columns, Layout layout>
ATTEMPER_INLINE void accumulate(const Term* a, int64_t a_stride, const Term* b, int64_t b_stride, int64_t inner,
                                Sums<Term> (&sums)[Rows][Columns]) {
  for (int64_t i = 0; i < inner; ++i) {
    Vec<Term> columns[Columns];
#pragma GCC unroll 8
    for (int c = 0; c < Columns; ++c) columns[c] = load(b + c * kLanes<Term>);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec<Term> repeated = splat(fetch(layout == kInnerContiguous ? a + r * a_stride : a + r));
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) sums[r][c] = add_product(sums[r][c], repeated, columns[c]);
    }
    b += b_stride;
    a += layout == kInnerContiguous ? 1 : a_stride;
  }
}

// Calls `finish(row, column, sums)` for each rectangle of A · B, Rows × columns; `row` counts rows, `column` numbers.
template <class Term, int Rows, int Columns, Layout layout, class Finish>
ATTEMPER_INLINE void rectangles_of(const Term* a, int64_t a_stride, const Term* b, int64_t b_stride, int64_t inner, int64_t row,
                                   int64_t first_column, int64_t columns, Finish finish) {
  constexpr int64_t kRun = kInner<Term>;
  for (int64_t c = first_column; c + Columns * kLanes<Term> <= columns; c += Columns * kLanes<Term>) {
    Sums<Term> sums[Rows][Columns] = {};
    accumulate<Term, Rows, Columns, layout>(a, a_stride, b + c, b_stride, inner < kRun ? inner : kRun, sums);
    for (int64_t i = kRun; i < inner; i += kRun) {
      Sums<Term> more[Rows][Columns] = {};
      const Term* part = a + i * (layout == kInnerContiguous ? 1 : a_stride);
      accumulate<Term, Rows, Columns, layout>(part, a_stride, b + c + i * b_stride, b_stride, inner - i < kRun ? inner - i : kRun,
                                              more);
      for (int r = 0; r < Rows; ++r)
        for (int k = 0; k < Columns; ++k) sums[r][k] += more[r][k];
    }
    finish(row, c, sums);
  }
}

// A · B for `rows` × `columns` results; columns is a multiple of the lanes.
template <class Term, Layout layout, class Finish>
ATTEMPER_INLINE void multiply(const Term* a, int64_t a_stride, const Term* b, int64_t b_stride, int64_t inner, int64_t rows,
                              int64_t columns, Finish finish) {
  constexpr int kWidth = kColumns * kLanes<Term>;
  const int64_t whole = columns / kWidth * kWidth;
  const int64_t row_step = layout == kInnerContiguous ? a_stride : 1;
  int64_t r = 0;
  if (whole == 0)  // a single vector of columns: more rows keep the multipliers busy, and A is read fewer times over
    for (; r + 2 * kRows <= rows; r += 2 * kRows)
      rectangles_of<Term, 2 * kRows, 1, layout>(a + r * row_step, a_stride, b, b_stride, inner, r, 0, columns, finish);
  for (; r + kRows <= rows; r += kRows) {
    rectangles_of<Term, kRows, kColumns, layout>(a + r * row_step, a_stride, b, b_stride, inner, r, 0, whole, finish);
    rectangles_of<Term, kRows, 1, layout>(a + r * row_step, a_stride, b, b_stride, inner, r, whole, columns, finish);
  }
  for (; r + 2 <= rows; r += 2) {
    rectangles_of<Term, 2, kColumns, layout>(a + r * row_step, a_stride, b, b_stride, inner, r, 0, whole, finish);
    rectangles_of<Term, 2, 1, layout>(a + r * row_step, a_stride, b, b_stride, inner, r, whole, columns, finish);
  }
  for (; r < rows; ++r) {
    rectangles_of<Term, 1, kColumns, layout>(a + r * row_step, a_stride, b, b_stride, inner, r, 0, whole, finish);
    rectangles_of<Term, 1, 1, layout>(a + r * row_step, a_stride, b, b_stride, inner, r, whole, columns, finish);
  }
}

}  // namespace
}  // namespace attemper
