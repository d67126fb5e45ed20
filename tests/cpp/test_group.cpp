// Groups whose processes are threads of this program: framing, agreement, errors on every rank.
#include "../../custom_ops/comm/group.h"

#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "check.h"

using namespace bnexport::comm;

namespace {

// Gathers by meeting in shared memory; ranks that send different sizes fail the test, since real
// transports would abort.
class Meeting {
 public:
  explicit Meeting(int64_t size) : sent_(static_cast<size_t>(size)), size_(size) {}

  void gather(int64_t rank, const double* send, double* receive, int64_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    sent_[static_cast<size_t>(rank)].assign(send, send + count);
    ++collectives_;
    meet(lock);
    for (const auto& row : sent_) {
      CHECK(static_cast<int64_t>(row.size()) == count);
      for (const double value : row) *receive++ = value;
    }
    meet(lock);
  }
  int64_t collectives() const { return collectives_ / size_; }

 private:
  void meet(std::unique_lock<std::mutex>& lock) {
    const int64_t round = round_;
    if (++waiting_ == size_) {
      waiting_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round; });
    }
  }
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::vector<std::vector<double>> sent_;
  int64_t size_, waiting_ = 0, round_ = 0, collectives_ = 0;
};

struct Seat {
  Meeting* meeting;
  int64_t rank;
};

int gather(void* context, const double* send, double* receive, int64_t count, char*, size_t) {
  const auto* seat = static_cast<const Seat*>(context);
  seat->meeting->gather(seat->rank, send, receive, count);
  return 0;
}

int fail(void*, const double*, double*, int64_t, char* error, size_t capacity) {
  std::snprintf(error, capacity, "the peer is gone");
  return 1;
}

template <class Body>
void on_every_rank(int64_t size, const Body& body) {
  Meeting meeting(size);
  std::vector<std::thread> ranks;
  ranks.reserve(static_cast<size_t>(size));
  for (int64_t rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      Seat seat{&meeting, rank};
      body(Group("threads", size, rank, gather, &seat), rank);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

std::vector<double> row_of(int64_t rank, size_t width) {
  std::vector<double> row(width);
  for (size_t i = 0; i < width; ++i) row[i] = static_cast<double>(rank) * 1e6 + static_cast<double>(i);
  return row;
}

void test_rows_arrive_in_rank_order() {
  for (const size_t width : {1, 3, 129, 4211, 4212, 4213, 9001}) {
    on_every_rank(3, [&](const Group& group, int64_t rank) {
      Header header;
      header.channels = static_cast<int64_t>(width / 2);
      const std::vector<double> rows = group.exchange(header, row_of(rank, width));
      CHECK(rows.size() == 3 * width);
      for (int64_t r = 0; r < 3; ++r) {
        const std::vector<double> expected = row_of(r, width);
        for (size_t i = 0; i < width; ++i) CHECK(rows[static_cast<size_t>(r) * width + i] == expected[i]);
      }
    });
  }
}

void test_disagreement() {
  const auto disagree = [](const char* expected, const auto& change, size_t extra) {
    on_every_rank(2, [&](const Group& group, int64_t rank) {
      Header header;
      header.node = "bn1";
      if (rank == 1) change(header);
      try {
        group.exchange(header, std::vector<double>(rank == 1 ? 3 + extra : 3));
        CHECK(!"an exchange that must fail");
      } catch (const GroupError& error) {
        check(std::string(error.what()).find(expected) != std::string::npos, __FILE__, __LINE__, error.what());
      }
    });
  };
  disagree("number of channels", [](Header& header) { header.channels = 5; }, 0);
  disagree("data type", [](Header& header) { header.dtype = 2; }, 0);
  disagree("stats_mode", [](Header& header) { header.stats_mode = 1; }, 0);
  disagree("node name", [](Header& header) { header.node = "bn2"; }, 0);
  disagree("direction", [](Header& header) { header.backward = true; }, 0);
  disagree("row size", [](Header&) {}, 10000);
}

void test_failure() {
  try {
    Group("broken", 2, 1, fail, nullptr).exchange({}, {1, 2, 3});
    CHECK(!"an exchange that must fail");
  } catch (const GroupError& error) {
    const std::string message = error.what();
    CHECK(message.find("group 'broken', rank 1 of 2") != std::string::npos);
    CHECK(message.find("the peer is gone") != std::string::npos);
  }
}

void test_registry() {
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      const std::string name = "group" + std::to_string(i);
      for (int round = 0; round < 200; ++round) {
        add_group(name, std::make_shared<const Group>(name, 2, 0, fail, nullptr));
        CHECK(find_group(name)->size() == 2);
        CHECK(remove_group(name));
        CHECK(find_group(name) == nullptr);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(!remove_group("group0"));
}

}  // namespace

int main() {
  test_rows_arrive_in_rank_order();
  test_disagreement();
  test_failure();
  test_registry();
  std::printf("group: ok\n");
  return 0;
}
