// Drafts from what was said before: of each row the tokens that followed where its last tokens stood earlier.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

namespace {

constexpr int32_t kNone = -1;     // pads drafts, and stands between sequences of a history
constexpr int64_t kFound = 64;    // places that vote on what follows
constexpr int64_t kSought = 256;  // places of a history that are compared

// found[j]: how many tokens up to the last but j-th equal those up to the last one, at most `longest` (Gusfield's Z, from the right).
void common_suffixes(const int32_t* tokens, int64_t size, int64_t longest, std::vector<int32_t>& found) {
  found.assign(size, 0);
  const auto at = [&](int64_t from_end) { return tokens[size - 1 - from_end]; };
  int64_t left = 0, right = 0;
  for (int64_t j = 1; j < size; ++j) {
    int64_t same = j < right ? std::min<int64_t>(right - j, found[j - left]) : 0;
    if (j + same >= right) {
      while (j + same < size && at(same) == at(j + same)) ++same;
      left = j;
      right = j + same;
    }
    found[j] = static_cast<int32_t>(same);
  }
  for (auto& same : found) same = static_cast<int32_t>(std::min<int64_t>(same, longest));
}

struct Draft {
  std::vector<int32_t> tokens;
  double score = 0;
};

// The tokens that most of the places go on with, as long as they are likely enough. `next(place, i)` is the i-th token after one.
template <typename Next>
Draft vote(std::vector<int64_t>& places, int64_t most, double min_probability, const Next& next) {
  struct Votes {
    int32_t token;
    int64_t count;
  };
  Draft draft;
  double probability = 1;
  std::vector<Votes> votes;  // few: at most one of each place, the latest first
  for (int64_t i = 0; i < most && !places.empty(); ++i) {
    votes.clear();
    for (const int64_t place : places) {
      const int32_t token = next(place, i);
      if (token == kNone) continue;
      auto of = std::find_if(votes.begin(), votes.end(), [&](const Votes& other) { return other.token == token; });
      if (of == votes.end()) of = votes.insert(of, {token, 0});
      ++of->count;
    }
    if (votes.empty()) break;
    // Of equally frequent ones the one whose latest place is latest.
    const auto best = *std::max_element(votes.begin(), votes.end(), [](const Votes& a, const Votes& b) { return a.count < b.count; });
    probability *= static_cast<double>(best.count) / static_cast<double>(places.size());
    if (probability < min_probability) break;
    draft.tokens.push_back(best.token);
    draft.score += probability;
    places.erase(std::remove_if(places.begin(), places.end(), [&](int64_t place) { return next(place, i) != best.token; }), places.end());
  }
  return draft;
}

// The outputs of requests that ended, the latest of them, and where each run of `kIndexed` tokens ends in them (chains, as LZ77 has).
class History {
 public:
  History(int64_t max_sequences, int64_t capacity, int64_t depth)
      : max_sequences_(max_sequences), capacity_(capacity), depth_(depth), kept_(room(capacity)), latest_(kBuckets, -1) {}

  void add(const int32_t* tokens, int64_t size) {
    if (size + 1 > capacity_) {
      tokens += size + 1 - capacity_;
      size = capacity_ - 1;
    }
    begins_.push_back(end_);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t place = end_++;
      at(place) = {tokens[i], 0};
      if (i + 1 < kIndexed) continue;
      int64_t& latest = latest_[bucket(tokens + i)];
      if (latest >= 0 && place - latest < capacity_) at(place).back = static_cast<uint32_t>(place - latest);
      latest = place;
    }
    at(end_++) = {};
    if (static_cast<int64_t>(begins_.size()) > max_sequences_) begins_.pop_front();
    while (!begins_.empty() && begins_.front() < end_ - capacity_) begins_.pop_front();
  }

  Draft propose(const int32_t* tokens, int64_t size, int64_t most, double factor, double min_probability) const {
    if (size < kIndexed || begins_.empty()) return {};
    const int64_t first = begins_.front();
    std::vector<int64_t> places;
    int64_t longest = kIndexed, place = latest_[bucket(tokens + size - 1)];
    for (int64_t sought = 0; place >= first && sought < kSought; ++sought) {
      const int64_t same = common(tokens, size, place, first);
      if (same > longest) places.clear();
      longest = std::max(longest, same);
      if (same == longest && static_cast<int64_t>(places.size()) < kFound) places.push_back(place);
      const uint32_t back = at(place).back;
      if (back == 0) break;
      place -= back;
    }
    most = std::min(most, static_cast<int64_t>(factor * static_cast<double>(longest)));
    return vote(places, most, min_probability, [&](int64_t place, int64_t i) {
      // Nothing follows a sequence's end, nor the end of all.
      return place + 1 + i < end_ ? token(place + 1 + i) : kNone;
    });
  }

