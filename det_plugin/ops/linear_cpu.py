"""linear on a CPU: y = x @ W.T (+ b), the same bits for a row whatever the number of rows.

Contract
    Canonical order: that of the kernel run on tiles of 16 rows.  A row's bits depend on the row, the weight,
    the dtype, the machine and its number of threads; not on the number of rows, nor on the row's position,
    nor on other rows.
Schedules
    Vendor kernels choose code by the number of rows, and some of those choices change the order along K (on
    an AVX-512 machine one row goes through a matrix-vector kernel).  So a kernel may run at a *certified* row
    count only: one whose tiles gave the canonical bytes for every element of a block of random rows.  Other
    row counts are padded up to the next certified one; beyond the largest, rows run in chunks.
Source
    The observation that vendor products are row-invariant at most row counts, and which not, is measured at
    start-up for each (N, K, dtype) and kept as a certificate; nothing is assumed from documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from det_plugin.errors import CertificateError
from det_plugin.evidence.certificates import Certificate, CertificateStore, Schedule, certify
from det_plugin.hooks.manager import hookimpl, plugin_manager

MAX_ROWS = 512
"""Largest row count that runs in one call; longer inputs run in chunks of it."""

SMALL_BLOCK = 64
"""Rows on which row counts up to it are certified."""

CANONICAL_ROWS = 16

CACHE_LINE = 64

STEP = 32
"""N and K run padded to multiples of this, so that every row starts on a cache line: vendor code may look at the
alignment of a row, and with it at its place in the call."""

LEAST_N = 64
"""Least N that runs: a certificate compares enough elements to see a wrong order, also after rounding to bfloat16."""


def row_counts() -> tuple[int, ...]:
    """Candidate row counts: every one up to 32, then ever coarser, so that padding costs at most a fifth."""
    return (
        *range(1, 33),
        *range(40, 129, 8),
        *range(144, 257, 16),
        *range(288, MAX_ROWS + 1, 32),
    )


@dataclass(frozen=True)
class LinearKernel:
    """A way to multiply by one weight.

    Attributes:
        name: for certificates and logs.
        prepare: ``prepare(weight[N, K])`` gives ``run(x[M, K], bias[N] or None, out[M, N]) -> None``,
            or None where the kernel can't serve this weight.  Where ``run`` is one call of the host's packed
            product it may say so with an attribute ``onednn_handler``, the tensor that ``_C::onednn_mm`` takes for
            this weight; calls then need no Python (:mod:`det_plugin.ops.linear_cpu_fast`).
    """

    name: str
    prepare: Callable[[torch.Tensor], Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None] | None]


def _prepare_torch(
    weight: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    def run(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.linear(x, weight, bias))

    return run


def _prepare_torch_rows(
    weight: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    def run(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        for index in range(len(x)):  # a copy: vendor code may look at a row's alignment
            out[index] = torch.nn.functional.linear(x[index : index + 1].clone(), weight, bias)[0]

    return run


@hookimpl(trylast=True)
def det_plugin_cpu_linear_kernels() -> list[LinearKernel]:
    """PyTorch's own product on unpacked weights, as it is and a row at a time: the last resorts."""
    return [
        LinearKernel("torch", _prepare_torch),
        LinearKernel("torch_rows", _prepare_torch_rows),
    ]


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float64 product of ``x[..., K]`` and ``weight[N, K]``, for accuracy tests."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@dataclass
class InvariantLinear:
    """One weight's product, restricted to certified row counts.

    Call with ``x[..., K]`` and an optional ``bias[N]``; gives ``[..., N]`` in x's dtype.  ``whole_rows`` are the
    certified row counts.
    """

    n: int
    k: int
    dtype: torch.dtype
    kernel: str
    run: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None] = field(repr=False)
    certificate: Certificate = field(repr=False)
    whole_rows: frozenset[int] = field(init=False, repr=False)
    _padded: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        certified = sorted(_rows_of(name) for name in self.certificate.accepted)
        if not certified:
            raise CertificateError(f"linear ({self.n}, {self.k}) {self.dtype}: no row count is certified")
        self.whole_rows = frozenset(certified)
        self._padded = [0] * (certified[-1] + 1)
        for rows in range(1, certified[-1] + 1):
            self._padded[rows] = next(c for c in certified if c >= rows)
        self.max_rows = certified[-1]

    def padded_rows(self, rows: int) -> int:
        """Row count at which ``rows`` rows (at most :attr:`max_rows`) run."""
        return self._padded[rows]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shape = x.shape
        if (
            len(shape) == 2
            and shape[0] in self.whole_rows
            and shape[1] == self.k
            and x.dtype is self.dtype
            and x.is_contiguous()
            and not x.data_ptr() % CACHE_LINE
        ):  # a decode step makes a hundred of these calls: every look at a tensor counts
            out = x.new_empty((shape[0], self.n))
            self.run(x, bias, out)
            return out
        return self._general(x, bias)

    def _general(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Any number of dimensions, rows, strides and alignment."""
        if x.shape[-1] != self.k:
            raise ValueError(f"x: got last dimension {x.shape[-1]}, expected K = {self.k}")
        if x.dtype != self.dtype:
            raise ValueError(f"x: got {x.dtype}, expected the weight's {self.dtype}")
        rows2d = x.reshape(-1, self.k)
        rows = rows2d.shape[0]
        if rows == 0:
            return x.new_empty((*x.shape[:-1], self.n))
        if rows <= self.max_rows and self._padded[rows] != rows:
            # padding copies the rows, so the copy is dense and aligned
            target = self._padded[rows]
            out = x.new_empty((target, self.n))
            if rows == 1:  # the row again is cheaper to make than zeros, and as good: rows don't see each other
                filled = torch.cat((rows2d,) * target)
            else:
                filled = torch.nn.functional.pad(rows2d, (0, 0, 0, target - rows))
            self.run(filled, bias, out)
            return out[:rows] if x.dim() == 2 else out[:rows].view(*x.shape[:-1], self.n)
        if not rows2d.is_contiguous():
            rows2d = rows2d.contiguous()
        elif rows2d.data_ptr() % CACHE_LINE:
            rows2d = rows2d.clone()
        out = x.new_empty((rows, self.n))
        if rows <= self.max_rows:
            self.run(rows2d, bias, out)
        else:
            for start in range(0, rows, self.max_rows):
                stop = min(start + self.max_rows, rows)
                self._chunk(rows2d[start:stop], bias, out[start:stop])
        return out.view(*x.shape[:-1], self.n)

    def _chunk(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        rows, target = x.shape[0], self._padded[x.shape[0]]
        if rows == target:
            self.run(x, bias, out)
            return
        padded = x.new_zeros((target, self.k))
        padded[:rows] = x
        result = x.new_empty((target, self.n))
        self.run(padded, bias, result)
        out.copy_(result[:rows])


def _name_of(rows: int) -> str:
    return f"rows={rows}"


def _rows_of(name: str) -> int:
    return int(name.partition("=")[2])


def _tiled(
    run: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None],
    tile: int,
    n: int,
    bias: torch.Tensor | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product of a block, ``tile`` rows at a time, the last tile padded with zero rows."""

    def block(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], n))
        for start in range(0, x.shape[0], tile):
            piece = x[start : start + tile]
            rows = piece.shape[0]
            if rows < tile:
                padded = x.new_zeros((tile, x.shape[1]))
                padded[:rows] = piece
                piece = padded
            result = x.new_empty((tile, n))
            run(piece.contiguous(), bias, result)
            out[start : start + rows] = result[:rows]
        return out

    return block


