#ifndef BNEXPORT_ADAPTERS_TRAINING_CONVOLUTION_H
#define BNEXPORT_ADAPTERS_TRAINING_CONVOLUTION_H

#include "../../kernels/cpu/training/convolution/convolution.h"
#include "tensors.h"

namespace bnexport::adapters {

// One- and two-dimensional convolutions. The lists of attributes have a number for each dimension.
class ConvolutionKernel : public TrainingKernel {
 protected:
  ConvolutionKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op);

  size_t rank() const { return strides_.size(); }
  // One number for each dimension as height and width; one-dimensional ones have height `absent`.
  cpu::Pair pair(const std::vector<int64_t>& numbers, int64_t absent) const;
  std::vector<int64_t> spatial(const Tensor& tensor) const;
  std::vector<int64_t> with_spatial(int64_t first, int64_t second, const cpu::Pair& extents) const;
  // An input of rank 2 + rank().
  Tensor tensor(const Run& run, size_t index) const;
  // From x (batch, channels, *in) and w (outputs, channels / groups, *kernel), all checked, products in range.
  cpu::Convolution shape(const Run& run, int64_t batch, int64_t channels, int64_t outputs,
                         const std::vector<int64_t>& in, const std::vector<int64_t>& kernel) const;
  // Fails unless the input `index`, g, has shape (batch, outputs, *out).
  void require_output_shape(const Run& run, size_t index, const Tensor& g, const cpu::Convolution& shape) const;

  std::vector<int64_t> strides_, pads_, dilations_;
  int64_t group_;
};

class ConvKernel final : public ConvolutionKernel {
 public:
  ConvKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op);
  void compute(ort::KernelContext* context) const override;
};

class ConvInputGradKernel final : public ConvolutionKernel {
 public:
  ConvInputGradKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op);
  void compute(ort::KernelContext* context) const override;

 private:
  std::vector<int64_t> input_shape_;
};

class ConvWeightGradKernel final : public ConvolutionKernel {
 public:
  ConvWeightGradKernel(const AttributeReader& read, ort::Api api, const schema::Operator& op);
  void compute(ort::KernelContext* context) const override;

 private:
  std::vector<int64_t> kernel_shape_;
};

}  // namespace bnexport::adapters

#endif  // BNEXPORT_ADAPTERS_TRAINING_CONVOLUTION_H
