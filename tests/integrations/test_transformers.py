"""Tests of the `MethodCallback` for Hugging Face's `Trainer`, with timm models and a user's model."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.integrations.saving import decode, encode
from efficient_ft.integrations.session import MethodSession
from efficient_ft.integrations.transformers import MethodCallback
from efficient_ft.methods import LBPWHT, LISA, SWAT, ALaST, Compact, Full, LastStage, LoRA, Mesa, RepNet
from efficient_ft.methods.base import Method
from efficient_ft.optim import step_in_backward
from efficient_ft.testing import CLASSES, MODELS, model_of
from tests.integrations.loops import LR, METHODS, Probe, assert_same_weights, batches_of, states_of, train_by_hand


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def wrapped(name: str = "vit") -> TimmWrapperForImageClassification:
    """Create a timm model in the wrapper of `transformers`, with the weights of `model_of`."""
    small = MODELS[name]
    config = TimmWrapperConfig(architecture=small.architecture, num_labels=CLASSES, model_args=dict(small.kwargs))
    model = TimmWrapperForImageClassification(config)
    model.timm_model = model_of(name)
    return model


def images_of(count: int, name: str = "vit") -> list[dict[str, Any]]:
    """Return the images of `batches_of` one by one."""
    return [
        {"pixel_values": image, "labels": int(label)}
        for images, labels in batches_of(name, count)
        for image, label in zip(images, labels, strict=True)
    ]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    plain: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "optim": "sgd", "learning_rate": LR, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "per_device_train_batch_size": 2, "num_train_epochs": 1,
        "train_sampling_strategy": "sequential", "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**{**plain, **changes})


def trainer_of(
    methods: Method | list[Method], folder: Path, model: nn.Module | None = None, count: int = 4, **changes: Any
) -> Trainer:
    callback = MethodCallback(methods)
    model = wrapped() if model is None else model
    return Trainer(model, arguments(folder, **changes), train_dataset=images_of(count), callbacks=[callback])


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)


@pytest.mark.slow
def test_a_trainer_that_never_trains_does_not_block_another_session(tmp_path: Path) -> None:
    model, methods = wrapped(), [LastStage()]
    trainer = trainer_of(methods, tmp_path, model)
    with MethodSession(model.timm_model, methods), pytest.raises(UserError, match="Another session is open"):
        trainer.train()
    trainer.train()


@pytest.mark.slow
def test_a_trainer_built_during_training_does_not_end_the_step(tmp_path: Path) -> None:
    model, callback = wrapped(), MethodCallback([LISA(num_layers=1)])

    class Building(TrainerCallback):
        def on_step_begin(self, args: TrainingArguments, *rest: Any, **kwargs: Any) -> None:
            Trainer(model, args, callbacks=[callback])

    Trainer(model, arguments(tmp_path), train_dataset=images_of(2), callbacks=[callback, Building()]).train()


@pytest.mark.slow
def test_methods_of_another_callback_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = wrapped()
    trainer_of([LISA(num_layers=1)], tmp_path, model)
    trainer = trainer_of([Mesa()], tmp_path, model)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert "does not run the steps of method lisa" in caplog.text


# ------------------------------------------------------------------------------------------------ training
@pytest.mark.slow
def test_merged_weights_are_saved_and_load_as_they_are(tmp_path: Path) -> None:
    model, callback = wrapped(), MethodCallback([LoRA(rank=2)])
    Trainer(model, arguments(tmp_path), train_dataset=images_of(2), callbacks=[callback]).train()
    callback.save_pretrained(model, tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    images = torch.stack([image["pixel_values"] for image in images_of(2)])
    outputs = [of.eval()(images.to(next(of.parameters()).dtype)).logits.double() for of in (model, loaded)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert any("lora_A" in name for name, _ in model.named_parameters())
    with pytest.raises(UserError, match=r"method repnet adds modules that cannot be merged"):
        MethodCallback([RepNet()]).save_pretrained(model, tmp_path / "other")


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["alast", "back_razor", "lbp_wht_lhe", "bsr"])
def test_a_compiled_training_equals_a_plain_one(name: str, tmp_path: Path) -> None:
    found = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch.compiler.reset()
        model, torch._dynamo.utils.counters["frames"]["ok"] = wrapped(), 0
        torch.manual_seed(0)
        trainer_of(METHODS[name](), tmp_path, model, num_train_epochs=2, seed=0, **options).train()
        found.append(model.timm_model)
        assert bool(options) == bool(torch._dynamo.utils.counters["frames"]["ok"])
    assert_same_weights(*found)


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "alast", "moe", "bsr", "lbp_wht_lhe", "back_razor"])
def test_equals_a_loop_of_one_s_own(name: str, tmp_path: Path) -> None:
    """The weights and states equal the result of a plain loop with two micro-batches per step."""
    by_hand, carried = METHODS[name](), METHODS[name]()
    torch.manual_seed(0)
    expected = model_of("vit")
    train_by_hand(expected, by_hand, batches_of("vit", 4), epochs=2, accumulate=2, optimizer_of=plain_sgd)
    model = wrapped()
    torch.manual_seed(0)
    trainer = trainer_of(carried, tmp_path, model, num_train_epochs=2, gradient_accumulation_steps=2, seed=0)
    trainer.train()
    assert trainer.state.global_step == 4
    assert_same_weights(expected, model.timm_model)
    assert states_of(by_hand) == states_of(carried)
    assert not model._forward_hooks


@pytest.mark.slow
def test_a_step_begins_before_its_first_micro_batch_and_ends_before_gradients_are_zero(tmp_path: Path) -> None:
    probe = Probe()
    trainer = trainer_of(probe, tmp_path, count=5, gradient_accumulation_steps=2)
    assert probe.calls == ["apply"], "before the optimizer is built"
    trainer.train()
    end = "end moved=True grad=True"
    assert probe.calls == ["apply", "begin 0", end, "begin 1", end, "begin 2", end]
    trainer.train()
    assert probe.calls[7:] == probe.calls[1:7], "a second training begins with its first step"


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["alast", "lbp_wht_lhe", "back_razor", "lora+lbp_wht"])
def test_resumed_equals_straight(name: str, tmp_path: Path) -> None:
    """A run resumed from a moved checkpoint in the middle of LHE's profile equals an uninterrupted run."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "count": 3}
    straight, model = METHODS[name](), wrapped()
    trainer_of(straight, tmp_path / "one", model, **options).train()
    (tmp_path / "one" / "checkpoint-1").rename(tmp_path / "elsewhere")
    resumed, again = METHODS[name](), wrapped()
    trainer = trainer_of(resumed, tmp_path / "two", again, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert_same_weights(model, again)
    assert states_of(straight) == states_of(resumed)
    assert (tmp_path / "two" / "checkpoint-3").is_dir()


def test_the_state_of_any_method_comes_back_from_json() -> None:
    state = {"a": [1, 2.5, None, True], "b": {"c": torch.tensor([[0.1, 2], [3, 4]]), "d": torch.tensor(7)}, "e": "x"}
    back = decode(encode(state))
    assert back.keys() == state.keys()
    assert torch.equal(back["b"]["c"], state["b"]["c"])  # type: ignore[index]
    assert back["b"]["d"].dtype == torch.int64
    assert (back["a"], back["e"]) == (state["a"], state["e"])
    assert encode({"t": (1, 2)}) == {"t": [1, 2]}
    for odd in ({1: 2}, {"a": {1, 2}}, object()):
        with pytest.raises(UserError, match=r"^The state of a method must consist of tensors, numbers"):
            encode(odd)
    swat, model = SWAT(sparsity=0.5), model_of("vit")
    swat.apply(model)
    assert decode(encode(swat.state_dict())) == swat.state_dict()


@pytest.mark.slow
def test_the_order_of_the_list_has_no_effect(tmp_path: Path) -> None:
    models = []
    for order in ((0, 1, 2), (2, 1, 0)):
        methods: list[Method] = [LBPWHT(order=3), LoRA(rank=2), LastStage()]
        torch.manual_seed(0)
        models.append(wrapped())
        trainer_of([methods[i] for i in order], tmp_path, models[-1], count=2).train()
    assert_same_weights(*models)


def test_evaluation_alone_is_the_pretrained_model_s(tmp_path: Path) -> None:
    probe, model = Probe(), wrapped()
    images = torch.stack([one["pixel_values"] for one in images_of(2)])
    expected = model.eval()(images).logits
    trainer = trainer_of([probe, LBPWHT(order=3)], tmp_path, model)
    found = trainer.predict(images_of(2))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.from_numpy(found.predictions), expected)
    assert probe.calls == ["apply"]


