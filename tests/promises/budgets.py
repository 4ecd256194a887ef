"""Promise 11: a run stays within its memory budget and records its true peak.

Each trial draws a task, a network, a method, batch and image sizes, and a way of reading the data. The first start has
a tiny budget, is rejected, and names the required memory. The second start has a budget near the required memory. The
trial reads the system's high-water mark of the process (``VmHWM``) during each run.
"""

from __future__ import annotations

import csv
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from efficient_ft.core.format import format_bytes, format_percent
from efficient_ft.core.units import parse_bytes
from tests.promises.children import Child, Ended
from tests.promises.trial import Trial, require

#: Relative tolerances: a run's peak above its budget, and the recorded peak relative to the system's mark.
OVER, RECORDED = 0.005, 0.01
#: Seed of the random runs, and their number in the short and in the long form.
SEED, SHORT, LONG = 46, 3, 60
#: Budgets relative to the memory that the program reports as required. With a factor of at most 1, a run may be
#: rejected.
_FACTORS = (0.97, 1.0, 1.0, 1.03, 1.15)

_CLASSIFIERS = {
    "vit_tiny_patch16_224": (64, 96, 128),
    "deit3_small_patch16_224": (64, 96),
    "resnet18": (64, 96, 160),
    "mobilenetv3_small_050": (64, 128, 224),
    "convnext_atto": (64, 96, 128),
    "efficientnet_b0": (64, 96),
}
_METHODS = ("full", "head", "last_stage", "bitfit", "[full,low_bit]", "[full,checkpointing]", "[full,mesa]", "lora")
#: Image sets with fewer files than this have one batch.
_FEW = 20
_WORDS = ("apple", "pear", "iron", "zinc", "the", "old", "house", "was", "near", "and")


def trials(long: bool) -> Iterator[Trial]:
    """Yield the random runs."""
    for number in range(LONG if long else SHORT):
        task = ("classification", "segmentation", "text")[number % 3]
        yield Trial(f"budget of run {number} ({task})", _holds, (number, task))


def _holds(folder: Path, number: int, task: str) -> dict[str, float]:
    """Start a random run with a tiny budget, and again with a budget near the required memory."""
    draw = random.Random(f"{SEED} {number}")
    settings = drawn(draw, task, folder)
    first, _ = _watched(folder / "first", [*settings, "memory=1MB"])
    require(first.status == 2, f"a budget of 1 MB: status {first.status}\n{first.printed[-2000:]}")
    found = re.search(r"the run would take about ([\d.]+) ([KMGT]iB)", first.unwrapped)
    require(found is not None, first.printed[-2000:])
    assert found is not None
    require(not (folder / "first").exists() or not any((folder / "first").iterdir()), "a rejected run left files")
    factor = draw.choice(_FACTORS)
    budget = round(factor * parse_bytes("memory", found[1] + found[2]) + (factor >= 1) * 6 * 2**20)
    run = folder / "run"
    ended, peak = _watched(run, [*settings, f"memory={budget}B"])
    shown = f"budget {format_bytes(budget)}, peak {format_bytes(peak)}, factor {factor}: {' '.join(settings)}"
    require("Traceback" not in ended.printed, f"{shown}\n{ended.printed[-3000:]}")
    over = format_percent(peak / budget - 1)
    require(peak <= (1 + OVER) * budget, f"above its budget by {over}: {shown}\n{ended.printed[-800:]}")
    if ended.status == 0:
        results = json.loads((run / "results.json").read_text(encoding="utf-8"))
        recorded = results["memory"]["peak_bytes"]
        off = abs(recorded / peak - 1)
        require(off <= RECORDED, f"recorded {format_bytes(recorded)}, off by {format_percent(off)}: {shown}")
        return {"runs that ended": 1, "largest share of the budget": peak / budget, "largest record off": off}
    rejected = ended.status == 2 and "the run would take about" in ended.unwrapped
    # The memory of the interpreter differs by some MiB between starts.
    require(rejected and factor <= 1, f"status {ended.status}: {shown}\n{ended.printed[-3000:]}")
    return {"runs rejected": 1}


def _watched(run: Path, settings: list[str]) -> tuple[Ended, int]:
    """Run the program. Return its outcome and the highest ``VmHWM`` of its process in bytes."""
    from tests.promises.runs import program_with_costs

    child = Child(program_with_costs, [*settings, f"hydra.run.dir={run}"], output=run.with_suffix(".log"))
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, _mark(child.pid))
            time.sleep(0.02)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        ended = child.ended(1200)
    finally:
        over.set()
        thread.join()
    return ended, peak


