"""Tests of invalid command lines: each is rejected with one message before anything starts."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from efficient_ft.cli.commands import COMMANDS
from efficient_ft.cli.hydra.rows import jobs_of_rows
from efficient_ft.cli.main import main
from efficient_ft.core.errors import SettingError, UserError
from tests.cli.program import call, composed
from tests.conftest import unwrapped


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optim.lrr=1"], r"^optim\.lrr=1: there is no such setting.* Did you mean 'lr'\?"),
        (["+optim.lrr=1"], r"^optim\.lrr=1: there is no such setting"),
        (["+typo=1"], r"^typo=1: there is no such setting"),
        (["method=blocks", "method.blocks.blocks=[3]", "typo=1"], r"^typo=1: there is no such setting"),
        (["++a.typo=1"], r"^a=.*there is no such setting"),
        (
            ["model.kwargs={depth:2}"],
            r"^model\.kwargs\.depth=2: .* requires a plus sign\. Use \+model\.kwargs\.depth=2$",
        ),
        (
            ["model.kwargs={depth:2,qk_norm:true}"],
            r"requires a plus sign\. Use \+model\.kwargs\.depth=2 \+model\.kwargs\.qk_norm=true$",
        ),
        (["model.kwargs={a:{b:1}}"], r"requires a plus sign\. Use '\+model\.kwargs=\{a:\{b:1\}\}'$"),
        (
            ["model.kwargs={num_classes:3}"],
            r"num_classes cannot be set in model\.kwargs\. The data set determines this argument",
        ),
        (["model={kwargs:{depth:2}}"], r"^model\.kwargs\.depth=2: .* requires a plus sign"),
        (["model.kwargs=[1]"], r"^model\.kwargs must be a mapping, \{NAME: VALUE\}, got \[1\]\."),
        (["optim.betas={a:1}"], r"^optim\.betas must be a list, \[VALUE,VALUE\], got"),
        (["data.augment={flop:false}"], r"^data\.augment\.flop=false: .* Did you mean 'flip'\?"),
        (["data={augment:{flop:false}}"], r"^data\.augment\.flop=false: .* Did you mean 'flip'\?"),
        (["trainer={epoch:1}"], r"^trainer\.epoch=1: .* Did you mean 'epochs'\?"),
        (["method.lbp_wht={ordr:2}"], r"^method\.lbp_wht\.ordr=2: .* Did you mean 'order'\?"),
        (["method={lora:{rank:2}}"], r"a method must be selected by name\. Use method=lora method\.lora\.rank=2$"),
        (["tasks={a:1}"], r"to add a data set, use \+data@tasks\.a=OPTION"),
        (["modell=x"], r"^modell=x: .* Did you mean 'model'\?"),
        (["recipee=none"], r"^recipee=none: .* Did you mean 'recipe'\?"),
        (["lr=1"], r"Did you mean 'optim\.lr'\?"),
        (["method=lbp_whtt"], r"^method must be one of .*full.*, got lbp_whtt\. Did you mean 'lbp_wht'\?"),
        (["method=[lbp_wht,lbp_dctt]"], r"^method must be .*, got lbp_dctt\. Did you mean 'lbp_dct'\?"),
        (["model=efficientformer_l11"], r"Did you mean 'efficientformer_l1'\?"),
        (["model=convnext_tinyy"], r"timm has no model with this name\. Did you mean 'convnext_tiny'\?$"),
        (["data=cifar1000"], r"Did you mean 'cifar100'\?"),
        (
            ["model=tf_efficientnet_lite0"],
            r"got tf_efficientnet_lite0\. .*For a timm model, use model=timm model\.name=tf_efficientnet_lite0\.$",
        ),
        (["recipe=lbp_wht/cifar1000"], r"Did you mean 'lbp_wht/cifar100'\?"),
        (
            ["optim=5"],
            r"^optim must be one of adam, adamw, sgd, got 5\.$",
        ),
        (["optim=null"], r"^optim must be one of adam, adamw, sgd, got null\.$"),
        (["~optim"], r"^~optim: a run requires this group\. .*adam, adamw, sgd"),
        (["~memory"], r"^~memory: the setting memory is null by default\. Remove this argument\.$"),
        (["~evaluate"], r"^~evaluate: the setting evaluate is null by default"),
        (["~job_timeout"], r"^~job_timeout: the setting job_timeout is null by default"),
        (["~seed=0"], r"^~seed=0: a deleted setting must not have a value\. Use ~seed\.$"),
        (["++method={0:1}"], r"^method must be a mapping with names as keys, \{NAME: VALUE\}, got \{0: \.\.\.\}\.$"),
        (["++method={null:1}"], r"^method must be a mapping with names as keys, .* got \{null: "),
        (["++method={true:{a:1}}"], r"^method must be a mapping with names as keys, .* got \{true: "),
        (["++tasks={0:1}"], r"^tasks must be a mapping with names as keys"),
        (["++data.masks={values:{0:a},1:b}"], r"^data\.masks must be a mapping with names as keys, .* got \{1: "),
        (["++seed={0:1}"], r"^seed must be a mapping with names as keys"),
        (["~logger.tags"], r"^~logger\.tags: the selected options do not have this setting\. Remove this argument\.$"),
        (["~data.text.label=-0.1"], r"^~data\.text\.label=-0\.1: the selected options do not have this setting"),
        (["data.augment.scale.optim.lr=4GB"], r"data\.augment\.scale\.optim"),
        (
            ["~optim.lr"],
            r"^optim\.lr must be a number >= 1e-12, got nothing\. The setting has no default\. Pass optim\.lr=VALUE\.$",
        ),
        (["model=timm"], r"^model\.name must be a non-empty string, got nothing\. .* Pass model\.name=VALUE\.$"),
        (["optim.lr=abc"], r"^optim\.lr must be a number >= 1e-12, got abc\.$"),
        (["optim.lr=-1"], r"^optim\.lr must be a number >= 1e-12, got -1\.$"),
        (["trainer.precision=fp8"], r"^trainer\.precision must be one of auto, fp32, bf16, fp16, got fp8\.$"),
        (
            ["optim.momentum=.5"],
            r"^optim\.momentum must be left out with optim=adamw, got 0\.5\. The setting applies only to optim=sgd\.$",
        ),
        (["+optim.lr=1"], r"^\+optim\.lr=1: the setting optim\.lr already exists\. Remove the plus sign\.$"),
        (["method.lbp_wht.ordr=2"], r"^method\.lbp_wht\.ordr=2: .* Did you mean 'order'\?$"),
        (["method.lbp_dct.order=2"], r"the method lbp_dct is not selected .*'method=\[lbp_wht,lbp_dct\]'"),
        (
            ["method=[lbp_wht,lbp_wht_published]"],
            r"lbp_wht and lbp_wht_published are variants of lbp_wht\. Use one option",
        ),
        (["method=[lbp_wht,lbp_wht]"], r"lbp_wht occurs twice"),
        (
            ["model.kwargs.drop_rate=0.1"],
            r"timm's argument drop_rate cannot be set in model\.kwargs\. Set model\.drop_rate",
        ),
        (["model.kwargs.depth=3"], r"requires a plus sign\. Use \+model\.kwargs\.depth=3$"),
        (["optim.lr=1,2"], r"several values are given\. Add -m to run all values\. .*optim\.lr=\[1,2\]"),
        (["=3"], r"^=3: arguments must have the form KEY=VALUE"),
        (["foo"], r"^foo: arguments must have the form KEY=VALUE"),
        (["data.root=/a=b"], r"Quote the value: 'data\.root=\"/a=b\"'$"),
        (["'data.root=/a=b'"], r"Quote the value: 'data\.root=\"/a=b\"'$"),
        (["data.root=a[b"], r"Quote the value: 'data\.root=\"a\[b\"'$"),
        (["optim.lr=[1"], r"^optim\.lr=\[1: the brackets \[\] do not match\. Add or remove a bracket\.$"),
        (["optim.lr==3"], r"^optim\.lr==3: the argument contains two equals signs\. Use optim\.lr=3$"),
        (["data.labels={file: a.csv}"], r"^data\.labels must be null with data=digits, .*Use data=labels"),
        (["predct"], r"^predct: arguments must have the form KEY=VALUE\. See --help\. Did you mean 'predict'\?"),
        (["model.name=${a.b}"], r"^model\.name cannot be resolved: .*a\.b"),
        (["hydra.run.dir="], r"^hydra\.run\.dir must be a folder, got an empty string\."),
        (
            ["method=lbp_wht_published", "method.lbp_wht_published.order=2"],
            r"the settings of the option lbp_wht_published are in method\.lbp_wht\. Use method\.lbp_wht\.order=2\.$",
        ),
        (["data.batch_size=100000000"], r"^data\.batch_size must be .* <= 65536 or auto, got 100000000"),
        (["model.image_size=100000"], r"^model\.image_size must be .*8192"),
        (["method=[]"], r"^method must be one of .*, got \[\]\."),
        (["optim.lr="], r"^optim\.lr must be a number >= 1e-12, got an empty string\.$"),
        (["data.root="], r"^data\.root must be a non-empty string, got an empty string\.$"),
        (["model.weights="], r"^model\.weights must be a non-empty string or null, got an empty string\.$"),
        (["hydra.run.dirr=x"], r"hydra\.run\.dirr"),
        (["hydra/launcher=nix"], r"^hydra/launcher must be one of .*, got nix\."),
    ],
)
def test_a_mistaken_command_is_refused_in_one_clear_line(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        composed(*arguments)
    assert re.search(said, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["experiment=methods,none"], r"^experiment=methods,none: a sweep can run only one experiment\."),
        (["seed=glob(*)"], r"^seed=glob\(\*\): the pattern does not match any value\."),
        (["optim.lr=interval(0.1,0.2)"], r"^optim\.lr=interval\(0\.1,0\.2\): intervals are not supported"),
    ],
)
def test_mistakes_of_a_sweep(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        composed(*arguments, sweep=True)
    assert re.search(said, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (3, r"^rows: every row must be a string of KEY=VALUE settings, got 3\."),
        ("foo", r"^rows: every row must be a string of KEY=VALUE settings, got foo\."),
        ('"', r"^rows: the row \" cannot be parsed: No closing quotation\."),
        ("optim.lr=1 optim.lr=2", r"^optim\.lr must be given once"),
    ],
)
def test_mistakes_in_the_rows_of_an_experiment(row: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        jobs_of_rows([[]], [row])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("method=zip(full,head)", r"^method=zip\(full,head\): zip\(\.\.\.\) was removed\. .* experiment=NAME\.$"),
        ("rows=['method=full']", r"^rows=.*: the setting rows was removed\. .* experiment=NAME\. .* --rows ROW\.$"),
        ("table=lbp_wht/2", r"^table=lbp_wht/2: the setting table was removed\. Use efficient-ft table NAME --run\.$"),
        ("+table=null", r"the setting table was removed\. Use efficient-ft table NAME --run\.$"),
    ],
)
@pytest.mark.parametrize("sweep", [True, False])
def test_a_removed_form_is_refused_with_its_replacement(argument: str, said: str, sweep: bool) -> None:
    with pytest.raises(UserError, match=said):
        composed("model=vit_digits", argument, sweep=sweep)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["data=pets"],
            r"^data=pets: the data sets of this run are set in `tasks` \(cifar10, .*tasks\.cifar10\.",
        ),
        (["data.batch_size=3"], r"^data\.batch_size=3: the data sets of this run are set in `tasks`"),
        (["tasks.pets.batch_sise=3"], r"^tasks\.pets\.batch_sise=3: .* Did you mean 'batch_size'\?"),
        (["+data@tasks.pets=pets"], r"data@tasks\.pets appears more than once"),
        (["tasks=none"], r"^tasks must be given once, got tasks=bsr_moe and tasks=none\."),
        (["~tasks"], r"^tasks must be given once, got tasks=bsr_moe and ~tasks\."),
    ],
)
def test_mistakes_with_tasks(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        composed("tasks=bsr_moe", "method=full", "optim.lr=1", *arguments)
    assert re.search(said, str(caught.value)), str(caught.value)


def test_options_of_tasks_that_do_not_exist() -> None:
    with pytest.raises(UserError, match=r"^tasks must be one of bsr_moe, none, got bsr_mo\. Did you mean 'bsr_moe'\?"):
        composed("tasks=bsr_mo")
    with pytest.raises(UserError, match=r"^~tasks: a run requires this group"):
        composed("~tasks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "optim.lr=1e-3 optim.lr=1e-2",
            r"^optim\.lr must be given once, got optim\.lr=1e-3 and optim\.lr=1e-2\.",
        ),
        ("optim.lr=1e-3 optim.lr=1e-3", r"got optim\.lr=1e-3 twice\. Remove one of the arguments\.$"),
        ("optim.lr=1 ++optim.lr=2", r"got optim\.lr=1 and \+\+optim\.lr=2"),
        ("+model.kwargs.a=1 +model.kwargs.a=2", r"sweep over both values: -m \+model\.kwargs\.a=1,2\.$"),
        ("method=lora method=bsr", r"got method=lora and method=bsr\. .* apply both methods: 'method=\[lora,bsr\]'\.$"),
        ("data=digits data=cifar10", r"^data must be given once"),
        ("optim={lr:1} optim.lr=2", r"^optim\.lr must be given once, got optim=\{lr:1\} and optim\.lr=2\. Remove"),
        ("method=lora method={lora:{rank:2}} method.lora.rank=3", r"^method\.lora\.rank must be given once"),
        ("optim.grad_clip_norm=3 ~optim.grad_clip_norm", r"got optim\.grad_clip_norm=3 and ~optim\.grad_clip_norm"),
        ("+data@tasks.a=digits +data@tasks.a=cifar10", r"^data@tasks\.a must be given once"),
        ("hydra.run.dir=a hydra.run.dir=b", r"got hydra\.run\.dir=a and hydra\.run\.dir=b\. Remove one of the arg"),
        ("-m optim.lr=1,2 optim.lr=3", r"got optim\.lr=1,2 and optim\.lr=3\. .*-m optim\.lr=1,2,3\.$"),
    ],
)
def test_a_setting_that_is_given_more_than_once(arguments: str, said: str) -> None:
    words = arguments.removeprefix("-m ").split(" ")
    with pytest.raises(UserError, match=said):
        composed("model=vit_digits", *words, sweep=arguments.startswith("-m "))


@pytest.mark.parametrize(
    "arguments",
    ["method=lora method.lora.rank=4", "method=lora method={lora:{rank:4}}", "~model.kwargs +model.kwargs={a:1}",
     "optim=sgd optim.lr=1", "+data@tasks.a=cifar10 +data@tasks.b=cifar100 tasks.a.batch_size=8"],
)  # fmt: skip
def test_a_group_and_its_settings_are_not_the_same_setting(arguments: str) -> None:
    assert composed(*arguments.split(" "))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "step last_stage --model x lbp_wht",
            r"^lbp_wht: options must not separate recipes\. .* step last_stage lbp_wht",
        ),
        ("layer full", r"^full: the command efficient-ft bench layer does not accept recipes"),
        (
            "step --modle x",
            r"^--modle is not an option of efficient-ft bench step\. See efficient-ft bench step --help\.$",
        ),
    ],
)
def test_words_that_bench_cannot_use(words: str, said: str) -> None:
    from efficient_ft.cli.commands.bench import main

    with pytest.raises(UserError, match=said):
        main(words.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check", ["data=digits", "data=folder"]),
        ("plan", ["memory=4GB", "memory=8GB"]),
        ("plan", ["memory=4GB", "optim.lr=1", "optim.lr=2"]),
        ("table", ["lbp_wht/2", "--commands", "optim.lr=1", "optim.lr=2"]),
        ("study", ["FOLDER", "data.root=a", "data.root=b"]),
        ("cache", ["data=digits", "data=folder"]),
        ("bench", ["memory", "lora:rank=2,rank=3"]),
        ("bench", ["loop", "--set", "seed=1", "--set", "seed=2"]),
    ],
)
def test_every_command_refuses_a_doubled_setting(command: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must be given once|is given more than once"):
        importlib.import_module(COMMANDS[command]).main([str(tmp_path) if word == "FOLDER" else word for word in words])


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("hydra={run:3}", r"^hydra\.run must be a mapping, \{NAME: VALUE\}, got 3\."),
        ("hydra.run=3", r"^hydra\.run must be a mapping"),
        ("hydra=null", r"^hydra must be a mapping"),
        ("hydra/launcher=nothing", r"^hydra/launcher must be one of basic, .*, got nothing\."),
        ("hydra/launcher=null", r"^hydra/launcher must be one of basic"),
        ("hydra/foo=3", r"^A Hydra group must be one of hydra/env"),
        ("~hydra/launcher", r"use the form hydra/launcher=OPTION"),
        ("hydra.job.foo=3", r"^hydra\.job\.foo=3: there is no such setting\. hydra\.job has chdir"),
        ("hydra.job={a:1}", r"^hydra\.job\.a=1: there is no such setting"),
        ("hydra.job.chdir=maybe", r"^hydra\.job\.chdir must be true or false, got maybe\."),
        ("hydra.mode=foo", r"^hydra\.mode must be one of RUN, MULTIRUN"),
        ("hydra.job.env_copy=3", r"^hydra\.job\.env_copy must be a list"),
        ("hydra.job.env_set={a:b}", r"requires a plus sign\. Use \+hydra\.job\.env_set\.a=b"),
        ("hydra.launcher=3", r"^hydra\.launcher must be a mapping"),
        ("hydra.output_subdir={a:3}", r"^hydra\.output_subdir must be a string"),
        ("hydra.searchpath=[nonsense]", r"^hydra\.searchpath must be a list of existing folders"),
        ("hydra.sweep.dir=", r"^hydra\.sweep\.dir must be a folder"),
        ("~hydra", r"^~hydra: a Hydra setting must have the form hydra\.KEY=VALUE"),
        ("hydra@foo=3", r"^hydra@foo=3: a Hydra setting must have the form"),
    ],
)
def test_mistaken_settings_of_hydra(argument: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        composed(argument)


@pytest.mark.slow
def test_settings_of_hydra_that_fail_later_end_in_one_line(program: Path) -> None:
    for setting in ("hydra.job_logging.root.level=FOO", "hydra.verbose=[1,{a:2}]", "hydra.job.name=${nothing}"):
        done = call(program, "data=cifar10", setting)
        assert done.returncode == 2
        assert f"\n{setting}: Hydra cannot use this setting: " in done.stderr
        assert "Traceback" not in done.stderr


def test_settings_between_options(program: Path) -> None:
    done = call(program, "data=cifar10", "--cfg", "job", "seed=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("seed=1: options must precede or follow all settings")


@pytest.mark.parametrize(
    ("typed", "means"),
    [("optim.leraning_rate=1", "optim.lr"), ("learning_rate=1", "optim.lr"), ("bs=3", "data.batch_size"),
     ("data.batch=3", "data.batch_size"), ("batch=3", "data.batch_size"), ("max_epochs=3", "trainer.epochs"),
     ("model.img_size=32", "image_size"), ("trainer.gpus=2", "trainer.devices"), ("modle=a", "model"),
     ("workers=2", "data.num_workers"), ("optim.momentun=1", "optim.momentum"), ("optim.min_lr=1", "min_lr_ratio")],
)  # fmt: skip
def test_names_of_other_tools_and_typos_are_recognized(typed: str, means: str) -> None:
    with pytest.raises(UserError, match=rf"Did you mean '{means}'\?$"):
        composed("data=cifar10", typed)


@pytest.mark.parametrize(
    ("typed", "advised"),
    [("'optim.lr=1e-3'", "optim.lr=1e-3"), ('optim.lr="1e-3"', "optim.lr=1e-3"), ('data.root=a"b', None),
     ("data.root=it's", None), ("data.root=a(b", None), ('data.root=a=b"c\'d', None)],
)  # fmt: skip
def test_advice_on_quotes_works_when_pasted(typed: str, advised: str | None) -> None:
    with pytest.raises(UserError) as said:
        composed("data=cifar10", typed)
    advice = re.split(r": (?=\S+=)|Use ", str(said.value).rstrip("."))[-1]
    (pasted,) = shlex.split(advice)
    assert advised in (None, pasted)
    (config,) = composed("data=cifar10", pasted)
    assert config.optim.lr == 1e-3 if advised else config.data.root == typed.partition("=")[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model.max_length=64"], r"^model\.max_length must be null .*, got 64\. .* applies only to text classifiers"),
        (["model.encoder=resnet18"], r"^model\.encoder must be null .* applies only to segmentation networks"),
        (["+model.max_length=64", "task=text", "data=rte"], r"^model\.max_length must be null"),
    ],
)
def test_settings_of_another_kind_of_network(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        composed("model=vit_digits", *arguments)
    with pytest.raises(SettingError, match=r"task must be text"):
        composed("model=bert_base")


@pytest.mark.slow
def test_a_setting_that_the_options_lack_is_named_although_a_name_has_no_default() -> None:
    words = ("task=segmentation", "data=mask_folder", "data.root=x", "model=smp", "model.name=unet")
    with pytest.raises(SettingError, match=r"^data\.augment\.name must be left out with task=segmentation, got none"):
        composed(*words, "model.encoder=resnet18", "data.augment.name=none")
    for setting, of in (("data.masks.flip=true", "images with masks"), ("+data.text.label=x", "texts")):
        with pytest.raises(
            SettingError, match=rf"^{setting[:10].strip('+')}\S* must be left out with data=digits, .*{of}"
        ):
            composed("data=digits", setting)
    with pytest.raises(SettingError, match=r"^data\.masks\.exif must be left out with data=digits"):
        composed("data=digits", "data.masks.exif=auto", "+step_stats.interval=3")


@pytest.mark.slow
def test_information_on_settings_that_do_not_exist_is_refused_in_one_line(program: Path) -> None:
    done = call(program, "optim.nope=1", "--info=config")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("optim.nope=1: there is no such setting")
    assert call(program, "optim.lr=1", "--info=config").returncode == 0


@pytest.mark.slow
def test_the_configuration_of_a_sweep_is_refused_and_jobs_of_a_single_run_noted(program: Path) -> None:
    shown = call(program, "-m", "method=full", "--cfg", "job")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith("--cfg prints the configuration of one run. Remove -m")
    assert "note: jobs has no effect on a single run" in call(program, "jobs=2").stderr


def test_the_quoting_that_is_advised_works() -> None:
    (config,) = composed('data.root="/a=b"')
    assert config.data.root == "/a=b"


def test_one_bad_job_of_a_sweep_is_refused_before_any_starts() -> None:
    with pytest.raises(SettingError, match=r"^method must be .*, got fulll\. Did you mean 'full'\?"):
        composed("method=full,fulll", sweep=True)
    with pytest.raises(SettingError, match=r"^optim.lr must be a number >= 1e-12, got abc"):
        composed("optim.lr=1,abc", sweep=True)


def test_an_option_that_does_not_exist_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["efficient-ft", "--lr", "1e-3", "data=digits"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert (
        unwrapped(capsys.readouterr().err)
        == "--lr is not an option. Settings have no dashes (KEY=VALUE). See --help.\n"
    )