@pytest.mark.slow
def test_evaluation_within_training_changes_nothing(tmp_path: Path) -> None:
    models = []
    for strategy in ("no", "steps"):
        models.append(wrapped())
        args = arguments(tmp_path, eval_strategy=strategy, eval_steps=1)
        images = {"train_dataset": images_of(2), "eval_dataset": images_of(1)}
        Trainer(models[-1], args, **images, callbacks=[MethodCallback(METHODS["moe"]())]).train()  # type: ignore[arg-type]
    assert_same_weights(*models)


@pytest.mark.slow
@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("name", ["mobilenet", "resnet"])
@pytest.mark.parametrize("frozen_bn", [True, False])
def test_batch_norm_statistics_are_frozen(name: str, frozen_bn: bool, tmp_path: Path) -> None:
    """The BatchNorm statistics stay frozen, although the Trainer calls `model.train()` for each micro-batch."""
    model = wrapped(name)
    before = {k: v.clone() for k, v in model.named_buffers() if "running" in k}
    callback = MethodCallback(Full(), frozen_bn=frozen_bn)
    Trainer(model, arguments(tmp_path), train_dataset=images_of(1, name), callbacks=[callback]).train()
    same = [torch.equal(v, model.get_buffer(k)) for k, v in before.items()]
    assert same
    assert all(same) if frozen_bn else not any(same)


