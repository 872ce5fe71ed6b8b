// det_plugin::rms_norm, fused_add_rms_norm and qk_norm_rope without Python: launches kernels that Triton compiled.
//
// The first call of a form goes through Python, which then hands over the compiled kernel and where each of its
// parameters comes from (_rows_keep).  Later calls with dense, 16-byte aligned operands make their results and
// launch; everything else goes to det_plugin::*_python.  No CUDA header is needed: the foreign functions
// come as addresses (_rows_configure), the two structures below are the driver's stable interface.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <bit>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#ifndef DET_KEY
#define DET_KEY CUDA
#endif

namespace {

struct Attribute {  // CUlaunchAttribute
  int id;
  char padding[4];
  int value;
  char rest[60];
};
static_assert(sizeof(Attribute) == 72);

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};

constexpr int kProgrammaticStreamSerialization = 6;
constexpr int kInvalidContext = 201;
constexpr size_t kParameters = 32;
constexpr int kRows = 100;      // source of the row count; 0, 1, ...: the address of a tensor
constexpr int kConstant = 101;  // source of a fixed number

using LaunchKernel = int (*)(const Config*, void*, void**, void**);
using CurrentStream = int (*)(int32_t, void**);

LaunchKernel launch_kernel = nullptr;
CurrentStream current_stream = nullptr;
std::vector<std::string> contractions;
std::atomic<bool> on{false};  // the three above are written before it is set, and never again
std::atomic<int64_t> launches{0};

using Key = std::array<int64_t, 12>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = 0xcbf29ce484222325ull;
    for (uint64_t part : key) {
      h = (h ^ part) * 0x9e3779b97f4a7c15ull;
      h ^= h >> 32;
    }
    return h;
  }
};

struct Parameter {
  int64_t source, value;
};

struct Form {
  void* function;
  unsigned threads, shared;
  bool overlap;
  int64_t rows_per_program;
  std::vector<Parameter> parameters;
};

std::unordered_map<Key, std::shared_ptr<const Form>, Hash> forms;
std::shared_mutex forms_mutex;

template <class Function>
auto python(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

int64_t bits(double x) { return std::bit_cast<int64_t>(x); }

int64_t dtype(const at::Tensor& t) { return static_cast<int64_t>(t.scalar_type()); }

bool aligned(const at::Tensor& t) { return (reinterpret_cast<uintptr_t>(t.const_data_ptr()) & 15) == 0; }

bool dense(const at::Tensor& t, const at::Tensor& x) {
  return t.is_contiguous() && t.device() == x.device() && aligned(t);
}

// The form kept for a key, where x's device is the current one.
std::shared_ptr<const Form> find(const Key& key, const at::Tensor& x) {
  const c10::impl::VirtualGuardImpl guard(x.device().type());
  if (guard.getDevice().index() != x.device().index()) return nullptr;
  std::shared_lock lock(forms_mutex);
  const auto found = forms.find(key);
  return found == forms.end() ? nullptr : found->second;
}

template <size_t N>
bool launch(const Form& form, const at::Tensor& x, int64_t rows, const std::array<const void*, N>& tensors) {
  Config config{};
  if (current_stream(static_cast<int32_t>(x.device().index()), &config.stream)) return false;
  std::array<uint64_t, kParameters> values;
  std::array<void*, kParameters> parameters;
  for (size_t i = 0; i < form.parameters.size(); ++i) {
    const auto& [source, value] = form.parameters[i];
    values[i] = source == kConstant ? static_cast<uint64_t>(value)
                : source == kRows   ? static_cast<uint64_t>(rows)
                                    : reinterpret_cast<uint64_t>(tensors[source]);
    parameters[i] = &values[i];
  }
  Attribute overlap{};
  overlap.id = kProgrammaticStreamSerialization;
  overlap.value = 1;
  config.grid[0] = static_cast<unsigned>((rows + form.rows_per_program - 1) / form.rows_per_program);
  config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
  config.block[0] = form.threads;
  config.shared = form.shared;
  config.attributes = &overlap;
  config.count = form.overlap ? 1 : 0;
  const int status = launch_kernel(&config, form.function, parameters.data(), nullptr);
  if (status == kInvalidContext) return false;  // a thread's first call; Triton's launcher binds a context
  TORCH_CHECK(status == 0, "cuLaunchKernelEx failed with status ", status);
  launches.fetch_add(1, std::memory_order_relaxed);
  return true;
}

using Weight = std::optional<at::Tensor>;

// Norm and sum of x and residual, or norm alone; nothing where Python must serve the call.
std::optional<std::tuple<at::Tensor, at::Tensor>> norm(const at::Tensor& x, const at::Tensor* residual,
                                                       const Weight& weight, double eps, double offset) {
  if (!on.load(std::memory_order_acquire) || x.dim() < 1 || !x.is_contiguous() || !aligned(x)) return {};
  const int64_t n = x.size(-1);
  if (n == 0 || x.numel() == 0) return {};
  const int64_t rows = x.numel() / n;
  if (rows > std::numeric_limits<int32_t>::max()) return {};
  if (weight && (weight->dim() != 1 || weight->size(0) != n || !dense(*weight, x))) return {};
  if (residual && (residual->sizes() != x.sizes() || dtype(*residual) != dtype(x) || !dense(*residual, x))) return {};
  const Key key{residual ? 1 : 0, n, dtype(x), weight ? dtype(*weight) : -1, x.device().index(), bits(eps),
                bits(offset)};
  const auto form = find(key, x);
  if (!form) return {};
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor total = residual ? at::empty(x.sizes(), x.options()) : y;
  const void* x_at = x.const_data_ptr();
  const std::array<const void*, 5> tensors{x_at, residual ? residual->const_data_ptr() : x_at,
                                           weight ? weight->const_data_ptr() : x_at, y.mutable_data_ptr(),
                                           total.mutable_data_ptr()};
  if (!launch(*form, x, rows, tensors)) return {};
  return std::make_tuple(std::move(y), std::move(total));
}

at::Tensor rms_norm(const at::Tensor& x, const Weight& weight, double eps, double offset) {
  if (auto done = norm(x, nullptr, weight, eps, offset)) return std::get<0>(*done);
  static auto op = python<at::Tensor(const at::Tensor&, const Weight&, double, double)>("det_plugin::rms_norm_python");
  return op.call(x, weight, eps, offset);
}

std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                      const Weight& weight, double eps, double offset) {
  if (auto done = norm(x, &residual, weight, eps, offset)) return *done;
  static auto op =
      python<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const Weight&, double, double)>(
          "det_plugin::fused_add_rms_norm_python");
  return op.call(x, residual, weight, eps, offset);
}

