"""Tests that packing is independent of torch's default dtype, which Lightning's ``64-true`` and ``bf16-true`` change.

A kernel that writes float32 into a buffer of the default dtype returns invalid values (float64) or writes past the end
of the buffer (bfloat16). An invalid write can abort the process, so these tests run in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import sys
from contextlib import contextmanager

import torch

from efficient_ft.ops.storage import eight_bits
from efficient_ft.ops.saving import PackingState
from efficient_ft.ops.storage.kernels import cpu, gpu
from efficient_ft.ops.storage import Dense, EightBits, GroupBits, Half, Overflow, PackContext, Ranges, Sparse

KERNELS = {"plain": None, "cpu": cpu, "gpu": gpu}
SHAPES = [((4, 3, 2, 20), (1, 3)), ((2, 1100), None)]  # short groups, with heads; long ones
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STEPS = 2  # the second one moves the running range
PACKERS = [Half(torch.float16), Sparse(0.6, torch.float16), Sparse(0.6, eight_bits=True), EightBits(), GroupBits(3)]
if sys.argv[1] == "gpu":  # interpreted kernels are slow
    DTYPES, STEPS = [torch.float32], 1
else:
    PACKERS += [Dense(), Half(torch.bfloat16), Sparse(0.6), Sparse(0.6, torch.bfloat16), Sparse(0.6, exact=False)]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results():
    """Everything that packing computes, by what it is."""
    found = {}
    for dtype in DTYPES:
        for shape, heads in SHAPES:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
            for packer in PACKERS:
                session = PackingState()
                torch.manual_seed(0)
                for step in range(STEPS):
                    place = PackContext("x", len(x), session.ranges, session.overflow, heads)
                    packed = packer.pack(x * (1 + step), place)
                    found[f"{packer} {dtype} {shape} {step}"] = [*packed.tensors, packed.unpack(*packed.tensors)]
                restored = PackingState()
                restored.load_state_dict(session.state_dict())
                found[f"{packer} {dtype} {shape} ranges"] = [
                    t for ranges in (session.ranges, restored.ranges) for pair in ranges.by_name.values() for t in pair
                ]
            groups = x.reshape(len(x), -1, 20 if heads else 1100)
            low, high = eight_bits.extremes(groups)
            q = eight_bits.quantize(groups, low, high, torch.tensor(7))
            found[f"8 bits {dtype} {shape}"] = [low, high, q, eight_bits.dequantize(q, low, high)]
    return found


def use(kernels):
    """Only these kernels, wherever they take a tensor; the GPU's are interpreted."""
    cpu.supports = gpu.supports = lambda x: False
    if kernels is not None:
        assert kernels._kernels() is not None
        kernels.supports = lambda x: x.element_size() in kernels._INTEGERS and x.numel() > 0


with default_dtype(torch.float32):
    use(None)
    expected = results()
for name in sys.argv[1:]:
    use(KERNELS[name])
    for default in (torch.float32, torch.float64, torch.bfloat16):
        with default_dtype(default):
            found = results()
        for what, tensors in expected.items():
            same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found[what], tensors, strict=True)]
            if not all(same):
                print(f"{name} kernels, default {default}, {what}: {same}")
'''


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["cpu", "gpu"])
def test_packing_is_the_same_under_every_default_dtype(kernels: str, tmp_path: Path) -> None:
    pytest.importorskip({"cpu": "numba", "gpu": "triton"}[kernels])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), kernels, "plain"],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.strip() == ""
