"""Tests of the threads of the CPU kernels, and of packing without the kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from efficient_ft.ops.storage import eight_bits, sparse
from efficient_ft.ops.storage.kernels import cpu
from tests.ops.storage.reference import (
    assert_same_bits,
    assert_same_form,
    data,
    form_of,
    groups,
    kept_mask,
    needs_numba,
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_numba
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("team", ["torch's", "its own"])
def test_any_threads_give_the_same_results(monkeypatch, team):
    # Without torch's OpenMP, the kernels run in separate threads.
    if team == "its own":
        monkeypatch.setattr(cpu, "_team", lambda: None)
    x = data("rounded", (37, 5003), torch.float32)
    kept = sparse.values_kept(5003, 0.7)
    for exact in (True, False):
        expected = sparse.sparse_pack_reference(x, kept, exact)
        form = sparse.sparse_pack(x, kept, exact)
        assert_same_form(form, expected)
        back = sparse.sparse_unpack_reference(*form, 5003)
        assert_same_bits(sparse.sparse_unpack(*form, 5003), back)
    for shape in ((700, 3, 50), (40, 2, 1500)):
        v, low, high = groups(shape)
        q = cpu.quantize(v, low, high, torch.tensor(5))
        assert torch.equal(q, eight_bits.quantize_reference(v, low, high, torch.tensor(5)))
        assert torch.equal(cpu.dequantize(q, low, high), eight_bits.dequantize_reference(q, low, high))
        for a, b in zip(cpu.extremes(v), eight_bits.extremes_reference(v), strict=True):
            assert torch.equal(a, b)


@needs_numba
@pytest.mark.usefixtures("threads")
def test_the_threads_are_those_asked_for(monkeypatch):
    calls = []
    parallel = cpu._team()
    if parallel is None:
        pytest.skip("torch's OpenMP is not to be found here")
    monkeypatch.setattr(cpu, "_team", lambda: lambda *job: calls.append(job[2]) or parallel(*job))
    sparse.sparse_pack(torch.randn(8, 20), 10, True)
    sparse.sparse_pack(torch.randn(2, 20), 10, True)
    sparse.sparse_pack(torch.randn(1, 20), 10, True)  # a single row runs in one thread
    assert calls == [3, 2]


@needs_numba
@pytest.mark.usefixtures("threads")
def test_threads_of_its_own_are_as_many_as_asked_for(monkeypatch):
    calls, pool = [], cpu._threads(os.getpid())

    class Counted:
        def submit(self, *job: Any) -> Future:
            calls.append(job)
            return pool.submit(*job)

    monkeypatch.setattr(cpu, "_team", lambda: None)
    monkeypatch.setattr(cpu, "_threads", lambda process: Counted())
    sparse.sparse_pack(torch.randn(8, 20), 10, True)
    assert len(calls) == 2, "the caller's own is the third"


def test_without_numba_the_plain_forms_serve(monkeypatch):
    monkeypatch.setattr(cpu, "_kernels", lambda: None)
    x = data("rounded", (3, 5, 17), torch.float32)
    assert not cpu.supports(x)
    kept = sparse.values_kept(85, 0.6)
    keep = kept_mask(x.flatten(1), 0.6)
    form = sparse.sparse_pack(x, kept, True)
    assert_same_form(form, form_of(x.flatten(1), keep, kept))
    assert_same_bits(sparse.sparse_unpack(*form, 85), torch.where(torch.from_numpy(keep), x.flatten(1), 0))
    v, low, high = groups((3, 4, 17))
    q = eight_bits.quantize(v, low, high, torch.tensor(1))
    assert torch.equal(q, eight_bits.quantize_reference(v, low, high, torch.tensor(1)))
    assert torch.equal(eight_bits.dequantize(q, low, high), eight_bits.dequantize_reference(q, low, high))
    assert torch.equal(eight_bits.extremes(v)[0], v.amin((0, 2)))
