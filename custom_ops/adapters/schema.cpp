#include "schema.h"

#include <cstdio>
#include <string>

#include "bnexport.h"

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

std::string values(const Value* list) {
  std::string json;
  for (size_t i = 0; i < kValues; ++i) {
    if (i > 0) json += ", ";
    json += "{\"name\": " + quoted(list[i].name) + ", \"type\": \"" + list[i].type + "\", \"optional\": " +
            (list[i].optional ? "true" : "false") + "}";
  }
  return "[" + json + "]";
}

std::string number(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.15g", value);
  return buffer;
}

std::string attribute(const Attribute& a) {
  const char* kind = a.kind == Kind::kFloat ? "float" : a.kind == Kind::kInt ? "int" : "string";
  std::string allowed = "null";
  if (a.zero_or_one) allowed = "[0, 1]";
  if (a.allowed_texts != nullptr) {
    allowed.clear();
    for (const char* const* text = a.allowed_texts; *text != nullptr; ++text) {
      allowed += (allowed.empty() ? "" : ", ") + quoted(*text);
    }
    allowed = "[" + allowed + "]";
  }
  return "{\"name\": " + quoted(a.name) + ", \"kind\": " + quoted(kind) +
         ", \"default\": " + (a.kind == Kind::kString ? quoted(a.text) : number(a.number)) + ", \"allowed\": " + allowed +
         "}";
}

std::string operator_json(const Operator& op) {
  std::string domains, variants, attributes;
  for (const char* domain : kDomains) domains += (domains.empty() ? "" : ", ") + quoted(domain);
  for (const Variant& v : kTypes) {
    variants += (variants.empty() ? "" : ", ") + ("{\"T\": " + quoted(v.T)) + ", \"S\": " + quoted(v.S) + "}";
  }
  for (size_t i = 0; i < op.attribute_count; ++i) attributes += (i > 0 ? ", " : "") + attribute(op.attributes[i]);
  return "{\"name\": " + quoted(op.name) + ", \"domains\": [" + domains + "], \"variants\": [" + variants +
         "], \"inputs\": " + values(op.inputs) + ", \"outputs\": " + values(op.outputs) + ", \"attributes\": [" +
         attributes + "]}";
}

}  // namespace

const Variant kTypes[kVariants] = {{"float", "float"}, {"float16", "float"}, {"bfloat16", "float"}, {"double", "double"}};

const Operator kForward = {
    "MMCVSyncBatchNorm",
    {{"input", 'T', false},
     {"running_mean", 'S', true},
     {"running_var", 'S', true},
     {"weight", 'S', true},
     {"bias", 'S', true}},
    {{"output", 'T', false},
     {"running_mean_out", 'S', true},
     {"running_var_out", 'S', true},
     {"saved_mean", 'S', true},
     {"saved_invstd", 'S', true}},
    kForwardAttributes,
    sizeof(kForwardAttributes) / sizeof(Attribute),
};

const Operator kBackward = {
    "MMCVSyncBatchNormGrad",
    {{"grad_output", 'T', false},
     {"input", 'T', false},
     {"weight", 'S', true},
     {"saved_mean", 'S', false},
     {"saved_invstd", 'S', false}},
    {{"grad_input", 'T', true},
     {"unused_running_mean", 'S', true},
     {"unused_running_var", 'S', true},
     {"grad_weight", 'S', true},
     {"grad_bias", 'S', true}},
    kBackwardAttributes,
    sizeof(kBackwardAttributes) / sizeof(Attribute),
};

const char* describe() {
  static const std::string* const json =
      new std::string("{\"operators\": [" + operator_json(kForward) + ", " + operator_json(kBackward) + "]}");
  return json->c_str();
}

}  // namespace bnexport::schema
