"""Plans of FA3 and FlashInfer: what each row is cut into follows from its position alone.  No GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from det_plugin.attention import check_config, contract, fa3, flashinfer
from det_plugin.errors import ConfigError, UnsupportedError

LAYOUT = fa3.Layout(32, 8, 128, 16, torch.bfloat16)


@pytest.fixture
def no_vendor(monkeypatch):
    monkeypatch.setattr(fa3, "_metadata", lambda *a, **k: torch.zeros(1, dtype=torch.int32))


def rows_of(launches):
    """(row -> (splits of its launch, sequence's blocks, request)) over all launches; every row once."""
    seen = {}
    for launch in launches:
        for i, start in enumerate(launch.cu_seqlens_q[:-1].tolist()):
            for k in range(int(launch.seqused_q[i])):
                row = launch.rows.start + start + k
                assert row not in seen
                last = int(launch.seqused_k[i]) - int(launch.seqused_q[i]) + k
                seen[row] = (
                    launch.num_splits,
                    int(LAYOUT.splits(int(launch.seqused_k[i]))),
                    last,
                    int(launch.kv_batch_idx[i]),
                )
    return seen


@pytest.mark.parametrize("chunk", [1, 64, 500, 4096])
def test_splits_of_a_row_do_not_depend_on_the_chunk(no_vendor, chunk):
    length, want = 6000, {}
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        got = rows_of(fa3.plan_rows(LAYOUT, np.array([end - start]), np.array([end]), 40960, "cpu"))
        assert sorted(got) == list(range(end - start))
        for row, (_, splits, position, _) in got.items():
            want[position] = splits
            assert position == start + row
    assert want == {p: 1 if p < 3072 else -(-(p // 128 + 1) // 16) for p in range(length)}


def test_rows_that_are_split_share_a_tile_only_with_rows_of_as_many_blocks(no_vendor):
    pieces = fa3.cut_rows(LAYOUT, np.array([1, 5000, 300]), np.array([9000, 5000, 3150]))
    for request, rows, end in pieces.tolist():
        first, last = (end - rows) // 128, (end - 1) // 128
        assert first == last or end <= 3072, (request, rows, end)
    assert pieces[:, 1].sum() == 5301


def test_rows_and_requests_of_a_mixed_batch(no_vendor):
    start, lengths = np.array([0, 1, 2, 302, 3302]), np.array([10, 5000, 300, 3000])
    dev = lambda a: torch.tensor(a, dtype=torch.int32)
    launches = fa3.plan_batch(LAYOUT, dev(start), dev(lengths), start, lengths, 40960)
    assert launches[0].rows == slice(0, 2)
    assert launches[0].max_query == 1
    seen = rows_of(launches[1:])
    assert sorted(seen) == list(range(2, 3302))
    assert {r: v[3] for r, v in seen.items()} == {r: 2 if r < 302 else 3 for r in range(2, 3302)}


def test_splits_of_every_head_size_cover_whole_blocks():
    for dim, block in ((64, 128), (96, 128), (128, 128), (192, 96), (256, 80)):
        layout = fa3.Layout(8, 4, dim, 16, torch.float16)
        assert layout.block_keys == block
        assert layout.unsplit_keys == 3072 // block * block
        lengths = [0, 1, layout.unsplit_keys, layout.unsplit_keys + 1, 4 * layout.split_blocks * block]
        assert layout.splits(np.array(lengths)).tolist() == [1, 1, 1, 2, 4]
        assert layout.splits(torch.tensor(lengths, dtype=torch.int32)).tolist() == [1, 1, 1, 2, 4]


def test_fa3_refuses_more_splits_than_the_kernel_counts(no_vendor):
    with pytest.raises(UnsupportedError, match="context of 600000 tokens"):
        fa3.plan_decode(LAYOUT, torch.arange(2), torch.tensor([5]), 600_000)


FI = flashinfer.Layout(32, 8, 128, 16, torch.bfloat16)
WIDTH = 2560


def decode_plan(launch, reqs):
    """Sections of a FlashInfer plan as int lists."""
    entries = launch.plan[0]
    raw = launch.ints.view(torch.uint8)
    take = lambda at, n: raw[at : at + 4 * n].view(torch.int32).tolist()
    return dict(
        request=take(launch.plan[4], entries),
        tile=take(launch.plan[5], entries),
        chunk=take(launch.plan[6], entries),
        merge=take(launch.plan[7], launch.plan[1] + 1),
        o=take(launch.plan[8], reqs + 1),
        keys=take(launch.plan[9], 1),
        valid=raw[launch.plan[12] : launch.plan[12] + entries].tolist(),
    )


def length_of(launch, i):
    """How the kernel computes a sequence's keys (32-bit wrap-around included)."""
    a, b = (int(x) for x in launch.kv_indptr[i : i + 2])
    return ((b - a - 1) * 16 + int(launch.last_page_len[i])) % 2**32


def table_of(reqs):
    """A block table whose pages name their request."""
    return torch.arange(reqs, dtype=torch.int32)[:, None].expand(reqs, WIDTH).contiguous()


def key_tiles_seen(layout, launches):
    """row -> chunk -> key tiles that the kernel visits for it (prefill.cuh), and (request, last key) per row."""
    visited, owner = {}, {}
    for launch in launches:
        n = len(launch.last_page_len)
        plan, group, step = decode_plan(launch, n), layout.group, layout.key_tile
        for i, tile, chunk in zip(plan["request"], plan["tile"], plan["chunk"], strict=True):
            first, rows = int(launch.qo_indptr[i]), int(launch.qo_indptr[i + 1] - launch.qo_indptr[i])
            length = length_of(launch, i)
            begin, end = (0, length)
            if launch.plan[14]:
                begin = min(chunk * flashinfer.CHUNK_KEYS, length)
                end = min((chunk + 1) * flashinfer.CHUNK_KEYS, length)
            reach = length - rows + -(-(tile + 1) * flashinfer.TILE_ROWS // group)
            count = -(-min(end - begin, max(reach - begin, 0)) // step)
            for packed in range(tile * flashinfer.TILE_ROWS, min((tile + 1) * flashinfer.TILE_ROWS, rows * group)):
                row = launch.rows.start + first + packed // group
                visited.setdefault(row, {}).setdefault(chunk, set()).add(count)
                table = launch.table
                page = i if table is None else int(table[i, 0])
                owner[row] = (page, length - rows + packed // group + 1)
    return visited, owner


def neutral(layout, launches):
    """Whether each row visits exactly the key tiles that it visits when decoded alone."""
    visited, owner = key_tiles_seen(layout, launches)
    for row, chunks in visited.items():
        keys = owner[row][1]
        for chunk, counts in chunks.items():
            left = keys - chunk * flashinfer.CHUNK_KEYS * (len(chunks) > 1 or keys > flashinfer.CHUNK_KEYS)
            if counts != {-(-min(max(left, 0), flashinfer.CHUNK_KEYS) // layout.key_tile)}:
                return False
    return True


@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64), (28, 4, 128), (8, 4, 256), (12, 12, 64), (8, 1, 128)])
def test_flashinfer_rows_visit_the_key_tiles_of_a_single_row_wherever_a_chunk_starts(heads):
    layout = flashinfer.Layout(*heads, 16, torch.bfloat16, flashinfer.key_tile(heads[2], 228 << 10))
    rng = np.random.default_rng(3)
    for _ in range(6):
        lengths = rng.integers(1, 5000, 5)
        counts = np.minimum(rng.choice([1, 7, 37, 300, 1024], 5), lengths)
        start = np.concatenate([[0], np.cumsum(counts)])
        launches = flashinfer.plan_rows(layout, start, lengths, table_of(5), 256 << 20)
        assert neutral(layout, launches)
        _, owner = key_tiles_seen(layout, launches)
        want = [(r, lengths[r] - counts[r] + k + 1) for r in range(5) for k in range(counts[r])]
        assert [owner[row] for row in range(start[-1])] == want


def test_flashinfer_rows_laid_on_tiles_from_the_chunks_start_visit_further_key_tiles():
    """Negative control: the plan without the cut."""
    layout = flashinfer.Layout(16, 8, 128, 16, torch.bfloat16)
    pieces = np.array([(0, 0, 300, 450)])  # rows at 150 to 449; a tile holds 246 to 277, across the key tile at 256
    assert not neutral(layout, [flashinfer._rows_launch(layout, pieces, 0, table_of(1))])


def test_flashinfer_key_tile_follows_the_shared_memory():
    assert [flashinfer.key_tile(d, 228 << 10) for d in (64, 128, 256)] == [128, 128, 64]
    assert [flashinfer.key_tile(d, 100 << 10) for d in (64, 128, 256)] == [128, 64, 16]
    with pytest.raises(UnsupportedError, match="spans several key tiles"):
        flashinfer.Layout(8, 4, 256, 16, torch.bfloat16, 16)


def test_flashinfer_plan_on_the_host_equals_the_plan_on_the_device():
    lengths = [1, 2048, 2049, 7000]
    start = torch.arange(5, dtype=torch.int32)
    dev = flashinfer.plan_decode(FI, start, torch.tensor(lengths, dtype=torch.int32), 8192, WIDTH)[0]
    host = flashinfer.plan_rows(FI, start.numpy(), np.array(lengths), table_of(4), 1 << 30)[0]
    a, b = decode_plan(dev, 4), decode_plan(host, 4)
    live = [(r, t, c) for r, t, c, v in zip(a["request"], a["tile"], a["chunk"], a["valid"], strict=True) if v]
    assert live == list(zip(b["request"], b["tile"], b["chunk"], strict=True))
    assert a["merge"] == b["merge"] == a["o"] == b["o"] == [0, 1, 2, 4, 8]
    assert [length_of(dev, i) for i in range(4)] == [length_of(host, i) for i in range(4)] == lengths
    assert dev.plan[3] == host.plan[3] == flashinfer.TILE_ROWS


def test_flashinfer_padding_launches_nothing_valid():
    start = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    launch = flashinfer.plan_decode(FI, start, torch.tensor([3000, 5, 0, 0], dtype=torch.int32), 8192, WIDTH)[0]
    plan = decode_plan(launch, 4)
    assert [(r, c) for r, c, v in zip(plan["request"], plan["chunk"], plan["valid"], strict=True) if v] == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    assert plan["merge"] == [0, 2, 3, 3, 3]


def test_flashinfer_replayed_launches_read_fixed_addresses():
    buffers = flashinfer.make_buffers(4, 8192, "cpu")
    start = torch.arange(5, dtype=torch.int32)
    used = lambda launch: [t.data_ptr() for t in (launch.ints, launch.kv_indptr, launch.last_page_len)]
    first = flashinfer.plan_decode(FI, start, torch.tensor([1, 2, 3, 4], dtype=torch.int32), 8192, WIDTH, buffers)[0]
    lengths = torch.tensor([8192, 5000, 1, 9], dtype=torch.int32)
    again = flashinfer.plan_decode(FI, start, lengths, 8192, WIDTH, buffers)[0]
    fresh = flashinfer.plan_decode(FI, start, lengths, 8192, WIDTH)[0]
    assert used(first) == used(again)
    assert first.plan == again.plan == fresh.plan
    assert decode_plan(again, 4) == decode_plan(fresh, 4)
    assert [length_of(again, i) for i in range(4)] == lengths.tolist()


def test_flashinfer_cuts_a_batch_to_the_users_workspace():
    start, lengths = np.array([0, 1, 4097]), np.array([9000, 4096])
    size = 64 << 20
    launches = flashinfer.plan_rows(FI, start, lengths, table_of(2), size)
    rows = [r for launch in launches for r in range(launch.rows.start, launch.rows.stop)]
    assert rows == list(range(4097))
    assert len(launches) > 1
    for launch in launches:
        chunks = max(decode_plan(launch, len(launch.last_page_len))["chunk"]) + 1
        assert FI.partial_bytes(launch.rows.stop - launch.rows.start, chunks) <= size
    # the last row of each piece sees exactly the keys up to itself
    ends = {launch.rows.stop: length_of(launch, len(launch.last_page_len) - 1) for launch in launches}
    assert all(keys == (9000 if row == 1 else row - 1) for row, keys in ends.items())
    with pytest.raises(ConfigError, match="VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"):
        flashinfer.check_workspace(FI, 256, 40960, 1 << 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head_dim=72), "head size 72"),
        (dict(dtype="float32"), "dtype float32"),
        (dict(kv_cache_dtype="fp8"), "kv-cache dtype fp8"),
        (dict(page_size=24), "block size 24"),
        (dict(mla=True), "latent"),
        (dict(attn_type="encoder_only"), "encoder_only"),
        (dict(alibi=True), "ALiBi"),
        (dict(compute_capability=(7, 5)), "capability 7.5"),
        (dict(scale=0.0), "scale 0.0"),
        (dict(num_heads=9, num_kv_heads=2), "9 query heads"),
    ],
)
@pytest.mark.parametrize("backend", ["triton", "fa3", "flashinfer"])
def test_refusals_name_the_feature_and_the_way_out(backend, change, message):
    good = dict(
        head_dim=128, dtype="bfloat16", page_size=16, scale=0.1, num_heads=8, num_kv_heads=2, compute_capability=(9, 0)
    )
    check_config(backend, **good)
    with pytest.raises(UnsupportedError, match=message) as caught:
        check_config(backend, **{**good, **change})
    assert caught.value.instead


def test_refusals_of_one_backend():
    good = dict(head_dim=128, dtype="bfloat16")
    check_config("triton", **good, compute_capability=(8, 0), sinks=True)
    with pytest.raises(UnsupportedError, match="Hopper"):
        check_config("fa3", **good, compute_capability=(8, 0))
    with pytest.raises(UnsupportedError, match="sinks"):
        check_config("flashinfer", **good, sinks=True)
    with pytest.raises(UnsupportedError, match="head size 96"):
        check_config("flashinfer", head_dim=96, dtype="bfloat16")


def test_segments_of_the_triton_order_cover_every_position_once():
    assert contract.FINE_KEYS % contract.SEGMENT_KEYS == contract.FINE_KEYS % contract.FINE_SEGMENT_KEYS == 0
    assert contract.FINE_SEGMENT_KEYS % contract.BLOCK_KEYS == contract.SEGMENT_KEYS % contract.BLOCK_KEYS == 0
    for key in range(5000):
        number = contract.segment_of(key)
        assert contract.segment_start(number) <= key < contract.segment_start(number + 1)


def test_splits_are_looked_up_for_every_length_of_a_batch():
    table = fa3._splits_by_length(LAYOUT, 1 << (40960).bit_length(), torch.device("cpu"))
    assert table.tolist() == [int(LAYOUT.splits(n)) for n in range(len(table))]
    assert len(table) > 40960 + 1000
