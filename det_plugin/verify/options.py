"""Options of a verification."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from det_plugin.config import INT64_MAX

TestMode = Literal["single", "prefix", "radix_cache", "p_vs_d", "mixed"]
ALL_MODES: tuple[TestMode, ...] = get_args(TestMode)

MAX_BATCH = 65_536
"""Most requests in one batch, and most trials: their prompts are made in advance, in this process's memory."""
MAX_TOKENS = 2**31 - 1

QUICK: dict[str, Any] = {
    "batch_sizes": [1, 4, 11],
    "n_trials": 4,
    "max_new_tokens": 24,
    "prefix_lengths": [1, 511, 1023],
    "long_prompt_tokens": 500,
    "temperatures": [0.0, 0.8],
}
"""What ``--quick`` changes: a pass over every mode in about a minute on a two-core CPU server."""


class VerifyOptions(BaseModel):
    """What to test, against which server.

    Attributes:
        base_url: ``http://host:port``, with or without ``/v1``.
        model: name the server serves; None takes the first of ``/v1/models``.
        test_modes: any of ``single``, ``prefix``, ``radix_cache``, ``p_vs_d``, ``mixed``.
        n_trials: trials per mode; in ``single`` and ``prefix`` trial i has batch size ``n_start + i``.
        n_start: first batch size.
        batch_sizes: replaces the range made of ``n_start`` and ``n_trials``.
        temperatures: every mode runs once with each.
        sampling_seed: seed of the requests when the temperature is above 0; None sends none.
        max_new_tokens: generated tokens per sample.
        frequency_penalty: of the requests under test.
        presence_penalty: of the requests under test.
        top_p: of the requests under test; None leaves it out.
        top_k: of the requests under test; None leaves it out.
        min_p: of the requests under test; None leaves it out.
        top_logprobs: compare this many top logprobs per position as well; 0: the sampled token's only.
        stream: read the answers as a stream.
        prefix_lengths: shared prefixes of ``prefix``, in tokens; cut to the model's context.
        long_prompt_tokens: the prompt that joins in mid-decode in ``mixed``; cut to the model's context.
        concurrency: most requests in flight at once in ``radix_cache`` and ``p_vs_d``.
        rng_seed: seed of the verification's own choices (prompts, positions, neighbours).
        timeout: seconds that one request may take, its whole answer included, before the server counts as gone.
        api_key: sent as a bearer token.
    """

    model_config = ConfigDict(extra="forbid")

    base_url: str = "http://localhost:8000"
    model: str | None = None
    test_modes: list[TestMode] = Field(default=list(ALL_MODES), min_length=1)
    n_trials: int = Field(default=50, ge=1, le=MAX_BATCH)
    n_start: int = Field(default=1, ge=1, le=MAX_BATCH)
    batch_sizes: list[int] | None = None
    temperatures: list[float] = Field(default=[0.0], min_length=1)
    sampling_seed: int | None = Field(default=42, ge=0, le=INT64_MAX)
    max_new_tokens: int = Field(default=100, ge=2, le=MAX_TOKENS)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1)
    top_logprobs: int = Field(default=0, ge=0)
    stream: bool = False
    prefix_lengths: list[int] = Field(default=[1, 511, 2048, 4097], min_length=1)
    long_prompt_tokens: int = Field(default=2048, ge=1)
    concurrency: int = Field(default=8, ge=1)
    rng_seed: int = 0
    timeout: float = Field(default=600.0, gt=0)
    api_key: str | None = Field(default=None, exclude=True, repr=False)

    @field_validator("test_modes", mode="before")
    @classmethod
    def _expand_all(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        return list(ALL_MODES) if "all" in value else value

    @field_validator("temperatures")
    @classmethod
    def _finite(cls, value: list[float]) -> list[float]:
        for temperature in value:
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"temperature: got {temperature}, accepts 0 or above")
        return value

    @field_validator("batch_sizes", "prefix_lengths")
    @classmethod
    def _positive(cls, value: list[int] | None, info: ValidationInfo) -> list[int] | None:
        limit = MAX_BATCH if info.field_name == "batch_sizes" else MAX_TOKENS
        for number in value or []:
            if not 1 <= number <= limit:
                raise ValueError(f"got {number}, accepts 1 to {limit}")
        if value is not None and not value:
            raise ValueError("got an empty list")
        return value

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of ``single`` and ``prefix``."""
        return self.batch_sizes or list(range(self.n_start, self.n_start + self.n_trials))
