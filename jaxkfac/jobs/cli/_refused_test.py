"""A plan refuses what the run refuses, in the same words; a wrong path is named with its reader."""

import json
from pathlib import Path

import jax
import pytest

from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._checkpoint import option_differences
from jaxkfac.jobs.cli._paths import kind_of
from jaxkfac.jobs.cli.analysis._files import Folder

DECODER = "--model {llama} --data {chats} --max-length 64"
PAIRS = "--model {t5} --data {pairs} --max-length 64"
NO_GPU = pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU can run this")
REFUSED = [
    ("--model {t5}", "--data elements are conversations"),
    ("--model {llama} --data wordnet", "--data wordnet are pairs"),
    (f"{DECODER} --train all", "--train all is for encoder-decoders"),
    (f"{DECODER} --prefix x", "--prefix is for pairs, and"),
    (f"{DECODER} --source-key x", "--source-key is for pairs, and"),
    (f"{DECODER} --max-target-length 9", "--max-target-length is for pairs, and"),
    (f"{DECODER} --generate 3", "--generate is for pairs, and"),
    (f"{DECODER} --num-beams 3", "--num-beams is for pairs, and"),
    (f"{DECODER} --rouge", "--rouge is for pairs, and"),
    (f"{DECODER} --dropout 0.1", "--dropout is for encoder-decoders"),
    (f"{DECODER} --batching pack --num-lengths 3", "--num-lengths is for --batching pad"),
    (f"{DECODER} --questions 100000", "count must lie in 1 .. "),
    (f"{DECODER} --max-length 4000", "longer than the model's context, 256"),
    (f"{DECODER} --resume --overwrite", "give one of them"),
    (f"{DECODER} --mesh rows=2", "'rows=2' is none of it"),
    (f"{DECODER} --devices 2 --batch-size 3", "2 devices do not divide a batch of 3"),
    (f"{DECODER} --processes 2", "--processes needs --coordinator"),
    (f"{DECODER} --curvature .*q_prj", "layers='.*q_prj' matches no layer in full"),
    (f"{DECODER} --adapter.target .*q_prj", "matches no layer; the nearest names are"),
    (f"{DECODER} --adapter.exclude .*q_prj", "--adapter.exclude .*q_prj matches no layer"),
    (f"{DECODER} --adapter.rank-pattern q 3", "--adapter.rank-pattern q matches no layer"),
    (f"{DECODER} --adapter.alpha-pattern q 3", "--adapter.alpha-pattern q matches no layer"),
    (f"{DECODER} --adapter.start nowhere", "--adapter.start nowhere/adapter_config.json"),
    (f"{DECODER} --adamw.learning-rate -1", "adamw.learning_rate must not be negative"),
    (f"{DECODER} --adamw.b1 1", "adamw.b1 must lie in [0, 1)"),
    (f"{PAIRS} --style plain", "--style is for multiple-choice questions"),
    (f"{PAIRS} --train all --adapter.start {{adapter}}", "--adapter.start is for --train adapter"),
    (f"{PAIRS} --attention cudnn", "--attention cudnn has no relative positions"),
    pytest.param(f"{DECODER} --attention cudnn", "cudnn needs an NVIDIA GPU", marks=NO_GPU),
]


