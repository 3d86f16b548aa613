// sanitizers: address thread
// ParallelFor covers every iteration exactly once, even if the pool's threads never run.
#include "cpu/parallel.h"

#include <functional>
#include <thread>
#include <vector>

#include "check.h"

// Runs each task on its own thread.
struct ThreadPerTask {
  std::vector<std::thread> threads;
  int64_t count;
  int64_t num_threads() const { return count; }
  template <typename F>
  void Schedule(F&& f) {
    threads.emplace_back(std::forward<F>(f));
  }
  ~ThreadPerTask() {
    for (auto& thread : threads) thread.join();
  }
};

// Runs tasks only after the loop has returned, like a pool whose threads are all busy.
struct BusyPool {
  std::vector<std::function<void()>> tasks;
  int64_t num_threads() const { return 4; }
  template <typename F>
  void Schedule(F&& f) {
    tasks.emplace_back(std::forward<F>(f));
  }
  ~BusyPool() {
    for (auto& task : tasks) task();
  }
};

template <typename Pool>
void TestCoverage(Pool&& pool, int64_t n, const jof::Grain& grain) {
  std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
  jof::ParallelFor(pool, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
  });
  for (int64_t i = 0; i < n; ++i) {
    JOF_CHECK(hits[static_cast<size_t>(i)] == 1, "iteration %ld of %ld ran %d times", long(i),
              long(n), hits[static_cast<size_t>(i)].load());
  }
}

// A loop that is too short for several threads schedules nothing.
void TestShortLoop() {
  BusyPool pool;
  int64_t covered = 0;
  const auto count = [&](int64_t begin, int64_t end) { covered += end - begin; };
  jof::ParallelFor(pool, 49, jof::Grain(3, 50), count);
  JOF_CHECK(covered == 49 && pool.tasks.empty(), "%ld tasks", long(pool.tasks.size()));
  jof::ParallelFor(pool, 50, jof::Grain(3, 50), count);
  JOF_CHECK(!pool.tasks.empty(), "a loop of %d iterations ran on one thread", 50);
}

int main() {
  TestShortLoop();
  for (const int64_t n : {0, 1, 2, 7, 64, 1000}) {
    for (const jof::Grain grain :
         {jof::Grain(1), jof::Grain(3), jof::Grain(100), jof::Grain(5000), jof::Grain(3, 50)}) {
      for (const int64_t threads : {1, 2, 5}) TestCoverage(ThreadPerTask{{}, threads}, n, grain);
      TestCoverage(BusyPool{}, n, grain);
    }
  }
}
