#include "batch_norm.h"

namespace bnexport::schema {

namespace {

constexpr const char* kStatsModes[] = {"exact", "default", "N", nullptr};
constexpr const char* kGradReductions[] = {"local", "mean", "sum", nullptr};

constexpr double kMost = std::numeric_limits<float>::max();

constexpr Attribute group() { return {"group", Kind::kString, 0, ""}; }
constexpr Attribute group_size() {
  return {"group_size", Kind::kInt, 1, nullptr, nullptr,
          false,        false,      1, 1000000, "a number of processes, 1 to 1000000"};
}
constexpr Attribute training_mode() {
  return {"training_mode", Kind::kInt, 1, nullptr, nullptr, true, false, 0, 1, "0 or 1"};
}
constexpr Attribute choice(const char* name, const char* otherwise, const char* const* allowed) {
  return {name, Kind::kString, 0, otherwise, allowed};
}

constexpr Attribute kForwardAttributes[] = {
    {"momentum", Kind::kFloat, 0.1, nullptr, nullptr, false, false, 0, 1,
     "a number in [0, 1], the weight of the new value"},
    {"eps", Kind::kFloat, 1e-5, nullptr, nullptr, false, false, 0, kMost, "a finite number >= 0"},
    group(),
    group_size(),
    training_mode(),
    choice("stats_mode", "exact", kStatsModes),
};

constexpr Attribute kBackwardAttributes[] = {
    group(),
    group_size(),
    training_mode(),
    choice("stats_mode", "exact", kStatsModes),
    choice("grad_reduction", "local", kGradReductions),
};

constexpr const char* kDomains[] = {"mmcv", ""};
constexpr Variant kTypes[] = {{"float", "float"}, {"float16", "float"}, {"bfloat16", "float"}, {"double", "double"}};

constexpr Value image(const char* name) { return {name, 'T', false, Shape::kImage}; }
constexpr Value statistic(const char* name, size_t image, bool optional = true) {
  return {name, 'S', optional, Shape::kChannels, image};
}

constexpr Value kForwardInputs[] = {image("input"), statistic("running_mean", 0), statistic("running_var", 0),
                                    statistic("weight", 0), statistic("bias", 0)};

constexpr Value kForwardOutputs[] = {{"output", 'T', false, Shape::kLike, 0},
                                     statistic("running_mean_out", 0),
                                     statistic("running_var_out", 0),
                                     statistic("saved_mean", 0),
                                     statistic("saved_invstd", 0)};

constexpr Value kBackwardInputs[] = {{"grad_output", 'T', false, Shape::kLike, 1},
                                     image("input"),
                                     statistic("weight", 1),
                                     statistic("saved_mean", 1, false),
                                     statistic("saved_invstd", 1, false)};

constexpr Value kBackwardOutputs[] = {{"grad_input", 'T', true, Shape::kLike, 1},
                                      {"unused_running_mean", 'S', true, Shape::kNone},
                                      {"unused_running_var", 'S', true, Shape::kNone},
                                      statistic("grad_weight", 1),
                                      statistic("grad_bias", 1)};

}  // namespace

constexpr Operator kForward = {
    "MMCVSyncBatchNorm", kDomains, kForwardInputs, kForwardOutputs, kForwardAttributes, kTypes,
};

constexpr Operator kBackward = {
    "MMCVSyncBatchNormGrad", kDomains, kBackwardInputs, kBackwardOutputs, kBackwardAttributes, kTypes,
};

}  // namespace bnexport::schema
