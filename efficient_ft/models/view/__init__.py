"""The view of a model that methods use: stages, blocks, head, and the layout of the tokens in every layer's input.

Methods do not depend on an architecture. The view reads attributes of a timm classifier, and runs one forward pass on
fake tensors to see the input of each layer. Grids come from this pass and are never inferred from a token count alone.
"""

from efficient_ft.models.view.head import state_classifier
from efficient_ft.models.view.layers import Layer, TokenLayout, projections_in
from efficient_ft.models.view.model_view import ModelView, default_image_size, view
from efficient_ft.models.view.reason import Reason, Skipped
from efficient_ft.models.view.structure import is_norm, parameters_under

__all__ = [
    "Layer",
    "ModelView",
    "Reason",
    "Skipped",
    "TokenLayout",
    "default_image_size",
    "is_norm",
    "parameters_under",
    "projections_in",
    "state_classifier",
    "view",
]
