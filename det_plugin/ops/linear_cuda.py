"""Linear on CUDA: y = x Wᵀ (+ b).

Contract
    Order of bfloat16 and float16: each element of y is summed sequentially along K, from k = 0 upwards, in one
    fp32 accumulator (the matrix unit's own step: 16 elements).
    Order of float32: K is cut into blocks of 32 from k = 0; the products of a block are summed by IEEE fused
    multiply-add, k rising, in an accumulator of its own that starts from zero; the block sums are added one
    after the other, in fp32, to a total that starts from zero (:mod:`det_plugin.ops.blocked_sum`).
    The bias is added in fp32; the sum is rounded once, to x's dtype.
    The result of a row may depend on that row, W, b, K, the dtype and the GPU architecture; not on the number
    of rows, the row's position, strides or alignment, or on the schedule.

Schedules are Triton tiles and cuBLASLt algorithms (:mod:`det_plugin.ops.linear_schedules`); for float32 Triton
tiles only, since cuBLASLt's algorithms sum it in other orders.  For each (N, K, dtype, bias) a *plan* is made at
first use, outside CUDA graph capture: every schedule that the tuning table may pick is certified against the
canonical tile over a ladder of row counts, and what differs is struck out.  A call then looks at its row count
and launches the table's choice among the certified ones; calls of more rows than were certified are cut into
pieces.  Tables change speed, never bits.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from det_plugin.errors import CertificateError
from det_plugin.evidence.certificates import (
    Certificate,
    CertificateStore,
    Schedule,
    certify,
    first_difference,
    row_ladder,
)
from det_plugin.ops import linear_fast
from det_plugin.ops._cublaslt import Algorithm, CublasLt, LinearProblem
from det_plugin.ops._triton import require_kernel_device
from det_plugin.ops.blocked_sum import blocked_product
from det_plugin.ops.linear_plan import (
    DEFAULT_TABLES,
    Plan,
    bind_cublaslt,
    certification_data,
    certified_rows,
    cublaslt_ranges,
    named_algorithms,
    spread,
)
from det_plugin.ops.linear_schedules import (
    CANONICAL,
    Table,
    Tile,
    check_table,
    load_tables,
    run_tile,
    table_key,
    table_path,
)

logger = logging.getLogger(__name__)

TABLES = Path(__file__).parent / "tuning"

MEASURE_SECONDS = 40.0
"""How long a process measures problems without a tuning table; the rest waits for the next start."""

LEAST_SECONDS = 10.0
"""No problem is begun with less time left: its candidates are compiled and certified before the clock is looked at."""


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] by the contract: float32 bit for bit (slow), others up to the matrix unit's rounding in a step."""
    y = blocked_product(x, weight) if x.dtype == torch.float32 else x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def canonical_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] by the canonical tile."""
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    run_tile(CANONICAL[x.dtype], x, weight, bias, y)
    return y


class LinearDispatcher:
    """Makes plans and runs them.

    Args:
        store: where certificates are kept; None certifies anew in every process.
        mode: ``"require"`` refuses to make missing certificates.
        tables: tuning tables by :func:`table_key`; None reads the committed ones of the GPU model, then those
            measured on this machine.  Problems without a table are measured (mode "auto") or run cuBLASLt.
        measure: time the candidates of problems without a table, at first use (mode "auto"), for about
            :data:`MEASURE_SECONDS` in all; a table that was measured whole is kept beside the certificates.
        fast: build and switch on the compiled path (:mod:`det_plugin.ops.linear_fast`) with the first plan.
    """

    def __init__(
        self,
        store: CertificateStore | None = None,
        mode: Literal["auto", "require"] = "auto",
        tables: Mapping[str, Table] | None = None,
        measure: bool = False,
        fast: bool = False,
    ) -> None:
        self.store, self.mode, self.measure = store, mode, measure
        self.fast = fast
        self.seconds_left = MEASURE_SECONDS
        self.plans: dict[tuple[int, int, torch.dtype, bool, int], Plan] = {}
        self._given = tables
        self._tables: dict[str, dict[str, Table]] = {}
        self._measured_tables: dict[str, dict[str, Table]] = {}
        self._handles: dict[int, CublasLt | None] = {}

    def table(self, dtype: torch.dtype, n: int, k: int, device: int, has_bias: bool = False) -> Table | None:
        """Tuning table of one problem, or None: the committed one, which serves both kinds of calls, or one that was
        measured here with or without a bias."""
        key = table_key(dtype, n, k)
        if self._given is not None:
            return check_table(self._given[key], key) if key in self._given else None
        gpu = torch.cuda.get_device_name(device)
        if gpu not in self._tables:
            self._tables[gpu] = load_tables(table_path(TABLES, gpu))
            self._measured_tables[gpu] = self._read_measured(gpu)
        return self._tables[gpu].get(key) or self._measured_tables[gpu].get(_measured_key(dtype, n, k, has_bias))

    def _read_measured(self, gpu: str) -> dict[str, Table]:
        """Tables measured on this machine; none where the file is damaged (said in the log): they change speed only."""
        if self.store is None:
            return {}
        path = table_path(self.store.folder / "tuning", gpu)
        try:
            return load_tables(path)
        except Exception as error:  # whatever the file holds
            logger.warning("linear: measured tables are not read, schedules are measured again: %s: %r", path, error)
            return {}

    def handle(self, device: int) -> CublasLt | None:
        """cuBLASLt of the current device, or None (said once) when the library is absent."""
        if device not in self._handles:
            try:
                self._handles[device] = CublasLt()
            except (OSError, RuntimeError) as error:
                logger.warning("cuBLASLt is not usable, linear runs Triton schedules only: %s", error)
                self._handles[device] = None
        return self._handles[device]

    def plan(self, n: int, k: int, dtype: torch.dtype, has_bias: bool, device: int) -> Plan:
        """The plan of one problem; made, certified and tuned at first use.

        Raises:
            CertificateError: first use falls into CUDA graph capture, or certificates are required and
                missing.
        """
        key = (n, k, dtype, has_bias, device)
        found = self.plans.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise CertificateError(
                    f"linear N={n}, K={k}, {dtype}, bias={has_bias}: first used during CUDA graph capture; "
                    "run it once, or call prepare_linear, before capturing"
                )
            if self.fast and self.handle(device) is not None:
                self.fast = linear_fast.activate()
            with torch.cuda.device(device), torch.no_grad():
                found = self.plans[key] = self._make(n, k, dtype, has_bias, device)
                if linear_fast.active():
                    self._prove_fast(found, device)
        return found

    def _prove_fast(self, plan: Plan, device: int) -> None:
        """Compare the compiled path's bytes with the Python path's; switch it off where they differ."""
        for m in (1, 16, min(200, plan.max_rows)):
            rows = certification_data(m, plan.n, plan.k, plan.dtype, plan.has_bias, torch.device("cuda", device))
            want = self(*rows)  # hands the choice over
            difference = first_difference(want, torch.ops.det_plugin.linear(*rows))
            if difference is not None:
                linear_fast.deactivate()
                logger.error(
                    "linear N=%d K=%d %s: the compiled path differs at %s (0x%s, got 0x%s): switched off",
                    plan.n, plan.k, plan.dtype, *difference,
                )  # fmt: skip
                return

    def _make(self, n: int, k: int, dtype: torch.dtype, has_bias: bool, device: int) -> Plan:
        size = dtype.itemsize
        vendor = dtype != torch.float32 and n * size % 16 == 0 and k * size % 16 == 0
        handle = self.handle(device) if vendor else None
        problem = LinearProblem(handle, n, k, str(dtype).removeprefix("torch."), has_bias) if handle else None
        table = self.table(dtype, n, k, device, has_bias)
        if table is None and self.measure and self.mode == "auto":
            measured = self._measured(n, k, dtype, has_bias, device, problem)
            if measured is not None:
                return measured
        table = table or DEFAULT_TABLES[dtype]
        names = {name for _, name in table if not name.startswith("cublaslt")}
        named = named_algorithms(problem, table, certified_rows(n, k))
        certificate = self._certify(n, k, dtype, has_bias, device, sorted(names), named, problem)
        return Plan(n, k, dtype, has_bias, table, certificate, problem)

    def _measured(
        self, n: int, k: int, dtype: torch.dtype, has_bias: bool, device: int, problem: LinearProblem | None
    ) -> Plan | None:
        """A plan whose table was measured just now, among certified schedules, and is kept for later starts.

        None where there is no time or memory for it, or a candidate fails (said in the log): the plan is then made
        of the default table.  Tables change speed, never bits, so a later start may measure.
        """
        from det_plugin.ops import linear_tuning

        name = f"linear N={n} K={k} {str(dtype).removeprefix('torch.')}"
        free, _ = torch.cuda.mem_get_info(device)
        if self.seconds_left < LEAST_SECONDS or free < 2 * linear_tuning.memory(n, k, dtype):
            logger.info(
                "%s: no tuning table for this GPU, and no %s to measure one now: default schedules",
                name, "time" if self.seconds_left < LEAST_SECONDS else "memory",
            )  # fmt: skip
            return None
        logger.info("%s: no tuning table for this GPU, measuring schedules (%.0f s left)", name, self.seconds_left)
        started = time.monotonic()
        try:
            table = DEFAULT_TABLES[dtype]
            names = {name for _, name in table if not name.startswith("cublaslt")}
            names |= linear_tuning.candidates(dtype, n, k)
            named = linear_tuning.alternatives(problem, certified_rows(n, k))
            certificate = self._certify(n, k, dtype, has_bias, device, sorted(names), named, problem)
            plan = Plan(n, k, dtype, has_bias, table, certificate, problem)
            deadline = started + self.seconds_left
            table, whole = linear_tuning.measure_table(plan, named, torch.device("cuda", device), deadline)
            if whole:
                self._save_measured(device, _measured_key(dtype, n, k, has_bias), table)
            seconds = time.monotonic() - started
            logger.info("%s: measured in %.1f s%s", name, seconds, "" if whole else ", not to the end")
            return Plan(n, k, dtype, has_bias, table, certificate, problem)
        except Exception as error:  # compiler, driver, memory, disk: speed is all that depends on it
            logger.warning("%s: measuring failed, default schedules: %s", name, error)
            return None
        finally:
            self.seconds_left -= time.monotonic() - started
            torch.cuda.empty_cache()

    def _save_measured(self, device: int, key: str, table: Table) -> None:
        from det_plugin.ops import linear_tuning

        if self.store is None:
            return
        gpu = torch.cuda.get_device_name(device)
        path = table_path(self.store.folder / "tuning", gpu)
        try:
            linear_tuning.save_table(path, gpu, key, table)
        except OSError as error:
            logger.warning("linear: the measured table is not kept, the next start measures again: %s", error)

    def _certify(
        self, n: int, k: int, dtype: torch.dtype, has_bias: bool, device: int,
        names: list[str], named: list[tuple[Algorithm, int, int]], problem: LinearProblem | None,
    ) -> Certificate:  # fmt: skip
        key = f"{table_key(dtype, n, k)},bias={int(has_bias)}"
        canonical_tile = CANONICAL[dtype]
        block = certified_rows(n, k)
        stored = self.store.load("linear", key) if self.store is not None else None
        wanted = {*names, *(f"{a.name}@{low}-{high}" for a, low, high in named)}
        # where nothing may be certified, what a table names beyond the certificate does not run (Plan.certified)
        if stored is not None and (self.mode == "require" or wanted <= set(stored.accepted) | set(stored.struck_out)):
            if stored.canonical == canonical_tile.name and stored.row_counts[-1] == block:
                return stored
        vendor = {
            f"{a.name}@{low}-{high}": (a, low, high)
            for a, low, high in [*cublaslt_ranges(problem, block).values(), *named]
        }
        data: list[Any] = []

        def make_inputs(start: int, rows: int) -> tuple[Any, ...]:
            if not data:
                data.extend(certification_data(block, n, k, dtype, has_bias, torch.device("cuda", device)))
            return data[0][start : start + rows], data[1], data[2]

        def tile_schedule(tile: Tile) -> Schedule:
            def run(x, w, bias):
                y = torch.empty((x.shape[0], n), dtype=dtype, device=x.device)
                run_tile(tile, x, w, bias, y)
                return y

            return Schedule(tile.name, run, max_rows=tile.max_rows(block))

        def cublaslt_schedule(algorithm: Algorithm, low: int, high: int) -> Schedule:
            def run(x, w, bias):
                assert problem is not None
                y = torch.empty((x.shape[0], n), dtype=dtype, device=x.device)
                stream = torch.cuda.current_stream().cuda_stream
                bind_cublaslt(problem, algorithm, x.shape[0], dtype.itemsize, _refuse)(x, w, bias, y, stream)
                return y

            return Schedule(f"{algorithm.name}@{low}-{high}", run, low, high, spread(low, high))

        thresholds = [Tile.parse(name).max_rows(block) for name in names]
        counts = row_ladder(thresholds, block)
        certificate = certify(
            "linear", key, tile_schedule(canonical_tile),
            [
                *(tile_schedule(Tile.parse(name)) for name in names if name != canonical_tile.name),
                *(cublaslt_schedule(*entry) for entry in vendor.values()),
            ],
            make_inputs, counts, store=self.store, mode=self.mode,
        )  # fmt: skip
        data.clear()
        torch.cuda.empty_cache()
        return certificate

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See :func:`linear`."""
        if weight.dim() != 2 or x.dim() == 0:
            check_linear_arguments(x, weight, bias)
        n, k = weight.shape
        device = x.device.index
        plan = self.plans.get((n, k, x.dtype, bias is not None, device))
        if plan is None or x.shape[-1] != k or weight.dtype != x.dtype or weight.device != x.device:
            check_linear_arguments(x, weight, bias)
            require_kernel_device(x)
            if n == 0 or k == 0 or x.numel() == 0:
                y = torch.zeros((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
                return y if bias is None else y + bias
            plan = self.plan(n, k, x.dtype, bias is not None, device)
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(x, weight, bias)
        rows = x if x.dim() == 2 else x.reshape(-1, k)
        m = rows.shape[0]
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        if m > 1:
            if rows.stride(1) != 1 or rows.stride(0) < k:
                rows = rows.contiguous()
        elif rows.stride(0) != k or rows.stride(1) != 1:
            rows = rows.contiguous().view(-1).view(m, k)
        if bias is not None and (bias.shape[0] != n or bias.dtype != x.dtype or bias.stride(0) != 1):
            check_linear_arguments(x, weight, bias)
            bias = bias.contiguous()
        stream = torch._C._cuda_getCurrentRawStream(device)
        if m <= plan.max_rows:
            if m and linear_fast.active():
                self._keep(plan, m, device, 0 if bias is None else bias.data_ptr())
            if m:
                (plan.by_rows.get(m) or plan.launcher(m))(rows, weight, bias, y, stream)
        else:
            for start in range(0, m, plan.max_rows):
                piece = rows[start : start + plan.max_rows]
                launch = plan.launcher(piece.shape[0])
                launch(piece, weight, bias, y[start : start + plan.max_rows], stream)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], n)

    def _keep(self, plan: Plan, m: int, device: int, bias: int) -> None:
        """Hand the choice for ``m`` rows to the compiled path, which serves the next such call."""
        if (m, bias) in plan.kept or plan.problem is None:
            return
        plan.kept.add((m, bias))
        for capturing, algorithm in ((False, plan.eager(m)), (True, plan.chosen(m))):
            values = None if algorithm is None else plan.problem.values(algorithm, m, bias)
            if values is not None:
                linear_fast.keep(plan.n, plan.k, m, plan.dtype, device, capturing, bias, values)


