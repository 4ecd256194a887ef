"""The command line: what composes, what is refused and in which words, folders, sweeps. Nothing here trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from efficient_ft.cli import launcher
from efficient_ft.cli.compose import configurations, register
from efficient_ft.config import Config
from efficient_ft.core.allocator import keep_freed_memory
from efficient_ft.core.errors import SettingError, UserError

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def composed(*arguments: str, sweep: bool = False) -> list[Config]:
    return configurations(CONF, "train", arguments, sweep=sweep)


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


# ---------------------------------------------------------------------- what composes
@pytest.mark.parametrize("group", ["model", "data", "tasks", "optim", "trainer", "logger", "recipe", "from_scratch"])
def test_every_option_of_every_group_composes(group: str) -> None:
    for option in options(group):
        named = ["model.name=resnet18"] if option == "timm" else []
        (config,) = composed(f"{group}={option}", *named)
        if group in ("data", "optim", "logger"):
            assert option.partition("_")[0] == getattr(config, group).name  # the rest is whose recipe it is


def test_every_model_is_known_to_timm_with_its_weights() -> None:
    import timm

    import efficient_ft.models.factory  # noqa: F401  registers ours

    for option in set(options("model")) - {"timm", "vit_digits"}:
        (config,) = composed(f"model={option}", "data=cifar10")
        name = config.model.name
        assert name in timm.list_pretrained(f"{name.partition('.')[0]}.*"), option
        assert (config.model.pretrained, config.model.select) == (True, "last_stage")


@pytest.mark.parametrize(
    ("data", "lr", "warmup_steps", "min_lr_ratio", "grad_clip_norm"),
    [
        ("cifar100", 1e-4, 1000, 0.01, None),
        ("cifar10", 1e-4, 1000, 0.01, 5),
        ("pets", 1e-4, 1000, 0.01, 5),
        ("cars", 5e-4, 1000, 0.01, 5),
        ("food101", 2e-4, 1000, 0.01, 5),
        ("flowers102", 2e-4, 100, 0.001, 5),
    ],
)
def test_a_data_set_of_the_paper_brings_its_recipe(
    data: str, lr: float, warmup_steps: int, min_lr_ratio: float, clip: float | None
) -> None:
    (config,) = composed("method=lbp_wht", "model=efficientformer_l1", f"data={data}")
    optim = config.optim
    assert (optim.lr, optim.warmup_steps, optim.min_lr_ratio, optim.grad_clip_norm) == (
        lr,
        warmup_steps,
        min_lr_ratio,
        clip,
    )
    assert (optim.name, optim.weight_decay, optim.schedule, optim.warmup_start_factor) == (
        "adamw",
        1e-5,
        "cosine",
        1e-3,
    )
    assert (optim.label_smoothing, optim.layer_decay) == (0.1, None)
    assert (config.trainer.epochs, config.data.batch_size, config.seed) == (50, 64, 233)
    assert (config.data.select_best_on, config.method["lbp_wht"]["select"]) == ("test", "last_stage")
    assert config.data.augment.name == "resize_crop"


BACK_RAZOR = ("pets", "aircraft", "cifar10", "cifar100", "flowers102", "cars", "cub200", "food101")


@pytest.mark.parametrize(
    ("data", "lr", "steps"),
    list(
        zip(
            BACK_RAZOR,
            (1e-3, 3e-2, 1e-2, 1e-2, 3e-2, 1e-1, 1e-2, 1e-2),
            (20_000, 6_000, 20_000, 20_000, 2_000, 16_000, 6_000, 30_000),
            strict=True,
        )
    ),
)
def test_back_razor_s_recipe_of_a_vit(data: str, lr: float, steps: int) -> None:
    (config,) = composed("model=vit_base", f"data={data}", "method=back_razor", "optim=sgd_back_razor")
    optim, augment = config.optim, config.data.augment
    assert (optim.name, optim.lr, optim.momentum, optim.weight_decay) == ("sgd", lr, 0.9, 0.0)
    assert (optim.schedule, optim.warmup_steps, optim.warmup_start_factor, optim.min_lr_ratio) == ("cosine", 500, 0, 0)
    assert (optim.grad_clip_norm, optim.label_smoothing, optim.head_lr_mult) == (
        1.0,
        0.0,
        10.0 if data == "aircraft" else 1.0,
    )
    assert (config.trainer.max_steps, config.data.batch_size) == (steps, 128)
    images = {"food101": 75_750, "cifar10": 50_000, "cifar100": 50_000}.get(data, 8_144)
    assert config.trainer.epochs * (images // 128) > steps, "the steps end the run, not the epochs"
    assert config.model.name == "vit_base_patch16_224.orig_in21k"
    assert config.model.zero_head
    first = data in ("pets", "aircraft")
    assert (augment.name, augment.scale, augment.resize) == ("resize_crop", (0.05, 1.0), 256 if first else "none")
    assert augment.flip == first
    assert config.method["back_razor"]["select"] == "keep"


def test_the_vit_of_back_razor_takes_its_images() -> None:
    from efficient_ft.models.factory import input_of

    (config,) = composed("model=vit_base", "data=cifar100", "optim=sgd_back_razor")
    spec = input_of(config.model)
    assert (spec.size, spec.mean, spec.std) == ((224, 224), (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("data", "lr", "label_smoothing"),
    list(
        zip(
            BACK_RAZOR,
            (3e-5, 3e-4, 3e-5, 3e-5, 1e-4, 3e-4, 1e-4, 3e-5),
            (0.3, 0.3, 0.1, 0.1, 0.7, 0.7, 0.7, 0.1),
            strict=True,
        )
    ),
)
def test_back_razor_s_recipe_of_a_mobile_network(data: str, lr: float, label_smoothing: float) -> None:
    chosen = ("model=timm", "model.name=mobilenetv2_100", "method=back_razor", "method.back_razor.sparsity=0.9")
    (config,) = composed(*chosen, f"data={data}", "optim=adam_back_razor")
    optim = config.optim
    assert (optim.name, optim.lr, optim.label_smoothing, optim.weight_decay) == ("adam", lr, label_smoothing, 0.0)
    assert (optim.schedule, optim.min_lr_ratio, optim.grad_clip_norm) == ("cosine", 0.0, None)
    assert (config.trainer.epochs, config.trainer.max_steps, config.data.batch_size) == (50, -1, 8)
    assert (config.model.drop_rate, config.data.augment.resize) == (0.2, "input")


@pytest.mark.parametrize(
    ("data", "lr", "steps"),
    [
        ("cifar10", 1e-3, 20_000),
        ("cifar100", 1e-2, 20_000),
        ("flowers102", 3e-2, 20_000),
        ("pets", 1e-3, 20_000),
        ("food101", 1e-2, 30_000),
    ],
)
def test_bsr_s_recipe_of_a_vit(data: str, lr: float, steps: int) -> None:
    (config,) = composed("model=vit_base", f"data={data}", "method=bsr", "optim=sgd_bsr")
    optim, augment = config.optim, config.data.augment
    assert (optim.name, optim.lr, optim.momentum, optim.weight_decay) == ("sgd", lr, 0.9, 0.0)
    assert (optim.schedule, optim.warmup_steps, optim.min_lr_ratio, optim.grad_clip_norm) == ("cosine", 500, 0, 1.0)
    assert (config.trainer.max_steps, config.data.batch_size, config.trainer.precision) == (steps, 128, "fp32")
    assert config.model.zero_head
    assert (augment.scale, augment.resize, augment.flip) == ((0.05, 1.0), "none", False)


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_bsr_s_recipe_of_deit(data: str) -> None:
    (config,) = composed("model=deit_small", f"data={data}", "method=bsr", "optim=adamw_bsr")
    optim = config.optim
    assert (optim.name, optim.lr, optim.weight_decay, optim.layer_decay) == ("adamw", 5e-4, 0.05, 0.75)
    assert optim.lr * optim.min_lr_ratio == pytest.approx(1e-6)
    assert optim.warmup_steps == 5 * (50_000 // 128 + 1)
    assert (optim.label_smoothing, config.trainer.epochs, config.data.batch_size) == (0.1, 50, 128)
    assert config.data.augment.flip


@pytest.mark.parametrize("data", ["cifar100", "flowers102", "food101"])
def test_alast_s_recipe(data: str) -> None:
    (config,) = composed("model=deit_small", f"data={data}", "method=alast", "optim=adam_alast")
    optim = config.optim
    assert (optim.name, optim.lr, optim.weight_decay, optim.schedule) == ("adam", 1e-4, 0.0, "constant")
    assert (config.trainer.epochs, config.data.batch_size) == (20, 128)
    assert config.method["alast"]["layers"] == 9


def test_only_a_network_without_pretrained_weights_is_trained_from_scratch() -> None:
    (scratch,) = composed()
    (elsewhere,) = composed("data=cifar100")
    (pretrained,) = composed("model=deit_tiny")
    (plain,) = composed("model=deit_tiny", "data=folder")
    (own,) = composed("from_scratch=none")
    assert scratch.optim == elsewhere.optim
    assert (scratch.optim.lr, scratch.optim.weight_decay, scratch.trainer.epochs) == (2e-3, 0.05, 15)
    assert pretrained.optim == plain.optim == own.optim
    assert (pretrained.optim.lr, pretrained.trainer.epochs) == (1e-4, 20)


def test_a_recipe_is_for_its_optimizer_and_data_set_only_and_the_user_wins() -> None:
    (folder,) = composed("model=deit_tiny", "data=folder")
    (none,) = composed("model=deit_tiny", "data=cifar100", "recipe=none")
    (sgd,) = composed("model=deit_tiny", "data=cifar100", "optim=sgd")
    (own,) = composed("model=deit_tiny", "data=cifar100", "optim.lr=0.5", "trainer.epochs=2", "data.select_best_on=val")
    (borrowed,) = composed("model=deit_tiny", "data=folder", "recipe=adamw_cars")
    assert folder.optim == none.optim
    assert folder.data.select_best_on == none.data.select_best_on == sgd.data.select_best_on == "val"
    assert (sgd.optim.lr, sgd.optim.momentum) == (0.01, 0.9)
    assert (own.optim.lr, own.trainer.epochs, own.data.select_best_on) == (0.5, 2, "val")
    assert own.optim.warmup_steps == 1000
    assert borrowed.optim.lr == 5e-4


def test_a_sweep_is_the_product_of_its_values() -> None:
    configs = composed("method.lbp_wht.order=2,4", "optim.lr=0.1,0.2,0.3", sweep=True)
    assert {(c.method["lbp_wht"]["order"], c.optim.lr) for c in configs} == {
        (order, lr) for order in (2, 4) for lr in (0.1, 0.2, 0.3)
    }


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optim.lrr=1"], r"^optim\.lrr=1: there is no such setting.* Did you mean 'lr'\?"),
        (["+optim.lrr=1"], r"^optim\.lrr=1: there is no such setting"),
        (["+typo=1"], r"^typo=1: there is no such setting"),
        (["++a.typo=1"], r"^a=.*there is no such setting"),
        (["modell=x"], r"^modell=x: .* Did you mean 'model'\?"),
        (["recipee=none"], r"^recipee=none: .* Did you mean 'recipe'\?"),
        (["lr=1"], r"Did you mean 'optim\.lr'\?"),
        (["method=lbp_whtt"], r"^method=lbp_whtt: allowed are .*full.* Did you mean 'lbp_wht'\?"),
        (["method=[lbp_wht,lbp_dctt]"], r"^method=lbp_dctt: .* Did you mean 'lbp_dct'\?"),
        (["model=efficientformer_l11"], r"Did you mean 'efficientformer_l1'\?"),
        (["data=cifar1000"], r"Did you mean 'cifar100'\?"),
        (["recipe=adamw_cifar1000"], r"Did you mean 'adamw_cifar100'\?"),
        (
            ["optim=5"],
            r"^optim=5: allowed are adam, adam_alast, adam_back_razor, adamw, .*, sgd, sgd_back_razor, sgd_bsr\.$",
        ),
        (["optim=null"], r"^optim=null: allowed are adam, adam_alast, adam_back_razor, adamw, .*, sgd_bsr\.$"),
        (["~optim"], r"^~optim: a run needs one; .*adam, adam_alast, adam_back_razor, adamw"),
        (["~optim.lr"], r"^optim\.lr=\?\?\?: .* It has no default"),
        (["model=timm"], r"^model\.name=\?\?\?: .* give model\.name=VALUE"),
        (["optim.lr=abc"], r"^optim\.lr=abc: allowed is a number above 0\.$"),
        (["optim.lr=-1"], r"^optim\.lr=-1: allowed is a number above 0\.$"),
        (["trainer.precision=fp8"], r"^trainer\.precision=fp8: allowed are fp32, bf16, fp16\.$"),
        (["optim.momentum=.5"], r"^optim\.momentum=0\.5: .* It belongs to optim=sgd\.$"),
        (["+optim.lr=1"], r"^\+optim\.lr=1: optim\.lr is there already; leave out the \+\.$"),
        (["method.lbp_wht.ordr=2"], r"^method\.lbp_wht\.ordr=2: .* Did you mean 'order'\?$"),
        (["method.lbp_dct.order=2"], r"method lbp_dct is not chosen .*'method=\[lbp_wht,lbp_dct\]'"),
        (["method=[lbp_wht,lbp_wht_published]"], r"lbp_wht and lbp_wht_published are variants of lbp_wht; name one"),
        (["method=[lbp_wht,lbp_wht]"], r"lbp_wht is named twice"),
        (["model.kwargs.depth=3"], r"with a plus: \+model\.kwargs\.depth=3$"),
        (["optim.lr=1,2"], r"several values\. To run each of them add -m; .*optim\.lr=\[1,2\]"),
        (["foo"], r"^foo: arguments have the form KEY=VALUE"),
        (["data.root=/a=b"], r"quote it: 'data\.root=\"/a=b\"'$"),
        (["optim.lr=[1"], r"^optim\.lr=\[1: the value has special characters"),
        (["model.name=${a.b}"], r"^The configuration cannot be resolved: .*a\.b"),
        (["hydra.run.dirr=x"], r"hydra\.run\.dirr"),
        (["hydra/launcher=nix"], r"hydra/launcher/nix"),
    ],
)
def test_a_mistaken_command_is_refused_in_one_clear_line(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        composed(*arguments)
    assert re.search(said, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_data_sets_in_turn() -> None:
    published = ["tasks=bsr_moe", "model=vit_base", "method=bsr_moe", "optim=sgd_back_razor", "recipe=bsr_moe"]
    (config,) = composed(*published)
    assert list(config.tasks) == ["cifar10", "cifar100", "flowers102", "pets", "food101"]
    for name, data in config.tasks.items():
        assert (data.name, data.batch_size, data.select_best_on) == (name, 128, "test")
        assert (data.augment.scale, data.augment.resize, data.augment.flip) == ((0.05, 1.0), "none", False)
    assert (config.optim.lr, config.optim.name, config.trainer.max_steps) == (0.01, "sgd", 8000)
    assert config.model.zero_head
    (config,) = composed(*published, "tasks.pets.batch_size=7")
    assert config.tasks["pets"].batch_size == 7
    by_hand = ["+data@tasks.a=cifar10", "+data@tasks.b=pets", "method=full", "optim.lr=1"]
    (config,) = composed(*by_hand, "tasks.b.batch_size=3")
    assert [(name, data.name, data.batch_size) for name, data in config.tasks.items()] == [
        ("a", "cifar10", 64),
        ("b", "pets", 3),
    ]
    assert composed()[0].tasks == composed("tasks=none")[0].tasks == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["data=pets"],
            r"^data=pets: the data sets of this run are those of tasks \(cifar10, .*tasks\.cifar10\.",
        ),
        (["data.batch_size=3"], r"^data\.batch_size=3: the data sets of this run are those of tasks"),
        (["tasks.pets.batch_sise=3"], r"^tasks\.pets\.batch_sise=3: .* Did you mean 'batch_size'\?"),
        (["+data@tasks.pets=pets"], r"data@tasks\.pets appears more than once"),
        (["tasks=bsr_mo"], r"^tasks=bsr_mo: allowed are bsr_moe, none\. Did you mean 'bsr_moe'\?"),
        (["~tasks"], r"^~tasks: a run needs one"),
    ],
)
def test_mistakes_with_tasks(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        composed("tasks=bsr_moe", "method=full", "optim.lr=1", *arguments)
    assert re.search(said, str(caught.value)), str(caught.value)


def test_the_quoting_that_is_advised_works() -> None:
    (config,) = composed('data.root="/a=b"')
    assert config.data.root == "/a=b"


def test_one_bad_job_of_a_sweep_is_refused_before_any_starts() -> None:
    with pytest.raises(SettingError, match=r"^method=fulll: .*Did you mean 'full'\?"):
        composed("method=full,fulll", sweep=True)
    with pytest.raises(SettingError, match=r"^optim.lr=abc"):
        composed("optim.lr=1,abc", sweep=True)


def test_another_folder_of_configurations_is_looked_into_first(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: resnet18\n")
    (config,) = configurations(CONF, "train", ["model=mine", "method=full"], sweep=False, search=str(tmp_path))
    assert config.model.name == "resnet18"
    with pytest.raises(UserError, match="no such folder"):
        configurations(CONF, "train", [], sweep=False, search=str(tmp_path / "nix"))


# ---------------------------------------------------------------------- as a program
# train.py with a run that trains nothing, in place of the one that needs seconds to import torch.
STUB = """
import json, sys, types
sys.path.insert(0, {repository!r})
import train

