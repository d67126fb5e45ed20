#include "attributes.h"

#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "node.h"

namespace bnexport::adapters {

namespace {

struct Reader {
  ort::Api api;
  const ort::KernelInfo* info;
  const std::string& where;
  const schema::Attribute& a;

  [[noreturn]] void refuse(const std::string& got, const std::string& expected) const {
    throw NodeError(where + ": attribute '" + a.name + "'" + got + ", expected " + expected);
  }

  // Whether the node has it. read(name): the status of reading an attribute, which has one code for one that is not
  // there and for one of another type; the message is that for a name that no node has, or another.
  template <class Read>
  bool present(const Read& read) const {
    ort::Status* const status = read(a.name);
    if (status == nullptr) return true;
    const std::string message = message_of(api, status), nowhere = "bnexport has no such attribute";
    std::string absent = message_of(api, read(nowhere.c_str()));
    if (const size_t at = absent.find(nowhere); at != std::string::npos) absent.replace(at, nowhere.size(), a.name);
    const bool missing = message == absent;
    if (missing && !a.required) return false;
    const std::string kind =
        a.kind == schema::Kind::kInts ? "a list of ints" : std::string("a single ") + kind_name(a.kind);
    refuse(missing ? " is missing" : ": got a value of another type", missing ? kind : kind + " (" + message + ")");
  }

  Setting number() const {
    const bool is_real = a.kind == schema::Kind::kFloat;
    Setting read{false, is_real ? static_cast<double>(static_cast<float>(a.number)) : a.number, {}, {}};
    float real = 0;
    int64_t integer = 0;
    if (present([&](const char* name) {
          return is_real ? ort::AttributeFloat::call(api, info, name, &real)
                         : ort::AttributeInt::call(api, info, name, &integer);
        })) {
      read.number = is_real ? static_cast<double>(real) : static_cast<double>(integer);
      if (!(read.number >= a.least && read.number <= a.most)) {
        char digits[32];
        std::snprintf(digits, sizeof(digits), "%.9g", read.number);
        const auto bound = [](double value) { return std::to_string(static_cast<int64_t>(value)); };
        refuse(": got " + (!is_real           ? std::to_string(integer)
                           : std::isnan(real) ? "nan"
                                              : std::string(digits)),
               a.expected != nullptr ? a.expected
               : is_real             ? "a number"
                                     : "a number within [" + bound(a.least) + ", " + bound(a.most) + "]");
      }
    }
    read.given = !std::isnan(read.number);
    return read;
  }

  // `count` numbers, or one to three when that is 0.
  Setting integers(size_t count) const {
    Setting read;
    size_t size = 0;
    read.given = present([&](const char* name) { return ort::AttributeInts::call(api, info, name, nullptr, &size); });
    read.integers.resize(size);
    if (size > 0) check(api, ort::AttributeInts::call(api, info, a.name, read.integers.data(), &size));
    bool within = count > 0 ? size == count : size >= 1 && size <= 3;
    for (const int64_t value : read.integers) within = within && value >= a.least && value <= a.most;
    if (!within) {
      refuse(": got " + adapters::text(read.integers), (count > 0 ? std::to_string(count) : "1 to 3") +
                                                           " numbers within [" +
                                                           std::to_string(static_cast<int64_t>(a.least)) + ", 2^31)");
    }
    return read;
  }

  Setting text() const {
    Setting read{true, 0, a.text, {}};
    if (a.allowed_texts == nullptr) {
      // MMCV writes the group's number as an int: its name is the number in decimal.
      int64_t integer = 0;
      ort::Status* const status = ort::AttributeInt::call(api, info, a.name, &integer);
      if (status == nullptr) return {true, 0, std::to_string(integer), {}};
      ort::ReleaseStatus::call(api, status);
    }
    size_t size = 0;
    if (present([&](const char* name) { return ort::AttributeString::call(api, info, name, nullptr, &size); })) {
      read.text.assign(size, '\0');
      if (size > 0) check(api, ort::AttributeString::call(api, info, a.name, read.text.data(), &size));
      read.text.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
    }
    if (a.allowed_texts == nullptr) return read;
    std::string allowed;
    for (size_t i = 0; a.allowed_texts[i] != nullptr; ++i) {
      read.number = static_cast<double>(i);
      if (read.text == a.allowed_texts[i]) return read;
      allowed += (i > 0 ? ", '" : "'") + std::string(a.allowed_texts[i]) + "'";
    }
    refuse(": got '" + read.text + "'", "one of " + allowed);
  }
};

}  // namespace

Settings::Settings(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, const std::string& where)
    : op_(op), settings_(op.attributes.size) {
  const schema::Attribute* const strides = op.find("strides");
  const auto read = [&](const schema::Attribute& a) {
    const Reader reader{api, info, where, a};
    Setting& setting = settings_[static_cast<size_t>(&a - op.attributes.begin())];
    switch (a.kind) {
      case schema::Kind::kInts:
        setting = reader.integers(a.count > 0 || &a == strides ? a.count : integers("strides").size());
        break;
      case schema::Kind::kString: setting = reader.text(); break;
      default: setting = reader.number();
    }
  };
  if (strides != nullptr) read(*strides);  // the length of other lists
  for (const schema::Attribute& a : op.attributes) {
    if (&a != strides) read(a);
  }
}

const Setting& Settings::operator[](const char* name) const {
  const schema::Attribute* const found = op_.find(name);
  if (found == nullptr) throw std::logic_error(std::string(op_.name) + " has no attribute '" + name + "'");
  return settings_[static_cast<size_t>(found - op_.attributes.begin())];
}

}  // namespace bnexport::adapters
