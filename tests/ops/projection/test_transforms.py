"""Tests of the constant matrices: sequencies, selections, ranks, padding and tiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_ft.ops.projection import CosineProjector, WalshProjector, backward_flops, low_pass_l1, low_pass_linf
from efficient_ft.ops.projection.transforms import (
    dct_rows,
    dct_tiles,
    dense,
    disjoint,
    pad_before_after,
    padded_axis,
    walsh,
    wht_tiles,
)
from tests.ops import reference


def test_walsh_rows_are_symmetric_orthogonal_and_in_sequency_order():
    h = walsh()
    np.testing.assert_array_equal(h, reference.sequency_hadamard())
    np.testing.assert_array_equal(h, h.T)
    np.testing.assert_array_equal(h @ h.T, 8 * np.eye(8))


def test_ranks_of_the_selections():
    assert [len(low_pass_l1(r)) for r in range(1, 16)] == [1, 3, 6, 10, 15, 21, 28, 36, 43, 49, 54, 58, 61, 63, 64]
    assert [len(low_pass_linf(r)) for r in range(1, 9)] == [r * r for r in range(1, 9)]
    assert set(low_pass_l1(2)) == {(0, 0), (0, 1), (1, 0)}  # the example in the paper


@pytest.mark.parametrize(
    ("side", "order", "zero", "ortho"), [(7, 8, 36, 34), (12, 4, 40, 32), (14, 8, 144, 136), (28, 4, 160, 144)]
)
def test_directions_that_vanish_are_dropped(side, order, zero, ortho):
    grid = (side, side)
    assert WalshProjector(low_pass_l1(order), "zero").projection(grid, 0, (1, 1)).rank == zero
    assert WalshProjector(low_pass_l1(order), "ortho").projection(grid, 0, (1, 1)).rank == ortho
    assert CosineProjector(order).projection(grid, 0, (64, 64)).rank == ortho


def test_padding_as_published():
    assert [pad_before_after(n) for n in (7, 8, 14, 28)] == [(1, 0), (0, 0), (1, 1), (2, 2)]
    np.testing.assert_array_equal(padded_axis(7, True) @ np.arange(7), [1, 0, 1, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match="axis of 3"):
        padded_axis(3, True)


@given(st.tuples(st.integers(1, 24), st.integers(1, 24)), st.integers(1, 15))
def test_ortho_rows_are_orthonormal_and_span_the_cropped_rows(grid, order):
    positions = grid[0] * grid[1]
    basis = dense(wht_tiles(grid, low_pass_l1(order), "ortho"), positions).analysis
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-10)
    cropped = dense(wht_tiles(grid, low_pass_l1(order), "zero"), positions).analysis
    np.testing.assert_allclose(cropped @ basis.T @ basis, cropped, atol=1e-10)


@given(st.tuples(st.integers(1, 24), st.integers(1, 24)), st.data())
def test_cosine_rows_are_orthonormal_and_lowest_first(grid, data):
    count = data.draw(st.integers(1, grid[0] * grid[1]))
    rows = dct_rows(grid, count)
    np.testing.assert_allclose(rows @ rows.T, np.eye(count), atol=1e-10)
    np.testing.assert_allclose(rows[0], np.full(grid[0] * grid[1], (grid[0] * grid[1]) ** -0.5))


def test_cosine_order_breaks_ties_by_row_then_column():
    from scipy.fft import dctn

    rows = dct_rows((4, 8), 6).reshape(6, 4, 8)
    places = [tuple(int(v) for v in np.argwhere(np.abs(dctn(r, norm="ortho")) > 0.5)[0]) for r in rows]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]  # (0,2) and (1,0) have the same frequency


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data()
)
def test_cosine_tiles_share_out_all_rows(heights, widths, data):
    grid = (sum(heights), sum(widths))
    count = data.draw(st.integers(len(heights) * len(widths), grid[0] * grid[1]))
    tiles = dct_tiles(grid, (heights, widths), count)
    assert sum(len(t.analysis) for t in tiles) == count
    assert all(1 <= len(t.analysis) <= len(t.positions) for t in tiles)
    assert sorted(p for t in tiles for p in t.positions) == list(range(grid[0] * grid[1]))


def test_tiles_that_share_positions_are_merged():
    tiles = wht_tiles((17, 8), low_pass_l1(2), "reflect")  # the last reflection reaches the previous block
    assert len(tiles) == 3
    merged = disjoint(tiles, 17 * 8)
    positions = np.concatenate([t.positions for t in merged])
    assert sorted(positions) == list(range(17 * 8))
    np.testing.assert_allclose(
        np.sort(dense(merged, 136).analysis.sum(1)), np.sort(dense(tiles, 136).analysis.sum(1)), atol=1e-12
    )


@pytest.mark.parametrize("channels", [(48, 192), (96, 384), (224, 896)])
@pytest.mark.parametrize("side", [28, 56, 64])
@pytest.mark.parametrize("order", [2, 4, 6])
def test_large_cosine_tiles_never_cost_more_than_the_published_transform(side, order, channels):
    cosine = CosineProjector(order).projection((side, side), 0, channels)
    published = WalshProjector(low_pass_l1(order), "zero").projection((side, side), 0, channels)
    assert backward_flops(cosine, channels)[1] <= backward_flops(published, channels)[1]


@given(st.tuples(st.integers(1, 20), st.integers(1, 20)), st.integers(0, 3), st.integers(1, 15))
def test_the_sum_over_tokens_is_read_off_the_coefficients(grid, prefix, order):
    projection = WalshProjector(low_pass_l1(order)).projection(grid, prefix, (1, 1))
    assert projection.ones is not None  # every low-pass span contains the constant map
    assert projection.tokens == prefix + grid[0] * grid[1]
