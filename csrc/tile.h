// One tile of the plane of queries × keys: the queries of a block packed with their lanes side by side, the keys read as they
// are, who is visible to whom, and the logits.
#pragma once
#include "matmul.h"
#include "problem.h"

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

// Scratch memory handed out in pieces, each aligned for the widest vector.
class Arena {
 public:
  explicit Arena(char* memory) : next_(memory) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t used(const char* memory) const { return next_ - memory; }

 private:
  char* next_;
};

template <class Stored>
ATTEMPER_INLINE const Stored* at(const View& view, int64_t batch, int64_t head, int64_t row) {
  return reinterpret_cast<const Stored*>(view.address) + batch * view.stride[0] + head * view.stride[1] + row * view.stride[2];
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
  for (int64_t r = 0; r < rows; ++r) {
    Real sum = 0;  // a sum of x − x is 0 unless one of them is not finite
    for (int64_t c = 0; c < columns; ++c) sum += data[r * stride + c] - data[r * stride + c];
    if (!(sum == 0)) return false;
  }
  return true;
}

// A block of queries of one head: what stays the same over its tiles.
template <class Real>
struct Block {
  int64_t batch, head, kv_head, first, rows;
  int vectors;                           // that hold rows: one for a single query, all but in the last block of many
  alignas(64) Real scale[kBlock<Real>];  // factor on the product, a lane each
  bool raw;  // logits are scale · product with a scale above 0: the passes then work on products and scale within the exponent
};

template <class Real>
void begin_block(const Problem& p, int64_t batch, int64_t head, int64_t first, Block<Real>& block) {
  block.batch = batch;
  block.head = head;
  block.kv_head = p.kv_heads ? head / (p.heads / p.kv_heads) : 0;
  block.first = first;
  block.rows = least<int64_t>(kBlock<Real>, p.queries - first);
  block.vectors = static_cast<int>((block.rows + kLanes<Real> - 1) / kLanes<Real>);
  block.raw = p.softcap == 0 && (p.mask.address == 0 || p.mask_dtype == kBool);
  for (int64_t r = 0; r < kBlock<Real>; ++r) {
    const Real* scale = at<Real>(p.scale, batch, head, first + least(r, block.rows - 1));
    block.scale[r] = *scale;
    if (!(*scale > 0)) block.raw = false;
  }
}

// Rows of a tensor → [width][block]: lanes are rows. Lanes beyond the last row are noughts.
template <class Stored, class Real>
void pack_rows(const View& view, const Block<Real>& block, int64_t width, Real* packed) {
  for (int64_t r = 0; r < block.vectors * kLanes<Real>; ++r) {
    if (r < block.rows) {
      const Stored* row = at<Stored>(view, block.batch, block.head, block.first + r);
      for (int64_t c = 0; c < width; ++c) packed[c * kBlock<Real> + r] = read(row[c * view.stride[3]]);
    } else {
      for (int64_t c = 0; c < width; ++c) packed[c * kBlock<Real> + r] = 0;
    }
  }
}

// The half-open range of keys that position lets any query of the block see; it begins on the grid of tiles, so that a tile is
// the same for every block (dropout counts keys in fours, the backward pass deals tiles out).
template <class Real>
void keys_in_reach(const Problem& p, const Block<Real>& block, int64_t& begin, int64_t& end) {
  begin = 0;
  end = p.keys;
  if (p.left < kUnlimited) begin = most<int64_t>(begin, block.first + p.offset - p.left);
  begin = begin / kTileKeys * kTileKeys;
  if (p.right < kUnlimited) end = least<int64_t>(end, block.first + block.rows - 1 + p.offset + p.right + 1);
}

// Who is visible within a tile. `bias` [keys][block] holds what the mask adds, −∞ where it hides; null without a mask.
template <class Real>
struct Visibility {
  bool whole;  // everybody sees everything: no lane needs a look
  const Real* bias;
  alignas(64) typename LaneTypes<Real>::Integer lowest[kBlock<Real>], highest[kBlock<Real>];  // keys of the tile, inclusive

  ATTEMPER_INLINE Ints<Real> of(int64_t key, int vector) const {
    const Ints<Real> place = splat_int<Real>(key);
    const Ints<Real> low = *reinterpret_cast<const Ints<Real>*>(lowest + vector * kLanes<Real>);
    const Ints<Real> high = *reinterpret_cast<const Ints<Real>*>(highest + vector * kLanes<Real>);
    Ints<Real> visible = (place >= low) & (place <= high);
    if (bias) visible &= load(bias + key * kBlock<Real> + vector * kLanes<Real>) != splat<Real>(-kInfinity);
    return visible;
  }
  ATTEMPER_INLINE bool of_lane(int64_t key, int64_t lane) const {
    return key >= lowest[lane] && key <= highest[lane] && !(bias && bias[key * kBlock<Real> + lane] == Real(-kInfinity));
  }
};

