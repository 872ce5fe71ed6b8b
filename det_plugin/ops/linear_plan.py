"""Plans of the linear operator: which certified schedule runs at which row count.

See :mod:`det_plugin.ops.linear_cuda` for the contract and :mod:`det_plugin.ops.linear_schedules` for the
schedules' names.
"""

from collections.abc import Callable

import torch

from det_plugin.errors import CertificateError
from det_plugin.evidence.certificates import Certificate
from det_plugin.ops._cublaslt import Algorithm, LinearProblem
from det_plugin.ops.linear_schedules import CANONICAL, Table, Tile, bind_tile

MAX_ROWS = 8192
MAX_BLOCK_ELEMENTS = 2**28
DEFAULT_TABLES: dict[torch.dtype, Table] = {
    torch.bfloat16: ((None, "cublaslt"),),
    torch.float16: ((None, "cublaslt"),),
    torch.float32: (
        (32, "pointer-16x32x32-w4-s6"),
        (256, "pointer-32x64x32-w4-s3"),
        (1024, CANONICAL[torch.float32].name),
        (None, "pointer-128x64x32-w4-s3"),
    ),
}
"""For problems that were not measured.  No cuBLASLt algorithm has float32's order."""

OFFERED = 8
"""How many of the heuristic's suggestions are looked at for an algorithm that a table names."""

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, int], None]


