"""Compute the costs of a training step with the formulas of the papers.

The memory M is computed with the formula of TinyTL (Cai et al., NeurIPS 2020), which Back Razor and BSR also use in
their tables. Multiply-adds are counted as in BSR.

    M = parameters + B · max over operations [ tmp(operation) + Σ saved by earlier operations + residual ]

M is in bytes, all values are in fp32, and the operations are in forward order:

* parameters: 4 bytes for a trained parameter, and 1 byte for a frozen parameter. Gradients, optimizer state and buffers
  are not included.
* tmp: 4·(in + out) for a linear layer, 4·in + 4·out / groups for a convolution, and 4·in for other operations.
* saved: 4·in for a linear layer, convolution or normalization with a trained weight. If a gradient flows through the
  operation, in / 8 is saved for ReLU and ReLU6, 4·in for other activation functions and softmax, and both operands for
  a product of two activations. The output of softmax is counted only once.
* residual: 4·(input of a block), during the computation of the branch that is added to this input.

q, k and v count as three layers with separate inputs, even if they share one matrix. Elementwise sums and products,
pooling, resizing, dropout and the selection of tokens are not counted.

BSR ("Block Selective Reprogramming", CVPR Workshops 2024) counts q, k and v as one layer if they share one matrix, and
has no residual term. In a block with H heads and N tokens of d values each, full training stores 4 · (16 N d + H N²)
bytes. A frozen block through which a gradient passes stores 4 · (7 N d + H N²) bytes. In a block that drops tokens, the
second normalization and all later operations have fewer tokens. BSR's "FLOPs" are the multiply-adds of all products in
the forward pass, including frozen layers.

The costs of the formulas differ from the costs of an executed step (`executed`). Compare the costs of the formulas only
with the values in a paper.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.fake import FakeTensors
from efficient_ft.cost.meter import storage_id
from efficient_ft.cost.probe import FakeCopyOnCPU
from efficient_ft.cost.step import StepSpec, require_positive
from efficient_ft.models.view import projections_in, view
from efficient_ft.models.view.probe import RunningModules, in_words, takes_tokens
from efficient_ft.task import Classification, TextClassification, tensors_of

#: Number of bytes per fp32 value.
VALUE = 4


@dataclass(frozen=True)
class Keeping:
    """Number of bytes that are stored per value for the backward pass, including bitmaps.

    Without packing, `VALUE` bytes are stored per value.

    Attributes:
        product: number of bytes per value of the inputs of linear layers and convolutions, and of the operands of
            products in attention.
        norm: number of bytes per value of the inputs of normalizations.
        activation: number of bytes per value of the inputs of activation functions that are not piecewise linear.
    """

    product: float = VALUE
    norm: float = VALUE
    activation: float = VALUE


DENSE = Keeping()
MESA = Keeping(1, 1, 1)


def back_razor(sparsity: float, value_bytes: int = 2, norm_bytes: int | None = None) -> Keeping:
    """Return the bytes per value that Back Razor stores: a bitmap and a fraction 1 − `sparsity` of the values.

    The inputs of smooth activation functions stay dense.

    Args:
        sparsity: fraction of values that are dropped. Must be >= 0 and < 1.
        value_bytes: number of bytes per stored value: 2 in half precision (ViT), 4 in fp32 (Table 1), or 1 with Mesa.
        norm_bytes: number of bytes per value that a normalization stores. If None, `value_bytes` is used. For ViT-B
            with Back Razor@90% and Back Razor@95%, the number is 4.

    Raises:
        SettingError: If a value is out of range.
    """
    if not 0 <= sparsity < 1:
        raise SettingError("sparsity", sparsity, "a number >= 0 and < 1")
    norm_bytes = value_bytes if norm_bytes is None else norm_bytes
    for name, value in (("value_bytes", value_bytes), ("norm_bytes", norm_bytes)):
        if value not in (1, 2, 4):
            raise SettingError(name, value, ["1", "2", "4"])
    share = 1 - sparsity
    return Keeping(value_bytes * share + 1 / 8, norm_bytes * share + 1 / 8, value_bytes)


@dataclass(frozen=True)
class Rule:
    """Settings in which the formulas of the papers differ.

    Attributes:
        shared_inputs: if True, projections that share one matrix (qkv) store their input once and count as one layer.
        residual: if True, the input of a block is stored while the branch of the block is computed.
    """

    shared_inputs: bool = False
    residual: bool = True


TINYTL_RULE = Rule()
BSR_RULE = Rule(shared_inputs=True, residual=False)


@dataclass(frozen=True)
class Operation:
    """Operation that the formula counts in a forward pass. Sizes are in bytes per image in fp32.

    Attributes:
        name: full name of the module that runs the operation or owns its weight.
        kind: ``product`` (of activations and weights), ``attention`` (two products and softmax), ``norm``,
            ``activation`` or ``relu``.
        tmp: total size of the input and the output, both of which exist during the operation.
        saved: number of saved bytes without packing. For ``relu``, one bit per element is saved.
        macs: multiply-adds.
        residual: size of the block inputs that are stored during the operation.
        in_block: True if the operation is in a block, and not in the stem, the final normalization or the head.
    """

    name: str
    kind: str
    tmp: float
    saved: float
    macs: int = 0
    residual: float = 0
    in_block: bool = True


@dataclass(frozen=True)
class Published:
    """Training memory and multiply-adds according to the formula of a paper.

    Attributes:
        parameter_bytes: size of the parameters.
        activation_bytes: peak size of the activations per image.
        peak_at: name of the operation at which the peak is reached.
        macs: number of multiply-adds in the forward pass for one image, including the head.
        batch_size: number of images.
    """

    parameter_bytes: int
    activation_bytes: float
    peak_at: str
    macs: int
    batch_size: int

    @property
    def bytes(self) -> float:
        """Memory of the batch in bytes. The papers use MiB (2²⁰ B) for transformers and MB (10⁶ B) for CNNs."""
        return self.parameter_bytes + self.batch_size * self.activation_bytes


def published(
    model: nn.Module,
    batch_size: int,
    input_size: Sequence[int],
    keeping: Keeping = DENSE,
    in_chans: int = 3,
    rule: Rule = TINYTL_RULE,
) -> Published:
    """Apply a paper's formula to a training step of `model`. Parameters that require gradients count as trained.

    Args:
        model: image classifier, on any device. Its input has shape (B, in_chans, H, W). The model is not changed.
            Methods of the memory axis have no effect, because `keeping` describes the storage. Methods that drop tokens
            in evaluation change the result.
        batch_size: number of images in the batch.
        input_size: (H, W) of the images.
        keeping: storage of activations. In a model with attention, only activations in the blocks are packed: as in the
            papers, the patch embedding, the final normalization and the head stay dense. In other models, the
            activations of all layers are packed.
        in_chans: number of image channels.
        rule: `TINYTL_RULE` for the formula of TinyTL and Back Razor, or `BSR_RULE` for the formula of BSR.

    Raises:
        SettingError: If a batch size or image size is out of range.
        UserError: If `model` cannot run on images of this size.
    """
    require_positive("batch_size", batch_size)
    running = operations(model, input_size, in_chans, rule)
    macs = sum(op.macs for op in running)
    return Published(parameter_bytes(model), *peak(running, keeping), macs, batch_size)


def parameter_bytes(model: nn.Module) -> int:
    """Return the size of the parameters: `VALUE` bytes for each trained value, and 1 byte for each frozen value."""
    return sum(p.numel() * (VALUE if p.requires_grad else 1) for p in model.parameters())


def peak(running: Sequence[Operation], keeping: Keeping = DENSE, dense: str | None = None) -> tuple[float, str]:
    """Return the peak size of the activations per image in bytes, and the name of the operation at the peak.

    Args:
        running: operations in forward order.
        keeping: storage of activations (see `published`).
        dense: regular expression for the names of additional operations that stay dense.
    """
    everywhere = not any(op.kind == "attention" for op in running)
    earlier, most, at = 0.0, 0.0, ""
    for op in running:
        now = op.tmp + earlier + op.residual
        if now > most:
            most, at = now, op.name
        packed = (everywhere or op.in_block) and not (dense and re.search(dense, op.name))
        earlier += op.saved * _share(op, keeping if packed else DENSE)
    return most, at


def _share(op: Operation, keeping: Keeping) -> float:
    """Return the fraction of an operation's saved bytes that remains after packing."""
    kinds = {"product": keeping.product, "attention": keeping.product, "norm": keeping.norm}
    return {**kinds, "activation": keeping.activation, "relu": VALUE}[op.kind] / VALUE


