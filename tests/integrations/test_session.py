"""`MethodSession`: the same weights as the low-level calls, files of the trained part, and messages about misuse."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft import MethodSession
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import executed
from efficient_ft.integrations.saving import decode, encode
from efficient_ft.methods import (
    BSR,
    LBPWHT,
    LISA,
    ALaST,
    BackRazor,
    BitFit,
    Blocks,
    BSRMoE,
    EViT,
    Full,
    HeadOnly,
    LastStage,
    LoRA,
    LoRAFA,
    LowBit,
    Method,
    MoE,
    RepNet,
    TinyTL,
    TopLayers,
    apply_methods,
)
from efficient_ft.models.frozen_batch_norm import FrozenBatchNorm2d, freeze_batch_norm
from efficient_ft.optim import step_in_backward
from efficient_ft.testing import MODELS, batch_of, model_of
from tests.integrations.loops import assert_same_weights, batches_of, sgd, states_of, train_by_hand

STACKS: dict[str, Callable[[], list[Method]]] = {
    "last_stage+lbp_wht": lambda: [LastStage(), LBPWHT(order=3)],
    "bsr_moe": lambda: [BSRMoE(4, 2, [1, -1], aux_loss_coef=0.1, drop_at=[1, 2])],
    "lisa": lambda: [LISA(num_layers=1, interval=1, seed=3)],
    "alast": lambda: [ALaST(num_layers=2, budget_init=0.7, seed=3)],
    "back_razor": lambda: [BackRazor(sparsity=0.7)],
    "top_layers": lambda: [TopLayers(num_layers=2, profile_steps=2)],
    "lbp_wht_lhe": lambda: [LBPWHT(bases="lhe", order=2, profile_steps=2)],
    "lora": lambda: [LoRA(rank=2)],
}
#: Methods of every axis, and all that add modules; each with its small model.
SAVED: dict[str, tuple[str, Callable[[], list[Method]]]] = {
    **{name: ("vit", make) for name, make in STACKS.items()},
    "lora_fa": ("vit", lambda: [LoRAFA(rank=2)]),
    "bitfit": ("vit", lambda: [BitFit()]),
    "blocks+evit": ("vit", lambda: [Blocks([-1]), EViT([1])]),
    "low_bit": ("vit", lambda: [Blocks([-1]), LowBit()]),
    "repnet": ("mobilenet", lambda: [RepNet([1, 2])]),
    "tinytl": ("mobilenet", lambda: [TinyTL()]),
    "last_stage": ("resnet", lambda: [LastStage()]),
}


def sgd_of(session: MethodSession) -> torch.optim.Optimizer:
    """The optimizer of `sgd`, over the session's parameters."""
    return torch.optim.SGD(session.parameters(), lr=0.05, momentum=0.9)