def _certify_kernel(
    kernel: LinearKernel,
    run: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None],
    weight: torch.Tensor,
    with_bias: bool,
    store: CertificateStore | None,
    mode: str,
) -> Certificate:
    n, k = weight.shape
    generator = torch.Generator().manual_seed(20250101)
    data = torch.randn(MAX_ROWS + 7, k, generator=generator).to(weight.dtype)
    bias = torch.randn(n, generator=generator).to(weight.dtype) if with_bias else None
    schedules = [
        Schedule(
            _name_of(rows),
            _tiled(run, rows, n, bias),
            min_rows=1 if rows <= SMALL_BLOCK else SMALL_BLOCK + 1,
            max_rows=SMALL_BLOCK if rows <= SMALL_BLOCK else None,
        )
        for rows in row_counts()
    ]
    canonical = Schedule(_name_of(CANONICAL_ROWS), _tiled(run, CANONICAL_ROWS, n, bias))
    key = f"{kernel.name},{str(weight.dtype).removeprefix('torch.')},N={n},K={k},bias={int(with_bias)}"
    return certify(
        "linear_cpu",
        key,
        canonical,
        schedules,
        lambda start, rows: (data[start : start + rows],),
        # the odd middle window moves every row to another position of its tile
        (SMALL_BLOCK, SMALL_BLOCK + 3, MAX_ROWS + 7),
        store=store,
        mode=mode,  # type: ignore[arg-type]
    )


