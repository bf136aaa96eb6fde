// Choosing a token a row in one thread, behind a C ABI: temperature, min-p, top-k, top-p and an inverted CDF, as the torch reference has it.
//
// A row is read in blocks. The greatest logit of each block tells which blocks can hold a likely token, so that only these are looked at again:
// nothing is sorted but the few tokens among which a filter ends.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"

namespace {

using namespace penstock;

constexpr int64_t kBlock = 128;  // tokens that are read at a time: a multiple of a mask's word, and few enough for the nearest cache
constexpr int64_t kWord = 32;  // tokens of a mask's word
constexpr int64_t kFewBlocks = 64, kMoreBlocks = 8;  // how many blocks top-p looks into first at most, and how many times as many next
constexpr size_t kFewCandidates = 64;  // that are sorted
constexpr float kNothing = -std::numeric_limits<float>::infinity(), kGreatest = std::numeric_limits<float>::max();

// As `sampling.params` packs them.
struct Params {
  uint64_t seed;
  double top_p;
  float temperature, log_min_p;
  int32_t top_k, unused;
};
static_assert(sizeof(Params) == 32);

// As `sampling.buffers.Column` numbers them.
struct Result {
  int32_t token, nans, infinities, nothing_left;
};

struct Candidate {
  float logit;
  int32_t id;
  bool operator<(const Candidate& other) const { return logit > other.logit || (logit == other.logit && id < other.id); }
};

// What filters leave: logits above `threshold`, and of those equal to it the ids up to `last_id`.
struct Left {
  float threshold;
  int32_t last_id;
};

// Philox4x32-10, as `sampling.philox` describes it: a number in [0, 1) for what is sampled at a position.
double uniform(uint64_t seed, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = uint64_t{c0} * 0xD2511F53u, p1 = uint64_t{c2} * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
  }
  return static_cast<double>((uint64_t{c0 >> 5} << 26) + (c1 >> 6)) * 0x1p-53;
}

// One row of logits. Tokens that cannot be chosen are -inf wherever it is read: masked ones, and what is not finite.
template <typename T>
class Row {
 public:
  // bits: the row's mask, as the reference's `mask` has it, or null. `masked`: -inf in the logits is a mask, too, and no broken logit.
  Row(const T* logits, int64_t vocab, const uint32_t* bits, int64_t words, bool masked, const Params& params, std::vector<float>& most)
      : logits_(logits), vocab_(vocab), bits_(bits), words_(words), params_(params), most_(most) {
    most_.resize((vocab + kBlock - 1) / kBlock);
    const float least = masked ? kNothing : -kGreatest;
    IntVec broken{};
    for (size_t b = 0; b < most_.size(); ++b) {
      most_[b] = read(b, 1.0f, [&](Vec x) { broken |= ~((x >= least) & (x <= kGreatest)); });
      greatest_ = std::max(greatest_, most_[b]);
    }
    for (int lane = 0; lane < kLanes; ++lane) broken_ |= broken[lane] != 0;
    temperature_ = params.temperature > 0 ? params.temperature : 1.0f;
  }

  Result sample(uint32_t position, bool masked, Left* left) {
    Result result{0, 0, 0, greatest_ == kNothing};
    if (broken_) count_broken(masked, &result);
    *left = {kNothing, static_cast<int32_t>(vocab_)};
    if (result.nothing_left) return result;
    if (params_.temperature == 0) {
      result.token = first_greatest();
      return result;
    }
    for (float& most : most_) most /= temperature_;
    greatest_ /= temperature_;
    if ((params_.top_k > 0 && params_.top_k < vocab_) || params_.top_p < 1 || params_.log_min_p > kNothing) *left = filter();
    result.token = draw(*left, uniform(params_.seed, position));
    return result;
  }

 private:
  // Reads a block into `block_`, divided by the temperature, shows `each` the logits as they are, and returns the greatest that is left.
  template <typename Each>
  float read(int64_t b, float temperature, const Each& each) {
    return all_allowed(b) ? read_as<false>(b, temperature, each) : read_as<true>(b, temperature, each);
  }

