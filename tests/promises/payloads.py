"""Promise 7: foreign code is never executed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from efficient_ft.training.output import checkpoint
from tests.promises import attacks
from tests.promises.children import returned, run_child
from tests.promises.runs import arguments, configuration, program, reading, write_images
from tests.promises.trial import Trial, require

#: Name of the mark, a file that an executed payload creates.
_MARK = "MARK"


class Payload:
    """An object that creates the mark when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


def pickled(file: Path, mark: str) -> None:
    file.write_bytes(pickle.dumps({"state_dict": {}, "callbacks": {}, "held": Payload(mark)}))


def saved(file: Path, mark: str) -> None:
    torch.save(
        {"state_dict": {"head.weight": Payload(mark)}, "callbacks": {}, "efficient_ft_format": checkpoint.FORMAT}, file
    )


def _saved_before_zip(file: Path, mark: str) -> None:
    held = {"state_dict": {"head.weight": Payload(mark)}, "callbacks": {}, "efficient_ft_format": checkpoint.FORMAT}
    torch.save(held, file, _use_new_zipfile_serialization=False)


def array(file: Path, mark: str) -> None:
    with file.open("wb") as opened:
        np.savez(opened, a=np.array([Payload(mark)], dtype=object))


def _yaml(file: Path, mark: str) -> None:
    file.write_text(f"a: !!python/object/apply:builtins.open [{mark!r}, w]\n")


def _python(file: Path, mark: str) -> None:
    file.write_text(f"open({mark!r}, 'w')\n")


def _overrides(file: Path, mark: str) -> None:
    """Write arguments that make Hydra call a function when the run is composed again, e.g. for an evaluation."""
    target = [f"hydra.callbacks.a.{key}={value}" for key, value in _call(mark).items()]
    file.write_text(yaml.safe_dump([f"+{target[0]}", *(f"+{one}" for one in target[1:]), "seed=1"]))


_FORMS: tuple[Callable[[Path, str], None], ...] = (
    pickled, saved, _saved_before_zip, array, _yaml, _python, _overrides,
)  # fmt: skip
_RUN_FILES = (
    "checkpoint.ckpt", "checkpoint.ckpt.prev", "model.safetensors", "run_id", "config.yaml", "images", "results.json",
    "metrics.jsonl", ".hydra/overrides.yaml", ".hydra/config.yaml", "metrics.csv", ".hydra/hydra.yaml",
)  # fmt: skip
_WEIGHTS = ("w.pth", "w.pt", "w.bin", "w.ckpt", "w.safetensors", "w.npz", "w.tar")


def _call(mark: str) -> dict[str, str]:
    """Return a configuration that creates the mark when it is instantiated."""
    return {"_target_": "builtins.open", "file": mark, "mode": "w"}


def _values(mark: str) -> list[Any]:
    """Return setting values that create the mark if the configuration is composed or instantiated."""
    call = _call(mark)
    return [call, [call], {"a": call}, f"${{oc.env:HOME,{mark}}}", f"__import__('os').mknod('{mark}')"]


def trials(long: bool) -> Iterator[Trial]:
    """Yield a trial for each file that a user may receive, and for sections of the settings."""
    yield Trial("the payloads work", _work)
    for number, name in enumerate(_RUN_FILES if long else _RUN_FILES[::2]):  # short: one kind of payload per file
        forms = range(len(_FORMS)) if long else [number % len(_FORMS)]
        yield Trial(f"run folder: {name}", _run_file, (name, tuple(forms)))
    for section in _sections() if long else ("method", "hydra"):
        yield Trial(f"run folder: settings of {section or 'the top'}", _settings, (section,))
    yield Trial("run folder: metadata of weights", _metadata)
    for number, name in enumerate(_WEIGHTS if long else _WEIGHTS[::2]):
        forms = range(len(_FORMS)) if long else [number % len(_FORMS)]
        yield Trial(f"weights: {name}", _weights, (name, tuple(forms)))
    yield Trial("data folder: files, names and metadata of images", _data_folder)
    yield Trial("folder of a study", _study)
    yield from attacks.trials(long)


