"""Figure of a learning rate range test: the loss and its moving average over the learning rate."""

from __future__ import annotations

from efficient_ft.record.lr_test import RangeTest, Suggestion
from efficient_ft.report.charts import Chart, Panel, Series


def lr_chart(test: RangeTest, found: Suggestion, method: str) -> Chart:
    """Return a chart of the losses, the smoothed losses and the suggested learning rate."""
    series = [Series("training loss", test.rates, test.losses), Series("smoothed", test.rates, test.smoothed)]
    if found.lr is not None:
        finite = [*test.losses, *test.smoothed]
        series.append(Series(f"suggested: {found.lr:g}", [found.lr] * 2, [min(finite), max(finite)]))
    return Chart(f"Learning rate range test, {method}", [Panel("", "optim.lr", "loss", series, log=True)])
