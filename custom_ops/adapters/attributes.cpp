#include "attributes.h"

#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "node.h"

namespace bnexport::adapters {

namespace {

std::string expected_kind(const schema::Attribute& a) {
  return a.kind == schema::Kind::kInts ? "a list of ints" : std::string("a single ") + kind_name(a.kind);
}

std::string digits(float value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.9g", static_cast<double>(value));
  return std::isnan(value) ? "nan" : buffer;
}

std::string node_name(ort::Api api, const ort::KernelInfo* info) {
  size_t size = 0;
  check(api, ort::InfoNodeName::call(api, info, nullptr, &size));
  std::string name(size, '\0');
  if (size > 0) check(api, ort::InfoNodeName::call(api, info, name.data(), &size));
  name.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
  return name;
}

}  // namespace

AttributeReader::AttributeReader(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op)
    : api_(api),
      info_(info),
      op_(op),
      node_(node_name(api, info)),
      where_(std::string(op.name) + " node '" + node_ + "'") {}

const schema::Attribute& AttributeReader::find(const char* name) const {
  const schema::Attribute* const found = op_.find(name);
  if (found == nullptr) {
    throw std::logic_error(where_ + ": attribute '" + name + "' is read and is not in the operator's schema");
  }
  read_ |= uint64_t{1} << (found - op_.attributes.begin());
  return *found;
}

void AttributeReader::require_all_read() const {
  for (size_t i = 0; i < op_.attributes.size; ++i) {
    if ((read_ >> i & 1) != 0) continue;
    throw std::logic_error(where_ + ": attribute '" + op_.attributes[i].name +
                           "' is in the operator's schema and is not read");
  }
}

bool AttributeReader::present(ort::Status* status, const schema::Attribute& a) const {
  if (status == nullptr) return true;
  const std::string message = message_of(api_, status);
  if (message.find("No attribute with") != std::string::npos) {
    if (a.required) missing(a);
    return false;
  }
  throw NodeError(where_ + ": attribute '" + a.name + "': got a value of another type, expected " + expected_kind(a) +
                  " (" + message + ")");
}

void AttributeReader::missing(const schema::Attribute& a) const {
  throw NodeError(where_ + ": attribute '" + a.name + "' is missing, expected " + expected_kind(a));
}

void AttributeReader::refuse(const char* name, const std::string& got, const std::string& expected) const {
  throw NodeError(where_ + ": attribute '" + name + "': got " + got + ", expected " + expected);
}

std::optional<float> AttributeReader::optional_number(const char* name, const char* expected) const {
  const schema::Attribute& a = find(name);
  float value = 0;
  if (!present(ort::AttributeFloat::call(api_, info_, name, &value), a)) {
    if (std::isnan(a.number)) return std::nullopt;
    return static_cast<float>(a.number);
  }
  if (std::isnan(value)) refuse(name, "nan", expected);
  return value;
}

float AttributeReader::number(const char* name, const char* expected, float least, float most) const {
  const std::optional<float> value = optional_number(name, expected);
  if (!value.has_value()) missing(find(name));
  if (*value < least || *value > most) refuse(name, digits(*value), expected);
  return *value;
}

int64_t AttributeReader::integer(const char* name, int64_t least, int64_t most, const char* expected) const {
  const schema::Attribute& a = find(name);
  int64_t value = 0;
  if (!present(ort::AttributeInt::call(api_, info_, name, &value), a)) return static_cast<int64_t>(a.number);
  if (value < least || value > most) {
    refuse(name, std::to_string(value),
           expected != nullptr ? expected
                               : "a number within [" + std::to_string(least) + ", " + std::to_string(most) + "]");
  }
  return value;
}

std::vector<int64_t> AttributeReader::integers(const char* name, int64_t least, size_t count) const {
  const schema::Attribute& a = find(name);
  size_t size = 0;
  if (!present(ort::AttributeInts::call(api_, info_, name, nullptr, &size), a)) missing(a);
  std::vector<int64_t> result(size);
  if (size > 0) check(api_, ort::AttributeInts::call(api_, info_, name, result.data(), &size));
  bool within = count > 0 ? size == count : size == 1 || size == 2;
  for (const int64_t value : result) within = within && value >= least && value <= kMostSize;
  if (!within) {
    refuse(name, adapters::text(result),
           (count > 0 ? std::to_string(count) : "1 or 2") + " numbers within [" + std::to_string(least) + ", 2^31)");
  }
  return result;
}

std::string AttributeReader::text(const char* name) const {
  const schema::Attribute& a = find(name);
  size_t size = 0;
  if (!present(ort::AttributeString::call(api_, info_, name, nullptr, &size), a)) return a.text;
  std::string value(size, '\0');
  if (size == 0) return value;
  check(api_, ort::AttributeString::call(api_, info_, name, value.data(), &size));
  value.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
  return value;
}

std::string AttributeReader::text_or_integer(const char* name) const {
  int64_t number = 0;
  ort::Status* const status = ort::AttributeInt::call(api_, info_, name, &number);
  if (status != nullptr) {
    ort::ReleaseStatus::call(api_, status);
    return text(name);
  }
  find(name);
  return std::to_string(number);
}

int32_t AttributeReader::choice(const char* name) const {
  const schema::Attribute& a = find(name);
  const std::string value = text(name);
  std::string allowed;
  for (int32_t i = 0; a.allowed_texts[i] != nullptr; ++i) {
    if (value == a.allowed_texts[i]) return i;
    allowed += (i > 0 ? ", '" : "'") + std::string(a.allowed_texts[i]) + "'";
  }
  refuse(name, "'" + value + "'", "one of " + allowed);
}

}  // namespace bnexport::adapters
