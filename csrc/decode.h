// The forward pass where there are too few queries to fill a vector, as in decoding: lanes are keys here.
//
// The passes over a tile are those of softmax.h. They see a block whose vectors are rows (a head's query) and whose "keys" are
// groups of neighbouring keys, one a lane: x[group][row][lane]. So each lane keeps sums of its own, over every kLanes-th key,
// about a pivot that the lanes of a row share. The keys are dealt to several units, by the shape alone; what each finds is
// merged in order, lanes and units alike, when all are done.
//
// A unit serves all heads that read its key head, kVectors rows at a time, so that keys and values come from memory once.
#pragma once
#include "dots.h"
#include "finish.h"

namespace attemper {
namespace {

constexpr int64_t kKeysAtOnce = 4;
constexpr int64_t kUnitsWanted = 16;  // enough for the threads of most machines, and few enough that merging costs nothing

// What a unit found of one row. `largest` is the pivot; the sums of weights are about it, those of x about their own mean.
struct Share {
  double largest, total, squares, cubes, weighted;
  double count, mean, squares_about_mean, smallest, argmax, product_max, product_min;
  bool spoilt;
};
constexpr Share kNoShare = {-kInfinity, 0, 0, 0, 0, 0, 0, 0, kInfinity, -1, -kInfinity, kInfinity, false};

// Takes in numbers of which the mean and the sum of squares about it are known.
inline void add_moments(Share& share, double count, double mean, double squares) {
  const double all = share.count + count, step = mean - share.mean;
  share.squares_about_mean += squares + (share.count > 0 ? step * step * share.count * count / all : 0.0);
  share.mean = share.count > 0 ? share.mean + step * count / all : mean;
  share.count = all;
}

// How the keys of a problem are dealt, and where the shares are put: [batch][kv head][part][row], row = head of the group ·
// query.
struct Deal {
  int64_t rows, parts, tiles_a_part;
  Share* shares;
  char* outputs;  // beside each share: value_width numbers of the compute type

  explicit Deal(const Problem& p) : rows(p.kv_heads ? p.heads / p.kv_heads * p.queries : 0), shares(nullptr), outputs(nullptr) {
    const int64_t tiles = most<int64_t>(1, (p.keys + kTileKeys - 1) / kTileKeys), heads = most<int64_t>(1, p.batch * p.kv_heads);
    const int64_t wanted = least(tiles, (kUnitsWanted + heads - 1) / heads);
    tiles_a_part = (tiles + wanted - 1) / wanted;
    parts = (tiles + tiles_a_part - 1) / tiles_a_part;
  }
};

// Products of all rows of a block with `keys` keys, four rows at a time: that many sums stay in registers.
template <class Real, int keys>
void products_with(const Rows<Real>& key, const Real* query, int rows, int64_t padded_width, int64_t width, int64_t first,
                   Real* x) {
  int r = 0;
  const auto put = [&](int j, int row, Real product) ATTEMPER_INLINED {
    const int64_t place = first + j;
    x[place / kLanes<Real> * kBlock<Real> + (r + row) * kLanes<Real> + place % kLanes<Real>] = product;
  };
  for (; r + 4 <= rows; r += 4) dot<Real, 4, keys>(key, query + r * padded_width, padded_width, width, put);
  for (; r < rows; ++r) dot<Real, 1, keys>(key, query + r * padded_width, padded_width, width, put);
}

// O += Σ weight · value over a few keys; a value that is not finite counts where it is visible only.
template <class Real>
void add_few_values(const Rows<Real>& value, const Visibility<Real>& seen, const Real* weights, int rows, int64_t keys,
                    int64_t first, int64_t padded_width, int64_t width, Real* output) {
  for (int64_t j = 0; j < keys; j += kKeysAtOnce) {
    const int64_t count = least(kKeysAtOnce, keys - j);
    const Real* of_key[kKeysAtOnce];
    Real weight[kVectors][kKeysAtOnce];
    bool finite = true;
    for (int64_t i = 0; i < kKeysAtOnce; ++i) {
      const int64_t place = first + j + least(i, count - 1);
      of_key[i] = value.data + (place - first) * value.stride;
      const Real* of_place = weights + place / kLanes<Real> * kBlock<Real> + place % kLanes<Real>;
      for (int r = 0; r < rows; ++r) weight[r][i] = i < count ? of_place[r * kLanes<Real>] : Real(0);
      if (i >= count || !seen.whole) finite = finite && all_finite(of_key[i], 0, 1, width);
    }
    if (!finite) {
      for (int64_t i = 0; i < count; ++i)
        for (int r = 0; r < rows; ++r) {
          const int64_t place = first + j + i;
          if (seen.of_lane(place / kLanes<Real>, r * kLanes<Real> + place % kLanes<Real>))
            for (int64_t c = 0; c < width; ++c) output[r * padded_width + c] += weight[r][i] * of_key[i][c];
        }
      continue;
    }
    const auto add = [&](const Vec<Real>(&x)[kKeysAtOnce], int64_t c) ATTEMPER_INLINED {
      for (int r = 0; r < rows; ++r) {
        Real* place = output + r * padded_width + c;
        Vec<Real> sum = load(place);
#pragma GCC unroll 4
        for (int64_t i = 0; i < kKeysAtOnce; ++i) sum += x[i] * splat(weight[r][i]);
        store(place, sum);
      }
    };
    const int64_t whole = width / kLanes<Real> * kLanes<Real>;
    Vec<Real> x[kKeysAtOnce];
    for (int64_t c = 0; c < whole; c += kLanes<Real>) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kKeysAtOnce; ++i) x[i] = load_unaligned(of_key[i] + c);
      add(x, c);
    }
    if (whole < width) {
      for (int64_t i = 0; i < kKeysAtOnce; ++i) x[i] = load_some(of_key[i] + whole, width - whole);
      add(x, whole);
    }
  }
}

