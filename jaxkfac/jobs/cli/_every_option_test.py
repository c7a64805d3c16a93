"""Every option of every command: a row with a value of its own, planned, and run to a first step.

A run gives many options, each a value other than its default, and has to read every one of them:
an option that nothing reads would be ignored. An option without a run fails the first test.
"""

import dataclasses
import json
import sys
import types
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import tyro

from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._main import COMMANDS, _parse, imported
from jaxkfac.jobs.cli._options import ModelOptions
from jaxkfac.planning import PRESETS, DecoderLayout

(POSITIONAL,) = tyro.conf.Positional[int].__metadata__
COMMAND = {command.name: command for command in COMMANDS}


class Run(NamedTuple):
    """Words of a command that ends with its first step.

    Attributes:
        command: Name of the command.
        words: Its words; names in braces are places of the fixture ``small``.
        before: A command line that runs before it.
    """

    command: str
    words: str
    before: str = ""


VIT = "--model.width 8 --model.hidden 12 --model.depth 1 --model.num-heads 2 --model.patch-size 4"
CURVE = "jaxkfac.jobs.cli.finetune._problem_test:QUADRATIC"
RUNS = {
    "train kfac": Run(
        "train",
        f"--preset digits {VIT} --optimizer kfac --output {{out}} --overwrite --checkpoint-every 1 "
        "--seeds 2 --json --debug --seed 1 --split-seed 1 --steps 1 --batch-size 100 "
        "--gradient-accumulation-steps 1 --max-shift 0 --fisher empirical "
        "--kfac.learning-rate 1e-3 --kfac.damping 1e-2 --kfac.damping-mode exact --kfac.decay 0.9 "
        "--kfac.refresh-every 1 --kfac.momentum 0.5 --kfac.norm-constraint 1e-3 "
        "--kfac.weight-decay 0.1 --kfac.max-condition 1e4 --kfac.warmup 0.2",
    ),
    "train adaptive": Run(
        "train",
        f"{VIT} --optimizer kfac --output {{out}} --steps 1 --batch-size 100 --kfac.quadratic "
        "--kfac.adapt-damping --kfac.weight-decay 1e-3",
    ),
    "train adamw": Run(
        "train",
        f"{VIT} --optimizer adamw --output {{out}} --resume --epochs 1 --batch-size 400 "
        "--devices 2 --mesh data=2 --adamw.learning-rate 1e-3 --adamw.b2 0.9 "
        "--adamw.weight-decay 0.1 --adamw.warmup 0.2 --adamw.clip-norm 0.5",
    ),
    "finetune a decoder": Run(
        "finetune",
        "--model {llama} --data {chats} --questions {questions} --style plain --system Brief. "
        "--seed 3 --steps 1 --batch-size 2 --gradient-accumulation-steps 2 --batching pack "
        "--accumulator-dtype bfloat16 --shuffle-window 3 --max-length 64 --loss-on all "
        "--label-smoothing 0.1 --dtype bfloat16 --no-remat --schedule linear --warmup 0.5 "
        "--clip-norm 0.5 --adapter.target .*_proj/kernel --adapter.exclude .*down_proj/kernel "
        "--adapter.rank 2 --adapter.alpha 3 --adapter.fourier-placement bottleneck "
        f"--adapter.nonlinearity {CURVE} --adapter.init-sigma 2 --adapter.reg-weight 0.1 "
        "--adapter.dropout 0.1 --adapter.rslora --adapter.rank-pattern .*o_proj/kernel 3 "
        "--adapter.alpha-pattern .*o_proj/kernel 4.0 --adapter.modules-to-save .*norm/scale "
        "--adamw.learning-rate 0.01 --adamw.b1 0.8 --adamw.b2 0.9 --adamw.weight-decay 0.1 "
        "--strict --checkpoint-every 1 --log-every 1 --evaluate-every 1 --patience 1 "
        "--diagnose-every 1 --samples 1 --sample-tokens 2 --curvature .*o_proj/kernel/[ab] "
        "--log trackio --json --debug --output {out}",
    ),
    "finetune with kfac": Run(
        "finetune",
        "--model {llama} --data {chats} --optimizer kfac --num-lengths 2 --epochs 1 --batch-size 4 "
        "--max-length 64 --samples 0 --curvature None --devices 2 --adapter.split --overwrite "
        "--adapter.ensure-weight-tying --adapter.sigma-from-data 2 --adapter.dialect peft "
        "--kfac.learning-rate 1e-2 --kfac.damping 1e-2 --kfac.damping-mode exact --kfac.decay 0.9 "
        "--kfac.refresh-every 1 --kfac.momentum 0.5 --kfac.norm-constraint None --output {out} "
        "--kfac.weight-decay 0.1 --kfac.max-condition 1e4 --kfac.max-dense 16 "
        "--kfac.fisher empirical",
    ),
    "finetune from an adapter": Run(
        "finetune",
        "--model {llama} --data {chats} --adapter.start {adapter} --resume --steps 1 "
        "--output {out} --batch-size 2 --max-length 64 --samples 0 --curvature None",
    ),
    "finetune in four bits": Run(
        "finetune",
        "--model {phi3} --data {chats} --quantize all --mesh data=2 --steps 1 --batch-size 2 "
        "--max-length 64 --samples 0 --curvature None --output {out}",
    ),
    "finetune a gguf file": Run(
        "finetune",
        "--model {gguf} --gguf-pre qwen2 --data {chats} --steps 1 --batch-size 2 --max-length 64 "
        "--samples 0 --curvature None --output {out}",
    ),
    "finetune pairs": Run(
        "finetune",
        "--preset flan-t5-xl --model {t5} --data {pairs} --source-key en --target-key de "
        "--prefix p: --train all --optimizer adafactor --adafactor.learning-rate 1e-3 "
        "--adafactor.clipping-threshold 0.5 --adafactor.weight-decay 0.1 --max-length 24 "
        "--max-target-length 20 --dropout 0.2 --generate 1 --num-beams 2 --rouge --steps 1 "
        "--batch-size 2 --sample-tokens 2 --samples 1 --output {out}",
    ),
    "finetune plan": Run("finetune", "--model {llama} --plan --device-bytes 1GB --compiler cpu"),
    "influence": Run(
        "influence",
        "{llama} --train {texts} --queries {texts} --factors-from 3 --fisher empirical --ekfac "
        "--layers .*(o_proj|down_proj)/kernel --max-dense 16 --damping 0.1 --query-rank 2 --top 1 "
        "--batch-size 2 --max-length 16 --loss-on all --dtype bfloat16 --memory 1GB --seed 1 "
        "--store {out}/store --store-rank 1 --output {out} --overwrite --json --debug",
    ),
    "influence of pairs": Run(
        "influence",
        "{t5} --train {pairs}/train.jsonl --queries {pairs}/validation.jsonl --source-key en "
        "--target-key de --prefix p: --max-length 16 --max-target-length 8 --factors-from 2 "
        "--layers decoder/.*/DenseReluDense/.* --output {out} --resume",
    ),
    "influence of a gguf file": Run(
        "influence",
        "{gguf} --gguf-pre qwen2 --train {texts} --queries {texts} --max-length 16 "
        "--layers .*o_proj/kernel --output {out} --bases {out}/first",
        before="influence {gguf} --gguf-pre qwen2 --train {texts} --queries {texts} "
        "--max-length 16 --layers .*o_proj/kernel --output {out}/first",
    ),
    "analyze": Run(
        "analyze",
        "{llama} --data {texts} --texts 3 --max-length 16 --batch-size 2 --fisher mc "
        "--dtype bfloat16 --max-dense 16 --decompose .*o_proj/kernel.* --decompose-dtype float32 "
        "--lanczos 1 --lanczos-steps 2 --lanczos-texts 1 --seed 1 --max-condition 1e3 "
        "--num-examples 10 --damping 2 --compare {other} --device-bytes 15GB --output {out} "
        "--overwrite --strict --checkpoint-every 1 --figures {out}/figures "
        "--report {out}/r.html --tables --debug",
    ),
    "analyze an adapter": Run(
        "analyze",
        "{adapter} --base {llama} --data {texts} --texts 2 --max-length 16 --lanczos 0 --output "
        "{out} --resume --decompose .*o_proj/kernel.* --json",
    ),
    "analyze pairs": Run(
        "analyze",
        "{t5} --data {pairs} --source-key en --target-key de --prefix p: --texts 2 --lanczos 0 "
        "--max-length 16 --max-target-length 8 --output {out} --decompose .*/wo/kernel.*",
    ),
    "analyze a gguf file": Run(
        "analyze",
        "{gguf} --gguf-pre qwen2 --data {texts} --texts 2 --max-length 16 --lanczos 0 --output "
        "{out} --keep-factors",
    ),
    "analyze a checkpoint": Run(
        "analyze",
        "{out}/run --batches 2 --damping 2",
        before=f"train {VIT} --optimizer kfac --output {{out}}/run --steps 1 --batch-size 100",
    ),
    "analyze plan": Run(
        "analyze", "{llama} --plan --data {texts} --texts 2 --max-length 16 --lanczos 0"
    ),
    "adapter": Run("adapter", "inspect {adapter} --name other --json --debug"),
    "models": Run("models", "--cache-dir {out} --json --debug"),
    "doctor": Run("doctor", "--json --debug"),
    "plan": Run(
        "plan",
        "--device-bytes 1TB --preset tiny --host-bytes 1TB --headroom 0.2 --no-donate "
        "--max-gradients 9 --batch 2 --tokens 8 --dtype bfloat16 --gradient-accumulation-steps 2 "
        "--accumulator-dtype float32 --accumulator-memory-kind pinned_host --remat --optimizer "
        "kfac --damping-mode pi --packed --collect 2 --max-dense 64 --max-factor-bytes 1TB "
        "--decay 0.99 --adapter-rank 4 --basis-rank 4 --options remat adapters low_rank host_bases "
        "--compiler cpu --compiled none --json --debug",
    ),
    "plan on devices": Run(
        "plan",
        "--device-bytes 1TB --preset tiny --batch 2 --tokens 8 --devices 2 --fully-sharded "
        "--compiler cpu --compiler-python {python} --curvature none --options",
    ),
    "plan an adapter": Run(
        "plan",
        "--device-bytes 1TB --preset llama-1b --train adapter --tokens 16 "
        "--curvature analyze --options",
    ),
}
# Given to several processes, which _several_processes_test starts.
OF_PROCESSES = {"--coordinator", "--processes", "--process"}
VIT_OPTIONS = {f"--model.{field}".replace("_", "-") for field in vars(ModelOptions())}
# Read where the words are parsed, or with a single value, or copied together into a config.
OF_WORDS = {"--debug", "--preset", "action", *VIT_OPTIONS}
# Refused on a CPU, by the plan and by the run: refused_test has it.
OF_GPUS = {"--attention"}


