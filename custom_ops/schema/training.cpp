#include "training.h"

#include <cmath>

namespace bnexport::schema {

namespace {

constexpr const char* kDomains[] = {kTrainingDomain};
constexpr schema::Variant kFloat32[] = {{"float", "float"}};

// `count` numbers of at least `least`.
constexpr Attribute ints(const char* name, double least, size_t count = 0) {
  return {name, Kind::kInts, NAN, nullptr, nullptr, false, true, least, kMostSize, nullptr, count};
}
constexpr Attribute number(const char* name) { return {name, Kind::kFloat, NAN, nullptr, nullptr, false, true}; }
constexpr Attribute number(const char* name, double otherwise) { return {name, Kind::kFloat, otherwise}; }
constexpr Attribute kGroup = {"group", Kind::kInt, NAN, nullptr, nullptr, false, true, 1, kMostSize};
constexpr Attribute kNesterov = {"nesterov", Kind::kInt, NAN, nullptr, nullptr, true, true, 0, 1};
constexpr Value required(const char* name, Shape shape = Shape::kFree, size_t of = 0) {
  return {name, 'T', false, shape, of};
}
constexpr Value optional(const char* name, Shape shape = Shape::kFree, size_t of = 0) {
  return {name, 'T', true, shape, of};
}

constexpr Value kConvInputs[] = {required("input", Shape::kWindows), required("weight", Shape::kWindows),
                                 optional("bias")};
constexpr Value kConvOutputs[] = {required("output")};
constexpr Attribute kConvAttributes[] = {ints("strides", 1), ints("pads", 0), ints("dilations", 1), kGroup};

constexpr Value kInputGradInputs[] = {required("grad_output", Shape::kWindows), required("weight", Shape::kWindows)};
constexpr Value kInputGradOutputs[] = {required("grad_input")};
constexpr Attribute kInputGradAttributes[] = {ints("input_shape", 1), ints("strides", 1), ints("pads", 0),
                                              ints("dilations", 1), kGroup};

constexpr Value kWeightGradInputs[] = {required("grad_output", Shape::kWindows), required("input", Shape::kWindows)};
constexpr Value kWeightGradOutputs[] = {required("grad_weight")};
constexpr Attribute kWeightGradAttributes[] = {ints("kernel_shape", 1), ints("strides", 1), ints("pads", 0),
                                               ints("dilations", 1), kGroup};

constexpr Value kReluGradInputs[] = {required("grad_output", Shape::kLike, 1), required("input")};
constexpr Value kGradInput[] = {required("grad_input", Shape::kLike, 1)};
constexpr Attribute kReluGradAttributes[] = {number("low", 0), number("high", NAN)};

constexpr Value kPoolInputs[] = {required("grad_output"), required("input")};
constexpr Attribute kPoolAttributes[] = {ints("kernel_shape", 1, 2), ints("strides", 1, 2), ints("pads", 0, 2),
                                         ints("dilations", 1, 2)};

constexpr Value kAdamInputs[] = {required("parameter"),
                                 required("grad", Shape::kLike),
                                 required("exp_avg", Shape::kLike),
                                 required("exp_avg_sq", Shape::kLike),
                                 optional("max_exp_avg_sq", Shape::kLike),
                                 required("step_size", Shape::kScalar),
                                 required("bias_correction2_sqrt", Shape::kScalar),
                                 optional("keep", Shape::kScalar)};
constexpr Value kAdamOutputs[] = {required("new_parameter", Shape::kLike), required("new_exp_avg", Shape::kLike),
                                  required("new_exp_avg_sq", Shape::kLike),
                                  optional("new_max_exp_avg_sq", Shape::kLike)};
constexpr Attribute kAdamAttributes[] = {number("one_minus_beta1"), number("beta2"), number("one_minus_beta2"),
                                         number("eps"), number("weight_decay")};

constexpr Value kSgdInputs[] = {required("parameter"), required("grad", Shape::kLike),
                                optional("momentum_buffer", Shape::kLike), required("lr", Shape::kScalar),
                                optional("share", Shape::kScalar)};
constexpr Value kSgdOutputs[] = {required("new_parameter", Shape::kLike),
                                 optional("new_momentum_buffer", Shape::kLike)};
constexpr Attribute kSgdAttributes[] = {number("momentum"), number("weight_decay"), kNesterov};

}  // namespace

constexpr Operator kTrainingOperators[kTrainingOperatorCount] = {
    {"Conv", kDomains, kConvInputs, kConvOutputs, kConvAttributes, kFloat32},
    {"ConvInputGrad", kDomains, kInputGradInputs, kInputGradOutputs, kInputGradAttributes, kFloat32},
    {"ConvWeightGrad", kDomains, kWeightGradInputs, kWeightGradOutputs, kWeightGradAttributes, kFloat32},
    {"ReluGrad", kDomains, kReluGradInputs, kGradInput, kReluGradAttributes, kFloat32},
    {"MaxPoolGrad", kDomains, kPoolInputs, kGradInput, kPoolAttributes, kFloat32},
    {"AdamUpdate", kDomains, kAdamInputs, kAdamOutputs, kAdamAttributes, kFloat32},
    {"SgdUpdate", kDomains, kSgdInputs, kSgdOutputs, kSgdAttributes, kFloat32},
};

}  // namespace bnexport::schema
