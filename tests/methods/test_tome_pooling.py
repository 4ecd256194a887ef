"""Tests of pooling after token merging: each token is weighted by its number of patches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods import Checkpointing, ToMe, apply_methods
from tests.methods.settings import small_vit


def pictures() -> Tensor:
    return torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


POOLINGS: dict[str, dict[str, Any]] = {
    "mean": {"class_token": False, "global_pool": "avg"},
    "mean with a class token": {"global_pool": "avg"},
    "mean over prefix tokens too": {"global_pool": "avg", "pool_include_prefix": True, "reg_tokens": 2},
    "mean, norm before the pooling": {"global_pool": "avg", "fc_norm": False},
    "mean and maximum": {"global_pool": "avgmax"},
    "maximum": {"global_pool": "max"},
    "attention": {"class_token": False, "global_pool": "map"},
    "attention with a class token": {"global_pool": "map"},
    "class token": {"global_pool": "token"},
}


def without_blocks(**settings: Any) -> Any:
    """Create a vision transformer whose blocks are the identity."""
    model: Any = small_vit("vit_tiny_patch16_224", init_values=1.0, **settings)
    for block in model.blocks:
        nn.init.zeros_(block.ls1.gamma)
        nn.init.zeros_(block.ls2.gamma)
    return model.eval()


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "mean with a class token", "mean over prefix tokens too"])
def test_with_blocks_that_are_the_identity_a_mean_is_that_of_all_patches(pooling: str, proportional: bool) -> None:
    model = without_blocks(**POOLINGS[pooling])
    plain = model(pictures())
    ToMe([20, 11, 0, 9], proportional_attention=proportional).apply(model)
    torch.testing.assert_close(model(pictures()), plain, rtol=0, atol=1e-12)


@pytest.mark.first(2, "slow")
@pytest.mark.parametrize("pooling", POOLINGS)
def test_merging_equal_patches_changes_no_pooling(pooling: str) -> None:
    """In training mode, merging equal patches does not change the pooled output or its gradients."""
    model = without_blocks(**POOLINGS[pooling])
    nn.init.zeros_(model.pos_embed)
    kinds = torch.randn(3, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = [kinds[n].repeat(1, count, 8) for n, count in enumerate((5, 2, 1))]
    images = torch.cat(rows, 1).unsqueeze(0)
    plain = copy.deepcopy(model)
    ToMe(12).apply(model)
    outputs = [network.train()(images) for network in (plain, model)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    if "maximum" in pooling:  # With equal values, rounding decides the gradient.
        return
    for output in outputs:
        F.cross_entropy(output, torch.tensor([1])).backward()
    for name in ("pos_embed", "head.weight"):
        torch.testing.assert_close(model.get_parameter(name).grad, plain.get_parameter(name).grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"])
def test_models_that_classify_by_prefix_tokens_keep_merged_tokens(form: str) -> None:
    model: Any = small_vit(form).eval()
    ToMe(8).apply(model)
    assert model.forward_features(pictures()).shape[1] == model.num_prefix_tokens + 64 - 4 * 8


class OwnPooling(timm.models.VisionTransformer):
    """A model with a mean over all tokens, which `global_pool` does not describe."""

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x.mean(1))


def test_a_class_with_pooling_of_its_own_gets_all_tokens() -> None:
    model = without_blocks()
    model.__class__, model.norm = OwnPooling, nn.Identity()
    plain = model(pictures())
    ToMe(12).apply(model)
    torch.testing.assert_close(model(pictures()), plain, rtol=0, atol=1e-12)


def test_recomputed_blocks_pool_the_same() -> None:
    model = small_vit("vit_tiny_patch16_224 average")
    exact = copy.deepcopy(model)
    apply_methods(model, [ToMe(12), Checkpointing()])
    ToMe(12).apply(exact)
    grads = []
    for network in (model, exact):
        F.cross_entropy(network.train()(pictures()), torch.arange(2)).backward()
        grads.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    torch.testing.assert_close(grads[0], grads[1])