class Option(NamedTuple):
    """An option of a command.

    Attributes:
        owner: Dataclass of its field.
        field: Name of the field.
        default: Its default.
        path: Names that lead to it from the arguments.
        only: Whether it can have no other value.
    """

    owner: type
    field: str
    default: Any
    path: tuple[str, ...]
    only: bool


def options_of(
    owner: type, default: Any = None, prefix: str = "", path: tuple[str, ...] = ()
) -> dict[str, Option]:
    """The options of a command by their words, from its dataclasses."""
    found, hints = {}, get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        made = field.default_factory
        value = field.default if made is dataclasses.MISSING else made()
        value = value if default is None else getattr(default, field.name)
        hint, place = hints[field.name], (*path, field.name)
        notes = getattr(hint, "__metadata__", ())
        if dataclasses.is_dataclass(value):
            is_plain = any(getattr(note, "name", None) == "" for note in notes)
            inner = prefix if is_plain else f"{prefix}{field.name}."
            found |= options_of(type(value), value, inner, place)
            continue
        name = f"{prefix}{field.name}".replace("_", "-")
        is_named = POSITIONAL not in notes
        word = f"--{'no-' * (value is True)}{name}" if is_named else name
        bare = get_args(hint)[0] if notes else hint
        only = get_origin(bare) is Literal and len(get_args(bare)) == 1
        found[word] = Option(owner, field.name, value, place, only)
    return found


