#include "operator.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace bnexport::schema {

namespace {

std::string quoted(const char* text) { return std::string("\"") + text + "\""; }

template <class T, class Write>
std::string array(const List<T>& list, const Write& write) {
  std::string json;
  for (const T& item : list) json += (json.empty() ? "" : ", ") + write(item);
  return "[" + json + "]";
}

std::string value(const Value& v) {
  return "{\"name\": " + quoted(v.name) + ", \"type\": \"" + v.type +
         "\", \"optional\": " + (v.optional ? "true" : "false") + "}";
}

std::string variant(const Variant& v) { return "{\"T\": " + quoted(v.T) + ", \"S\": " + quoted(v.S) + "}"; }

std::string number(double value) {
  if (std::isnan(value)) return "null";
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.15g", value);
  return buffer;
}

std::string attribute(const Attribute& a) {
  std::string allowed = "null";
  if (a.zero_or_one) allowed = "[0, 1]";
  if (a.allowed_texts != nullptr) {
    allowed.clear();
    for (const char* const* text = a.allowed_texts; *text != nullptr; ++text) {
      allowed += (allowed.empty() ? "" : ", ") + quoted(*text);
    }
    allowed = "[" + allowed + "]";
  }
  return "{\"name\": " + quoted(a.name) + ", \"kind\": " + quoted(kind_name(a.kind)) +
         ", \"default\": " + (a.kind == Kind::kString ? quoted(a.text) : number(a.number)) +
         ", \"required\": " + (a.required ? "true" : "false") + ", \"allowed\": " + allowed + "}";
}

}  // namespace

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kFloat: return "float";
    case Kind::kInt: return "int";
    case Kind::kInts: return "ints";
    case Kind::kString: return "string";
  }
  return "";
}

const Attribute* Operator::find(const char* attribute) const {
  for (const Attribute& a : attributes) {
    if (std::strcmp(a.name, attribute) == 0) return &a;
  }
  return nullptr;
}

std::string describe(const Operator& op) {
  return "{\"name\": " + quoted(op.name) + ", \"domains\": " + array(op.domains, quoted) +
         ", \"variants\": " + array(op.types, variant) + ", \"inputs\": " + array(op.inputs, value) +
         ", \"outputs\": " + array(op.outputs, value) + ", \"attributes\": " + array(op.attributes, attribute) + "}";
}

}  // namespace bnexport::schema
