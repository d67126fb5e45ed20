// The operators as this library implements them. bnexport/schema.py is the contract; a test compares
// the two through bnexport_describe().
#ifndef BNEXPORT_ADAPTERS_SCHEMA_H
#define BNEXPORT_ADAPTERS_SCHEMA_H

#include <cstddef>

namespace bnexport::schema {

struct Value {
  const char* name;
  char type;  // 'T' the data's, 'S' the statistics'
  bool optional;
};

enum class Kind { kFloat, kInt, kString };

struct Attribute {
  const char* name;
  Kind kind;
  double number;                      // default of kFloat and kInt
  const char* text;                   // default of kString
  const char* const* allowed_texts;   // null-terminated; index = value of the C API's enum
  bool zero_or_one;
};

struct Operator {
  const char* name;
  Value inputs[5];
  Value outputs[5];
  const Attribute* attributes;
  size_t attribute_count;
};

struct Variant {
  const char* T;
  const char* S;
};

constexpr const char* kDomains[] = {"mmcv", ""};
constexpr size_t kValues = 5;
constexpr size_t kVariants = 4;
extern const Variant kTypes[kVariants];  // index = bnexport_dtype
extern const Operator kForward;
extern const Operator kBackward;

const char* describe();

}  // namespace bnexport::schema

#endif  // BNEXPORT_ADAPTERS_SCHEMA_H
