#include "operator.h"

#include <cmath>
#include <cstdio>
#include <string>

#include "bnexport.h"
#include "training.h"

namespace bnexport::schema {

namespace {

constexpr const char* kStatsModes[] = {"exact", "default", "N", nullptr};
constexpr const char* kGradReductions[] = {"local", "mean", "sum", nullptr};

constexpr Attribute kForwardAttributes[] = {
    {"momentum", Kind::kFloat, 0.1, nullptr, nullptr, false},
    {"eps", Kind::kFloat, 1e-5, nullptr, nullptr, false},
    {"group", Kind::kString, 0, "", nullptr, false},
    {"group_size", Kind::kInt, 1, nullptr, nullptr, false},
    {"training_mode", Kind::kInt, 1, nullptr, nullptr, true},
    {"stats_mode", Kind::kString, 0, "exact", kStatsModes, false},
};

constexpr Attribute kBackwardAttributes[] = {
    {"group", Kind::kString, 0, "", nullptr, false},
    {"group_size", Kind::kInt, 1, nullptr, nullptr, false},
    {"training_mode", Kind::kInt, 1, nullptr, nullptr, true},
    {"stats_mode", Kind::kString, 0, "exact", kStatsModes, false},
    {"grad_reduction", Kind::kString, 0, "local", kGradReductions, false},
};

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

std::string operator_json(const Operator& op) {
  return "{\"name\": " + quoted(op.name) + ", \"domains\": " + array(op.domains, quoted) +
         ", \"variants\": " + array(op.types, variant) + ", \"inputs\": " + array(op.inputs, value) +
         ", \"outputs\": " + array(op.outputs, value) + ", \"attributes\": " + array(op.attributes, attribute) + "}";
}

constexpr const char* kDomains[] = {"mmcv", ""};
constexpr Variant kTypes[] = {{"float", "float"}, {"float16", "float"}, {"bfloat16", "float"}, {"double", "double"}};

constexpr Value kForwardInputs[] = {
    {"input", 'T', false}, {"running_mean", 'S', true}, {"running_var", 'S', true},
    {"weight", 'S', true}, {"bias", 'S', true},
};

constexpr Value kForwardOutputs[] = {
    {"output", 'T', false},    {"running_mean_out", 'S', true}, {"running_var_out", 'S', true},
    {"saved_mean", 'S', true}, {"saved_invstd", 'S', true},
};

constexpr Value kBackwardInputs[] = {
    {"grad_output", 'T', false}, {"input", 'T', false},        {"weight", 'S', true},
    {"saved_mean", 'S', false},  {"saved_invstd", 'S', false},
};

constexpr Value kBackwardOutputs[] = {
    {"grad_input", 'T', true},  {"unused_running_mean", 'S', true}, {"unused_running_var", 'S', true},
    {"grad_weight", 'S', true}, {"grad_bias", 'S', true},
};

}  // namespace

constexpr Operator kForward = {
    "MMCVSyncBatchNorm", kDomains, kForwardInputs, kForwardOutputs, kForwardAttributes, kTypes,
};

constexpr Operator kBackward = {
    "MMCVSyncBatchNormGrad", kDomains, kBackwardInputs, kBackwardOutputs, kBackwardAttributes, kTypes,
};

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kFloat: return "float";
    case Kind::kInt: return "int";
    case Kind::kInts: return "ints";
    case Kind::kString: return "string";
  }
  return "";
}

const char* describe() {
  static const std::string* const json = [] {
    auto* const made = new std::string("{\"operators\": [" + operator_json(kForward) + ", " + operator_json(kBackward));
    for (const Operator* op : kTrainingOperators) *made += ", " + operator_json(*op);
    *made += "]}";
    return made;
  }();
  return json->c_str();
}

}  // namespace bnexport::schema
