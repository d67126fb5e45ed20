// The reader of attributes: a name that the schema lacks, and an attribute of the schema that a kernel forgets.
#include "../../custom_ops/adapters/definition.h"
#include "check.h"
#include "fake_ort.h"

using namespace bnexport;
using namespace fake_ort;

namespace {

constexpr const char* kDomains[] = {"d"};
constexpr schema::Value kValues[] = {{"x", 'T', false}};
constexpr schema::Attribute kAttributes[] = {{"old", schema::Kind::kInt, 1, nullptr, nullptr, false},
                                             {"new", schema::Kind::kInt, 0, nullptr, nullptr, true}};
constexpr schema::Variant kTypes[] = {{"float", "float"}};
constexpr schema::Operator kOperator = {"Op", kDomains, kValues, kValues, kAttributes, kTypes};

// Reads so many of these names, one after another.
constexpr const char* kNames[] = {"old", "new", "other"};
template <size_t count>
class Reads final : public adapters::Kernel {
 public:
  explicit Reads(const adapters::AttributeReader& read) : Kernel(read) {
    for (size_t i = 0; i < count; ++i) read.integer(kNames[i], 0, 1);
  }
  void compute(ort::KernelContext*) const override {}
  static Kernel* make(const adapters::AttributeReader& read, int32_t) { return new Reads(read); }
};

// The message of making a kernel, "" when it was made.
std::string made(adapters::MakeKernel* make) {
  Node node;
  node.name = "n";
  void* kernel = nullptr;
  ort::Status* const status =
      adapters::create_kernel(table(), reinterpret_cast<const ort::KernelInfo*>(&node), kOperator, 0, make, &kernel);
  if (status == nullptr) {
    adapters::destroy_kernel(kernel);
    return "";
  }
  const std::unique_ptr<Message> message(reinterpret_cast<Message*>(status));
  return message->text;
}

}  // namespace

int main() {
  CHECK(made(Reads<2>::make).empty());
  CHECK(made(Reads<1>::make) == "Op node 'n': attribute 'new' is in the operator's schema and is not read");
  CHECK(made(Reads<3>::make) == "Op node 'n': attribute 'other' is read and is not in the operator's schema");
  std::printf("attributes: ok\n");
  return 0;
}
