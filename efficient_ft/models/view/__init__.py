"""A view of a model for methods: its stages, blocks and head, and the token layout of the input of each layer.

Methods use the view so that they do not depend on the architecture. The view reads the attributes of the model, and
runs one forward pass on fake tensors to record the input of each layer. This forward pass also determines the token
grids, because the number of tokens does not determine a grid.
"""

from efficient_ft.models.view.layers import Layer, Reason, Skipped, TokenLayout, projections_in
from efficient_ft.models.view.model_view import ModelView, assumed_size_note, default_image_size, has_attention, view
from efficient_ft.models.view.probe import Call, image_channels
from efficient_ft.models.view.specified import Structure, check_arguments, restored_on_error, specify
from efficient_ft.models.view.structure import is_norm, parameters_under

__all__ = ["Call", "Layer", "ModelView", "Reason", "Skipped", "Structure", "TokenLayout", "assumed_size_note",
           "check_arguments", "default_image_size", "has_attention", "image_channels", "is_norm", "parameters_under",
           "projections_in", "restored_on_error", "specify", "view"]  # fmt: skip
