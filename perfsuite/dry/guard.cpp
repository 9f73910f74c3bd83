// Makes torch believe in CUDA without a driver, for processes whose tensors are all fake.
//
// Autograd's engine asks C++ two things of a device that it meets: a guard, which makes it the current one, and
// whether there is such an accelerator at all. The guard here does nothing; the hooks say yes. DDP's reducer asks
// for a timer, which is optional, and for pinned memory, which is ordinary memory here.
//
// A build of torch for CUDA has answers of its own that ask the driver. Those here have a higher priority. A build
// for CPUs has none.
//
// guard.py builds this file against the installed torch, and loads it before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <mutex>
#include <unordered_set>

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

// Ordinary memory whose addresses are remembered, because the reducer asserts that its memory is pinned.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = c10::GetCPUAllocator()->raw_allocate(bytes);
    const std::lock_guard<std::mutex> lock(mutex());
    addresses().insert(data);
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static bool owns(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex());
    return addresses().count(data) != 0;
  }

 private:
  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      addresses().erase(data);
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  // Neither is ever destroyed, since memory may be released while the process ends.
  static std::mutex& mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }
  static std::unordered_set<const void*>& addresses() {
    static auto* const addresses = new std::unordered_set<const void*>;
    return *addresses;
  }
};

std::unique_ptr<c10d::Timer> no_timer(c10::Device) { return nullptr; }

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
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::owns(data); }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};

// When this file is loaded, because torch asks for its hooks while it is loaded.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, ::c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace at

// For after torch is loaded, whose build for CUDA brings a guard and a timer of its own. Returns whether torch takes
// it that there is CUDA: not if something has asked before this file was loaded.
extern "C" int perfsuite_install_guard() {
  c10d::TimerRegistry()->Register(DeviceType::CUDA, no_timer, c10::REGISTRY_PREFERRED);
  static IdleGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  return at::detail::getCUDAHooks().hasCUDA();
}