def _mark(pid: int) -> int:
    """Return the high-water mark of a process in bytes, or 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    return 0 if found is None else int(found[1]) * 1024


# ---------------------------------------------------------------------------------------------- drawn runs
def drawn(draw: random.Random, task: str, folder: Path) -> list[str]:
    """Draw a run, write its data into `folder`, and return its settings."""
    data = folder / "data"
    own = {"classification": _classification, "segmentation": _segmentation, "text": _text}[task](draw, data)
    few = task == "classification" and sum(1 for _ in data.glob("*/*")) < _FEW
    batches = 1 if few else 2
    return [
        *own,
        f"data.eval_batch_size={draw.choice(('null', '1', '8', '32', '64'))}",
        f"data.num_workers={draw.choice((0, 0, 1))}",
        f"cost.baseline={draw.choice(('none', 'none', 'full'))}",
        "cost.steps=1",
        f"optim.state_bits={draw.choice((32, 32, 8))}",
        f"allocator={draw.choice(('auto', 'system'))}",
        f"trainer.grad_accum_steps={min(draw.choice((1, 1, 2)), batches)}",
        "trainer.epochs=1",
        "trainer.max_steps=3",
        "trainer.precision=fp32",
        "trainer.accelerator=cpu",
        "trainer.progress=false",
        "optim.warmup_steps=null",
    ]


def _classification(draw: random.Random, data: Path) -> list[str]:
    name = draw.choice(list(_CLASSIFIERS))
    side = draw.choice((60, 200, 500, 1000, 3000, 6000))
    _write_images(data, draw, 12 if side > 1000 else 40, side)
    batch, size, method = draw.choice((2, 4, 8, 16)), draw.choice(_CLASSIFIERS[name]), draw.choice(_METHODS)
    if method == "lora" and name == "resnet18":  # no layer supports LoRA
        method = "bitfit"
    no_attention = method == "lora" and not name.startswith(("vit", "deit"))
    return [
        "data=folder", f"data.root={data}", f"data.batch_size={batch}", "data.val_fraction=0.3",
        "model=timm", f"model.name={name}", "model.pretrained=false", f"model.image_size={size}", f"method={method}",
        *(["method.lora.targets=all"] if no_attention else []),
        f"data.keep_decoded={draw.choice(('off', 'auto'))}", f"data.decoded_folder={data.parent / 'decoded'}",
    ]  # fmt: skip


def _segmentation(draw: random.Random, data: Path) -> list[str]:
    side = draw.choice((64, 128, 256, 512))
    _write_masks(data, draw, side)
    network = draw.choice(
        (
            ["model=segformer_b0", "model.pretrained=false"],
            ["model=smp", "model.name=unet", "model.encoder=mobilenetv3_small_050", "model.pretrained=false"],
            ["model=smp", "model.name=fpn", "model.encoder=resnet18", "model.pretrained=false"],
        )
    )
    return [
        "task=segmentation", *network, "data=mask_folder", f"data.root={data}",
        f"model.image_size={draw.choice((64, 96, 128))}", f"data.batch_size={draw.choice((2, 4, 8))}",
        f"method={draw.choice(('full', 'head', 'last_stage', '[full,low_bit]'))}",
        f"data.masks.resize={draw.choice(('null', '[160,160]'))}",
        f"data.masks.evaluation={draw.choice(('whole', 'windows'))}",
    ]  # fmt: skip


def _text(draw: random.Random, data: Path) -> list[str]:
    length = draw.choice((16, 64, 128))
    width, layers = draw.choice((64, 128, 256)), draw.choice((2, 4))
    _write_bert(data / "bert", width, layers)
    data.mkdir(parents=True, exist_ok=True)
    with (data / "texts.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for k in range(120):
            words = draw.choices(_WORDS[2:], k=draw.choice((5, length)))
            rows.writerow([" ".join([_WORDS[k % 2], *words]), str(k % 2)])
    return [
        "task=text", "model=text", "model.name=bert", f"model.weights={data / 'bert'}", f"model.max_length={length}",
        "data=text_folder", f"data.root={data / 'texts.csv'}", f"data.batch_size={draw.choice((4, 8, 32))}",
        f"method={draw.choice(('full', 'head', 'last_stage', '[full,low_bit]', '[full,checkpointing]'))}",
    ]  # fmt: skip


def _write_images(data: Path, draw: random.Random, count: int, side: int) -> None:
    """Write images of two classes with little detail, so that files of large images are small."""
    import numpy as np
    from PIL import Image

    kind, mode = draw.choice((("jpg", "RGB"), ("png", "RGB"), ("png", "L")))
    small = np.random.default_rng(draw.randrange(2**32)).integers(0, 255, (count, 16, 16, 3), dtype=np.uint8)
    for number in range(count):
        into = data / "ab"[number % 2]
        into.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(small[number]).convert(mode).resize((side, side), Image.Resampling.NEAREST)
        picture.save(into / f"{number:03}.{kind}")


def _write_masks(data: Path, draw: random.Random, side: int) -> None:
    """Write images with masks of three classes. The evaluation images are larger than the training images."""
    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(draw.randrange(2**32))
    for split, count, factor in (("train", 16, 1), ("val", 6, draw.choice((1, 2))), ("test", 4, 1)):
        for part in ("images", "masks"):
            (data / split / part).mkdir(parents=True)
        for number in range(count):
            small = chance.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            size = (side * factor, side * factor)
            Image.fromarray(small).resize(size, Image.Resampling.NEAREST).save(
                data / split / "images" / f"{number}.png"
            )
            mask = Image.fromarray((small[..., 0] % 3).astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
            mask.save(data / split / "masks" / f"{number}.png")
    (data / "classes.txt").write_text("a\nb\nc\n", encoding="utf-8")


def _write_bert(folder: Path, width: int, layers: int) -> None:
    """Write a BERT with random weights and its tokenizer, like `save_pretrained`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    plain: Any = Tokenizer(WordPiece({name: k for k, name in enumerate(names)}, unk_token="[UNK]"))
    plain.pre_tokenizer = BertPreTokenizer()
    plain.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    config = BertConfig(
        vocab_size=len(names),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=256,
    )
    BertModel(config).save_pretrained(folder)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
