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

  void push(std::function<void()> step) {
    const std::scoped_lock lock(mutex);
    work.push_back(std::move(step));
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
    return true;
  }
  void finish() {
    while (step()) {
    }
  }
};
