// Distributes a loop over XLA's own thread pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jof {

// How a loop is divided.
struct Grain {
  int64_t range;  // the fewest iterations of a range
  int64_t least;  // a loop of fewer iterations runs on the calling thread
  Grain(int64_t range) : Grain(range, range + 1) {}
  Grain(int64_t range, int64_t least) : range(range), least(least) {}
};

// Calls body(begin, end) for disjoint ranges that cover [0, n), on the calling thread and on the
// pool's. Only the last range may have fewer iterations than the grain says.
//
// The caller takes ranges too. It waits only for ranges that a thread has taken, never for a task
// to be scheduled: the pool's threads may all be blocked in handlers like this one.
//
// A sleeping thread needs 20 to 50 us to wake up, a third of a typical call. Hence there are many
// small ranges, which a thread that arrives late can still share, and the caller polls for about as
// long before it goes to sleep.
//
// Each thread starts with its own section of the loop, the caller with the first, and then helps
// with the other sections. So a thread mostly finds in its cache what it wrote in the previous call
// (relu of 4 MB takes 49 us, but 70 us if ranges go to the next free thread).
template <typename ThreadPool, typename Body>
void ParallelFor(ThreadPool& pool, int64_t n, const Grain& grain, const Body& body) {
  if (n <= 0) return;
  constexpr int64_t kRangesPerThread = 16;
  constexpr int kLooks = 200;
  const int64_t threads = pool.num_threads();
  const int64_t even = (n + kRangesPerThread * threads - 1) / (kRangesPerThread * threads);
  const int64_t range = grain.range > even ? grain.range : even;
  const int64_t ranges = (n + range - 1) / range;
  if (n < grain.least || ranges == 1 || threads <= 1) return body(0, n);

  const int64_t workers = ranges < threads ? ranges : threads;

  struct alignas(64) Section {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  struct Shared {
    explicit Shared(int64_t workers) : sections(static_cast<size_t>(workers)) {}
    std::vector<Section> sections;
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto shared = std::make_shared<Shared>(workers);
  for (int64_t w = 0; w < workers; ++w) {
    shared->sections[static_cast<size_t>(w)].next = w * ranges / workers;
    shared->sections[static_cast<size_t>(w)].end = (w + 1) * ranges / workers;
  }
  // A task that starts late finds no range left. It must not touch `body`, which no longer exists.
  const auto work = [shared, n, range, ranges, workers, body_pointer = &body](int64_t worker) {
    int64_t finished = 0;
    for (int64_t k = 0; k < workers; ++k) {
      Section& section = shared->sections[static_cast<size_t>((worker + k) % workers)];
      for (int64_t i; (i = section.next.fetch_add(1)) < section.end; ++finished) {
        const int64_t end = (i + 1) * range < n ? (i + 1) * range : n;
        (*body_pointer)(i* range, end);
      }
    }
    if (finished == 0 || shared->done.fetch_add(finished) + finished < ranges) return;
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->all_done.notify_all();
  };
  for (int64_t w = 1; w < workers; ++w) pool.Schedule([work, w] { work(w); });
  work(0);
  const auto is_done = [&] { return shared->done.load() == ranges; };
  for (int i = 0; i < kLooks && !is_done(); ++i) std::this_thread::yield();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, is_done);
}

}  // namespace jof