def _sections() -> list[str]:
    """Return the full names of all sections of a configuration. The empty name denotes the top level."""
    from efficient_ft.config import check

    found, waiting = ["hydra"], [("", check(configuration(Path("images"))).model_dump(mode="json"))]
    while waiting:
        name, section = waiting.pop(0)
        found.append(name)
        waiting += [(f"{name}.{key}".lstrip("."), held) for key, held in section.items() if isinstance(held, dict)]
    return found


def _work(folder: Path) -> None:
    """Require that an unpickled payload creates the mark, and that an instantiated payload creates it."""
    from hydra.utils import instantiate

    mark = folder / _MARK
    pickle.loads(pickle.dumps(Payload(str(mark)))).close()
    require(mark.exists(), "the payload creates no file when it is unpickled")
    mark.unlink()
    instantiate(_call(str(mark))).close()
    require(mark.exists(), "the payload creates no file when it is instantiated")


def _given(folder: Path) -> Path:
    """Return the folder of a finished run."""
    write_images(folder / "images")
    command = arguments(folder / "images", folder / "given", "trainer.max_steps=2")
    returned(program, command, output=folder / "given.log")
    return folder / "given"


def _read_by_all(folder: Path, run: Path, number: int, changed: str) -> None:
    """Read `run` with every command that reads run folders, and continue the run. No command may create the mark.

    Args:
        folder: Folder of the trial.
        run: Run folder.
        number: Number of the payload.
        changed: File of the run folder that contains the payload.
    """
    resumed = run.with_name(f"{run.name}_resumed")
    shutil.copytree(run, resumed)
    (resumed / "results.json").unlink(missing_ok=True)
    commands = reading(folder / "images", run, folder / f"report_{number}")
    commands["resume"] = arguments(folder / "images", resumed, "trainer.max_steps=2")
    if changed in (
        "results.json",
        "config.yaml",
        "metrics.jsonl",
    ):  # the dashboard reads only these files and takes seconds to start
        commands["dashboard"] = ["dashboard", str(run), "--offline", "--out", str(folder / f"dashboard_{number}")]
    for name, command in commands.items():
        done = run_child(program, command, output=folder / f"{number}_{name}.log")
        require(not (folder / _MARK).exists(), f"{name} executed what a file holds")
        require(done.status in (0, 2), f"{name}: status {done.status}\n{done.printed[-2000:]}")
        require("Traceback" not in done.printed, f"{name}:\n{done.printed[-3000:]}")


def _run_file(folder: Path, name: str, forms: tuple[int, ...]) -> dict[str, float]:
    """Replace one file of a run folder by payloads."""
    given = _given(folder)
    for number in forms:
        write, run = _FORMS[number], folder / str(number) / "run"
        shutil.copytree(given, run)
        (run / name).parent.mkdir(exist_ok=True)
        write(run / name, str(folder / _MARK))
        _read_by_all(folder, run, number, name)
    return {"payloads": len(forms)}


def _settings(folder: Path, section: str) -> dict[str, float]:
    """Replace every setting of a section of config.yaml by every value, and add new settings."""
    given = _given(folder)
    settings = yaml.safe_load((given / "config.yaml").read_text())
    inner: Any = settings
    for part in filter(None, section.split(".")):
        inner = inner.get(part) or {}
    todo = []
    for key in [*inner, "_target_", "_partial_", "defaults", "callbacks"]:
        for value in _values(str(folder / _MARK)):
            changed = json.loads(json.dumps(settings))
            place = changed
            for part in filter(None, section.split(".")):
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    break
            place[key] = value
            todo.append((f"{section}.{key}={value}", changed))
    failure = returned(_read_settings, given, todo, folder, output=folder / "settings.log")
    require(failure is None, str(failure))
    return {"payloads": len(todo)}


def _read_settings(run: Path, todo: list[tuple[str, dict[str, Any]]], folder: Path) -> str | None:
    """Read a run with each of several settings, and return the first failure."""
    for name, settings in todo:
        failure = _quick_commands(run, settings, folder)
        if failure is not None:
            return f"{name}: {failure}"
    return None


