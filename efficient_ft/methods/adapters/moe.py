"""Mixture of experts: copies of a block's feed-forward network, of which each token goes through a few.

Source: "Block Selective Reprogramming for On-device Training of Vision Transformers", CVPR Workshops 2024, section 5.2,
where the blocks that BSR trains have experts. The balance loss: Fedus, Zoph, Shazeer, "Switch Transformers: Scaling
to Trillion Parameter Models with Simple and Efficient Sparsity", JMLR 2022, equations 4 to 6.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.core.context import is_recomputing
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.blocks import blocks_at, check_indices
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.forwards import OwnForward, forwards_of, put_inside, take_away
from efficient_ft.methods.registry import register
from efficient_ft.models.tasks import Tasks, for_each_task, tasks_of
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.packed import packing_suspended

#: Feed-forward networks that work on each token alone.
_STANDARD = (Mlp, GluMlp, SwiGLU)


class _Unevenness(dict[str, Tensor]):
    """By layer: how unevenly the last forward pass in training used the experts. A copy of it is empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _ExpertsForward(OwnForward):
    """A feed-forward network that is the first of several experts; it has the ``gate`` and the other ``experts``.

    Args:
        name: of the module in the model.
        top_k: experts per token.
        norm_topk_prob: their weights add up to 1.
        unevenness: where the forward pass stores its balance loss; None: it has none.
    """

    def __init__(
        self, module: nn.Module, name: str, top_k: int, norm_topk_prob: bool, unevenness: _Unevenness | None
    ) -> None:
        super().__init__(module)
        self.name, self.top_k, self.norm_topk_prob, self.unevenness = name, top_k, norm_topk_prob, unevenness

    @torch.compiler.disable  # how many tokens an expert gets depends on their values
    def __call__(self, x: Tensor) -> Tensor:
        # Activations are packed by image, and an expert's tokens are of any images.
        with packing_suspended():
            return self._mixed(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def _mixed(self, x_TC: Tensor) -> Tensor:
        """(T, C) → (T, C): Σ over a token's experts of weight · expert(x), summed in float32 or wider."""
        mlp: Any = self.module
        experts = [self.within, *mlp.experts]
        probability_TE = mlp.gate(x_TC).to(torch.promote_types(x_TC.dtype, torch.float32)).softmax(-1)
        # A stable sort and not topk: a new gate gives all experts the same probability, and ties must be reproducible.
        weight_TE, expert_TE = probability_TE.sort(dim=-1, descending=True, stable=True)
        weight_TK, expert_TK = weight_TE[:, : self.top_k].contiguous(), expert_TE[:, : self.top_k].contiguous()
        if self.norm_topk_prob:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        if self.unevenness is not None and mlp.training and torch.is_grad_enabled() and not is_recomputing():
            self.unevenness[self.name] = _unevenness(probability_TE, expert_TK)

        order = expert_TK.flatten().argsort(stable=True)  # of the T·K pairs, expert by expert
        token = order.div(self.top_k, rounding_mode="floor")
        parts = x_TC.index_select(0, token).split(_counts(expert_TK, len(experts)))
        # An expert without tokens is not run, and its gradient is None.
        y = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if len(part)])
        # Back in the tokens' order by index_select: index_add would keep what it adds for its backward pass.
        y_TKC = y.index_select(0, order.argsort()).unflatten(0, weight_TK.shape)
        return (y_TKC * weight_TK.unsqueeze(-1)).sum(1).to(y.dtype)


