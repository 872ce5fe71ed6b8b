"""Request records: what was asked, what came back, and under which fingerprint, as JSON lines.

The first line of a record file is a header, every further line one request with its answer.  Floats are
stored as hexadecimal (``float.hex``), so that a file holds the exact bits.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from det_plugin.errors import DetPluginError

FORMAT = 1
"""Version of the record file's layout."""


class RecordError(DetPluginError, ValueError):
    """A record file cannot be read; the message names the file and the line."""


class Answer(BaseModel):
    """One completion, exactly as a server gave it.

    Attributes:
        prompt_token_ids: the token ids the server says it read (after template and tokenizer).
        token_ids: generated token ids.
        logprobs: natural-log probability of each generated token; same length as ``token_ids``.
        top_logprobs: per position a mapping token id -> logprob (the sampled token and the top k); None when
            the server sent none.
        text: the generated text, for display only.
        finish_reason: ``"length"``, ``"stop"``, ...
        cached_tokens: prompt tokens taken from the prefix cache; None when the server does not report it.
        system_fingerprint: the server's own fingerprint field, if it sends one.
    """

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: list[int] = Field(default_factory=list)
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None = None
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int | None = None
    system_fingerprint: str | None = None

    def key(self, *, top: bool = False) -> bytes:
        """Bytes that are equal exactly when token ids and logprobs (and the top k when ``top``) are equal.

        ``-0.0`` and ``0.0`` differ; a NaN equals a NaN with the same bits.
        """
        parts = [struct.pack(f"<I{len(self.token_ids)}q", len(self.token_ids), *self.token_ids)]
        parts.append(struct.pack(f"<{len(self.logprobs)}d", *self.logprobs))
        if top:
            for position in self.top_logprobs or []:
                for token, logprob in sorted(position.items()):
                    parts.append(struct.pack("<qd", token, logprob))
                parts.append(b"|")
        return b"".join(parts)


class RequestRecord(BaseModel):
    """One request and its answer.

    Attributes:
        id: name of the request inside its file; :func:`compare <det_plugin.verify.replay.compare_records>`
            pairs requests of two files by it.
        request: the JSON body that was sent (without ``model``).
        answers: one per choice (``n``).
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    request: dict[str, Any]
    answers: list[Answer]


class RecordFile(BaseModel):
    """A whole record file: the header's facts and the requests in order."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: dict[str, Any] = Field(default_factory=dict)
    created: str = ""
    records: list[RequestRecord] = Field(default_factory=list)


def _pack(answer: Answer) -> dict[str, Any]:
    data = answer.model_dump(exclude_none=True)
    data["logprobs"] = [value.hex() for value in answer.logprobs]
    if answer.top_logprobs is not None:
        data["top_logprobs"] = [{str(t): v.hex() for t, v in p.items()} for p in answer.top_logprobs]
    return data


def _unpack(data: dict[str, Any]) -> Answer:
    data = dict(data)
    data["logprobs"] = [float.fromhex(value) for value in data["logprobs"]]
    if data.get("top_logprobs") is not None:
        data["top_logprobs"] = [
            {int(t): float.fromhex(v) for t, v in position.items()} for position in data["top_logprobs"]
        ]
    return Answer(**data)


def dumps_line(record: RequestRecord) -> str:
    """One line of a record file, without the newline."""
    return json.dumps(
        {
            "kind": "request",
            "id": record.id,
            "request": record.request,
            "answers": list(map(_pack, record.answers)),
        },
        separators=(",", ":"),
    )


def header_line(fingerprint: dict[str, Any], created: str) -> str:
    """The header line of a record file, without the newline."""
    return json.dumps({"kind": "header", "format": FORMAT, "created": created, "fingerprint": fingerprint})


def write_records(
    path: str | os.PathLike[str],
    records: Iterable[RequestRecord],
    *,
    fingerprint: dict[str, Any],
    created: str = "",
) -> None:
    """Write a record file; it appears under its name only when complete.  A pipe or a device is written to.

    Args:
        path: the file; an existing one is replaced.
        records: requests with answers, in order.
        fingerprint: facts about the server that answered.
        created: date of the recording (ISO 8601).
    """
    target = Path(path)
    lines = itertools.chain([header_line(fingerprint, created)], map(dumps_line, records))
    if target.exists() and not target.is_file():  # a pipe or a device is written to, never replaced by a file
        with target.open("w", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in lines)
        return
    target = target.resolve()  # a link stays a link
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    try:
        with partial.open("w", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in lines)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_records(path: str | os.PathLike[str]) -> RecordFile:
    """Read a record file.

    Raises:
        RecordError: missing file, no header, unknown format, or a malformed line (named by its number).
    """
    name = os.fspath(path)
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"record file {name}: cannot be read ({error})") from None
    result = RecordFile()
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            kind = data["kind"]
            if number == 1:
                if kind != "header" or data["format"] != FORMAT:
                    raise RecordError(
                        f"record file {name}: line 1 is {kind!r} format {data.get('format')!r}, "
                        f"expected a header of format {FORMAT}"
                    )
                header = RecordFile(fingerprint=data["fingerprint"], created=data["created"])
                result.fingerprint, result.created = header.fingerprint, header.created
                continue
            if kind != "request":
                raise RecordError(f"record file {name}: line {number} is of kind {kind!r}, expected 'request'")
            record = RequestRecord(
                id=data["id"], request=data["request"], answers=[_unpack(a) for a in data["answers"]]
            )
            for answer in record.answers:
                if len(answer.token_ids) != len(answer.logprobs):
                    raise ValueError(f"{len(answer.token_ids)} token ids but {len(answer.logprobs)} logprobs")
        except RecordError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            text = " ".join(str(error).split())[:120]
            raise RecordError(
                f"record file {name}: line {number} is malformed ({type(error).__name__}: {text})"
            ) from None
        if record.id in seen:
            raise RecordError(f"record file {name}: line {number} repeats the request id {record.id!r}")
        seen.add(record.id)
        result.records.append(record)
    if not any(line.strip() for line in lines):
        raise RecordError(f"record file {name}: empty, expected a header line")
    return result
