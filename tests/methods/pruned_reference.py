"""A reference of Back Razor in dense torch operations: the paper's gradient formulas on pruned tensors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from efficient_ft.ops.storage.sparse import sparse_pack_reference, sparse_unpack_reference, values_kept
from tests.methods.references import Parameters, straight


class Pruning(TorchFunctionMode):
    """A mode in which GELU and attention compute their gradients from pruned tensors.

    `product` and `norm` replace the forward methods of layers. If the next layer recomputes its input instead of saving
    it, the recomputed input is stored in the attribute ``kept`` of the output.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.sparsity, self.exact = settings["sparsity"], settings["threshold"] == "exact"
        self.type = {"fp16": torch.float16, "bf16": torch.bfloat16}[settings["value_dtype"]]
        self.normalized, self.derives = settings["norm_saves"] == "normalized", settings["recompute_inputs"]
        self.forward = settings["prune"] == "both"

    def prune(self, x: Tensor) -> Tensor:
        """Keep the largest values of each sample in half precision, in memory order."""
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        rows = (x.permute(0, 2, 3, 1) if last else x).detach().flatten(1)
        values, bits = sparse_pack_reference(rows, values_kept(rows.shape[1], self.sparsity), self.exact)
        values = values if values.element_size() <= 2 else values.to(self.type)
        y = sparse_unpack_reference(values.to(x.dtype), bits, rows.shape[1])
        return y.view(*x.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2) if last else y.view(x.shape)

    def used(self, x: Tensor) -> Tensor:
        """Return the values that the forward pass uses."""
        return straight(self.prune(x), x) if self.forward else x

    def product(self, module: Any, x: Tensor) -> Tensor:
        def multiplied(x: Tensor, weight: Tensor) -> Tensor:
            if isinstance(module, nn.Linear):
                return F.linear(x, weight)
            return F.conv2d(x, weight, None, module.stride, module.padding, module.dilation, module.groups)

        kept = getattr(x, "kept", None)
        kept = self.prune(x) if kept is None else kept
        weight, bias = module.weight, module.bias
        x = straight(kept, x) if self.forward and weight.requires_grad else x
        y = straight(multiplied(x, weight), multiplied(x, weight.detach()), multiplied(kept.detach(), weight))
        return y if bias is None else y + (bias if isinstance(module, nn.Linear) else bias.view(-1, 1, 1))

    def norm(self, module: Any, x: Tensor) -> Tensor:
        batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
        dims = (0, 2, 3) if batch else (-1,)
        shape = (-1, 1, 1) if batch else (-1,)
        weight, bias = module.weight.view(shape), module.bias.view(shape)
        x = self.used(x) if batch or not self.normalized else x
        plain = F.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps) if batch else None
        mean, var = x.mean(dims, keepdim=True).detach(), x.var(dims, keepdim=True, correction=0).detach()
        rstd = (var + module.eps).rsqrt()
        x_hat = ((x - mean) * rstd).detach()
        kept = self.prune(x_hat) if self.normalized and not batch else (self.prune(x) - mean) * rstd
        value = (kept if self.forward and self.normalized and not batch else x_hat) * weight + bias
        if batch:
            with torch.no_grad():
                nn.BatchNorm2d.forward(_statistics(module), x)
        of_x = weight.detach() * rstd * (x - x.mean(dims, keepdim=True) - kept * (x * kept).mean(dims, keepdim=True))
        y = straight(value if plain is None else plain, of_x, kept * weight + bias)
        if not batch and self.normalized and self.derives:
            y.kept = kept * weight + bias  # type: ignore[attr-defined]
        return module.act(y) if hasattr(module, "act") else y

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.gelu:
            return self.gelu(args[0])
        if func is F.scaled_dot_product_attention:
            return self.attention(*args[:3])
        return func(*args, **kwargs)

    def gelu(self, x: Tensor) -> Tensor:
        kept = x.detach() if x.element_size() <= 2 else x.detach().to(self.type).to(x.dtype)
        slope = (1 + (kept / 2**0.5).erf()) / 2 + kept * (-(kept**2) / 2).exp() / (2 * math.pi) ** 0.5
        y = straight(F.gelu(x), slope * x)
        if self.derives:
            y.kept = F.gelu(kept)  # type: ignore[attr-defined]
        return y

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        if self.forward:
            q, scale = self.used(q * scale), 1.0
            k, v = self.used(k), self.used(v)
        q_kept, k_kept, v_kept = (t.detach() if self.forward else self.prune(t) for t in (q, k, v))
        p = (q @ k.mT * scale).softmax(-1).detach()
        kept = self.prune(p)
        scores = (q @ k_kept.mT + q_kept @ k.mT) * scale
        through = kept * (scores - (kept * scores).sum(-1, keepdim=True))
        return straight((kept if self.forward else p) @ v, through @ v_kept, kept @ v)


def _statistics(module: Any) -> Any:
    """Return the BatchNorm layer without its weights. A call updates the running statistics of `module`."""
    plain = nn.BatchNorm2d(module.num_features, module.eps, module.momentum, affine=False)
    plain.running_mean, plain.running_var = module.running_mean, module.running_var
    plain.num_batches_tracked = module.num_batches_tracked
    return plain.train()


def back_razor(method: Any, model: nn.Module, parameters: Parameters, images: Tensor) -> Tensor:
    """Compute logits whose gradients use pruned tensors in layers, normalizations and attention."""
    if not model.training:
        return functional_call(model, parameters, (images,))
    pruning = Pruning(method.settings())
    for name in method.applied.touched:
        module = model.get_submodule(name)
        run = pruning.product if isinstance(module, nn.Linear | nn.Conv2d) else pruning.norm
        module.forward = partial(run, module)  # type: ignore[method-assign]
    with pruning:
        return functional_call(model, parameters, (images,))
