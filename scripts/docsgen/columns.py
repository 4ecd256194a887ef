"""Tables of recipes with a row for each recipe of a record. The columns are selected by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from docsgen import records
from docsgen.markdown import BLOCKS, block, cosine, duration, table
from docsgen.records import LABELS, MIB, command, recipe, saved, seconds
from efficient_ft.core.format import format_ratio


def _executed(file: str, name: str, *what: str) -> float:
    return sum(recipe(file, name)["executed"][f"{one}_flops"] for one in what)


def _counted(file: str, name: str) -> float:
    return recipe(file, name)["process"]["counted_bytes"] / MIB


def _trained_cosine(file: str, name: str) -> str:
    """Return the recorded cosine on the trained network, or "–" if it was not measured."""
    labels, record = ("gradients_trained", "gradient_bits") if file == "memory_process" else ("gradients", "gradient")
    return records.cosine(record, LABELS[labels][name]) if name in LABELS[labels] else "–"


#: Heading of each column, and the function that computes its value from the record and the recipe. ``{batch}`` in a
#: heading is replaced with the batch size of the record.
COLUMNS: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "parameters": ("parameters trained", lambda f, n: f"{recipe(f, n)['trainable_parameters'] / 1e6:.2f} M"),
    "forward": ("forward GFLOP / image", lambda f, n: f"{_executed(f, n, 'forward') / 1e9:.2f}"),
    "backward": ("backward GFLOP / image", lambda f, n: f"{_executed(f, n, 'backward') / 1e9:.2f}"),
    "both": ("forward + backward GFLOP / image", lambda f, n: f"{_executed(f, n, 'forward', 'backward') / 1e9:.1f}"),
    "backward-mflop": ("backward MFLOPs / image", lambda f, n: f"{_executed(f, n, 'backward') / 1e6:.0f}"),
    "saved": ("saved MiB / image", lambda f, n: f"{saved(f, n):.2f}"),
    "saved-1": ("saved MiB / image", lambda f, n: f"{saved(f, n):.1f}"),
    "saved-batch": ("saved MiB, batch of {batch}", lambda f, n: f"{saved(f, n) * records.load(f)['batch']:.1f}"),
    "peak": ("peak MiB of the batch", lambda f, n: f"{records.peak(f, n):.0f}"),
    "counted": ("counted MiB of a step", lambda f, n: f"{_counted(f, n):.0f}"),
    "growth-ratio": ("growth / counted", lambda f, n: f"{records.growth(f, n) / _counted(f, n):.2f}"),
    "optimizer": ("optimizer state, MiB", lambda f, n: f"{recipe(f, n)['process']['optimizer_bytes'] / MIB:.0f}"),
    "above": ("process above the interpreter, MiB", lambda f, n: f"{records.above_interpreter(f, n):.0f}"),
    "step": ("step", lambda f, n: duration(seconds(f, n))),
    "time": ("time / time of `full`", lambda f, n: format_ratio(records.time(f, n))),
    "step-exact": ("step / exact", lambda f, n: format_ratio(records.time(f, n))),
    "backward-step": ("backward", lambda f, n: duration(seconds(f, n, "backward"))),
    "backward-exact": ("backward / exact", lambda f, n: format_ratio(records.time(f, n, "backward"))),
    "operations": ("forward + backward / `full`", lambda f, n: format_ratio(records.time(f, n, "both"))),
    "operations-forward": ("forward / `full`", lambda f, n: format_ratio(records.time(f, n, "forward"))),
    "operations-backward": ("backward / `full`", lambda f, n: format_ratio(records.time(f, n, "backward"))),
    "calls": ("Python calls", lambda f, n: f"{recipe(f, n)['python_calls']}"),
    "cosine": ("cosine, this network", lambda f, n: records.cosine("gradient_random", n)),
    "cosine-trained": ("cosine, trained network", _trained_cosine),
    "error": ("relative error", lambda f, n: f"{recipe(f, n)['error']['blocks']['mean']:.3f}"),
    "cosine-mean": ("cosine", records.cosine),
    "cosine-range": (
        "lowest to highest batch",
        lambda f, n: " to ".join(cosine(recipe(f, n)["cosine"]["blocks"][end]) for end in ("min", "max")),
    ),
}  # fmt: skip


def cells(file: str, name: str, columns: str) -> list[str]:
    """Return the cells of one recipe for the given columns. ``COLUMN@bf16`` shows the same recipe in bf16."""
    found = []
    for column in columns.split():
        what, _, precision = column.partition("@")
        shown = records.in_bf16(file, name) if precision else name
        found.append("–" if shown is None else COLUMNS[what][1](file, shown))
    return found


def headings(columns: str, batch: int = 0) -> list[str]:
    """Return the headings of the given columns."""
    words = []
    for column in columns.split():
        what, _, precision = column.partition("@")
        words.append((f"{precision}: " if precision else "") + COLUMNS[what][0].format(batch=batch))
    return words


def measured(file: str, columns: str) -> str:
    """Return the given columns without those in bf16 if the record contains only one precision."""
    both = records.in_bf16(file, records.load(file).get("baseline", "")) is not None
    return " ".join(column for column in columns.split() if both or "@" not in column)


#: For each table name in a marker: the labels, the columns and the records of the table. If the records are empty, the
#: marker specifies the record.
TABLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "tokens": ("tokens", "both saved step time step@bf16 time@bf16 saved@bf16", ("tokens", "stacked")),
    "methods-cost": ("methods", "parameters backward-mflop saved step time step@bf16 time@bf16", ("methods",)),
    "memory": ("memory", "saved step time saved@bf16 step@bf16 time@bf16 cosine cosine-trained", ("memory",)),
    "memory-process": (
        "memory_process",
        "saved counted growth-ratio time saved@bf16 counted@bf16 growth-ratio@bf16 time@bf16 cosine-trained",
        ("memory_process",),
    ),
    "memory-gpu": ("memory_gpu", "step time peak", ()),
    "gigabyte": ("gigabyte", "parameters saved-1 optimizer above time saved-1@bf16 above@bf16 time@bf16", ()),
    "gradient": ("gradient", "saved error cosine-mean cosine-range", ()),
    "overhead": ("overhead", "operations operations-forward operations-backward calls", ("overhead",)),
    "low-rank-step": (
        "low_rank",
        "backward-mflop backward-step backward-exact step step-exact backward-step@bf16 backward-exact@bf16 step@bf16"
        " step-exact@bf16 saved-batch saved-batch@bf16",
        (),
    ),
}


def recipes(table_name: str, *files: str) -> str:
    """Return a table that `TABLES` defines. The row of the baseline ``full`` is taken only from the first record."""
    labels, columns, own = TABLES[table_name]
    files, shown = own or files, LABELS[labels]
    columns = measured(files[0], columns)
    of = [(file, name) for file in files for name in records.load(file)["recipes"] if name in shown]
    rows = [[shown[name], *cells(file, name, columns)] for file, name in of if file == files[0] or name != "full"]
    return table(["recipe", *headings(columns, records.load(files[0])["batch"])], rows)


BLOCKS |= {name: partial(recipes, name) for name in TABLES}


@block
def chosen(file: str, columns: str, *names: str) -> str:
    """Show some recipes of a record: ``chosen memory_process "saved cosine-trained time" low_bit back_razor``."""
    rows = [[LABELS[file][name], *cells(file, name, columns)] for name in names]
    return table(["recipe", *headings(columns)], rows)


@block
def compiled(*files: str) -> str:
    """Compare compiled recipes with the same recipes without ``trainer.compile``.

    The time for compilation is the difference between the first step and the median step.
    """
    rows = []
    for file in files:
        data = records.load(file)
        network = f"{LABELS['networks'][data['model']]}, {data['batch']}"
        for name, of in data["recipes"].items():
            if "compiled" not in of:
                continue
            label = LABELS["compiled"][of["baseline"].removesuffix(f" {of['dtype']}")]
            ratios = [format_ratio(records.time(file, name, part)) for part in ("step", "forward", "backward")]
            compilation = f"{of['first_step_seconds'] - seconds(file, name):.0f} s"
            rows.append([network, label, of["dtype"], duration(seconds(file, of["baseline"])), *ratios, compilation])
    head = ["network, batch size", "method", "precision", "step, not compiled", "compiled / not compiled: step"]
    return table([*head, "forward", "backward", "compilation"], rows, left=3)


@block
def counted(model: str) -> str:
    """Show the counted costs of every recipe on one model."""
    return table(["recipe", *headings(COUNTED)], counted_rows(model))


#: Columns that show counted costs, and columns that show measured costs.
COUNTED, MEASURED = "parameters forward backward saved peak", "step time step@bf16 time@bf16 saved peak"


def counted_rows(model: str, names: Sequence[str] | None = None) -> list[list[str]]:
    """Return a row of counted costs for each recipe of a model, or for each recipe in `names`."""
    of = records.load("counted")["models"][model]["recipes"]
    chosen = of if names is None else names
    return [[command(of[n]["arguments"]), *cells("counted", f"{model}/{n}", COUNTED)] for n in chosen]