def _widen(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` with N and K filled up to sizes that run: zeros along K, random rows along N."""
    n, k = weight.shape
    more_n, more_k = max(LEAST_N, n + -n % STEP) - n, -k % STEP
    if not more_n and not more_k:
        return weight
    wide = torch.nn.functional.pad(weight, (0, more_k, 0, more_n))
    if more_n:
        filler = torch.randn(more_n, k, generator=torch.Generator().manual_seed(20250102))
        wide[n:, :k] = filler.to(weight.dtype)
    return wide


def _narrowed(
    run: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None],
    shape: tuple[int, int],
    wide: tuple[int, int],
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """``run`` of a widened weight, for inputs and results of the weight's own shape."""
    (n, k), (wide_n, wide_k) = shape, wide
    if shape == wide:
        return run

    def narrow(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        result = x.new_empty((len(x), wide_n))
        wide_bias = None if bias is None else torch.nn.functional.pad(bias, (0, wide_n - n))
        run(torch.nn.functional.pad(x, (0, wide_k - k)), wide_bias, result)
        out.copy_(result[:, :n])

    return narrow


def prepare_linear(
    weight: torch.Tensor,
    with_bias: bool = False,
    store: CertificateStore | None = None,
    mode: str = "auto",
) -> InvariantLinear:
    """Choose, certify and bind a kernel for one weight.

    Args:
        weight: ``[N, K]``, bfloat16, float16 or float32, on the CPU.
        with_bias: whether calls will pass a bias (it is certified with the product).
        store: where certificates are kept; None keeps nothing.
        mode: ``"require"`` refuses to make a missing certificate.

    Raises:
        ValueError: the weight's shape or dtype is not one of these.
        CertificateError: no kernel keeps one order on this machine, or a required certificate is missing.
    """
    if weight.ndim != 2 or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"weight: got {weight.dtype}{list(weight.shape)}, expected [N, K] in bfloat16, float16 or float32"
        )
    kernels = [k for found in plugin_manager().hook.det_plugin_cpu_linear_kernels() for k in found]
    failures = []
    wide = _widen(weight)
    shape = (weight.shape[0], weight.shape[1])
    for kernel in kernels:
        run = kernel.prepare(wide)
        if run is None:
            continue
        try:
            certificate = _certify_kernel(kernel, run, wide, with_bias, store, mode)
        except CertificateError as error:
            if mode == "require":
                raise
            failures.append(f"{kernel.name}: {error}")
            continue
        bound = _narrowed(run, shape, (wide.shape[0], wide.shape[1]))
        return InvariantLinear(*shape, weight.dtype, kernel.name, bound, certificate)
    raise CertificateError(
        f"linear ({weight.shape[0]}, {weight.shape[1]}) {weight.dtype}: no kernel keeps one order here: "
        + "; ".join(failures)
    )


_REGISTRY: list[InvariantLinear] = []


def register_handle(linear: InvariantLinear, kept: int | None = None) -> torch.Tensor:
    """A handle for :func:`torch.ops.det_plugin.cpu_linear`.

    It is a tensor, so that compiled graphs take it as an input and layers of one shape share one graph.

    Args:
        kept: the weight's index on the compiled path, None when it isn't there.
    """
    _REGISTRY.append(linear)
    upper = 0 if kept is None else kept + 1
    return torch.tensor(upper << 32 | len(_REGISTRY) - 1, dtype=torch.int64)


_SIGNATURE = "(Tensor x, Tensor? bias, Tensor handle, SymInt n) -> Tensor"
_library = torch.library.Library("det_plugin", "FRAGMENT")
_library.define(f"cpu_linear{_SIGNATURE}")
_library.define(f"cpu_linear_python{_SIGNATURE}")


def _cpu_linear(x: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor, n: int) -> torch.Tensor:
    return _REGISTRY[int(handle.item()) & 0xFFFFFFFF](x, bias)


def _cpu_linear_fake(x: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor, n: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


_library.impl("cpu_linear_python", _cpu_linear, "CPU")
torch.library.register_fake("det_plugin::cpu_linear", _cpu_linear_fake, lib=_library)
_operator: torch.library.Library | None = None


def register_operator() -> None:
    """Serve ``cpu_linear`` from Python."""
    global _operator
    _operator = torch.library.Library("det_plugin", "FRAGMENT")
    _operator.impl("cpu_linear", _cpu_linear, "CPU")


def release_operator() -> None:
    """Take back the Python implementation of ``cpu_linear``, so that a compiled one can be registered."""
    global _operator
    if _operator is not None:
        _operator._destroy()
        _operator = None


register_operator()
