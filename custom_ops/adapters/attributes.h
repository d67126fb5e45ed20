// A node's attributes, read by name while its session is built: one reader for all operators.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "../abi/ort_abi.h"
#include "../schema/operator.h"

namespace bnexport::adapters {

// Sizes in attributes stay below 2^31, so that what kernels make of two of them fits 64 bits.
constexpr int64_t kMostSize = (int64_t{1} << 31) - 1;

// Reading throws NodeError for a value of another type or outside its range, and where a required one is missing;
// and std::logic_error for a name that the operator's schema does not have. `expected` describes the range.
class AttributeReader {
 public:
  AttributeReader(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op);

  ort::Api api() const { return api_; }
  const schema::Operator& op() const { return op_; }
  const std::string& node() const { return node_; }
  // "Operator node 'name'", for messages.
  const std::string& where() const { return where_; }

  float number(const char* name, const char* expected = "a number",
               float least = -std::numeric_limits<float>::infinity(),
               float most = std::numeric_limits<float>::infinity()) const;
  // None where the node does not have it and the schema has no default.
  std::optional<float> optional_number(const char* name, const char* expected = "a number") const;
  int64_t integer(const char* name, int64_t least, int64_t most, const char* expected = nullptr) const;
  // `count` values, or one or two when that is 0.
  std::vector<int64_t> integers(const char* name, int64_t least, size_t count) const;
  std::string text(const char* name) const;
  // A text, or an integer as its decimal digits.
  std::string text_or_integer(const char* name) const;
  // The index of the text in the schema's list.
  int32_t choice(const char* name) const;
  [[noreturn]] void refuse(const char* name, const std::string& got, const std::string& expected) const;

  // Throws std::logic_error when the operator's schema has an attribute that was not read: a node would run without it.
  void require_all_read() const;

 private:
  const schema::Attribute& find(const char* name) const;
  bool present(ort::Status* status, const schema::Attribute& a) const;
  [[noreturn]] void missing(const schema::Attribute& a) const;

  ort::Api api_;
  const ort::KernelInfo* info_;
  const schema::Operator& op_;
  std::string node_, where_;
  mutable uint64_t read_ = 0;  // a bit for each attribute of the schema
};

}  // namespace bnexport::adapters
