"""Tests of resumed runs: they give the same bits after an interruption, a kill or a damaged checkpoint."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image

from efficient_ft.core.errors import TerminatedRun, UserError
from efficient_ft.record.formats import FORMAT, OtherVersionError
from efficient_ft.training.output import checkpoint
from efficient_ft.training.run import run
from tests.data.publishers import write_pets
from tests.training.runs import assert_same_run, interrupted_at, killed_at, method_states, plain_config

pytestmark = pytest.mark.usefixtures("without_cost")

PER_STEP = {
    "alast": {"num_layers": 1, "budget_init": 0.8, "budget_min": 0.2, "budget_lr": 1e-4, "first_delta": "same"},
    "lisa": {"num_layers": 1, "interval": 4},
    "top_layers": {"num_layers": 1, "profile_steps": 8},
    "uniform_layers": {"num_layers": 1},
}


@pytest.mark.exhaustive
def test_killed_in_the_middle_of_an_epoch_it_continues_bit_for_bit(tmp_path, configuration, finished):
    broken = tmp_path / "broken"
    killed_at(18, plain_config(), broken)
    assert 11 < checkpoint.read(broken / checkpoint.NAME)["global_step"] < 22
    run(configuration(), broken)
    assert_same_run(broken, finished[0])


@pytest.mark.exhaustive
def test_ctrl_c_leaves_a_checkpoint_and_the_command_continues(tmp_path, configuration, finished, capsys):
    folder = tmp_path / "run"
    config = configuration()
    interrupted_at(14, config, folder)
    run(config, folder)
    assert "Continuing" in capsys.readouterr().out
    assert_same_run(folder, finished[0])


@pytest.mark.exhaustive
def test_sigterm_leaves_a_checkpoint_and_has_its_own_status(tmp_path, configuration, finished):
    folder, config = tmp_path / "run", configuration()
    with pytest.raises(TerminatedRun) as stopped:
        interrupted_at(14, config, folder, signal.SIGTERM)
    assert stopped.value.code == 143
    assert checkpoint.read(folder / checkpoint.NAME)["global_step"] == 14
    run(config, folder)
    assert_same_run(folder, finished[0])


# ---------------------------------------------------------------------------------------------- methods with a state
def straight_and_broken(configuration, folder: Path, steps: tuple[int, ...], **changes) -> tuple[Path, Path]:
    """Run once without a stop and once with stops at `steps`, and compare the results."""
    config, straight, broken = configuration(**changes), folder / "straight", folder / "broken"
    run(config, straight)
    for step in steps:
        interrupted_at(step, config, broken)
    run(config, broken)
    assert_same_run(broken, straight)
    return straight, broken


@pytest.mark.exhaustive
def test_the_bases_that_a_profile_chose_continue(tmp_path, configuration):
    """An LHE run gives the same bases after stops during and after its profile of 8 steps."""
    method = {"full": {}, "lbp_wht": {"bases": "lhe", "order": 2, "profile_steps": 8}}
    folders = straight_and_broken(configuration, tmp_path, (5, 14), method=method, trainer__max_steps=16)
    of_straight, of_broken = (method_states(folder)["lbp_wht"] for folder in folders)
    assert of_broken == of_straight
    assert (of_broken["steps"], of_broken["energy"]) == (8, {})
    assert len(of_broken["chosen"]) > 4


@pytest.mark.exhaustive
def test_the_bits_that_a_profile_chose_continue(tmp_path, configuration):
    """A ``bits=auto`` run gives the same bits after stops during and after its profile of 3 steps."""
    method = {"full": {}, "low_bit": {"bits": "auto", "budget": 3.3, "profile_steps": 3}}
    folders = straight_and_broken(configuration, tmp_path, (2, 6), method=method, trainer__max_steps=8)
    of_straight, of_broken = (method_states(folder)["low_bit"] for folder in folders)
    assert of_broken == of_straight
    assert of_broken["steps"] == 3
    assert len({tuple(form) for form in of_broken["forms"].values()}) > 2
    notes = [json.loads((folder / "results.json").read_text())["methods"]["low_bit"]["notes"] for folder in folders]
    assert notes[0] == notes[1]
    assert any("bits=auto: 3." in note for note in notes[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["alast", "lisa", "top_layers"])
def test_per_step_choices_continue(name, tmp_path, configuration):
    """A run gives the same choices after two stops, one of them during a profile."""
    changes = {"method": {name: PER_STEP[name]}, "trainer__max_steps": 16}
    folders = straight_and_broken(configuration, tmp_path, (5, 14), **changes)
    states = [method_states(folder) for folder in folders]
    assert states[0] == states[1]
    if name == "lisa":
        return
    state = states[0][name]
    if name == "alast":
        assert len({budget for budget, _ in state.values()} - {0.8, 0.2, 1.0}) == 2, "they have moved"
    if name == "top_layers":
        assert len(state["top"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim",
    [{"state_bits": 8}, {"state_bits": 4, "in_backward": True, "grad_clip_norm": None}],
    ids=["8 bits", "4 bits in backward"],
)
def test_the_optimizer_s_state_continues(optim, tmp_path, configuration):
    """The network is wide enough for block-wise optimizer states."""
    kwargs = {"depth": 2, "embed_dim": 64, "num_heads": 2}
    changes = {f"optim__{name}": value for name, value in optim.items()}
    folders = straight_and_broken(
        configuration,
        tmp_path,
        (5,),
        model__kwargs=kwargs,
        trainer__max_steps=8,
        method={"lisa": PER_STEP["lisa"]},
        **changes,
    )
    state = checkpoint.read(folders[1] / checkpoint.NAME)["optimizer_states"][0]["state"]
    assert {value.dtype for one in state.values() for value in one.values()} == {
        torch.uint8,
        torch.int16,
        torch.float32,
    }


@pytest.mark.slow
def test_stepping_in_backward_trains_as_an_ordinary_run(tmp_path, configuration):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    changes = {"trainer__max_steps": 8, "optim__grad_clip_norm": None}
    run(configuration(**changes), outside)
    run(configuration(**changes, optim__in_backward=True), inside)
    assert_same_run(inside, outside)


@pytest.mark.slow
@pytest.mark.parametrize("optim", [{}, {"name": "sgd", "state_bits": 32}, {"state_bits": 8}], ids=["adamw", "sgd", "8"])
def test_weights_in_bf16_continue(optim, tmp_path, configuration):
    """A run with gradient clipping and accumulation gives the same bits. The checkpoint has weights in bf16."""
    changes = {f"optim__{name}": value for name, value in optim.items()}
    in_bf16 = {"trainer__precision": "bf16", "trainer__weight_dtype": "bf16", "trainer__grad_accum_steps": 2}
    kwargs = {"depth": 2, "embed_dim": 64, "num_heads": 2}
    folders = straight_and_broken(
        configuration, tmp_path, (5,), model__kwargs=kwargs, trainer__max_steps=8, **in_bf16, **changes
    )
    saved = checkpoint.read(folders[1] / checkpoint.NAME)
    dtypes = {name: weight.dtype for name, weight in saved["state_dict"].items() if name.startswith("model.")}
    assert dtypes["model.blocks.0.attn.qkv.weight"] == torch.bfloat16
    assert dtypes["model.blocks.0.attn.qkv.bias"] == torch.float32
    moments = [value for one in saved["optimizer_states"][0]["state"].values() for value in one.values()]
    assert not any(value.dtype == torch.bfloat16 for value in moments)


# ---------------------------------------------------------------------------------------------- damaged checkpoints
@pytest.mark.exhaustive
def test_a_truncated_checkpoint_falls_back_to_the_previous_one(tmp_path, configuration, finished, caplog, monkeypatch):
    monkeypatch.setattr("efficient_ft.training.callbacks.recorder.EPOCH_CHECKPOINT_SECONDS", 0.0)
    folder = tmp_path / "run"
    run(configuration(), folder)
    (folder / "results.json").unlink()
    latest = folder / checkpoint.NAME
    with open(latest, "rb+") as file:
        file.truncate(latest.stat().st_size // 2)
    assert checkpoint.read(latest)["global_step"] == 11
    assert "damaged" in caplog.text
    run(configuration(), folder)
    assert_same_run(folder, finished[0])


@pytest.mark.parametrize("held", [{"a": 1}, [1, 2], {"state_dict": Path("x")}], ids=["dict", "list", "objects"])
def test_a_file_that_is_no_checkpoint_falls_back_to_the_previous_one(tmp_path, finished, held):
    latest = tmp_path / checkpoint.NAME
    shutil.copy(finished[0] / checkpoint.NAME, checkpoint.previous(latest))
    torch.save(held, latest)
    assert checkpoint.read(latest)["global_step"] == 22
    checkpoint.previous(latest).unlink()
    with pytest.raises(UserError, match="resume=never") as caught:
        checkpoint.read(latest)
    assert "weights_only" not in str(caught.value)


def test_damaged_checkpoints_end_in_one_clear_message(tmp_path, configuration, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (folder / "results.json").unlink()
    for file in (folder / checkpoint.NAME, checkpoint.previous(folder / checkpoint.NAME)):
        file.write_bytes(b"PK\x03\x04 not a checkpoint")
    with pytest.raises(UserError, match="resume=never"):
        run(configuration(), folder)


@pytest.mark.parametrize("changed", [b"weight_of_a_layer", bytes(99)], ids=["name", "value"])
def test_a_single_changed_byte_in_a_checkpoint_is_noticed(changed, tmp_path):
    """A changed byte is detected by its checksum, which torch does not compare."""
    file, io = tmp_path / checkpoint.NAME, checkpoint.AtomicCheckpointIO()
    for step in (1, 2):
        io.save_checkpoint({"state_dict": {"weight_of_a_layer": torch.zeros(99)}, "global_step": step}, file)
    content = bytearray(file.read_bytes())
    content[content.index(changed)] += 1
    file.write_bytes(content)
    assert checkpoint.read(file)["global_step"] == 1, "the previous one"
    checkpoint.previous(file).unlink()
    with pytest.raises(UserError, match=r"checkpoint\.ckpt: the checksum of .* does not match\n.*resume=never"):
        checkpoint.read(file)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file, io = tmp_path / checkpoint.NAME, checkpoint.AtomicCheckpointIO()
    io.save_checkpoint({"state_dict": {}, "callbacks": {"Recorder": {"run_id": "a1b2"}}}, file)
    (tmp_path / "run_id").write_text("a1b2\n")
    io.load_checkpoint(file)
    (tmp_path / "run_id").write_text("c3d4\n")
    with pytest.raises(UserError, match=r"checkpoint\.ckpt belongs to another run: .*a1b2,.*c3d4\. .*resume=never"):
        io.load_checkpoint(file)


def test_a_checkpoint_without_a_format_number_is_refused(tmp_path, configuration, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (folder / "results.json").unlink()
    file = folder / checkpoint.NAME
    held = checkpoint.read(file)
    del held["efficient_ft_format"]
    torch.save(held, file)
    with pytest.raises(OtherVersionError, match=r"checkpoint\.ckpt was written by another version.*resume=never"):
        run(configuration(), folder)
    assert torch.load(file, weights_only=True)["global_step"] == 22, "it is not replaced"


# ---------------------------------------------------------------------------------------------- checkpoint files
def test_a_checkpoint_holds_plain_containers_and_the_format(finished):
    # `read` loads with weights_only=True, which accepts only tensors and plain containers.
    held = checkpoint.read(finished[0] / checkpoint.NAME)
    assert held["global_step"] == 2 * 11
    assert held["efficient_ft_format"] == FORMAT


def test_the_previous_checkpoint_is_kept_and_removed(tmp_path):
    file, io = tmp_path / checkpoint.NAME, checkpoint.AtomicCheckpointIO()
    for step in (1, 2):
        io.save_checkpoint({"state_dict": {}, "global_step": step}, file)
    assert [io.load_checkpoint(path)["global_step"] for path in (checkpoint.previous(file), file)] == [1, 2]
    file.unlink()  # simulates a kill between the two renames
    assert checkpoint.exists(file)
    assert checkpoint.read(file)["global_step"] == 1
    io.remove_checkpoint(file)
    assert not checkpoint.exists(file)
    with pytest.raises(UserError, match="no file"):
        checkpoint.read(file)


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    torch.save({"state_dict": {}, "efficient_ft_format": 1000}, tmp_path / checkpoint.NAME)
    with pytest.raises(OtherVersionError, match="by another version"):
        checkpoint.read(tmp_path / checkpoint.NAME)


def test_another_copy_of_a_published_data_set_is_not_taken_for_the_same(tmp_path, configuration):
    """A run is identified by the images of its data set, and not by their path."""
    for name in ("one", "same", "other"):
        write_pets(tmp_path / name)
    for path in (tmp_path / "other").rglob("*.jpg"):
        Image.open(path).resize((64, 48)).save(path)

    def config(name):
        data = {"data__name": "pets", "data__root": str(tmp_path / name), "data__val_fraction": 0.25}
        return configuration(**data, data__batch_size=4, trainer__epochs=1)

    folder = tmp_path / "run"
    results = run(config("one"), folder)
    assert (folder / "images").read_text().strip() == results["data"]["digest"]
    assert run(config("same"), folder) == results
    with pytest.raises(UserError, match="have changed since the run began: train: 8 of 8 entries changed"):
        run(config("other"), folder)
    (folder / "results.json").unlink()
    with pytest.raises(UserError, match="have changed since the run began"):
        run(config("other"), folder)
    again = run(config("same"), folder)
    assert again["accuracy"] == results["accuracy"]
