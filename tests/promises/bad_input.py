"""Promise 6: bad input never causes a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import string
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.promises.children import Child, returned, run_child, wait_until
from tests.promises.runs import arguments, program, reading, write_images
from tests.promises.trial import Trial, require

#: Number of inputs per trial.
_AT_ONCE = 10
#: Additional memory of a process in bytes, and its time limit in seconds.
_ROOM, _SECONDS = 6 * 2**30, 60.0
_RUN_FILES = (
    "config.yaml",
    "results.json",
    "metrics.jsonl",
    "model.safetensors",
    "checkpoint.ckpt",
    "images",
    "run_id",
)


def trials(long: bool) -> Iterator[Trial]:
    """Yield trials with random command lines, and with damaged data folders, run folders, weights and records."""
    for start in range(0, 2000 if long else 30, _AT_ONCE):
        yield Trial(f"command lines {start + 1} to {start + _AT_ONCE}", _command_lines, (start,))
    for name in _STREAMS if os.path.exists("/dev/full") else ():
        yield Trial(name, _streams, (name,))
    kinds = {"data folder": _data_folder, "run folder": _run_folder, "weights": _weights, "records": _records}
    for kind, function in kinds.items():
        for start in range(0, 125 if long else 5, 5):
            yield Trial(f"broken {kind}: numbers {start + 1} to {start + 5}", function, (start,))


#: By name: numbers of the affected standard streams, True for full and False for closed streams, and the expected
#: status.
_STREAMS = {
    "closed standard output": ((1,), False, 0),
    "closed standard error": ((2,), False, 0),
    "all standard streams closed": ((0, 1, 2), False, 0),
    "full standard output": ((1,), True, 2),
    "full standard error": ((2,), True, 0),
}


def _streams(folder: Path, name: str) -> None:
    """Run a training and every command that reads a run, with closed or full streams."""
    numbers, full, status = _STREAMS[name]
    write_images(folder / "images")
    run = folder / "runs" / "run"
    returned(program, arguments(folder / "images", run, "trainer.max_steps=2"), output=folder / "trained.log")
    commands = reading(folder / "images", run, folder / "report")
    figure = commands.pop("figure")  # the command requires two runs, so it always exits with status 2
    commands["train"] = arguments(folder / "images", folder / "runs" / "other", "trainer.max_steps=1")
    done = run_child(_with_streams, figure, numbers, full, output=folder / "figure.log")
    shown = f"figure: status {done.status}\n{done.printed[-3000:]}"
    require(done.status == 2 and "Traceback" not in done.printed, shown)
    for command, words in commands.items():
        done = run_child(_with_streams, words, numbers, full, output=folder / f"{command}.log")
        shown = f"{command}: status {done.status}\n{done.printed[-3000:]}"
        require(done.status == status, shown)
        require("Traceback" not in done.printed and "Exception ignored" not in done.printed, shown)
        require(not (full and 1 in numbers) or "standard output cannot be written" in done.unwrapped, shown)


def _with_streams(words: list[str], numbers: Sequence[int], full: bool) -> None:
    """Run the program with closed or full standard streams. This function must run in a child process."""
    for number in numbers:
        if full:
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        else:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    program(words)


def _require_one_message(words: list[str], output: Path, may_train: bool = False) -> int:
    """Run the program, require that it ends normally or with one message, and return its status.

    Args:
        words: Command line.
        output: New file for the printed text.
        may_train: If True, a command that runs for longer than a minute receives SIGTERM.

    Raises:
        BrokenPromiseError: If the program ends in a different way or does not end.
    """
    child = Child(program, words, _ROOM, output=output)
    stopped = not wait_until(lambda: not child.runs, _SECONDS) and may_train
    if stopped:
        child.signal(signal.SIGTERM)
    done = child.ended(_SECONDS)
    shown = f"{' '.join(words)}\nstatus {done.status}\n{done.printed[-3000:]}"
    require(done.status in ((0, 143) if stopped else (0, 2)), shown)
    # Signs of a traceback, of a line that Hydra prints before a message, or of a printed configuration.
    for sign in ("Traceback", "Error executing job", "'model': {'name'", '"model": {"name"', "set HYDRA_FULL_ERROR"):
        require(sign not in done.printed, shown)
    return done.status


# ---------------------------------------------------------------------------------------------- command lines
#: Arguments that are valid alone, but not always in combination.
_SENSIBLE = (
    "optim=sgd", "optim.lr=0.1", "optim.weight_decay=0.1", "optim.in_backward=true", "optim.state_bits=8",
    "optim.layer_decay=0.7", "optim.grad_clip_norm=null", "optim.schedule=constant", "trainer.grad_accum_steps=2",
    "trainer.precision=auto", "trainer.precision=bf16", "trainer.precision=fp16", "trainer.prefix=auto",
    "trainer.cache_features=on", "trainer.devices=auto", "trainer.deterministic=true", "trainer.channels_last=true",
    "trainer.limit_eval_batches=1",
    "method=lora", "method=[lora,lbp_wht]", "method=back_razor", "method=[alast]", "method=head", "method=[bsr,mesa]",
    "method=tinytl", "method=[last_stage,checkpointing]", "method.full.train_norms=false", "model.image_size=64",
    "model.drop_rate=0.2", "model.frozen_bn=true", "model.select=head", "model=deit_tiny", "model.zero_head=true",
    "data.batch_size=1", "data.batch_size=5", "data.num_workers=1", "data.augment=none", "data.augment.flip=true",
    "data.val_fraction=0", "data.val_fraction=0.5", "data.select_best_on=test", "data.on_corrupt=skip", "data=digits",
    "data.keep_decoded=on", "seed=7", "cost.baseline=head", "cost_only=true", "step_stats.interval=1", "resume=never",
    "memory=2GB", "memory=1MB", "logger=tensorboard", "recipe=none", "task=segmentation", "tasks=bsr_moe", "jobs=2",
)  # fmt: skip


#: Settings of Hydra's folders, and values that are not valid folders.
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_NO_FOLDERS = ("", "null", "${nope}", "${oc.env:NOT_THERE}", "${x:}", "/dev/null", "/dev/null/run", "/proc/x", "[1]",
               "{a:1}", "\udcff", "x" * 5000)  # fmt: skip


def _command_lines(folder: Path, start: int) -> dict[str, float]:
    """Add one to four sensible or random arguments to the command line of a run of one step."""
    write_images(folder / "images")
    keys = returned(_setting_names, output=folder / "keys.log")
    refused = 0
    for number in range(start, start + _AT_ONCE):
        chance = random.Random(number)
        added = [
            chance.choice(_SENSIBLE) if chance.random() < 0.6 else _argument(chance, keys)
            for _ in range(chance.randint(1, 4))
        ]
        words = arguments(folder / "images", folder / f"run_{number}", "trainer.max_steps=1", *added)
        refused += _require_one_message(words, folder / f"{number}.log", may_train=True) == 2
    return {"command_lines": _AT_ONCE, "refused": refused}


def _setting_names() -> list[str]:
    from efficient_ft.config import setting_names

    return sorted(setting_names())


def _argument(chance: random.Random, keys: list[str]) -> str:
    """Return a random argument: a setting with a valid or invalid value, a typing error, or malformed text."""
    key = chance.choice(keys)
    form = chance.random()
    if form < 0.03:
        return f"{chance.choice(_FOLDERS)}={chance.choice(_NO_FOLDERS)}"
    if form < 0.08:  # a letter is missing
        at = chance.randrange(len(key))
        key = key[:at] + key[at + 1 :]
    elif form < 0.14:
        key = chance.choice(("model", "data", "method", "optim", "trainer", "logger", "tasks", "recipe", "experiment"))
    elif form < 0.18:
        key = f"{key}.{chance.choice(keys)}"
    before = chance.choice(("", "", "", "", "", "+", "++", "~"))
    if before == "~" and chance.random() < 0.5:
        return f"~{key}"
    return f"{before}{key}={_value(chance)}"


def _value(chance: random.Random) -> str:
    odd = (
        "", "null", "none", "true", "off", "abc", "-1", "0", "1", "2", "3", "1.5", "-0.1", "1e400", "nan", "inf",
        "1e-400", "99999999999999999999", "[]", "[1,2]", "[a", "{}", "{a:1}", "{a:{b:[1,2]}}", "'", '"', "\\", "a b",
        "${x}", "${oc.env:HOME}", "${oc.env:NOT_THERE}", "${run_folder:}", "${model.name}", "???", "1,2", "a,b",
        "range(3)", "choice(1,2)", "../..", "/", "/dev/null", "/nowhere/at/all", "~", "$HOME", "名前", "ü", "\u202e",
        "\x1b[2J", "\udcff", "x" * 5000, "%s%s", "{0}", "<b>",
        "full", "[full]", "[full,full]", "[lora,mesa]", "[tome,alast]",
        "digits", "vit_digits", "timm", "sgd", "folder", "0x10", "1_000", "4GB", "-4GB", "4 GB", "10s", "1970-01-01",
    )  # fmt: skip
    if chance.random() < 0.15:
        return "".join(chance.choices(string.printable.replace("\n", ""), k=chance.randint(1, 12)))
    return chance.choice(odd)


# ---------------------------------------------------------------------------------------------- broken files
def _break(file: Path, chance: random.Random) -> str:
    """Damage a file in a random way and return the name of the damage."""
    content = file.read_bytes() if file.is_file() else b"{}"
    ways = ["empty", "cut off", "flipped bits", "noise", "a folder", "absent", "doubled", "text", "numbers", "a link"]
    way = chance.choice(ways)
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    if way == "empty":
        file.touch()
    elif way == "cut off":
        file.write_bytes(content[: chance.randrange(max(1, len(content)))])
    elif way == "flipped bits":
        changed = bytearray(content or b"x")
        for _ in range(chance.randint(1, 8)):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        file.write_bytes(bytes(changed))
    elif way == "noise":
        file.write_bytes(chance.randbytes(chance.randint(1, 5000)))
    elif way == "a folder":
        file.mkdir()
    elif way == "doubled":
        file.write_bytes(content + content)
    elif way == "text":
        file.write_text(chance.choice(("null", "[]", "{}", "3", '"a"', "a: [", "{" * 2000, "\x00", "\xff")))
    elif way == "numbers":
        file.write_bytes(
            b"".join(str(chance.random()).encode() if chr(c) in "0123456789" else bytes([c]) for c in content[:9999])
        )
    elif way == "a link":
        file.symlink_to(chance.choice((file.name, "/nowhere", "/dev/null", "..")))
    return way


def _data_folder(folder: Path, start: int) -> dict[str, float]:
    """Damage images and their folders."""
    refused = 0
    for number in range(start, start + 5):
        chance = random.Random(number)
        images = folder / f"images_{number}"
        write_images(images)
        for _ in range(chance.randint(1, 4)):
            files = sorted(images.rglob("*.png"))
            if not files:
                break
            file = chance.choice(files)
            way = chance.randrange(8)
            if way < 4:
                _break(file, chance)
            elif way == 4:
                shutil.rmtree(file.parent)
            elif way == 5:
                with suppress(FileExistsError):  # the same file was selected twice
                    os.mkfifo(file.with_suffix(".jpg"))
            elif way == 6:
                os.rename(os.fsencode(file), os.fsencode(file.parent) + b"/\xff\xfe.png")
            else:
                for other in list(file.parent.iterdir())[1:]:
                    if other.is_file() or other.is_symlink():
                        other.unlink()
        changes = (f"data.on_corrupt={chance.choice(('stop', 'skip'))}", f"data.num_workers={chance.choice((0, 0, 1))}")
        words = arguments(images, folder / f"run_{number}", "trainer.max_steps=2", *changes)
        refused += _require_one_message(words, folder / f"{number}.log") == 2
    return {"inputs": 5, "refused": refused}


def _finished(folder: Path) -> Path:
    write_images(folder / "images")
    words = arguments(folder / "images", folder / "given", "trainer.max_steps=2")
    returned(program, words, output=folder / "given.log")
    return folder / "given"


def _read(folder: Path, run: Path, name: str) -> int:
    """Read a run folder with every command that reads runs. Return the number of commands that reject it."""
    commands = reading(folder / "images", run, folder / f"report_{name}")
    refused = 0
    for command, words in commands.items():
        refused += _require_one_message(words, folder / f"{name}_{command}.log") == 2
    return refused


def _run_folder(folder: Path, start: int) -> dict[str, float]:
    """Damage files of a run folder. In half of the inputs, the run is unfinished."""
    given, refused = _finished(folder), 0
    for number in range(start, start + 5):
        chance = random.Random(1000 + number)
        run = folder / f"run_{number}" / "run"
        shutil.copytree(given, run)
        if chance.random() < 0.5:
            (run / "results.json").unlink()
        for name in chance.sample(_RUN_FILES, chance.randint(1, 3)):
            _break(run / name, chance)
        refused += _read(folder, run, str(number))
    return {"inputs": 5, "refused": refused}


def _weights(folder: Path, start: int) -> dict[str, float]:
    """Start runs from damaged weights in all file formats."""
    import torch
    from safetensors.torch import load_file, save_file

    given, refused = _finished(folder), 0
    weights = load_file(given / "model.safetensors")
    for number in range(start, start + 5):
        chance = random.Random(2000 + number)
        file = folder / f"{number}.{chance.choice(('safetensors', 'pth', 'bin', 'npz', 'ckpt', 'txt'))}"
        changed: dict[str, Any] = dict(weights)
        key = chance.choice(sorted(changed))
        what = chance.randrange(6)
        if what == 0:
            changed.pop(key)
        elif what == 1:
            changed[key] = changed[key].flatten()[:1].clone()
        elif what == 2:
            changed[key] = changed[key].to(torch.int64)
        elif what == 3:
            changed = {f"module.{name}": value for name, value in changed.items()}
        elif what == 4:
            changed = {"other": torch.zeros(2)}
        if file.suffix == ".safetensors":
            save_file(changed, file)
        else:
            torch.save(chance.choice((changed, {"state_dict": changed}, {"model": changed}, [1], None)), file)
        if chance.random() < 0.5:
            _break(file, chance)
        words = arguments(folder / "images", folder / f"run_{number}", f"model.weights={file}", "trainer.max_steps=1")
        refused += _require_one_message(words, folder / f"{number}.log") == 2
    return {"inputs": 5, "refused": refused}


def _records(folder: Path, start: int) -> dict[str, float]:
    """Remove entries of results.json, or replace them by values of other types."""
    given, refused = _finished(folder), 0
    results = json.loads((given / "results.json").read_text())
    for number in range(start, start + 5):
        chance = random.Random(3000 + number)
        changed = json.loads(json.dumps(results))
        for _ in range(chance.randint(1, 3)):
            place: Any = changed
            while True:
                key = chance.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
                if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.7:
                    place = place[key]
                    continue
                if chance.random() < 0.3 and isinstance(place, dict) and len(place) > 1:
                    place.pop(key)
                else:
                    place[key] = chance.choice((None, "", "a", -1, 1e308, True, [], {}, [None], {"a": []}, 2**70))
                break
        run = folder / f"run_{number}" / "run"
        shutil.copytree(given, run)
        (run / "results.json").write_text(json.dumps(changed))
        refused += _read(folder, run, str(number))
    return {"inputs": 5, "refused": refused}
