// Fused kernels that CUDA has and the host has not: random numbers that never leave the kernel, and a recurrent cell.
//
// Which of them torch chooses is decided by switches as on a real device: attention by `torch.backends.cuda`'s, recurrent
// layers with dropout by `torch.backends.cudnn.enabled` (here by the stand-in operator below, which tests call).

#include <ATen/Context.h>
#include <torch/library.h>

#include <cstdlib>

#include "simulated.h"

namespace simulated {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool given(const MaybeTensor& tensor) { return tensor && tensor->defined(); }

// One step of an LSTM: Hochreiter and Schmidhuber 1997, with a forget gate. The workspace holds the four gates.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  Tensor gates = input_gates + hidden_gates;
  if (given(input_bias)) gates = gates + *input_bias;
  if (given(hidden_bias)) gates = gates + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), fresh = parts[2].tanh(), out = parts[3].sigmoid();
  const Tensor next = forget * cell + in * fresh;
  return {out * next.tanh(), next, at::cat({in, forget, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& hidden_gradient, const MaybeTensor& cell_gradient,
                                                      const Tensor& cell, const Tensor& next, const Tensor& workspace,
                                                      bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor in = gates[0], forget = gates[1], fresh = gates[2], out = gates[3], bounded = next.tanh();
  const Tensor to_hidden = given(hidden_gradient) ? *hidden_gradient : at::zeros_like(next);
  Tensor to_cell = to_hidden * out * (1 - bounded * bounded);
  if (given(cell_gradient)) to_cell = to_cell + *cell_gradient;
  const Tensor to_gates = at::cat({to_cell * fresh * in * (1 - in), to_cell * cell * forget * (1 - forget),
                                   to_cell * in * (1 - fresh * fresh), to_hidden * bounded * out * (1 - out)}, 1);
  return {to_gates, to_cell * forget, has_bias ? to_gates.sum(0) : Tensor()};
}

// Which kernel `scaled_dot_product_attention` takes: 0 written out, 2 memory efficient. Fused only where a test asks for
// it by the environment: the kernel below has no backward.
int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, double, bool, std::optional<double>, bool) {
  static const bool fused = std::getenv("SIMULATED_FUSED_ATTENTION") != nullptr;
  return fused && at::globalContext().userEnabledMemEfficientSDP() ? 2 : 0;
}

// Attention whose dropout mask never leaves the kernel.
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                               const MaybeTensor& bias, bool, double dropout, bool causal,
                                                               std::optional<double> scale) {
  Tensor scores = at::matmul(query * scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1)))), key.transpose(-2, -1));
  if (given(bias)) scores = scores + *bias;
  if (causal) {
    const Tensor below = at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(below.logical_not(), -INFINITY);
  }
  const Tensor normaliser = scores.logsumexp(-1);
  Tensor weights = scores.softmax(-1);
  if (dropout > 0) weights = weights * at::empty_like(weights).bernoulli_(1 - dropout) / (1 - dropout);
  return {at::matmul(weights, value), normaliser, at::zeros({}, at::kLong), at::zeros({}, at::kLong)};
}

}  // namespace

void register_fused(torch::Library& library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_fused_sdp_choice", attention_choice);
  library.impl("_scaled_dot_product_efficient_attention", efficient_attention);
}

}  // namespace simulated
