"""Tests of Lightning's `MethodCallback` with a user's LightningModule and a real Trainer."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import timm
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods import (
    BSR,
    LBPWHT,
    LISA,
    ALaST,
    BackRazor,
    Full,
    LastStage,
    LoRA,
    MoE,
    TopLayers,
    apply_methods,
)
from efficient_ft.methods.base import Method
from efficient_ft.optim import step_in_backward
from efficient_ft.testing import model_of
from tests.integrations.loops import (
    METHODS,
    Probe,
    assert_same_weights,
    batches_of,
    sgd,
    states_of,
    trained_by_hand,
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Module(L.LightningModule):
    """A user's module with a network called `net`. The module is independent of the methods."""

    def __init__(self, net: nn.Module | None = None, as_dict: bool = False) -> None:
        super().__init__()
        self.net = model_of("vit") if net is None else net
        self.as_dict = as_dict

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        return {"loss": loss, "labels": labels} if self.as_dict else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logits = self.net(batch[0])

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.net)


def trainer_of(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 1,
    }  # fmt: skip
    return L.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def loader_of(count: int = 4) -> DataLoader:
    return DataLoader(batches_of("vit", count), batch_size=None, shuffle=False)  # type: ignore[arg-type]


def fitted(methods: list[Method], module: Module | None = None, count: int = 4, **options: Any) -> Module:
    torch.manual_seed(0)
    module = module or Module()
    trainer_of(MethodCallback(methods, network="net"), **options).fit(module, loader_of(count))
    return module


# ------------------------------------------------------------------------------------------------ training
@pytest.mark.first(4, "exhaustive")
@pytest.mark.first(2, "slow")
@pytest.mark.parametrize("name", METHODS)
def test_equals_a_loop_of_one_s_own(name: str) -> None:
    """The weights and states equal the result of a plain loop, even if the last step has fewer micro-batches."""
    by_hand, carried = METHODS[name](), METHODS[name]()
    expected = trained_by_hand(by_hand, epochs=2, accumulate=2, count=3)
    module = fitted(carried, Module(as_dict=name == "moe"), count=3, max_epochs=2, accumulate_grad_batches=2)
    assert_same_weights(expected, module.net)
    assert states_of(by_hand) == states_of(carried)


def test_a_loss_of_a_method_s_own_is_minimized() -> None:
    """The loss of a method is added in a module that returns a tensor."""
    with_loss = fitted(METHODS["moe"](), max_epochs=2).net
    assert_same_weights(trained_by_hand(METHODS["moe"](), epochs=2, accumulate=1), with_loss)
    without = fitted([MoE(num_experts=4, top_k=2, blocks=[-1], norm_topk_prob=True)], max_epochs=2).net
    gates = [net.get_parameter("blocks.3.mlp.gate.weight") for net in (with_loss, without)]
    assert not torch.equal(*gates)


def test_a_module_is_given_its_training_step_back() -> None:
    module = fitted(METHODS["moe"]())
    assert "training_step" not in vars(module)