def asked_rows(m: int) -> int:
    """Row count that cuBLASLt's heuristic is asked for: exact up to 512, then the next multiple of 64."""
    return m if m <= 512 else -(-m // 64) * 64


def certified_rows(n: int, k: int) -> int:
    """Largest row count of one launch, a power of two: bounds the memory that certifying takes."""
    rows = MAX_ROWS
    while rows > 64 and rows * max(n, k) > MAX_BLOCK_ELEMENTS:
        rows //= 2
    return rows


def certification_data(
    rows: int, n: int, k: int, dtype: torch.dtype, has_bias: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Random x, W, b in which a change of order shows.

    The second half of K nearly cancels the first in every other row, so that what an order rounds off weighs
    more in the small result.
    """
    generator = torch.Generator(device).manual_seed(0x5EED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    x, w = normal(rows, k), normal(n, k)
    half = k // 2
    if half:
        w[:, half : 2 * half] = w[:, :half]
        x[1::2, half : 2 * half] = normal(rows // 2, half) / 64 - x[1::2, :half]
    return x, w, normal(n) if has_bias else None


class Plan:
    """Certified schedules of one (N, K, dtype, bias) on one device, and what runs at which row count."""

    def __init__(
        self,
        n: int,
        k: int,
        dtype: torch.dtype,
        has_bias: bool,
        table: Table,
        certificate: Certificate,
        problem: LinearProblem | None,
    ) -> None:
        self.n, self.k, self.dtype, self.has_bias = n, k, dtype, has_bias
        self.table, self.certificate, self.problem = table, certificate, problem
        self.max_rows = certified_rows(n, k)
        self.accepted = frozenset(certificate.accepted)
        self.by_rows: dict[int, Launch] = {}
        self.kept: set[tuple[int, int]] = set()
        self._ranges = [parse_range(name) for name in certificate.accepted if name.startswith("cublaslt")]
        self._vendor: dict[int, Algorithm | None] = {}
        self._named = {a.name: a for a, _, _ in named_algorithms(problem, table, self.max_rows)}

    def schedule(self, m: int) -> str:
        """Name of what runs for ``m`` rows: the table's choice if certified, else cuBLASLt, else canonical."""
        wanted = next(name for bound, name in self.table if bound is None or m <= bound)
        if wanted in self.accepted and m <= Tile.parse(wanted).max_rows(self.max_rows):
            return wanted
        if self.certified(wanted, m) and wanted in self._named:
            return wanted
        vendor = self.vendor(m)
        return vendor.name if vendor is not None else CANONICAL[self.dtype].name

    def certified(self, algorithm: str, m: int) -> bool:
        """Whether a cuBLASLt algorithm is certified at ``m`` rows."""
        return any(name == algorithm and low <= m <= high for name, low, high in self._ranges)

    def vendor(self, m: int) -> Algorithm | None:
        """cuBLASLt's first choice for ``m`` rows if it is certified at such row counts, else None."""
        if self.problem is None:
            return None
        asked = min(asked_rows(m), self.max_rows)
        if asked not in self._vendor:
            first = next(iter(self.problem.algorithms(asked, 1)), None)
            self._vendor[asked] = first if first is not None and self.certified(first.name, m) else None
        return self._vendor[asked]

    def chosen(self, m: int) -> Algorithm | None:
        """The cuBLASLt algorithm that :meth:`schedule` names for ``m`` rows, or None when it names a tile."""
        name = self.schedule(m)
        if not name.startswith("cublaslt"):
            return None
        return self._named[name] if name in self._named else self.vendor(m)

    def eager(self, m: int) -> Algorithm | None:
        """The algorithm that costs least processor time outside CUDA graphs; None when there is none."""
        return self.chosen(m) or self.vendor(m)

    def launcher(self, m: int) -> Launch:
        """What :func:`linear` calls for ``m`` <= :attr:`max_rows` rows."""
        found = self.by_rows.get(m)
        if found is None:
            found = self.by_rows[m] = self.bind(self.schedule(m), m)
        return found

    def bind(self, name: str, m: int) -> Launch:
        """Launcher of one schedule for ``m`` rows; operands it cannot read go to the canonical tile."""
        if not name.startswith("cublaslt"):
            canonical = bind_tile(CANONICAL[self.dtype], m, self.n, self.k)
            return bind_tile(Tile.parse(name), m, self.n, self.k, canonical)
        algorithm = self._named.get(name) or self.vendor(m)
        if self.problem is None or algorithm is None or algorithm.name != name:
            raise CertificateError(f"schedule {name}: not certified for N={self.n}, K={self.k}, {m} rows")
        return self.bind_algorithm(algorithm, m)

    def bind_algorithm(self, algorithm: Algorithm, m: int) -> Launch:
        """Launcher of a cuBLASLt algorithm for ``m`` rows."""
        assert self.problem is not None
        canonical = bind_tile(CANONICAL[self.dtype], m, self.n, self.k)
        return bind_cublaslt(self.problem, algorithm, m, self.dtype.itemsize, canonical)


def parse_range(name: str) -> tuple[str, int, int]:
    """``(algorithm, smallest, largest row count)`` of a certified cuBLASLt schedule ``algorithm@low-high``."""
    algorithm, rows = name.split("@")
    low, high = rows.split("-")
    return algorithm, int(low), int(high)


def bind_cublaslt(problem: LinearProblem, algorithm: Algorithm, m: int, size: int, otherwise: Launch) -> Launch:
    """Launcher of one cuBLASLt algorithm; operands that are not 16-byte aligned go to ``otherwise``."""
    raw = problem.bind(algorithm, m)

    def launch_cublaslt(x, w, bias, y, stream) -> None:
        x_at, w_at, x_stride, w_stride = x.data_ptr(), w.data_ptr(), x.stride(0), w.stride(0)
        bias_at = 0 if bias is None else bias.data_ptr()
        if (
            (x_at | w_at | bias_at | x_stride * size | w_stride * size) & 15
            or w.stride(1) != 1
            or x.stride(1) != 1
            or w_stride < problem.k
        ):
            otherwise(x, w, bias, y, stream)
            return
        raw(x_at, w_at, bias_at, y.data_ptr(), x_stride, w_stride, stream)

    return launch_cublaslt


def cublaslt_ranges(problem: LinearProblem | None, block: int) -> dict[str, tuple[Algorithm, int, int]]:
    """Every algorithm that may be chosen up to ``block`` rows, with the smallest and largest such row count."""
    ranges: dict[str, tuple[Algorithm, int, int]] = {}
    if problem is None:
        return ranges
    for asked in sorted({asked_rows(m) for m in range(1, block + 1)}):
        offered = problem.algorithms(asked, 1)
        if offered:
            smallest = asked if asked <= 512 else asked - 63
            _, low, _ = ranges.get(offered[0].name, (None, smallest, 0))
            ranges[offered[0].name] = (offered[0], low, asked)
    return ranges


def spread(low: int, high: int) -> tuple[int, ...]:
    """Row counts at which one algorithm of a range is compared: both ends, beside them, and in between."""
    middle = round((low * high) ** 0.5)
    return tuple(sorted({low, min(low + 1, high), middle, (low + high) // 2 | 1, max(low, high - 1), high}))


def named_algorithms(problem: LinearProblem | None, table: Table, block: int) -> list[tuple[Algorithm, int, int]]:
    """The cuBLASLt algorithms that a table names, each with the row counts it names them for.

    An algorithm that this version of the library does not offer there is left out: its row counts run the
    heuristic's first choice.
    """
    found: list[tuple[Algorithm, int, int]] = []
    low = 1
    for bound, name in table:
        high = block if bound is None else min(bound, block)
        if problem is not None and name.startswith("cublaslt-") and low <= high:
            offered = problem.algorithms(asked_rows(high), OFFERED)
            found += [(a, low, high) for a in offered if a.name == name]
        low = high + 1
    return found