// Up to kVectors rows of one key head, in the terms of the file's head: vector v is row first_row + v. All are raw or none is.
template <class Real>
struct Few {
  Block<Real> block;
  int64_t first_row;
  int64_t heads[kVectors], queries[kVectors];  // whose rows they are

  Few(const Problem& p, const Deal& deal, int64_t batch, int64_t kv_head, int64_t first) : first_row(first) {
    block.batch = batch;
    block.kv_head = kv_head;
    block.vectors = 0;
    block.monotone = false;  // the extremes are looked for
    for (int64_t row = first; row < deal.rows && block.vectors < kVectors; ++row) {
      const int64_t head = kv_head * (p.heads / p.kv_heads) + row / p.queries;
      const bool raw = logits_are_raw<Real>(p, batch, head, 0, p.queries);
      if (row > first && raw != block.raw) break;
      block.raw = raw;
      heads[block.vectors] = head;
      queries[block.vectors] = row % p.queries;
      const Real scale = *at<Real>(p.scale, batch, head, row % p.queries);
      const Vec<Real> by_cap = splat(p.softcap == 0 ? Real(0) : static_cast<Real>(scale / p.softcap));
      store(block.scale + block.vectors * kLanes<Real>, splat(scale));
      store(block.scale_by_cap + block.vectors * kLanes<Real>, by_cap);
      ++block.vectors;
    }
    block.rows = block.vectors * kLanes<Real>;
  }
};

// As find_visibility: false where no row sees anything. Within a tile, lane l of group g is key g · kLanes + l.
template <class Real>
bool find_few_visible(const Problem& p, const Few<Real>& few, int64_t key, int64_t keys, Real* bias, Visibility<Real>& seen) {
  using Integer = typename LaneTypes<Real>::Integer;
  constexpr int lanes = kLanes<Real>;
  seen.whole = keys % lanes == 0;
  seen.bias = nullptr;
  MaskSays says;
  for (int v = 0; v < few.block.vectors; ++v) {
    int64_t low, high;
    keys_seen(p, few.queries[v], key, keys, low, high);
    if (low > 0 || high < keys - 1) seen.whole = false;
    for (int lane = 0; lane < lanes; ++lane) {
      seen.lowest[v * lanes + lane] = static_cast<Integer>((low - lane + lanes - 1) / lanes);
      seen.highest[v * lanes + lane] = static_cast<Integer>((high - lane + lanes) / lanes - 1);
    }
    if (p.mask.address == 0) continue;
    alignas(64) Real row[kTileKeys] = {};
    read_mask_row(p, few.block.batch, few.heads[v], few.queries[v], key, keys, row);
    says.note(row, keys);
    for (int64_t j = 0; j < keys; j += lanes) store(bias + j / lanes * kBlock<Real> + v * lanes, load(row + j));
  }
  if (p.mask.address != 0 && (says.hides || says.adds)) {
    seen.bias = bias;
    seen.whole = false;
  }
  seen.find_reach(few.block.vectors, (keys + lanes - 1) / lanes);
  return p.mask.address == 0 || says.shows;
}