 private:
  static constexpr int64_t kIndexed = 3;
  static constexpr int64_t kBuckets = 1 << 18;

  static int64_t bucket(const int32_t* last) {
    uint64_t mixed = 0;
    for (int64_t i = 0; i < kIndexed; ++i) mixed = (mixed ^ static_cast<uint32_t>(last[-i])) * 0x9E3779B97F4A7C15ull;
    return static_cast<int64_t>(mixed >> 46);
  }
  // A power of two, so that a place is found without a division.
  static size_t room(int64_t capacity) {
    size_t size = 1;
    while (size < static_cast<size_t>(capacity)) size *= 2;
    return size;
  }
  struct Kept {
    int32_t token = kNone;
    uint32_t back = 0;  // how far the last three tokens' earlier place is; 0: there is none
  };
  Kept& at(int64_t place) { return kept_[place & (kept_.size() - 1)]; }
  const Kept& at(int64_t place) const { return kept_[place & (kept_.size() - 1)]; }
  int32_t token(int64_t place) const { return at(place).token; }

  // No token of a request equals what stands between sequences, so that a run never crosses one.
  int64_t common(const int32_t* tokens, int64_t size, int64_t place, int64_t first) const {
    int64_t same = 0;
    while (same < depth_ && same < size && place - same >= first && token(place - same) == tokens[size - 1 - same]) ++same;
    return same;
  }

  int64_t max_sequences_, capacity_, depth_, end_ = 0;
  std::vector<Kept> kept_;
  std::vector<int64_t> latest_;
  std::deque<int64_t> begins_;
};

// What the row's own tokens say.
Draft propose_own(const int32_t* tokens, int64_t size, int64_t depth, int64_t most, double factor, double min_probability,
                  std::vector<int32_t>& scratch) {
  common_suffixes(tokens, size, depth, scratch);
  int32_t longest = 0;
  for (const int32_t same : scratch) longest = std::max(longest, same);
  if (longest == 0) return {};
  std::vector<int64_t> places;
  for (int64_t j = 1; j < size && static_cast<int64_t>(places.size()) < kFound; ++j) {
    if (scratch[j] == longest) places.push_back(size - 1 - j);
  }
  most = std::min(most, static_cast<int64_t>(factor * static_cast<double>(longest)));
  return vote(places, most, min_probability, [&](int64_t place, int64_t i) { return place + 1 + i < size ? tokens[place + 1 + i] : kNone; });
}

}  // namespace

extern "C" {

void penstock_ngram_drafts(const int32_t* token_ids, int64_t stride, const int32_t* rows, const int32_t* lengths, int64_t count,
                           int64_t shortest, int64_t longest, int64_t most, int32_t* drafts) {
  std::vector<int32_t> found;
  for (int64_t r = 0; r < count; ++r) {
    const int32_t* tokens = token_ids + rows[r] * stride;
    int32_t* out = drafts + r * most;
    std::fill(out, out + most, kNone);
    common_suffixes(tokens, lengths[r], longest, found);
    int64_t best = 0;
    for (int64_t j = 1; j < lengths[r]; ++j) {
      if (found[j] >= shortest && (best == 0 || found[j] >= found[best])) best = j;  // of equally long ones the earliest place
    }
    if (best > 0) std::copy_n(tokens + lengths[r] - best, std::min(best, most), out);
  }
}

void* penstock_suffix_new(int64_t max_sequences, int64_t capacity, int64_t depth) { return new History(max_sequences, capacity, depth); }

void penstock_suffix_free(void* history) { delete static_cast<History*>(history); }

void penstock_suffix_add(void* history, const int32_t* tokens, int64_t size) { static_cast<History*>(history)->add(tokens, size); }

void penstock_suffix_drafts(const void* history, const int32_t* token_ids, int64_t stride, const int32_t* rows, const int32_t* lengths,
                            int64_t count, int64_t depth, int64_t most, double factor, double min_probability, int32_t* drafts) {
  std::vector<int32_t> scratch;
  for (int64_t r = 0; r < count; ++r) {
    const int32_t* tokens = token_ids + rows[r] * stride;
    int32_t* out = drafts + r * most;
    std::fill(out, out + most, kNone);
    const Draft own = propose_own(tokens, lengths[r], depth, most, factor, min_probability, scratch);
    const Draft others = static_cast<const History*>(history)->propose(tokens, lengths[r], most, factor, min_probability);
    const Draft& best = others.score > own.score ? others : own;
    std::copy(best.tokens.begin(), best.tokens.end(), out);
  }
}

}  // extern "C"
