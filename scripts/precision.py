"""Run the study of both precisions on the digits: results/vit_digits_precisions.

    python scripts/precision.py [ARGUMENT...]

The study starts from a `vit_digits` that was trained on inverted digits. This script trains this network first, if it
does not exist yet in outputs, and passes all arguments to `efficient-ft study`, for example
`--rows "full,full bf16"`. The study itself uses the original digits. `efficient-ft study results/vit_digits_precisions
--report` prints the results.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "results" / "vit_digits_precisions"
PRETRAINING = ["model=vit_digits", "data=folder", "data.num_workers=0", "data.augment.name=none", "data.batch_size=32",
               "recipe=none", "method=full", "optim=adam", "optim.lr=2e-3", "optim.label_smoothing=0",
               "trainer.epochs=12", "trainer.precision=fp32", "cost.baseline=none", "seed=0"]  # fmt: skip
#: Folder of the first network. Other settings result in another folder.
FOLDER = ROOT / "outputs" / f"precision_{hashlib.sha256(' '.join(PRETRAINING).encode()).hexdigest()[:8]}"


def write_inverted_digits(folder: Path) -> None:
    """Write the inverted training images of the digits as PNG files to `folder`/CLASS.

    Transposed images are separate classes. The 20 classes differ from the 10 classes of the study, so that each run
    of the study starts with a new classifier.
    """
    import numpy as np
    from PIL import Image

    from efficient_ft.data.digits import read_digits

    samples = read_digits().train
    for number, (image, label) in enumerate(zip(samples.images, samples.labels, strict=True)):
        inverted = 255 - image
        for name, pixels in ((f"{label}", inverted), (f"{label} transposed", inverted.transpose(1, 0, 2))):
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.ascontiguousarray(pixels)).save(folder / name / f"{number:04}.png")


def efficient_ft(*arguments: str) -> None:
    """Run `efficient-ft`, and end this process with its exit status if it fails."""
    status = subprocess.run([sys.executable, "-m", "efficient_ft", *arguments], check=False).returncode
    if status:
        raise SystemExit(status)


def main(arguments: list[str]) -> None:
    """Train the first network if it does not exist yet, and run the study."""
    weights = FOLDER / "run" / "model.safetensors"
    if not weights.is_file():
        write_inverted_digits(FOLDER / "images")
        efficient_ft(*PRETRAINING, f"data.root={FOLDER / 'images'}", f"hydra.run.dir={FOLDER / 'run'}")
    efficient_ft("study", str(STUDY), f"model.weights={weights}", *arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
