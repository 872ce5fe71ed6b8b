"""Where two answers to one request first differ, and what kind of difference it is."""

from __future__ import annotations

import math
import struct
from typing import Literal

from pydantic import BaseModel

from det_plugin.evidence.records import Answer

Cause = Literal["inputs", "sampling", "numerics", "length", "undetermined"]

CAUSE_TEXT: dict[str, str] = {
    "inputs": "inputs differ: the server read other prompt token ids (template or tokenizer)",
    "sampling": "sampling differs: equal logprobs up to and at this position, another token drawn",
    "numerics": "numerics differ: the logprobs are not equal",
    "length": "length differs: one answer ends here",
    "undetermined": "tokens differ; the server sent no top logprobs that tell sampling from numerics",
}


class Divergence(BaseModel):
    """The first difference between a reference answer and another one.

    Attributes:
        index: first position that differs in token id or logprob; a position in the prompt when ``cause`` is
            ``"inputs"``, else in the generated tokens.
        cause: what differs; :data:`CAUSE_TEXT` spells it out.
        token_index: first position whose token ids differ; None when all are equal.
        token_ids: token id of the reference and of the other answer at ``index``; None past an end.
        tokens: the same, decoded for display (filled in by whoever has a tokenizer).
        logprobs: the two logprobs at ``index``.
        top_only: True when only the top-k alternatives differ, not the answer itself.
        reference: where the reference came from, for example ``"alone"``.
        other: where the other answer came from, for example ``"batch of 8, slot 3"``.
    """

    index: int
    cause: Cause
    token_index: int | None = None
    token_ids: tuple[int | None, int | None] = (None, None)
    tokens: tuple[str, str] = ("", "")
    logprobs: tuple[float | None, float | None] = (None, None)
    top_only: bool = False
    reference: str = "reference"
    other: str = "other"

    def lines(self) -> list[str]:
        """Three lines of text for a terminal."""
        where = "prompt" if self.cause == "inputs" else "output"
        head = f"first divergence at {where} index {self.index}: {CAUSE_TEXT[self.cause]}"
        if self.top_only:
            head += " (top-k alternatives only)"
        if self.token_index is not None and self.token_index != self.index:
            head += f"; token ids differ from index {self.token_index}"
        names = (self.reference, self.other)
        width = max(map(len, names))
        rows = zip(names, self.token_ids, self.tokens, self.logprobs, strict=True)
        return [head] + [
            f"  {name:<{width}}  {_token(token_id, text)}  {_logprob(logprob)}"
            for name, token_id, text, logprob in rows
        ]


def _token(token_id: int | None, text: str) -> str:
    if token_id is None:
        return "(no token)"
    return f"token {token_id}" + (f" {text!r}" if text else "")


def _logprob(value: float | None) -> str:
    return "no logprob" if value is None else f"logprob {value!r} ({value.hex()})"


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return struct.pack("<d", a) == struct.pack("<d", b)


def _at(values: list, index: int):
    return values[index] if index < len(values) else None


def _first(a: list, b: list, same) -> int | None:
    for index in range(max(len(a), len(b))):
        if index >= len(a) or index >= len(b) or not same(a[index], b[index]):
            return index
    return None


def _same_top(a: dict[int, float], b: dict[int, float]) -> bool:
    return a.keys() == b.keys() and all(_same(a[t], b[t]) for t in a)


def _token_cause(a: Answer, b: Answer, index: int) -> Cause:
    """Why tokens differ at ``index`` although everything before it is equal."""
    if index >= len(a.token_ids) or index >= len(b.token_ids):
        return "length"
    top_a = _at(a.top_logprobs or [], index)
    top_b = _at(b.top_logprobs or [], index)
    if not top_a or not top_b:
        return "undetermined"
    common = top_a.keys() & top_b.keys()
    if common and all(_same(top_a[t], top_b[t]) for t in common):
        return "sampling"
    return "numerics"


def first_divergence(
    reference: Answer,
    other: Answer,
    *,
    top: bool = False,
    names: tuple[str, str] = ("reference", "other"),
) -> Divergence | None:
    """Compare two answers bit for bit.

    Args:
        reference: the answer to compare with.
        other: the answer under test.
        top: compare the top-k ids and logprobs of each position as well.
        names: where each came from.

    Returns:
        None when prompt ids (where both are known), token ids and logprobs are equal, else the first
        difference.
    """
    if reference.prompt_token_ids and other.prompt_token_ids:
        index = _first(reference.prompt_token_ids, other.prompt_token_ids, int.__eq__)
        if index is not None:
            ids = (_at(reference.prompt_token_ids, index), _at(other.prompt_token_ids, index))
            return Divergence(index=index, cause="inputs", token_ids=ids, reference=names[0], other=names[1])
    token_index = _first(reference.token_ids, other.token_ids, int.__eq__)
    logprob_index = _first(reference.logprobs, other.logprobs, _same)
    top_index = None
    if top:
        top_index = _first(reference.top_logprobs or [], other.top_logprobs or [], _same_top)
    found = [i for i in (token_index, logprob_index, top_index) if i is not None]
    if not found:
        return None
    index = min(found)
    cause: Cause = "numerics" if index != token_index else _token_cause(reference, other, index)
    return Divergence(
        index=index,
        cause=cause,
        token_index=token_index,
        token_ids=(_at(reference.token_ids, index), _at(other.token_ids, index)),
        logprobs=(_at(reference.logprobs, index), _at(other.logprobs, index)),
        top_only=index not in (token_index, logprob_index),
        reference=names[0],
        other=names[1],
    )


def kl_divergence(p: list[float], q: list[float]) -> float:
    """Estimate KL(p || q) in nats per token from the logprobs of tokens drawn from p.

    Mean of ``exp(q - p) - 1 - (q - p)``, which is never negative and is 0 exactly when all are equal
    (Schulman, "Approximating KL divergence", 2020, the k3 estimator).

    Raises:
        ValueError: the two lists have different lengths.
    """
    if len(p) != len(q):
        raise ValueError(f"q: got {len(q)} logprobs, expected {len(p)} as in p")
    if not p:
        return 0.0
    return math.fsum(math.expm1(b - a) - (b - a) for a, b in zip(p, q, strict=True)) / len(p)
