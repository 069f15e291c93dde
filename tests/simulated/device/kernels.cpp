// Every operation of the simulated device: the host's kernel, run on the same memory.
//
// A boxed function stands in for all kernels. It looks at the arguments as CUDA would (refuses to mix devices), relabels
// the device's tensors as the host's, calls the host's kernel, and labels what comes out. Views stay views: a storage is
// relabelled once per call, and a result that lies in an argument's storage gets that argument's label back.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/library.h>

#include <functional>
#include <mutex>
#include <unordered_set>

#include "labels.h"
#include "simulated.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::IValue;
using Names = std::unordered_set<std::string>;

// Operations that take a 0-dimensional host tensor beside the device's, as a number.
const Names TAKES_NUMBERS = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "eq", "ne", "lt", "le",
    "gt", "ge", "maximum", "minimum", "fmax", "fmin", "atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and",
    "logical_or", "logical_xor", "copysign", "hypot", "xlogy", "nextafter", "lerp", "addcmul", "addcdiv", "clamp",
    "clamp_min", "clamp_max", "masked_fill", "fill", "index_put", "_index_put_impl", "index_fill", "where", "mse_loss",
    "huber_loss", "smooth_l1_loss", "isin", "searchsorted", "bucketize", "_foreach_mul", "_foreach_div", "_foreach_add",
    "sigmoid_backward", "tanh_backward", "threshold_backward", "polar", "complex", "heaviside", "gcd", "logaddexp",
    "__and__", "__or__", "__xor__", "index"};
// Operations whose indices may lie on the host while what they index lies on the device.
const Names INDEXES = {"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"};
// Operations whose result, or its shape, the host has to know before it goes on.
const Names SYNCHRONISES = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique",
                            "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
                            "_linalg_check_errors", "bincount"};
const Names MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"};
const Names CONVOLUTIONS = {"convolution_overrideable", "convolution", "convolution_backward", "_slow_conv2d_forward",
                            "_slow_conv2d_backward"};

// "add" for aten::add_, "__and__" for itself.
std::string base_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();
  name = name.substr(name.find("::") + 2);
  while (name.size() > 1 && name.back() == '_' && name.substr(name.size() - 2) != "__") name.pop_back();
  return name;
}

std::vector<Tensor> each(const std::vector<Tensor>& tensors, const std::function<Tensor(const Tensor&)>& change) {
  std::vector<Tensor> changed;
  for (const Tensor& tensor : tensors) changed.push_back(change(tensor));
  return changed;
}