def _quick_commands(run: Path, settings: dict[str, Any], folder: Path) -> str | None:
    """Write `settings` into a copy of `run`, and read it with evaluate, predict, report, collect and a resumed run."""
    from efficient_ft.cli.commands import collect, predict, report
    from efficient_ft.cli.hydra.compose import configurations
    from efficient_ft.cli.hydra.groups import CONF, register
    from efficient_ft.core.errors import UserError
    from efficient_ft.training.run import run as train

    register()
    copy = folder / "copies" / "run"
    shutil.copytree(run, copy)
    (copy / "config.yaml").write_text(yaml.safe_dump(settings))
    results = json.loads((copy / "results.json").read_text())
    (copy / "results.json").write_text(json.dumps({**results, "config": settings}))
    image = next((folder / "images").rglob("*.png"))

    def evaluated() -> None:
        for config in configurations(CONF, "train", [f"evaluate={copy}", "data.num_workers=0"], sweep=False):
            train(config, copy)

    def resumed() -> None:
        for config in configurations(CONF, "train", arguments(folder / "images", copy), sweep=False):
            train(config, copy)

    def read() -> None:
        (copy / "results.json").unlink(missing_ok=True)
        resumed()

    for name, command in {
        "evaluate": evaluated,
        "predict": lambda: predict.main([str(copy), str(image)]),
        "report": lambda: report.main([str(copy)]),
        "collect": lambda: collect.main([str(copy)]),
        "the same command": resumed,
        "a resumed run": read,
    }.items():
        with contextlib.suppress(UserError):
            command()
        if (folder / _MARK).exists():
            return f"{name} executed it"
    shutil.rmtree(copy)
    return None


