"""Mixture of experts: replace feed-forward networks with experts.

Source: Sarkar et al., "Block Selective Reprogramming for On-device Training of Vision Transformers" (BSR), CVPR
Workshops 2024, Section 5.2. Balance loss: Fedus, Zoph, Shazeer, "Switch Transformers: Scaling to Trillion Parameter
Models with Simple and Efficient Sparsity", JMLR 2022, Equations 4 to 6.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.core.context import is_recomputing
from efficient_ft.core.errors import SettingError, UserError, hint
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.checks import blocks_at, check_bool, check_indices, check_integer, check_number
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.forwards import OwnForward, foreign_forward, forwards_of, put_inside, refuse_export, take_away
from efficient_ft.methods.quantized import refuse_quantized
from efficient_ft.methods.registry import register
from efficient_ft.methods.summary import ranges, trained
from efficient_ft.models.tasks import Tasks, for_each_task, tasks_of
from efficient_ft.models.view import ModelView, Reason, Skipped, parameters_under
from efficient_ft.models.weight_dtype import dtype_of_added
from efficient_ft.ops.autocast import autocast_disabled
from efficient_ft.ops.saving import packing_suspended

#: Feed-forward networks from `timm` that process each token independently.
_STANDARD = (Mlp, GluMlp, SwiGLU)


class _BalanceLosses(dict[str, Tensor]):
    """Balance losses of the last forward pass in training, by layer name. Copies and pickles are empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _ExpertsForward(OwnForward):
    """Forward pass of a feed-forward network with experts.

    The network itself is the first expert. Its submodule ``gate`` is the router, and its submodule ``experts`` contains
    the other experts. The forward pass stores the balance loss in `balance_losses`. If `balance_losses` is None, no
    balance loss is computed.
    """

    not_compiled = "the tokens of each expert depend on the images"

    def __init__(
        self, module: nn.Module, name: str, top_k: int, norm_topk_prob: bool, balance_losses: _BalanceLosses | None
    ) -> None:
        super().__init__(module)
        self.name, self.top_k, self.norm_topk_prob, self.balance_losses = name, top_k, norm_topk_prob, balance_losses
        self.has_loss = False  # whether the last forward pass stored a balance loss

    @torch.compiler.disable  # the number of tokens per expert depends on tensor values
    def __call__(self, x: Tensor) -> Tensor:
        refuse_export(
            "method moe: the number of tokens of each expert depends on the images, but an exported network would use"
            " the numbers of the example input for all images.",
            "Run the network in PyTorch, or train a network without experts.",
        )
        # Packing processes each image separately, whereas an expert receives tokens of several images.
        with packing_suspended():
            return self._mixed(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def _mixed(self, x_TC: Tensor) -> Tensor:
        """Return the sum of the outputs of each token's experts, (T, C), weighted in at least float32."""
        mlp: Any = self.module
        experts = [self.within, *mlp.experts]
        # Autocast is disabled, because many probabilities would be equal in half precision (as in Switch Transformers).
        with autocast_disabled(x_TC):
            scores_TE = mlp.gate(x_TC.to(next(mlp.gate.parameters()).dtype))
            probability_TE = scores_TE.to(torch.promote_types(x_TC.dtype, torch.float32)).softmax(-1)
        # A stable sort is used instead of topk, so that ties (as in a new gate) are reproducible.
        weight_TE, expert_TE = probability_TE.sort(dim=-1, descending=True, stable=True)
        weight_TK, expert_TK = weight_TE[:, : self.top_k].contiguous(), expert_TE[:, : self.top_k].contiguous()
        if self.norm_topk_prob:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        if is_recomputing():
            if self.has_loss:
                raise _not_recomputed(f"{self.name} is recomputed")
        else:
            self.has_loss = False
            if self.balance_losses is not None and mlp.training and torch.is_grad_enabled():
                self.has_loss = True
                self.balance_losses[self.name] = _balance_loss(probability_TE, expert_TK)

        order = expert_TK.flatten().argsort(stable=True)  # sorts all T·K (token, expert) pairs by expert
        token = order.div(self.top_k, rounding_mode="floor")
        parts = x_TC.index_select(0, token).split(_counts(expert_TK, len(experts)))
        # An expert without tokens does not run, so that the gradients of its parameters remain None.
        y = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if len(part)])
        # Restore the order of the tokens. index_select is used because index_add would save its inputs for the backward
        # pass.
        y_TKC = y.index_select(0, order.argsort()).unflatten(0, weight_TK.shape)
        return (y_TKC * weight_TK.unsqueeze(-1)).sum(1).to(y.dtype)