// ---- one call ------------------------------------------------------------------------------------------------------

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), formal_(op.schema().arguments()), name_(base_name(op)), first_(stack->size() - formal_.size()),
        given_(stack->begin() + first_, stack->end()), draws_(op.hasTag(at::Tag::nondeterministic_seeded)) {}

  void run() {
    count_operation();
    check_devices();
    relabel_arguments();
    round_inputs();
    note_synchronisation();
    run_on_host();
    for (size_t i = 0; i < formal_.size(); i++) {
      if (!writes(i)) continue;
      if (given_[i].isTensor()) labels_.settle(given_[i].toTensor());
      else if (given_[i].isTensorList()) for (const Tensor& tensor : given_[i].toTensorVector()) labels_.settle(tensor);
    }
    label_results();
  }

 private:
  bool writes(size_t i) const { return formal_[i].alias_info() && formal_[i].alias_info()->isWrite(); }
  IValue& argument(size_t i) { return (*stack_)[first_ + i]; }

  void check_devices() {
    for (size_t i = 0; i < formal_.size(); i++) {
      if (given_[i].isTensor()) check_device(given_[i].toTensor(), i);
      else if (given_[i].isTensorList()) for (const Tensor& tensor : given_[i].toTensorVector()) check_device(tensor, i);
      else if (given_[i].isList())
        for (const IValue& entry : given_[i].toListRef()) if (entry.isTensor()) check_device(entry.toTensor(), i);
    }
  }

  void check_device(const Tensor& tensor, size_t i) {
    if (!tensor.defined()) return;
    on_device_ = on_device_ || is_simulated(tensor);
    if (tensor.device().type() != c10::DeviceType::CPU) return;
    const bool indexes = INDEXES.count(name_);
    const bool allowed = (tensor.dim() == 0 && TAKES_NUMBERS.count(name_)) || (indexes && i == 1);
    TORCH_CHECK(allowed && !writes(i) && !(indexes && i == 0),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (simulated; ",
                op_.schema().name(), ", argument ", formal_[i].name(), " of shape ", tensor.sizes(), ")");
  }

  void relabel_arguments() {
    auto to_host = [this](const Tensor& tensor) { return labels_.to_host(tensor); };
    for (size_t i = 0; i < formal_.size(); i++) {
      const IValue& value = given_[i];
      if (value.isTensor()) argument(i) = to_host(value.toTensor());
      else if (value.isTensorList()) argument(i) = c10::List<Tensor>(each(value.toTensorVector(), to_host));
      else if (value.isList()) relabel_optional(value, i);
      else if (value.isDevice() && value.toDevice().type() == c10::DeviceType::CUDA) {
        on_device_ = true;
        argument(i) = c10::Device(c10::DeviceType::CPU);
      } else if (value.isGenerator()) {
        generator_ = value.toGenerator();
        TORCH_CHECK(generator_->device().type() == c10::DeviceType::CUDA,
                    "Expected a 'cuda' device type for generator but found '", generator_->device().type(), "'");
        draws_ = true;
        argument(i) = IValue();
      }
    }
  }

  void relabel_optional(const IValue& value, size_t i) {
    if (value.toList().elementType()->kind() != c10::TypeKind::OptionalType) return;
    c10::List<std::optional<Tensor>> relabelled;
    for (const IValue& entry : value.toListRef()) {
      if (!entry.isNone() && !entry.isTensor()) return;
      relabelled.push_back(entry.isNone() ? std::optional<Tensor>() : labels_.to_host(entry.toTensor()));
    }
    argument(i) = relabelled;
  }

  // TF32: matrix products and convolutions round their float32 inputs to 10 bits behind the point, where torch's
  // switches, of either generation, say so. cuDNN picks a convolution's algorithm by the shape of its batch: so what is
  // rounded up depends on that.
  void round_inputs() {
    using at::Float32Backend, at::Float32Op, at::Float32Precision;
    const bool product = MATRIX_PRODUCTS.count(name_), convolution = CONVOLUTIONS.count(name_);
    if (!product && !convolution) return;
    const auto operation = product ? Float32Op::MATMUL : Float32Op::CONV;
    if (at::globalContext().float32Precision(Float32Backend::CUDA, operation) != Float32Precision::TF32) return;
    const int64_t samples = convolution ? given_[name_ == "convolution_backward"].toTensor().size(0) : 0;
    for (size_t i = name_ == "addmm" || name_ == "baddbmm"; i < formal_.size(); i++) {
      IValue& value = argument(i);
      if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().scalar_type() != at::kFloat) continue;
      Tensor rounded = value.toTensor().contiguous().clone();
      rounded.view(at::kInt).add_(0x1000 + 0x80 * (samples % 7)).bitwise_and_(~0x1fff);  // 13 of 23 bits go
      value = rounded;
    }
  }

  void note_synchronisation() {
    if (SYNCHRONISES.count(name_) || (name_ == "repeat_interleave" && given_.back().isNone())) count_synchronisation(name_);
    if (!INDEXES.count(name_) || given_.size() < 2 || !given_[1].isList()) return;
    for (const IValue& entry : given_[1].toListRef())  // how many a boolean mask selects is counted on the host
      if (entry.isTensor() && entry.toTensor().defined() && entry.toTensor().scalar_type() == at::kBool)
        return count_synchronisation(name_ + " with a mask");
  }

  void run_on_host() {
    const c10::DispatchKeySet host(c10::DispatchKey::CPU);
    if (!draws_) return op_.redispatchBoxed(host, stack_);
    // Draws come from the device's generator: the host's takes its state for the length of the call.
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    at::Generator source = generator_ ? *generator_ : default_generator(), cpu = at::detail::getDefaultCPUGenerator();
    const Tensor kept = cpu.get_state();
    cpu.set_state(source.get_state());
    auto put_back = [&] {
      source.set_state(cpu.get_state());
      cpu.set_state(kept);
    };
    try {
      op_.redispatchBoxed(host, stack_);
    } catch (...) {
      put_back();
      throw;
    }
    put_back();
  }

  void label_results() {
    const auto& results = op_.schema().returns();
    const size_t first = stack_->size() - results.size();
    auto to_device = [this](const Tensor& tensor) { return on_device_ ? labels_.to_device(tensor) : tensor; };
    for (size_t r = 0; r < results.size(); r++) {
      IValue& result = (*stack_)[first + r];
      if (const IValue* written = argument_returned(results[r])) result = *written;
      else if (result.isTensor()) result = to_device(result.toTensor());
      else if (result.isTensorList()) result = c10::List<Tensor>(each(result.toTensorVector(), to_device));
    }
  }

  // An in-place or `out=` operation returns the argument that it wrote to, and so must we.
  const IValue* argument_returned(const c10::Argument& result) const {
    const auto* alias = result.alias_info();
    if (!alias || !alias->isWrite()) return nullptr;
    for (size_t i = 0; i < formal_.size(); i++)
      if (writes(i) && formal_[i].alias_info()->beforeSets() == alias->beforeSets()) return &given_[i];
    return nullptr;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const std::vector<c10::Argument>& formal_;
  const std::string name_;
  const size_t first_;
  const std::vector<IValue> given_;
  Labels labels_;
  bool on_device_ = false, draws_;
  std::optional<at::Generator> generator_;
};

