#include "group.h"

#include <cmath>
#include <map>
#include <mutex>

namespace bnexport::comm {

namespace {

// One collective for up to 2105 channels. Over gloo 33 KB take as long as 1 KB: latency is all.
constexpr int64_t kFrame = 4224;
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

[[noreturn]] void failed(const std::string& name, int64_t rank, int64_t size, char (&error)[512]) {
  error[sizeof(error) - 1] = '\0';
  throw GroupError("group '" + name + "', rank " + std::to_string(rank) + " of " + std::to_string(size) +
                   ": the collective failed: " + (error[0] != '\0' ? error : "no reason given") +
                   "; check that every process of the group is alive and runs the same nodes");
}

}  // namespace

void Group::gather(const double* send, double* receive, int64_t count) const {
  char error[512] = "";
  if (gather_(context_, send, receive, count, error, sizeof(error)) != 0) failed(name_, rank_, size_, error);
}

void DeviceGroup::gather(const double* send, double* receive, int64_t count, void* stream) const {
  char error[512] = "";
  if (gather_(context_, send, receive, count, stream, error, sizeof(error)) != 0) failed(name_, rank_, size_, error);
}

bool DeviceGroup::has_agreed(const std::vector<double>& header) const {
  const std::scoped_lock lock(mutex_);
  return agreed_.count(header) != 0;
}

void DeviceGroup::agree(const std::vector<double>& header) const {
  const std::scoped_lock lock(mutex_);
  agreed_.insert(header);
}

std::vector<double> header_numbers(const Header& header, int64_t row) {
  std::vector<double> numbers(kHeader);
  const std::vector<Field> mine = fields(header, static_cast<size_t>(row));
  for (size_t i = 0; i < mine.size(); ++i) numbers[i] = mine[i].value;
  return numbers;
}

void require_agreement(const std::string& group, int64_t rank, const Header& header, int64_t row,
                       const std::vector<double>& numbers, int64_t stride) {
  const std::vector<Field> mine = fields(header, static_cast<size_t>(row));
  for (size_t at = 0, r = 0; at < numbers.size(); at += static_cast<size_t>(stride), ++r) {
    for (size_t i = 0; i < mine.size(); ++i) {
      if (numbers[at + i] == mine[i].value) continue;
      if (std::isnan(numbers[at + i])) {  // what an aborted gather leaves
        throw GroupError("group '" + group + "': nothing came from rank " + std::to_string(r) +
                         " (this process, rank " + std::to_string(rank) +
                         "): the collective was aborted or did not end within the timeout; " +
                         "check that every process of the group is alive and runs the same nodes");
      }
      throw GroupError("group '" + group + "': the processes are not running the same node: " + mine[i].what +
                       " of rank " + std::to_string(r) + ": got " + number(numbers[at + i]) + ", expected " +
                       number(mine[i].value) + " (this process, rank " + std::to_string(rank) +
                       "); run the same model on every process, in sequential execution mode");
    }
  }
}

std::vector<double> Group::exchange(const Header& header, const std::vector<double>& row) const {
  const auto total = static_cast<int64_t>(row.size());
  const int64_t first = total < kFrame - kHeader ? total : kFrame - kHeader, rest = total - first;
  std::vector<double> frame = header_numbers(header, total), frames(static_cast<size_t>(kFrame * size_));
  frame.resize(kFrame);
  for (int64_t i = 0; i < first; ++i) frame[static_cast<size_t>(kHeader + i)] = row[static_cast<size_t>(i)];
  gather(frame.data(), frames.data(), kFrame);
  require_agreement(name_, rank_, header, total, frames, kFrame);
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
  std::map<std::string, std::shared_ptr<const DeviceGroup>> device_groups;
};

Registry& registry() {
  static auto* const instance = new Registry();  // kernels may run while the process exits
  return *instance;
}

template <class Map>
typename Map::mapped_type find(const Map& groups, const std::string& name) {
  const std::scoped_lock lock(registry().mutex);
  const auto found = groups.find(name);
  return found == groups.end() ? nullptr : found->second;
}

}  // namespace

void add_group(const std::string& name, std::shared_ptr<const Group> group) {
  const std::scoped_lock lock(registry().mutex);
  registry().groups[name] = std::move(group);
}

void add_device_group(const std::string& name, std::shared_ptr<const DeviceGroup> group) {
  const std::scoped_lock lock(registry().mutex);
  registry().device_groups[name] = std::move(group);
}

bool remove_group(const std::string& name) {
  const std::scoped_lock lock(registry().mutex);
  const size_t removed = registry().groups.erase(name) + registry().device_groups.erase(name);
  return removed > 0;
}

std::shared_ptr<const Group> find_group(const std::string& name) { return find(registry().groups, name); }

std::shared_ptr<const DeviceGroup> find_device_group(const std::string& name) {
  return find(registry().device_groups, name);
}

}  // namespace bnexport::comm
