"""Blocks about memory: activations, moments, allocators, predictions."""

from __future__ import annotations

import statistics
from pathlib import Path

from docsgen import labels, records
from docsgen.block import block
from docsgen.markdown import cosine, duration, table, times


@block
def memory(page: Path) -> str:
    """DeiT-S: how activations are kept, with gradient cosines."""
    rows = []
    for name in records.load("memory")["recipes"]:
        trained = labels.TRAINED.get(name)
        rows.append(
            [
                labels.MEMORY[name],
                f"{records.saved('memory', name):.2f}",
                f"{records.peak('memory', name):.0f}",
                duration(records.seconds("memory", name)),
                times(records.time("memory", name)),
                _cosine("gradient_random", name),
                _cosine("gradient", trained) if trained else "–",
            ]
        )
    head = ["recipe", "saved MiB / image", "peak MiB, batch", "step", "time / time of `full`"]
    return table([*head, "cosine, this network", "cosine, trained network"], rows)


@block
def memory_felt(page: Path) -> str:
    """DeiT-S: what autograd stores, and by how much the process grows."""
    rows = []
    for name, record in records.load("memory_felt")["recipes"].items():
        label, gradient = labels.MEMORY_FELT[name]
        growth, counted = records.growth("memory_felt", name), record["process"]["counted_bytes"] / records.MIB
        rows.append(
            [
                label,
                f"{records.saved('memory_felt', name):.2f}",
                f"{counted:.0f}",
                f"{growth:.0f}",
                f"{growth / counted:.2f}",
                times(records.time("memory_felt", name)),
                _cosine("gradient_bits", gradient) if gradient else "1",
            ]
        )
    head = ["recipe", "saved MiB / image", "counted MiB of a step", "process grows by, MiB", "grows by / counted"]
    return table([*head, "time / time of `full`", "cosine, trained network"], rows)


@block
def allocators(model: str, page: Path) -> str:
    """One model: by how much the process grows with each allocator, relative to what is counted."""
    recipes = records.load("allocators")["models"][model]["recipes"]
    names = [name for name in ("keep", "mimalloc", "tcmalloc") if name in next(iter(recipes.values()))]
    rows = []
    for recipe, by_allocator in recipes.items():
        counted = by_allocator[names[0]]["counted_bytes"]
        ratios = [f"{by_allocator[name]['memory']['growth_bytes'] / counted:.2f}" for name in names]
        rows.append([labels.ALLOCATORS[recipe], f"{counted / records.MIB:.0f}", *ratios])
    return table(["recipe", "counted MiB of a step", *(f"`{name}`: grows by / counted" for name in names)], rows)


@block
def optimizer_states(page: Path) -> str:
    """Low-bit AdamW: largest steps, errors and bytes, relative to AdamW in 32 bits."""
    data = records.load("optimizer_states")
    cases = list(next(iter(data["optimizers"].values()))["cases"])
    shown = (cases[0], cases[-2], cases[-1])
    rows = []
    for name, record in data["optimizers"].items():
        largest = [
            f"{size:.2f}×" if (size := record["cases"][case]["largest"]) < 100 else f"{size:,.0f}×" for case in cases
        ]
        errors = [f"{record['cases'][case]['error']:.2g}" for case in shown]
        rows.append([name, *largest, *errors, f"{record['cases'][cases[-1]]['size']:.2f}×"])
        rows[-1].append(f"{record['bytes_per_value']:.3f}")
    head = ["optimizer", *(f"largest step, {case}" for case in cases), *(f"error, {case}" for case in shown)]
    head.append(f"last steps, {cases[-1]}")
    return f"{table([*head, 'bytes per value'], rows)}\n\n{records.conditions('optimizer_states')}"


@block
def allocators_conditions(page: Path) -> str:
    """How allocators were measured, and how fast their steps are."""
    data = records.load("allocators")
    environment = data["environment"]
    recipes = data["models"]["deit_small"]["recipes"].values()
    ratios = [
        f"{statistics.median(min(r[name]['seconds']) / min(r['keep']['seconds']) for r in recipes):.2f}× with `{name}`"
        for name in ("mimalloc", "tcmalloc")
    ]
    return (
        f"Measured on {environment['device']}, {environment['threads']} threads, torch"
        f" {environment['torch'].partition('+')[0]}, {data['dtype']}, AdamW, {environment['date'][:10]}, every recipe"
        " and allocator in a process of its own. The shortest step of DeiT-S took, relative to the one with `keep`, the"
        f" median over the recipes: {', '.join(ratios)}. Record: `{records.path('allocators')}`."
    )


