// det_plugin::linear without Python: replays what det_plugin.ops.linear_cuda decided for a problem.
//
// Python decides once per (N, K, rows, dtype, bias) and hands over a cuBLASLt algorithm with its descriptors
// (_linear_keep).  A later call with contiguous, 16-byte aligned operands makes the output and calls
// cublasLtMatmul; everything else goes to det_plugin::linear_python.  No CUDA header is needed: the three
// foreign functions come as addresses (_linear_configure).
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#ifndef DET_KEY
#define DET_KEY CUDA
#endif

namespace {

using Matmul = int (*)(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                       const void*, void*, void*, void*, const void*, void*, size_t, void*);
using CurrentStream = int (*)(int32_t, void**);
using IsCapturing = int (*)(void*, int*);

Matmul matmul = nullptr;
CurrentStream current_stream = nullptr;
IsCapturing is_capturing = nullptr;
std::atomic<bool> on{false};  // the three above are written before it is set, and never again
const float one = 1.0f, zero = 0.0f;

struct Key {
  int64_t n, k, m, kind, bias;  // kind: dtype, device index and whether a graph is being captured
  bool operator==(const Key& o) const {
    return n == o.n && k == o.k && m == o.m && kind == o.kind && bias == o.bias;
  }
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = 0xcbf29ce484222325ull;
    for (uint64_t part : {key.n, key.k, key.m, key.kind, key.bias}) {
      h = (h ^ part) * 0x9e3779b97f4a7c15ull;
      h ^= h >> 32;
    }
    return h;
  }
};

struct Entry {
  void *handle, *operation, *w_layout, *x_layout, *y_layout;
  std::array<uint64_t, 8> algorithm;
};

std::unordered_map<Key, std::shared_ptr<const Entry>, Hash> entries;
std::shared_mutex entries_mutex;

int64_t kind_of(c10::ScalarType type, int64_t device, bool capturing) {
  return static_cast<int64_t>(type) | ((device & 0xffff) << 8) | (static_cast<int64_t>(capturing) << 32);
}

bool plain(const at::Tensor& t, const at::Tensor& x) {
  return t.is_contiguous() && t.scalar_type() == x.scalar_type() && t.device() == x.device();
}

at::Tensor slow(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("det_plugin::linear_python", "")
                       .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&)>();
  return op.call(x, weight, bias);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (!on.load(std::memory_order_acquire) || x.dim() < 1 || weight.dim() != 2 || !x.is_contiguous() || !plain(weight, x)) {
    return slow(x, weight, bias);
  }
  const int64_t n = weight.size(0), k = weight.size(1);
  if (k == 0 || x.size(-1) != k) return slow(x, weight, bias);
  const void *x_at = x.const_data_ptr(), *w_at = weight.const_data_ptr(), *bias_at = nullptr;
  if (bias.has_value()) {
    if (bias->dim() != 1 || bias->size(0) != n || !plain(*bias, x)) return slow(x, weight, bias);
    bias_at = bias->const_data_ptr();
  }
  const auto addresses = reinterpret_cast<uintptr_t>(x_at) | reinterpret_cast<uintptr_t>(w_at) |
                         reinterpret_cast<uintptr_t>(bias_at);
  const c10::impl::VirtualGuardImpl guard(x.device().type());
  const int64_t device = x.device().index();
  if ((addresses & 15) || guard.getDevice().index() != device) return slow(x, weight, bias);
  void* stream = nullptr;
  int capture = 0;
  if (current_stream(static_cast<int32_t>(device), &stream) || is_capturing(stream, &capture)) {
    return slow(x, weight, bias);
  }
  const Key key{n, k, x.numel() / k, kind_of(x.scalar_type(), device, capture != 0),
                reinterpret_cast<int64_t>(bias_at)};
  std::shared_ptr<const Entry> entry;
  {
    std::shared_lock lock(entries_mutex);
    const auto found = entries.find(key);
    if (found == entries.end()) {
      lock.unlock();
      return slow(x, weight, bias);
    }
    entry = found->second;
  }
  auto sizes = x.sizes().vec();
  sizes.back() = n;
  at::Tensor y = at::empty(sizes, x.options());
  void* y_at = y.mutable_data_ptr();
  const int status =
      matmul(entry->handle, entry->operation, &one, w_at, entry->w_layout, x_at, entry->x_layout, &zero, y_at,
             entry->y_layout, y_at, entry->y_layout, entry->algorithm.data(), nullptr, 0, stream);
  TORCH_CHECK(status == 0, "cublasLtMatmul failed with status ", status, " for N=", n, ", K=", k);
  return y;
}

void configure(std::vector<int64_t> addresses) {
  TORCH_CHECK(addresses.size() == 3, "addresses: got ", addresses.size(), ", expected 3");
  if (addresses[0] == 0 || addresses[1] == 0 || addresses[2] == 0) {
    on.store(false);
    return;
  }
  if (matmul == nullptr) {  // other threads may be reading them since
    matmul = reinterpret_cast<Matmul>(addresses[0]);
    current_stream = reinterpret_cast<CurrentStream>(addresses[1]);
    is_capturing = reinterpret_cast<IsCapturing>(addresses[2]);
  }
  on.store(true, std::memory_order_release);
}

// key: n, k, m, dtype, device, capturing, bias; entry: handle, operation, layouts of w, x, y, algorithm (8).
void keep(std::vector<int64_t> key, at::ScalarType dtype, std::vector<int64_t> values) {
  TORCH_CHECK(key.size() == 6 && values.size() == 13, "got ", key.size(), " and ", values.size(),
              " numbers, expected 6 and 13");
  auto entry = std::make_shared<Entry>();
  void** pointers[] = {&entry->handle, &entry->operation, &entry->w_layout, &entry->x_layout, &entry->y_layout};
  for (int i = 0; i < 5; ++i) *pointers[i] = reinterpret_cast<void*>(values[i]);
  for (int i = 0; i < 8; ++i) std::memcpy(&entry->algorithm[i], &values[5 + i], 8);
  std::unique_lock lock(entries_mutex);
  entries[Key{key[0], key[1], key[2], kind_of(dtype, key[3], key[4] != 0), key[5]}] = std::move(entry);
}

void forget() {
  std::unique_lock lock(entries_mutex);
  entries.clear();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(det_plugin, library) {
  library.def("_linear_configure(int[] addresses) -> ()", &configure);
  library.def("_linear_keep(int[] key, ScalarType dtype, int[] values) -> ()", &keep);
  library.def("_linear_forget() -> ()", &forget);
}

TORCH_LIBRARY_IMPL(det_plugin, DET_KEY, library) { library.impl("linear", &linear); }
