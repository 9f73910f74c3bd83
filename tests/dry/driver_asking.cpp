// Registers what a build of torch for CUDA registers when it is loaded: hooks, a guard and a timer that ask the driver.
// Here each of them ends the process instead.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cstdio>
#include <cstdlib>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

[[noreturn]] void ask(const char* who) {
  std::fprintf(stderr, "%s asked the driver\n", who);
  std::_Exit(9);
}

struct AskingGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { ask("the guard"); }
  Device getDevice() const override { ask("the guard"); }
  Device exchangeDevice(Device) const override { ask("the guard"); }
  void setDevice(Device) const override { ask("the guard"); }
  void uncheckedSetDevice(Device) const noexcept override { ask("the guard"); }
  Stream getStream(Device) const noexcept override { ask("the guard"); }
  Stream exchangeStream(Stream) const noexcept override { ask("the guard"); }
};

struct AskingHooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { ask("the hooks"); }
  bool isPinnedPtr(const void*) const override { ask("the hooks"); }
  at::Allocator* getPinnedMemoryAllocator() const override { ask("the hooks"); }
};

std::unique_ptr<at::CUDAHooksInterface> hooks(at::CUDAHooksArgs) { return std::make_unique<AskingHooks>(); }
std::unique_ptr<c10d::Timer> timer(c10::Device) { ask("the timer"); }

const bool registered = [] {
  at::CUDAHooksRegistry()->Register("CUDAHooks", hooks);
  c10d::TimerRegistry()->Register(DeviceType::CUDA, timer);
  static AskingGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  return true;
}();

}  // namespace
