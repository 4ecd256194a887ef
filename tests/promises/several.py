"""Promise 3: two processes equal one process."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.promises.children import returned
from tests.promises.methods import method_cases
from tests.promises.runs import configuration, in_processes, largest_difference, require_close, train, write_images
from tests.promises.trial import Trial, require

#: Changes of settings that remove random choices and losses over the tokens of a single process.
_QUIET: dict[str, dict[str, dict[str, Any]]] = {
    "lora": {"lora": {"dropout": 0.0}},
    "moe": {"moe": {"aux_loss_coef": 0.0}},
    "bsr_moe": {"bsr_moe": {"aux_loss_coef": 0.0}},
    "low_bit": {"low_bit": {"rounding": "nearest"}},
}
#: Methods that draw tokens for each image. Two processes draw different tokens than one process.
_RANDOM = ("patch_dropout",)
#: Cases with a range, a threshold, a group or a choice that depends on the half batch of a process. The difference
#: between two processes and one process is then comparable to the rounding error of the method.
_OF_THE_HALF = ("lbp_wht lhe", "back_razor int8", "checkpointing int8", "mesa", "low_bit", "low_bit auto", "swat")
#: Learning rates of networks whose random weights amplify rounding errors.
_LR = {"tinytl": 1e-6}
#: Tolerances in fp32, because the order of sums over a batch differs.
_RTOL, _ATOL = 1e-4, 1e-5


def trials(long: bool) -> Iterator[Trial]:
    """Yield a trial of a repeated run, and a trial for every method (long form: also with an uneven last batch)."""
    for case in method_cases(long):
        for uneven in (False, True) if long else (False,):
            yield Trial(f"{case}{', an uneven last batch' if uneven else ''}", _as_one, (case, uneven))
    yield Trial("two processes with workers and accumulation are the same again", _again)


def _as_one(folder: Path, case: str, uneven: bool) -> dict[str, float]:
    """Compare training in two processes on half batches with training in one process on whole batches."""
    write_images(folder / "images")
    if uneven:  # gives an odd number of training images
        (folder / "images" / "0" / "00.png").unlink()
    plain = configuration(
        folder / "images",
        case,
        quiet=True,
        optim={"name": "sgd", "lr": _LR.get(case, 0.05)},
        trainer__deterministic=True,
    )
    plain["method"] = copy.deepcopy(plain["method"])
    for method, settings in _QUIET.get(case.split()[0], {}).items():
        plain["method"][method].update(settings)
    plain["data"]["batch_size"] = 22 if uneven else 24  # batches of 24, 24, 8 of 56 images, or 22, 22, 11 of 55
    digests = _trained_in_two(folder, plain, "two")
    images = json.loads((folder / "two" / "results.json").read_text())["data"]["splits"]["train"]
    require(images % 2 == uneven, f"it trained on {images} images")
    require(digests[0] == digests[1], "the two processes end with different weights")
    if any(name in plain["method"] for name in _RANDOM):
        return {}
    returned(train, plain, folder / "one", output=folder / "one.log")
    if case in _OF_THE_HALF:
        plain["method"] = {"full": {}}
        returned(train, plain, folder / "exact", output=folder / "exact.log")
        largest, of_one = (largest_difference(folder / "one", folder / name) for name in ("two", "exact"))
        require(largest < 4 * of_one, f"two processes differ from one by {largest:.3g}, that from full by {of_one:.3g}")
        return {f"largest_difference_of_{case.replace(' ', '_')}": largest}
    largest = require_close(folder / "one", folder / "two", _RTOL, _ATOL)
    one, two = (json.loads((folder / name / "results.json").read_text())["accuracy"] for name in ("one", "two"))
    require(one == two, f"accuracies are {one} with one process, {two} with two")
    return {"largest_difference": largest}


def _again(folder: Path) -> None:
    """Require that training twice in two processes with all random choices gives the same bits."""
    write_images(folder / "images")
    plain = configuration(folder / "images", "lora", data__num_workers=1, trainer__grad_accum_steps=2)
    plain["data"]["batch_size"] = 12
    digests = [_trained_in_two(folder, plain, name)[0] for name in ("first", "second")]
    require(digests[0] == digests[1], "the second run has other weights than the first")


def _trained_in_two(folder: Path, plain: dict[str, Any], name: str) -> list[str]:
    """Run `plain` in two processes with half of its batch size, and return the digests of their weights."""
    plain = copy.deepcopy(plain)
    plain["data"]["batch_size"] //= 2
    plain["trainer"]["devices"] = 2
    digests: list[str] = in_processes(2, _train_and_digest, plain, folder / name, output=folder / name)
    return digests


def _train_and_digest(plain: dict[str, Any], folder: Path) -> str:
    """Run `plain` and return a digest of the weights of this process."""
    from efficient_ft.training.callbacks.recorder import Recorder

    digest = hashlib.sha256()

    def ended(self: Recorder, trainer: Any, module: Any) -> None:
        for key, value in module.state_dict().items():
            digest.update(f"{key} {value.dtype} ".encode() + value.contiguous().numpy().tobytes())

    Recorder.on_train_end = ended  # type: ignore[assignment, method-assign]
    train(plain, folder)
    return digest.hexdigest()
