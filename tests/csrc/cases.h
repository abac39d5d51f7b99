// Random problems: tensors of any dtype and layout, and the options that go with them, all from one seed.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "../../csrc/problem.h"

using attemper::Dtype, attemper::Problem, attemper::View;
using Shape = std::array<int64_t, 4>;

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t x = state_ += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }
  double uniform(double low, double high) { return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53; }
  int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(bits() % (high - low + 1)); }
  bool chance(double p) { return uniform(0, 1) < p; }
  double normal() {  // near enough
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform(0, 1);
    return sum;
  }
  int64_t size(int64_t limit) {  // a few, the neighbourhood of a tile's edge, or any
    const int64_t kind = between(0, 2), near = (int64_t{4} << between(0, 6)) + between(-1, 1);
    return kind == 0 ? between(1, 9) : kind == 1 && near <= limit ? near : between(1, limit);
  }

 private:
  uint64_t state_;
};

// How numbers of a dtype are stored. Not the kernel's own conversions, which are under test.
struct Format {
  int bytes, exponent_bits, fraction_bits;
  double lowest;  // the most negative finite number

  double unit() const { return std::ldexp(1, -fraction_bits - 1); }  // largest relative error of rounding to nearest
  double rounding(double x) const { return unit() * std::max(std::fabs(x), std::ldexp(1, 2 - (1 << (exponent_bits - 1)))); }
};
inline const Format& format_of(int64_t dtype) {
  static const Format formats[] = {{4, 8, 23, -0x1.fffffep127},
                                   {8, 11, 52, -0x1.fffffffffffffp1023},
                                   {2, 8, 7, -0x1.fep127},
                                   {2, 5, 10, -65504},
                                   {1, 0, 0, 0}};
  return formats[dtype];
}

struct Tensor {
  int64_t dtype = attemper::kFloat32, first = 0;
  Shape shape{}, stride{};
  std::vector<char> memory;

  // Contiguous, and all NaN: what is read or left unwritten by mistake shows.
  Tensor() = default;
  Tensor(int64_t dtype, Shape shape) : dtype(dtype), shape(shape) { lay_out({3, 2, 1, 0}, 1, 0); }

  void lay_out(std::array<int, 4> fastest_first, int64_t step, int64_t gap) {
    for (const int d : fastest_first) {
      stride[d] = step;
      step = step * shape[d] + gap;
    }
    memory.assign((first + step + 1) * format_of(dtype).bytes, '\xff');
  }
  Tensor& expand(Shape to) {
    for (int d = 0; d < 4; ++d)
      if (shape[d] != to[d]) stride[d] = 0;
    shape = to;
    return *this;
  }
  int64_t address() const { return reinterpret_cast<int64_t>(memory.data() + first * format_of(dtype).bytes); }
  View view() const { return {address(), {stride[0], stride[1], stride[2], stride[3]}}; }
  char* place(int64_t b, int64_t h, int64_t r, int64_t c) const {
    const int64_t index = b * stride[0] + h * stride[1] + r * stride[2] + c * stride[3];
    return reinterpret_cast<char*>(address()) + index * format_of(dtype).bytes;
  }
  double nth(int64_t n) const {
    const int64_t rows = n / shape[3];
    return get(rows / shape[2] / shape[1], rows / shape[2] % shape[1], rows % shape[2], n % shape[3]);
  }
  double get(int64_t b, int64_t h, int64_t r, int64_t c = 0) const {
    const Format& format = format_of(dtype);
    const char* from = place(b, h, r, c);
    if (format.bytes == 1) return *from;
    if (format.bytes == 8) return *reinterpret_cast<const double*>(from);
    if (format.bytes == 4) return *reinterpret_cast<const float*>(from);
    const int bits = *reinterpret_cast<const uint16_t*>(from), bias = (1 << (format.exponent_bits - 1)) - 1;
    const int exponent = bits >> format.fraction_bits & (2 * bias + 1), fraction = bits & ((1 << format.fraction_bits) - 1);
    const int normal = exponent > 0 ? 1 << format.fraction_bits : 0;
    double size = std::ldexp(normal + fraction, std::max(exponent, 1) - bias - format.fraction_bits);
    if (exponent == 2 * bias + 1) size = fraction ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
  }
  void put(double x, int64_t b, int64_t h, int64_t r, int64_t c = 0) {
    const Format& format = format_of(dtype);
    char* to = place(b, h, r, c);
    if (format.bytes == 1) *to = x != 0;
    if (format.bytes == 8) *reinterpret_cast<double*>(to) = x;
    if (format.bytes == 4) *reinterpret_cast<float*>(to) = static_cast<float>(x);
    if (format.bytes != 2) return;
    const int bias = (1 << (format.exponent_bits - 1)) - 1;
    int bits = (2 * bias + 1) << format.fraction_bits;
    if (x != x) {
      ++bits;
    } else if (std::isfinite(x)) {  // the leading bit of a normal number carries into its exponent, and so does rounding up
      const int exponent = x == 0 ? 1 - bias : std::max(std::ilogb(x), 1 - bias);
      bits = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(x), format.fraction_bits - exponent))) +
             ((exponent + bias - 1) << format.fraction_bits);
    }
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits | (std::signbit(x) ? 0x8000 : 0));
  }
  template <class Draw>
  Tensor& fill(Draw draw) {
    for (int64_t b = 0; b < shape[0]; ++b)
      for (int64_t h = 0; h < shape[1]; ++h)
        for (int64_t r = 0; r < shape[2]; ++r)
          for (int64_t c = 0; c < shape[3]; ++c) put(draw(), b, h, r, c);
    return *this;
  }
};

// Some order of the dimensions, some step between numbers, some gap after each dimension, some place to begin.
inline Tensor strided(Random& random, int64_t dtype, Shape shape) {
  static const std::array<int, 4> orders[] = {{3, 2, 1, 0}, {3, 1, 2, 0}, {2, 3, 1, 0}, {3, 2, 0, 1}};
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.first = random.between(0, 3);
  tensor.lay_out(orders[random.between(0, 3)], random.chance(0.2) ? 2 : 1, random.chance(0.3) ? random.between(1, 5) : 0);
  return tensor;
}

struct Case {
  Problem p{};  // all but the addresses of what is written
  int64_t compute = attemper::kFloat32;
  Tensor query, key, value, mask, scale, sinks, output_gradient, lse_gradient, entropy_gradient;
  bool trains, wants_query, wants_key, wants_value, wants_mask, wants_scale, wants_sinks;  // a backward pass, and for what

  bool has_value() const { return p.value.address != 0; }
  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t distance = j - p.place_of(i);
    if ((p.left != attemper::kUnlimited && distance < -p.left) || (p.right != attemper::kUnlimited && distance > p.right))
      return false;
    if (p.mask.address == 0) return true;
    return p.mask_dtype == attemper::kBool ? mask.get(b, h, i, j) != 0 : mask.get(b, h, i, j) > p.invisible_below;
  }
};

Case random_case(Random& random);
