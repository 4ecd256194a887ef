"""Tests that examples/quickstart.ipynb contains its outputs, and that its cells run and give the expected accuracy."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples/quickstart.ipynb"
#: Folder with real images and pretrained weights, which is not a part of the repository.
SHARED = ROOT.parent / "shared/data"


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return found


def text_of(outputs: list[dict[str, Any]]) -> str:
    """Return the text in the outputs of cells."""
    parts = []
    for output in outputs:
        for value in (output.get("text", ""), output.get("data", {}).get("text/markdown", "")):
            parts.append(value if isinstance(value, str) else "".join(value))
    return "".join(parts)


def accuracy_of(text: str) -> float:
    match = re.search(r"Test accuracy: ([\d.]+) %", text)
    assert match, text
    return float(match[1])


def test_the_notebook_contains_its_outputs() -> None:
    code = [cell for cell in read()["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "the cells ran in order"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    text = text_of(outputs)
    assert "| recipe | peak memory |" in text
    assert "backward FLOPs / image" in text
    assert 90 < accuracy_of(text) <= 100
    images = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert images
    assert sum(len(base64.b64decode(image)) for image in images) < 100_000
    local = re.compile(r"/(?:root|home|tmp|work|Users)/|site-packages|\b[A-Z]:\\\\")
    assert not local.search(text), "the outputs contain no paths of a machine"
    assert "\x1b" not in text, "a code host does not show colors of a terminal"


def executed(folder: Path, monkeypatch: pytest.MonkeyPatch, settings: str | None = None) -> str:
    """Execute the notebook in `folder`, and return the text of its outputs. `settings` replaces the settings."""
    nbclient = pytest.importorskip("nbclient", reason='pip install -e ".[dev]" installs nbclient')
    pytest.importorskip("ipykernel", reason='pip install -e ".[dev]" installs ipykernel')
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "settings" in cell.metadata.get("tags", ())]
    if settings is not None:
        cell.source = settings
    # The notebook calls the command, which is not on the path of every environment.
    commands = folder / "bin"
    commands.mkdir()
    command = commands / "efficient-ft"
    command.write_text(f"#!{sys.executable}\nfrom efficient_ft.cli.entry import main\n\nmain()\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kernel = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}})
    kernel.execute()
    return text_of([output for cell in notebook.cells for output in cell.get("outputs", ())])


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the command in the test is a script for POSIX systems")
def test_the_notebook_runs_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = executed(tmp_path, monkeypatch)
    assert abs(accuracy_of(text) - accuracy_of(text_of([o for c in read()["cells"] for o in c.get("outputs", ())]))) < 5
    assert list((tmp_path / "outputs/quickstart").glob("report/*.html"))


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "deit_tiny.safetensors").is_file(), reason=f"{SHARED} contains no real images")
def test_the_notebook_runs_on_a_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five classes of Caltech-101 with the first 20 training images and 10 test images of each class."""
    classes = ("accordion", "airplanes", "bonsai", "chandelier", "ketch")
    with tarfile.open(SHARED / "caltech101_128.tar.gz") as archive:
        for member in archive:
            *_, split, name, file = ("", "", *Path(member.name).parts)
            target = tmp_path / "images" / split / name
            if not member.isfile() or name not in classes or split not in ("train", "test"):
                continue
            target.mkdir(parents=True, exist_ok=True)
            if len(list(target.iterdir())) < (20 if split == "train" else 10):
                source = archive.extractfile(member)
                assert source is not None
                (target / file).write_bytes(source.read())
    settings = ["model=deit_tiny", f"model.weights={SHARED}/deit_tiny.safetensors", "model.image_size=112"]
    settings += ["data=folder", "data.root=images", "trainer.epochs=5", "data.batch_size=16", "optim.lr=3e-4"]
    settings += ["data.num_workers=0"]
    text = executed(tmp_path, monkeypatch, f'SETTINGS = {settings}\nMEMORY = "3GB"\nRUN = "outputs/quickstart"')
    assert accuracy_of(text) > 60, "by chance 20"