// The lanes of a row come to share their largest x; the lowest key at which it stands, where it is larger than all before.
template <class Real, bool statistics>
void join_extremes(const Few<Real>& few, int64_t key, int64_t keys, const Running<Real>& running, TileFigures<Real>& found,
                   int64_t* argmax) {
  constexpr int lanes = kLanes<Real>;
  for (int v = 0; v < few.block.vectors; ++v) {
    const Vec<Real> of_lanes = found.largest[v];
    Real largest = of_lanes[0], count = found.count[v][0];
    for (int lane = 1; lane < lanes; ++lane) {
      largest = of_lanes[lane] > largest ? of_lanes[lane] : largest;
      count += found.count[v][lane];
    }
    found.largest[v] = splat(largest);
    if (!statistics || !((argmax[v] < 0 && count > 0) || largest > running.pivot[v][0])) continue;
    int64_t place = keys;
    for (int lane = 0; lane < lanes; ++lane)
      if (of_lanes[lane] == largest) place = least(place, static_cast<int64_t>(found.risen[v * lanes + lane]) * lanes + lane);
    argmax[v] = key + (place < keys ? place : 0);  // NaN equals nothing
  }
}

// The lanes of a row become one share.
template <class Real>
Share share_of(const Running<Real>& running, int v, int64_t argmax) {
  Share share = kNoShare;
  share.largest = running.pivot[v][0];
  share.argmax = static_cast<double>(argmax);
  for (int lane = 0; lane < kLanes<Real>; ++lane) {
    share.total += whole_of(running.total[v][lane], running.total_rest[v][lane]);
    share.squares += whole_of(running.squares[v][lane], running.squares_rest[v][lane]);
    share.cubes += whole_of(running.cubes[v][lane], running.cubes_rest[v][lane]);
    share.weighted += whole_of(running.weighted[v][lane], running.weighted_rest[v][lane]);
    share.smallest = smaller<double>(share.smallest, running.smallest[v][lane]);
    share.product_max = larger<double>(share.product_max, running.product_max[v][lane]);
    share.product_min = smaller<double>(share.product_min, running.product_min[v][lane]);
    share.spoilt = share.spoilt || running.spoilt[v][lane] != 0;
    const double count = running.count[v][lane];
    if (count == 0) continue;
    const double from_centre = whole_of(running.sum[v][lane], running.sum_rest[v][lane]) / count;
    const double squares = whole_of(running.sum_squares[v][lane], running.sum_squares_rest[v][lane]);
    add_moments(share, count, running.centre[v][lane] + from_centre, squares - count * from_centre * from_centre);
  }
  return share;
}

template <class Real>
void drop_few(const Problem& p, const Few<Real>& few, int64_t key, int64_t keys, Real* x) {
  const Dropout<Real> dropout(p);
  Wide words[4] = {};
  for (int v = 0; v < few.block.vectors; ++v)
    for (int64_t j = 0; j < keys; ++j) {
      if (j % 4 == 0) random_words(p.seed, (key + j) / 4, few.queries[v], few.heads[v], few.block.batch, words);
      Real& weight = x[j / kLanes<Real> * kBlock<Real> + v * kLanes<Real> + j % kLanes<Real>];
      weight *= static_cast<uint32_t>(words[j % 4][0]) >= dropout.threshold ? dropout.kept : Real(0);
    }
}