def _measured_key(dtype: torch.dtype, n: int, k: int, has_bias: bool) -> str:
    """How a measured table is filed: cuBLASLt's algorithms, and their certificates, differ with a bias."""
    return table_key(dtype, n, k) + (",bias=1" if has_bias else "")


def _refuse(*_: Any) -> None:
    raise RuntimeError("operands are not 16-byte aligned")


def check_linear_arguments(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Shapes, dtypes and devices of :func:`linear`.

    Raises:
        ValueError: naming the argument, what it got and what it accepts.
    """
    if x.dtype not in CANONICAL:
        raise ValueError(f"x: got dtype {x.dtype}, accepts {', '.join(map(str, CANONICAL))}")
    if weight.dim() != 2:
        raise ValueError(f"weight: got shape {list(weight.shape)}, expected two dimensions [N, K]")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: got shape {list(x.shape)}, expected [..., {weight.shape[1]}]")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise ValueError(f"{name}: got {other.dtype} on {other.device}, expected {x.dtype} on {x.device}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: got shape {list(bias.shape)}, expected [{weight.shape[0]}]")


dispatcher = LinearDispatcher()
"""The process's dispatcher: :func:`configure` replaces its settings, plans are kept per problem."""


def configure(
    store: CertificateStore | None,
    mode: Literal["auto", "require"] = "auto",
    measure: bool = True,
    fast: bool = True,
) -> None:
    """Give the process's dispatcher a certificate store; forgets plans made before.

    Args:
        store, mode, measure, fast: see :class:`LinearDispatcher`.

    Touches no GPU: the compiled path is built and loaded when the first plan is made.
    """
    dispatcher.__init__(store, mode, None, measure, fast)  # type: ignore[misc]
    linear_fast.forget()


def prepare_linear(
    n: int, k: int, dtype: torch.dtype, has_bias: bool = False, device: int | None = None
) -> Certificate:
    """Certify (and on unknown problems measure) ahead of the first call.

    Args:
        n, k: the weight's shape.
        dtype: operands' dtype.
        has_bias: whether calls pass a bias.
        device: CUDA device index, the current one when None.

    Returns:
        The certificate: accepted and struck-out schedules.

    Raises:
        CertificateError: certificates are required and missing, or a graph is being captured.
    """
    index = torch.cuda.current_device() if device is None else device
    return dispatcher.plan(n, k, dtype, has_bias, index).certificate


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x Wᵀ (+ b), batch-invariant.

    Args:
        x: [..., K], bfloat16, float16 or float32 on CUDA; any strides; may be empty.
        weight: [N, K], x's dtype.
        bias: [N], x's dtype, or None.

    Returns:
        [..., N], contiguous, x's dtype.

    Raises:
        ValueError: wrong dtype, shape or device.
        CertificateError: see :meth:`LinearDispatcher.plan`.
    """
    return torch.ops.det_plugin.linear(x, weight, bias)