template <class MaskStored, class Real>
void read_mask(const Problem& p, const Block<Real>& block, int64_t key, int64_t keys, Real* bias) {
  for (int64_t r = 0; r < block.vectors * kLanes<Real>; ++r) {
    const int64_t row = block.first + least(r, block.rows - 1);
    const MaskStored* mask = at<MaskStored>(p.mask, block.batch, block.head, row) + key * p.mask.stride[3];
    for (int64_t j = 0; j < keys; ++j) {
      Real x;
      if constexpr (kSame<MaskStored, uint8_t>) {
        x = mask[j * p.mask.stride[3]] ? Real(0) : Real(-kInfinity);
      } else {
        x = read(mask[j * p.mask.stride[3]]);
        if (x <= p.invisible_below) x = -kInfinity;
      }
      bias[j * kBlock<Real> + r] = x;
    }
  }
}

template <class Real>
void find_visibility(const Problem& p, const Block<Real>& block, int64_t key, int64_t keys, Real* scratch,
                     Visibility<Real>& seen) {
  seen.whole = p.mask.address == 0;
  for (int64_t r = 0; r < block.vectors * kLanes<Real>; ++r) {
    const int64_t place = block.first + least(r, block.rows - 1) + p.offset - key;  // the query's own key, counted in the tile
    const int64_t low = p.left == kUnlimited ? 0 : most<int64_t>(0, place - p.left);
    const int64_t high = p.right == kUnlimited ? keys - 1 : least<int64_t>(keys - 1, place + p.right);
    seen.lowest[r] = static_cast<typename LaneTypes<Real>::Integer>(least(low, keys));
    seen.highest[r] = static_cast<typename LaneTypes<Real>::Integer>(most<int64_t>(high, -1));
    if (low > 0 || high < keys - 1) seen.whole = false;
  }
  seen.bias = nullptr;
  if (p.mask.address == 0) return;
  seen.bias = scratch;
  switch (p.mask_dtype) {
    case kBool:
      return read_mask<uint8_t>(p, block, key, keys, scratch);
    case kFloat32:
      return read_mask<float>(p, block, key, keys, scratch);
    case kFloat64:
      return read_mask<double>(p, block, key, keys, scratch);
    case kBfloat16:
      return read_mask<Bfloat16>(p, block, key, keys, scratch);
    default:
      return read_mask<Float16>(p, block, key, keys, scratch);
  }
}

// The logit of a product: the scale, the cap, the bias.
template <class Real>
ATTEMPER_INLINE Vec<Real> logit_of(const Problem& p, const Block<Real>& block, const Visibility<Real>& seen, Vec<Real> product,
                                   int64_t key, int vector) {
  Vec<Real> z = product * load(block.scale + vector * kLanes<Real>);
  if (p.softcap != 0) {
    const Vec<Real> cap = splat(static_cast<Real>(p.softcap));
    z = cap * tanh_of(z / cap);
  }
  if (seen.bias) z += load(seen.bias + key * kBlock<Real> + vector * kLanes<Real>);
  return z;
}

// Philox4x32-10 with the counter (key / 4, query, head, batch): four words, for keys 4·⌊key/4⌋ … + 3. See kernels/dropout.py.
ATTEMPER_INLINE void random_words(uint64_t seed, uint32_t key4, uint32_t query, uint32_t head, uint32_t batch,
                                  uint32_t words[4]) {
  uint32_t c0 = key4, c1 = query, c2 = head, c3 = batch;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t wide0 = uint64_t{0xD2511F53} * c0, wide1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(wide1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(wide1);
    c2 = static_cast<uint32_t>(wide0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(wide0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// What dropout multiplies the weights of a tile by: [keys][block], 0 or 1 / (1 − p). Tiles start at multiples of 4.
template <class Real>
void keep_factors(const Problem& p, const Block<Real>& block, int64_t key, int64_t keys, Real* factors) {
  const double threshold = __builtin_nearbyint(p.dropout_p * 4294967296.0);
  const Real kept = p.dropout_p < 1 ? Real(1) / static_cast<Real>(1.0 - p.dropout_p) : Real(0);
  for (int64_t j = 0; j < keys; j += 4)
    for (int64_t r = 0; r < block.vectors * kLanes<Real>; ++r) {
      uint32_t words[4];
      random_words(p.seed, (key + j) / 4, block.first + r, block.head, block.batch, words);
      for (int64_t w = 0; w < least<int64_t>(4, keys - j); ++w)
        factors[(j + w) * kBlock<Real> + r] = words[w] >= threshold ? kept : Real(0);
    }
}

}  // namespace
}  // namespace attemper
