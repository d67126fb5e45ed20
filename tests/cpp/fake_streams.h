// Streams of the stand-in for the CUDA library: what is enqueued runs when the test says so.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

struct FakeQueue {
  int device = 0;
  std::mutex mutex;
  std::deque<std::function<void()>> work;
  int64_t enqueued = 0, done = 0;
  bool capturing = false;  // into a CUDA graph: no event may be queried

  void push(std::function<void()> step) {
    const std::scoped_lock lock(mutex);
    work.push_back(std::move(step));
    ++enqueued;
  }
  // False when there is nothing to do.
  bool step() {
    std::function<void()> next;
    {
      const std::scoped_lock lock(mutex);
      if (work.empty()) return false;
      next = std::move(work.front());
      work.pop_front();
    }
    next();
    const std::scoped_lock lock(mutex);
    ++done;
    return true;
  }
  void finish() {
    while (step()) {
    }
  }
};
