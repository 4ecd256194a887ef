"""Tests of the libraries that only some recipes load, and of the memory that they add to a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from efficient_ft.methods import Checkpointing, Compact, LoRA, LowBit, Mesa
from efficient_ft.methods.base import Method
from efficient_ft.training.memory.libraries import libraries


@pytest.mark.parametrize(
    ("state_bits", "methods", "expected"),
    [
        (32, [], ()),
        (32, [Compact()], ()),
        (32, [Mesa(), LowBit()], ("numba",)),
        (8, [], ("numba",)),
        (32, [LoRA()], ("peft",)),
        (32, [LoRA(), LowBit()], ("peft", "numba")),
        (32, [Checkpointing()], ()),
        (8, [Checkpointing(input_dtype="int4")], ("numba",)),
    ],
)
def test_a_recipe_names_what_it_loads(state_bits: int, methods: list[Method], expected: tuple[str, ...]) -> None:
    assert libraries(state_bits, methods) == expected


@pytest.mark.slow
def test_each_is_measured_once_in_a_new_process() -> None:
    pytest.importorskip("numba")
    code = (
        "import efficient_ft.training.run, sys\n"
        "from efficient_ft.training.memory.libraries import LibrarySizes\n"
        "assert not {'peft', 'numba'} & set(sys.modules)\n"
        "sizes = LibrarySizes()\n"
        "both = sizes(['numba', 'peft'])\n"
        "assert {'peft', 'numba'} <= set(sys.modules)\n"
        "print(sizes(['numba']), sizes(['peft']), both, LibrarySizes()(['peft']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    numba, peft, both, again = map(int, ended.stdout.split())
    assert numba > 50 * 2**20, "with the compiler, which a step may need"
    assert peft > 10 * 2**20
    assert both == numba + peft
    assert again < 2 * 2**20, "loaded before"


@pytest.mark.slow
def test_the_default_job_loads_no_library_of_other_methods(tmp_path: Path) -> None:
    words = ["trainer.max_steps=1", "trainer.accelerator=cpu", "cost.baseline=none", "cost.steps=1"]
    code = (
        "import sys\n"
        "from efficient_ft.cli.main import main\n"
        f"sys.argv[1:] = {[*words, f'hydra.run.dir={tmp_path}']}\n"
        "main()\n"
        "print(sorted({'peft', 'numba', 'sklearn', 'bitsandbytes', 'torchao'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