  template <bool kGuided, typename Each>
  float read_as(int64_t b, float temperature, const Each& each) {
    const int64_t begin = b * kBlock, count = std::min(kBlock, vocab_ - begin);
    T ends[kBlock];
    const T* from = logits_ + begin;
    if (count < kBlock) {  // a whole block all the same, of which the last token is repeated
      std::copy(from, from + count, ends);
      std::fill(ends + count, ends + kBlock, from[count - 1]);
      from = ends;
    }
    Vec most = splat(kNothing);
    const Vec divisor = splat(temperature), nothing = splat(kNothing);
    const IntVec place = places();
    for (int64_t first = 0; first < kBlock; first += kWord) {
      IntVec bits = IntVec{} + (kGuided ? word_of(begin + first) : 0);
      for (int64_t i = first; i < first + kWord; i += kLanes) {
        Vec x = load(from + i);
        each(x);
        IntVec left = (x >= -kGreatest) & (x <= kGreatest);
        if (kGuided) {
          left &= (bits & place) == place;
          bits >>= kLanes;
        }
        x = left ? x : nothing;
        if (temperature != 1.0f) x /= divisor;
        store(block_ + i, x);
        most = x > most ? x : most;
      }
    }
    std::fill(block_ + count, block_ + kBlock, kNothing);
    float greatest = most[0];
    for (int lane = 1; lane < kLanes; ++lane) greatest = std::max(greatest, most[lane]);
    return greatest;
  }

  void read_scaled(int64_t b) {
    read(b, temperature_, [](Vec) {});
  }

  bool all_allowed(int64_t b) const {
    const int64_t first = b * (kBlock / kWord), end = first + kBlock / kWord;
    return bits_ == nullptr || (end <= words_ && std::all_of(bits_ + first, bits_ + end, [](uint32_t word) { return word == ~0u; }));
  }

  // The mask of 32 tokens from this one on: tokens beyond the mask are not allowed.
  int32_t word_of(int64_t token) const {
    const int64_t word = token / kWord;
    return word < words_ ? static_cast<int32_t>(bits_[word]) : 0;
  }

  // The bit of each lane.
  static IntVec places() {
    IntVec out;
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = 1 << lane;
    return out;
  }

  void count_broken(bool masked, Result* result) const {
    for (int64_t i = 0; i < vocab_; ++i) {
      const float x = widen(logits_[i]);
      result->nans += std::isnan(x);
      result->infinities += std::isinf(x) && !(masked && x < 0);
    }
  }

  int32_t first_greatest() {
    const int64_t b = std::find(most_.begin(), most_.end(), greatest_) - most_.begin();
    read(b, 1.0f, [](Vec) {});
    return static_cast<int32_t>(b * kBlock + (std::find(block_, block_ + kBlock, greatest_) - block_));
  }

  // All tokens whose logit is at least `limit`, in the order of their ids.
  void gather(float limit, std::vector<Candidate>& out) {
    out.clear();
    for (size_t b = 0; b < most_.size(); ++b) {
      if (most_[b] < limit || most_[b] == kNothing) continue;
      read_scaled(b);
      for (int64_t i = 0; i < kBlock; ++i)
        if (block_[i] >= limit && block_[i] > kNothing) out.push_back({block_[i], static_cast<int32_t>(b * kBlock + i)});
    }
  }

  // A logit that at least `count` tokens reach: the greatest of so many blocks do.
  float limit_for(int64_t count) const {
    if (count > static_cast<int64_t>(most_.size())) return kNothing;
    std::vector<float> most = most_;
    std::nth_element(most.begin(), most.begin() + count - 1, most.end(), std::greater<float>());
    return most[count - 1];
  }

  Left filter() {
    const float floor = greatest_ + params_.log_min_p;
    const bool by_count = params_.top_k > 0 && params_.top_k < vocab_, by_mass = params_.top_p < 1;
    if (!by_count && floor == kNothing) return nucleus();
    std::vector<Candidate> kept;
    gather(by_count ? std::max(floor, limit_for(params_.top_k)) : floor, kept);
    if (by_count && kept.size() > static_cast<size_t>(params_.top_k)) {
      std::nth_element(kept.begin(), kept.begin() + params_.top_k, kept.end());
      kept.resize(params_.top_k);
    }
    if (by_mass) kept.resize(within(kept, params_.top_p * mass(kept, 0, kept.size())));
    return last_of(kept);
  }

  // Top-p alone: the likeliest tokens, and more of them until they have the mass.
  Left nucleus() {
    const double wanted = params_.top_p * masses({kNothing, static_cast<int32_t>(vocab_)}, 0).total;
    std::vector<Candidate> kept;
    const int64_t first = std::min(kFewBlocks, static_cast<int64_t>(most_.size()) / kMoreBlocks + 1);
    for (int64_t blocks = first;; blocks *= kMoreBlocks) {
      const float limit = limit_for(blocks);
      gather(limit, kept);
      const size_t inside = within(kept, wanted);
      if (inside == kept.size() && limit > kNothing) continue;
      kept.resize(inside);
      return last_of(kept);
    }
  }