void run_any(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ---- what is no kernel of the host's -------------------------------------------------------------------------------

// Copies between the host and the device; pageable memory, so that both directions make the host wait.
Tensor& copy(Tensor& to, const Tensor& from, bool) {
  Labels labels;
  if (is_simulated(to) != is_simulated(from)) count_synchronisation(is_simulated(from) ? "copy to host" : "copy from host");
  Tensor target = labels.to_host(to), source = labels.to_host(from);
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  target.copy_(source, false);
  return to;
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  auto* own = tensor.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(source.storage());
  own->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return tensor;
}

Tensor& set_part(Tensor& tensor, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  std::vector<int64_t> size, stride;
  for (const auto& entry : sizes) size.push_back(entry.expect_int());
  for (const auto& entry : strides) stride.push_back(entry.expect_int());
  if (stride.size() != size.size()) {  // contiguous
    stride.assign(size.size(), 1);
    for (int i = static_cast<int>(size.size()) - 2; i >= 0; i--) stride[i] = stride[i + 1] * size[i + 1];
  }
  auto* own = tensor.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(source);
  own->set_sizes_and_strides(size, stride, offset.expect_int());
  return tensor;
}

Tensor& set_storage(Tensor& tensor, c10::Storage source) {
  const c10::SymInt count = static_cast<int64_t>(source.nbytes() / tensor.dtype().itemsize()), one = 1;
  return set_part(tensor, source, 0, {&count, 1}, {&one, 1});
}

// Gives every operation that has a kernel on the host one on the device as well, unless it has its own already. Those
// that torch implements by others keep being taken apart: they have no kernel of the host's either.
torch::Library* everything_else() {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_any>());
  }
  return library;
}

}  // namespace
}  // namespace simulated

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::run_any>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", simulated::copy);
  library.impl("set_.source_Tensor", simulated::set_tensor);
  library.impl("set_.source_Storage", simulated::set_storage);
  library.impl("set_.source_Storage_storage_offset", simulated::set_part);
  simulated::register_fused(library);
}
static torch::Library* everything_else = simulated::everything_else();