int64_t index_of(c10::string_view name) {
  for (size_t i = 0; i < contractions.size(); ++i) {
    if (name == contractions[i]) return static_cast<int64_t>(i);
  }
  return -1;
}

std::optional<std::tuple<at::Tensor, at::Tensor>> rotated(const at::Tensor& qkv, const at::Tensor& positions,
                                                          const at::Tensor& q_weight, const at::Tensor& k_weight,
                                                          const at::Tensor& cos_sin, int64_t heads, int64_t kv_heads,
                                                          double eps, c10::string_view contraction) {
  if (!on.load(std::memory_order_acquire) || qkv.dim() != 2 || q_weight.dim() != 1 || heads < 1 || kv_heads < 1) return {};
  const int64_t size = q_weight.size(0), tokens = qkv.size(0), rows = tokens * (heads + kv_heads);
  if (size == 0 || tokens == 0 || rows > std::numeric_limits<int32_t>::max()) return {};
  if (qkv.size(1) != (heads + 2 * kv_heads) * size || qkv.stride(1) != 1 || !aligned(qkv)) return {};
  if (k_weight.sizes() != q_weight.sizes() || dtype(k_weight) != dtype(q_weight)) return {};
  if (positions.dim() != 1 || positions.size(0) != tokens || positions.scalar_type() != at::kLong) return {};
  if (cos_sin.dim() != 2 || cos_sin.size(1) != size || cos_sin.stride(1) != 1 || !aligned(cos_sin)) return {};
  if (!dense(q_weight, qkv) || !dense(k_weight, qkv) || !dense(positions, qkv)) return {};
  if (cos_sin.device() != qkv.device()) return {};
  const Key key{2,     size,     dtype(qkv),           dtype(q_weight), dtype(cos_sin), index_of(contraction),
                heads, kv_heads, qkv.device().index(), bits(eps),       qkv.stride(0),  cos_sin.stride(0)};
  const auto form = find(key, qkv);
  if (!form) return {};
  at::Tensor queries = at::empty({tokens, heads * size}, qkv.options());
  at::Tensor keys = at::empty({tokens, kv_heads * size}, qkv.options());
  const std::array<const void*, 7> tensors{
      qkv.const_data_ptr(),     positions.const_data_ptr(), q_weight.const_data_ptr(), k_weight.const_data_ptr(),
      cos_sin.const_data_ptr(), queries.mutable_data_ptr(), keys.mutable_data_ptr()};
  if (!launch(*form, qkv, rows, tensors)) return {};
  return std::make_tuple(std::move(queries), std::move(keys));
}

