// What the ranks of a tensor-parallel group tell each other, through memory that their processes share.
//
// The memory holds, in lines of 64 bytes: a control line; a mark for each rank; a header for each rank and each of two buffers; then, from
// `data` on, the slots in the same order. A rank copies a piece of its message to its slot, counts its mark up, and waits until every other
// mark has come as far. Buffers take turns: when a rank writes one again, every rank has read what was there, or its mark would be behind.
//
// Partial sums are added in float32 and in the order of ranks, whatever the size of the message, and rounded once: every rank has the same
// bits, and a row's bits do not depend on the rows beside it.
//
// Where a group spans nodes, each node has such a memory with a place for every rank. A rank that has published a piece also writes it to a
// wire to each other node, where a thread (`penstock_receive`) puts it into that node's memory and counts the mark up, as if the rank had
// done so there. Sums are the same operations on the same bytes. A buffer is free when the next piece for it arrives: its sender has seen
// the mark of every rank here go beyond the piece that was in it.
//
// Nothing here throws: the first thing that goes wrong is kept in `Group::error`, and every call after it returns at once.

#include <algorithm>
#include <atomic>
#include <climits>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "vector.h"

namespace penstock {

struct Half {
  uint16_t bits;
};

inline float widen(Half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x0400u) return bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return bit_cast<float>(sign | bit_cast<uint32_t>(small));
}

// To nearest, ties to even.
inline void narrow(float x, Half* out) {
  const uint32_t all = bit_cast<uint32_t>(x), sign = (all >> 16) & 0x8000u, bits = all & 0x7fffffffu;
  if (bits > 0x7f800000u) {
    out->bits = static_cast<uint16_t>(sign | 0x7e00u);
  } else if (bits >= 0x477ff000u) {
    out->bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (bits >= 0x38800000u) {
    out->bits = static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13));
  } else {
    // The addition rounds to a multiple of 2^-24, the least that there is.
    const float placed = bit_cast<float>(bits) + 0.5f;
    out->bits = static_cast<uint16_t>(sign | (bit_cast<uint32_t>(placed) - 0x3f000000u));
  }
}

}  // namespace penstock

