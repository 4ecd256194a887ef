"""Method that trains every n-th block and the head."""

from __future__ import annotations

from torch import Tensor

from efficient_ft.core.errors import SettingError
from efficient_ft.methods import Exactness, ModelView, Needs, PlanCandidate, register
from efficient_ft.methods.selection.static import Selection
from efficient_ft.models.view import parameters_under


@register
class EveryNth(Selection):
    """Train every n-th block and the head.

    Args:
        n: distance between two trained blocks. If `n` is 1, all blocks are trained.

    Raises:
        SettingError: If `n` is not an integer >= 1.
        UserError: If the model has no recognized blocks or no classifier. Raised when the method is applied.
    """

    name = "every_nth"
    needs = frozenset({Needs.BLOCKS, Needs.CLASSIFIER})
    candidates = (PlanCandidate({"n": 2}, Exactness.PART), PlanCandidate({"n": 4}, Exactness.PART))

    def __init__(self, n: int = 2) -> None:
        super().__init__()
        if type(n) is not int or n < 1:
            raise SettingError("n", n, "an integer >= 1")
        self.n = n

    def chosen(self, view: ModelView) -> dict[str, Tensor]:
        return parameters_under(view.model, (*view.blocks[:: self.n], *view.head))
