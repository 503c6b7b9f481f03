// A device for tests: its tensors have memory of their own, and a device type of their own.
//
// Its memory is memory of the host that no CPU tensor has. What it does not know, torch's fallback
// does on the CPU. Copies in either direction are counted.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<int64_t> to_device{0}, from_device{0}, held{0};
// Whether this thread computes, for which a real device would copy nothing.
thread_local bool computes = false;

void release(void* context) {
  auto* block = static_cast<int64_t*>(context);
  held -= *block;
  std::free(block);
}

// The first 64 bytes of a block say how long it is.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(c10::DeviceType::PrivateUse1, 0);
    if (nbytes == 0) return {nullptr, nullptr, &release, device};
    auto* block = static_cast<int64_t*>(std::aligned_alloc(64, (nbytes + 127) / 64 * 64));
    TORCH_CHECK(block, "the stand-in device is full");
    *block = static_cast<int64_t>(nbytes);
    held += *block;
    return {reinterpret_cast<char*>(block) + 64, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {c10::DeviceType::PrivateUse1, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = allocator.allocate(nbytes);
    std::memcpy(grown.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(nbytes);
  }
};

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// A tensor of the CPU over the memory of one of the device, for the length of a copy.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto* begin = static_cast<char*>(tensor.storage().mutable_data());
  return at::from_blob(
      begin + tensor.storage_offset() * tensor.itemsize(), tensor.sizes(), tensor.strides(),
      at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  const bool leaves = source.device().is_cpu(), arrives = target.device().is_cpu();
  if (leaves && !computes) to_device += source.nbytes();
  if (arrives && !computes) from_device += source.nbytes();
  if (source.numel()) on_cpu(target).copy_(on_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_output(target, source.sizes());
  return copy_from(source, target, false);
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}

const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  return at::native::resize_(self, size, std::nullopt);
}

at::Tensor& set_source(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}

at::Scalar local_scalar(const at::Tensor& self) { return on_cpu(self).item(); }

// As between the host and CUDA: a module's move keeps its Parameters and changes their data.
bool has_compatible_type(const at::Tensor&, const at::Tensor&) { return true; }

// A tensor of the device over the memory of a result, which no other tensor has.
at::Tensor on_device(const at::Tensor& tensor) {
  auto* owner = new at::Tensor(tensor);
  const auto nbytes = static_cast<int64_t>(tensor.storage().nbytes());
  held += nbytes;
  auto release = [owner, nbytes](void*) {
    held -= nbytes;
    delete owner;
  };
  const auto options = tensor.options().device(c10::Device(c10::DeviceType::PrivateUse1, 0));
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter(release)
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

// What returns tensors, new ones or an `out` that it fills, computes over the device's memory;
// the rest goes torch's way.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool before = computes;
  computes = true;
  const auto& schema = op.schema();
  bool copies = false;
  std::vector<int> written;  // by return: the argument that it is, or -1
  for (const auto& each : schema.returns()) {
    copies |= each.type()->kind() != c10::TypeKind::TensorType;
    written.push_back(each.alias_info() ? -2 : -1);
    for (size_t at = 0; each.alias_info() && at < schema.arguments().size(); ++at) {
      const auto* of = schema.arguments()[at].alias_info();
      const auto& argument = torch::jit::peek(*stack, at, schema.arguments().size());
      const bool has_size = argument.isTensor() && argument.toTensor().numel() > 0;
      if (schema.arguments()[at].is_out() && has_size && *of == *each.alias_info())
        written.back() = static_cast<int>(at);
    }
    copies |= written.back() == -2;  // a view, or what changes a tensor otherwise
  }
  if (copies) {
    at::native::cpu_fallback(op, stack);
    computes = before;
    return;
  }
  const auto place = [](const at::Tensor& each) { return each.defined() ? on_cpu(each) : each; };
  auto arguments = torch::jit::last(stack, schema.arguments().size());
  std::vector<c10::IValue> given(arguments.begin(), arguments.end());
  const std::vector<c10::IValue> original = given;
  for (auto& each : given) {
    if (each.isTensor()) {
      each = place(each.toTensor());
    } else if (each.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& one : each.toTensorList()) list.push_back(place(one));
      each = list;
    } else if (each.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : each.toOptionalTensorList())
        list.push_back(one ? std::optional<at::Tensor>(place(*one)) : std::nullopt);
      each = list;
    } else if (each.isDevice()) {
      each = c10::Device(c10::kCPU);
    }
  }
  torch::jit::drop(stack, schema.arguments().size());
  for (auto& each : given) stack->push_back(std::move(each));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  size_t at = 0;
  for (auto& each : torch::jit::last(stack, schema.returns().size())) {
    const int argument = written[at++];
    const_cast<c10::IValue&>(each) =
        argument < 0 ? c10::IValue(on_device(each.toTensor())) : original[argument];
  }
  computes = before;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  const auto added = bias && bias->defined() ? std::optional(on_cpu(*bias)) : std::nullopt;
  return on_device(at::convolution(
      on_cpu(input), on_cpu(weight), added, stride, padding, dilation, transposed, output_padding,
      groups));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_source);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("convolution_overrideable", &convolution);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("counts", [] {
    return std::make_tuple(to_device.load(), from_device.load(), held.load());
  });
}
