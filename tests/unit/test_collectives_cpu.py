"""Reductions between CPU ranks: rank order, fp32, whatever the message size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from det_plugin.evidence.certificates import first_difference
from det_plugin.host.vllm.collectives_cpu import ordered_sum


def test_the_order_is_that_of_the_ranks():
    parts = torch.tensor([[1e8], [1.0], [-1e8], [1.0]], dtype=torch.float32)
    assert ordered_sum(parts).item() == 1.0  # ((1e8 + 1) - 1e8) + 1 in fp32
    assert ordered_sum(parts[[0, 2, 1, 3]]).item() == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_one_rounding(dtype, ranks):
    parts = torch.randn(ranks, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    assert ordered_sum(parts).dtype == dtype
    assert first_difference(total.to(dtype), ordered_sum(parts)) is None


def test_the_parts_are_left_alone():
    parts = torch.randn(3, 5)
    before = parts.clone()
    ordered_sum(parts)
    assert torch.equal(parts, before)


def test_elements_do_not_depend_on_the_size_of_the_message():
    parts = torch.randn(4, 4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole = ordered_sum(parts)
    for size in (1, 2, 63, 1000):
        assert first_difference(whole[:size], ordered_sum(parts[:, :size])) is None


def _rank(rank, world, path, results):
    """The installed all-reduce, on a stand-in communicator over gloo."""
    from types import SimpleNamespace

    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from det_plugin import DetConfig
    from det_plugin.host.vllm import collectives_cpu

    collectives_cpu.install(DetConfig())
    collectives_cpu.install(DetConfig())
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    self = SimpleNamespace(world_size=world, dist_module=dist, device_group=dist.group.WORLD)
    found = []
    for size in (1, 7, 1000, 40000):
        parts = torch.randn(world, 4, size, generator=torch.Generator().manual_seed(size)).to(torch.bfloat16)
        mine = parts[rank].clone()
        out = CpuCommunicator.all_reduce(self, mine)
        found.append(first_difference(ordered_sum(parts), out) is None and out.shape == mine.shape)
        strided = parts[rank].T.contiguous().T
        found.append(first_difference(ordered_sum(parts), CpuCommunicator.all_reduce(self, strided)) is None)
    whole = torch.full((3,), rank + 1)
    found.append(CpuCommunicator.all_reduce(self, whole).tolist() == [sum(range(1, world + 1))] * 3)
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2])
def test_all_reduce_between_processes(tmp_path, world):
    pytest.importorskip("vllm", reason="the host is not installed")
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, world, tmp_path / "init", results)) for r in range(world)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert all(all(checks) for checks in found.values()), found
