// One tile of the plane of queries × keys: the queries of a block packed with their lanes side by side, the keys read as they
// are, who is visible to whom, and the logits.
#pragma once
#include "matmul.h"
#include "problem.h"
#include "transpose.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace attemper {
namespace {

constexpr int kVectors = ATTEMPER_VECTOR_BYTES >= 64 ? 4 : 8;  // vectors of queries in a block
template <class Real>
constexpr int kBlock = kVectors * kLanes<Real>;  // queries in a block: 64 in float, with vectors of 32 bytes and up
constexpr int64_t kTileKeys = 128;
constexpr int64_t kRunKeys = 16;  // sums start from zero every so many keys: their error then grows with runs and tiles, not keys

template <class T>
ATTEMPER_INLINE T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
ATTEMPER_INLINE T most(T a, T b) {
  return a < b ? b : a;
}

// Scratch memory handed out in pieces, each aligned for the widest vector. Without memory it only counts how much that takes.
class Arena {
 public:
  explicit Arena(char* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), begin = used_;
    used_ += (bytes + 63) / 64 * 64;
    char* piece = memory_ ? memory_ + begin : nullptr;
#if defined(__SANITIZE_ADDRESS__)
    used_ += 64;  // a gap that nobody may touch: otherwise a step out of one piece is one into the next
    if (memory_) {
      ASAN_UNPOISON_MEMORY_REGION(piece, bytes);
      ASAN_POISON_MEMORY_REGION(piece + bytes, used_ - begin - bytes);
    }
#endif
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

template <class Stored>
ATTEMPER_INLINE Stored* at(const View& view, int64_t batch, int64_t head, int64_t row) {
  return reinterpret_cast<Stored*>(view.address) + batch * view.stride[0] + head * view.stride[1] + row * view.stride[2];
}

// Numbers per row of a buffer whose lanes run along the width.
template <class Real>
int64_t padded(int64_t width) {
  return (width + kLanes<Real> - 1) / kLanes<Real> * kLanes<Real>;
}

// Keys or values of a tile in the compute type, rows along memory.
template <class Real>
struct Rows {
  const Real* data;
  int64_t stride;
};

// In place where they are of the compute type already, else widened into `scratch`. `once`: they serve one vector of queries
// only and come straight from memory, which likes to be read in order: they are copied then, too.
template <class Stored, class Real>
Rows<Real> rows_of(const View& view, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t columns, Real* scratch,
                   bool once = false) {
  if (kSame<Stored, Real> && view.stride[3] == 1 && !once)
    return {reinterpret_cast<const Real*>(at<Stored>(view, batch, head, first)), view.stride[2]};
  for (int64_t r = 0; r < rows; ++r)
    read_run(at<Stored>(view, batch, head, first + r), view.stride[3], columns, scratch + r * columns);
  return {scratch, columns};
}

template <class Real>
bool all_finite(const Real* data, int64_t stride, int64_t rows, int64_t columns) {
  const int64_t whole = columns / kLanes<Real> * kLanes<Real>;
  const Vec<Real> nought = splat(Real(0));
  for (int64_t r = 0; r < rows; ++r, data += stride) {
    Vec<Real> sum = nought;  // a sum of x − x is 0 unless one of them is not finite
    for (int64_t c = 0; c < whole; c += kLanes<Real>) sum += load_unaligned(data + c) - load_unaligned(data + c);
    if (whole < columns) {
      const Vec<Real> last = load_some(data + whole, columns - whole);
      sum += last - last;
    }
    if (lanes_where<Real>(sum != nought)) return false;
  }
  return true;
}

// A block of queries of one head: what stays the same over its tiles.
template <class Real>
struct Block {
  int64_t batch, head, kv_head, first, rows;
  int vectors;                                  // that hold rows: one for a single query, all but in the last block of many
  alignas(64) Real scale[kBlock<Real>];         // factor on the product, a lane each
  alignas(64) Real scale_by_cap[kBlock<Real>];  // the same over the softcap, where there is one
  bool monotone;  // the larger the product, the larger the logit: no bias, and the scale keeps order
  bool raw;       // and logits are scale · product: the passes then work on products and scale within the exponent
};

// Whether a scale keeps products apart and in their order: it is above 0, and not ∞, which makes logits of ±∞ of them.
template <class Real>
ATTEMPER_INLINE bool keeps_order(Real scale) {
  return scale > 0 && scale < Real(kInfinity);
}

// Whether the logits of these queries are scale · product, with a scale that keeps their order.
template <class Real>
bool logits_are_raw(const Problem& p, int64_t batch, int64_t head, int64_t first, int64_t rows) {
  bool ordered = true;
  for (int64_t r = 0; r < rows; ++r) ordered = ordered && keeps_order(*at<Real>(p.scale, batch, head, first + r));
  return ordered && p.softcap == 0 && (p.mask.address == 0 || p.mask_dtype == kBool);
}

template <class Real>
void begin_block(const Problem& p, int64_t batch, int64_t head, int64_t first, Block<Real>& block) {
  block.batch = batch;
  block.head = head;
  block.kv_head = p.kv_heads ? head / (p.heads / p.kv_heads) : 0;
  block.first = first;
  block.rows = least<int64_t>(kBlock<Real>, p.queries - first);
  block.vectors = static_cast<int>((block.rows + kLanes<Real> - 1) / kLanes<Real>);
  block.monotone = p.mask.address == 0 || p.mask_dtype == kBool;
  for (int64_t r = 0; r < kBlock<Real>; ++r) {
    const Real* scale = at<Real>(p.scale, batch, head, first + least(r, block.rows - 1));
    block.scale[r] = *scale;
    block.scale_by_cap[r] = p.softcap == 0 ? Real(0) : static_cast<Real>(*scale / p.softcap);
    if (!keeps_order(*scale)) block.monotone = false;
  }
  block.raw = logits_are_raw<Real>(p, batch, head, first, block.rows);
}

// Rows of a tensor → [width][block]: lanes are rows. Lanes beyond the last row are noughts.
template <class Stored, class Real>
void pack_rows(const View& view, const Block<Real>& block, int64_t width, Real* packed) {
  constexpr int64_t kRun = 64;  // columns that are widened at a time
  alignas(64) Real widened[kLanes<Real>][kRun];
  for (int64_t first = 0; first < block.rows; first += kLanes<Real>)
    for (int64_t c = 0; c < width; c += kRun) {
      const int64_t columns = least(kRun, width - c);
      const auto row = [&](int r) -> const Real* {
        if (first + r >= block.rows) return nullptr;
        const Stored* from = at<Stored>(view, block.batch, block.head, block.first + first + r) + c * view.stride[3];
        if (kSame<Stored, Real> && view.stride[3] == 1) return reinterpret_cast<const Real*>(from);
        return widened[r];
      };
      if (!kSame<Stored, Real> || view.stride[3] != 1)
        for (int r = 0; r < kLanes<Real> && first + r < block.rows; ++r)
          read_run(at<Stored>(view, block.batch, block.head, block.first + first + r) + c * view.stride[3], view.stride[3],
                   columns, widened[r]);
      rows_to_columns<Real>(row, columns, packed + c * kBlock<Real> + first, kBlock<Real>);
    }
}

// The half-open range of keys that position lets any of these queries see; it begins on the grid of tiles, so that a tile is the
// same for every block (dropout counts keys in fours, the backward pass deals tiles out).
inline void keys_in_reach(const Problem& p, int64_t first_query, int64_t queries, int64_t& begin, int64_t& end) {
  begin = 0;
  end = p.keys;
  if (p.left < kUnlimited) begin = most<int64_t>(begin, p.place_of(first_query) - p.left);
  begin = begin / kTileKeys * kTileKeys;
  if (p.right < kUnlimited) end = least<int64_t>(end, p.place_of(first_query + queries - 1) + p.right + 1);
}

// Who is visible within a tile. `bias` [keys][block] holds what the mask adds, −∞ where it hides; null without a mask.
template <class Real>
struct Visibility {
  bool whole;  // everybody sees everything: no lane needs a look
  const Real* bias;
  alignas(64) typename LaneTypes<Real>::Integer lowest[kBlock<Real>], highest[kBlock<Real>];  // keys of the tile, inclusive

