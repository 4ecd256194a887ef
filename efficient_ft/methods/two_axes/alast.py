"""ALaST: in each step, train some of the blocks and drop tokens, depending on a budget for each block.

Source: Devoto, Alvetreti, Pomponi, Di Lorenzo, Minervini, Scardapane, "Adaptive Layer Selection for Efficient Vision
Transformer Fine-Tuning", 2024. The settings determine details that the paper does not specify, or that are reported
differently for a later implementation by the authors (see docs/notices.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.core.context import is_recomputing
from efficient_ft.core.distributed import all_reduce_sum
from efficient_ft.core.errors import SettingError
from efficient_ft.methods.base import Applied
from efficient_ft.methods.checks import check_choice, check_number
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.registry import register
from efficient_ft.methods.selection.per_step import LayersPerStep
from efficient_ft.methods.tokens.base import (
    Attention,
    DroppingForward,
    Place,
    TokenMethod,
    block_channels,
    classifies_by_class_token,
    grid_positions,
    run_dropping,
)
from efficient_ft.models.view import ModelView
from efficient_ft.ops.tokens import is_token_reduction_suspended, token_context

#: Names of the settings that must be numbers >= 0.
_NUMBERS = ("budget_min", "budget_max", "budget_init", "budget_lr", "delta_scale")


@dataclass
class _Budget:
    """Budget of one block.

    `value` is the budget b, and `before` is the value of Δ in the previous step. `change` is the sum of ‖CLS_l −
    CLS_{l−1}‖² over the images of the current step, and `images` is the number of these images. The same tensor
    `change` is used in all steps.
    """

    value: float
    change: Tensor | None = None
    images: int = 0
    before: float | None = None


class _BudgetedForward(DroppingForward):
    """Forward pass of a block that, in training, outputs as many tokens as the budget of the block allows."""

    not_compiled = "a different number of tokens in each step"

    def __init__(self, module: nn.Module, place: Place, budgets: dict[str, _Budget], name: str, least: int) -> None:
        super().__init__(module, place, self._kept, False)
        self.budget, self.least = budgets[name], least

    def _kept(self, count: int) -> int:
        # The constant compensates for rounding errors, so that 0.7 · 10 results in 7.
        return max(self.least, math.floor(self.budget.value * count + 1e-9))

    @torch.compiler.disable  # the number of tokens differs between steps
    def __call__(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        if not self.module.training or is_token_reduction_suspended():
            return super(DroppingForward, self).__call__(x, *others, **keywords)
        x, tokens, inputs = self.popped(x, others, keywords)
        count = x.shape[1] - self.prefix
        drops = self._kept(count) < count
        seen = Attention(self.prefix) if drops else None
        with token_context(tokens):
            y = self.second_half(self.first_half(x, inputs, seen))
        if not is_recomputing():
            self._watch(x.detach()[:, 0], y.detach()[:, 0])
        if seen is not None:
            y, tokens = self.drop(y, seen, self.record(x, tokens, inputs))
        return self.passed_on(y, tokens)

    def _watch(self, before_BC: Tensor, after_BC: Tensor) -> None:
        change, budget = (after_BC.float() - before_BC.float()).square().sum(), self.budget
        if budget.change is None or budget.change.device != change.device:
            budget.change = torch.zeros_like(change)
        budget.change += change
        budget.images += len(before_BC)


@register
class ALaST(LayersPerStep, TokenMethod):
    """Train K blocks in each step, sampled according to their budgets. The budgets also limit the number of tokens.

    The budget b of a block depends on how much the block changes the class token. After each step, b is increased by
    ``budget_lr · delta_scale · (Δ − Δ of the previous step)`` and clamped to [budget_min, budget_max]. Δ is the squared
    norm of the change that the block makes to the class token (Equations 5 and 6 of the paper). Of the N patch tokens,
    the ⌊b · N⌋ tokens with the highest attention from the class token are passed to the next block. The other tokens
    are dropped without fusion. Frozen blocks also drop tokens. At least one patch token is kept, unless the model
    classifies only by its class token. In evaluation, no tokens are dropped.

    The default values are reported for a later implementation by the authors. The variant ``alast_paper`` uses the
    values in the text of the paper.

    Args:
        num_layers: number K of blocks to train per step.
        budget_init: budget of each block in the first step.
        budget_min: lower bound of the budgets.
        budget_max: upper bound of the budgets. Must be at most 1.
        budget_lr: step size α of the budget updates. In the paper, α equals the learning rate, 1e-4. The YAML options
            therefore set α to ``optim.lr``.
        delta: reduction of Δ over channels and images. ``image``: sum over the channels and mean over the images.
            ``value``: mean over channels and images.
        delta_scale: factor of Δ. The default value is the batch size of the paper (128), because Δ in the later
            implementation is reported to be a sum over the batch, whereas this Δ is a mean over the images.
        first_delta: value that the first step uses as the Δ of the previous step. ``zero``: 0. ``same``: the Δ of the
            first step, so that the first step does not change the budgets.
        layer_choice: criterion for the selection of the trained blocks. ``sample``: sample K blocks without
            replacement, with probabilities softmax(b). ``highest``: select the K blocks with the highest budgets. If
            budgets are equal, the earlier block is selected.
        train_embeddings, seed: see `LayersPerStep`.

    Raises:
        SettingError: If a setting is out of range. Raised by `apply` if the model has fewer blocks than `num_layers`,
            or if the budgets would leave no patch tokens.
        UserError: Raised by `apply` if the model has no class token or no token grid, or if its blocks are not
            supported.
    """

    name = "alast"
    other_axes: tuple[Axis, ...] = (Axis.TOKENS,)
    adds = frozenset({Adds.TOKEN_DROPPING})
    needs = LayersPerStep.needs | {Needs.CLASS_TOKEN, Needs.TOKEN_GRID}

    def __init__(
        self,
        num_layers: int = 9,
        budget_init: float = 0.9,
        budget_min: float = 0.5,
        budget_max: float = 1.0,
        budget_lr: float = 1e-4,
        delta: Literal["image", "value"] = "image",
        delta_scale: float = 128.0,
        first_delta: Literal["zero", "same"] = "zero",
        layer_choice: Literal["sample", "highest"] = "sample",
        train_embeddings: bool = True,
        seed: int | None = None,
    ) -> None:
        """Create the method. Its parameters are the settings."""
        super().__init__(num_layers, train_embeddings, seed)
        for setting, value in zip(_NUMBERS, (budget_min, budget_max, budget_init, budget_lr, delta_scale), strict=True):
            check_number(setting, value, "a number >= 0", lambda number: number >= 0)
        if budget_max > 1:
            raise SettingError("budget_max", budget_max, "a number from 0 to 1")
        if budget_min > budget_max:
            raise SettingError("budget_min", budget_min, f"a number from 0 to budget_max ({budget_max})")
        if not budget_min <= budget_init <= budget_max:
            raise SettingError(
                "budget_init", budget_init, f"a number from budget_min ({budget_min}) to budget_max ({budget_max})"
            )
        check_choice("delta", delta, ("image", "value"))
        check_choice("first_delta", first_delta, ("zero", "same"))
        check_choice("layer_choice", layer_choice, ("sample", "highest"))
        self.budget_init, self.budget_min, self.budget_max = budget_init, budget_min, budget_max
        self.budget_lr, self.delta_scale = budget_lr, delta_scale
        self.delta, self.first_delta, self.layer_choice = delta, first_delta, layer_choice
        self._budgets: dict[str, _Budget] = {}
        self._channels = 1
        self._present: list[float] = []
        self._restored: dict[str, Any] | None = None

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        self.refuse_other_blocks(view, view.blocks)
        self._check_count(view)
        self._check_start(view)
        self._checked(view)  # raises errors before the model is changed
        self.refuse_fixed_tokens(view, run_dropping)
        self._budgets = {name: _Budget(float(self.budget_init)) for name in view.blocks}
        self._channels = block_channels(view, view.blocks[0])
        if self._restored is not None:
            self.load_state_dict(self._restored)
        # The average over patch tokens requires at least one token.
        least = 0 if classifies_by_class_token(model) else 1
        chosen = {name: (_BudgetedForward, (self._budgets, name, least)) for name in view.blocks}
        self.give_forwards(model, view, chosen)
        return super()._apply(model, view)

    def _check_start(self, view: ModelView) -> None:
        positions = left = grid_positions(view)
        for name in view.blocks[:-1]:
            left = math.floor(self.budget_init * left + 1e-9)
            if not left and self.budget_init:
                height, width = view.image_size
                raise self.setting_error(
                    "budget_init",
                    "a number that leaves patch tokens after all blocks",
                    f"None of the {positions} patch tokens would be left after the block {name}. Use images larger"
                    f" than {height}×{width}.",
                )

    def _notes(self) -> tuple[str, ...]:
        return (f"blocks initially keep {self.budget_init:g} of the tokens",)

    def _remove(self, model: nn.Module) -> None:
        TokenMethod._remove(self, model)
        super()._remove(model)

    def choose(self, step: int, count: int) -> list[int]:
        self._present = [budget.value for budget in self._budgets.values()]
        budgets = torch.tensor(self._present, dtype=torch.float64)
        if self.layer_choice == "sample":
            return torch.multinomial(budgets.softmax(0), self.num_layers, generator=self._generator(step)).tolist()
        return budgets.argsort(descending=True, stable=True)[: self.num_layers].tolist()

    def step_end(self) -> None:
        super().step_end()
        budgets = list(self._budgets.values())
        changes = [budget.change for budget in budgets if budget.change is not None and budget.images]
        if len(changes) < len(budgets) or not changes or isinstance(changes[0], FakeTensor) or changes[0].is_meta:
            return  # the step processed no images, or it runs on fake tensors to count the cost
        deltas = self._deltas(torch.stack(changes), budgets[0].images)
        for budget, delta in zip(budgets, deltas, strict=True):
            assert budget.change is not None
            budget.change.zero_()
            budget.images = 0
            if not math.isfinite(delta):
                continue  # a step with an fp16 overflow is skipped
            before = budget.before
            if before is None:
                before = delta if self.first_delta == "same" else 0.0
            change = self.budget_lr * self.delta_scale * (delta - before)
            budget.value = min(self.budget_max, max(self.budget_min, budget.value + change))
            budget.before = delta

    def _deltas(self, changes: Tensor, images: int) -> list[float]:
        """Return Δ of each block, computed over the images of all micro-batches and processes."""
        *deltas, images_all = all_reduce_sum(torch.cat([changes, changes.new_tensor([images])])).tolist()
        over = images_all * (self._channels if self.delta == "value" else 1)
        return [delta / over for delta in deltas]

    def step_stats(self) -> dict[str, Any]:
        return {**super().step_stats(), "budgets": list(self._present)}

    def state_dict(self) -> dict[str, Any]:
        return {name: [budget.value, budget.before] for name, budget in self._budgets.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict  # restored again by `apply` if `apply` is called later
        for name, budget in self._budgets.items():
            budget.value, budget.before = state_dict[name]
