#include "group.h"

#include <map>
#include <mutex>

namespace bnexport::comm {

namespace {

// One collective for up to 2105 channels. Over gloo 33 KB take as long as 1 KB: latency is all.
constexpr int64_t kFrame = 4224, kHeader = 12;  // doubles
constexpr double kProtocol = 0x626e6501;

// 32 bits of FNV-1a; exact in a double.
double name_number(const std::string& name) {
  uint32_t hash = 2166136261u;
  for (const char character : name) hash = (hash ^ static_cast<unsigned char>(character)) * 16777619u;
  return static_cast<double>(hash);
}

struct Field {
  const char* what;
  double value;
};

std::vector<Field> fields(const Header& header, size_t row) {
  return {{"protocol version", kProtocol},
          {"direction (0 forward, 1 backward)", header.backward ? 1.0 : 0.0},
          {"number of channels", static_cast<double>(header.channels)},
          {"data type", static_cast<double>(header.dtype)},
          {"statistics type", static_cast<double>(header.stats_dtype)},
          {"stats_mode", static_cast<double>(header.stats_mode)},
          {"grad_reduction", static_cast<double>(header.grad_reduction)},
          {"training_mode", static_cast<double>(header.training)},
          {"group_size", static_cast<double>(header.group_size)},
          {"node name (as a hash)", name_number(header.node)},
          {"row size", static_cast<double>(row)}};
}

std::string number(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text;
}

// Throws GroupError that names the first difference between the headers in `frames` and `mine`.
void require_agreement(const std::string& group, int64_t rank, const std::vector<Field>& mine,
                       const std::vector<double>& frames) {
  for (size_t at = 0, r = 0; at < frames.size(); at += static_cast<size_t>(kFrame), ++r) {
    for (size_t i = 0; i < mine.size(); ++i) {
      if (frames[at + i] == mine[i].value) continue;
      throw GroupError("group '" + group + "': the processes are not running the same node: " + mine[i].what +
                       " of rank " + std::to_string(r) + ": got " + number(frames[at + i]) + ", expected " +
                       number(mine[i].value) + " (this process, rank " + std::to_string(rank) +
                       "); run the same model on every process, in sequential execution mode");
    }
  }
}

}  // namespace

void Group::gather(const double* send, double* receive, int64_t count) const {
  char error[512] = "";
  if (gather_(context_, send, receive, count, error, sizeof(error)) == 0) return;
  error[sizeof(error) - 1] = '\0';
  throw GroupError("group '" + name_ + "', rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                   ": the collective failed: " + (error[0] != '\0' ? error : "no reason given") +
                   "; check that every process of the group is alive and runs the same nodes");
}

std::vector<double> Group::exchange(const Header& header, const std::vector<double>& row) const {
  const auto total = static_cast<int64_t>(row.size());
  const int64_t first = total < kFrame - kHeader ? total : kFrame - kHeader, rest = total - first;
  const std::vector<Field> mine = fields(header, row.size());
  std::vector<double> frame(kFrame), frames(static_cast<size_t>(kFrame * size_));
  for (size_t i = 0; i < mine.size(); ++i) frame[i] = mine[i].value;
  for (int64_t i = 0; i < first; ++i) frame[static_cast<size_t>(kHeader + i)] = row[static_cast<size_t>(i)];
  gather(frame.data(), frames.data(), kFrame);
  require_agreement(name_, rank_, mine, frames);
  std::vector<double> rows(static_cast<size_t>(total * size_));
  std::vector<double> tail(static_cast<size_t>(rest * size_));
  if (rest > 0) gather(row.data() + first, tail.data(), rest);
  for (int64_t r = 0; r < size_; ++r) {
    double* to = rows.data() + r * total;
    const double* from = frames.data() + r * kFrame + kHeader;
    for (int64_t i = 0; i < first; ++i) to[i] = from[i];
    for (int64_t i = 0; i < rest; ++i) to[first + i] = tail[static_cast<size_t>(r * rest + i)];
  }
  return rows;
}

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Group>> groups;
};

Registry& registry() {
  static auto* const instance = new Registry();  // kernels may run while the process exits
  return *instance;
}

}  // namespace

void add_group(const std::string& name, std::shared_ptr<const Group> group) {
  const std::scoped_lock lock(registry().mutex);
  registry().groups[name] = std::move(group);
}

bool remove_group(const std::string& name) {
  const std::scoped_lock lock(registry().mutex);
  return registry().groups.erase(name) > 0;
}

std::shared_ptr<const Group> find_group(const std::string& name) {
  const std::scoped_lock lock(registry().mutex);
  const auto found = registry().groups.find(name);
  return found == registry().groups.end() ? nullptr : found->second;
}

}  // namespace bnexport::comm
