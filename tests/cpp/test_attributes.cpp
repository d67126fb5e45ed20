// Attributes by the operator's table: defaults, ranges, lists as long as the strides, a name that the table lacks.
#include <cmath>

#include "../../custom_ops/adapters/definition.h"
#include "check.h"
#include "fake_ort.h"

using namespace bnexport;
using namespace fake_ort;
using schema::Kind;

namespace {

constexpr const char* kDomains[] = {"d"};
constexpr schema::Value kValues[] = {{"x", 'T', false}};
constexpr const char* kChoices[] = {"one", "two", nullptr};
constexpr schema::Attribute kAttributes[] = {
    {"shape", Kind::kInts, NAN, nullptr, nullptr, false, true, 1, schema::kMostSize},
    {"strides", Kind::kInts, NAN, nullptr, nullptr, false, true, 1, schema::kMostSize},
    {"count", Kind::kInt, 3, nullptr, nullptr, false, false, 1, 5},
    {"low", Kind::kFloat, 0.1},
    {"high", Kind::kFloat, NAN},
    {"choice", Kind::kString, 0, "two", kChoices},
    {"group", Kind::kString, 0, "world"},
};
constexpr schema::Variant kTypes[] = {{"float", "float"}};
constexpr schema::Operator kOperator = {"Op", kDomains, kValues, kValues, kAttributes, kTypes};

using Given = std::vector<std::pair<std::string, Attribute>>;

Attribute integer(int64_t value) { return {2, 0, value, "", {}}; }
Attribute number(float value) { return {1, value, 0, "", {}}; }
Attribute text(const char* value) { return {3, 0, 0, value, {}}; }
Attribute integers(std::vector<int64_t> values) { return {4, 0, 0, "", std::move(values)}; }

const Given kLeast = {{"shape", integers({7, 8})}, {"strides", integers({1, 2})}};

// What is read of the least that is required, and of these.
adapters::Settings read(Given given) {
  Node node;
  node.attributes = std::move(given);
  node.attributes.insert(node.attributes.end(), kLeast.begin(), kLeast.end());
  return {table(), reinterpret_cast<const ort::KernelInfo*>(&node), kOperator, "Op node 'n'"};
}

// The message of reading them, "" when they were read.
std::string refused(Given given) {
  try {
    read(std::move(given));
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

int main() {
  const adapters::Settings defaults = read({});
  CHECK(defaults.integer("count") == 3 && defaults.number("low") == 0.1F);
  CHECK(defaults["low"].number == static_cast<double>(0.1F));  // a node's own 0.1 has no more digits
  CHECK(!defaults["high"].given && defaults["low"].given);
  CHECK(defaults.integer("choice") == 1 && defaults["group"].text == "world");
  CHECK(defaults.integers("shape") == std::vector<int64_t>({7, 8}));
  const adapters::Settings given =
      read({{"count", integer(5)}, {"high", number(6)}, {"choice", text("one")}, {"group", integer(12)}});
  CHECK(given.integer("count") == 5 && given["high"].given && given.number("high") == 6);
  CHECK(given.integer("choice") == 0 && given["group"].text == "12");

  const std::string node = "Op node 'n': attribute ";
  CHECK(refused({{"count", integer(6)}}) == node + "'count': got 6, expected a number within [1, 5]");
  CHECK(refused({{"low", number(NAN)}}) == node + "'low': got nan, expected a number");
  CHECK(refused({{"choice", text("three")}}) == node + "'choice': got 'three', expected one of 'one', 'two'");
  CHECK(refused({{"choice", integer(1)}}).find("of another type, expected a single string") != std::string::npos);
  CHECK(refused({{"strides", integers({1, 1, 1, 1})}}) ==
        node + "'strides': got (1, 1, 1, 1), expected 1 to 3 numbers within [1, 2^31)");
  // The list that others are as long as is judged first.
  CHECK(refused({{"shape", integers({7})}}) == node + "'shape': got (7,), expected 2 numbers within [1, 2^31)");
  CHECK(refused({{"strides", integers({0})}}).find("'strides'") != std::string::npos);
  bool unknown = false;
  try {
    defaults["other"];
  } catch (const std::logic_error& error) {
    unknown = std::string(error.what()) == "Op has no attribute 'other'";
  }
  CHECK(unknown);
  std::printf("attributes: ok\n");
  return 0;
}