std::tuple<at::Tensor, at::Tensor> qk_norm_rope(const at::Tensor& qkv, const at::Tensor& positions,
                                                const at::Tensor& q_weight, const at::Tensor& k_weight,
                                                const at::Tensor& cos_sin, int64_t heads, int64_t kv_heads, double eps,
                                                c10::string_view contraction) {
  if (auto done = rotated(qkv, positions, q_weight, k_weight, cos_sin, heads, kv_heads, eps, contraction)) {
    return *done;
  }
  static auto op = python<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t,
      double, c10::string_view)>("det_plugin::qk_norm_rope_python");
  return op.call(qkv, positions, q_weight, k_weight, cos_sin, heads, kv_heads, eps, contraction);
}

void configure(std::vector<int64_t> addresses, std::vector<std::string> names) {
  TORCH_CHECK(addresses.size() == 2, "addresses: got ", addresses.size(), ", expected 2");
  if (addresses[0] == 0 || addresses[1] == 0) {
    on.store(false);
    return;
  }
  if (launch_kernel == nullptr) {  // other threads may be reading them since
    launch_kernel = reinterpret_cast<LaunchKernel>(addresses[0]);
    current_stream = reinterpret_cast<CurrentStream>(addresses[1]);
    contractions = std::move(names);
  }
  on.store(true, std::memory_order_release);
}

Key whole_key(const std::vector<int64_t>& key) {
  TORCH_CHECK(key.size() <= Key{}.size(), "key: got ", key.size(), " numbers, expected at most ", Key{}.size());
  Key whole{};
  std::copy(key.begin(), key.end(), whole.begin());
  return whole;
}

// launch: function, threads, shared memory in bytes, overlap, rows per program; parameters: sources and values.
void keep(std::vector<int64_t> key, std::vector<int64_t> launch, std::vector<int64_t> sources,
          std::vector<int64_t> values) {
  TORCH_CHECK(!key.empty() && launch.size() == 5 && sources.size() == values.size() &&
                  sources.size() <= kParameters && launch[4] > 0,
              "wrong number of values");
  const int64_t tensors = key[0] == 2 ? 7 : 5;
  auto form = std::make_shared<Form>();
  form->function = reinterpret_cast<void*>(launch[0]);
  form->threads = static_cast<unsigned>(launch[1]);
  form->shared = static_cast<unsigned>(launch[2]);
  form->overlap = launch[3] != 0;
  form->rows_per_program = launch[4];
  for (size_t i = 0; i < sources.size(); ++i) {
    TORCH_CHECK((sources[i] >= 0 && sources[i] < tensors) || sources[i] == kRows || sources[i] == kConstant,
                "parameter ", i, ": got source ", sources[i]);
    form->parameters.push_back({sources[i], values[i]});
  }
  const Key whole = whole_key(key);
  std::unique_lock lock(forms_mutex);
  forms[whole] = std::move(form);
}

void drop(std::vector<int64_t> key) {
  std::unique_lock lock(forms_mutex);
  forms.erase(whole_key(key));
}

void forget() {
  std::unique_lock lock(forms_mutex);
  forms.clear();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(det_plugin, library) {
  library.def("_rows_configure(int[] addresses, str[] contractions) -> ()", &configure);
  library.def("_rows_keep(int[] key, int[] launch, int[] sources, int[] values) -> ()", &keep);
  library.def("_rows_drop(int[] key) -> ()", &drop);
  library.def("_rows_forget() -> ()", &forget);
  library.def("_rows_dtype(ScalarType dtype) -> int", [](c10::ScalarType type) { return static_cast<int64_t>(type); });
  library.def("_rows_launches() -> int", [] { return launches.load(); });
}

TORCH_LIBRARY_IMPL(det_plugin, DET_KEY, library) {
  library.impl("rms_norm", &rms_norm);
  library.impl("fused_add_rms_norm", &fused_add_rms_norm);
  library.impl("qk_norm_rope", &qk_norm_rope);
}
