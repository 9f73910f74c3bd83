// Makes a torch that was built for CPUs believe in CUDA, for processes whose tensors are all fake.
//
// Autograd's engine asks C++ two things of a device that it meets: a guard, which makes it the current one, and
// whether there is such an accelerator at all. The guard here does nothing; the hooks say yes.
// guard.py builds this file against the installed torch, and loads it before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct IdleGuard final : c10::impl::DeviceGuardImplInterface {
  static Device first() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, first()); }

  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return first(); }
  Device exchangeDevice(Device) const override { return first(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

}  // namespace

namespace at {

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

// Returns whether torch now takes it that there is CUDA: not if something has asked before.
extern "C" int perfsuite_install_guard() {
  static IdleGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  return at::detail::getCUDAHooks().hasCUDA();
}