@block
def gigabyte(file: str, page: Path) -> str:
    """ViT-B/16: the process at its peak in training, and the time of a step."""
    rows = []
    for name, record in records.load(file)["recipes"].items():
        rows.append(
            [
                labels.GIGABYTE[name],
                f"{record['trainable_parameters'] / 1e6:.1f}",
                f"{records.saved(file, name):.1f}",
                f"{record['process']['optimizer_bytes'] / records.MIB:.0f}",
                f"{records.above_interpreter(file, name):.0f}",
                times(records.time(file, name)),
            ]
        )
    head = ["recipe", "trained parameters, M", "saved MiB / image", "optimizer's state, MiB"]
    return table([*head, "process above the interpreter, MiB", "time / time of `full`"], rows)


@block
def plan_predictions(page: Path) -> str:
    """How far the predictions of plans were off, and how many runs kept their budgets."""
    data = records.load("plans")
    cases = data["cases"]
    trained = [case for case in cases if case["outcome"] == "measured"]
    stopped = [case for case in cases if case["outcome"].startswith("not trained")]
    above = len(stopped) + sum(case["process"][1] > case["memory_bytes"] for case in trained)
    rows = []
    for key, label in labels.PREDICTIONS.items():
        off = sorted(abs(case[key][0] / case[key][1] - 1) for case in trained)
        cells = [statistics.median(off), off[int(0.9 * (len(off) - 1))], off[-1]]
        rows.append([label, *(f"{cell:.1%}".replace("%", " %") for cell in cells)])
    seconds = [case["planning_seconds"] for case in cases if "planning_seconds" in case]
    environment = data["environment"]
    twice = [case["first"] for case in cases if "first" in case]
    first = sorted(abs(case["step"][0] / case["step"][1] - 1) for case in twice)
    text = (
        f"{len(cases)} cases: in {len(trained)} the recipe recommended was trained; in the others nothing fit, or only"
        f" recipes that lose more than a point or an unknown amount. **{above} of the"
        f" {len(trained) + len(stopped)} runs took more than their budget.** A plan took"
        f" {statistics.median(seconds):.0f} s (median), {max(seconds):.0f} s at most, on {environment['device']},"
        f" {environment['threads']} threads, {environment['date'][:10]}."
    )
    if twice:
        text += (
            f" {len(twice)} cases were checked twice, since their step time was off by more than 15 % (by up to"
            f" {first[-1]:.0%}): the machine was slower for minutes at a time. Their second measurement counts."
        ).replace("%)", " %)")
    head = ["predicted", "off by, median", "90 % are off by at most", "largest"]
    return f"{table(head, rows)}\n\n{text} Record: `{records.path('plans')}`, with both."


def _cosine(file: str, name: str) -> str:
    return cosine(records.recipe(file, name)["cosine"]["blocks"]["mean"])


@block
def memory_gpu(page: Path) -> str:
    """ViT-B/16 on a GPU, in fp32 and bf16."""
    rows = []
    for name in records.load("memory_gpu")["recipes"]:
        cells = [labels.GPU[name]]
        for file in ("memory_gpu", "memory_gpu_bf16"):
            if name in records.load(file)["recipes"]:
                cells += [
                    duration(records.seconds(file, name)),
                    times(records.time(file, name)),
                    f"{records.peak(file, name):.0f}",
                ]
            else:
                cells += ["", "", ""]
        rows.append(cells)
    columns = (" step", ": time / time of `full`", " peak MiB")
    parts = [f"{precision}{what}" for precision in ("fp32", "bf16") for what in columns]
    return table(["recipe", *parts], rows)


@block
def gradients(page: Path) -> str:
    """Gradient error and cosine of every recipe measured on the trained network."""
    rows = [
        [
            labels.current(name),
            f"{records.saved('gradient', name):.2f}",
            f"{recipe['error']['blocks']['mean']:.3f}",
            cosine(recipe["cosine"]["blocks"]["mean"]),
            f"{cosine(recipe['cosine']['blocks']['min'])} to {cosine(recipe['cosine']['blocks']['max'])}",
        ]
        for name, recipe in records.load("gradient")["recipes"].items()
        if name != "full"
    ]
    return table(["recipe", "saved MiB / image", "relative error", "cosine", "lowest to highest batch"], rows)