OPTIONS = {name: options_of(imported(command.arguments)) for name, command in COMMAND.items()}


def given(run: Run) -> dict[str, Option]:
    """The options that the words of a run name, and those that have no names."""
    return {
        word: option
        for word, option in OPTIONS[run.command].items()
        if word in run.words.split() or not word.startswith("--")
    }


@pytest.mark.parametrize("command", COMMAND)
def test_every_option_has_a_run(command, capsys):
    rows = {word for run in RUNS.values() if run.command == command for word in given(run)}
    elsewhere = (OF_PROCESSES | OF_GPUS) & {*OPTIONS[command]}
    assert {*OPTIONS[command]} - rows - elsewhere == set()
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert [word for word in OPTIONS[command] if word[0] == "-" and word not in shown] == []


def words_of(run, small, out, words=None):
    places = small | {"out": str(out), "python": sys.executable}
    return [word.format(**places) for word in (words or run.words).split()]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_values_that_are_not_the_defaults(name, small, tmp_path):
    run = RUNS[name]
    arguments = _parse(COMMAND[run.command], words_of(run, small, tmp_path))
    for word, option in given(run).items():
        value = arguments
        for part in option.path:
            value = getattr(value, part)
        assert option.only or value != option.default, word


@pytest.fixture
def tiny_layout(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", DecoderLayout(2, 8, 2, 12, 11, fused=True))


PLANNED = ("finetune a decoder",)  # the others are slow


@pytest.mark.parametrize(
    "name",
    [
        name if name in PLANNED else pytest.param(name, marks=pytest.mark.slow)
        for name, run in RUNS.items()
        if run.command == "finetune"
    ],
)
def test_what_a_run_takes_its_plan_takes(name, small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", types.ModuleType("trackio"))
    words = words_of(RUNS[name], small, tmp_path)
    assert main(["finetune", *words, "--plan", "--device-bytes", "1GB"]) == 0
    assert "It fits" in capsys.readouterr().out


CHECKS = {"__post_init__", "check", "_check", "check_optimizers", "__hash__", "__eq__", "__repr__"}


@pytest.fixture
def read(monkeypatch):
    """Grows by ``(class, field)`` with every reading of an option, without checks and copies."""
    found = set()
    owners = {option.owner for options in OPTIONS.values() for option in options.values()}

    def __getattribute__(self, name):
        frame = sys._getframe(1)
        is_copy = frame.f_globals.get("__name__", "").partition(".")[0] in ("dataclasses", "tyro")
        if not is_copy and frame.f_code.co_name not in CHECKS:
            found.add((type(self), name))
        return object.__getattribute__(self, name)

    for owner in owners:
        monkeypatch.setattr(owner, "__getattribute__", __getattribute__, raising=False)
    return found


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax's optimizers need it
@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_its_first_step_and_reads_every_option(
    name, small, tmp_path, monkeypatch, tiny_layout, read, capsys
):
    run = RUNS[name]
    tracker = types.ModuleType("trackio")
    for function in ("init", "log", "finish"):
        setattr(tracker, function, lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    if run.before:
        assert main(words_of(run, small, tmp_path, run.before)) == 0
        read.clear()
    assert main([run.command, *words_of(run, small, tmp_path)]) == 0, capsys.readouterr().err
    unread = [
        word
        for word, option in given(run).items()
        if (option.owner, option.field) not in read and word not in OF_WORDS
    ]
    assert unread == []
    shown = capsys.readouterr().out
    if "--json" in run.words.split():
        json.loads(shown.splitlines()[-1])