# ---------------------------------------------------------------------------------------------- the forward pass
#: Normalization functions, each with the position of the weight in its arguments.
_NORMS = {F.layer_norm: 2, F.group_norm: 2, F.rms_norm: 2, F.batch_norm: 3, F.instance_norm: 3}
_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
_RELUS: set[Any] = {F.relu, F.relu_, F.relu6, F.hardtanh, F.hardtanh_, F.leaky_relu, F.leaky_relu_}
_RELUS |= {torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_ACTIVATIONS: set[Any] = {F.gelu, F.silu, F.mish, F.elu, F.hardswish, F.hardsigmoid, F.softplus, F.sigmoid, F.tanh}
_ACTIVATIONS |= {torch.sigmoid, torch.tanh, Tensor.sigmoid, Tensor.sigmoid_, Tensor.tanh, Tensor.tanh_}
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_MATMUL = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
_ADD = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}


def operations(
    model: nn.Module,
    input_size: Sequence[int],
    in_chans: int = 3,
    rule: Rule = TINYTL_RULE,
    blocks: Sequence[str] | None = None,
) -> list[Operation]:
    """List the operations of a forward pass on one image or text, in order. The pass runs on fake tensors.

    Args:
        model, input_size, in_chans, rule: see `published`. For a text model, `input_size` is (tokens,).
        blocks: names of the model's blocks. If None, the blocks that the model's view recognizes are used.

    Raises:
        SettingError: If an image size or number of channels is out of range.
        UserError: If `model` cannot run on images of this size.
    """
    task = TextClassification() if takes_tokens(model) else Classification()
    StepSpec(1, input_size, in_chans=in_chans, task=task)  # raises an error if a size is out of range
    if blocks is None:
        blocks = view(model, tuple(input_size)).blocks
    with FakeTensors() as mode, torch.inference_mode(False), torch.enable_grad():
        with FakeCopyOnCPU(mode):
            probe = copy.deepcopy(model)
        probe.eval()  # the formula ignores dropout, and methods of the memory axis only act in training
        inputs = task.example_inputs(1, in_chans, tuple(input_size))
        if isinstance(inputs, Tensor):
            inputs = inputs.to(next(probe.parameters()).dtype)
        trace = _Trace(probe, blocks, tensors_of(inputs), rule)
        try:
            with trace:
                probe(inputs) if isinstance(inputs, Tensor) else probe(**inputs)
        except (AssertionError, RuntimeError, ValueError) as error:
            size = in_words(tuple(input_size))
            raise UserError(f"The model {type(model).__name__} cannot be run on {size}: {first_line(error)}") from error
    return trace.operations


