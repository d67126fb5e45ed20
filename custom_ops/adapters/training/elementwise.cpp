#include "../../kernels/cpu/training/elementwise.h"

#include "operators.h"

namespace bnexport::adapters {

void relu_grad(const Run& run) {
  const Setting& high = run.node.settings["high"];
  const cpu::OpenRange range = {run.node.settings.number("low"), static_cast<float>(high.number), high.given};
  cpu::relu_gradient(range, run[0].values(), run[1].values(), run.output_values(0), count_of(run[1].shape),
                     run.parallel);
}

}  // namespace bnexport::adapters