def _counts(expert_TK: Tensor, experts: int) -> list[int]:
    # Fake and meta tensors have no values. For such tensors, the tokens are distributed evenly over the experts. The
    # total cost is the same, because it is linear in the number of tokens.
    if isinstance(expert_TK, FakeTensor) or expert_TK.is_meta:
        pairs = expert_TK.numel()
        return [pairs * (e + 1) // experts - pairs * e // experts for e in range(experts)]
    return expert_TK.flatten().bincount(minlength=experts).tolist()


def _balance_loss(probability_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """Return the balance loss E · Σ fₑ · Pₑ over the E experts.

    fₑ is the fraction of the tokens that are routed to expert e, and Pₑ is the mean probability of expert e. The loss
    is 1 if both f and P are uniform.
    """
    # Because no gradient flows through fₑ, the sum can be computed as a mean over the (token, expert) pairs.
    return probability_TE.shape[1] * probability_TE.mean(0)[expert_TK].mean()


class ExpertsMethod(Method):
    """Base class of the methods with experts (`MoE`, `BSRMoE`).

    This class implements the experts, one router for each task, and the balance loss. For the settings, see `MoE`.
    """

    adds: frozenset[Adds] = frozenset({Adds.MODULES, Adds.LOSS})
    needs: frozenset[Needs] = frozenset({Needs.BLOCKS, Needs.FIND_UNUSED_PARAMETERS})
    merges = False
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    aux_loss_coef: float
    _tasks: Tasks | None = None
    _balance_losses: _BalanceLosses | None = None
    #: Full names of the feed-forward networks with experts.
    _networks: tuple[str, ...] = ()

    def _store_routing(self, num_experts: Any, top_k: Any, norm_topk_prob: Any, aux_loss_coef: Any) -> None:
        check_integer("num_experts", num_experts)
        if type(top_k) is not int or not 1 <= top_k <= num_experts:
            raise SettingError("top_k", top_k, f"an integer from 1 to num_experts ({num_experts})")
        check_bool("norm_topk_prob", norm_topk_prob)
        check_number("aux_loss_coef", aux_loss_coef, "a number >= 0", lambda number: number >= 0)
        self.num_experts, self.top_k = num_experts, top_k
        self.norm_topk_prob, self.aux_loss_coef = norm_topk_prob, float(aux_loss_coef)
        if not aux_loss_coef:
            self.adds = self.adds - {Adds.LOSS}

    def _networks_of(self, view: ModelView, blocks: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the feed-forward networks in `blocks`. Raise UserError if one is not supported."""
        networks = {name: getattr(view.model.get_submodule(name), "mlp", None) for name in view.blocks}
        unfit = [name for name, mlp in networks.items() if not _is_standard(mlp)]
        fit = len(unfit) < len(networks)
        chosen = blocks_at(view, self.full_name("blocks"), blocks) if fit else unfit
        for name in (name for name in chosen if name in unfit):
            mlp = networks[name]
            kind = "no mlp" if mlp is None else f"an mlp of an unsupported type ({type(mlp).__name__})"
            raise UserError(
                f"method {self.name}: the block {name} of {view.name} has {kind}. Experts require blocks whose mlp is"
                " timm's Mlp, GluMlp or SwiGLU without convolutions."
            )
        names = tuple(f"{block}.mlp" for block in chosen)
        refuse_quantized(self.name, view.model, parameters_under(view.model, names))
        return names

    def _put_experts(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self._tasks = tasks_of(model)
        self._balance_losses, self._networks = _BalanceLosses() if self.aux_loss_coef else None, names
        for name in names:
            mlp: Any = model.get_submodule(name)
            like = next(mlp.parameters()).new_empty((), dtype=dtype_of_added(mlp))
            inputs = next(m.in_features for m in mlp.modules() if isinstance(m, nn.Linear))

            def gate(like: Tensor = like, width: int = inputs) -> nn.Module:
                made = nn.Linear(width, self.num_experts, bias=False, device=like.device, dtype=like.dtype)
                nn.init.zeros_(made.weight)
                return made

            copies = nn.ModuleList(copy.deepcopy(mlp) for _ in range(self.num_experts - 1))
            mlp.gate, mlp.experts = for_each_task(model, gate), copies
            put_inside(mlp, _ExpertsForward(mlp, name, self.top_k, self.norm_topk_prob, self._balance_losses))

    def _take_experts(self, model: nn.Module) -> None:
        """Remove the gates and the added experts. Each network keeps the weights of its first expert."""
        mlp: Any
        for mlp in model.modules():
            if any(isinstance(f, _ExpertsForward) for f in forwards_of(mlp)):
                take_away(mlp, _ExpertsForward)
                del mlp.gate, mlp.experts

    @property
    def task(self) -> str | None:
        """Task whose gates and classifier the next forward pass uses, or None if the network has a single task.

        To train several tasks, call `efficient_ft.models.tasks.give_heads` before `apply`, and set this property before
        each forward pass.

        Raises:
            UserError: If the property is set and the network has a single task.
            SettingError: If the property is set to an unknown name.
        """
        return None if self._tasks is None else self._tasks.active

    @task.setter
    def task(self, name: str) -> None:
        if self._tasks is None:
            raise UserError(
                f"method {self.name}: the network has only one task. Call efficient_ft.models.tasks.give_heads before"
                " the method is applied."
            )
        self._tasks.active = name

    def total_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` plus ``aux_loss_coef`` times the balance loss of the last forward pass.

        Args:
            loss: loss of the forward pass, with shape ().

        Raises:
            UserError: If a block with experts has computed no balance loss. In this case, either the block is
                recomputed in the backward pass (checkpointing), or no forward pass has run in training mode with
                gradients since the last call of this method.
        """
        if self._balance_losses is None:
            return loss
        if self._balance_losses.keys() != set(self._networks):
            missing = [name for name in self._networks if name not in self._balance_losses]
            self._balance_losses.clear()
            raise _not_recomputed(f"the forward pass computed no balance loss for {', '.join(missing)}")
        total = torch.stack(list(self._balance_losses.values())).sum()
        self._balance_losses.clear()
        return loss + self.aux_loss_coef * total


def _not_recomputed(found: str) -> UserError:
    return UserError(
        f"method moe: {found}. Blocks with experts cannot be recomputed in the backward pass, because the balance loss"
        " of the first forward pass would have no gradient. Exclude these blocks from checkpointing, or set"
        f" {hint('aux_loss_coef', 'method.moe.aux_loss_coef')}=0."
    )


def _is_standard(mlp: nn.Module | None) -> bool:
    if mlp is None or type(mlp) not in _STANDARD or foreign_forward(mlp) is not None:
        return False
    return not any(isinstance(m, nn.Conv2d) for m in mlp.modules())


@register
class MoE(ExpertsMethod):
    """Replace the feed-forward networks of the listed blocks with experts (BSR, CVPR Workshops 2024, Section 5.2).

    A linear gate without bias, followed by a softmax, computes the probability of each expert for each token. The gate
    is initialized with zeros. For each token, the ``top_k`` most probable experts run. The result is the sum of the
    outputs of these experts, weighted by the probabilities. If probabilities are equal, the expert with the lower index
    is preferred. By default, the ``top_k`` probabilities are not normalized. The initial output is therefore top_k /
    num_experts times the output of the feed-forward network. With ``norm_topk_prob=True``, the initial output is
    unchanged. An expert that receives no tokens in a step does not run, and its gradients are None.

    The first expert is the model's own feed-forward network and keeps its parameter names. The other experts
    (``….mlp.experts.…``) are copies of the first one. The copied experts and their gates (``….mlp.gate.…``) cannot be
    merged. Exported weights therefore contain the copies and the gates. `remove` keeps the first expert with its
    trained weights. In a network with several tasks (`efficient_ft.models.tasks`), each task has separate gates. Set
    `task` to select a task.

    Args:
        num_experts: number of experts in each listed block. Must be at least 1.
        top_k: number of experts that run for each token. Must be from 1 to num_experts.
        blocks: indices of the blocks with experts, counted from 0 across all stages. Negative indices count from the
            end.
        norm_topk_prob: if True, the weights of the experts of each token are normalized so that their sum is 1.
        aux_loss_coef: coefficient of the balance loss in `total_loss`. Must be non-negative. The balance loss is the
            sum of E · Σ fₑ · Pₑ over the blocks. fₑ is the fraction of the (token, expert) pairs that are routed to
            expert e in the batch of one process, and Pₑ is the mean probability of expert e. The default is 0, so the
            balance loss is not added to the loss, as reported for BSR. M³ViT and Switch Transformers use 0.01.

    Raises:
        SettingError: If a setting is out of range. Raised by `apply` if a block index is out of range or repeated, or
            if the feed-forward network of a block is frozen.
        UserError: Raised by `apply` if the model has no blocks, if a block has no supported feed-forward network, or if
            another method that adds modules has been applied.
    """

    name = "moe"
    axis = Axis.ADAPTERS

    def __init__(
        self,
        num_experts: int = 16,
        top_k: int = 4,
        blocks: list[int] = [3, 7, 11],  # noqa: B006
        norm_topk_prob: bool = False,
        aux_loss_coef: float = 0.0,
    ):
        super().__init__()
        check_indices("blocks", blocks, do="For a model without experts, use the method full.")
        self._store_routing(num_experts, top_k, norm_topk_prob, aux_loss_coef)
        self.blocks = list(blocks)

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        names = self._networks_of(view, self.blocks)
        for name in names:
            if not any(p.requires_grad for p in model.get_submodule(name).parameters()):
                raise self.setting_error(
                    "blocks",
                    "a list of blocks whose feed-forward networks are trainable",
                    f"The network {name} of {view.name} is frozen. Use bsr, full or blocks to train this network.",
                )
        why = Skipped(Reason.NOT_CHOSEN, "no experts: the block is not listed in blocks")
        others = {name: why for name in view.blocks if f"{name}.mlp" not in names}
        self._put_experts(model, names)
        where = ranges(name.removesuffix(".mlp") for name in names)
        summary = f"{self.num_experts} experts replace the feed-forward network of {where}: {trained(model)}"
        return Applied(self.name, names, others, routed=names, summary=f"{summary} train")

    def _remove(self, model: nn.Module) -> None:
        self._take_experts(model)