@pytest.mark.default(8)
@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_plan_refuses_what_the_run_refuses(words, message, small, tmp_path, capsys):
    words = ["finetune", *words.format(**small).split(), "--output", str(tmp_path)]
    said = []
    for plan in (["--plan", "--device-bytes", "1GB"], []):
        assert main([*words, *plan]) == 2
        said.append(capsys.readouterr().err.strip().splitlines()[-1])
    assert message in said[0] and said[0] == said[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"finetune {DECODER} --device-bytes 1GB", "--device-bytes goes with --plan"),
        (f"finetune {DECODER} --compiler cpu", "--compiler goes with --plan"),
        ("analyze {llama} --damping -1", "damping must be zero or positive"),
        ("analyze {llama} --num-examples 0", "num_examples must be at least 1"),
        ("analyze {llama} --max-condition 0.5", "max_condition must be at least 1"),
        ("analyze {llama} --base {other}", "--base is for an adapter, and"),
        ("analyze {llama} --source-key x", "--source-key is for pairs, and"),
        ("influence {llama} --train {texts} --queries {texts} --prefix x", "--prefix is for pairs"),
        ("influence {llama} --train {texts} --queries {texts} --memory x", "--memory='x'"),
        ("train --kfac.learning-rate -1", "kfac.learning_rate must not be negative"),
        ("plan --device-bytes 1GB --preset smollm2", "`jaxkfac finetune --plan --model` plans"),
        ("plan --device-bytes 1GB --preset {llama}", "is a pretrained model"),
        ("finetune --model smolm2", "does not exist; the nearest names are 'smollm2'"),
        ("finetune --model {llama} --data wordnt", "the nearest names are 'wordnet'"),
        ("analyze smolm2", "does not exist; the nearest names are 'smollm2'"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_before_anything_is_loaded(
    words, message, small, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxkfac.jobs.cli.influence._run.load_model", None)
    assert main(words.format(**small).split()) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_devices_of_another_machine_are_planned_and_the_plan_says_for_what(small, capsys):
    words = f"finetune {DECODER} --plan --device-bytes 1GB --mesh data=4,model=2"
    assert main(words.format(**small).split()) == 0
    assert "of 8 devices each needs at most that" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax.adamw needs it
@pytest.mark.parametrize(
    ("model", "like", "data"),
    [
        ("flan-t5-xl", "t5", "pairs"),
        ("smollm2", "llama", "chats"),
    ],
)
def test_a_folder_is_read_though_a_model_has_its_name(
    model, like, data, small, tmp_path, monkeypatch, capsys
):
    (tmp_path / model).symlink_to(small[like])
    monkeypatch.chdir(tmp_path)
    keys = (
        ["--source-key", "en", "--target-key", "de", "--generate", "0"] if data == "pairs" else []
    )
    words = ["finetune", "--model", model, "--data", small[data], *keys, "--max-length", "32"]
    assert main([*words, "--plan", "--device-bytes", "1GB"]) == 0
    assert "GiB" not in capsys.readouterr().out.split("It fits")[0]
    few = ["--steps", "1", "--batch-size", "2", "--samples", "0", "--curvature", "None"]
    assert main([*words, *few]) == 0


# ---------------- folders of the wrong kind


PLACES = {
    "run/kfac/3": "`jaxkfac analyze` reads",
    "run/kfac": "a folder of checkpoints: `jaxkfac analyze` reads",
    "run": "the output folder of `jaxkfac train`, which `jaxkfac analyze` reads",
    "tuned/adapter": "an adapter: `jaxkfac analyze`, `jaxkfac adapter inspect`",
    "tuned": "the output folder of `jaxkfac finetune`: `jaxkfac analyze` and",
    "whole": "`jaxkfac influence` and `jaxkfac analyze` read the model in",
    "begun": "the output folder of a `jaxkfac finetune` that has not ended",
    "scored": "the output folder of `jaxkfac influence`, which reads it with --resume",
    "analyzed": "the output folder of `jaxkfac analyze`, which reads it with --resume",
    "texts.jsonl": "a file of texts",
}
FILES = (
    "run/kfac/3", "tuned/adapter/adapter_config.json", "tuned/adapter/adapter_model.safetensors",
    "tuned/checkpoints/2", "whole/model/config.json", "whole/checkpoints/2", "begun/checkpoints/2",
    "scored/stages/factors", "analyzed/analysis.json", "texts.jsonl",
)  # fmt: skip


@pytest.fixture
def places(tmp_path):
    """Folders as each command writes them."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize("name", PLACES)
def test_a_path_of_another_command_is_named_with_the_commands_that_read_it(name, places, capsys):
    path = places / name
    assert PLACES[name] in kind_of(path)
    texts = str(places / "texts.jsonl")
    refusing = [
        ["finetune", "--model", str(path)],
        ["influence", str(path), "--train", texts, "--queries", texts],
        ["plan", "--preset", str(path), "--device-bytes", "1GB"],
    ]
    if name in ("begun", "scored", "analyzed", "texts.jsonl"):
        refusing.append(["analyze", str(path)])
    if name != "tuned/adapter":
        refusing.append(["adapter", "inspect", str(path)])
    for words in refusing:
        assert main(words) == 2
        said = capsys.readouterr().err
        assert kind_of(path) in said or (path.is_file() and "is a file" in said), words


def test_a_folder_of_a_stranger_has_no_kind(tmp_path):
    (tmp_path / "x").touch()
    assert kind_of(tmp_path) is None and kind_of(tmp_path / "nowhere") is None


# ---------------- what differs from the run that is continued


def test_what_has_changed_is_named():
    stored = {"seed": 1, "train_crc32": "a", "adamw": {"b2": 0.9}}
    now = {"seed": 2, "train_crc32": "b", "adamw": {"b2": 0.8}}
    assert [*option_differences(stored, now)] == [
        "option adamw.b2: 0.9 in the checkpoint, 0.8 requested",
        "option seed: 1 in the checkpoint, 2 requested",
        "the training texts have changed: CRC-32 a in the checkpoint, b now",
    ]


def test_an_analysis_that_is_continued_says_which_option_differs(tmp_path):
    folder = Folder(tmp_path)
    begun = {"model": "m", "weights": [], "options": {"seed": 0, "texts": 3}, "texts": "a"}
    folder.begin(begun, resume=False)
    folder.note(begun)
    assert folder.begin(begun, resume=True) == json.loads(json.dumps(begun))
    now = begun | {"options": {"seed": 1, "texts": 3}, "texts": "b"}
    with pytest.raises(ValueError, match="holds another analysis") as caught:
        folder.begin(now, resume=True)
    message = str(caught.value)
    assert "option seed: 0 in the checkpoint, 1 requested" in message
    assert "the texts have changed" in message and "option texts" not in message
    assert Path(folder.path) == tmp_path
