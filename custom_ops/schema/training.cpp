#include "training.h"

#include <cmath>

namespace bnexport::schema {

namespace {

constexpr const char* kDomains[] = {kTrainingDomain};
constexpr schema::Variant kFloat32[] = {{"float", "float"}};

constexpr Attribute ints(const char* name) { return {name, Kind::kInts, NAN, nullptr, nullptr, false, true}; }
constexpr Attribute integer(const char* name) { return {name, Kind::kInt, NAN, nullptr, nullptr, false, true}; }
constexpr Attribute number(const char* name) { return {name, Kind::kFloat, NAN, nullptr, nullptr, false, true}; }
constexpr Attribute number(const char* name, double otherwise) {
  return {name, Kind::kFloat, otherwise, nullptr, nullptr, false};
}
constexpr Attribute flag(const char* name) { return {name, Kind::kInt, NAN, nullptr, nullptr, true, true}; }
constexpr Value required(const char* name) { return {name, 'T', false}; }
constexpr Value optional(const char* name) { return {name, 'T', true}; }

constexpr Value kConvInputs[] = {required("input"), required("weight"), optional("bias")};
constexpr Value kConvOutputs[] = {required("output")};
constexpr Attribute kConvAttributes[] = {ints("strides"), ints("pads"), ints("dilations"), integer("group")};

constexpr Value kInputGradInputs[] = {required("grad_output"), required("weight")};
constexpr Value kGradInput[] = {required("grad_input")};
constexpr Attribute kInputGradAttributes[] = {ints("input_shape"), ints("strides"), ints("pads"), ints("dilations"),
                                              integer("group")};

constexpr Value kGradAndInput[] = {required("grad_output"), required("input")};
constexpr Value kGradWeight[] = {required("grad_weight")};
constexpr Attribute kWeightGradAttributes[] = {ints("kernel_shape"), ints("strides"), ints("pads"), ints("dilations"),
                                               integer("group")};

constexpr Attribute kReluGradAttributes[] = {number("low", 0), number("high", NAN)};

constexpr Attribute kPoolAttributes[] = {ints("kernel_shape"), ints("strides"), ints("pads"), ints("dilations")};

constexpr Value kAdamInputs[] = {required("parameter"),
                                 required("grad"),
                                 required("exp_avg"),
                                 required("exp_avg_sq"),
                                 optional("max_exp_avg_sq"),
                                 required("step_size"),
                                 required("bias_correction2_sqrt"),
                                 optional("keep")};
constexpr Value kAdamOutputs[] = {required("new_parameter"), required("new_exp_avg"), required("new_exp_avg_sq"),
                                  optional("new_max_exp_avg_sq")};
constexpr Attribute kAdamAttributes[] = {number("one_minus_beta1"), number("beta2"), number("one_minus_beta2"),
                                         number("eps"), number("weight_decay")};

constexpr Value kSgdInputs[] = {required("parameter"), required("grad"), optional("momentum_buffer"), required("lr"),
                                optional("share")};
constexpr Value kSgdOutputs[] = {required("new_parameter"), optional("new_momentum_buffer")};
constexpr Attribute kSgdAttributes[] = {number("momentum"), number("weight_decay"), flag("nesterov")};

}  // namespace

constexpr Operator kTrainingOperators[kTrainingOperatorCount] = {
    {"Conv", kDomains, kConvInputs, kConvOutputs, kConvAttributes, kFloat32},
    {"ConvInputGrad", kDomains, kInputGradInputs, kGradInput, kInputGradAttributes, kFloat32},
    {"ConvWeightGrad", kDomains, kGradAndInput, kGradWeight, kWeightGradAttributes, kFloat32},
    {"ReluGrad", kDomains, kGradAndInput, kGradInput, kReluGradAttributes, kFloat32},
    {"MaxPoolGrad", kDomains, kGradAndInput, kGradInput, kPoolAttributes, kFloat32},
    {"AdamUpdate", kDomains, kAdamInputs, kAdamOutputs, kAdamAttributes, kFloat32},
    {"SgdUpdate", kDomains, kSgdInputs, kSgdOutputs, kSgdAttributes, kFloat32},
};

}  // namespace bnexport::schema