class _Trace(TorchFunctionMode):
    """Record the operations whose operands depend on the inputs of the model."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], inputs: Sequence[Tensor], rule: Rule) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._rule = rule
        self._model = model
        self._owner: dict[int, str] = {}
        self._running = RunningModules(model).names
        self._blocks = frozenset(blocks)
        # For each storage, the number of operations that had been recorded when the storage was last written. The
        # tensors are kept alive, so that no storage id is reused. Fake tensors need no memory.
        self._made = {storage_id(x): 0 for x in inputs}
        self._held = list(inputs)
        self._probabilities: set[int] = set()
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._owner.setdefault(id(parameter), name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operands = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        listed = (t for a in args if isinstance(a, list | tuple) for t in a if isinstance(t, Tensor))
        if not any(storage_id(t) in self._made for t in (*operands, *listed)):
            return out
        before = len(self.operations)
        if operands and storage_id(operands[0]) in self._made:
            self._see(func, operands, args, kwargs, out)
        writes = before < len(self.operations) or func in _ADD
        for t in out if isinstance(out, list | tuple) else (out,):
            if isinstance(t, Tensor):
                key = storage_id(t)
                self._made[key] = len(self.operations) if writes else self._made.get(key, len(self.operations))
                self._held.append(t)
        return out

    def _see(self, func: Any, operands: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        x = operands[0]
        if func is F.linear or func in _CONVOLUTIONS:
            weight = operands[1]
            groups = 1 if func is F.linear else x.shape[1] // weight.shape[1]
            name = self._owner.get(id(weight), self._running[-1])
            parts = 1 if self._rule.shared_inputs else projections_in(name)
            macs = out.numel() * weight[0].numel()
            for _ in range(parts):
                tmp = VALUE * (x.numel() + out.numel() / parts / groups)
                self._add("product", tmp, VALUE * x.numel() * weight.requires_grad, macs // parts, name)
        elif func in _NORMS:
            at = _NORMS[func]
            weight = args[at] if len(args) > at else kwargs.get("weight")
            trains = weight is not None and weight.requires_grad
            self._add("norm", VALUE * x.numel(), VALUE * x.numel() * trains)
        elif func in _RELUS:
            self._add("relu", VALUE * x.numel(), x.numel() / 8 * x.requires_grad)
        elif func in _ACTIVATIONS:
            self._add("activation", VALUE * x.numel(), VALUE * x.numel() * x.requires_grad)
        elif func in _SOFTMAX and not self._choosing_tokens():
            self._add("attention", VALUE * x.numel(), VALUE * x.numel() * x.requires_grad)
            self._probabilities.add(storage_id(out))
        elif func in _MATMUL and storage_id(operands[1]) in self._made and not self._choosing_tokens():
            macs = out.numel() * x.shape[-1]
            self._product(x, operands[1], x.numel() * (storage_id(x) not in self._probabilities), macs)
        elif func is F.scaled_dot_product_attention:
            q, k, v = operands[:3]
            pairs = q.numel() // q.shape[-1] * k.shape[-2]
            passes = q.requires_grad or k.requires_grad
            self._product(q, k, q.numel(), pairs * q.shape[-1])
            self._add("attention", VALUE * pairs, VALUE * pairs * (passes or v.requires_grad))
            self._add("attention", VALUE * (pairs + v.numel()), VALUE * v.numel() * passes, pairs * v.shape[-1])
        elif func in _ADD and self._rule.residual and len(operands) == 2 and storage_id(operands[1]) in self._made:
            older = min(operands, key=lambda t: self._made[storage_id(t)])
            for at in range(self._made[storage_id(older)], len(self.operations)):
                op = self.operations[at]
                self.operations[at] = replace(op, residual=op.residual + VALUE * older.numel())

    def _choosing_tokens(self) -> bool:
        """Return True if the current product or softmax selects tokens and does not belong to attention.

        Products and softmax select tokens in modules that use fused attention, and in blocks whose forward pass a
        method has replaced.
        """
        module = self._model.get_submodule(self._running[-1])
        own = self._running[-1] in self._blocks and "forward" in vars(module)
        return own or bool(getattr(module, "fused_attn", False))

    def _product(self, a: Tensor, b: Tensor, size_a: int, macs: int) -> None:
        """Record the product of two activations. Each activation is saved for the gradient of the other."""
        saved = size_a * b.requires_grad + b.numel() * a.requires_grad
        self._add("attention", VALUE * (a.numel() + b.numel()), VALUE * saved, macs)

    def _add(self, kind: str, tmp: float, saved: float, macs: int = 0, name: str | None = None) -> None:
        in_block = any(running in self._blocks for running in self._running)
        self.operations.append(Operation(name or self._running[-1], kind, tmp, saved, macs, in_block=in_block))
