"""Tests of the memory of a recipe, counted without a training step."""

from __future__ import annotations

import pytest

from efficient_ft.cost import executed
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.planning.counting import Counter
from efficient_ft.training.costs import step_spec
from efficient_ft.training.optimizer import build_optimizer
from tests.planning.common import SETTINGS, configure

pytestmark = pytest.mark.usefixtures("wide")


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("method", ["full", "[full,low_bit]", "[full,checkpointing]", "last_stage"])
@pytest.mark.parametrize("optim", [(), ("optim.in_backward=true", "optim.grad_clip_norm=null")])
def test_counts_are_those_of_a_run(method: str, optim: tuple[str, ...]) -> None:
    config = configure([*SETTINGS, f"method={method}", *optim])
    counted = Counter(config, 10)(config)
    spec = step_spec(config)
    expected = executed(
        factory.random_model(config.model, 10),
        spec.batch_size,
        spec.input_size,
        methods=build_methods(config),
        build_optimizer=lambda model: build_optimizer(model, config.optim, config.trainer.precision),
        in_chans=spec.in_chans,
        label_smoothing=spec.label_smoothing,
    )
    assert counted.resident_bytes == expected.model_bytes + expected.batch_bytes
    assert expected.optimizer_bytes is not None
    # The first step also fills caches of a few KiB, which `executed` has already filled.
    assert counted.step_bytes == pytest.approx(expected.step_peak_bytes + expected.optimizer_bytes, rel=1e-3)
    assert counted.optimizer_bytes == expected.optimizer_bytes


@pytest.mark.slow
def test_few_bits_of_the_optimizer_are_counted_without_another_step() -> None:
    plain = configure([*SETTINGS, "method=full"])
    counter = Counter(plain, 10)
    for bits in (8, 4):
        config = configure([*SETTINGS, "method=full", f"optim.state_bits={bits}"])
        exact = Counter(config, 10)._count(config, build_methods(config))
        assert counter(config).optimizer_bytes == pytest.approx(exact.optimizer_bytes, rel=1e-3)
        assert counter(config).step_bytes == pytest.approx(exact.step_bytes, rel=0.02)


@pytest.mark.slow
def test_accumulation_adds_the_gradients() -> None:
    whole = configure([*SETTINGS, "method=full"])
    halves = configure([*SETTINGS, "method=full", "data.batch_size=16", "trainer.grad_accum_steps=2"])
    a, b = Counter(whole, 10)(whole), Counter(halves, 10)(halves)
    same = configure([*SETTINGS, "method=full", "data.batch_size=16"])
    weights = sum(p.numel() * 4 for p in factory.random_model(whole.model, 10).parameters())
    assert b.step_bytes == Counter(same, 10)(same).step_bytes + weights
    assert b.flops == pytest.approx(a.flops)
