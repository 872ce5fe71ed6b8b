"""The second schedule of FA3's order that ``benchmarks/fa3_chain.py`` measures: its indexing and its row sums."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fa3_chain
from fa3_chain import Chain, Form

LENGTHS = [1, 5, 127, 128, 129, 300, 513]


@pytest.fixture(scope="module", params=[(8, 2, 64), (8, 1, 128), (3, 3, 64)], ids=str)
def case(request):
    heads, kv_heads, dim = request.param
    batch = fa3_chain.make_batch(heads, kv_heads, dim, 16, LENGTHS, torch.device("cpu"), torch.float32)
    chain = Chain(heads, kv_heads, dim, 16, len(LENGTHS), max(LENGTHS), "cpu")
    return batch, chain


def run(case, form):
    (q, k, v, table, lengths), chain = case
    return chain(q, k, v, torch.full_like(q, torch.nan), table, lengths, form)


@pytest.mark.parametrize("form", [Form(), Form(in_registers=False), Form(columns=32), Form(upwards=True)], ids=str)
def test_every_row_and_column_of_a_paged_batch(case, form):
    want = fa3_chain.reference(*case[0])
    assert (run(case, form).double() - want).abs().max() < 2e-6


def test_row_sums_from_registers_add_the_same_terms_in_the_same_order(case):
    ours, other = run(case, Form()), run(case, Form(in_registers=False))
    assert torch.equal(ours.view(torch.int32), other.view(torch.int32))
    backwards = run(case, Form(upwards=True))
    unequal = (ours.view(torch.int32) != backwards.view(torch.int32)).flatten(1).any(1)
    assert not unequal[:4].any(), "one block has one order"
    assert unequal[4:].any()


def test_a_row_does_not_depend_on_its_batch(case):
    (q, k, v, table, lengths), chain = case
    together = run(case, Form())
    for i in range(len(LENGTHS)):
        one = slice(i, i + 1)
        alone = chain(q[one], k, v, torch.full_like(q[one], 7), table[one], lengths[one], Form())
        assert torch.equal(alone, together[one])
