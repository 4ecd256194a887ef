"""Tests of token selection in float64 against NumPy references for each sample and token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efficient_ft.ops.tokens import Tokens, class_attention, drop, match, merge, num_kept


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_num_kept_is_that_of_the_number_as_written():
    assert [num_kept(n, 0.5) for n in (196, 99, 51, 27)] == [98, 50, 26, 14]
    assert num_kept(30, 0.1) == 3
    assert num_kept(10, 0.7) == 7
    assert num_kept(196, 1.0) == num_kept(196, 1) == 196
    assert num_kept(3, 0.01) == 1


@pytest.mark.parametrize("prefix", [1, 2, 5])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_class_attention_is_the_class_token_s_row_of_the_whole_map(prefix, scale):
    q, k = random(2, 3, 17, 8), random(2, 3, 17, 8, seed=1)
    whole = (q @ k.mT * (8**-0.5 if scale is None else scale)).softmax(-1)
    found = class_attention(q, k, prefix, scale)
    torch.testing.assert_close(found, whole.mean(1)[:, 0, prefix:], rtol=1e-12, atol=1e-14)
    halves = q.bfloat16(), k.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = class_attention(*halves, prefix, scale)
    assert half.dtype == torch.float32
    exact = class_attention(halves[0].double(), halves[1].double(), prefix, scale)
    torch.testing.assert_close(half.double(), exact, rtol=1e-5, atol=1e-7)


def test_gradients_of_class_attention_are_those_of_the_whole_map():
    q, k, g = random(2, 3, 9, 8), random(2, 3, 9, 8, seed=1), random(2, 8, seed=2)
    for tensors in ((q, k), (q[:, :, 2:], k), (q.float(), k.float())):
        q_, k_ = (t.detach().requires_grad_() for t in tensors)
        whole = (q_ @ k_.mT * 8**-0.5).softmax(-1).mean(1)[:, 0, 1:]
        expected = torch.autograd.grad((whole * g).sum(), (q_, k_))
        found = torch.autograd.grad((class_attention(q_, k_, 1) * g).sum(), (q_, k_))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 1e-11, atol=1e-7)


def test_places_follow_the_tokens_through_drops_and_fusions():
    """Each remaining token has its grid index after any number of drops and fusions."""
    prefix, positions = 2, 12
    x = torch.cat([random(3, prefix, 4), random(3, positions, 4, seed=1)], 1)
    grid = x[:, prefix:].clone()
    tokens = Tokens.full(x, prefix, positions)
    for seed, (keep, fuse) in enumerate([(9, True), (7, True), (5, False), (3, True)]):
        scores = random(3, x.shape[1] - prefix, seed=10 + seed)
        x, index = drop(x, scores, prefix, keep, fuse)
        tokens = tokens.dropped(index, positions, fuse)
        assert tokens.grid_index_BL is not None
        assert tokens.grid_index_BL.shape == (3, x.shape[1] - prefix)
        for sample in range(3):
            for token, place in zip(x[sample, prefix:], tokens.grid_index_BL[sample].tolist(), strict=True):
                assert place >= positions or torch.equal(token, grid[sample, place])
        scattered = tokens.on_grid(x, prefix, positions)
        assert torch.equal(scattered[scattered.any(-1)], grid[scattered.any(-1)])
        assert (tokens.columns_BN(prefix)[:, :prefix] == torch.arange(prefix)).all()
    assert tokens.fused == 3
    assert len(set(tokens.grid_index_BL[0].tolist())) == x.shape[1] - prefix


def dropped_by_hand(x: np.ndarray, scores: np.ndarray, prefix: int, kept: int, fuse: bool) -> np.ndarray:
    out = []
    for sample, score in zip(x, scores, strict=True):
        ranked = sorted(range(len(score)), key=lambda i: (-score[i], i))
        tokens = [*sample[:prefix], *(sample[prefix + i] for i in ranked[:kept])]
        if fuse and kept < len(score):
            tokens.append(sum(score[i] * sample[prefix + i] for i in ranked[kept:]))
        out.append(np.stack(tokens))
    return np.stack(out)


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    patches=st.integers(1, 12),
    prefix=st.integers(1, 3),
    keep=st.floats(0.01, 1),
    fuse=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dropping_and_fusing_equals_doing_it_by_hand(batch, patches, prefix, keep, fuse, ties, seed):
    x = random(batch, prefix + patches, 5, seed=seed).requires_grad_()
    scores = random(batch, patches, seed=seed + 1).softmax(-1)
    scores = ((scores * 4).round() / 4 if ties else scores).requires_grad_()
    kept = num_kept(patches, keep)
    found, index = drop(x, scores, prefix, kept, fuse)
    expected = dropped_by_hand(x.detach().numpy(), scores.detach().numpy(), prefix, kept, fuse)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12)
    assert index.shape == (batch, kept + (fuse and kept < patches))
    torch.testing.assert_close(
        found[:, prefix : prefix + kept], x[:, prefix:].gather(1, index[:, :kept, None].expand(-1, -1, 5))
    )
    assert (index.sort(1).values.diff() > 0).all(), "all indices are unique"
    assert (scores.gather(1, index).diff() <= 0).all(), "the index of a fused token is that of its most important token"


def test_gradients_flow_through_the_tokens_and_the_scores_of_a_fused_one():
    x, scores = random(2, 7, 3).requires_grad_(), random(2, 6, seed=1).softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, s: drop(x, s, 1, 2, True)[0], (x, scores))
    (by_scores,) = torch.autograd.grad(drop(x, scores, 1, 2, True)[0].sum(), scores)
    assert (by_scores != 0).sum() == 2 * 4, "those of what is dropped"


def test_keeping_everything_only_reorders():
    x, scores = random(2, 9, 4), random(2, 8, seed=1).softmax(-1)
    found, index = drop(x, scores, 1, 8, True)
    assert found.shape == x.shape
    torch.testing.assert_close(found[:, 1:].gather(1, index.argsort(1)[..., None].expand(-1, -1, 4)), x[:, 1:])


# ------------------------------------------------------------------------------------------------ ToMe
def merged_by_hand(
    x: np.ndarray, size: np.ndarray, metric: np.ndarray, r: int, prefix: int
) -> tuple[np.ndarray, np.ndarray]:
    tokens, sizes = [], []
    for sample, many, keys in zip(x, size, metric, strict=True):
        n = len(sample)
        a, b = range(0, n, 2), range(1, n, 2)
        edges = []
        for i in a:
            if i < prefix:
                continue
            likeness = {
                j: keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j]) for j in b if j >= prefix
            }
            j = max(likeness, key=lambda j: (likeness[j], -j))
            edges.append((-likeness[j], i, j))
        pairs = {i: j for _, i, j in sorted(edges)[:r]}
        groups = [[i] for i in range(min(prefix, n))]
        groups += [[i] for i in a if i >= prefix and i not in pairs]
        groups += [[j, *(i for i, t in pairs.items() if t == j)] for j in b if j >= prefix]
        tokens.append(np.stack([sum(many[i] * sample[i] for i in g) / sum(many[i] for i in g) for g in groups]))
        sizes.append([sum(many[i] for i in g) for g in groups])
    return np.stack(tokens), np.array(sizes)


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    patches=st.integers(2, 14),
    prefix=st.integers(1, 4),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_merging_equals_doing_it_by_hand(batch, patches, prefix, share, seed):
    n = prefix + patches
    sources = len([i for i in range(0, n, 2) if i >= prefix])
    r = math.floor(share * min(sources, patches // 2))
    x, metric = random(batch, n, 5, seed=seed), random(batch, n, 3, seed=seed + 1)
    size = torch.randint(1, 5, (batch, n), generator=torch.Generator().manual_seed(seed)).double()
    found, sizes = merge(x, size, match(metric, r, prefix), n - r)
    expected, many = merged_by_hand(x.numpy(), size.numpy(), metric.numpy(), r, prefix)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    np.testing.assert_array_equal(sizes.numpy(), many)
    assert found.shape[1] == n - r
    torch.testing.assert_close(sizes.sum(1), size.sum(1))
    torch.testing.assert_close((found * sizes[..., None]).sum(1), (x * size[..., None]).sum(1))


def test_prefix_tokens_come_out_as_they_went_in():
    for prefix in (1, 2, 5):
        x, size = random(2, prefix + 12, 5), torch.ones(2, prefix + 12, dtype=torch.float64)
        found, sizes = merge(x, size, match(random(2, prefix + 12, 3, seed=3), 5, prefix), prefix + 7)
        assert torch.equal(found[:, :prefix], x[:, :prefix])
        assert (sizes[:, :prefix] == 1).all()


def test_gradients_of_merging_are_those_of_the_means():
    x, size = random(2, 9, 3).requires_grad_(), torch.randint(1, 5, (2, 9)).double()
    place = match(random(2, 9, 4, seed=1), 3, 1)
    assert torch.autograd.gradcheck(lambda x: merge(x, size, place, 6)[0], x)


def test_sizes_and_similarity_are_exact_where_tokens_are_not():
    """Sizes and similarities do not use bfloat16, which cannot represent 257 and produces equal similarities."""
    metric = random(1, 1, 4) + 0.02 * random(1, 64, 4, seed=1)
    size = torch.tensor([[200.0, 1, 57, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    place = torch.tensor([[0, 1, 0, *range(2, 11)]])
    found, sizes = merge(random(1, 12, 4).bfloat16(), size, place, 11)
    assert found.dtype == torch.bfloat16
    assert sizes[0, 0] == 257
    with torch.autocast("cpu", torch.bfloat16):
        again = match(metric.float(), 16, 1)
    assert torch.equal(again, match(metric.float(), 16, 1))


def test_proportional_attention_is_attention_to_all_the_copies():
    """Adding log(size) to the scores equals attention to that number of equal tokens."""
    q, k, v = (random(1, 2, n, 4, seed=s) for s, n in ((0, 3), (1, 3), (2, 3)))
    size = torch.tensor([1, 3, 2])
    together = F.scaled_dot_product_attention(q, k, v, attn_mask=size.double().log().expand(1, 1, 3, 3))
    one_by_one = F.scaled_dot_product_attention(q, k.repeat_interleave(size, 2), v.repeat_interleave(size, 2))
    torch.testing.assert_close(together, one_by_one)
