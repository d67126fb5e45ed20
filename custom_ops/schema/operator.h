// The schema of a custom operator: name, domains, inputs, outputs, attributes. bnexport/schema.py and
// bnexport/training/contract.py are the contracts; a test compares them through bnexport_describe().
#pragma once

#include <cstddef>
#include <limits>
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

// The shape of a value. `of` is the index of an input.
enum class Shape {
  kFree,      // the operator's code checks it
  kImage,     // (N, C, *) with fewer than 2^60 elements
  kChannels,  // (C,), one number for each channel of input `of`
  kLike,      // that of input `of`
  kScalar,    // ()
  kWindows,   // rank 2 and a dimension for each number of the attribute 'strides'
  kNone,      // an output that is never given
};

struct Value {
  const char* name;
  char type;  // 'T' the data's, 'S' the statistics'
  bool optional;
  Shape shape = Shape::kFree;
  size_t of = 0;
};

enum class Kind { kFloat, kInt, kInts, kString };

// Sizes in attributes stay below 2^31, so that what kernels make of two of them fits 64 bits.
constexpr double kMostSize = 2147483647;

struct Attribute {
  const char* name;
  Kind kind;
  double number = 0;                           // default of kFloat and kInt; NaN: none
  const char* text = nullptr;                  // default of kString
  const char* const* allowed_texts = nullptr;  // null-terminated; index = value of the C API's enum
  bool zero_or_one = false;
  bool required = false;
  // The range of each number, and its description where that says more.
  double least = -std::numeric_limits<double>::infinity(), most = std::numeric_limits<double>::infinity();
  const char* expected = nullptr;
  size_t count = 0;  // of kInts: so many numbers; 0: as many as 'strides', which has one to three
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
