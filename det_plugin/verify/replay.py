"""Record requests with their answers, send them again, and compare two recordings."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, Field

from det_plugin import __version__
from det_plugin.evidence.divergence import Divergence, first_divergence
from det_plugin.evidence.records import Answer, RecordError, RecordFile, RequestRecord, write_records
from det_plugin.evidence.results import Status
from det_plugin.verify.client import DIAGNOSTIC_TOP, CompletionClient, gather


class RecordDivergence(BaseModel):
    """One request whose answers differ.

    Attributes:
        id: the request.
        choice: which of its choices (``n``).
        divergence: first difference.
        prompt: beginning of the prompt, for display.
    """

    id: str
    choice: int
    divergence: Divergence
    prompt: str = ""


class DiffResult(BaseModel):
    """Comparison of two recordings.

    Attributes:
        total: requests found in both.
        identical: of these, how many have equal token ids and logprobs in every choice.
        differing: the others, in order.
        unpaired: ids found in one recording only.
        empty: ids whose answers hold nothing to compare: no tokens, or no top logprobs where these are asked for.
        fingerprint_changes: facts about the servers that differ, ``name: (first, second)``.
    """

    total: int = 0
    identical: int = 0
    differing: list[RecordDivergence] = Field(default_factory=list)
    unpaired: list[str] = Field(default_factory=list)
    empty: list[str] = Field(default_factory=list)
    fingerprint_changes: dict[str, tuple[Any, Any]] = Field(default_factory=dict)

    @property
    def status(self) -> Status:
        """``different``, or ``not_tested`` when nothing could be paired or some requests were not."""
        if self.differing:
            return "different"
        return "not_tested" if self.unpaired or self.empty or not self.total else "same"

    def lines(self) -> list[str]:
        """What is printed."""
        lines = [f"{name}: {a!r} and {b!r}" for name, (a, b) in sorted(self.fingerprint_changes.items())]
        lines = [f"note: the servers' fingerprints differ in {line}" for line in lines]
        if self.differing:
            first = self.differing[0]
            lines.append(f"request {first.id}, choice {first.choice} ({first.prompt!r}):")
            lines += ["  " + line for line in first.divergence.lines()]
        if self.unpaired:
            lines.append(f"not compared, in one recording only: {', '.join(self.unpaired[:8])}")
        if self.empty:
            lines.append(f"not compared, nothing in the answers to compare: {', '.join(self.empty[:8])}")
        verdict = {"same": "SAME", "different": "DIFFERENT", "not_tested": "NOT TESTED"}[self.status]
        lines.append(f"{verdict}: {self.identical} of {self.total} requests identical")
        return lines


def load_requests(path: str | os.PathLike[str], defaults: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Read a prompt file: JSON lines with a ``prompt`` field, or plain text with one prompt a line.

    Args:
        path: the file.
        defaults: fields of the request body that a line doesn't give itself.

    Returns:
        Pairs (id, request body).  A line's ``id`` field names it, else its number does.

    Raises:
        RecordError: unreadable or empty file, malformed line, or a repeated id.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"prompt file {os.fspath(path)}: cannot be read ({error})") from None
    requests: list[tuple[str, dict[str, Any]]] = []
    as_json = next((line.lstrip().startswith("{") for line in lines if line.strip()), False)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry: Any = {"prompt": line}
        if as_json:
            try:
                entry = json.loads(line, parse_constant=_no_constant)
                json.dumps(entry, ensure_ascii=False).encode()  # half of a surrogate pair is no text
            except (ValueError, RecursionError) as error:
                raise RecordError(f"prompt file {os.fspath(path)}: line {number} is not JSON ({error})") from None
            if not isinstance(entry, dict) or "prompt" not in entry:
                raise RecordError(f'prompt file {os.fspath(path)}: line {number} has no "prompt" field')
            if entry.get("stream"):
                raise RecordError(f"prompt file {os.fspath(path)}: line {number} asks for a stream; leave it out")
        name = str(entry.pop("id", number))
        if any(name == other for other, _ in requests):
            raise RecordError(f"prompt file {os.fspath(path)}: line {number} repeats the id {name!r}")
        requests.append((name, {"logprobs": DIAGNOSTIC_TOP, **defaults, **entry}))
    if not requests:
        raise RecordError(f"prompt file {os.fspath(path)}: holds no prompts")
    return requests


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


async def _ask(
    client: CompletionClient, requests: Sequence[tuple[str, dict[str, Any]]], concurrency: int
) -> tuple[list[RequestRecord], dict[str, Any]]:
    facts = await client.connect()
    limit = asyncio.Semaphore(concurrency)

    async def one(name: str, body: dict[str, Any]) -> RequestRecord:
        async with limit:
            return RequestRecord(id=name, request=body, answers=await client.post(body))

    records = await gather(one(name, body) for name, body in requests)
    prints = {a.system_fingerprint for r in records for a in r.answers} - {None}
    return records, {**facts, "system_fingerprint": ", ".join(sorted(map(str, prints))) or None}


def ask_all(
    requests: Sequence[tuple[str, dict[str, Any]]],
    *,
    base_url: str,
    model: str | None = None,
    concurrency: int = 8,
    timeout: float = 600.0,
    api_key: str | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> RecordFile:
    """Send requests to a server, ``concurrency`` at a time, and collect the answers.

    Raises:
        ServerFailureError: unreachable, gone, or an HTTP error.
    """

    async def run() -> RecordFile:
        async with CompletionClient(
            base_url, model=model, timeout=timeout, api_key=api_key, transport=transport
        ) as client:
            records, facts = await _ask(client, requests, concurrency)
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        return RecordFile(fingerprint={**facts, "recorder": __version__}, created=now, records=records)

    return asyncio.run(run())


def save(path: str | os.PathLike[str], recording: RecordFile) -> None:
    """Write a recording as a record file."""
    write_records(path, recording.records, fingerprint=recording.fingerprint, created=recording.created)


def compare_records(
    first: RecordFile, second: RecordFile, *, names: tuple[str, str] = ("first", "second"), top: bool = False
) -> DiffResult:
    """Compare two recordings request by request.

    A request whose body differs between the two counts as differing, with ``inputs`` as the cause.

    Args:
        first: the reference.
        second: the other recording.
        names: how to call them in the output.
        top: compare the top logprobs as well.
    """
    result = DiffResult()
    keys = (first.fingerprint.keys() | second.fingerprint.keys()) - {"recorder"}
    for key in keys:
        pair = (first.fingerprint.get(key), second.fingerprint.get(key))
        if pair[0] != pair[1]:
            result.fingerprint_changes[key] = pair
    others = {record.id: record for record in second.records}
    ids = {record.id for record in first.records}
    result.unpaired = [r.id for r in first.records if r.id not in others]
    result.unpaired += [r.id for r in second.records if r.id not in ids]
    for record in first.records:
        other = others.get(record.id)
        if other is None:
            continue
        result.total += 1
        found = _compare(record, other, names, top)
        if found is None and not (record.answers and all(_comparable(a, top) for a in record.answers)):
            result.empty.append(record.id)
        elif found is None:
            result.identical += 1
        else:
            result.differing.append(found)
    return result


def _comparable(answer: Answer, top: bool) -> bool:
    return bool(answer.token_ids) and (not top or bool(answer.top_logprobs))


def _compare(a: RequestRecord, b: RequestRecord, names: tuple[str, str], top: bool) -> RecordDivergence | None:
    prompt = str(a.request.get("prompt", ""))[:60]
    if a.request != b.request:
        changed = sorted(k for k in a.request.keys() | b.request.keys() if a.request.get(k) != b.request.get(k))
        divergence = Divergence(index=0, cause="inputs", reference=names[0], other=names[1])
        return RecordDivergence(
            id=a.id, choice=0, divergence=divergence, prompt=f"request fields differ: {', '.join(changed)}"
        )
    for choice in range(max(len(a.answers), len(b.answers))):
        if choice >= len(a.answers) or choice >= len(b.answers):
            divergence = Divergence(index=0, cause="length", reference=names[0], other=names[1])
        else:
            found = first_divergence(a.answers[choice], b.answers[choice], top=top, names=names)
            if found is None:
                continue
            divergence = found
        return RecordDivergence(id=a.id, choice=choice, divergence=divergence, prompt=prompt)
    return None
