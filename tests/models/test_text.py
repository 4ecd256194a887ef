"""Tests of text classifiers: their view, weight files, and exact gradients of methods."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertForSequenceClassification

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import executed
from efficient_ft.methods import METHODS
from efficient_ft.methods.memory.back_razor import BackRazor
from efficient_ft.methods.memory.checkpointing import Checkpointing
from efficient_ft.methods.memory.low_bit import LowBit
from efficient_ft.models import factory
from efficient_ft.models.text import TEXT_MODELS, build, load, portable, require_fitting, tokenizer_of
from efficient_ft.models.view import view
from efficient_ft.task import TextClassification
from tests.models.text_models import SMALL, VOCABULARY, write_model

TASK = TextClassification()


def config(name: str = "bert", **changes: Any) -> ModelConfig:
    return ModelConfig(**{"name": name, "pretrained": False, "max_length": 32, "kwargs": SMALL, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"))


def from_folder(folder: Path, **changes: Any) -> ModelConfig:
    return config(**{"pretrained": True, "weights": str(folder), "kwargs": {}, **changes})


@pytest.mark.parametrize("name", list(TEXT_MODELS))
def test_known_networks_have_blocks_and_a_head(name: str) -> None:
    with torch.device("meta"):
        model = factory.random_model(config(name, max_length=512, kwargs={}), 3)
    found = view(model)
    assert found.name == name
    assert len(found.stages) == min(4, len(found.blocks))
    assert found.head == ("classifier",)
    assert found.last_stage()[-1] == "classifier"
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    sizes = {"bert_base": 109.5, "bert_small": 28.8, "bert_tiny": 4.4, "distilbert_base": 67.0, "roberta_base": 124.6}
    assert parameters == pytest.approx(sizes[name], abs=0.2)


def test_bert_as_methods_see_it() -> None:
    found = view(factory.random_model(config(), 2))
    assert found.blocks == tuple(f"bert.encoder.layer.{k}" for k in range(4))
    assert found.last_stage() == ("bert.encoder.layer.3", "bert.pooler", "classifier")
    assert found.image_size == (32,)
    assert all(layer.tokens is None for layer in found.layers)
    assert {layer.in_attention for layer in found.layers if ".attention." in layer.name} == {True}


def test_weights_of_a_folder_are_those_of_transformers(folder: Path) -> None:
    model = factory.create_model(from_folder(folder), 3)
    theirs: Any = BertForSequenceClassification
    own = theirs.from_pretrained(str(folder), num_labels=3)
    own.classifier.load_state_dict(model.get_submodule("classifier").state_dict())  # both are newly initialized
    inputs = TASK.example_inputs(2, 0, (16,))
    inputs = {name: x.clamp(max=len(VOCABULARY) - 1) for name, x in inputs.items()}  # type: ignore[union-attr]
    with torch.no_grad():
        torch.testing.assert_close(TASK.logits(model.eval(), inputs), own.eval()(**inputs).logits)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_file_of_weights_replaces_those_of_the_name(folder: Path, tmp_path: Path) -> None:
    other = factory.create_model(from_folder(folder), 2)
    nn.init.normal_(other.get_submodule("classifier").weight)  # type: ignore[arg-type]
    save_file({k: v.contiguous() for k, v in other.state_dict().items()}, tmp_path / "own.safetensors")
    again = factory.create_model(config(weights=str(tmp_path / "own.safetensors")), 2)
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=0)
    wider = factory.create_model(config(weights=str(tmp_path / "own.safetensors")), 5)
    assert wider.get_submodule("classifier").weight.shape == (5, 32)


def test_the_tokenizer_is_that_of_the_folder(folder: Path) -> None:
    found = tokenizer_of(from_folder(folder))
    assert found.size == len(VOCABULARY)
    assert found.inputs == ("input_ids", "token_type_ids", "attention_mask")
    ids = found.batch([("The Apple",)], 8)["input_ids"][0, :4].tolist()
    assert ids == [2, VOCABULARY.index("the"), VOCABULARY.index("apple"), 3]


def test_a_portable_configuration_needs_no_folder(folder: Path) -> None:
    model = factory.create_model(from_folder(folder), 3)
    found = portable(from_folder(folder), model)
    assert found.name == "bert"
    again = factory.random_model(found.model_copy(update={"weights": None}), 3)
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert found.kwargs.items() >= {k: v for k, v in SMALL.items() if k != "vocab_size"}.items()
    plain = config("bert_base", kwargs={})
    assert portable(plain, factory.random_model(plain.model_copy(update={"kwargs": SMALL}), 2)) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 65}, r"model\.max_length must be at most 64 \(positions of bert\), got 65"),
        ({"kwargs": {"to_dict": 8}}, r"model\.kwargs\.to_dict must be an argument of bert"),
        ({"kwargs": {"return_dict": False}}, r"model\.kwargs\.return_dict must be unset"),
        ({"name": "./bert"}, r"model\.name must be OWNER/NAME on the hub.*model\.weights=DIR"),
        ({"kwargs": {"hidden_sise": 8}}, r"model\.kwargs\.hidden_sise must be an argument of bert.*'hidden_size'"),
        ({"kwargs": {"num_labels": 3}}, r"model\.kwargs\.num_labels must be unset"),
        ({"drop_rate": 0.1}, r"model\.drop_rate must be 0 for a text classifier.*hidden_dropout_prob"),
        ({"name": "brt_base"}, r"model\.name must be bert_base, .* Did you mean 'bert_base'\?"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        factory.random_model(config(**changes), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kwargs": {"num_attention_heads": 5}}, r"model\.name=bert cannot be built .* with model\.kwargs="),
        ({"kwargs": {"hidden_dropout_prob": 2.0}}, r"cannot be built|model\.kwargs\.hidden_dropout_prob"),
        ({"kwargs": {"hidden_act": "foo"}}, r"cannot be built .* with model\.kwargs="),
        ({"kwargs": {"hidden_size": "abc"}}, r"model\.kwargs\.hidden_size|cannot be built"),
        ({"name": "vit", "kwargs": {}}, r"model\.name=vit cannot be built as a text classifier with the type vit"),
    ],
)
def test_networks_that_cannot_be_built_say_so(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        factory.random_model(config(**changes), 2)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 0}, {"hidden_size": -8}, {"hidden_size": 10**9}, {"hidden_size": "64"}, {"hidden_size": 1.5},
        {"hidden_size": float("nan")}, {"hidden_size": None}, {"hidden_size": [64]}, {"hidden_size": True},
        {"num_attention_heads": 0}, {"num_attention_heads": -1}, {"num_hidden_layers": 10**6},
        {"num_hidden_layers": -1}, {"vocab_size": 0}, {"vocab_size": 10**12}, {"intermediate_size": 0},
        {"max_position_embeddings": 0}, {"type_vocab_size": -1}, {"pad_token_id": 10**9}, {"layer_norm_eps": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_with_which_no_network_can_be_built_are_one_message(
    folder: Path, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    with pytest.raises(UserError) as caught:
        factory.random_model(from_folder(tmp_path / "model"), 2)
    assert "\n" not in str(caught.value)


def test_positions_are_those_of_the_network() -> None:
    small = {**SMALL, "max_position_embeddings": 66}
    factory.random_model(config("roberta", max_length=64, kwargs=small), 2)
    with pytest.raises(SettingError, match=r"at most 64 \(positions of roberta\)"):
        factory.random_model(config("roberta", max_length=65, kwargs=small), 2)


def test_a_tokenizer_of_another_network_is_refused(folder: Path) -> None:
    model = factory.create_model(from_folder(folder), 2)
    require_fitting(tokenizer_of(from_folder(folder)), model)
    smaller = factory.random_model(config(kwargs={**SMALL, "vocab_size": 20}), 2)
    with pytest.raises(UserError, match=rf"The tokenizer has {len(VOCABULARY)} tokens, but the network embeds only 20"):
        require_fitting(tokenizer_of(from_folder(folder)), smaller)


def test_a_tokenizer_that_cannot_encode_is_refused(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "tokenizer.json").unlink()
    (copied / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\n[MASK]\napple\n")  # without [UNK]
    with pytest.raises(UserError, match=r"copy: The tokenizer cannot encode a text \(WordPiece error: Missing \[UNK\]"):
        tokenizer_of(from_folder(copied))
    file = tmp_path / "run.safetensors"
    save_file({"a": torch.zeros(1)}, file, {"tokenizer": "{}"})
    with pytest.raises(UserError, match=r"run\.safetensors: the tokenizer cannot be read \('pad'\)"):
        tokenizer_of(from_folder(file))


def test_precision_of_the_published_weights_plays_no_part(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "half")
    about = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**about, "dtype": "bfloat16", "directionality": "bidi"}))
    for make in (factory.random_model, factory.create_model):
        assert {p.dtype for p in make(from_folder(copied), 2).parameters()} == {torch.float32}
    model = factory.create_model(from_folder(copied), 2)
    found = portable(from_folder(copied), model)
    assert "directionality" not in found.kwargs
    factory.random_model(found.model_copy(update={"weights": None}), 2)


def test_the_name_must_be_the_type_of_the_folder(folder: Path) -> None:
    for name in ("bert", "bert_base"):
        assert factory.create_model(from_folder(folder, name=name), 2)
    for name in ("distilbert", "roberta_base"):
        with pytest.raises(SettingError, match=rf"model\.name must be .*, got {name}\. .* set model\.name=bert\."):
            factory.create_model(from_folder(folder, name=name), 2)


def test_missing_files_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert factory.missing_weights(from_folder(folder)) is None
    assert "an existing folder or file" in str(factory.missing_weights(from_folder(tmp_path / "none")))
    assert "an existing folder or file" in str(factory.missing_weights(from_folder(Path("x" * 5000))))
    part = tmp_path / "part"
    part.mkdir()
    (part / "config.json").write_bytes((folder / "config.json").read_bytes())
    message = str(factory.missing_weights(from_folder(part)))
    assert "does not contain model.safetensors or pytorch_model.bin, tokenizer.json or vocab.txt or vocab" in message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    message = str(factory.missing_weights(config("bert_base", pretrained=True)))
    assert "google-bert/bert-base-uncased" in message
    assert "model.weights=DIR" in message
    assert "a model type without published weights" in str(factory.missing_weights(config(pretrained=True)))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        tokenizer_of(config("bert_base"))


def test_weights_of_another_network_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"of a different shape: bert\.embed.*32 in the file, but 64 in the model"):
        factory.create_model(from_folder(folder, kwargs={"hidden_size": 64}), 2)
    save_file({"blocks.0.weight": torch.zeros(2)}, tmp_path / "vit.safetensors")
    with pytest.raises(SettingError, match=r"model\.weights must be a file that fits model\.name=bert"):
        factory.create_model(config(weights=str(tmp_path / "vit.safetensors")), 2)
    broken = write_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match=r"The weights in .* cannot be read"):
        factory.create_model(from_folder(broken), 2)
    (broken / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be used"):
        factory.create_model(from_folder(broken), 2)


# ------------------------------------------------------------------------------------------ methods
def gradients(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the gradients of the loss on texts of different lengths, with dropout drawn from `seed`."""
    generator = torch.Generator().manual_seed(1)
    inputs: Any = TASK.example_inputs(4, 0, (24,), generator)
    inputs["attention_mask"][1, 10:] = 0
    inputs["attention_mask"][2, 3:] = 0
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    TASK.loss(TASK.logits(model.train(), inputs), torch.tensor([0, 1, 2, 0])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "method",
    [
        lambda: BackRazor(sparsity=0.0, value_dtype="same", threshold="exact"),
        lambda: BackRazor(sparsity=0.0, value_dtype="same", norm_saves="input", recompute_inputs=False),
        Checkpointing,
    ],
    ids=["back_razor", "back_razor as published", "checkpointing"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_methods_that_lose_nothing_have_the_exact_gradients(method: Any, dropout: float) -> None:
    torch.manual_seed(0)
    kwargs = {**SMALL, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    plain = factory.random_model(config(kwargs=kwargs), 3).double()
    changed = copy.deepcopy(plain)
    method().apply(changed)
    exact, found = gradients(plain), gradients(changed)
    assert exact.keys() == found.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.slow
def test_low_bit_is_near_the_exact_gradient() -> None:
    torch.manual_seed(0)
    kwargs = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain = factory.random_model(config(kwargs=kwargs), 3)
    changed = copy.deepcopy(plain)
    LowBit(bits=8).apply(changed)
    exact, found = (torch.cat([g.flatten() for g in gradients(m).values()]) for m in (plain, changed))
    assert torch.cosine_similarity(exact, found, dim=0) > 0.99
    assert not torch.equal(exact, found)


@pytest.mark.slow
def test_what_is_left_dense_keeps_its_own_bytes() -> None:
    model = factory.random_model(config(), 3)
    skip = ["intermediate", "layer.*.output"]
    whole, part, plain = (
        executed(copy.deepcopy(model), 2, (32,), task=TASK, methods=methods).saved_bytes
        for methods in ([BackRazor()], [BackRazor(skip=skip)], [])
    )
    assert whole < part < plain
    method = BackRazor(skip=skip)
    applied = method.apply(copy.deepcopy(model))
    left = {name for name, why in applied.skipped.items() if str(why) == "left dense (skip)"}
    assert {name.split(".", 4)[-1] for name in left} == {"intermediate.dense", "output.dense", "output.LayerNorm"}
    assert "bert.encoder.layer.0.attention.output.dense" in applied.touched


#: Methods that require a patch grid or a different network family.
REFUSED = {
    "alast", "bsr", "bsr_moe", "evit", "lbp_dct", "lbp_wht", "patch_dropout", "repnet", "tinytl", "tome", "moe",
}  # fmt: skip
_TWO = {"num_layers": 2}
SETTINGS: dict[str, dict[str, Any]] = {"blocks": {"blocks": [1, 3]}, "top_layers": _TWO, "uniform_layers": _TWO}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_serves_texts_or_says_why_not(name: str) -> None:
    model = factory.random_model(config(), 3)
    method = METHODS[name](**SETTINGS.get(name, {}))
    if name in REFUSED:
        needed = "grid|class token|side modules support|InvertedResidual|has no mlp"
        with pytest.raises(UserError, match=needed):
            method.apply(model)
        return
    applied = method.apply(model)
    assert applied.touched
    model.zero_grad(set_to_none=True)
    loss = TASK.loss(TASK.logits(model.train(), TASK.example_inputs(2, 0, (16,))), torch.tensor([0, 2]))
    loss.backward()
    trained = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is not None]
    assert trained


#: Entries of config.json that would make `transformers` download, import or select code.
_CODE = [
    {"attn_implementation": "owner/kernel"},
    {"_attn_implementation": "owner/kernel@main:function"},
    {"_attn_implementation_internal": "owner/kernel"},
    {"attn_implementation": {"": "owner/kernel"}},
    {"attn_implementation": "paged|owner/kernel"},
    {"attn_implementation": "flash_attention_2"},
    {"experts_implementation": "owner/kernel"},
    {"_experts_implementation_internal": "owner/kernel"},
    {"auto_map": {"AutoModelForSequenceClassification": "code.Model"}},
    {"trust_remote_code": True},
    {"use_kernels": True},
    {"text_config": {"model_type": "bert", "_attn_implementation": "owner/kernel"}},
]


@pytest.mark.parametrize("entry", _CODE, ids=lambda entry: "-".join(map(str, entry)))
def test_code_that_a_folder_names_is_left_out_and_reported(
    entry: dict[str, Any], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain: Any = load(from_folder(folder), 2)
    given = Path(shutil.copytree(folder, tmp_path / "given"))
    about = json.loads((given / "config.json").read_text())
    (given / "config.json").write_text(json.dumps({**about, **entry}))
    (given / "code.py").write_text("raise SystemExit('imported')")
    tokenizer = json.loads((given / "tokenizer_config.json").read_text())
    (given / "tokenizer_config.json").write_text(
        json.dumps({**tokenizer, "auto_map": {"AutoTokenizer": ["a.B", None]}})
    )
    model: Any = load(from_folder(given), 2)
    for name, value in plain.bert.state_dict().items():
        assert torch.equal(model.bert.state_dict()[name], value), name
    held = json.dumps(model.config.to_dict(), default=str)
    assert "owner/kernel" not in held
    assert model.config._attn_implementation == plain.config._attn_implementation
    assert f"refers to code, which is not loaded: {next(iter(entry))}" in caplog.text or "text_config" in entry
    assert "refers to code" in caplog.text
    assert tokenizer_of(from_folder(given)).size == len(VOCABULARY)
    assert "auto_map" in caplog.text
    with pytest.raises(UserError, match=r"model\.kwargs: .* refers to code, which is not loaded"):
        build(config(kwargs=entry), 2)


@pytest.mark.parametrize(
    ("file", "entry", "said"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "the weights are quantized"),
        ("config.json", {"model_type": "unheard"}, "model_type=unheard is not a model type"),
        ("config.json", {"model_type": ["bert"]}, "is not a model type"),
        ("config.json", None, "does not contain a mapping"),
        ("adapter_config.json", {"base_model_name_or_path": "owner/name"}, "Merge the adapter first"),
    ],
)
def test_folders_that_need_more_than_their_weights_are_refused(
    file: str, entry: dict[str, Any] | None, said: str, folder: Path, tmp_path: Path
) -> None:
    given = Path(shutil.copytree(folder, tmp_path / "given"))
    about = json.loads((given / file).read_text()) if (given / file).exists() else {}
    (given / file).write_text(json.dumps([about] if entry is None else {**about, **entry}))
    with pytest.raises(UserError, match=said):
        load(from_folder(given), 2)


@pytest.mark.parametrize("path", ["/etc/passwd", "../vocab.txt", "a\\..\\b"])
def test_a_tokenizer_has_no_files_elsewhere(path: str, folder: Path, tmp_path: Path) -> None:
    given = Path(shutil.copytree(folder, tmp_path / "given"))
    about = json.loads((given / "tokenizer_config.json").read_text())
    (given / "tokenizer_config.json").write_text(json.dumps({**about, "vocab_file": path}))
    with pytest.raises(UserError, match="is outside of the folder"):
        tokenizer_of(from_folder(given))
