// Memory, generator, hooks and guard of the simulated device, and the counters.
//
// torch asks a device for these through registries that a CPU build leaves empty: the allocator, `CUDAHooks` (is there a
// device, which generator does it have), and the device guard (which device is current).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>

#include "simulated.h"

namespace simulated {

// ---- counters ------------------------------------------------------------------------------------------------------

namespace {
std::atomic<int64_t> synchronisations{0}, operations{0}, live_bytes{0}, peak_bytes{0};
std::map<std::string, int64_t> synchronised_by;
std::atomic<bool> warns{false};
std::mutex counters;

void reset_counters() {
  std::lock_guard<std::mutex> lock(counters);
  synchronisations = operations = 0;
  synchronised_by.clear();
}

// "copy to host=3; nonzero=1": what made the host wait, and how often.
std::string synchronised_by_what() {
  std::lock_guard<std::mutex> lock(counters);
  std::string text;
  for (const auto& [what, count] : synchronised_by) text += (text.empty() ? "" : "; ") + what + "=" + std::to_string(count);
  return text;
}

void grow(int64_t bytes) {
  const int64_t now = (live_bytes += bytes);
  int64_t highest = peak_bytes.load();
  while (now > highest && !peak_bytes.compare_exchange_weak(highest, now)) {
  }
}
}  // namespace

void count_operation() { operations++; }

void count_synchronisation(const std::string& what) {
  {
    std::lock_guard<std::mutex> lock(counters);
    synchronisations++;
    synchronised_by[what]++;
  }
  if (warns) TORCH_WARN("called a synchronizing CUDA operation (simulated: ", what, ")");
}

// ---- memory --------------------------------------------------------------------------------------------------------

namespace {
// Keeps the host's storage alive for as long as the labelled one lives, and counts its bytes as the device's.
struct Labelled {
  c10::Storage host;
  int64_t bytes;
};

void drop(void* context) {
  auto* kept = static_cast<Labelled*>(context);
  live_bytes -= kept->bytes;
  delete kept;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* host = c10::GetCPUAllocator();
    return labelled(c10::Storage(c10::Storage::use_byte_size_t(), bytes, host->allocate(bytes), host, true));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Allocator the_allocator;
}  // namespace

c10::DataPtr labelled(const c10::Storage& host) {
  auto* kept = new Labelled{host, static_cast<int64_t>(host.nbytes())};
  grow(kept->bytes);
  return c10::DataPtr(const_cast<void*>(host.data()), kept, &drop, DEVICE);
}

c10::Allocator* allocator() { return &the_allocator; }

// ---- generator -----------------------------------------------------------------------------------------------------

namespace {
// The host's algorithm, started elsewhere: as on a real device, one seed gives the host and the device other numbers.
struct Generator : public at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) {
    Generator::set_current_seed(seed);
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
  void set_current_seed(uint64_t seed) override { at::CPUGeneratorImpl::set_current_seed(seed * FACTOR + 1); }
  uint64_t current_seed() const override { return (at::CPUGeneratorImpl::current_seed() - 1) * INVERSE; }

 private:
  static constexpr uint64_t FACTOR = 6364136223846793005ULL, INVERSE = 13877824140714322085ULL;  // modulo 2^64
};
}  // namespace

const at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<Generator>();
  return generator;
}

// ---- hooks and guard -----------------------------------------------------------------------------------------------

struct Hooks : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  at::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { count_synchronisation("synchronize"); }
};

// One device with one stream: everything is done at once, in order.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { count_synchronisation("stream"); }
  void synchronizeEvent(void*) const override { count_synchronisation("event"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

}  // namespace simulated

namespace at {
using SimulatedHooks = simulated::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", simulated::Hooks);
}  // namespace at
C10_REGISTER_GUARD_IMPL(CUDA, simulated::Guard);

namespace {
struct AtLoad {
  AtLoad() { c10::SetAllocator(c10::DeviceType::CUDA, simulated::allocator(), 1); }
} at_load;
}  // namespace

// What Python asks: `torch.ops.simulated.synchronisations()` and so on.
TORCH_LIBRARY(simulated, library) {
  library.def("synchronisations() -> int", [] { return simulated::synchronisations.load(); });
  library.def("synchronised_by() -> str", [] { return simulated::synchronised_by_what(); });
  library.def("operations() -> int", [] { return simulated::operations.load(); });
  library.def("reset_counters() -> ()", [] { simulated::reset_counters(); });
  library.def("count_synchronisation(str what) -> ()", [](std::string what) { simulated::count_synchronisation(what); });
  library.def("warn_of_synchronisations(bool on) -> ()", [](bool on) { simulated::warns = on; });
  library.def("live_bytes() -> int", [] { return simulated::live_bytes.load(); });
  library.def("peak_bytes() -> int", [] { return simulated::peak_bytes.load(); });
  library.def("reset_peak() -> ()", [] { simulated::peak_bytes = simulated::live_bytes.load(); });
  library.def("generator() -> Generator?", []() -> std::optional<at::Generator> { return simulated::default_generator(); });
}