def run(config, folder):
    from efficient_ft.core.errors import UserError
    order = config.method.get("lbp_wht", {{}}).get("order")
    if order == 5:
        raise UserError("order 5 is out of luck\\nand says so at length")
    if order == 6:
        raise RuntimeError("a bug")
    if order == 7:
        raise KeyboardInterrupt
    if order == 8:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    print("ran", order, "lr", config.optim.lr, "evaluate", config.evaluate)
    if config.evaluate is not None or config.cost_only:
        return {{"executed": {{"backward_flops": 3e6}}}}
    results = {{"accuracy": {{"best": order / 10}}, "cost": {{"executed": {{"backward_flops": order * 1e6}}}},
               "config": config.model_dump(mode="json")}}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "model.safetensors").touch()
    return results

train.prepare = lambda config: None
sys.modules["efficient_ft.training.run"] = types.SimpleNamespace(run=run)
sys.modules["efficient_ft.training"] = types.SimpleNamespace()
train.main()
assert "torch" not in sys.modules
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A stub of train.py in a working folder whose name has a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "stub.py").write_text(STUB.format(repository=str(REPOSITORY)))
    return folder


def called(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "stub.py", *arguments], cwd=program, capture_output=True, text=True, encoding="utf-8"
    )


def runs_of(program: Path) -> set[Path]:
    return {file.parent.relative_to(program) for file in (program / "outputs").rglob("results.json")}


