"""Tests that the documentation is correct: generated parts are current, commands compose, code runs and names exist."""

from __future__ import annotations

import os
import re
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from efficient_ft.cli.commands import COMMANDS
from efficient_ft.cli.commands.auto import OF_A_SEARCH
from efficient_ft.cli.commands.plan import OF_A_PLAN
from efficient_ft.cli.hydra.compose import configurations
from efficient_ft.cli.hydra.groups import CONF, register
from efficient_ft.cli.hydra.verbs import VERBS, as_settings
from efficient_ft.config import setting_names
from efficient_ft.core.packages import option_settings
from tests.conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
CARDS = sorted(page for page in (REPOSITORY / "docs" / "methods").glob("*.md") if page.stem != "index")

#: First words of the command ``efficient-ft`` that are not settings.
SUBCOMMANDS = tuple(COMMANDS)

SECTIONS = ["What it does", "When to use it", "Settings", "Cost", "What it does not do", "Paper", "Our deviations"]

FENCE = re.compile(
    r"^(?P<skip><!-- not run: .+ -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fences(page: Path, *languages: str, skipped: bool = False) -> list[str]:
    """Return the fenced blocks of a page that the tests run. `skipped` adds the blocks with the mark "not run"."""
    found = FENCE.finditer(text(page))
    return [m["code"] for m in found if m["language"] in languages and (skipped or not m["skip"])]


def inline(page: Path) -> list[str]:
    """Return the inline code of a page, without fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text(page)))


# ---------------------------------------------------------------------------------------------- generated
def run_docs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/docs.py", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=environment())


def environment() -> dict[str, str]:
    """Return environment variables that select one thread and the package of this checkout."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def test_generated_tables_numbers_and_figures_are_current():
    done = run_docs("--check")
    assert done.returncode == 0, f"run: python scripts/docs.py\n{done.stdout}{done.stderr}"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the module that generates pages, with a temporary page folder and no figures."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from docsgen import pages

    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "pages", lambda: sorted(tmp_path.glob("*.md")))
    monkeypatch.setattr(pages.figure, "wanted", list)
    (tmp_path / "mkdocs.yml").write_text(text(REPOSITORY / "mkdocs.yml"), encoding="utf-8")
    return pages


def test_the_check_shows_a_card_that_the_navigation_lacks(generator, tmp_path):
    assert generator.stale() == []
    site = tmp_path / "mkdocs.yml"
    site.write_text(text(site).replace("          - Mesa: methods/mesa.md\n", ""), encoding="utf-8")
    assert "+          - Mesa: methods/mesa.md" in generator.stale()


