"""Promise 7: files and names from others do not lead to other files."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.promises.children import returned, run_child
from tests.promises.runs import arguments, program, reading, write_images
from tests.promises.trial import Trial, require

#: Names of links in a run folder: files of a run, files of Hydra and of reports, and earlier temporary names.
_LINKS = (
    "config.yaml.tmp", "results.json", ".hydra/config.yaml", "train.log", "metrics.jsonl", "metrics.csv",
    "checkpoint.ckpt.tmp", "model.safetensors", "run_id", ".lock", "report/report.html", "report/report.html.tmp",
    ".hydra/hydra.yaml", ".hydra/overrides.yaml", "checkpoint.ckpt.prev", "images.tmp", "metrics.jsonl.tmp", ".hydra",
    "report", "config.yaml", "checkpoint.ckpt", "results.json.tmp", "images", "run_id.tmp", "metrics.csv.tmp",
)  # fmt: skip
#: Settings that name code. The code creates the file MARK.
_CODE = (
    "+hydra.callbacks.a={_target_:builtins.open,file:MARK,mode:w}",
    "hydra.job_logging.handlers.console.class=os.system",
    "+hydra.job_logging.handlers.a={class:logging.config.fileConfig,fname:MARK}",
    "hydra.job_logging.handlers.console.stream=ext://antigravity",
    "hydra.launcher._target_=os.system",
    "++hydra.sweeper={_target_:builtins.open,file:MARK,mode:w}",
    "+model.kwargs._target_=os.system",
)


def trials(long: bool) -> Iterator[Trial]:
    """Yield trials with links, settings, lists, names and weight folders that point to other files or code."""
    for number in range(0, len(_LINKS) if long else 5, 5):
        yield Trial(f"links in a run folder: {', '.join(_LINKS[number : number + 5])}", _links, (number, long))
    yield Trial("settings that name code", _code)
    yield Trial("a list that names files outside of the data", _list)
    yield Trial("names of run folders that are formulas and escape sequences", _names)
    if find_spec("transformers") is not None:
        yield Trial("a folder of weights that names code", _folder_of_weights)


def _links(folder: Path, start: int, long: bool) -> None:
    """Start, continue and read a run in a folder with a link to a file of the user."""
    write_images(folder / "images")
    command = arguments(folder / "images", folder / "given", "trainer.max_steps=2")
    returned(program, command, output=folder / "given.log")
    for number, name in enumerate(_LINKS[start : start + 5], start=start):
        victim = folder / f"victim_{number}"
        for state in ("new", "finished"):
            run = folder / str(number) / state
            if state == "finished":
                shutil.copytree(folder / "given", run)
            link = run / name
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
            victim.mkdir(exist_ok=True) if name in (".hydra", "report") else victim.write_text("kept")
            link.symlink_to(victim)
            commands = reading(folder / "images", run, folder / f"out_{number}_{state}")
            commands["report"] = ["report", str(run)]
            for what in ("report", "collect", "continue") if long and state == "finished" else ("continue",):
                done = run_child(program, commands[what], output=folder / f"{number}_{state}_{what}.log")
                shown = f"{name}, {state}, {what}: status {done.status}\n{done.printed[-2000:]}"
                require(done.status in (0, 2) and "Traceback" not in done.printed, shown)
                kept = not os.listdir(victim) if victim.is_dir() else victim.read_text() == "kept"
                require(kept, f"{what} has written through {name}")


def _code(folder: Path) -> None:
    """Start runs whose settings name code."""
    write_images(folder / "images")
    for number, setting in enumerate(_CODE):
        given = setting.replace("MARK", str(folder / "MARK"))
        command = arguments(folder / "images", folder / f"run_{number}", given)
        done = run_child(program, command, output=folder / f"{number}.log")
        require(not (folder / "MARK").exists(), f"{setting}: it was executed")
        require(done.status == 2, f"{setting}: status {done.status}\n{done.printed[-2000:]}")
        require("Traceback" not in done.printed, done.printed[-3000:])
        require(not (folder / f"run_{number}").exists(), f"{setting}: a folder is left")


def _list(folder: Path) -> None:
    """Train on a list of CUB-200-2011 that names an image outside its folder."""
    write_images(folder / "images")
    root = folder / "data" / "CUB_200_2011"
    shutil.copytree(folder / "images", root / "images")
    files = sorted(path.relative_to(root / "images") for path in (root / "images").rglob("*.png"))
    outside = folder / "private.png"
    shutil.copy(root / "images" / files[0], outside)
    for number, path in enumerate((files[0], Path("../../..") / outside.name, outside)):
        names = [str(path), *map(str, files[1:])]
        lists = {
            "images": names,
            "image_class_labels": [str(k % 4 + 1) for k in range(len(names))],
            "train_test_split": [str(int(k % 3 > 0)) for k in range(len(names))],
            "classes": ["a", "b", "c", "d"],
        }
        for name, values in lists.items():
            (root / f"{name}.txt").write_text("".join(f"{k} {value}\n" for k, value in enumerate(values, start=1)))
        settings = ("data=cub200", f"data.root={folder / 'data'}", "trainer.max_steps=1")
        command = arguments(folder / "images", folder / f"run_{number}", *settings)
        done = run_child(program, command, output=folder / f"{number}.log")
        wanted = 0 if number == 0 else 2  # the first list is valid
        require(done.status == wanted, f"{path}: status {done.status}\n{done.printed[-2000:]}")
        require(number == 0 or "which is outside of this folder" in done.unwrapped, done.printed[-2000:])


def _names(folder: Path) -> None:
    """Collect runs in folders whose names are spreadsheet formulas or terminal escape sequences."""
    write_images(folder / "images")
    odd = ("=HYPERLINK(1)", "+1+2", "-2+3", "@SUM(1)", "a\x1b[2Jb", "<script>")
    command = arguments(folder / "images", folder / "runs" / odd[0], "trainer.max_steps=1")
    command = [word if not word.startswith("hydra.run.dir=") else f"hydra.run.dir='{word[14:]}'" for word in command]
    returned(program, command, output=folder / "run.log")
    results = json.loads((folder / "runs" / odd[0] / "results.json").read_text(encoding="utf-8"))
    for number, name in enumerate(odd[1:]):
        shutil.copytree(folder / "runs" / odd[0], folder / "runs" / name)
        results["totals"]["seconds"] += 1 + number  # runs with equal results count as copies of one run
        (folder / "runs" / name / "results.json").write_text(json.dumps(results), encoding="utf-8")
    for form in ("csv", "text", "markdown", "json"):
        words = ["collect", str(folder / "runs"), "--runs", "--form", form]
        done = run_child(program, words, output=folder / f"{form}.log")
        require(done.status == 0, f"{form}: status {done.status}\n{done.printed[-2000:]}")
        require("\x1b[2J" not in done.printed, f"{form}: an escape sequence is printed")
        if form == "csv":
            cells = {row[0] for row in csv.reader(io.StringIO(done.printed)) if row}
            require({f"'{name}" for name in odd[:4]} <= cells, f"{cells} holds a formula")


def _folder_of_weights(folder: Path) -> None:
    """Load a text classifier whose config.json names classes and a kernel on the hub."""
    returned(_load, folder, output=folder / "load.log")


def _load(folder: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    from efficient_ft.config import ModelConfig
    from efficient_ft.models.text import load

    small = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForSequenceClassification(small).save_pretrained(folder / "model")
    (folder / "model" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n", encoding="utf-8")
    (folder / "model" / "code.py").write_text(f"open({str(folder / 'MARK')!r}, 'w')\n", encoding="utf-8")
    file = folder / "model" / "config.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    for entry in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal",
                  "experts_implementation"):  # fmt: skip
        code = {entry: "owner/kernel", "auto_map": {"AutoModelForSequenceClassification": "code.Model"}}
        file.write_text(json.dumps({**about, **code}), encoding="utf-8")
        model = load(ModelConfig(name="bert", weights=str(folder / "model"), max_length=8), 2)
        require("owner/kernel" not in str(vars(model.config)), f"{entry} is in the configuration of the network")
    require(not (folder / "MARK").exists(), "code.py was executed")