  // The keys that any lane of a vector may see, first to end, and those of them that all of its lanes see: half-open ranges.
  struct Reach {
    int64_t first, whole_first, whole_end, end;
  };
  Reach reach[kVectors];

  // Once the rest is filled in.
  void find_reach(int vectors, int64_t keys) {
    for (int v = 0; v < vectors; ++v) {
      int64_t first = keys, end = 0, whole_first = 0, whole_end = keys;
      for (int64_t lane = v * kLanes<Real>; lane < (v + 1) * kLanes<Real>; ++lane) {
        first = least<int64_t>(first, lowest[lane]);
        whole_first = most<int64_t>(whole_first, lowest[lane]);
        end = most<int64_t>(end, highest[lane] + 1);
        whole_end = least<int64_t>(whole_end, highest[lane] + 1);
      }
      first = least(first, end);
      whole_first = bias ? end : least(most(first, whole_first), end);
      reach[v] = {first, whole_first, least(most(whole_first, whole_end), end), end};
    }
  }

  ATTEMPER_INLINE Ints<Real> of(int64_t key, int vector) const {
    const Ints<Real> place = splat_int<Real>(key);
    const Ints<Real> low = *reinterpret_cast<const Ints<Real>*>(lowest + vector * kLanes<Real>);
    const Ints<Real> high = *reinterpret_cast<const Ints<Real>*>(highest + vector * kLanes<Real>);
    Ints<Real> visible = (place >= low) & (place <= high);
    if (bias) visible &= load(bias + key * kBlock<Real> + vector * kLanes<Real>) != splat<Real>(-kInfinity);
    return visible;
  }
  // How many keys position shows to each lane.
  ATTEMPER_INLINE Ints<Real> keys_by_position(int vector) const {
    const Ints<Real> low = *reinterpret_cast<const Ints<Real>*>(lowest + vector * kLanes<Real>);
    const Ints<Real> high = *reinterpret_cast<const Ints<Real>*>(highest + vector * kLanes<Real>);
    const Ints<Real> keys = high - low + splat_int<Real>(1);
    return keys > Ints<Real>{} ? keys : Ints<Real>{};
  }
  ATTEMPER_INLINE bool of_lane(int64_t key, int64_t lane) const {
    return key >= lowest[lane] && key <= highest[lane] && !(bias && bias[key * kBlock<Real> + lane] == Real(-kInfinity));
  }
};

// What was met in the rows of a mask: pairs that it hides, that it shows, that it adds to.
struct MaskSays {
  bool hides = false, shows = false, adds = false;

