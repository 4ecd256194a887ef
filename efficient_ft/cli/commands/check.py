"""``efficient-ft check KEY=VALUE...``: check a data set before training."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.terminal import Help, integer
from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.record.files import json_text, write_text_atomically

if TYPE_CHECKING:
    from efficient_ft.data.inspection import Summary
    from efficient_ft.training.kinds.base import RunData

DESCRIPTION = """\
Check the data of a run without training.

    efficient-ft check data=folder data.root=DIR
    efficient-ft check data=mask_folder data.root=DIR --html
    efficient-ft check data=text_folder data.root=FILE.csv model=text model.name=bert model.weights=DIR

The command prints a more detailed report than a run. It decodes every file, lists unreadable files, and searches for
duplicates within and across the splits. A contact sheet shows training samples as the network receives them: augmented
images with their labels, masks over their images, truncated texts. Pass the settings of the run. Without model=, images
are shown at 224x224. The exit status is 1 if training would reject the data.
"""

#: Maximum number of reasons in the output, and maximum number of unusable samples for each reason.
_SHOWN, _EXAMPLES = 10, 3
#: Default model of each task. If no model is given, samples are prepared for the input of this model.
_MODELS = {
    **dict.fromkeys(("classification", "multilabel", "regression"), "deit_tiny"),
    "segmentation": "deeplabv3_mobilenetv2",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the data of a run. Return 1 if training would reject the data, and 0 otherwise."""
    parser = argparse.ArgumentParser(prog="efficient-ft check", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--html", action="store_true", help="also write the contact sheet as an HTML page")
    number = integer(1, 1000)
    parser.add_argument("--samples", type=number, default=24, metavar="N", help="number of samples shown (default 24)")
    folder = Path("outputs/check")
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help="output folder (default outputs/check)")
    options = parser.parse_intermixed_args(arguments)
    for word in options.settings:
        if word.startswith("evaluate="):
            raise SettingError(
                "evaluate", word[9:], "left out with check", "efficient-ft check does not evaluate runs."
            )
    words, note = with_task(options.settings)
    config = configured(words, automatic=True)
    if config.data.automatic:
        config = config.with_batch_size(1, 1)
    from efficient_ft.models import factory
    from efficient_ft.training.datamodule import summaries, summary_text
    from efficient_ft.training.kinds.registry import kind_of
    from efficient_ft.training.output.console import say

    kind = kind_of(config)
    missing = kind.missing(config)
    if missing:
        raise UserError("\n".join(missing))
    spec = factory.input_of(config.model)
    try:
        data = kind.open(kind.check_settings(config), spec)
        found = summaries(data, thorough=True)
    except SettingError:
        raise
    except UserError as error:
        say(f"{error}\n\nTraining would reject this data set.")
        return 1
    text = summary_text(found)
    say(text)
    rejected = _print_problems(config, found)
    if note:
        say(note)
    _write(data, spec, options, text, found)
    if rejected:
        say("Training would reject this data set.")
    return int(rejected)


def with_task(words: Sequence[str]) -> tuple[list[str], str]:
    """Add the task and a default model to the settings of a run if they are missing.

    Return the settings and a note, which is empty unless a default model is added.
    """
    from efficient_ft.data.published import MASK_SETS, TEXT_SETS

    given = dict(word.split("=", 1) for word in words if "=" in word)
    data = given.get("data", "digits")
    masks, texts = data in ("mask_folder", *MASK_SETS), data in ("text_folder", *TEXT_SETS)
    task = given.get("task") or ("segmentation" if masks else "text" if texts else "classification")
    more = [] if "task" in given or task == "classification" else [f"task={task}"]
    if "model" in given or data == "digits" or "tasks" in given:
        return [*words, *more], ""
    if task not in _MODELS:
        example = "model=bert_base, or model=text model.name=bert model.weights=DIR"
        raise UserError(f"data={data} requires a model with a tokenizer. Add {example}.")
    return [*words, *more, f"model={_MODELS[task]}"], f"No model is given. Samples are prepared for {_MODELS[task]}."


def _print_problems(config: Config, found: dict[str, Summary]) -> bool:
    """Print the unusable samples. Return True if unusable samples would stop a training run."""
    from efficient_ft.data.counts import counted
    from efficient_ft.training.output.console import say

    problems = {path: why for one in found.values() for path, why in {**one.inspection.problems, **one.skipped}.items()}
    if not problems:
        return False
    stops = config.data.on_corrupt == "stop"
    do = "Correct these samples, or skip them with data.on_corrupt=skip." if stops else "These samples are skipped."
    say(f"{counted(len(problems), 'sample')} cannot be used. {do}")
    groups: dict[str, dict[str, str]] = {}
    for path, why in problems.items():
        reason = why.removeprefix(printable(path)).removeprefix(": ")
        groups.setdefault(re.sub(r"\d+", "#", reason), {})[printable(path)] = reason
    for of_reason in sorted(groups.values(), key=len, reverse=True)[:_SHOWN]:
        path, reason = next(iter(of_reason.items()))
        if len(of_reason) == 1:
            say(f"  {path}: {reason}")
            continue
        say(f"  {len(of_reason):,} × {reason}")
        for path in list(of_reason)[:_EXAMPLES]:
            say(f"    {path}")
        if len(of_reason) > _EXAMPLES:
            say(f"    … and {len(of_reason) - _EXAMPLES:,} more")
    if len(groups) > _SHOWN:
        say(f"  … and {counted(len(groups) - _SHOWN, 'more reason')}.")
    if len(problems) > _EXAMPLES:
        say("  The file check.json lists all unusable samples.")
    return stops


def _write(data: RunData, spec: Any, options: argparse.Namespace, text: str, found: dict[str, Summary]) -> None:
    from efficient_ft.report.contact_sheet import contact_sheet
    from efficient_ft.training.output.console import say

    out: Path = options.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {out} cannot be created ({error.strerror}). Choose another --out.") from error
    files = []
    for task, part in data.parts.items():
        try:
            sheet = contact_sheet(part, spec, options.samples)
        except UserError as error:
            say(f"The contact sheet was not written: {error}")
            continue
        stem = f"{task}_samples" if task else "samples"
        files.append(out / f"{stem}.png")
        sheet.write_image(files[-1])
        if options.html:
            files.append(out / f"{stem}.html")
            sheet.write_html(files[-1], text.splitlines())
    record = {
        task: {**one.record(), "problems": {**one.inspection.problems, **one.skipped}} for task, one in found.items()
    }
    files.append(out / "check.json")
    write_text_atomically(files[-1], json_text(record, indent=1) + "\n")
    say(f"Written: {', '.join(map(str, files))}")
