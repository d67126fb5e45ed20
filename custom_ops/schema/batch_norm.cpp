#include "batch_norm.h"

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

}  // namespace bnexport::schema
