// Stands in for the CUDA driver, so that a CUDA build of torch runs fake CUDA tensors on a machine without a GPU.
//
// Fake tensors compute nothing, but torch still asks which devices and streams there are, and autograd starts a thread
// for each device. There is one device here, whose streams and events do nothing. `tests/helpers/fake_cuda.py` says how
// the library is loaded.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {

const c10::Device device(c10::DeviceType::CUDA, 0);

struct StubGuard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return getDefaultStream(device); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getDefaultStream(device); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

}  // namespace

namespace at {

struct StubHooks : CUDAHooksInterface {
  // torch makes its hooks once all of its libraries are loaded, so that this guard takes the place of theirs
  explicit StubHooks(CUDAHooksArgs) {
    static const StubGuard guard;
    c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, &guard);
  }
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, StubHooks)

}  // namespace at

namespace c10d {

// DDP takes the time of its first steps, with events of the device.
struct StubTimer : Timer {
  explicit StubTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, StubTimer)

}  // namespace c10d