def test_the_check_shows_a_number_changed_by_hand(generator, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("It takes <!-- = time memory full -->1.00×<!-- / --> the time.\n", encoding="utf-8")
    assert generator.stale() == []
    page.write_text(text(page).replace("1.00", "0.99"), encoding="utf-8")
    assert any(line.startswith("+") and "-->1.00×<!--" in line for line in generator.stale())


def test_the_check_shows_a_table_changed_by_hand(generator, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: low-rank-layer -->\n<!-- end -->\n", encoding="utf-8")
    page.write_text(generator.filled(page, text(page)), encoding="utf-8")
    assert "448 → 1792" in text(page)
    assert generator.stale() == []
    page.write_text(text(page).replace("448 →", "449 →"), encoding="utf-8")
    assert generator.stale()


@pytest.mark.parametrize(
    "wrong",
    [
        "<!-- generated: memory -->\n",
        "a <!-- = time memory full --> b\n",
        "a <!-- = tyme memory full -->1<!-- / -->\n",
        "<!-- = time memory full -->1<!-- / --> begins a line\n",
        "<!-- generated: no-such-block -->\n<!-- end -->\n",
    ],
)
def test_a_broken_marker_is_an_error(generator, tmp_path, wrong):
    with pytest.raises(ValueError, match=r"page\.md: "):
        generator.filled(tmp_path / "page.md", wrong)


def test_a_ratio_is_the_median_over_rounds_of_the_same_file(generator):
    from docsgen import records

    full = records.load("tokens")["recipes"]["full"]["measured"]["step"]["seconds"]
    own = records.load("tokens")["recipes"]["bsr"]["measured"]["step"]["seconds"]
    ratio = statistics.median(b / a for a, b in zip(full, own, strict=True))
    assert records.time("tokens", "bsr") == pytest.approx(ratio)
    assert records.time("tokens", "full") == 1
    assert 1 / records.faster("tokens", "bsr") == pytest.approx(records.time("tokens", "bsr"), rel=0.01)


def test_a_cosine_that_was_not_measured_is_unknown(generator):
    from docsgen import columns, records

    assert columns.cells("memory_process", "bsr+low_bit+lbp_dct", "cosine-trained") == ["–"]
    assert columns.cells("memory_process", "low_bit", "cosine-trained") == [records.cosine("gradient_bits", "low_bit")]
    assert columns.cells("memory", "back_razor", "cosine-trained") != ["–"]


def test_the_table_of_the_process_shows_every_recipe_of_its_record(generator):
    from docsgen import records

    recipes = {name for name in records.load("memory_process")["recipes"] if not name.endswith(" bf16")}
    assert recipes == set(records.LABELS["memory_process"])


def test_a_compiled_recipe_is_compared_with_the_same_recipe(generator):
    from docsgen import columns, records

    table = columns.compiled("compiled_efficientformer")
    unchanged = records.time("compiled_efficientformer", "unchanged_compiled", baseline="unchanged")
    assert "(prefix unchanged) | bf16 | " in table
    assert f" | {unchanged:.2f}× | " in table


def test_the_rows_of_a_study_are_compared_with_its_rows_in_bf16(generator):
    from docsgen import studies

    runs = {(run["row"], run["seed"]): run for run in studies.records("vit_digits_precisions").runs}
    assert {row.removesuffix(" bf16") for row, _ in runs} <= {row for row, _ in runs}
    bf16, fp32 = runs["full+mesa bf16", 0]["settings"], runs["full+mesa", 0]["settings"]
    assert [(a, b) for a, b in zip(fp32, bf16, strict=True) if a != b] == [
        ("trainer.precision=fp32", "trainer.precision=bf16")
    ]
    table = studies.both_precisions("vit_digits_precisions")
    means = [
        statistics.mean(studies.test_accuracy(run) for (name, _), run in runs.items() if name == row)
        for row in ("full+mesa", "full+mesa bf16")
    ]
    assert f"| `full+mesa` | {means[0]:.1f} ± " in table
    assert f"| {means[1]:.1f} ± " in table


def test_the_formula_of_lbp_wht_reproduces_the_example_of_the_paper(generator):
    from docsgen import others

    assert others.low_rank_flops(3072, 768, 49) == pytest.approx(462.4e6, rel=1e-3)
    assert others.low_rank_flops(3072, 768, 49, 8) == pytest.approx(78.2e6, rel=1e-3)
    assert len(others.last_stage()) == 10
    assert sum(others.low_rank_flops(*layer, 49, 3) for layer in others.last_stage()) == pytest.approx(95.5e6, rel=1e-3)


def test_published_numbers_of_others_are_divided_by_the_baseline_of_their_source(generator):
    from docsgen import others

    lines = others.others().splitlines()
    assert len(lines) == 2 + len(others.OTHERS["compared"])
    assert "| +6.7 points | +1.3 points |" in lines[2]
    assert "| 0.65× | 0.74× |" in lines[3]
    assert "| 0.21× to 0.57× | 0.27× |" in next(line for line in lines if "Adaptive" in line)


def test_every_cpu_record_says_that_the_machine_was_busy(generator):
    from docsgen import records

    for file in records.FILES:
        data = records.load(file)
        load = (data.get("environment") or {}).get("load")
        if load is not None and data.get("kind") in ("step", "layer", "loop"):
            assert ("above the limit" in records.conditions(file)) == (load > records.BUSY)


# ---------------------------------------------------------------------------------------------- commands
def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of every command of the program in blocks and inline code."""
    for page in PAGES:
        shown = [
            line for block in fences(page, "bash", skipped=True) for line in block.replace("\\\n", " ").splitlines()
        ]
        shown += [code.replace("\\|", "|") for code in inline(page)]
        for line in shown:
            words = line.split(" && ")[-1]
            for begin in ("efficient-ft", "python train.py"):
                if words == begin or words.startswith(f"{begin} "):
                    yield name(page), shlex.split(words.removeprefix(begin), comments=True)


@pytest.mark.slow
def test_every_command_composes_and_its_methods_can_be_stacked():
    from efficient_ft.methods.build import build_methods

    register()
    composed = 0
    for page, words in dict.fromkeys((page, tuple(words)) for page, words in commands()):
        if not words or words[0] in SUBCOMMANDS or "..." in words or words[0] == "...":
            continue
        sweep = "-m" in words
        flags = {"-m", "--help", "--cfg", "job"}
        overrides = [word for word in words if word not in flags]
        if words[0] == "evaluate" or any(word.startswith("evaluate=") for word in overrides):
            continue  # requires a run
        try:
            for config in configurations(CONF, "train", as_settings(overrides), sweep=sweep):
                build_methods(config)
                composed += 1
        except Exception as error:
            raise AssertionError(f"{page}: efficient-ft {shlex.join(words)}: {error}") from error
    assert composed > 30


def test_subcommands_exist():
    from efficient_ft.cli.commands import COMMANDS

    shown = {words[0] for _, words in commands() if words and re.fullmatch(r"[a-z][a-z-]*", words[0])}
    shown -= set(VERBS)
    assert shown == set(SUBCOMMANDS)
    assert shown <= set(COMMANDS)


def test_settings_in_backticks_exist():
    known = {*setting_names(), *(group.name for group in CONF.iterdir())}
    methods = {path.stem: option_settings(path) for path in (CONF / "method").glob("*.yaml")}
    own = {key for given in methods.values() for key in given} | {*OF_A_PLAN, *OF_A_SEARCH}
    top = {key.partition(".")[0] for key in known}
    wrong = []
    for page in PAGES:
        if page.stem in ("style", "writing-a-method", "changelog"):
            continue  # the example does not exist
        for code in inline(page):
            if "..." in code or re.search(r"\.(safetensors|jsonl?|csv|yaml|ckpt)$", code):
                continue  # part of a call, or a file
            dotted = re.fullmatch(r"((?:model|data|optim|trainer|logger|cost|step_stats)\.[a-z_.]+)(=.*)?", code)
            if dotted and dotted[1] not in known:
                wrong.append((name(page), code))
            of_method = re.fullmatch(r"method\.([a-z_]+)\.([a-z_]+)(=.*)?", code)
            if of_method and of_method[2] not in {**methods.get(of_method[1], {}), "select": 0}:
                wrong.append((name(page), code))
            short = re.fullmatch(r"([a-z_]+)=[^=\s]+", code)
            if short and short[1] not in own | top:
                wrong.append((name(page), code))
    assert not wrong


# ---------------------------------------------------------------------------------------------- code
@pytest.mark.slow
def test_python_blocks_run_in_the_order_of_their_page(tmp_path):
    blocks = [(name(page), block) for page in PAGES for block in fences(page, "python")]
    assert {page for page, _ in blocks} >= {"README.md", "docs/guides/library.md", "docs/writing-a-method.md"}
    program = tmp_path / "blocks.py"
    program.write_text(
        f"""import os
blocks = {blocks!r}
spaces = {{}}
for page, block in blocks:
    os.chdir({str(tmp_path)!r} if page == "docs/guides/library.md" else {str(REPOSITORY)!r})  # it writes files
    try:
        exec(compile(block, page, "exec"), spaces.setdefault(page, {{"__name__": "__page__"}}))
    except Exception as error:
        raise SystemExit(f"{{page}}: {{type(error).__name__}}: {{error}}\\n{{block}}") from error
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr


def test_the_guide_to_writing_a_method_shows_the_files_of_the_example():
    """The guide contains the files of the example. The tests of the example run the contracts on these files."""
    guide, example = REPOSITORY / "docs" / "writing-a-method.md", REPOSITORY / "examples" / "out_of_tree_method"
    source = example / "src" / "every_nth_method"
    selection, _, *parts, _, contracts = fences(guide, "python")
    assert text(source / "method.py").endswith(f"import annotations\n\n{selection}")
    second = text(source / "sampled_rows.py")
    assert len(parts) == 4
    assert all(part in second for part in parts)
    assert "".join("".join(parts).split()) == "".join(second.partition("import annotations")[2].split())
    reference, _, rows = contracts.partition("\n\n\n")[2].partition("\n\n\nclass")
    assert all(part.strip() in text(example / "tests" / "test_contracts.py") for part in (reference, rows))
    (entry_points,) = fences(guide, "toml")
    assert entry_points in text(example / "pyproject.toml")
    settings = sorted(map(textwrap.dedent, fences(guide, "yaml")))
    assert settings == sorted(map(text, (source / "conf" / "method").glob("*.yaml")))


def test_the_example_has_a_card_with_all_sections():
    card = REPOSITORY / "examples" / "out_of_tree_method" / "docs" / "sampled_rows.md"
    assert re.findall(r"^## (.+)$", text(card), re.MULTILINE) == SECTIONS


def test_the_code_tour_names_files_and_functions_that_exist():
    tour = REPOSITORY / "docs" / "architecture.md"
    rows = re.findall(r"^\| \[`[\w/.]+`\]\((\.\./[\w/.]+\.py)\) \| ([^|]+) \|", text(tour), re.MULTILINE)
    assert len(rows) > 20
    missing = [
        f"{link}: {function}"
        for link, cell in rows
        for function in re.findall(r"`([\w.]+)`", cell)
        for part in function.split(".")
        if not re.search(rf"^\s*(def|class) {part}\b", text(tour.parent / link), re.MULTILINE)
    ]
    assert not missing


def test_yaml_blocks_can_be_read():
    for page in PAGES:
        for block in fences(page, "yaml"):
            assert isinstance(yaml.safe_load(block), dict), name(page)


# ---------------------------------------------------------------------------------------------- cards
def test_every_method_has_a_card_and_every_card_a_method():
    packages = {
        re.search(r"^# @package method\.(\w+)$", text(file), re.MULTILINE)[1]
        for file in (CONF / "method").glob("*.yaml")
    }
    assert {card.stem for card in CARDS} == packages


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_a_card_says_everything(card):
    found = re.findall(r"^## (.+)$", text(card), re.MULTILINE)
    assert [title for title in found if not title.startswith("Accuracy")] == SECTIONS
    for title, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text(card), re.MULTILINE | re.DOTALL):
        assert body.strip(), f"{title} is empty"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_settings_of_a_card_are_those_of_the_yaml(card):
    options = {
        file.stem: option_settings(file)
        for file in (CONF / "method").glob("*.yaml")
        if f"# @package method.{card.stem}\n" in text(file)
    }
    section = re.search(r"^## Settings\n(.*?)^## ", text(card), re.MULTILINE | re.DOTALL)[1]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    if not rows:
        assert all(not given for given in options.values())
        assert "None." in section
        return
    head, _, *rows = rows
    columns = [title.strip("`") for title in head[2:-1]]
    assert columns == (["default"] if len(options) == 1 else sorted(options, key=lambda o: (o != card.stem, o)))
    shown = {option: {} for option in options}
    for row in rows:
        for option, cell in zip(options if len(options) == 1 else columns, row[2:-1], strict=True):
            shown[option][row[0].strip("`")] = cell.strip("`")
    for option, given in options.items():
        wanted = {key: "required" if value == "???" else value for key, value in given.items()}
        assert shown[option].keys() == wanted.keys()
        for key, value in wanted.items():
            same = shown[option][key] if isinstance(value, str) else yaml.safe_load(shown[option][key])
            assert same == (value.strip("${}") if isinstance(value, str) else value), (option, key)


# ---------------------------------------------------------------------------------------------- the pages
def test_the_readme_is_short():
    assert len(text(REPOSITORY / "README.md").splitlines()) <= 120


def test_the_notices_cite_the_four_papers():
    for title in (
        "Efficient Low-rank Backpropagation for Vision Transformer",
        "Back Razor: Memory-Efficient Transfer Learning",
        "Adaptive Layer Selection for Efficient Vision",
        "Block Selective Reprogramming for On-device Training",
    ):
        assert title in " ".join(text(REPOSITORY / "docs" / "notices.md").split())
        assert title.split(":")[0] in text(REPOSITORY / "CITATION.cff")
    yaml.safe_load(text(REPOSITORY / "CITATION.cff"))


def test_the_changelog_describes_features_and_no_history():
    changes = text(REPOSITORY / "CHANGELOG.md")
    assert not re.search(r"\b(Fixed|Changed|Removed|Deprecated|no longer|is now)\b", changes)
    assert len(changes.splitlines()) <= 100


def paragraphs(page: Path) -> Iterator[str]:
    """Yield paragraphs, list items and table rows."""
    for chunk in re.split(r"\n\s*\n", text(page)):
        yield from re.split(r"\n(?=\s*(?:[-*|]|\d+\.) ?)", chunk)


def test_a_paragraph_has_at_most_two_generated_numbers():
    """A paragraph with more than two generated numbers should be a generated table."""
    crowded = [
        f"{name(page)}: {paragraph[:80]}"
        for page in PAGES
        for paragraph in paragraphs(page)
        if paragraph.count("<!-- = ") > 2
    ]
    assert not crowded, "\n" + "\n".join(crowded)


def test_nothing_is_left_to_fill_in():
    for page in PAGES:
        assert not re.search(r"\b(TODO|FIXME|XXX|TBD|lorem|placeholder)\b", text(page), re.IGNORECASE), name(page)


def test_links_and_files_named_exist():
    missing = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", FENCE.sub("", text(page))):
            if "://" not in link and not (page.parent / link).exists():
                missing.append((name(page), link))
        for code in inline(page):
            path = re.fullmatch(r"((?:benchmarks|scripts|tests|conf|docs|examples|efficient_ft)/[\w./-]+)", code)
            if path and "every_nth" not in code and not (REPOSITORY / path[1]).exists():
                missing.append((name(page), code))
    assert not missing


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        pass

    site = yaml.load(text(REPOSITORY / "mkdocs.yml"), Loader)

    def leaves(tree: Any) -> Iterator[str]:
        for item in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(item, str):
                yield item
            else:
                yield from leaves(item)

    assert sorted(leaves(site["nav"])) == sorted(p.relative_to(REPOSITORY / "docs").as_posix() for p in PAGES[2:])


@pytest.mark.slow
def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        html = text(page)
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:[^\s\">]+)", html)
        loaded += re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preload|icon)[^>]+href=\"?(https?:[^\s\">]+)", html)
        assert not loaded, name(page) if page.is_relative_to(REPOSITORY) else page.name