  template <class Real>
  void note(const Real* row, int64_t keys) {
    int hidden = 0, shown = 0, added = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const int hides_this = row[j] == Real(-kInfinity);
      hidden |= hides_this;
      shown |= !hides_this;
      added |= !hides_this & (row[j] != 0);
    }
    hides |= hidden != 0;
    shows |= shown != 0;
    adds |= added != 0;
  }
};

template <class MaskStored, class Real>
void read_mask_row_of(const Problem& p, const MaskStored* mask, int64_t keys, Real* row) {
  const int64_t stride = p.mask.stride[3];
  if constexpr (kSame<MaskStored, uint8_t>) {
    alignas(64) uint8_t shown[kTileKeys] = {};
    read_run(mask, stride, keys, shown);
    for (int64_t j = 0; j < keys; j += kLanes<Real>) {
      const auto bytes = *reinterpret_cast<const typename LaneTypes<Real>::Bytes*>(shown + j);
      const Ints<Real> visible = __builtin_convertvector(bytes, Ints<Real>) != Ints<Real>{};
      store(row + j, visible ? splat(Real(0)) : splat(Real(-kInfinity)));
    }
  } else {
    if constexpr (kSame<Real, float> && !kSame<MaskStored, double>)
      read_run(mask, stride, keys, row);
    else
      for (int64_t j = 0; j < keys; ++j) row[j] = static_cast<Real>(read(mask[j * stride]));
    const Real below = static_cast<Real>(p.invisible_below);
    for (int64_t j = 0; j < keys; ++j) row[j] = row[j] <= below ? Real(-kInfinity) : row[j];
  }
}

// What the mask adds to the logits of one query and up to a tile of keys, −∞ where it hides. `row` has room for a whole tile.
template <class Real>
void read_mask_row(const Problem& p, int64_t batch, int64_t head, int64_t query, int64_t key, int64_t keys, Real* row) {
  View view = p.mask;
  const int64_t size = p.mask_dtype == kBool ? 1 : p.mask_dtype == kFloat32 ? 4 : p.mask_dtype == kFloat64 ? 8 : 2;
  view.address += size * key * view.stride[3];
  switch (p.mask_dtype) {
    case kBool:
      return read_mask_row_of(p, at<uint8_t>(view, batch, head, query), keys, row);
    case kFloat32:
      return read_mask_row_of(p, at<float>(view, batch, head, query), keys, row);
    case kFloat64:
      return read_mask_row_of(p, at<double>(view, batch, head, query), keys, row);
    case kBfloat16:
      return read_mask_row_of(p, at<Bfloat16>(view, batch, head, query), keys, row);
    default:
      return read_mask_row_of(p, at<Float16>(view, batch, head, query), keys, row);
  }
}

// A tile of a mask → [keys][block], its rows turned into columns.
template <class Real>
MaskSays read_mask(const Problem& p, const Block<Real>& block, int64_t key, int64_t keys, Real* bias) {
  const bool same_for_all = p.mask.stride[2] == 0 || block.rows == 1;
  alignas(64) Real row[kTileKeys];
  MaskSays says;
  for (int64_t r = 0; r < (same_for_all ? 1 : block.rows); ++r) {
    read_mask_row(p, block.batch, block.head, block.first + r, key, keys, row);
    says.note(row, keys);
    if (!same_for_all)
      for (int64_t j = 0; j < keys; ++j) bias[j * kBlock<Real> + r] = row[j];
  }
  // Lanes beyond the last row repeat a row that is there, so that what they do alarms nobody.
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t r = same_for_all ? 0 : block.rows; r < block.vectors * kLanes<Real>; ++r)
      bias[j * kBlock<Real> + r] = same_for_all ? row[j] : bias[j * kBlock<Real> + block.rows - 1];
  return says;
}