# ------------------------------------------------------------------------------------------------ custom model
class Own(nn.Module):
    """A user's model that calls its network `net` and returns a tuple or a plain dict."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.net = model_of("vit")
        self.output = output

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(pixel_values)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits, labels)
        return (loss, logits) if self.output == "tuple" else {"loss": loss, "logits": logits}


@pytest.mark.slow
@pytest.mark.parametrize("output", ["tuple", "dict"])
def test_a_model_of_one_s_own(output: str, tmp_path: Path) -> None:
    expected = model_of("vit")
    train_by_hand(expected, METHODS["moe"](), batches_of("vit", 2), optimizer_of=plain_sgd)
    model = Own(output)
    callback = MethodCallback(METHODS["moe"](), network="net")
    Trainer(model, arguments(tmp_path), train_dataset=images_of(2), callbacks=[callback]).train()
    assert_same_weights(expected, model.net)


@pytest.mark.slow
def test_a_loss_that_could_not_be_added_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^label_smoothing_factor must be 0 with method moe"):
        trainer_of(METHODS["moe"](), tmp_path, label_smoothing_factor=0.1)

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs["logits"], labels)

    refused = r"^method moe adds a loss, but the output of .* contains no loss"
    for method in ("moe", "bsr"):
        callbacks = [MethodCallback(METHODS[method]())]
        trainer = Trainer(
            wrapped(), arguments(tmp_path), train_dataset=images_of(1), callbacks=callbacks, compute_loss_func=compute
        )
        with pytest.raises(UserError, match=refused) if method == "moe" else nullcontext():
            trainer.train()

    class Scaled(Own):
        def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            return super().forward(pixel_values, labels)

    trainer = Trainer(
        Scaled("dict"), arguments(tmp_path), train_dataset=images_of(1),
        callbacks=[MethodCallback(METHODS["moe"](), network="net")],
    )  # fmt: skip
    with pytest.raises(UserError, match=r"Scaled divides its loss by num_items_in_batch"):
        trainer.train()


# ------------------------------------------------------------------------------------------------ rejected arguments
def test_a_wrong_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"a module of TimmWrapperForImageClassification: one of timm_model, got 'm"):
        Trainer(wrapped(), arguments(tmp_path), callbacks=[MethodCallback(Full(), network="model")])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("auto_find_batch_size", True),
        ("restore_callback_states_from_checkpoint", True),
    ],
)
def test_arguments_that_methods_cannot_work_under_are_refused(argument: str, value: Any, tmp_path: Path) -> None:
    model = wrapped()
    with pytest.raises(SettingError, match=rf"^[^.]*{argument}[^.]* must be off, got {value}\. "):
        trainer_of(Full(), tmp_path, model, **{argument: value})
    assert not hasattr(model.timm_model, "efficient_ft_methods")


@pytest.mark.parametrize("argument", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointing_is_rejected_only_with_methods_that_it_disables(argument: str, tmp_path: Path) -> None:
    message = rf"^[^.]*{argument}[^.]* must be off with method compact, got True\. Use the method Checkpointing"
    with pytest.raises(SettingError, match=message):
        trainer_of(Compact(), tmp_path, wrapped(), **{argument: True})
    callback = MethodCallback([Full(), LBPWHT(order=2)])
    callback._refuse_arguments(arguments(tmp_path, **{argument: True}))


def test_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**changes: Any) -> None:
        args = arguments(tmp_path, **changes)
        MethodCallback(METHODS["alast"]())._refuse_arguments(args)

    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(SettingError, match=r"^n_gpu must be 1 for each process, got 2\. .*torchrun"):
        build()
    monkeypatch.setattr(TrainingArguments, "n_gpu", 0)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    build()
    with pytest.raises(SettingError, match=r"^ddp_find_unused_parameters must be True or None, got False\. .*alast"):
        build(ddp_find_unused_parameters=False)
    with pytest.raises(SettingError, match=r"^ddp_static_graph must be False or None"):
        build(ddp_static_graph=True)


@pytest.mark.slow
def test_a_callback_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    late = Trainer(wrapped(), arguments(tmp_path), train_dataset=images_of(1))
    late.add_callback(MethodCallback(Full()))
    with pytest.raises(UserError, match=r"after the Trainer was created\. Pass the callback in Trainer\(callbacks="):
        late.train()

    again = Trainer(
        None,
        arguments(tmp_path),
        train_dataset=images_of(1),
        callbacks=[MethodCallback(Full())],
        model_init=lambda: wrapped(),
    )
    with pytest.raises(UserError, match=r"model_init builds a new model"):
        again.train()


@pytest.mark.slow
def test_an_optimizer_built_before_is_refused(tmp_path: Path) -> None:
    for methods, refused in (([LoRA(rank=2)], True), ([LISA(num_layers=1)], False)):
        model = wrapped()
        optimizers: Any = (plain_sgd(model), None)
        build = {"train_dataset": images_of(1), "callbacks": [MethodCallback(methods)], "optimizers": optimizers}
        if refused:
            with pytest.raises(
                UserError,
                match=r"^16 of 18 trainable parameters are not in any optimizer .* created before the methods",
            ):
                Trainer(model, arguments(tmp_path), **build)  # type: ignore[arg-type]
        else:
            Trainer(model, arguments(tmp_path), **build).train()  # type: ignore[arg-type]


@pytest.mark.slow
def test_stepping_inside_the_backward_pass(tmp_path: Path) -> None:
    """Stepping inside the backward pass gives equal weights. Arguments that require all gradients are rejected."""

    def trained(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer], **changes: Any) -> nn.Module:
        torch.manual_seed(0)
        model = wrapped()
        optimizers: Any = (wrap(plain_sgd(model)), None)
        callbacks: Any = [MethodCallback([LISA(num_layers=1)])]
        args = arguments(tmp_path, seed=0, **changes)
        Trainer(model, args, train_dataset=images_of(4), callbacks=callbacks, optimizers=optimizers).train()
        return model.timm_model

    assert_same_weights(trained(lambda optimizer: optimizer), trained(step_in_backward))
    with pytest.raises(SettingError, match=r"^max_grad_norm must be 0 with an optimizer that steps inside.*got 1\.0"):
        trained(step_in_backward, max_grad_norm=1.0)
    with pytest.raises(SettingError, match=r"^gradient_accumulation_steps must be 1 with .*got 2"):
        trained(step_in_backward, gradient_accumulation_steps=2)


def test_a_wrapped_network_is_refused(tmp_path: Path) -> None:
    model = wrapped()
    model.timm_model = nn.DataParallel(model.timm_model)
    with pytest.raises(UserError, match=r"unwrapped nn.Module, got DataParallel"):
        trainer_of(Full(), tmp_path, model)


@pytest.mark.slow
def test_a_checkpoint_of_other_methods_is_refused(tmp_path: Path) -> None:
    save = {"save_strategy": "steps", "save_steps": 1, "count": 2}
    trainer_of(ALaST(num_layers=2), tmp_path, **save).train()
    with pytest.raises(UserError, match=r"^The checkpoint was written with other methods or settings"):
        trainer_of(ALaST(num_layers=3), tmp_path, **save).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-1")
    plain = Trainer(wrapped(), arguments(tmp_path / "plain", save_strategy="epoch"), train_dataset=images_of(1))
    plain.train()
    resume = {"resume_from_checkpoint": f"{tmp_path}/plain/checkpoint-1"}
    with pytest.raises(UserError, match=r"contains the state of no method"):
        trainer_of(ALaST(num_layers=2), tmp_path, **save).train(**resume)
    trainer_of(Full(), tmp_path, **save).train(**resume)  # Full has no state.


# ------------------------------------------------------------------------------------------------ two processes
_TWO = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.integrations.loops import METHODS
from tests.integrations.test_transformers import trainer_of, wrapped

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    model = wrapped()
    torch.manual_seed(0)
    trainer = trainer_of(METHODS[name](), Path(folder), model, num_train_epochs=2, ddp_backend="gloo")
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(model.timm_model.state_dict(), Path(folder, "weights.pt"))
"""


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["alast", "moe"])
def test_two_processes_equal_one_with_two_micro_batches(name: str, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(_TWO)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), name, str(tmp_path)], capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    expected = model_of("vit")
    train_by_hand(expected, METHODS[name](), batches_of("vit", 4), epochs=2, accumulate=2, optimizer_of=plain_sgd)
    found = torch.load(tmp_path / "weights.pt")
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-8, msg=key)
