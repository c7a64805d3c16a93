"""What is at a path that was mistyped, and what was expected there."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxkfac.jobs.cli._checkpoint import check_output, existing_run
from jaxkfac.jobs.cli._paths import MODEL_NAMES, ModelSource, model_source, no_checkpoint
from jaxkfac.jobs.cli.finetune._decoder import DECODERS
from jaxkfac.jobs.cli.finetune._encoder_decoder import ENCODER_DECODERS


def test_a_path_without_a_checkpoint_is_described(tmp_path):
    file, folder = tmp_path / "chats.jsonl", tmp_path / "folder"
    file.write_text("{}")
    folder.mkdir()
    (folder / "x").touch()
    said = {path: str(no_checkpoint(path)) for path in (file, folder, tmp_path / "nowhere")}
    assert f"no checkpoint at {file}, which is a file" in said[file]
    assert "does not exist" not in said[file] and "texts as --data" in said[file]
    assert "which holds x; expected" in said[folder]
    assert "nowhere, which does not exist; expected" in said[tmp_path / "nowhere"]


def test_the_model_names_are_those_that_need_no_path():
    assert {"smollm2", *ENCODER_DECODERS, *DECODERS} == {*MODEL_NAMES}


@pytest.mark.parametrize("begun", [True, False])
def test_resuming_nothing_is_said(tmp_path, capsys, begun):
    folder = tmp_path / "kfac"
    folder.mkdir()
    if begun:
        (folder / "3").touch()
    arguments = SimpleNamespace(output=tmp_path, resume=True, overwrite=False)
    check_output(arguments, existing_run([folder]))
    said = capsys.readouterr().err
    expected = f"--resume: nothing to resume in {tmp_path}, so the run starts anew\n"
    assert said == ("" if begun else expected)


def test_a_model_an_adapter_and_the_folder_of_a_run_are_told_apart(tmp_path):
    base, run, other = tmp_path / "base", tmp_path / "run", tmp_path / "other"
    for folder in (base, run / "adapter", other):
        folder.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    config = run / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert model_source(base) == ModelSource(str(base))
    assert (
        model_source(run) == ModelSource(str(base), run / "adapter") == model_source(config.parent)
    )
    assert model_source(Path("smollm2")) == ModelSource("smollm2")
    assert model_source(other) is None and model_source(tmp_path / "absent") is None
    for name in (str(tmp_path / "absent"), None):
        config.write_text(json.dumps({"base_model_name_or_path": name}))
        with pytest.raises(FileNotFoundError, match=r"is an adapter, and its base model.*--base"):
            model_source(run)
        assert model_source(run, base) == ModelSource(str(base), run / "adapter")
