"""Mixture of experts: copies of a block's feed-forward network, of which each token goes through a few.

Source: "Block Selective Reprogramming for On-device Training of Vision Transformers", CVPR Workshops 2024, section 5.2,
where experts stand in the blocks that BSR trains. The balance loss: Fedus, Zoph, Shazeer, "Switch Transformers: Scaling
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
from efficient_ft.methods.adapters.lite import refuse_adapted
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.forwards import OwnForward, forwards_of, put_inside, take_away
from efficient_ft.methods.recipes.bsr import BSR
from efficient_ft.methods.selection.static import blocks_at, check_blocks, refuse_twice
from efficient_ft.models.tasks import Tasks, for_each_task, tasks_of
from efficient_ft.models.view import view
from efficient_ft.ops.packed import packing_suspended

#: Feed-forward networks that work on each token alone, whatever lies beside it.
_STANDARD = (Mlp, GluMlp, SwiGLU)


class _Unevenness(dict[str, Tensor]):
    """By layer: how unevenly the last forward pass in training used the experts. A copy begins with none."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _ExpertsForward(OwnForward):
    """A feed-forward network that is the first of several experts: ``gate`` and the other ``experts`` are beside it.

    Args:
        name: of the module in the model.
        top_k: experts per token.
        norm_topk_prob: their weights add up to 1.
        unevenness: where the forward pass leaves its balance loss; None: it has none.
    """

    def __init__(
        self, module: nn.Module, name: str, top: int, renormalise: bool, unevenness: _Unevenness | None
    ) -> None:
        super().__init__(module)
        self.name, self.top, self.renormalise, self.unevenness = name, top, renormalise, unevenness

    @torch.compiler.disable  # how many tokens an expert gets depends on their values
    def __call__(self, x: Tensor) -> Tensor:
        # Activations are packed by image, and an expert's tokens are of no one image.
        with packing_suspended():
            return self._mixed(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def _mixed(self, x_TC: Tensor) -> Tensor:
        """(T, C) → (T, C): Σ over a token's experts of weight · expert(x), the sum in single precision at least."""
        mlp: Any = self.module
        experts = [self.within, *mlp.experts]
        probability_TE = mlp.gate(x_TC).to(torch.promote_types(x_TC.dtype, torch.float32)).softmax(-1)
        # A stable sort and not topk: a new gate finds all experts alike, and which it takes must not be chance.
        weight_TE, expert_TE = probability_TE.sort(dim=-1, descending=True, stable=True)
        weight_TK, expert_TK = weight_TE[:, : self.top].contiguous(), expert_TE[:, : self.top].contiguous()
        if self.renormalise:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        if self.unevenness is not None and mlp.training and torch.is_grad_enabled() and not is_recomputing():
            self.unevenness[self.name] = _unevenness(probability_TE, expert_TK)

        order = expert_TK.flatten().argsort(stable=True)  # of the T·K pairs, expert by expert
        token = order.div(self.top, rounding_mode="floor")
        parts = x_TC.index_select(0, token).split(_counts(expert_TK, len(experts)))
        # An expert without tokens is not run, and its gradient is None.
        y = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if len(part)])
        # Back in the tokens' order, and not index_add, which keeps what it adds for its backward pass.
        y_TKC = y.index_select(0, order.argsort()).unflatten(0, weight_TK.shape)
        return (y_TKC * weight_TK.unsqueeze(-1)).sum(1).to(y.dtype)


