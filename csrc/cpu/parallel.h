// Spreads a loop over XLA's own thread pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jof {

// Calls body(begin, end) for disjoint ranges that cover [0, n), on the calling thread and on the
// pool's. Ranges have at least `grain` iterations; a loop of one range stays on the calling thread.
//
// The caller takes ranges too and waits only for ranges that somebody has taken, never for a task
// to be scheduled: the pool's threads may all be blocked in handlers like this one.
//
// A sleeping thread needs 20 to 50 us to wake up, as long as a third of a typical call. Hence many
// small ranges, which a thread that arrives late can still share, and a caller that looks out for
// the last one for about as long before it goes to sleep.
//
// Each thread begins with a section of the loop of its own, the caller with the first, and helps
// out in the others' later: from call to call a thread mostly finds in its cache what it has
// written there (relu of 4 MB in 49 us, 70 where ranges go to whoever comes).
template <typename ThreadPool, typename Body>
void ParallelFor(ThreadPool& pool, int64_t n, int64_t grain, const Body& body) {
  if (n <= 0) return;
  constexpr int64_t kRangesPerThread = 16;
  constexpr int kLooks = 200;
  const int64_t threads = pool.num_threads();
  const int64_t even = (n + kRangesPerThread * threads - 1) / (kRangesPerThread * threads);
  const int64_t range = grain > even ? grain : even;
  const int64_t ranges = (n + range - 1) / range;
  if (ranges == 1 || threads <= 1) return body(0, n);

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
  // A task that starts late finds no range left, and must not touch `body`, which is gone by then.
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