namespace {

using namespace penstock;

constexpr int64_t kSliceNs = 20'000'000;  // between two looks at whether the group has failed
constexpr int64_t kTile = 512;            // elements that are added at a time

enum Kind : int32_t { kAllReduce, kAllGather, kBroadcast, kBarrier, kGatherParts };
enum Error : int32_t { kNone, kTimeout, kMismatch, kFailed };

struct alignas(64) Control {
  std::atomic<uint32_t> failed;  // 1 + the rank that has failed; 0: none has
};

struct alignas(64) Mark {
  std::atomic<uint32_t> number;   // of pieces that the rank has published
  std::atomic<uint32_t> waiters;  // ranks that sleep until it changes
  std::atomic<uint64_t> calls;    // that the rank has begun
  std::atomic<uint64_t> ns;       // that they have taken, the wait for other ranks included
};

struct alignas(64) Header {
  int64_t bytes;  // of the whole message
  int32_t kind, dtype;
};

static_assert(sizeof(Control) == 64 && sizeof(Mark) == 64 && sizeof(Header) == 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// A socket to a node, and the rank that reads it there.
struct Wire {
  int32_t fd, rank;
};

// What stands before a piece on a wire. All nodes have the same byte order.
struct WireHead {
  int64_t bytes, size;  // of the whole message, and of this piece
  int32_t kind, dtype;
  uint32_t number;
  int32_t rank;
};

// One process's view; `native.py` has the same fields.
struct Group {
  char* memory;
  int64_t data, slot_bytes, timeout_ns, spin_ns;
  int32_t rank, world;
  uint32_t number;
  int32_t error, error_rank;
  int32_t own_kind, other_kind, own_dtype, other_dtype;
  int64_t own_bytes, other_bytes;
  const Wire* wires;
  int64_t num_wires;

  Control& control() const { return *reinterpret_cast<Control*>(memory); }
  Mark& mark(int32_t of) const { return reinterpret_cast<Mark*>(memory + 64)[of]; }
  Header& header(int32_t of, uint32_t buffer) const { return reinterpret_cast<Header*>(memory + 64 * (1 + world))[2 * of + buffer]; }
  char* slot(int32_t of, uint32_t buffer) const { return memory + data + (2 * of + buffer) * slot_bytes; }
};

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The futexes are shared among processes: no private ones.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value, int64_t ns) {
#if defined(__linux__)
  const timespec limit{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
#else
  sched_yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Keeps an error, and tells the other ranks which one has failed, unless they have been told of another.
void fail(Group& group, Error error, int32_t rank) {
  uint32_t nobody = 0;
  group.error = error;
  group.error_rank = rank;
  group.control().failed.compare_exchange_strong(nobody, static_cast<uint32_t>(rank) + 1);
  for (int32_t of = 0; of < group.world; ++of) wake_all(group.mark(of).number);
}

// Waits until a rank has published so many pieces.
bool await(Group& group, int32_t rank, uint32_t number) {
  Mark& mark = group.mark(rank);
  const auto there = [&](uint32_t value) { return static_cast<int32_t>(value - number) >= 0; };
  if (there(mark.number.load(std::memory_order_acquire))) return true;
  const int64_t began = now_ns();
  do {
    for (int i = 0; i < 32; ++i) {
      if (there(mark.number.load(std::memory_order_acquire))) return true;
      pause_cpu();
    }
  } while (now_ns() - began < group.spin_ns);
  for (;;) {
    mark.waiters.fetch_add(1);
    const uint32_t value = mark.number.load();
    if (!there(value)) sleep_while(mark.number, value, kSliceNs);
    mark.waiters.fetch_sub(1);
    if (there(mark.number.load(std::memory_order_acquire))) return true;
    if (const uint32_t failed = group.control().failed.load()) {
      fail(group, kFailed, static_cast<int32_t>(failed) - 1);
      return false;
    }
    if (now_ns() - began > group.timeout_ns) {
      fail(group, kTimeout, rank);
      return false;
    }
  }
}

// Writes to a socket; 0, or what went wrong.
int write_all(int32_t fd, iovec* parts, size_t count) {
  while (count) {
    msghdr message{};
    message.msg_iov = parts, message.msg_iovlen = count;
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno;
    while (count && sent >= static_cast<ssize_t>(parts->iov_len)) sent -= parts->iov_len, ++parts, --count;
    if (count) parts->iov_base = static_cast<char*>(parts->iov_base) + sent, parts->iov_len -= sent;
  }
  return 0;
}

// Reads so many bytes from a socket; false at its end.
bool read_all(int32_t fd, void* to, int64_t size) {
  char* at = static_cast<char*>(to);
  while (size) {
    const ssize_t got = recv(fd, at, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got, size -= got;
  }
  return true;
}

// Sends a piece to the other nodes. Where a rank there is gone nothing is said here: its node tells the core, which knows more.
bool publish(Group& group, const Header& header, uint32_t number, char* slot, int64_t size) {
  for (int64_t i = 0; i < group.num_wires; ++i) {
    WireHead head{header.bytes, size, header.kind, header.dtype, number, group.rank};
    iovec parts[] = {{&head, sizeof(head)}, {slot, static_cast<size_t>(size)}};
    const int error = write_all(group.wires[i].fd, parts, size ? 2 : 1);
    if (error == EAGAIN || error == EWOULDBLOCK) {
      fail(group, kTimeout, group.wires[i].rank);
      return false;
    }
  }
  return true;
}

// Whether all ranks say the same thing in this piece.
bool agree(Group& group, uint32_t buffer) {
  const Header& own = group.header(group.rank, buffer);
  for (int32_t rank = 0; rank < group.world; ++rank) {
    const Header& other = group.header(rank, buffer);
    if (other.bytes == own.bytes && other.kind == own.kind && other.dtype == own.dtype) continue;
    group.own_kind = own.kind, group.own_dtype = own.dtype, group.own_bytes = own.bytes;
    group.other_kind = other.kind, group.other_dtype = other.dtype, group.other_bytes = other.bytes;
    fail(group, kMismatch, rank);
    return false;
  }
  return true;
}

// A message in pieces. `write(slot, at, size)` fills the rank's slot; `read(buffer, at, size)` takes what all ranks have written.
template <typename Write, typename Read>
void exchange(Group& group, Kind kind, int32_t dtype, int64_t bytes, const Write& write, const Read& read) {
  if (group.error) return;
  Mark& mark = group.mark(group.rank);
  mark.calls.fetch_add(1, std::memory_order_relaxed);
  const int64_t began = now_ns();
  int64_t at = 0;
  do {
    const int64_t size = std::min(bytes - at, group.slot_bytes);
    const uint32_t number = ++group.number, buffer = number & 1;
    write(group.slot(group.rank, buffer), at, size);
    Header& header = group.header(group.rank, buffer);
    header.bytes = bytes, header.kind = kind, header.dtype = dtype;
    mark.number.store(number);
    if (mark.waiters.load()) wake_all(mark.number);
    if (!publish(group, header, number, group.slot(group.rank, buffer), size)) return;
    for (int32_t rank = 0; rank < group.world; ++rank)
      if (rank != group.rank && !await(group, rank, number)) return;
    if (!agree(group, buffer)) return;
    read(buffer, at, size);
    at += size;
  } while (at < bytes);
  mark.ns.fetch_add(now_ns() - began, std::memory_order_relaxed);
}

template <typename T>
void add(float* sum, const T* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += widen(values[i]);
}

template <typename T>
void add_ranks(const Group& group, uint32_t buffer, T* out, int64_t count) {
  float sum[kTile];
  for (int64_t at = 0; at < count; at += kTile) {
    const int64_t size = std::min(kTile, count - at);
    const T* first = reinterpret_cast<const T*>(group.slot(0, buffer)) + at;
    for (int64_t i = 0; i < size; ++i) sum[i] = widen(first[i]);
    for (int32_t rank = 1; rank < group.world; ++rank) add(sum, reinterpret_cast<const T*>(group.slot(rank, buffer)) + at, size);
    for (int64_t i = 0; i < size; ++i) narrow(sum[i], out + at + i);
  }
}

template <typename T>
void all_reduce(Group& group, int32_t dtype, const void* in, void* out, int64_t count) {
  exchange(
      group, kAllReduce, dtype, count * static_cast<int64_t>(sizeof(T)),
      [&](char* slot, int64_t at, int64_t size) { std::memcpy(slot, static_cast<const char*>(in) + at, size); },
      [&](uint32_t buffer, int64_t at, int64_t size) {
        add_ranks(group, buffer, reinterpret_cast<T*>(static_cast<char*>(out) + at), size / static_cast<int64_t>(sizeof(T)));
      });
}

}  // namespace

extern "C" {

// [count] of each rank → their sum. `out` may be `in`. dtype: 0 is float32, 1 is bfloat16, 2 is float16.
void penstock_all_reduce(int dtype, void* group, const void* in, void* out, int64_t count) {
  Group& view = *static_cast<Group*>(group);
  switch (dtype) {
    case 0: return all_reduce<float>(view, dtype, in, out, count);
    case 1: return all_reduce<BFloat16>(view, dtype, in, out, count);
    case 2: return all_reduce<Half>(view, dtype, in, out, count);
  }
}

// [rows, row_bytes] of each rank → [rows, ranks · row_bytes].
void penstock_all_gather(int dtype, void* group, const void* in, void* out, int64_t rows, int64_t row_bytes) {
  Group& view = *static_cast<Group*>(group);
  exchange(
      view, kAllGather, dtype, rows * row_bytes,
      [&](char* slot, int64_t at, int64_t size) { std::memcpy(slot, static_cast<const char*>(in) + at, size); },
      [&](uint32_t buffer, int64_t at, int64_t size) {
        for (int32_t rank = 0; rank < view.world; ++rank) {
          const char* slot = view.slot(rank, buffer);
          for (int64_t done = 0; done < size;) {
            const int64_t row = (at + done) / row_bytes, column = (at + done) % row_bytes, part = std::min(row_bytes - column, size - done);
            std::memcpy(static_cast<char*>(out) + (row * view.world + rank) * row_bytes + column, slot + done, part);
            done += part;
          }
        }
      });
}

// The root's bytes, on all ranks.
void penstock_broadcast(void* group, void* data, int64_t bytes, int32_t root) {
  Group& view = *static_cast<Group*>(group);
  exchange(
      view, kBroadcast, root, bytes,
      [&](char* slot, int64_t at, int64_t size) {
        if (view.rank == root) std::memcpy(slot, static_cast<const char*>(data) + at, size);
      },
      [&](uint32_t buffer, int64_t at, int64_t size) {
        if (view.rank != root) std::memcpy(static_cast<char*>(data) + at, view.slot(root, buffer), size);
      });
}

// `sizes[rank]` bytes of each rank, as many as it wants → of each, the bytes from `from[rank]` to `to[rank]`, one rank's behind another's.
void penstock_gather_parts(void* group, const void* in, void* out, const int64_t* sizes, const int64_t* from, const int64_t* to) {
  Group& view = *static_cast<Group*>(group);
  const int64_t most = *std::max_element(sizes, sizes + view.world);
  exchange(
      view, kGatherParts, 0, most,
      [&](char* slot, int64_t at, int64_t size) {
        const int64_t own = std::min(size, sizes[view.rank] - at);
        if (own > 0) std::memcpy(slot, static_cast<const char*>(in) + at, own);
      },
      [&](uint32_t buffer, int64_t at, int64_t size) {
        char* part = static_cast<char*>(out);
        for (int32_t rank = 0; rank < view.world; ++rank) {
          const int64_t first = std::max(at, from[rank]), last = std::min(at + size, to[rank]);
          if (first < last) std::memcpy(part + (first - from[rank]), view.slot(rank, buffer) + (first - at), last - first);
          part += to[rank] - from[rank];
        }
      });
}

// Returns when every rank has called it.
void penstock_barrier(void* group) {
  exchange(*static_cast<Group*>(group), kBarrier, 0, 0, [](char*, int64_t, int64_t) {}, [](uint32_t, int64_t, int64_t) {});
}

// Takes in what ranks of another node publish, until they close the socket. Returns 0 then, and 1 where it makes no sense.
int32_t penstock_receive(void* group, int32_t fd) {
  Group& view = *static_cast<Group*>(group);
  WireHead head;
  while (read_all(fd, &head, sizeof(head))) {
    if (head.rank < 0 || head.rank >= view.world || head.size < 0 || head.size > view.slot_bytes) return 1;
    const uint32_t buffer = head.number & 1;
    if (!read_all(fd, view.slot(head.rank, buffer), head.size)) return 0;
    Header& header = view.header(head.rank, buffer);
    header.bytes = head.bytes, header.kind = head.kind, header.dtype = head.dtype;
    Mark& mark = view.mark(head.rank);
    mark.number.store(head.number);
    if (mark.waiters.load()) wake_all(mark.number);
  }
  return 0;
}

// Tells all ranks that one of them has failed.
void penstock_fail(void* group, int32_t rank) { fail(*static_cast<Group*>(group), kFailed, rank); }

}  // extern "C"