def _counts(expert_TK: Tensor, experts: int) -> list[int]:
    """Tokens of each expert. Without values (fake tensors, meta) as even as can be: the cost is linear in them."""
    if isinstance(expert_TK, FakeTensor) or expert_TK.is_meta:
        pairs = expert_TK.numel()
        return [pairs * (e + 1) // experts - pairs * e // experts for e in range(experts)]
    return expert_TK.flatten().bincount(minlength=experts).tolist()


def _unevenness(probability_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """E · Σ over experts of their share of the tokens · their mean probability: 1 where both are even."""
    # The shares are constants, so that the sum is a mean over the pairs of token and expert.
    return probability_TE.shape[1] * probability_TE.mean(0)[expert_TK].mean()


# ------------------------------------------------------------------------------------------------ the methods
class _Experts(Method):
    """What the methods with experts share: the task of the routers, and the balance loss."""

    find_unused_parameters = True
    merges = False
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    aux_loss_coef: float
    _tasks: Tasks | None = None
    _unevenness: _Unevenness | None = None
    #: The feed-forward networks that have experts, by their full names.
    _networks: tuple[str, ...] = ()

    def _put_experts(self, model: nn.Module, blocks: Sequence[int]) -> tuple[str, ...]:
        """Experts into the feed-forward networks of the blocks; returns these networks' names."""
        chosen = dict.fromkeys(blocks_at(view(model), f"method.{self.name}.blocks", blocks))
        names = tuple(f"{block}.mlp" for block in chosen)
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
        return names

    def _check_blocks(self, model: nn.Module, blocks: Sequence[int]) -> None:
        """Raise UserError, before anything is changed, where there can be no experts."""
        seen = view(model)
        refuse_adapted(seen, self.name)
        chosen = blocks_at(seen, f"method.{self.name}.blocks", blocks)
        refuse_twice(seen, f"method.{self.name}.blocks", blocks)
        for name in chosen:
            mlp: Any = getattr(model.get_submodule(name), "mlp", None)
            if type(mlp) not in _STANDARD or any(isinstance(m, nn.Conv2d) for m in mlp.modules()):
                kind = "no mlp" if mlp is None else f"an mlp of another kind ({type(mlp).__name__})"
                raise UserError(
                    f"method {self.name}: {name} of {seen.name} has {kind}; experts are copies of feed-forward"
                    " networks that work on each token alone (timm's Mlp, GluMlp, SwiGLU)."
                )
            if any(hasattr(m, "low_rank") for m in mlp.modules()):
                raise UserError(
                    f"method {self.name}: {name}.mlp of {seen.name} has low-rank layers already, which cannot be"
                    " copied; experts come first."
                )

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

        To be set before a forward pass, in a network that was given several tasks (`models.tasks.give_heads`) before
        the method was applied.
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
        """`loss` and, where there is a `balance`, so much of the balance loss of the forward pass before."""
        if self._unevenness is None:
            return loss
        if self._unevenness.keys() != set(self._networks):
            missing = [name for name in self._networks if name not in self._unevenness]
            self._unevenness.clear()
            raise UserError(
                f"method {self.name}: the forward pass left no balance loss of {', '.join(missing)}. Such blocks"
                " cannot be recomputed in the backward pass (checkpointing); leave them out there, or set balance=0."
            )
        uneven = torch.stack(list(self._unevenness.values())).sum()
        self._unevenness.clear()
        return loss + self.aux_loss_coef * uneven


def _width(mlp: nn.Module) -> int:
    """C of the tokens that a feed-forward network takes."""
    return next(m.in_features for m in mlp.modules() if isinstance(m, nn.Linear))


def _check_routing(num_experts: Any, top_k: Any, norm_topk_prob: Any, aux_loss_coef: Any) -> None:
    """Raise SettingError for settings that no model can be given."""
    if type(num_experts) is not int or num_experts < 1:
        raise SettingError("num_experts", num_experts, "a whole number of at least 1")
    if type(top_k) is not int or not 1 <= top_k <= num_experts:
        raise SettingError("top_k", top_k, f"a whole number from 1 to num_experts={num_experts}")
    if not isinstance(norm_topk_prob, bool):
        raise SettingError("norm_topk_prob", norm_topk_prob, ("true", "false"))
    if (
        isinstance(aux_loss_coef, bool)
        or not isinstance(aux_loss_coef, int | float)
        or not (math.isfinite(aux_loss_coef) and aux_loss_coef >= 0)
    ):
        raise SettingError("aux_loss_coef", aux_loss_coef, "a number of at least 0")


class MoE(_Experts):
    """Experts in the place of the feed-forward networks of some blocks: copies, of which each token takes a few.

    A gate without bias, from 0 at first, gives each token a probability for each expert; the ``top_k`` most probable ones
    run, and their outputs are added, weighted by the probabilities. As published these are not brought to a sum of 1,
    so that at first the output is top_k / num_experts of the feed-forward network's; with ``norm_topk_prob`` it is the
    feed-forward network's own. Of equal probabilities the expert with the lowest number wins. An expert that no token
    takes in a step is not run, and its gradients are None.

    Experts train as the feed-forward network would; one that the selection applied before has frozen gets none. In a
    network with several tasks (`models.tasks`) every task has gates of its own; ``task``
    says which is meant.

    The model's own feed-forward network is the first expert and keeps its names; the others (``….mlp.experts.…``) and
    the gates (``….mlp.gate.…``) cannot be merged into it: exported weights hold them. `remove` leaves the first
    expert, as it was trained.

    Args:
        num_experts: in each of the blocks.
        top_k: of them for each token.
        blocks: indices into the model's blocks, counted from 0, negative ones from the end.
        norm_topk_prob: the weights of a token's experts add up to 1.
        aux_loss_coef: what `total_loss` adds: so much of E · Σ fₑ · Pₑ, the sum over the blocks, with fₑ expert e's share of
            the tokens (each counted ``top_k`` times) of the batch of one process and Pₑ its mean probability. 0 as
            published, where a balance loss was computed and never added; 0.01 in M³ViT and Switch Transformers.

    Raises:
        SettingError: a value outside these.
        UserError: when applied: blocks of another form, or that the selection has frozen.
    """

    name = "moe"
    axis = "adapters"

    def __init__(
        self,
        num_experts: int = 16,
        top_k: int = 4,
        blocks: list[int] = [3, 7, 11],  # noqa: B006
        norm_topk_prob: bool = False,
        aux_loss_coef: float = 0.0,
    ):
        super().__init__()
        check_blocks(blocks)
        _check_routing(num_experts, top_k, norm_topk_prob, aux_loss_coef)
        self.num_experts, self.top_k = num_experts, top_k
        self.norm_topk_prob, self.aux_loss_coef = norm_topk_prob, float(aux_loss_coef)
        self.blocks = list(blocks)

    def _apply(self, model: nn.Module) -> Applied:
        self._check_blocks(model, self.blocks)
        seen = view(model)
        chosen = blocks_at(seen, "method.moe.blocks", self.blocks)
        for name in chosen:
            if not any(p.requires_grad for p in model.get_submodule(f"{name}.mlp").parameters()):
                raise SettingError(
                    "method.moe.blocks",
                    self.blocks,
                    "blocks whose feed-forward network trains",
                    f"The selection has frozen {name} of {seen.name}; choose bsr, full or blocks.",
                )
        others = {name: "keeps its feed-forward network" for name in seen.blocks if name not in chosen}
        return Applied(self.name, self._put_experts(model, self.blocks), others)

    def _remove(self, model: nn.Module) -> None:
        self._take_experts(model)


class BSRMoE(_Experts, BSR):
    """BSR whose trained blocks have experts in the place of their feed-forward networks.

    `BSR` and `MoE` in one: the blocks listed (attention, norms, experts, gates), the final norm and the head train, and
    tokens are dropped on the way. Published costs (Table 6) are those of ``keep_rate=0.7, fuse=False``.

    Args:
        num_experts, top_k, norm_topk_prob, aux_loss_coef: as in `MoE`.
        blocks: those that train and have experts.
        drop_at, keep_rate, fuse: as in `BSR`.
    """

    name = "bsr_moe"

    def __init__(
        self,
        num_experts: int = 16,
        top_k: int = 4,
        blocks: list[int] = [3, 7, 11],  # noqa: B006
        norm_topk_prob: bool = False,
        aux_loss_coef: float = 0.0,
        drop_at: list[int] = [3, 6, 9],  # noqa: B006
        keep_rate: float = 0.5,
        fuse: bool = True,
    ):
        BSR.__init__(self, blocks, drop_at, keep_rate, fuse)
        _check_routing(num_experts, top_k, norm_topk_prob, aux_loss_coef)
        self.num_experts, self.top_k = num_experts, top_k
        self.norm_topk_prob, self.aux_loss_coef = norm_topk_prob, float(aux_loss_coef)

    def _apply(self, model: nn.Module) -> Applied:
        self._check_blocks(model, self.blocks)
        done = BSR._apply(self, model)
        names = self._put_experts(model, self.blocks)
        return Applied(
            done.method, done.touched, done.skipped, (*done.notes, f"{self.num_experts} experts in {', '.join(names)}")
        )

    def _remove(self, model: nn.Module) -> None:
        self._take_experts(model)
        BSR._remove(self, model)
