"""Tests of the thread-local context: a value is valid inside a ``with`` block of one thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from efficient_ft.core.context import context, is_recomputing, set_context
from efficient_ft.core.distributed import all_reduce_sum, local_only
from efficient_ft.ops.saving import PackedOperations, PackingState, Policy, current_packing, packing_suspended
from efficient_ft.ops.storage import Dense
from efficient_ft.ops.tokens import (
    Tokens,
    current_tokens,
    is_token_reduction_suspended,
    token_context,
    token_reduction_suspended,
)


def values() -> tuple[object, ...]:
    return context.packing, context.tokens, context.token_reduction_suspended, context.local_only


DEFAULTS = (None, None, False, False)


def test_fields_are_restored_after_the_block_and_after_an_error() -> None:
    tokens = Tokens()
    packing = PackedOperations(Policy(Dense(), Dense(), Dense(), Dense()), PackingState(), "r", 2)
    with packing, token_context(tokens), token_reduction_suspended(), local_only():
        assert values() == (packing, tokens, True, True)
        assert current_packing() is packing
        assert current_tokens() is tokens
        assert is_token_reduction_suspended()
        with token_context(None):
            assert current_tokens() is None
        assert current_tokens() is tokens
    assert values() == DEFAULTS
    with pytest.raises(KeyError), set_context("tokens", tokens):
        raise KeyError
    assert values() == DEFAULTS


def test_another_thread_has_the_defaults() -> None:
    found = []
    with token_context(Tokens()), token_reduction_suspended(), local_only():
        thread = threading.Thread(target=lambda: found.append(values()))
        thread.start()
        thread.join()
    assert found == [DEFAULTS]


def test_packing_suspended_changes_nothing_without_a_mode() -> None:
    with packing_suspended():
        assert current_packing() is None


def test_recomputing_is_a_forward_pass_inside_backward() -> None:
    found: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(is_recomputing())
        return x.square()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert found == [False, True]
    assert not is_recomputing()


def test_without_a_process_group_a_sum_is_the_tensor_itself() -> None:
    values = torch.ones(3)
    assert all_reduce_sum(values) is values


def test_a_sum_is_over_all_processes_and_local_on_request(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        values = torch.arange(3.0)
        found = all_reduce_sum(values)
        assert found is not values
        assert torch.equal(found, values)
        with local_only():
            assert all_reduce_sum(values) is values
    finally:
        torch.distributed.destroy_process_group()
