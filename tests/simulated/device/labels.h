// Relabels tensors between the host and the simulated device, on the same memory.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <unordered_map>

#include "simulated.h"

namespace simulated {
namespace {

using at::Tensor;

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

void copy_marks(const Tensor& from, const Tensor& to) {
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}

Tensor over(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto made = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  Tensor tensor(std::move(made));
  copy_marks(like, tensor);
  return tensor;
}

// The two labels of every storage that takes part in one call.
class Labels {
 public:
  Tensor to_host(const Tensor& tensor) {
    if (!is_simulated(tensor)) return tensor;
    auto known = hosts_.find(tensor.unsafeGetTensorImpl());
    if (known != hosts_.end()) return known->second;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "the simulated device has no tensors of layout ", tensor.layout());
    Tensor host = over(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    hosts_.emplace(tensor.unsafeGetTensorImpl(), host);
    return host;
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined() || is_simulated(host) || host.layout() != c10::kStrided) return host;
    return over(device_storage(host.storage()), c10::DispatchKey::CUDA, host);
  }

  // After a kernel that writes or resizes: the device's tensor takes over what its host twin has become.
  void settle(const Tensor& tensor) {
    auto known = is_simulated(tensor) ? hosts_.find(tensor.unsafeGetTensorImpl()) : hosts_.end();
    if (known == hosts_.end()) return;
    const Tensor& host = known->second;
    const auto& storage = host.storage();
    if (storage.data() != tensor.storage().data() || storage.nbytes() != tensor.storage().nbytes()) {
      auto* own = tensor.storage().unsafeGetStorageImpl();
      auto before = own->set_data_ptr(labelled(storage));
      own->set_nbytes(storage.nbytes());
    }
    auto* own = tensor.unsafeGetTensorImpl();
    if (own->sizes() != host.sizes() || own->strides() != host.strides() || own->storage_offset() != host.storage_offset())
      own->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

 private:
  c10::Storage host_storage(const c10::Storage& storage) {
    auto known = host_of_.find(storage.unsafeGetStorageImpl());
    if (known != host_of_.end()) return known->second;
    c10::DataPtr memory(const_cast<void*>(storage.data()), new c10::Storage(storage), &drop_storage,
                        c10::Device(c10::DeviceType::CPU));
    c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetCPUAllocator(), true);
    host_of_.emplace(storage.unsafeGetStorageImpl(), host);
    device_of_.emplace(host.unsafeGetStorageImpl(), storage);
    return host;
  }

  c10::Storage device_storage(const c10::Storage& host) {
    auto known = device_of_.find(host.unsafeGetStorageImpl());
    if (known != device_of_.end()) return known->second;
    c10::Storage storage(c10::Storage::use_byte_size_t(), host.nbytes(), labelled(host), allocator(), true);
    device_of_.emplace(host.unsafeGetStorageImpl(), storage);
    return storage;
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> host_of_, device_of_;
  std::unordered_map<c10::TensorImpl*, Tensor> hosts_;
};

}  // namespace
}  // namespace simulated