def _metadata(folder: Path) -> None:
    """Put payloads into the metadata of model.safetensors."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    given = _given(folder)
    with safe_open(given / "model.safetensors", "pt") as opened:
        about = dict(opened.metadata())
    weights = load_file(given / "model.safetensors")
    for number, key in enumerate(about):
        run = folder / str(number) / "run"
        shutil.copytree(given, run)
        value = json.dumps({"_target_": "builtins.open", "file": str(folder / _MARK), "mode": "w"})
        save_file(weights, run / "model.safetensors", {**about, key: value})
        _read_by_all(folder, run, number, "model.safetensors")


def _weights(folder: Path, name: str, forms: tuple[int, ...]) -> dict[str, float]:
    """Start from weights that contain a payload."""
    write_images(folder / "images")
    for number in forms:
        write, file = _FORMS[number], folder / name
        write(file, str(folder / _MARK))
        command = arguments(folder / "images", folder / f"run_{number}", f"model.weights={file}")
        done = run_child(program, command, output=folder / f"{number}.log")
        require(not (folder / _MARK).exists(), "the weights were executed")
        require(done.status == 2, f"status {done.status}\n{done.printed[-2000:]}")
        require("Traceback" not in done.printed, done.printed[-3000:])
        command = ["gradient-error", "--weights", str(file), "--images", str(folder / "images")]
        done = run_child(program, command, output=folder / f"{number}_gradient_error.log")
        require(not (folder / _MARK).exists(), "gradient-error executed the weights")
        require(done.status == 2 and "Traceback" not in done.printed, f"status {done.status}\n{done.printed[-2000:]}")
    return {"payloads": len(forms)}


def _study(folder: Path) -> dict[str, float]:
    """Replace the files of a study by payloads, and put payloads into the settings of its runs."""
    from efficient_ft.record.study_definition import read_study

    write_images(folder / "images")
    mark = str(folder / _MARK)
    runs = arguments(folder / "images", folder / "run", "trainer.max_steps=1")[:-2]  # without the run folder
    plain: dict[str, Any] = {
        "title": "a study",
        "settings": [setting for setting in runs if setting != "method=full"],
        "tune": {"setting": "optim.lr", "values": [0.01], "seed": 0},
        "seeds": [1],
        "rows": {"full": ["method=full"]},
    }
    (folder / "plain").mkdir()
    _write("study.yaml", plain, folder / "plain")
    read_study(folder / "plain")  # the study without a payload is valid
    calls = [f"+hydra.callbacks.a.{key}={value}" for key, value in _call(mark).items()]
    changes: list[dict[str, Any]] = [
        {"settings": plain["settings"] + calls},
        {"rows": {"full": plain["rows"]["full"] + calls}},
        {"settings": [*plain["settings"], f"--config-dir={folder}"]},
        {"tune": {**plain["tune"], "setting": "hydra.run.dir"}},
        *({"settings": value} for value in _values(mark)),
    ]
    todo = [partial(_write, "study.yaml", {**plain, **changed}) for changed in changes]
    for name in ("study.yaml", "records.json"):
        todo += [partial(_place, name, write, mark) for write in _FORMS]
    for number, damage in enumerate(todo):
        study = folder / str(number)
        study.mkdir()
        _write("study.yaml", plain, study)
        damage(study)
        done = run_child(program, ["study", str(study)], output=folder / f"{number}.log")
        require(not (folder / _MARK).exists(), f"it was executed: number {number}")
        require(done.status == 2, f"number {number}: status {done.status}\n{done.printed[-2000:]}")
        require("Traceback" not in done.printed, done.printed[-3000:])
    return {"payloads": len(todo)}


def _write(name: str, content: dict[str, Any], folder: Path) -> None:
    (folder / name).write_text(yaml.safe_dump(content))


def _place(name: str, write: Callable[[Path, str], None], mark: str, folder: Path) -> None:
    write(folder / name, mark)


def _data_folder(folder: Path) -> None:
    """Train on images with payloads in metadata, a PostScript program named .jpg, and file names with code."""
    from PIL import Image, PngImagePlugin

    write_images(folder / "images")
    mark = str(folder / _MARK)
    held = PngImagePlugin.PngInfo()
    held.add_text("Comment", f"__import__('os').mknod('{mark}')")
    held.add_text("payload", pickle.dumps(Payload(mark)).decode("latin-1"))
    exif = Image.Exif()
    exif[0x010E] = f"`touch {mark}`"
    exif[0x9286] = pickle.dumps(Payload(mark))
    for number, image in enumerate(sorted((folder / "images" / "0").iterdir())[:8]):
        Image.open(image).save(image.with_name(f"{number} $(touch MARK) `touch MARK`;touch MARK.png"), pnginfo=held)
        Image.open(image).save(image.with_suffix(".jpg"), exif=exif)
    for name in ("setup.py", "conftest.py", "sitecustomize.py", "torch.py", "numpy.py", "classes.txt", "yaml.py"):
        _python(folder / "images" / name, mark)
    for name in ("cache.pkl", "data.npy", "config.yaml"):
        pickled(folder / "images" / name, mark)
    (folder / "images" / "$(touch MARK)").mkdir()
    shutil.copy(next((folder / "images" / "1").iterdir()), folder / "images" / "$(touch MARK)" / "a.png")
    command = arguments(folder / "images", folder / "run")
    done = run_child(_within, folder / "images", command, output=folder / "run.log")
    require(not list(folder.rglob(_MARK)), "what the data folder holds was executed")
    require(done.status in (0, 2), f"status {done.status}\n{done.printed[-2000:]}")
    script = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n({mark}) (w) file closefile\nshowpage\n"
    (folder / "images" / "0" / "00.jpg").write_text(script)
    done = run_child(program, arguments(folder / "images", folder / "run_of_eps"), output=folder / "eps.log")
    require(not list(folder.rglob(_MARK)), "a PostScript program was executed")
    require(done.status == 2, f"a PostScript program is taken for an image: status {done.status}\n{done.printed}")
    require("Traceback" not in done.printed, done.printed[-3000:])


def _within(folder: Path, command: list[str]) -> None:
    """Run the program in a folder that contains Python modules."""
    os.chdir(folder)
    program(command)