template <class Real>
int64_t decode_scratch(const Problem& p) {
  const int64_t numbers = kBlock<Real> * (p.value_width + 1) +
                          kVectors * (padded<Real>(p.width) + 2 * padded<Real>(p.value_width)) +
                          kKeysAtOnce * (p.width + p.value_width) + 3 * kTileKeys * kVectors;
  return numbers * static_cast<int64_t>(sizeof(Real)) + 16 * 64;
}

// The shares of all rows of one key head in one part of the keys.
template <class Stored, class Real, bool statistics>
void decode_unit(const Problem& p, const Deal& deal, int64_t batch, int64_t kv_head, int64_t part, char* memory) {
  const int64_t width = padded<Real>(p.width), value_width = padded<Real>(p.value_width);
  Arena arena(memory);
  Real* query = arena.take<Real>(kVectors * width);
  Real* output = arena.take<Real>(kVectors * value_width);
  Real* of_tile = arena.take<Real>(kVectors * value_width);
  Real* x = arena.take<Real>(kTileKeys * kVectors);
  Real* bias = arena.take<Real>(kTileKeys * kVectors);
  Real* rescale = arena.take<Real>(kBlock<Real>);
  Real* key_rows = arena.take<Real>(kKeysAtOnce * p.width);
  Real* value_rows = arena.take<Real>(kKeysAtOnce * p.value_width);
  memset(x, 0, sizeof(Real) * kTileKeys * kVectors);

  int64_t begin, end;
  keys_in_reach(p, 0, p.queries, begin, end);
  begin = most(begin, part * deal.tiles_a_part * kTileKeys);
  end = least(end, (part + 1) * deal.tiles_a_part * kTileKeys);
  for (int64_t first_row = 0; first_row < deal.rows;) {
    const Few<Real> few(p, deal, batch, kv_head, first_row);
    const Block<Real>& block = few.block;
    const int rows = block.vectors;
    Running<Real> running;
    running.clear();
    int64_t argmax[kVectors];
    for (int v = 0; v < rows; ++v) {
      argmax[v] = -1;
      const Stored* row = at<Stored>(p.query, batch, few.heads[v], few.queries[v]);
      read_run(row, p.query.stride[3], p.width, query + v * width);
      for (int64_t c = p.width; c < width; ++c) query[v * width + c] = 0;
    }
    memset(output, 0, sizeof(Real) * rows * value_width);

    for (int64_t j = begin; j < end; j += kTileKeys) {
      const int64_t keys = least(kTileKeys, end - j), groups = (keys + kLanes<Real> - 1) / kLanes<Real>;
      Visibility<Real> seen;
      if (!find_few_visible(p, few, j, keys, bias, seen)) continue;
      for (int64_t i = 0; i < keys; i += kKeysAtOnce) {
        const int64_t count = least(kKeysAtOnce, keys - i);
        const Rows<Real> key = rows_of<Stored>(p.key, batch, kv_head, j + i, count, p.width, key_rows);
        if (count == kKeysAtOnce)
          products_with<Real, kKeysAtOnce>(key, query, rows, width, p.width, i, x);
        else
          for (int64_t k = 0; k < count; ++k)
            products_with<Real, 1>({key.data + k * key.stride, key.stride}, query, rows, width, p.width, i + k, x);
      }
      TileFigures<Real> found;
      look_at_tile<Real, statistics>(p, block, seen, x, running, found);
      join_extremes<Real, statistics>(few, j, keys, running, found, argmax);
      exponentials_of_tile<Real, statistics>(block, seen, groups, x, found, running, rescale);
      if (p.output.address == 0) continue;
      if (p.dropout_p > 0) drop_few(p, few, j, keys, x);
      memset(of_tile, 0, sizeof(Real) * rows * value_width);
      for (int64_t i = 0; i < keys; i += kKeysAtOnce) {
        const int64_t count = least(kKeysAtOnce, keys - i);
        const Rows<Real> value = rows_of<Stored>(p.value, batch, kv_head, j + i, count, p.value_width, value_rows);
        add_few_values(value, seen, x, rows, count, i, value_width, p.value_width, of_tile);
      }
      for (int v = 0; v < rows; ++v) {
        const Vec<Real> shrink = load(rescale + v * kLanes<Real>);
        for (int64_t c = v * value_width; c < (v + 1) * value_width; c += kLanes<Real>)
          store(output + c, load(output + c) * shrink + load(of_tile + c));
      }
    }
    for (int v = 0; v < rows; ++v) {
      const int64_t place = ((batch * p.kv_heads + kv_head) * deal.parts + part) * deal.rows + first_row + v;
      deal.shares[place] = share_of(running, v, argmax[v]);
      memcpy(reinterpret_cast<Real*>(deal.outputs) + place * p.value_width, output + v * value_width,
             sizeof(Real) * p.value_width);
    }
    first_row += rows;
  }
}

