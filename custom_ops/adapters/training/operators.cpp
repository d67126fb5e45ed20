#include "operators.h"

#include "convolution.h"
#include "elementwise.h"
#include "optimizer.h"
#include "pooling.h"

namespace bnexport::adapters {

namespace {

template <class Made>
Kernel* make(ort::Api api, const ort::KernelInfo* info, const schema::Operator& op, int32_t) {
  return new Made(AttributeReader(api, info, op), api, op);
}

constexpr TrainingOperator kOperators[] = {
    {&schema::kConv, make<ConvKernel>},
    {&schema::kConvInputGrad, make<ConvInputGradKernel>},
    {&schema::kConvWeightGrad, make<ConvWeightGradKernel>},
    {&schema::kReluGrad, make<ReluGradKernel>},
    {&schema::kMaxPoolGrad, make<MaxPoolGradKernel>},
    {&schema::kAdamUpdate, make<AdamUpdateKernel>},
    {&schema::kSgdUpdate, make<SgdUpdateKernel>},
};

}  // namespace

schema::List<TrainingOperator> training_operators() { return kOperators; }

}  // namespace bnexport::adapters