def test_help_configuration_and_completion_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "try:\n"
        f"    runpy.run_path({str(REPOSITORY / 'train.py')!r}, run_name='__main__')\n"
        "except SystemExit as left:\n"
        "    assert not left.code, left.code\n"
        "print(sorted({'torch', 'lightning', 'timm', 'peft', 'numpy'} & set(sys.modules)))\n"
    )
    for arguments, said in [
        (["--help"], "method: "),
        (["--cfg", "job", "model=deit_tiny", "data=folder"], "deit_tiny_patch16_224"),
        (["--shell-completion", "query=bash"], "model=efficientformer_l1"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, "COMP_LINE": "python train.py model=eff"},
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert done.stdout.splitlines()[-1] == "[]", done.stdout[-200:]
    assert not list(tmp_path.iterdir())


def test_a_mistake_exits_with_2_and_its_text_alone_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), "optim.lr=abc"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "optim.lr=abc: allowed is a number above 0.\n"
    assert not list(tmp_path.iterdir())


def test_outcomes_of_a_run(program: Path) -> None:
    unlucky, bug, interrupted = (called(program, f"method.lbp_wht.order={order}") for order in (5, 6, 7))
    assert (unlucky.returncode, unlucky.stderr) == (2, "order 5 is out of luck\nand says so at length\n")
    assert bug.returncode == 1
    assert "Traceback" in bug.stderr
    assert bug.stderr.rstrip().endswith("RuntimeError: a bug")
    assert interrupted.returncode == 130
    assert "same command continues" in interrupted.stderr
    assert "Traceback" not in interrupted.stderr


