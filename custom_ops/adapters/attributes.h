// A node's attributes, read and checked by the operator's table when the session is built.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../abi/ort_abi.h"
#include "../schema/operator.h"

namespace bnexport::adapters {

struct Setting {
  bool given = false;  // has a value: the node's or the table's default
  double number = 0;   // of kFloat and kInt; of a text that is one of a list, its index
  std::string text;
  std::vector<int64_t> integers;
};

class Settings {
 public:
  // Throws NodeError for a value of another type or outside its range, and where a required one is missing.
  // `where` opens the messages.
  Settings(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, const std::string& where);
  // Throws std::logic_error for a name that the table does not have.
  const Setting& operator[](const char* name) const;
  float number(const char* name) const { return static_cast<float>((*this)[name].number); }
  int64_t integer(const char* name) const { return static_cast<int64_t>((*this)[name].number); }
  const std::vector<int64_t>& integers(const char* name) const { return (*this)[name].integers; }

 private:
  const schema::Operator& op_;
  std::vector<Setting> settings_;  // in the order of the table
};

}  // namespace bnexport::adapters
