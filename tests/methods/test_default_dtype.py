"""Tests of methods with compiled kernels: the gradients are equal under every default dtype of torch.

With ``64-true`` and ``bf16-true``, Lightning converts the model and runs its forward pass under a default dtype of
float64 or bfloat16. The backward pass runs under the original default dtype. A kernel that writes into a buffer of the
default dtype then corrupts the heap. The tests therefore run in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import copy
from contextlib import contextmanager, nullcontext

import timm
import torch
import torch.nn.functional as F

from efficient_ft.methods import LBPWHT, BackRazor, Checkpointing, Mesa

METHODS = {
    "mesa": Mesa,
    "mesa, fused attention": lambda: Mesa(attention="fused"),
    "back_razor, int8": lambda: BackRazor(value_dtype="int8"),
    "back_razor, fused attention": lambda: BackRazor(attention="fused"),
    "checkpointing, int8": lambda: Checkpointing(input_dtype="int8"),
    "lbp_wht": lambda: LBPWHT(order=6),
    "lbp_wht, fused feed-forward": lambda: LBPWHT(order=6, fused=True),
    "lbp_wht, EfficientFormer": lambda: LBPWHT(order=6),
}
torch.manual_seed(0)
settings = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
VIT = timm.create_model("vit_tiny_patch16_224", **settings), torch.randn(4, 3, 32, 32)
settings = {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "num_vit": 1, "num_classes": 5}
EFFICIENTFORMER = timm.create_model("efficientformer_l1", **settings), torch.randn(4, 3, 224, 224)
LABELS = torch.arange(4)
torch.manual_seed(1)  # the seed of stochastic rounding is that of the time when a method is created


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def gradients(network, method, dtype, forward=nullcontext, everything=nullcontext):
    """Of two steps, after the first of which the method's state is saved and restored."""
    found = []
    with everything():
        model, images = copy.deepcopy(network[0]).to(dtype).eval(), network[1].to(dtype)
        for module in model.modules():  # BatchNorm uses its running statistics
            module.training = not isinstance(module, torch.nn.BatchNorm2d)
        if method is not None:
            method.apply(model)
        torch.manual_seed(1)
        for step in range(2):
            if method is not None:
                method.step_begin(step)
            with forward():
                loss = F.cross_entropy(model(images * (1 + step)), LABELS)
            loss.backward()
            if method is not None:
                method.step_end()
                method.load_state_dict(method.state_dict())
            found += [p.grad.clone() for p in model.parameters()]
    return found


def flat(tensors):
    return torch.cat([t.double().flatten() for t in tensors])


for name, make in METHODS.items():
    network = EFFICIENTFORMER if name.endswith("EfficientFormer") else VIT
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        expected = gradients(network, make(), dtype)
        near = F.cosine_similarity(flat(expected), flat(gradients(network, None, dtype)), 0)
        if near < 0.8:
            print(f"{name}, {dtype}: far from plain training ({near})")
        for default in {dtype, torch.float64, torch.bfloat16} - {torch.float32}:
            for where in ("forward", "everything"):
                found = gradients(network, make(), dtype, **{where: lambda: default_dtype(default)})
                if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                    print(f"{name}, {dtype}, default {default} in {where}: other gradients")
'''


@pytest.mark.exhaustive
def test_gradients_are_the_same_under_every_default_dtype(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.strip() == ""