// The keys of a tile, inclusive, that position lets a query see: at most keys and at least −1 where a side leaves it none.
inline void keys_seen(const Problem& p, int64_t query, int64_t key, int64_t keys, int64_t& low, int64_t& high) {
  const int64_t place = p.place_of(query) - key;  // the query's own key, counted in the tile
  low = p.left == kUnlimited ? 0 : least(keys, most<int64_t>(0, place - p.left));
  high = p.right == kUnlimited ? keys - 1 : most<int64_t>(-1, least(keys - 1, place + p.right));
}

// Fills `seen` for a tile; false where nobody sees anything, so that there is nothing to do.
template <class Real>
bool find_visibility(const Problem& p, const Block<Real>& block, int64_t key, int64_t keys, Real* scratch,
                     Visibility<Real>& seen) {
  seen.whole = true;
  seen.bias = nullptr;
  if (p.mask.address != 0) {
    const MaskSays mask = read_mask(p, block, key, keys, scratch);
    if (!mask.shows) return false;
    if (mask.hides || mask.adds) {
      seen.bias = scratch;
      seen.whole = false;
    }
  }
  for (int64_t r = 0; r < block.vectors * kLanes<Real>; ++r) {
    int64_t low, high;
    keys_seen(p, block.first + least(r, block.rows - 1), key, keys, low, high);
    seen.lowest[r] = static_cast<typename LaneTypes<Real>::Integer>(low);
    seen.highest[r] = static_cast<typename LaneTypes<Real>::Integer>(high);
    if (low > 0 || high < keys - 1) seen.whole = false;
  }
  seen.find_reach(block.vectors, keys);
  return true;
}