def train(
    model: Any,
    session: MethodSession,
    batches: list[tuple[Tensor, Tensor]],
    accumulate: int = 1,
    numbered: bool = False,
) -> None:
    """The loop of the issue; micro-batches share one block, or (`numbered`) one number."""
    optimizer = sgd_of(session)
    for step in range(len(batches) // accumulate):
        group = batches[step * accumulate : (step + 1) * accumulate]
        if numbered:
            for index, (x, y) in enumerate(group):
                with session.step(step):
                    (session.loss(F.cross_entropy(model(x), y)) / accumulate).backward()
                    if index + 1 == accumulate:
                        optimizer.step()
                        optimizer.zero_grad()
            continue
        with session.step(step):
            for x, y in group:
                (session.loss(F.cross_entropy(model(x), y)) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()


def by_hand(methods: list[Method], count: int = 4, accumulate: int = 1, name: str = "vit") -> nn.Module:
    torch.manual_seed(0)
    model = model_of(name)
    train_by_hand(model, methods, batches_of(name, count), accumulate=accumulate)
    return model


# ------------------------------------------------------------------------------------------------ the same training
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(("accumulate", "numbered"), [(1, False), (2, False), (2, True)])
def test_a_session_trains_like_the_low_level_calls(stack: str, accumulate: int, numbered: bool) -> None:
    methods = STACKS[stack]()
    expected = by_hand(methods, accumulate=accumulate)
    torch.manual_seed(0)
    model = model_of("vit")
    with warnings.catch_warnings(), MethodSession(model, STACKS[stack]()) as session:
        warnings.simplefilter("error")
        train(model, session, batches_of("vit", 4), accumulate, numbered)
    assert_same_weights(expected, model)
    assert states_of(session.methods) == states_of(methods)
    assert all(p.requires_grad for p in session.parameters())
    assert [report.method for report in session.reports] == [method.name for method in session.methods]


def test_zero_grad_may_follow_the_block_and_an_evaluation_may_be_anywhere() -> None:
    methods = STACKS["top_layers"]()
    expected = by_hand(methods)
    model = model_of("vit")
    with MethodSession(model, STACKS["top_layers"]()) as session:
        optimizer = sgd_of(session)
        for step, (x, y) in enumerate(batches_of("vit", 4)):
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                with torch.no_grad():
                    model.eval()(x)
                model.train()
                optimizer.step()
            optimizer.zero_grad()
            assert session.current_step is None
    assert_same_weights(expected, model)


def test_two_optimizers_end_a_step_together() -> None:
    expected = by_hand(STACKS["top_layers"]())
    model = model_of("vit")
    with MethodSession(model, STACKS["top_layers"]()) as session:
        named = session.named_parameters()
        parts = [[p for n, p in named if n.startswith("head") == head] for head in (True, False)]
        optimizers = [torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts]
        for step, (x, y) in enumerate(batches_of("vit", 4)):
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                optimizers[0].step()
                assert session.current_step == step
                optimizers[1].step()
                assert session.current_step is None
                for optimizer in optimizers:
                    optimizer.zero_grad()
    assert_same_weights(expected, model)


def test_updates_without_an_optimizer_end_a_step() -> None:
    method = LISA(num_layers=1, interval=1)
    model = model_of("vit")
    other = torch.nn.Linear(1, 1)
    others = torch.optim.SGD(other.parameters())
    with MethodSession(model, method) as session:
        for step, (x, y) in enumerate(batches_of("vit", 2)):
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                others.step()  # the optimizer of another model ends nothing
                assert session.current_step == step
                with torch.no_grad():
                    for p in session.parameters():
                        if p.grad is not None:
                            p -= 0.1 * p.grad
                            p.grad = None
            assert session.current_step is None


def test_an_optimizer_in_the_backward_pass() -> None:
    def optimizer_of(model: nn.Module) -> Any:
        return step_in_backward(sgd(model))

    expected = model_of("vit")
    train_by_hand(expected, [LISA(1, interval=1)], batches_of("vit", 3), optimizer_of=optimizer_of)
    model = model_of("vit")
    with MethodSession(model, LISA(1, interval=1)) as session:
        optimizer = optimizer_of(model)
        for step, (x, y) in enumerate(batches_of("vit", 3)):
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                optimizer.step()
    assert_same_weights(expected, model)
    model = model_of("vit")
    with MethodSession(model, TopLayers(1)) as session:
        optimizer = optimizer_of(model)
        with pytest.raises(UserError, match="method top_layers compares the gradients"), session.step(0):
            session.loss(F.cross_entropy(model(x), y)).backward()


@pytest.mark.parametrize("stack", ["top_layers", "lisa", "alast"])
def test_a_step_that_a_grad_scaler_skips_is_ignored(stack: str) -> None:
    """The first step overflows. Powers of two scale exactly, so that all others equal an unscaled training."""
    model, batches = model_of("vit"), batches_of("vit", 4)
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings(), MethodSession(model, STACKS[stack]()) as session:
        warnings.simplefilter("error")
        optimizer, scaler = sgd_of(session), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step, (x, y) in enumerate(batches):
            with session.step(step):
                loss = session.loss(F.cross_entropy(model(x), y))
                scaler.scale(loss * torch.inf if step == 0 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if step == 0:
                assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    if stack == "top_layers":
        assert session.methods[0].state_dict()["steps"] == 2
    if stack == "lisa":
        expected, method = model_of("vit"), STACKS[stack]()[0]
        method.apply(expected)
        plain = sgd(expected)
        for step, (x, y) in list(enumerate(batches))[1:]:
            method.step_begin(step)
            F.cross_entropy(expected(x), y).backward()
            plain.step()
            method.step_end()
            plain.zero_grad()
        assert_same_weights(expected, model)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stack", ["last_stage+lbp_wht", "lisa", "bsr_moe"])
def test_a_model_wrapped_for_several_processes_after_applying(stack: str) -> None:
    expected = by_hand(STACKS[stack]())
    torch.manual_seed(0)
    model = model_of("vit")
    with MethodSession(model, STACKS[stack]()) as session:
        unused = session.find_unused_parameters
        assert unused is (stack != "last_stage+lbp_wht")
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
        train(wrapped, session, batches_of("vit", 4))
        with pytest.raises(UserError, match=r"plain module, got DistributedDataParallel\. Apply the methods first"):
            MethodSession(wrapped, Full()).apply()
    assert_same_weights(expected, model)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["last_stage+lbp_wht", "lisa", "back_razor"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_compiled_after_applying(stack: str, in_place: bool, tmp_path: Path) -> None:
    expected = by_hand(STACKS[stack]())
    model = model_of("vit")
    with MethodSession(model, STACKS[stack]()) as session:
        if in_place:
            model.compile(backend="aot_eager")
        train(model if in_place else torch.compile(model, backend="aot_eager"), session, batches_of("vit", 4))
        session.save(tmp_path / "part.safetensors")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_a_session_is_entered_again_and_followed_by_another() -> None:
    expected = by_hand(STACKS["lora"](), 2)
    torch.manual_seed(0)
    model, batches = model_of("vit"), batches_of("vit", 2)
    session = MethodSession(model, STACKS["lora"]())
    optimizer: Any = None
    for step, (x, y) in enumerate(batches):
        with session:
            optimizer = optimizer or sgd_of(session)
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(expected, model)
    session.remove()
    with MethodSession(model, HeadOnly()) as after:
        assert [n for n, _ in after.named_parameters()] == ["head.weight", "head.bias"]


# ------------------------------------------------------------------------------------------------ remove
def test_leaving_keeps_the_methods_and_remove_restores_the_model() -> None:
    model = model_of("resnet")
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    x, y = batch_of("resnet")
    with MethodSession(model, [LoRA(rank=2, targets="all"), LBPWHT(order=3)]) as session:
        train(model, session, [(x, y)])
    assert any("lora_A" in name for name in model.state_dict())
    assert any(isinstance(m, FrozenBatchNorm2d) for m in model.modules())
    trained = model.eval()(x)
    session.remove()
    assert (list(model.state_dict()), [type(m) for m in model.modules()]) == (names, kinds)
    torch.testing.assert_close(model.eval()(x), trained, rtol=1e-9, atol=1e-9)
    assert all(p.requires_grad for p in model.parameters())
    assert session.reports == []


def test_statistics_that_were_frozen_before_stay_frozen() -> None:
    model = model_of("resnet")
    freeze_batch_norm(model)
    session = MethodSession(model, Full()).apply()
    session.remove()
    assert any(isinstance(m, FrozenBatchNorm2d) for m in model.modules())
    model = model_of("resnet")
    with MethodSession(model, Full(), frozen_bn=False):
        assert not any(isinstance(m, FrozenBatchNorm2d) for m in model.modules())


def test_an_error_in_a_step_leaves_a_usable_model() -> None:
    model = model_of("vit")
    session = MethodSession(model, LISA(1))

    def fail() -> None:
        with session, session.step(0):
            assert not all(p.requires_grad for p in model.parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(p.requires_grad for p in model.parameters())
    assert session.current_step is None
    with session:
        train(model, session, batches_of("vit", 1))


# ------------------------------------------------------------------------------------------------ files
def outputs(model: nn.Module, name: str) -> list[Tensor]:
    """Outputs in evaluation and in training mode."""
    x, _ = batch_of(name)
    torch.manual_seed(5)
    with torch.no_grad():
        return [model.eval()(x), model.train()(x)]


def trained_session(stack: str) -> MethodSession:
    name, make = SAVED[stack]
    torch.manual_seed(1)
    model = model_of(name)
    with MethodSession(model, make()) as session:
        train(model, session, batches_of(name, 3))
    return session


@pytest.mark.parametrize("stack", SAVED)
def test_the_trained_part_gives_identical_outputs(stack: str, tmp_path: Path) -> None:
    name, make = SAVED[stack]
    session, file = trained_session(stack), tmp_path / "new" / "part.safetensors"
    session.save(file)
    torch.manual_seed(2)  # adapters of the new model start from other values
    other = model_of(name)
    with MethodSession(other, make()) as loaded:
        optimizer = sgd_of(loaded)
        loaded.load(file)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in loaded.parameters()}
    assert all(torch.equal(a, b) for a, b in zip(outputs(session.model, name), outputs(other, name), strict=True))
    assert_same_weights(session.model, other)
    assert states_of(loaded.methods) == states_of(session.methods)


def bytes_by_hand(stack: str) -> int:
    """Bytes of the trained part of the small vit: 4 blocks of width 48, 5 classes, float64."""
    head = 5 * 48 + 5
    linear = [(48, 144), (48, 48), (48, 192), (192, 48)]
    biases = sum(out for _, out in linear) + 2 * 48
    count = {
        "lora": head + 4 * (3 * 2 * (48 + 144) + 2 * (48 + 48)),  # three times the rank for q, k and v
        "bitfit": head + 4 * biases + 48 + 48,  # final norm and patch embedding
        "blocks+evit": head + sum(i * o + o for i, o in linear) + 4 * 48 + 2 * 48,
    }[stack]
    return 8 * count


@pytest.mark.parametrize("stack", ["lora", "bitfit", "blocks+evit"])
def test_the_trained_part_has_no_more_bytes_than_its_tensors(stack: str, tmp_path: Path) -> None:
    session, file = trained_session(stack), tmp_path / "part.safetensors"
    session.save(file)
    with safe_open(file, "pt") as opened:
        tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
    assert sum(t.nbytes for t in tensors) == bytes_by_hand(stack)
    assert bytes_by_hand(stack) < file.stat().st_size < bytes_by_hand(stack) + 8000


@pytest.mark.parametrize("stack", ["lora", "lora_fa"])
def test_the_trained_part_of_adapters_is_adapters_and_head(stack: str, tmp_path: Path) -> None:
    session, file = trained_session(stack), tmp_path / "part.safetensors"
    session.save(file)
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == {n for n in session.model.state_dict() if "lora_" in n or n.startswith("head.")}


def test_the_trained_part_of_a_large_model_is_small(tmp_path: Path) -> None:
    model = timm.create_model("deit_small_patch16_224", num_classes=10)
    session = MethodSession(model, LoRA(rank=8)).apply()
    session.save(tmp_path / "part.safetensors")
    session.save(tmp_path / "whole.safetensors", whole=True)
    part, whole = (tmp_path / f"{name}.safetensors" for name in ("part", "whole"))
    assert part.stat().st_size < 2**21
    assert whole.stat().st_size > 80 * 2**20


@pytest.mark.parametrize("stack", ["last_stage", "lora", "lora_fa", "bitfit", "back_razor"])
def test_all_weights_have_timms_names(stack: str, tmp_path: Path) -> None:
    session, file = trained_session(stack), tmp_path / "whole.safetensors"
    name = SAVED[stack][0]
    session.save(file, whole=True)
    small = MODELS[name]
    plain = small.create(checkpoint_path=str(file)).double()  # timm's own loader, in float32
    expected, _ = outputs(session.model, name)
    with torch.no_grad():
        found = plain.eval()(batch_of(name)[0])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    other = model_of(name)
    MethodSession(other, Full()).load(file)  # before the methods are applied
    torch.testing.assert_close(outputs(other, name)[0], expected, rtol=1e-9, atol=1e-9)


def test_all_weights_with_added_modules_are_loaded_after_applying(tmp_path: Path) -> None:
    session, file = trained_session("repnet"), tmp_path / "whole.safetensors"
    session.save(file, whole=True)
    other = model_of("mobilenet")
    loaded = MethodSession(other, SAVED["repnet"][1]())
    with pytest.raises(UserError, match=r"does not fit MobileNetV3|does not fit EfficientNet.*after it\."):
        loaded.load(file)
    loaded.apply().load(file)
    assert_same_weights(session.model, other)


@pytest.mark.parametrize(
    ("methods", "change", "text"),
    [
        ([LoRA(rank=4)], None, r"was saved with other methods or settings: lora\[.*This session has lora\["),
        ([Full()], None, "was saved with other methods or settings"),
        ([LoRA(rank=2), BackRazor()], None, "was saved with other methods or settings"),
        ([LoRA(rank=2)], "weights", "whose frozen weights differ from this model's"),
        ([LoRA(rank=2)], "dtype", "the same pretrained weights and dtype"),
        ([LoRA(rank=2)], "classes", r"head\.bias has the shape \(5,\) in the file and \(7,\) in the model"),
        ([LoRA(rank=2)], "frozen", r"the model does not expect head\.bias \(1 in total\)"),
    ],
)
def test_a_file_of_another_session_is_rejected(methods: Any, change: str | None, text: str, tmp_path: Path) -> None:
    session, file = trained_session("lora"), tmp_path / "part.safetensors"
    session.save(file)
    model = model_of("vit")
    if change == "classes":
        model.head = nn.Linear(48, 7).double()
    if change == "weights":
        with torch.no_grad():
            model.pos_embed += 1e-6
    model = model.float() if change == "dtype" else model
    fresh = [type(method)(**method.settings()) for method in methods]
    with MethodSession(model, fresh) as other:
        if change == "frozen":
            model.head.bias.requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UserError, match=text):
            other.load(file)
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    session = MethodSession(model_of("vit"), BitFit()).apply()
    with pytest.raises(UserError, match=r"no such file\. Pass a file written by session\.save"):
        session.load(tmp_path / "none.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not tensors")
    with pytest.raises(UserError, match="is not a valid"):
        session.load(broken)
    with pytest.raises(UserError, match="cannot be written"):
        session.save(broken / "part.safetensors")


def rewritten(file: Path, metadata: str | Callable[[dict[str, Any]], None]) -> None:
    """Replace the metadata of a trained part, or change the object that it contains."""
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = json.loads(opened.metadata()["efficient_ft_trained_part"])
    if not isinstance(metadata, str):
        metadata(about)
        metadata = json.dumps(about)
    save_file({n: t + 1 for n, t in tensors.items()}, file, {"efficient_ft_trained_part": metadata})


def tensor(values: Any, dtype: Any) -> Callable[[dict[str, Any]], None]:
    """Add an encoded tensor to the state of the first method."""
    return lambda about: (
        about["state"].setdefault(about["methods"][0], {}).update(of={"__tensor__": values, "dtype": dtype})
    )


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ("{", "malformed metadata"),
        ("", "malformed metadata"),
        ("[1]", "it must be an object, got list"),
        ("null", "it must be an object, got NoneType"),
        ("[" * 200_000, "nested too deeply"),
        ('{"methods": [], "other_weights": "", "state": {"a": {"b": ' + "[" * 3000 + "]" * 3000 + "}}}", "too deeply"),
        (lambda about: about.pop("methods"), "it lacks methods"),
        (lambda about: about.pop("state"), "it lacks state"),
        (lambda about: about.update(methods="top_layers"), "methods must be a list of strings"),
        (lambda about: about.update(methods=[1]), "methods must be a list of strings"),
        (lambda about: about.update(state=[]), "state must be an object of objects"),
        (lambda about: about.update(state=dict.fromkeys(about["methods"], 3)), "state must be an object of objects"),
        (lambda about: about.update(other_weights=None), "other_weights must be a string"),
        (tensor([1.0], "load"), "a tensor has the unknown dtype 'load'"),
        (tensor([1.0], ["float32"]), "a tensor has the unknown dtype"),
        (tensor([1.0], None), "a tensor has the unknown dtype None"),
        (tensor(["a"], "float32"), "the values of a tensor cannot be read"),
        (tensor({}, "float32"), "the values of a tensor cannot be read"),
        (tensor([[1], [2, 3]], "float32"), "the values of a tensor cannot be read"),
        (tensor([2**80], "int8"), "the values of a tensor cannot be read"),
        (lambda about: about["state"][about["methods"][0]].pop("steps"), r"method top_layers \(KeyError: 'steps'"),
        (lambda about: about["state"][about["methods"][0]].update(steps="2"), "top_layers.steps must be int, got str"),
        (lambda about: about["state"][about["methods"][0]].update(top=5), "top_layers.top must be list, got int"),
    ],
)
def test_a_file_with_malformed_metadata_changes_nothing(metadata: Any, text: str, tmp_path: Path) -> None:
    session, file = trained_session("top_layers"), tmp_path / "part.safetensors"
    session.save(file)
    rewritten(file, metadata)
    before, states = copy.deepcopy(session.model.state_dict()), copy.deepcopy(states_of(session.methods))
    with pytest.raises(UserError, match=text) as raised:
        session.load(file)
    assert str(raised.value).startswith(f"{file} has malformed metadata: ")
    assert all(torch.equal(before[n], t) for n, t in session.model.state_dict().items())
    assert states_of(session.methods) == states


def test_states_are_encoded_and_decoded() -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.bool)
    state = {"a": [torch.ones(2, 3, dtype=dtype) for dtype in dtypes], "b": {"c": None, "d": [1, 2.5, "e", True]}}
    found = decode(json.loads(json.dumps(encode(state))))
    assert found["b"] == state["b"]
    for one, other in zip(found["a"], state["a"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------------ misuse
def test_calls_before_the_methods_are_applied() -> None:
    session = MethodSession(model_of("vit"), LISA(1))
    for call in (session.parameters, session.named_parameters, session.remove, lambda: session.save("x")):
        with pytest.raises(UserError, match=r"was called before the methods were applied\. Enter the session"):
            call()
    for call in (lambda: session.begin_step(0), session.end_step):
        with pytest.raises(
            UserError, match=r"_step\(\) was called before the methods were applied\. Enter the session"
        ):
            call()
    with pytest.raises(UserError, match="outside of the session"), session.step(0):
        pass
    assert "not applied" in str(session)


def test_a_step_that_has_not_begun_cannot_end() -> None:
    session = MethodSession(model_of("vit"), LISA(1)).apply()
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"end_step\(\) was called, and no step has begun\. Call session\.begin_step"
        ):
            session.end_step()
        session.begin_step(0)
        session.end_step()
        with pytest.raises(UserError, match="no step has begun"):
            session.end_step()
        session.start()


def test_numbers_of_steps_that_repeat_are_rejected() -> None:
    model = model_of("vit")
    (x, y), *_ = batches_of("vit", 1)

    def block(session: MethodSession, optimizer: torch.optim.Optimizer, number: int, updates: bool = True) -> None:
        with session.step(number):
            session.loss(F.cross_entropy(model(x), y)).backward()
            if updates:
                optimizer.step()
        if updates:
            optimizer.zero_grad()

    with MethodSession(model, LISA(1, interval=1)) as session:
        optimizer = sgd_of(session)
        for number in (5, 6, 9):  # a resumed training may start at any number
            block(session, optimizer, number)
        for number in (0, 8, 9):
            with pytest.raises(UserError, match=rf"^Step {number} follows step 9 .*number the steps over all epochs"):
                block(session, optimizer, number)
            with pytest.raises(UserError, match="number the steps over all epochs"):
                session.begin_step(number)
            assert session.current_step is None
            assert all(p.requires_grad for p in session.parameters())
        for updates in (False, False, True):  # micro-batches of one step
            block(session, optimizer, 10, updates)
        block(session, optimizer, 11, updates=False)
        with pytest.raises(UserError, match="Step 10 follows step 11"):
            block(session, optimizer, 10)
        block(session, optimizer, 12)  # ends step 11 without an update
        with pytest.raises(UserError, match="Step 11 follows step 12"):
            block(session, optimizer, 11)
        session.start()
        block(session, optimizer, 0)
    with session:
        block(session, optimizer, 0)  # a new training
    session.start()
    for number in (0, 0, 1):
        session.begin_step(number)
        session.begin_step(number)
        if number:
            session.end_step()
    with pytest.raises(UserError, match="Step 1 follows step 1 of the same training"):
        session.begin_step(1)


def test_a_step_that_failed_may_be_repeated() -> None:
    model = model_of("vit")
    with MethodSession(model, LISA(1)) as session:
        optimizer = sgd_of(session)
        with pytest.raises(ZeroDivisionError), session.step(0):
            raise ZeroDivisionError
        step_without_loss(session, optimizer, 0)
        with pytest.raises(UserError, match="number the steps over all epochs"):
            step_without_loss(session, optimizer, 0)


def test_a_second_step_of_the_optimizer_in_one_block_is_named() -> None:
    model = model_of("vit")
    (x, y), *_ = batches_of("vit", 1)
    with MethodSession(model, LISA(1)) as session:
        optimizer = sgd_of(session)
        text = r"after the end of step 3, and method lisa acts per step\. The step has already ended"

        def twice() -> None:
            with session.step(3):
                for _ in range(2):
                    session.loss(F.cross_entropy(model(x), y)).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        with pytest.raises(UserError, match=text):
            twice()


def step_without_loss(session: MethodSession, optimizer: torch.optim.Optimizer, number: int) -> None:
    x, y = batch_of("vit")
    with session.step(number):
        F.cross_entropy(session.model(x), y).backward()
        optimizer.step()


def test_steps_and_losses_at_the_wrong_place() -> None:
    model = model_of("vit")
    with MethodSession(model, STACKS["bsr_moe"]()) as session:
        with pytest.raises(UserError, match="Step 1 began inside step 0"), session.step(0), session.step(1):
            pass
        with pytest.raises(UserError, match=r"loss\(\) was called outside of a step, and method bsr_moe adds a loss"):
            session.loss(torch.zeros(()))
        with pytest.raises(UserError, match=r"save\(\) was called inside step 2"), session.step(2):
            session.save("x")
        with pytest.raises(SettingError, match=r"^step must be an integer >= 0, got '1'"), session.step("1"):  # type: ignore[arg-type]
            pass
        with pytest.raises(UserError, match=r"adds a loss, and session\.loss\(\) was not called in step 3"):
            step_without_loss(session, sgd_of(session), 3)
    with pytest.raises(UserError, match="outside of the session"), session.step(4):
        pass
    with MethodSession(model_of("vit"), Full()) as plain:
        assert float(plain.loss(torch.ones(()))) == 1  # no method needs the step
    other = MethodSession(model_of("vit"), LISA(1)).apply()
    with pytest.raises(UserError, match="method lisa acts per step"):
        other.loss(torch.zeros(()))


def test_nested_sessions_are_rejected() -> None:
    model = model_of("vit")
    holder = nn.Sequential(model)
    with MethodSession(model, LastStage()) as session:
        for nested in (model, holder, model.blocks):
            with pytest.raises(UserError, match=r"Another session is open on this VisionTransformer: MethodSession\("):
                MethodSession(nested, BackRazor()).__enter__()
        with pytest.raises(UserError, match="The session is already open"):
            session.__enter__()
    with MethodSession(model, BackRazor()) as after:
        assert len(after.reports) == 1


@pytest.mark.parametrize("end", ["close", "remove", "__exit__"])
def test_a_session_of_hooks_is_open_from_apply_to_close(end: str) -> None:
    model = model_of("vit")
    session = MethodSession(model, LastStage()).apply()
    session.begin_step(0)
    for nested in (model, nn.Sequential(model), model.blocks):
        with pytest.raises(UserError, match=r"Another session is open on this VisionTransformer: MethodSession\("):
            MethodSession(nested, BackRazor()).apply()
    session.end_step()
    session.apply()
    with pytest.raises(UserError, match="Another session is open"), MethodSession(model, BackRazor()):
        pass
    if end == "__exit__":
        with session, pytest.raises(UserError, match="The session is already open"):
            session.__enter__()
    else:
        getattr(session, end)()
    with MethodSession(model, BackRazor()) as after:
        assert len(after.reports) == 1


def test_a_session_that_is_no_longer_referenced_is_not_open() -> None:
    model = model_of("vit")
    MethodSession(model, LastStage()).apply()
    with MethodSession(model, BackRazor()) as after:
        assert len(after.reports) == 1


def test_arguments_of_other_types() -> None:
    with pytest.raises(SettingError, match=r"^model must be a torch\.nn\.Module, got .*Pass the model first"):
        MethodSession([Full()], model_of("vit"))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="Make an object of the class: Full"):
        MethodSession(model_of("vit"), Full)  # type: ignore[arg-type]


