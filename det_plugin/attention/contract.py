"""The attention contract: one order of summation, shared by every schedule.

For a query row at position ``p`` (0-based, counted from the start of its request) and one of its heads::

    s_j = softcap(q . k_j) ,  w_j = exp(scale * s_j) ,  out = sum_j w_j v_j / (sum_j w_j + w_sink)

over the visible keys ``max(0, p - window + 1) <= j <= p``.  The canonical order is:

1. Keys are cut into blocks of :data:`BLOCK_KEYS`, aligned to position 0, and blocks into segments, also aligned to
   position 0: of :data:`FINE_SEGMENT_KEYS` keys in the first :data:`FINE_KEYS`, of :data:`SEGMENT_KEYS` after them
   (:func:`segment_of`).  Few short requests then still fill a GPU, and long contexts have few partial results.
2. Inside a segment the blocks are walked upwards with a running maximum ``m``: scores in fp32; weights
   ``exp2(fma(s, c, -m c))`` with ``c = scale * log2(e)``, rounded to the cache's dtype; the fp32 accumulators
   of ``sum w v`` and ``sum w`` are scaled by ``exp2((m_old - m_new) c)`` and then fed by matrix products
   (the sum of weights is a product with ones, so that it does not depend on how a tile is laid out over
   threads).
3. Segments are folded upwards, in fp32, into ``(O, M, L)``, which starts at ``(0, sink, 1)`` with a sink and
   at ``(0, -inf, 0)`` without: ``O = fma(O, exp2((M - M') c), acc * exp2((m - M') c))``, ``L`` alike.
4. ``out = O / L``, rounded once, with ``-0.0`` written as ``0.0``.

A block or a segment that is masked for a row leaves every bit of that row's state as it was, so it makes no
difference whether a schedule visits it.  Hence the result of a row depends on its own query, its own keys and
values, and the constants above; never on the tile height, the other rows of a tile, the number of programs
that share a row's segments, the page size, or the batch.

Keys and values must be finite.  Results hold for one GPU architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

from det_plugin.errors import UnsupportedError

BLOCK_KEYS = 64
"""Keys per block of the canonical order."""

SEGMENT_KEYS = 512
"""Keys per segment of the canonical order, from position :data:`FINE_KEYS` on."""

FINE_SEGMENT_KEYS = 128
"""Keys per segment before position :data:`FINE_KEYS`."""

FINE_KEYS = 2048
"""Where the short segments end; a multiple of both segment lengths."""

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
FLASHINFER_HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
PAGE_MULTIPLE = 16
PAGE_MAX = 1024


def segment_of(key: int) -> int:
    """Number of the segment that holds position ``key``."""
    if key < FINE_KEYS:
        return key // FINE_SEGMENT_KEYS
    return FINE_KEYS // FINE_SEGMENT_KEYS + (key - FINE_KEYS) // SEGMENT_KEYS


def segment_start(number: int) -> int:
    """First position of segment ``number``."""
    fine = FINE_KEYS // FINE_SEGMENT_KEYS
    return number * FINE_SEGMENT_KEYS if number <= fine else FINE_KEYS + (number - fine) * SEGMENT_KEYS


@dataclass(frozen=True)
class AttentionConfig:
    """Everything a layer's attention depends on besides its inputs.

    Attributes:
        num_heads: query heads of this rank.
        num_kv_heads: key and value heads of this rank; divides ``num_heads``.
        head_dim: width of a head; keys and values alike.
        dtype: ``"bfloat16"`` or ``"float16"``; queries and cache alike.
        scale: factor of the scores, positive.
        window: keys visible to a row, its own included; 0 for all.
        softcap: scores become ``softcap * tanh(scale * s / softcap)``; 0.0 for none.
        sinks: whether each head has a sink logit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


def check_config(
    backend: str,
    *,
    head_dim: int,
    dtype: str,
    kv_cache_dtype: str | None = "auto",
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    page_size: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: bool = False,
    attn_type: str = "decoder",
    mla: bool = False,
    alibi: bool = False,
    compute_capability: tuple[int, int] | None = None,
) -> None:
    """Refuse what ``backend`` (``"triton"``, ``"fa3"`` or ``"flashinfer"``) is not proven for.

    Raises:
        UnsupportedError: naming the feature, the reason and what to use instead.
    """

    def refuse(feature: str, reason: str, instead: str) -> None:
        raise UnsupportedError(f"{feature} with the {backend} attention backend", reason, instead)

    if compute_capability is not None and compute_capability < (8, 0):
        refuse(
            f"compute capability {compute_capability[0]}.{compute_capability[1]}",
            "its kernels need 8.0 or newer",
            "use a GPU of the Ampere generation or newer",
        )
    if backend == "fa3" and compute_capability is not None and compute_capability[0] != 9:
        refuse(
            f"compute capability {compute_capability[0]}.{compute_capability[1]}",
            "FlashAttention 3 runs on Hopper only",
            "choose --attention-backend TRITON_ATTN",
        )
    if mla:
        refuse("multi-head latent attention", "no order is defined for it", "serve a model without MLA")
    if attn_type != "decoder":
        refuse(f"attention type {attn_type!r}", "only causal decoder attention is proven", "serve a decoder-only model")
    if alibi:
        refuse("ALiBi", "no order is defined for its bias", "serve a model without ALiBi")
    dims = FLASHINFER_HEAD_DIMS if backend == "flashinfer" else HEAD_DIMS
    if head_dim not in dims:
        refuse(
            f"head size {head_dim}",
            f"proven for {', '.join(map(str, dims))}",
            "choose --attention-backend TRITON_ATTN" if head_dim in HEAD_DIMS else "serve a model with one of these",
        )
    if dtype not in DTYPES:
        refuse(
            f"dtype {dtype}",
            "its products would not run on matrix units with an fp32 accumulator",
            "pass --dtype bfloat16 or --dtype float16",
        )
    if kv_cache_dtype not in (None, "auto", dtype):
        refuse(
            f"kv-cache dtype {kv_cache_dtype}",
            "keys from the cache would differ from fresh ones",
            "pass --kv-cache-dtype auto",
        )
    if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
        refuse(
            f"{num_heads} query heads over {num_kv_heads} key heads",
            "heads do not divide evenly",
            "choose a tensor-parallel size that divides both",
        )
    if page_size is not None and (page_size % PAGE_MULTIPLE or page_size > PAGE_MAX):
        refuse(
            f"block size {page_size}",
            f"accepts multiples of {PAGE_MULTIPLE} up to {PAGE_MAX}",
            "pass --block-size 16, 32, 64 or 128",
        )
    if scale is not None and not scale > 0:
        refuse(f"softmax scale {scale}", "the order assumes a positive scale", "serve a model with a positive scale")
    if softcap < 0 or window < 0:
        refuse(f"softcap {softcap}, window {window}", "negative values have no meaning", "use 0 for none")
    if backend == "flashinfer" and sinks:
        refuse("attention sinks", "the kernel in use has none", "choose --attention-backend TRITON_ATTN")
