// The CPU products without Python: calls that det_plugin.ops.linear_cpu.InvariantLinear would serve in one
// call of the host's packed product (_C::onednn_mm).
//
// Python certifies row counts per weight and hands them over once (_cpu_linear_keep).  _cpu_linear_fast serves
// dense 2-D input on a cache line at a certified row count, and one row padded to two; for everything else it
// gives an undefined tensor (None in Python), and Python goes on.  cpu_linear, the operator of compiled graphs,
// tries the same and else calls det_plugin::cpu_linear_python.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#ifndef DET_KEY
#define DET_KEY CPU
#endif

namespace {

using Product = void(at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&);
using Linear = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, c10::SymInt);

constexpr uintptr_t cache_line = 64;

struct Entry {
  at::Tensor handler;
  int64_t n, k;
  at::ScalarType dtype;
  std::vector<bool> whole;  // by row count
  bool twice;               // one row runs as two
};

// Never freed: tensors must not go after torch does at exit.  Entries of a deque stay where they are as it grows.
std::deque<Entry>& entries = *new std::deque<Entry>;
std::shared_mutex& entries_mutex = *new std::shared_mutex;

const c10::TypedOperatorHandle<Product>& product() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("_C::onednn_mm", "").typed<Product>();
  return op;
}

at::Tensor empty(int64_t rows, int64_t n, const at::Tensor& like) {
  return at::detail::empty_cpu({rows, n}, like.scalar_type());
}

at::Tensor fast(const at::Tensor& x, const std::optional<at::Tensor>& bias, int64_t index) {
  const Entry* found = nullptr;
  {
    std::shared_lock lock(entries_mutex);
    TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(entries.size()), "no product is kept as ", index);
    found = &entries[index];
  }
  const Entry& entry = *found;
  if (x.dim() != 2 || x.size(1) != entry.k || x.scalar_type() != entry.dtype || !x.is_contiguous()) return {};
  const int64_t rows = x.size(0);
  if (rows == 1 && entry.twice) {
    // the copy is dense and aligned; rows don't see each other, so the second one's values don't matter
    at::Tensor pair = empty(2, entry.k, x);
    const size_t bytes = x.nbytes();
    auto* to = static_cast<char*>(pair.mutable_data_ptr());
    std::memcpy(to, x.const_data_ptr(), bytes);
    std::memcpy(to + bytes, x.const_data_ptr(), bytes);
    at::Tensor y = empty(2, entry.n, x);
    product().call(y, pair, bias, entry.handler);
    y.unsafeGetTensorImpl()->set_sizes_contiguous({1, entry.n});  // the first row, without a view's cost
    return y;
  }
  if (rows >= static_cast<int64_t>(entry.whole.size()) || !entry.whole[rows]) return {};
  if (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % cache_line) return {};
  at::Tensor y = empty(rows, entry.n, x);
  product().call(y, x, bias, entry.handler);
  return y;
}

// A handle's upper half is the kept product's index plus one, 0 where none is kept; see register_handle.
at::Tensor linear(const at::Tensor& x, const std::optional<at::Tensor>& bias, const at::Tensor& handle,
                  c10::SymInt n) {
  if (const int64_t kept = *handle.const_data_ptr<int64_t>() >> 32) {
    if (at::Tensor y = fast(x, bias, kept - 1); y.defined()) return y;
  }
  static const auto slow =
      c10::Dispatcher::singleton().findSchemaOrThrow("det_plugin::cpu_linear_python", "").typed<Linear>();
  return slow.call(x, bias, handle, std::move(n));
}

int64_t keep(const at::Tensor& handler, int64_t n, int64_t k, at::ScalarType dtype, at::IntArrayRef whole_rows,
             bool twice) {
  TORCH_CHECK(n > 0 && k > 0, "got N=", n, ", K=", k, ", expected positive sizes");
  product();  // fails here rather than in a request
  std::vector<bool> whole;
  for (const int64_t rows : whole_rows) {
    TORCH_CHECK(rows > 0 && rows < 1 << 20, "got ", rows, " rows");
    if (rows >= static_cast<int64_t>(whole.size())) whole.resize(rows + 1);
    whole[rows] = true;
  }
  std::unique_lock lock(entries_mutex);
  entries.push_back({handler, n, k, dtype, std::move(whole), twice});
  return static_cast<int64_t>(entries.size()) - 1;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(det_plugin, library) {
  library.def(
      "_cpu_linear_keep(Tensor handler, int n, int k, ScalarType dtype, int[] whole_rows, bool twice) -> int");
  library.def("_cpu_linear_fast(Tensor x, Tensor? bias, int index) -> Tensor");
}

TORCH_LIBRARY_IMPL(det_plugin, DET_KEY, library) {
  library.impl("_cpu_linear_keep", &keep);
  library.impl("_cpu_linear_fast", &fast);
  library.impl("cpu_linear", &linear);
}
