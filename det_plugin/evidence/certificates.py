"""Certificates: proof that a schedule's bits equal its operator's canonical order.

A *schedule* is one way to carry out an operator.  :func:`certify` runs each of them on windows of rows cut
from one block of random data, and compares the bytes of every row with those the canonical schedule gave for
the whole block.  What differs is struck out, with its first differing coordinate; what remains may be chosen
freely, by row count or by speed.  Certificates are kept as JSON, one file per operator and key, in a folder
named after the fingerprint (:mod:`det_plugin.evidence.fingerprint`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from det_plugin.errors import CertificateError, ConfigError

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
"""How often a long certification says in the log how far it is."""

FORMAT = 1
"""Version of the file format; files of another version are rebuilt."""


@dataclass(frozen=True)
class Schedule:
    """One way to carry out an operator.

    Attributes:
        name: identifies the schedule in certificates, tuning tables and logs.
        run: called with the inputs that ``make_inputs`` returned; gives a tensor, or a sequence of tensors,
            whose first dimension is the rows.
        min_rows, max_rows: row counts that it serves, both inclusive; None means without bound.
        row_counts: row counts to compare it at instead of all those that :func:`certify` is given; for one of
            many similar schedules.
    """

    name: str
    run: Callable[..., Any] = field(compare=False, repr=False)
    min_rows: int = 1
    max_rows: int | None = None
    row_counts: tuple[int, ...] | None = None

    def serves(self, rows: int) -> bool:
        """Whether the schedule may run for this many rows."""
        return self.min_rows <= rows and (self.max_rows is None or rows <= self.max_rows)


@dataclass(frozen=True)
class Difference:
    """Why a schedule was struck out.

    Attributes:
        rows: row count of the run that differed, or failed.
        start: first row of its window in the block.
        coordinate: index of the first differing element in the schedule's result; None when it raised.
        expected, got: that element's bytes in hexadecimal (big-endian), or the error's text in ``got``.
        output: which result, for operators with several.
    """

    rows: int
    start: int
    coordinate: tuple[int, ...] | None
    expected: str
    got: str
    output: int = 0

    def __str__(self) -> str:
        if self.coordinate is None:
            return f"rows {self.rows}: {self.got}"
        where = f"output {self.output} " if self.output else ""
        return (
            f"rows {self.rows} from {self.start}: {where}first difference at {list(self.coordinate)}: "
            f"canonical 0x{self.expected}, got 0x{self.got}"
        )


@dataclass(frozen=True)
class Certificate:
    """Result of :func:`certify`.

    Attributes:
        operator: operator's name, for example ``"linear"``.
        key: what else the schedules depend on, for example ``"bfloat16,N=4096,K=4096,bias=0"``.
        canonical: name of the schedule that defines the bits.
        accepted: names of the schedules that agreed on every row (the canonical one first).
        struck_out: name of each other schedule, and why.
        row_counts: the row counts that were compared.
        comparisons: number of rows compared over all schedules.
        fingerprint: digest of the fingerprint it is valid under; empty when it was not stored.
        created: UTC time, ISO 8601.
    """

    operator: str
    key: str
    canonical: str
    accepted: tuple[str, ...]
    struck_out: dict[str, Difference]
    row_counts: tuple[int, ...]
    comparisons: int = 0
    fingerprint: str = ""
    created: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-able form; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Certificate:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError, TypeError, KeyError: ``value`` is not of that form.
        """
        if not isinstance(value, dict):
            raise TypeError(f"certificate: got {type(value).__name__}, expected an object")
        value = dict(value)
        struck = {
            str(name): Difference(**{**d, "coordinate": None if d["coordinate"] is None else tuple(d["coordinate"])})
            for name, d in value.pop("struck_out").items()
        }
        accepted = tuple(map(str, value.pop("accepted")))
        rows = tuple(map(int, value.pop("row_counts")))
        certificate = cls(**value, accepted=accepted, struck_out=struck, row_counts=rows)
        if certificate.canonical not in certificate.accepted:
            raise ValueError(f"certificate: canonical {certificate.canonical!r} is not among the accepted")
        return certificate


