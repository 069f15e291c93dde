// DDP takes the time of its reductions, and asks for a timer of the device that a model lies on.

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace c10d {
namespace {
// The default, which is the host's clock: everything on the device is done at once.
struct SimulatedTimer final : public Timer {
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    if (getTimeRef(start) == kUnsetTime || getTimeRef(end) == kUnsetTime) return std::nullopt;
    return getTimeRef(end) - getTimeRef(start);
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer);
}  // namespace
}  // namespace c10d