def test_the_sum_of_the_losses_can_be_logged() -> None:
    class Logging(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.own = super().training_step(batch, batch_idx)
            return self.own

        def on_total_loss(self, loss: Tensor) -> None:
            totals.append((float(self.own.detach()), float(loss.detach())))

    totals: list[tuple[float, float]] = []
    fitted(METHODS["moe"](), Logging())
    assert len(totals) == 4
    # With a zero gate, the experts are used evenly, so that E · Σ f · P = 1.
    assert totals[0][1] - totals[0][0] == pytest.approx(0.1)
    totals.clear()
    fitted([Full()], Logging())
    assert all(own == total for own, total in totals)


def test_a_batch_may_be_left_out() -> None:
    class Skipping(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    fitted(METHODS["moe"](), Skipping())


def test_a_step_begins_before_its_first_micro_batch_and_ends_before_gradients_are_zero() -> None:
    probe = Probe()
    fitted([probe], count=5, accumulate_grad_batches=2)
    end = "end moved=True grad=True"
    assert probe.calls == ["apply", "begin 0", end, "begin 1", end, "begin 2", end]


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("name", ["alast", "moe", "lbp_wht_lhe", "back_razor", "top_layers"])
def test_resumed_equals_straight(name: str, tmp_path: Path) -> None:
    """A run resumed in the middle of a profile equals an uninterrupted run."""
    straight = METHODS[name]()
    expected = fitted(straight, max_epochs=3, count=1)
    file = tmp_path / "half.ckpt"

    first = trainer_of(MethodCallback(METHODS[name](), network="net"), max_epochs=1)
    torch.manual_seed(0)
    first.fit(Module(), loader_of(1))
    first.save_checkpoint(file)
    resumed = METHODS[name]()
    torch.manual_seed(1)
    module = Module()
    trainer_of(MethodCallback(resumed, network="net"), max_epochs=3).fit(module, loader_of(1), ckpt_path=file)
    assert_same_weights(expected, module)
    assert states_of(straight) == states_of(resumed)


def test_the_order_of_the_list_has_no_effect() -> None:
    results = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        methods = [LoRA(rank=2), LBPWHT(order=3), LastStage()]
        results.append(fitted([methods[i] for i in order], count=2))
    for other in results[1:]:
        assert_same_weights(results[0], other)


def test_two_networks_have_a_callback_each() -> None:
    class Pair(Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = model_of("vit")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + F.cross_entropy(self.other(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    module = Pair()
    callbacks = [MethodCallback(METHODS["moe"](), network=name) for name in ("net", "other")]
    trainer_of(*callbacks).fit(module, loader_of(2))
    assert_same_weights(module.net, module.other)
    assert_same_weights(trained_by_hand(METHODS["moe"](), 1, 1, count=2), module.other)
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        trainer_of(*(MethodCallback(Full()) for _ in range(2)))


# ------------------------------------------------------------------------------------------------ stages
@pytest.mark.slow
def test_methods_are_applied_once_over_all_stages() -> None:
    probe, module = Probe(), Module()
    callback = MethodCallback([probe, *METHODS["lora+lbp_wht"]()], network="net")
    trainer = trainer_of(callback)
    trainer.validate(module, loader_of(1), verbose=False)
    reports, names = callback.reports, list(module.state_dict())
    assert [report.method for report in reports] == ["full", "lora", "lbp_wht"]
    trainer.fit(module, loader_of(1))
    trainer.test(module, loader_of(1), verbose=False)
    assert callback.reports == reports
    assert list(module.state_dict()) == names
    assert probe.calls.count("apply") == 1


def test_evaluation_alone_is_the_pretrained_model_s() -> None:
    probe, module = Probe(), Module()
    images = batches_of("vit", 1)[0][0]
    expected = copy.deepcopy(module.net).eval()(images)
    callback = MethodCallback([probe, LBPWHT(order=3)], network="net")
    trainer_of(callback).validate(module, loader_of(1), verbose=False)
    assert torch.equal(module.logits, expected)
    assert probe.calls == ["apply"]
    assert "training_step" not in vars(module)


def test_a_second_training_begins_with_its_first_step() -> None:
    probe, module = Probe(), Module()
    callback = MethodCallback(probe, network="net")
    for _ in range(2):
        trainer_of(callback).fit(module, loader_of(1))
    assert probe.calls == ["apply", *["begin 0", "end moved=True grad=True"] * 2]


def test_an_interrupted_step_leaves_nothing_frozen() -> None:
    class Failing(Module):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and batch_idx == 1:
                self.frozen = sum(not p.requires_grad for p in self.net.parameters())
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    module = Failing()
    callback = MethodCallback([LISA(num_layers=1, interval=1), *METHODS["moe"]()], network="net")
    with pytest.raises(ArithmeticError):
        trainer_of(callback).fit(module, loader_of())
    assert module.frozen
    assert all(p.requires_grad for p in module.net.parameters())
    assert "training_step" not in vars(module)
    module.fails = False
    trainer_of(callback).fit(module, loader_of())


# ------------------------------------------------------------------------------------------------ frozen statistics
@pytest.mark.parametrize("name", ["mobilenetv2_035", "resnet10t", "levit_128s"])
@pytest.mark.parametrize("frozen_bn", [True, False])
def test_batch_norm_statistics_are_frozen(name: str, frozen_bn: bool) -> None:
    """The statistics of timm's and torch's BatchNorm layers stay frozen, even if the module calls `train()`."""

    class Training(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.train()

    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=5)
    before = {k: v.clone() for k, v in net.named_buffers() if "running" in k}
    loader = DataLoader([(torch.randn(2, 3, 224 if "levit" in name else 64, 224 if "levit" in name else 64) + 1,
                          torch.tensor([0, 1]))], batch_size=None)  # fmt: skip
    trainer_of(MethodCallback(Full(), network="net", frozen_bn=frozen_bn)).fit(Training(net), loader)
    same = {k: torch.equal(v, net.get_buffer(k)) for k, v in before.items()}
    assert same
    assert all(same.values()) if frozen_bn else not any(same.values())
    assert all(p.grad is not None for n, p in net.named_parameters() if "bn" in n)


# ------------------------------------------------------------------------------------------------ names
class Holder(nn.Module):
    """A submodule of a user's module that contains the network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model_of("vit")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_the_network_of_an_attribute() -> None:
    module = Module(Holder())
    callback = MethodCallback(METHODS["bsr"](), network="net.net")
    trainer_of(callback).fit(module, loader_of(1))
    assert_same_weights(trained_by_hand(METHODS["bsr"](), 1, 1, count=1), module.net.net)


def test_the_module_itself() -> None:
    module = Module()
    trainer_of(MethodCallback(Full(), network="")).fit(module, loader_of(1))
    assert_same_weights(trained_by_hand([Full()], 1, 1, count=1), module.net)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("model", r"^network must be a module of Module: one of net, got 'model'\. Pass"),
        ("net.model", r"^network must be a module of Holder \(net\): one of net\.net, got 'net\.model'"),
        ("later", r"The attribute is not a module when .* Build the network in __init__"),
        ("net.net.head.weight", r"of Linear \(net\.net\.head\): it has none, got"),
    ],
)
def test_a_wrong_name_is_refused_with_those_there_are(network: str, message: str) -> None:
    module = Module(Holder())
    module.later = None
    with pytest.raises(SettingError, match=message):
        trainer_of(MethodCallback(Full(), network=network)).fit(module, loader_of(1))


# ------------------------------------------------------------------------------------------------ rejected models
@pytest.mark.slow
def test_a_compiled_or_wrapped_network_is_refused() -> None:
    inside = model_of("vit")
    inside.blocks[1] = torch.compile(inside.blocks[1])
    in_place = model_of("vit")
    in_place.compile()
    for net, message in (
        (torch.compile(model_of("vit")), r"unwrapped nn.Module, got OptimizedModule\."),
        (inside, r"got OptimizedModule at blocks\.1"),
        (in_place, r"got a compiled network \(model\.compile\(\)\)"),
        (nn.DataParallel(model_of("vit")), r"got DataParallel"),
    ):
        with pytest.raises(UserError, match=message):
            fitted([Full()], Module(net))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"must not be compiled, got torch\.compile\(Module\)"):
        trainer_of(MethodCallback(Full(), network="net")).fit(torch.compile(Module()), loader_of(1))


def test_manual_optimization_is_refused_where_it_would_lose_a_loss() -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    with pytest.raises(UserError, match=r"^method moe adds a loss, which manual optimization does not support"):
        fitted(METHODS["moe"](), Manual())
    module = fitted(METHODS["bsr"](), Manual())
    assert_same_weights(trained_by_hand(METHODS["bsr"](), 1, 1), module.net)


def test_an_optimizer_built_before_is_refused() -> None:
    class Early(Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = sgd(self.net)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.made

    with pytest.raises(UserError, match=r"16 of 18 .*lora_A.* created before the methods were applied"):
        fitted([LoRA(rank=2, targets="attention")], Early())
    fitted([BSR(blocks=[1], drop_at=[])], Early())  # BSR adds no parameters.


class Inside(Module):
    """A module whose optimizer steps inside the backward pass."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return step_in_backward(sgd(self.net))


@pytest.mark.parametrize("name", ["full", "alast", "moe"])
def test_stepping_inside_the_backward_pass_equals_an_ordinary_training(name: str) -> None:
    plain, inside = fitted(METHODS[name]()), fitted(METHODS[name](), Inside())
    assert_same_weights(plain.net, inside.net)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val must be None with an optimizer that steps inside"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches must be 1 with an optimizer that steps inside"),
    ],
)
def test_stepping_inside_the_backward_pass_excludes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        fitted([Full()], Inside(), **options)
    fitted([Full()], **options)


def test_a_method_that_reads_gradients_refuses_stepping_inside_the_backward_pass() -> None:
    with pytest.raises(UserError, match=r"method top_layers compares the gradients.*optim\.in_backward=false"):
        fitted([TopLayers(num_layers=1)], Inside())


@pytest.mark.parametrize("copies", [EMAWeightAveraging, lambda: StochasticWeightAveraging(1e-2)], ids=["ema", "swa"])
def test_callbacks_that_copy_the_network_come_after_the_methods(copies: Any) -> None:
    """Averaging weights does not change the training. Copies made before the methods are applied are rejected."""
    module = Module()
    with pytest.raises(
        UserError, match=r"copied the network before .* List MethodCallback before \w+WeightAveraging in"
    ):
        trainer_of(copies(), MethodCallback([LoRA(rank=2)], network="net")).fit(module, loader_of(2))
    methods = MethodCallback([LoRA(rank=2)], network="net")
    trainer_of(methods, copies(), max_epochs=2).fit(module := Module(), loader_of(2))
    assert all(p.isfinite().all() for p in module.parameters())
    # Methods that add no parameters accept earlier copies.
    trainer_of(copies(), MethodCallback([BackRazor()], network="net"), max_epochs=2).fit(Module(), loader_of(2))


@pytest.mark.slow
def test_a_checkpoint_of_other_methods_is_refused(tmp_path: Path) -> None:
    def trainer(*methods: Method) -> L.Trainer:
        return trainer_of(MethodCallback(methods, network="net"), max_epochs=2)

    for written, resumed in (
        (ALaST(num_layers=2), ALaST(num_layers=3)),
        (Full(), ALaST(num_layers=2)),
        (ALaST(num_layers=2), Full()),
    ):
        first = trainer(written)
        first.fit(Module(), loader_of(1))
        first.save_checkpoint(tmp_path / "last.ckpt")
        with pytest.raises(UserError, match=r"^The checkpoint was written with other methods or settings"):
            trainer(resumed).fit(Module(), loader_of(1), ckpt_path=tmp_path / "last.ckpt")
    trainer(Full()).validate(Module(), loader_of(1), ckpt_path=tmp_path / "last.ckpt", verbose=False)


def test_reports_are_those_of_apply() -> None:
    methods = METHODS["lora+lbp_wht"]()
    callback = MethodCallback(METHODS["lora+lbp_wht"](), network="net")
    trainer_of(callback).fit(Module(), loader_of(1))
    assert callback.reports == apply_methods(model_of("vit"), methods)