def test_a_run_has_the_folder_of_its_configuration_or_the_one_it_is_given(program: Path) -> None:
    assert called(program).returncode == 0
    (folder,) = runs_of(program)
    assert re.fullmatch(r"outputs/digits/vit_digits/lbp_wht/[0-9a-f]{8}", folder.as_posix())
    assert (program / folder / ".hydra" / "overrides.yaml").is_file()
    assert called(program, "trainer.progress=false", "hydra.run.dir='my run'").returncode == 0
    assert (program / "my run" / "results.json").is_file()

    # An evaluation takes the run's own arguments, those given now win, and it leaves nothing.
    before = sorted(program.rglob("*"))
    assert called(program, "method.lbp_wht.order=3", "optim.lr=0.5", "hydra.run.dir=third").returncode == 0
    after_third = sorted(program.rglob("*"))
    done = called(program, "evaluate=third", "optim.lr=0.25")
    assert done.stdout == "ran 3 lr 0.25 evaluate third\n", done.stderr
    assert called(program, "cost_only=true").stdout == "ran 4 lr 0.002 evaluate None\n"
    assert sorted(program.rglob("*")) == after_third != before
    for folder_, said in [("nix", "no such folder"), ("outputs", "no model.safetensors")]:
        refused = called(program, f"evaluate={folder_}")
        assert refused.returncode == 2
        assert said in refused.stderr