// The logit of a product under a cap, without a bias: cap · tanh(product · scale / cap).
template <class Real>
ATTEMPER_INLINE Vec<Real> capped(Vec<Real> product, Vec<Real> scale_by_cap, Real cap) {
  return splat(cap) * tanh_of(product * scale_by_cap);
}

// The logit of a product: the scale, the cap, the bias.
template <class Real>
ATTEMPER_INLINE Vec<Real> logit_of(const Problem& p, const Block<Real>& block, const Visibility<Real>& seen, Vec<Real> product,
                                   int64_t key, int vector) {
  Vec<Real> z = product * load(block.scale + vector * kLanes<Real>);
  if (p.softcap != 0) z = capped(product, load(block.scale_by_cap + vector * kLanes<Real>), static_cast<Real>(p.softcap));
  if (seen.bias) z += load(seen.bias + key * kBlock<Real> + vector * kLanes<Real>);
  return z;
}

// Philox4x32-10 with the counter (key / 4, query, head, batch) for as many queries as there are 64-bit lanes: the low half of
// words[w] decides for key 4·⌊key/4⌋ + w. The high halves hold what is of no more use. See kernels/dropout.py.
ATTEMPER_INLINE void random_words(uint64_t seed, uint32_t key4, uint32_t first_query, uint32_t head, uint32_t batch,
                                  Wide (&words)[4]) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  words[0] = splat_wide(key4);
  for (int lane = 0; lane < kWideLanes; ++lane) words[1][lane] = first_query + lane;
  words[2] = splat_wide(head);
  words[3] = splat_wide(batch);
  for (int round = 0; round < 10; ++round) {
    const Wide product0 = product_of_low_halves(words[0], 0xD2511F53), product1 = product_of_low_halves(words[2], 0xCD9E8D57);
    words[0] = (product1 >> 32) ^ words[1] ^ splat_wide(k0);
    words[1] = product1;
    words[2] = (product0 >> 32) ^ words[3] ^ splat_wide(k1);
    words[3] = product0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
}

// The rule by which a random word keeps a weight or drops it.
template <class Real>
struct Dropout {
  uint64_t threshold;  // words from here on keep; there is one more of these than words: p = 1 keeps none
  Real kept;

  explicit Dropout(const Problem& p)
      : threshold(static_cast<uint64_t>(__builtin_nearbyint(p.dropout_p * 4294967296.0))),
        kept(p.dropout_p < 1 ? Real(1) / static_cast<Real>(1.0 - p.dropout_p) : Real(0)) {}
};

// What dropout multiplies weights by, [keys][block]: 0 or 1 / (1 − p). Tiles start at multiples of 4.
template <class Real>
void keep_factors(const Problem& p, const Block<Real>& block, int64_t key, int64_t keys, Real* factors) {
  using Few = typename LaneTypes<Real>::Few;
  const Dropout<Real> dropout(p);
  for (int64_t j = 0; j < keys; j += 4)
    for (int64_t r = 0; r < block.vectors * kLanes<Real>; r += kWideLanes) {
      Wide words[4];
      random_words(p.seed, (key + j) / 4, block.first + r, block.head, block.batch, words);
      for (int64_t w = 0; w < least<int64_t>(4, keys - j); ++w) {
        const auto stays = (words[w] & splat_wide(0xffffffff)) >= splat_wide(dropout.threshold);
        const Few few_stay = __builtin_convertvector(stays, typename LaneTypes<Real>::FewIntegers) ? Few{} + dropout.kept : Few{};
        *reinterpret_cast<Few*>(factors + (j + w) * kBlock<Real> + r) = few_stay;
      }
    }
}

}  // namespace
}  // namespace attemper
