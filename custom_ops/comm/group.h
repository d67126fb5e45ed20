// Groups of processes by name, and the one collective that kernels need.
//
// A group is a size, a rank and a function that gathers equal numbers of doubles from all ranks. It is
// registered through the C API (bnexport_register_group), from Python over torch.distributed.
//
// Framing. Transports such as gloo abort the process when ranks send different sizes. So the first
// collective of an exchange always has the same size (kFrame doubles), whatever the node: a header
// that says what this rank is doing, then the row, or as much of it as fits. Only when all headers
// agree does a second collective, of a size then known to be equal, carry the rest. A rank that runs
// another node, type, mode or channel count is thus an error on every rank, at every step, and rows of
// up to kFrame - kHeader numbers still take one collective.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "bnexport.h"

namespace bnexport::comm {

class GroupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What must agree between the ranks of an exchange.
struct Header {
  bool backward = false;
  int64_t channels = 0;
  int32_t dtype = 0, stats_dtype = 0, stats_mode = 0, grad_reduction = 0, training = 0;
  int64_t group_size = 0;
  std::string node;  // its name; empty when it has none
};

// A header as numbers of a fixed count, and the comparison of those of all ranks: throws GroupError that
// names the first difference. `numbers` holds `stride` doubles a rank, the header in front.
constexpr int64_t kHeader = 12;
std::vector<double> header_numbers(const Header& header, int64_t row);
void require_agreement(const std::string& group, int64_t rank, const Header& header, int64_t row,
                       const std::vector<double>& numbers, int64_t stride);

class Group {
 public:
  Group(std::string name, int64_t size, int64_t rank, bnexport_all_gather gather, void* context)
      : name_(std::move(name)), size_(size), rank_(rank), gather_(gather), context_(context) {}

  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }

  // Rows of `row.size()` doubles of all ranks, in rank order. Throws GroupError.
  std::vector<double> exchange(const Header& header, const std::vector<double>& row) const;

 private:
  void gather(const double* send, double* receive, int64_t count) const;

  std::string name_;
  int64_t size_, rank_;
  bnexport_all_gather gather_;
  void* context_;
};

// A group whose members gather on their GPUs, on the stream of the computation. Rows go as they are: the
// members agree on the node once, through the other kind of group or an exchange of their own.
class DeviceGroup {
 public:
  DeviceGroup(std::string name, int64_t size, int64_t rank, bnexport_device_all_gather gather, void* context)
      : name_(std::move(name)), size_(size), rank_(rank), gather_(gather), context_(context) {}

  const std::string& name() const { return name_; }
  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }

  // Enqueues; device pointers. Throws GroupError.
  void gather(const double* send, double* receive, int64_t count, void* stream) const;
  // Whether the members agreed on a node's header before: a session that one process makes again asks nobody.
  bool has_agreed(const std::vector<double>& header) const;
  void agree(const std::vector<double>& header) const;

 private:
  std::string name_;
  int64_t size_, rank_;
  bnexport_device_all_gather gather_;
  void* context_;
  mutable std::mutex mutex_;
  mutable std::set<std::vector<double>> agreed_;
};

// The registry. find returns null when the name is unknown; remove forgets both kinds.
void add_group(const std::string& name, std::shared_ptr<const Group> group);
void add_device_group(const std::string& name, std::shared_ptr<const DeviceGroup> group);
bool remove_group(const std::string& name);
std::shared_ptr<const Group> find_group(const std::string& name);
std::shared_ptr<const DeviceGroup> find_device_group(const std::string& name);

}  // namespace bnexport::comm
