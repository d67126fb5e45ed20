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

// The registry. find returns null when the name is unknown.
void add_group(const std::string& name, std::shared_ptr<const Group> group);
bool remove_group(const std::string& name);
std::shared_ptr<const Group> find_group(const std::string& name);

}  // namespace bnexport::comm
