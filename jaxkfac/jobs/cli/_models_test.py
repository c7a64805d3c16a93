"""`jaxkfac models` says what is known and what is here, and downloads nothing."""

import json

from jaxkfac.jobs.cli._inspect import run_models
from jaxkfac.jobs.cli._inspect_options import ModelsArguments
from jaxkfac.jobs.models.pretrained import KNOWN, cached_file


def test_a_known_file_is_not_there_then_damaged_then_there(tmp_path, capsys):
    (known,) = KNOWN
    file = cached_file(known, tmp_path)
    run_models(ModelsArguments(cache_dir=tmp_path))
    assert known.name in (shown := capsys.readouterr().out) and "Apache-2.0" in shown
    assert not list(tmp_path.iterdir())
    file.parent.mkdir()
    file.write_bytes(b"half")
    run_models(ModelsArguments(cache_dir=tmp_path))
    assert "damaged" in capsys.readouterr().out
    with file.open("wb") as opened:
        opened.truncate(known.nbytes)
    run_models(ModelsArguments(cache_dir=tmp_path))
    assert "damaged" not in (shown := capsys.readouterr().out) and "yes" in shown
    run_models(ModelsArguments(cache_dir=tmp_path, json=True))
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["cached_bytes"] == row["bytes"] == known.nbytes and row["path"] == str(file)