def _counts(expert_TK: Tensor, experts: int) -> list[int]:
    """Return the tokens of each expert; without values (fake tensors, meta) as even as possible: cost is linear."""
    if isinstance(expert_TK, FakeTensor) or expert_TK.is_meta:
        pairs = expert_TK.numel()
        return [pairs * (e + 1) // experts - pairs * e // experts for e in range(experts)]
    return expert_TK.flatten().bincount(minlength=experts).tolist()


def _unevenness(probability_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """E · Σ over experts of their share of the tokens · their mean probability: 1 where both are even."""
    # The shares are constants, so that the sum is a mean over the pairs of token and expert.
    return probability_TE.shape[1] * probability_TE.mean(0)[expert_TK].mean()


# ------------------------------------------------------------------------------------------------ the methods
class ExpertsMethod(Method):
    """Base of the methods with experts: the experts themselves, the task of the routers, and the balance loss."""

    adds: frozenset[Adds] = frozenset({Adds.MODULES, Adds.LOSS})
    needs: frozenset[Needs] = frozenset({Needs.BLOCKS, Needs.FIND_UNUSED_PARAMETERS})
    merges = False
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    aux_loss_coef: float
    _tasks: Tasks | None = None
    _unevenness: _Unevenness | None = None
    #: The feed-forward networks that have experts, by their full names.
    _networks: tuple[str, ...] = ()

    def _store_routing(self, num_experts: Any, top_k: Any, norm_topk_prob: Any, aux_loss_coef: Any) -> None:
        """Check and store the settings of the routing."""
        if type(num_experts) is not int or num_experts < 1:
            raise SettingError("num_experts", num_experts, "an integer >= 1")
        if type(top_k) is not int or not 1 <= top_k <= num_experts:
            raise SettingError("top_k", top_k, f"an integer from 1 to num_experts={num_experts}")
        if not isinstance(norm_topk_prob, bool):
            raise SettingError("norm_topk_prob", norm_topk_prob, ("true", "false"))
        if (
            isinstance(aux_loss_coef, bool)
            or not isinstance(aux_loss_coef, int | float)
            or not (math.isfinite(aux_loss_coef) and aux_loss_coef >= 0)
        ):
            raise SettingError("aux_loss_coef", aux_loss_coef, "a number >= 0")
        self.num_experts, self.top_k = num_experts, top_k
        self.norm_topk_prob, self.aux_loss_coef = norm_topk_prob, float(aux_loss_coef)
        if not aux_loss_coef:
            self.adds = self.adds - {Adds.LOSS}

    def _networks_of(self, view: ModelView, blocks: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the feed-forward networks of the blocks; nothing is changed.

        Raises:
            SettingError: a block outside the model, or listed twice.
            UserError: a feed-forward network of another kind.
        """
        chosen = blocks_at(view, f"method.{self.name}.blocks", blocks)
        for name in chosen:
            mlp: Any = getattr(view.model.get_submodule(name), "mlp", None)
            if type(mlp) not in _STANDARD or any(isinstance(m, nn.Conv2d) for m in mlp.modules()):
                kind = "no mlp" if mlp is None else f"an mlp of another kind ({type(mlp).__name__})"
                raise UserError(
                    f"method {self.name}: {name} of {view.name} has {kind}; experts are copies of feed-forward"
                    " networks that work on each token alone (timm's Mlp, GluMlp, SwiGLU)."
                )
        return tuple(f"{block}.mlp" for block in chosen)

    def _put_experts(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Put experts into the feed-forward networks of these names."""
        self._tasks = tasks_of(model)
        self._unevenness, self._networks = _Unevenness() if self.aux_loss_coef else None, names
        for name in names:
            mlp: Any = model.get_submodule(name)
            like = next(mlp.parameters())

            def gate(like: Tensor = like, mlp: Any = mlp) -> nn.Module:
                made = nn.Linear(_width(mlp), self.num_experts, bias=False, device=like.device, dtype=like.dtype)
                nn.init.zeros_(made.weight)
                return made

            copies = nn.ModuleList(copy.deepcopy(mlp) for _ in range(self.num_experts - 1))
            mlp.gate, mlp.experts = for_each_task(model, gate), copies
            put_inside(mlp, _ExpertsForward(mlp, name, self.top_k, self.norm_topk_prob, self._unevenness))

    def _take_experts(self, model: nn.Module) -> None:
        mlp: Any
        for mlp in model.modules():
            if any(isinstance(f, _ExpertsForward) for f in forwards_of(mlp)):
                take_away(mlp, _ExpertsForward)
                del mlp.gate, mlp.experts

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self._tasks = self._unevenness = None
        self._networks = ()

    @property
    def task(self) -> str | None:
        """The task whose router and classifier the next forward pass takes; None: the network has one task.

        Set it before a forward pass, in a network that was given several tasks (`models.tasks.give_heads`) before the
        method was applied.

        Raises:
            UserError: when set: the network has one task.
        """
        return None if self._tasks is None else self._tasks.active

    @task.setter
    def task(self, name: str) -> None:
        if self._tasks is None:
            raise UserError(
                f"method {self.name}: the network has one task; give it several (models.tasks.give_heads) before the"
                " method is applied."
            )
        self._tasks.active = name

    def total_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` plus ``aux_loss_coef`` times the balance loss of the last forward pass.

        Raises:
            UserError: blocks with experts left no balance loss: they are recomputed in the backward pass.
        """
        if self._unevenness is None:
            return loss
        if self._unevenness.keys() != set(self._networks):
            missing = [name for name in self._networks if name not in self._unevenness]
            self._unevenness.clear()
            raise UserError(
                f"method {self.name}: the forward pass left no balance loss of {', '.join(missing)}. Such blocks"
                " cannot be recomputed in the backward pass (checkpointing); leave them out there, or set"
                " aux_loss_coef=0."
            )
        uneven = torch.stack(list(self._unevenness.values())).sum()
        self._unevenness.clear()
        return loss + self.aux_loss_coef * uneven


def _width(mlp: nn.Module) -> int:
    """Return C of the tokens that a feed-forward network takes."""
    return next(m.in_features for m in mlp.modules() if isinstance(m, nn.Linear))


@register
class MoE(ExpertsMethod):
    """Replace the feed-forward networks of some blocks by experts: copies, of which each token takes a few.

    A gate without bias, initialized to 0, gives each token a probability for each expert; the ``top_k`` most probable
    experts run, and their outputs are added, weighted by the probabilities. As published these are not normalized to a
    sum of 1, so that at first the output is top_k / num_experts of the feed-forward network's; with
    ``norm_topk_prob`` it is the feed-forward network's own. Of equal probabilities the expert with the lowest number
    wins. An expert that no token takes in a step is not run, and its gradients are None.

    Experts train as the feed-forward network would; a network that the selection applied before has frozen is
    refused. In a network with several tasks (`models.tasks`) every task has its own gates; ``task`` chooses the task.

    The model's own feed-forward network is the first expert and keeps its names; the others (``….mlp.experts.…``) and
    the gates (``….mlp.gate.…``) cannot be merged into it: exported weights hold them. `remove` leaves the first
    expert, as it was trained.

    Args:
        num_experts: in each of the blocks.
        top_k: of them for each token.
        blocks: indices into the model's blocks, counted from 0, negative ones from the end.
        norm_topk_prob: the weights of a token's experts add up to 1.
        aux_loss_coef: factor of the balance loss that `total_loss` adds: E · Σ fₑ · Pₑ, summed over the blocks, with
            fₑ expert e's share of the tokens (each counted ``top_k`` times) in the batch of one process and Pₑ its
            mean probability. 0 as published, where a balance loss was computed and never added; 0.01 in M³ViT and
            Switch Transformers.

    Raises:
        SettingError: a value outside these.
        UserError: when applied: blocks of another form, or frozen by the selection.
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
        check_indices("blocks", blocks, do="Without experts: method=full.")
        self._store_routing(num_experts, top_k, norm_topk_prob, aux_loss_coef)
        self.blocks = list(blocks)

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        names = self._networks_of(view, self.blocks)
        for name in names:
            if not any(p.requires_grad for p in model.get_submodule(name).parameters()):
                raise SettingError(
                    "method.moe.blocks",
                    self.blocks,
                    "blocks whose feed-forward network trains",
                    f"The selection has frozen {name} of {view.name}; choose bsr, full or blocks.",
                )
        why = Skipped(Reason.NOT_CHOSEN, "keeps its feed-forward network")
        others = {name: why for name in view.blocks if f"{name}.mlp" not in names}
        self._put_experts(model, names)
        return Applied(self.name, names, others, routed=names)

    def _remove(self, model: nn.Module) -> None:
        self._take_experts(model)