// Merges the shares of one head's rows, in order, and finishes them as any block: here lanes are queries again.
template <class Stored, class Real, bool statistics>
void finish_decode(const Problem& p, const Deal& deal, int64_t batch, int64_t head, char* memory) {
  const int64_t groups = p.heads / p.kv_heads, kv_head = head / groups;
  Real* output = Arena(memory).take<Real>(kBlock<Real> * p.value_width);
  Block<Real> block;
  begin_block(p, batch, head, 0, block);
  Running<Real> running;
  running.clear();
  for (int64_t r = 0; r < p.queries; ++r) {
    const int64_t first = (batch * p.kv_heads + kv_head) * deal.parts * deal.rows + head % groups * p.queries + r;
    const auto share_of_part = [&](int64_t part) -> const Share& { return deal.shares[first + part * deal.rows]; };
    for (int64_t d = 0; d < p.value_width; ++d) output[d * kBlock<Real> + r] = 0;
    Share all = kNoShare;
    for (int64_t part = 0; part < deal.parts; ++part) all.largest = larger(all.largest, share_of_part(part).largest);
    for (int64_t part = 0; part < deal.parts; ++part) {
      const Share& share = share_of_part(part);
      const double fall = share.largest == all.largest ? 0.0 : (share.largest - all.largest) * (block.raw ? block.scale[r] : 1);
      const double shrink = std::exp(fall);
      all.weighted += shrink * share.weighted + (share.total == 0 ? 0.0 : shrink * share.total * fall * kLog2E);
      all.total += shrink * share.total;
      all.squares += shrink * shrink * share.squares;
      all.cubes += shrink * shrink * shrink * share.cubes;
      const Real* of_part = reinterpret_cast<const Real*>(deal.outputs) + (first + part * deal.rows) * p.value_width;
      for (int64_t d = 0; d < p.value_width; ++d) output[d * kBlock<Real> + r] += static_cast<Real>(shrink) * of_part[d];
      if (all.argmax < 0 && share.argmax >= 0 && !(share.largest < all.largest)) all.argmax = share.argmax;
      if (share.count > 0) add_moments(all, share.count, share.mean, share.squares_about_mean);
      all.smallest = smaller(all.smallest, share.smallest);
      all.product_max = larger(all.product_max, share.product_max);
      all.product_min = smaller(all.product_min, share.product_min);
      all.spoilt = all.spoilt || share.spoilt;
    }
    const int v = r / kLanes<Real>, lane = r % kLanes<Real>;
    running.pivot[v][lane] = static_cast<Real>(all.largest);
    running.total[v][lane] = static_cast<Real>(all.total);
    running.squares[v][lane] = static_cast<Real>(all.squares);
    running.cubes[v][lane] = static_cast<Real>(all.cubes);
    running.weighted[v][lane] = static_cast<Real>(all.weighted);
    running.count[v][lane] = static_cast<Real>(all.count);
    running.argmax[v][lane] = static_cast<Real>(all.argmax);
    running.smallest[v][lane] = static_cast<Real>(all.smallest);
    running.product_max[v][lane] = static_cast<Real>(all.product_max);
    running.product_min[v][lane] = static_cast<Real>(all.product_min);
    running.spoilt[v][lane] = all.spoilt ? -1 : 0;
    const Real centre = static_cast<Real>(all.mean);  // what it rounds off stays in the sum
    running.centre[v][lane] = centre;
    running.sum[v][lane] = static_cast<Real>(all.count * (all.mean - centre));
    running.sum_squares[v][lane] = static_cast<Real>(all.squares_about_mean);
  }
  finish_block<Stored, Real, statistics>(p, block, running, output);
}

}  // namespace
}  // namespace attemper
