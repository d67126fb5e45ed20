// The schema of a custom operator: name, domains, inputs, outputs, attributes. bnexport/schema.py and
// bnexport/training/building/contract.py are the contracts; a test compares them through bnexport_describe().
#pragma once

#include <cstddef>
#include <string>

namespace bnexport::schema {

// A constant array of known length.
template <class T>
struct List {
  const T* data;
  size_t size;

  template <size_t count>
  constexpr List(const T (&array)[count]) : data(array), size(count) {}
  const T& operator[](size_t index) const { return data[index]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};

struct Value {
  const char* name;
  char type;  // 'T' the data's, 'S' the statistics'
  bool optional;
};

enum class Kind { kFloat, kInt, kInts, kString };

struct Attribute {
  const char* name;
  Kind kind;
  double number;                     // default of kFloat and kInt; NaN: none
  const char* text;                  // default of kString
  const char* const* allowed_texts;  // null-terminated; index = value of the C API's enum
  bool zero_or_one;
  bool required = false;
};

struct Variant {
  const char* T;
  const char* S;
};

struct Operator {
  const char* name;
  List<const char*> domains;
  List<Value> inputs, outputs;
  List<Attribute> attributes;
  List<Variant> types;  // index = bnexport_dtype

  // Null when there is none of the name.
  const Attribute* find(const char* attribute) const;
};

// "float", "int", "ints" or "string".
const char* kind_name(Kind kind);
// As JSON.
std::string describe(const Operator& op);

}  // namespace bnexport::schema
