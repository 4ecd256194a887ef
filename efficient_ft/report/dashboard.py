"""Upload of finished runs to Weights & Biases, and a report with panels that correspond to the figures of papers.

With ``offline``, wandb stores the runs locally for ``wandb sync`` instead. `write_panels` writes the definitions of the
panels as JSON.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from efficient_ft.core.errors import UserError, first_line
from efficient_ft.record.collection import Collection
from efficient_ft.record.files import write_text_atomically
from efficient_ft.record.rows import MetricsFile
from efficient_ft.report.runs import budgets_of, names_of

#: Title, kind, x values and y values of each panel. The kind is ``curves`` (training curves) or ``points`` (one point
#: per run). A name that ends with ``/.*`` matches several columns. For accuracy.final, see
#: `record.results.final_accuracy`.
PANELS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("Accuracy against FLOPs of the run", "points", "totals.flops", ("accuracy.final",)),
    ("Accuracy against kept bytes per image", "points", "cost.executed.saved_bytes", ("accuracy.final",)),
    ("Accuracy against peak memory", "points", "cost.measured.peak_bytes", ("accuracy.final",)),
    ("Accuracy against time", "points", "totals.seconds", ("accuracy.final",)),
    ("Accuracy against energy", "points", "totals.joules", ("accuracy.final",)),
    # Runs of published recipes record test_accuracy, because such runs select the best epoch on the test images.
    ("Accuracy over FLOPs", "curves", "flops", ("val_accuracy", "test_accuracy")),
    ("Accuracy over time", "curves", "seconds", ("val_accuracy", "test_accuracy")),
    ("Training loss", "curves", "Step", ("train_loss",)),
    ("Budgets of the blocks", "curves", "Step", ("budget/.*",)),
)


def upload(found: Collection, *, project: str, entity: str | None, offline: bool, out: Path) -> list[str]:
    """Upload each run to wandb under its run id, and return the names of the runs.

    The uploaded data is equal to the data that a run with the wandb logger logs. `entity` is the name of a user or
    team, or None for the user who is logged in. With `offline`, wandb stores the runs in the folder `out` instead.

    Raises:
        UserError: If wandb is not installed or cannot start.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise UserError('dashboard requires wandb. Run: pip install "efficient-ft[wandb]"') from error
    from efficient_ft.training.output.loggers import define_metrics, summary_of

    out.mkdir(parents=True, exist_ok=True)
    names = names_of(found.runs)
    for run, name in zip(found.runs, names, strict=True):
        identity = run.path / "run_id"
        try:
            sent: Any = wandb.init(
                project=project,
                entity=entity,
                id=identity.read_text().strip() if identity.is_file() else None,
                name=name,
                group=run.method,
                job_type="train",
                config=run.results["config"],
                dir=out,
                mode="offline" if offline else "online",
                resume="allow" if not offline else None,
                reinit="finish_previous",
                settings=wandb.Settings(silent=True),  # wandb still prints warnings
            )
        except Exception as error:  # wandb exceptions have several base classes
            raise UserError(
                f"dashboard: wandb cannot start ({first_line(error)}). Use --offline, or log in with `wandb login`."
            ) from error
        define_metrics(sent)
        for step, values in _history(run.path).items():
            sent.log(values, step)
        sent.summary.update(summary_of(run.results))
        sent.finish()
    return names


def _history(folder: Path) -> dict[int, dict[str, Any]]:
    found: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for row in MetricsFile(folder).read():
        found[row["step"]].update((key, value) for key, value in row.items() if key != "step" and value is not None)
    budgets = budgets_of(folder)
    if budgets is not None:
        for step, values in zip(budgets["steps"], budgets["values"], strict=True):
            found[step].update(zip((f"budget/{block}" for block in budgets["blocks"]), values, strict=True))
    return dict(sorted(found.items()))


def write_panels(path: Path, title: str) -> None:
    """Write the definitions of the panels in `create_report` as JSON."""
    panels = [{"title": title_of, "kind": kind, "x": x, "y": y} for title_of, kind, x, y in PANELS]
    write_text_atomically(path, json.dumps({"title": title, "panels": panels}, indent=2) + "\n")


def create_report(title: str, project: str, entity: str | None) -> str:
    """Create a report with `PANELS` on the wandb server, and return the URL of the report.

    Raises:
        UserError: If wandb-workspaces is not installed, or the report cannot be saved.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
    except ModuleNotFoundError as error:
        raise UserError("dashboard requires wandb-workspaces. Run: pip install wandb-workspaces") from error
    runset = wr.Runset(entity=entity or "", project=project)
    try:
        report = wr.Report(project=project, entity=entity or "", title=title,
                           blocks=[wr.PanelGrid(runsets=[runset], panels=_panels())])  # fmt: skip
        report.save()
        return str(report.url)
    except Exception as error:  # wandb's exceptions have no common base class
        raise UserError(f"dashboard: the report cannot be saved: {first_line(error)}") from error


def _panels() -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    return [
        wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(y[0]))
        if kind == "points"
        else wr.LinePlot(title=title, x=x, metric_regex=y[0])
        if y[0].endswith("/.*")
        else wr.LinePlot(title=title, x=x, y=list(y))
        for title, kind, x, y in PANELS
    ]