@pytest.mark.skipif(os.name != "posix", reason="kills a job by a signal")
def test_a_sweep_runs_all_tables_failures_and_is_repeated_only_where_unfinished(program: Path) -> None:
    assert called(program, "method.lbp_wht.order=3").returncode == 0
    alone = runs_of(program)
    done = called(program, "-m", "method.lbp_wht.order=2,5,8,3", "trainer.progress=false")
    assert done.returncode == 1
    # The job that ran before is the same run, in the same folder, and is not run again.
    assert "ran 2" in done.stdout
    assert "ran 3" not in done.stdout
    assert len(runs_of(program)) == 2
    assert alone < runs_of(program)
    table = done.stdout[done.stdout.index("accuracy best") :]
    assert re.search(r"order=2 +20\.00 % +2\.0 ", table)
    assert re.search(r"order=3 +30\.00 % +3\.0 ", table)
    assert "2 of 4 failed" in table
    assert "method.lbp_wht.order=5: order 5 is out of luck\n" in table
    assert "method.lbp_wht.order=8: killed by SIGKILL" in table


def test_a_sweep_refuses_a_bad_job_first_and_ends_when_interrupted(program: Path) -> None:
    refused = called(program, "-m", "method.lbp_wht.order=2,3", "optim.lr=0.1,abc")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("optim.lr=abc")
    shared = called(program, "-m", "optim.lr=0.1,0.10")
    assert shared.returncode == 2
    assert "would share the folder" in shared.stderr
    assert runs_of(program) == set()
    stopped = called(program, "-m", "method.lbp_wht.order=2,7,3")
    assert stopped.returncode == 130
    assert "ran 2" in stopped.stdout
    assert "ran 3" not in stopped.stdout


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_ending_a_sweep_ends_its_job(tmp_path: Path) -> None:
    code = (
        "import sys; from efficient_ft.cli.launcher import _run\n"
        "_run([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as sweep:
        assert sweep.stdout is not None
        job = int(sweep.stdout.readline())
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(job, 0)


def test_a_copy_of_the_repository_in_a_folder_with_spaces_works(tmp_path: Path) -> None:
    copy = tmp_path / "a copy"
    copy.mkdir()
    shutil.copy(REPOSITORY / "train.py", copy)
    for folder in ("conf", "efficient_ft", "hydra_plugins"):
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, str(copy / "train.py"), "--cfg", "job", "optim.lr=0.5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "lr: 0.5" in done.stdout


# ---------------------------------------------------------------------- parts
def test_finished_means_the_same_settings(tmp_path: Path) -> None:
    (config,) = composed()
    (other,) = composed("optim.lr=0.5")
    assert launcher.finished(tmp_path, config) is None
    (tmp_path / "results.json").write_text(json.dumps({"config": config.model_dump(mode="json")}))
    assert launcher.finished(tmp_path, config) is not None
    assert launcher.finished(tmp_path, other) is None
    for cut_short in ("", "{", "[]", "{}", '{"config": {"optim": 3}}'):
        (tmp_path / "results.json").write_text(cut_short)
        assert launcher.finished(tmp_path, config) is None


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept() -> None:
    # Resident pages after a large block is freed, in a process of its own.
    code = (
        "import sys, pathlib\n"
        "from efficient_ft.core.allocator import keep_freed_memory\n"
        "kept = keep_freed_memory() if sys.argv[1] == 'keep' else None\n"
        "resident = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1])\n"
        "before = resident(); block = bytearray(b'x') * (64 << 20); held = resident(); del block\n"
        "print(kept, round((resident() - before) / (held - before)))\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, mode], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()
        for mode in ("keep", "leave")
    ]
    if said[0].startswith("False"):
        pytest.skip("no glibc")
    assert said == ["True 1", "None 0"]


def test_elsewhere_the_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