def test_an_optimizer_without_the_added_parameters_is_rejected_after_one_step() -> None:
    model = model_of("vit")
    optimizer = sgd(model)
    session = MethodSession(model, LoRA(rank=2)).apply()
    with pytest.raises(UserError, match="trainable parameters are in no optimizer"):
        step_without_loss(session, optimizer, 0)


# ------------------------------------------------------------------------------------------------ reports
def test_print_shows_parameters_bytes_and_flops() -> None:
    model = MODELS["vit"].create()
    methods: list[Method] = [Blocks([-1]), BackRazor()]
    with MethodSession(model, methods) as session:
        lines = str(session).splitlines()
        cost = executed(model, 8, (32, 32), methods=methods)
        trains = sum(p.numel() for p in session.parameters())
        assert session.cost(batch_size=4).batch_size == 4
        assert "with 4 images" in str(session)
    assert len(lines) == 3
    assert lines[0].startswith(
        f"trainable: {trains / 1e3:.1f} k of {sum(p.numel() for p in model.parameters()) / 1e3:.0f} k"
    )
    assert lines[0].endswith(f"(blocks, back_razor); save() writes {trains * 4 / 2**10:.0f} KiB")
    assert lines[1].startswith(f"memory: {cost.saved_bytes / 2**10:.1f} KiB kept per image for the backward pass; peak")
    assert lines[2] == (
        f"FLOPs: {cost.forward_flops / 1e6:.1f} M forward and {cost.backward_flops / 1e6:.2f} M backward per image"
    )


def test_a_model_that_cannot_be_counted_is_printed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no images")

    session = MethodSession(Odd(), Full()).apply()
    assert "not counted" in str(session)
    assert repr(session) == "MethodSession(Odd: full)"


def test_nothing_is_left_after_a_session() -> None:
    from torch.optim import optimizer

    hooks = dict(optimizer._global_optimizer_post_hooks)
    model = model_of("vit")
    with MethodSession(model, LISA(1)) as session:
        train(model, session, batches_of("vit", 1))
        assert dict(optimizer._global_optimizer_post_hooks) == hooks
    session.remove()
    apply_methods(model, [BSR([1, -1], [1], 0.5), MoE(4, 2, [1])])
