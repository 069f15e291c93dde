// The simulated device: what its parts share. README.md beside this folder says what it is for.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace simulated {

inline const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

// Counters that tests read. A synchronisation is a point at which a real device would make the host wait.
void count_operation();
void count_synchronisation(const std::string& what);

// Storages: memory of the host that is labelled `cuda:0`, and the allocator that hands it out.
c10::Allocator* allocator();
c10::DataPtr labelled(const c10::Storage& host);

// The device's own random generator: the same seed gives other draws than the host's generator does.
const at::Generator& default_generator();

inline bool is_simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::DeviceType::CUDA; }

// Fused kernels that exist on CUDA and not on the host (fused.cpp).
void register_fused(torch::Library& library);

}  // namespace simulated