  // Brings the likeliest candidates to the front, and returns how many of them come before the mass is reached; the first always does.
  size_t within(std::vector<Candidate>& some, double wanted) const {
    const auto at = [&](size_t i) { return some.begin() + static_cast<std::ptrdiff_t>(i); };
    size_t first = 0, end = some.size();
    double before = 0;
    while (end - first > kFewCandidates) {  // a likelier and a less likely half, in one of which the mass is reached
      const size_t middle = first + (end - first) / 2;
      std::nth_element(at(first), at(middle), at(end));
      const double half = mass(some, first, middle);
      if (before + half >= wanted) {
        end = middle;
      } else {
        before += half;
        first = middle;
      }
    }
    std::sort(at(first), at(end));
    while (first < end && (first == 0 || before < wanted)) before += weight(some[first++].logit);
    return first;
  }

  double mass(const std::vector<Candidate>& some, size_t first, size_t end) const {
    double sum = 0;
    for (; first < end; ++first) sum += weight(some[first].logit);
    return sum;
  }

  static Left last_of(const std::vector<Candidate>& kept) {
    const Candidate last = *std::max_element(kept.begin(), kept.end());
    return {last.logit, last.id};
  }

  // Relative to the likeliest token, so that the sums of equal tokens are exact.
  double weight(float logit) const { return std::exp(static_cast<double>(logit) - static_cast<double>(greatest_)); }

  struct Masses {
    double total;
    int64_t block;  // the one in which the sum passes what is sought; the last one with any mass if none does
    double before;  // the sum before that block
  };

  // The mass of what is left, block by block.
  Masses masses(const Left& left, double sought) {
    sums_.resize(most_.size());
    for (size_t b = 0; b < most_.size(); ++b) sums_[b] = most_[b] < left.threshold || most_[b] == kNothing ? 0.0 : weigh(b, left);
    return find(sought);
  }

  // Turns a block into weights, and returns their sum.
  double weigh(int64_t b, const Left& left) {
    read_scaled(b);
    const Vec greatest = splat(greatest_), threshold = splat(left.threshold);
    Vec sum{};
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec x = load(block_ + i), e = exp_nonpositive(x - greatest);
      const IntVec ids = lanes() + static_cast<int32_t>(b * kBlock + i);
      const Vec kept = (x > threshold) | ((x == threshold) & (ids <= left.last_id)) ? e : Vec{};
      store(block_ + i, kept);
      sum += kept;
    }
    double total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    return total;
  }

  static IntVec lanes() {
    IntVec out;
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = lane;
    return out;
  }

  Masses find(double share) const {
    double total = 0;
    for (const double sum : sums_) total += sum;
    Masses found{total, 0, 0};
    double before = 0;
    for (size_t b = 0; b < sums_.size(); ++b) {
      if (sums_[b] == 0) continue;
      found.block = static_cast<int64_t>(b), found.before = before;
      before += sums_[b];
      if (before > share * total) break;
    }
    return found;
  }

  // The first token at which the sum of weights is above the number's share of the whole.
  int32_t draw(const Left& left, double number) {
    const Masses found = masses(left, number);
    weigh(found.block, left);
    double sum = found.before;
    int32_t token = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      if (block_[i] == 0) continue;
      token = static_cast<int32_t>(found.block * kBlock + i);
      sum += block_[i];
      if (sum > number * found.total) break;
    }
    return token;
  }

  const T* logits_;
  int64_t vocab_;
  const uint32_t* bits_;
  int64_t words_;
  const Params& params_;
  std::vector<float>& most_;
  std::vector<double> sums_;
  float greatest_ = kNothing, temperature_ = 1.0f;
  bool broken_ = false;
  alignas(64) float block_[kBlock];
};

}  // namespace

// logits: [m, vocab]. rows, positions: [m]. masks: [k, words], each of the row of logits that `masked_at` [k] says; k may be 0.
extern "C" void penstock_sample(int dtype, const void* logits, int64_t m, int64_t vocab, const int32_t* rows, const int32_t* positions,
                                const void* params, const int64_t* masked_at, int64_t k, const uint32_t* masks, int64_t words, int masked,
                                void* results, float* thresholds, int32_t* last_ids) {
  std::vector<float> most;
  std::vector<const uint32_t*> bits(m, nullptr);
  for (int64_t i = 0; i < k; ++i) bits[masked_at[i]] = masks + i * words;
  const auto run = [&](const auto* of) {
    for (int64_t i = 0; i < m; ++i) {
      Row row(of + i * vocab, vocab, bits[i], words, masked != 0, static_cast<const Params*>(params)[rows[i]], most);
      Left left;
      static_cast<Result*>(results)[i] = row.sample(static_cast<uint32_t>(positions[i]), masked != 0, &left);
      thresholds[i] = left.threshold, last_ids[i] = left.last_id;
    }
  };
  if (dtype == 0)
    run(static_cast<const float*>(logits));
  else
    run(static_cast<const BFloat16*>(logits));
}
