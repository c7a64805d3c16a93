"""The front door: help, version, and errors of one line."""

import subprocess
import sys

import pytest

import jaxkfac
from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._main import COMMANDS, imported


def test_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxkfac {jaxkfac.__version__}\n"


def test_help_has_a_line_for_each_command(capsys):
    assert main(["--help"]) == main([]) == 0
    shown = capsys.readouterr().out
    width = max(len(command.name) for command in COMMANDS)
    for command in COMMANDS:
        assert f"{command.name:<{width}}  {command.summary}" in shown
        assert imported(command.arguments).__doc__.splitlines()[0] == command.summary
        assert callable(imported(command.run))
    assert "jaxkfac train --preset digits" in shown


@pytest.mark.default(7)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--help"], "--gradient-accumulation-steps"),
        (["train", "--help"], "--kfac.damping"),
        (["finetune", "--help"], "jaxkfac finetune --data chats.jsonl"),
        (["finetune", "--help"], "--adapter.fourier-placement"),
        (["analyze", "--help"], "jaxkfac analyze runs/digits"),
        (["analyze", "--help"], "--compare"),
        (["doctor", "--help"], "jaxkfac doctor"),
        (["influence", "--help"], "--factors-from"),
        (["models", "--help"], "jaxkfac models --cache-dir weights"),
        (["adapter", "--help"], "jaxkfac adapter inspect"),
    ],
)
def test_help_describes_what_can_be_asked_for(words, expected, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    assert expected in capsys.readouterr().out


QUICK = ["--help", "--version", "trian", *(f"{command.name} --help" for command in COMMANDS)]
MISTYPED = {
    "train --output {file}": "{file} is a file",
    "analyze nowhere": "no checkpoint at nowhere, which does not exist",
    "analyze {model} --compare nowhere": "no model at nowhere, which does not exist",
    "analyze {model} --data nowhere": "records at nowhere, which does not exist",
    "analyze {model} --report {file}/x.html": "--report {file}: {file} is a file",
    "finetune --model nowhere": "no model at nowhere, which does not exist",
    "finetune --data nowhere": "records at nowhere, which does not exist",
    "finetune --questions nowhere": "--questions nowhere: expected a file",
    "finetune --adapter.start nowhere": "nowhere/adapter_config.json: expected a file",
    "finetune --output {file}": "{file} is a file",
    "influence --train nowhere --queries {file}": "--train nowhere: expected a file",
    "influence --train {file} --queries nowhere": "--queries nowhere: expected a file",
    "influence nowhere --train {file} --queries {file}": "no model at nowhere",
    "influence --train {file} --queries {file} --bases nowhere": "--bases nowhere holds no run",
    "influence --train {file} --queries {file} --store {file}": "--store {file}: {file} is a file",
    "adapter inspect nowhere": "no adapter in nowhere, which does not exist",
    "plan --device-bytes 1GB --compiler-python nowhere": "nowhere: there is no such program",
}


@pytest.mark.slow
def test_neither_help_nor_a_mistyped_path_waits_for_jax(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    places = {"file": str(tmp_path / "file"), "model": str(tmp_path)}
    mistyped = {words.format(**places): said.format(**places) for words, said in MISTYPED.items()}
    code = f"""
import contextlib, io, sys
from jaxkfac.jobs.cli import main
slow = {{"jax", "numpy", "matplotlib", "tensorboardX"}}
for words in {QUICK!r}:
    with contextlib.suppress(SystemExit):
        main(words.split())
    assert not slow & set(sys.modules), words
for words, expected in {mistyped!r}.items():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(words.split()) == 2, words
    assert expected in said.getvalue(), (words, said.getvalue())
    assert not slow & set(sys.modules), words
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_processes_of_one_run_check_their_paths_together(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    words = ["train", "--output", str(tmp_path / "file"), "--coordinator", "nowhere:1"]
    called = []
    monkeypatch.setattr("jaxkfac.jobs.cli._train.run_train", called.append)
    assert main(words) == 0 and called


@pytest.mark.slow
def test_the_import_of_jax_is_announced():
    command = [sys.executable, "-m", "jaxkfac", "plan", "--device-bytes", "1GB", "--batch", "0"]
    said = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
    assert said[0] == "jaxkfac plan: importing JAX"
    assert said[1].startswith("jaxkfac: batch=0")


def test_a_command_that_does_not_exist_is_named_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "no command 'trian': did you mean train?" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert "no command 'xyz': jaxkfac --help" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["train"]) == 2
    assert 'pip install "jaxkfac[cli]"' in capsys.readouterr().err


@pytest.mark.default(2, slow=4)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["analyze", "nowhere"], "no checkpoint at nowhere, which does not exist"),
        (["analyze", "nowhere", "--batches", "1"], "batches must be at least 2"),
        (["train", "--epochs", "0"], "epochs"),
        (["train", "--batch-size", "5000"], "batch_size"),
        (["train", "--kfac.warmup", "2"], "warmup"),
        (["train", "--kfac.damping", "-1"], "damping"),
        (["train", "--kfac.max-condition", "0.5"], "max_condition"),
        (["train", "--kfac.refresh-every", "0"], "refresh_every"),
        (["train", "--model.num-heads", "5"], "num_heads"),
        (["train", "--resume", "--overwrite"], "give one of them"),
        (["finetune", "--batch-size", "0"], "batch_size"),
        (["finetune", "--max-length", "1"], "max_length"),
        (["finetune", "--seed", "-1"], "seed"),
        (["finetune", "--model", "nowhere"], "no model at nowhere, which does not exist"),
    ],
)
def test_a_wrong_option_is_explained_in_a_line_with_code_2(
    words, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("command", ["train", "finetune"])
@pytest.mark.parametrize("below", ["", "/x"])
def test_an_output_that_cannot_be_a_folder_is_explained_in_a_line(command, below, capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    assert main([command, "--output", f"{file}{below}"]) == 2
    captured = capsys.readouterr()
    assert f"{file} is a file" in captured.err and "Traceback" not in captured.err


def test_what_finetune_needs_is_named_before_anything_is_loaded(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert main(["finetune", "--output", str(tmp_path / "out")]) == 2
    assert 'pip install "jaxkfac[finetune]"' in capsys.readouterr().err


def test_debug_shows_where_an_error_comes_from():
    with pytest.raises(FileNotFoundError):
        main(["analyze", "nowhere", "--debug"])