def default_store_path() -> Path:
    """``<user cache>/det_plugin/certificates``; ``DET_PLUGIN_CERTIFICATES`` overrides it."""
    override = os.environ.get("DET_PLUGIN_CERTIFICATES")
    if override:
        return Path(override)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("det_plugin")) / "certificates"


class CertificateStore:
    """Certificates of one fingerprint, on disk.

    Args:
        digest: the fingerprint's digest.
        root: folder of all fingerprints; :func:`default_store_path` when None.
        facts: the fingerprint itself, written once beside the certificates for people to read.
        on_unkept: called with a certificate that can't be written, and why.

    Raises:
        ConfigError: no certificate could be kept or found in the folder.
    """

    def __init__(
        self,
        digest: str,
        root: Path | None = None,
        facts: dict[str, Any] | None = None,
        on_unkept: Callable[[Certificate, OSError], None] | None = None,
    ) -> None:
        self.digest = digest
        self.folder = (default_store_path() if root is None else Path(root)) / digest
        self._facts, self._on_unkept = facts, on_unkept
        self._unkept: dict[tuple[str, str], Certificate] = {}
        _check_folder(self.folder)

    def path(self, operator: str, key: str) -> Path:
        """File of one certificate."""
        readable = re.sub(r"[^A-Za-z0-9._=-]+", "_", key)[:80]
        return self.folder / operator / f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"

    def load(self, operator: str, key: str) -> Certificate | None:
        """The stored certificate, or None.  A damaged file is removed, and the log says so."""
        if (operator, key) in self._unkept:
            return self._unkept[operator, key]
        path = self.path(operator, key)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            return self._discard(path, f"unreadable ({error})")
        certificate = _parse(text)
        if isinstance(certificate, str):
            return self._discard(path, certificate)
        found = (certificate.operator, certificate.key, certificate.fingerprint)
        if found != (operator, key, self.digest):
            return self._discard(path, "belongs to another operator, key or fingerprint")
        return certificate

    def save(self, certificate: Certificate) -> Certificate:
        """Write atomically (temporary file, then rename); returns the certificate with its fingerprint."""
        certificate = replace(certificate, fingerprint=self.digest)
        body = certificate.to_json()
        path = self.path(certificate.operator, certificate.key)
        _write_atomically(path, {"format": FORMAT, "sha256": _digest(body), "certificate": body})
        self._unkept.pop((certificate.operator, certificate.key), None)
        if self._facts is not None and not (self.folder / "fingerprint.json").exists():
            with contextlib.suppress(OSError):  # for people to read; the next certificate tries again
                _write_atomically(self.folder / "fingerprint.json", self._facts)
        return certificate

    def keep(self, certificate: Certificate) -> Certificate:
        """:meth:`save`, or, where the folder can't be written, a warning; this process then keeps it in memory."""
        try:
            return self.save(certificate)
        except OSError as error:
            logger.warning(
                "certificate of %s for %s is not kept, the next start makes it again: %s; "
                "set DET_PLUGIN_CERTIFICATES to a folder that can be written",
                certificate.operator, certificate.key, error,
            )  # fmt: skip
            if self._on_unkept is not None:
                self._on_unkept(certificate, error)
        certificate = replace(certificate, fingerprint=self.digest)
        self._unkept[certificate.operator, certificate.key] = certificate
        return certificate

    def all(self) -> list[Certificate]:
        """Every undamaged certificate of this fingerprint."""
        found = []
        for path in sorted(self.folder.glob("*/*.json")):
            try:
                certificate = _parse(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
            if isinstance(certificate, Certificate):
                found.append(certificate)
        return found

    def _discard(self, path: Path, why: str) -> Certificate | None:
        logger.warning("certificate %s is %s: it will be rebuilt", path, why)
        with contextlib.suppress(OSError):  # a folder that can't be written: there is nothing to remove it for
            path.unlink(missing_ok=True)
        return None


def _check_folder(folder: Path) -> None:
    """Refuse a folder when it, or what it would be made in, is none or can't be read."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        usable = nearest.is_dir()
        readable = usable and os.access(nearest, os.R_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"certificate folder: got {folder} ({error})") from None
    if not usable:
        raise ConfigError(
            f"certificate folder: got {folder}, but {nearest} is not a folder; "
            "remove it, or set DET_PLUGIN_CERTIFICATES to a folder"
        )
    if not readable:
        raise ConfigError(
            f"certificate folder: got {folder}, no permission to read {nearest}; "
            "change it, or set DET_PLUGIN_CERTIFICATES to a folder of yours"
        )


def _parse(text: str) -> Certificate | str:
    """The certificate that a file's text holds, or what is wrong with it."""
    try:
        document = json.loads(text)
        if document.get("format") != FORMAT:
            return f"format {document.get('format')!r}, expected {FORMAT}"
        body = document["certificate"]
        if document.get("sha256") != _digest(body):
            return "checksum mismatch"
        return Certificate.from_json(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"damaged ({error})"


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write_atomically(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, default=str)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def row_ladder(thresholds: Iterable[int], max_rows: int) -> tuple[int, ...]:
    """Row counts from 1 to ``max_rows``: both sides of every threshold and of every power of two."""
    counts = {1, 2, 3, max_rows}
    power = 4
    while power <= max_rows:
        counts.update((power - 1, power, power + 1))
        power *= 2
    for threshold in thresholds:
        counts.update((threshold - 1, threshold, threshold + 1))
    return tuple(sorted(c for c in counts if 1 <= c <= max_rows))


def certify(
    operator: str,
    key: str,
    canonical: Schedule,
    schedules: Sequence[Schedule],
    make_inputs: Callable[[int, int], tuple[Any, ...]],
    row_counts: Sequence[int],
    *,
    store: CertificateStore | None = None,
    mode: Literal["auto", "require"] = "auto",
) -> Certificate:
    """Compare every schedule with the canonical order, byte for byte; or return the stored certificate.

    Args:
        operator, key: name the certificate; everything the schedules depend on belongs into ``key``.
        canonical: the schedule that defines the bits.  It too must give the same bits at every row count.
        schedules: candidates; ``canonical`` may be among them.
        make_inputs: ``make_inputs(start, rows)`` gives the operator's inputs for rows ``start`` to
            ``start + rows`` of one fixed block of random data.
        row_counts: row counts to compare at, each within the block; put both sides of every dispatch
            threshold in (:func:`row_ladder`).
        store: where certificates are kept; None keeps nothing.
        mode: ``"require"`` refuses to make a missing certificate.

    Returns:
        The certificate; ``struck_out`` says why each other schedule may not run.

    Raises:
        CertificateError: the canonical schedule disagrees with itself, or the certificate is missing and
            ``mode`` is ``"require"``.
    """
    counts = tuple(sorted(set(row_counts)))
    if not counts or counts[0] < 1:
        raise ValueError(f"row_counts: got {list(row_counts)!r}, expected positive row counts")
    names = [canonical.name, *(s.name for s in schedules if s.name != canonical.name)]
    if len(set(names)) != len(names):
        raise ValueError(f"schedules: got names {names}, expected distinct ones")
    if store is not None:
        stored = store.load(operator, key)
        if stored is not None and _covers(stored, names, counts):
            return stored
    if mode == "require":
        raise CertificateError(
            f"certificate of {operator} for {key} is missing under fingerprint "
            f"{store.digest if store else '(no store)'}: make it with `det-plugin certify MODEL`, "
            "or start with certificates set to 'auto'"
        )
    kept = f", to be kept in {store.folder}" if store is not None else ""
    logger.info("%s %s: certifying %d schedules%s", operator, key, len(names), kept)
    begun = said = time.monotonic()
    block = counts[-1]
    expected = _outputs(canonical.run(*make_inputs(0, block)))
    accepted: list[str] = []
    struck: dict[str, Difference] = {}
    compared = 0
    for number, schedule in enumerate((canonical, *(s for s in schedules if s.name != canonical.name))):
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            logger.info("%s %s: %d of %d schedules after %.0f s", operator, key, number, len(names), said - begun)
        difference = None
        for rows in counts if schedule.row_counts is None else sorted(set(schedule.row_counts)):
            if not schedule.serves(rows):
                continue
            if rows > block:
                raise ValueError(f"{schedule.name}.row_counts: got {rows}, expected at most {block}")
            for start in sorted({0, (block - rows) // 2, block - rows}):
                difference = _compare(schedule, make_inputs(start, rows), expected, start, rows)
                compared += rows
                if difference is not None:
                    break
            if difference is not None:
                break
        if difference is None:
            accepted.append(schedule.name)
        else:
            struck[schedule.name] = difference
        if schedule is canonical and difference is not None:
            raise CertificateError(
                f"{operator} for {key}: canonical schedule {canonical.name} depends on the row count: {difference}"
            )
    certificate = Certificate(
        operator=operator,
        key=key,
        canonical=canonical.name,
        accepted=tuple(accepted),
        struck_out=struck,
        row_counts=counts,
        comparisons=compared,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    for name, difference in struck.items():
        logger.debug("%s for %s: schedule %s struck out: %s", operator, key, name, difference)
    if time.monotonic() - begun > PROGRESS_SECONDS:
        seconds = time.monotonic() - begun
        logger.info("%s %s: %d certified, %d struck out, in %.0f s", operator, key, len(accepted), len(struck), seconds)
    return store.keep(certificate) if store is not None else certificate


def _covers(certificate: Certificate, names: Sequence[str], counts: Sequence[int]) -> bool:
    known = set(certificate.accepted) | set(certificate.struck_out)
    return certificate.canonical == names[0] and set(names) <= known and set(counts) <= set(certificate.row_counts)


def _outputs(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _compare(
    schedule: Schedule, inputs: tuple[Any, ...], expected: Sequence[Any], start: int, rows: int
) -> Difference | None:
    try:
        results = _outputs(schedule.run(*inputs))
    except Exception as error:
        return Difference(rows, start, None, "", f"{type(error).__name__}: {str(error)[:200]}")
    for index, (want, got) in enumerate(zip(expected, results, strict=True)):
        found = first_difference(want[start : start + rows], got)
        if found is not None:
            return Difference(rows, start, *found, output=index)
    return None


_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def _bits(array: Any) -> Any:
    """Integer view of a torch tensor or numpy array: equal exactly when the bytes are."""
    if hasattr(array, "element_size"):
        import torch

        return array.contiguous().view(getattr(torch, _INTEGERS[array.element_size()]))
    import numpy

    return numpy.ascontiguousarray(array).view(_INTEGERS[array.dtype.itemsize])


def first_difference(expected: Any, got: Any) -> tuple[tuple[int, ...] | None, str, str] | None:
    """First element whose bytes differ: ``(index, expected bytes, got bytes)`` in hexadecimal, or None.

    Takes two torch tensors or two numpy arrays.  ``-0.0`` and ``0.0`` differ; a NaN equals itself.
    """
    if tuple(expected.shape) != tuple(got.shape) or expected.dtype != got.dtype:
        return None, f"{expected.dtype}{list(expected.shape)}", f"{got.dtype}{list(got.shape)}"
    a, b = _bits(expected), _bits(got)
    unequal = a != b
    if not bool(unequal.any()):
        return None
    unequal = unequal.reshape(-1)
    flat = int((unequal.int() if hasattr(unequal, "int") else unequal).argmax())
    index, rest = [], flat
    for size in reversed(tuple(a.shape)):
        index.append(rest % size)
        rest //= size
    size = expected.element_size() if hasattr(expected, "element_size") else expected.dtype.itemsize
    hexadecimal = [f"{int(v.reshape(-1)[flat]) & ((1 << (8 * size)) - 1):0{2 * size}x}" for v in (a, b)]
    return tuple(reversed(index)), hexadecimal[0], hexadecimal[1]
