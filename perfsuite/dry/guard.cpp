// Makes torch believe that CUDA is available without a driver, in processes whose tensors are all fake.
//
// For each new device, autograd's engine needs two things from C++: a guard, which makes the device the current
// one, and the information whether such an accelerator exists. The guard in this file does nothing, and the hooks
// report that the accelerator exists. DDP's reducer also asks for a timer, which is optional, and for pinned
// memory, for which this file provides ordinary memory.
//
// A build of torch for CUDA has its own guard and hooks, which use the driver. Those in this file have a higher
// priority. A build for CPUs has neither.
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

// Allocates ordinary memory and remembers its addresses, because the reducer asserts that its memory is pinned.
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
  // The mutex and the set are never destroyed, because memory can be released while the process ends.
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

// This runs when this file is loaded, because torch asks for the hooks while torch is loaded.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, ::c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace at

// Call this after torch is loaded, because a build for CUDA registers its own guard and timer. Returns whether torch
// believes that CUDA is available. It does not if this was checked before this file was loaded.
extern "C" int perfsuite_install_guard() {
  c10d::TimerRegistry()->Register(DeviceType::CUDA, no_timer, c10::REGISTRY_PREFERRED);
  static IdleGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  return at::detail::getCUDAHooks().hasCUDA();
}
