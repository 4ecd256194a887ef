"""Tests of alternating timings and their statistics."""

from __future__ import annotations

from typing import Any

import pytest

from efficient_ft.bench.timing import alternate, summary


def test_rounds_alternate_and_ratios_pair_the_same_round():
    calls: list[str] = []
    times = {"a": iter([9.0, 4.0, 8.0, 6.0]), "b": iter([9.0, 2.0, 2.0, 6.0])}

    def call(name: str) -> Any:
        def timed() -> dict[str, float]:
            calls.append(name)
            return {"step": next(times[name])}

        return timed

    seconds = alternate({"a": call("a"), "b": call("b")}, rounds=3, warmup=1)
    assert calls == ["a", "b"] * 4
    assert seconds == {"a": {"step": [4.0, 8.0, 6.0]}, "b": {"step": [2.0, 2.0, 6.0]}}
    out = summary(seconds, "a")
    assert out["a"]["step"]["times_faster"]["median"] == 1
    assert out["b"]["step"]["times_faster"]["median"] == 2  # the median of 2, 4 and 1; the ratio of the medians is 3
    assert (out["b"]["step"]["q1"], out["b"]["step"]["q3"]) == (2, 4)
    assert out["b"]["step"]["times_faster"]["mean"] == pytest.approx(7 / 3)
    assert out["b"]["step"]["seconds"] == [2.0, 2.0, 6.0]
    assert summary(seconds, {"a": "b", "b": "b"})["a"]["step"]["times_faster"]["median"] == 0.5
