"""`jaxkfac adapter inspect` reads a folder without a model."""

import json

import jax.numpy as jnp
import pytest

from jaxkfac._errors import DamagedFileError
from jaxkfac.jobs.cli._inspect import run_adapter
from jaxkfac.jobs.cli._inspect_options import AdapterArguments
from jaxkfac.lslora import Adapter, Config, save

A, B = jnp.ones((2, 4, 3)), jnp.ones((2, 3, 5))
CURVED = Adapter(A, B, jnp.array([[0.0, 1, 0, 0], [0.5, 1, -0.25, 0]]), jnp.array([1.0, 3.0]))


def test_every_module_has_a_row_with_its_numbers(tmp_path, capsys):
    save(tmp_path, {"layers/q_proj/kernel": CURVED}, Config(rank=3), name="task")
    run_adapter(AdapterArguments("inspect", tmp_path, name="task"))
    shown = capsys.readouterr().out
    title, _, heading, head, *blocks = shown.splitlines()[:6]
    assert (title, heading) == ("LSLORA adapter 'task'", "layers.*.q_proj: 4 → 5, rank 3")
    assert head.split() == "block c0 c1 c2 c3 σ deviation nonlin.".split()
    assert [b.split() for b in blocks] == [
        "0 0 1 0 0 1 0 0".split(),
        "1 0.5 1 -0.25 0 3 0.188 0.25".split(),
    ]
    run_adapter(AdapterArguments("inspect", tmp_path, name="task", json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["fourier_placement"] == "output"
    assert found["modules"]["layers.1.q_proj"] == {
        "rank": 3,
        "in": 4,
        "out": 5,
        "coefficients": [0.5, 1.0, -0.25, 0.0],
        "sigma": 3.0,
        "deviation": 0.1875,
        "nonlinearity": 0.25,
    }


def test_slices_are_counted(tmp_path, capsys):
    twelve = Adapter(*(jnp.repeat(x[:1], 12, 0) for x in CURVED))
    save(tmp_path, {"layers/q_proj/kernel": twelve}, Config(rank=3))
    run_adapter(AdapterArguments("inspect", tmp_path, json=True))
    rows = json.loads(capsys.readouterr().out)["modules"]
    assert list(rows) == [f"layers.{i}.q_proj" for i in range(12)]


@pytest.mark.parametrize("columns", ["40", "80"])
def test_lines_of_a_decoders_adapter_are_whole_and_fit_eighty_columns(
    columns, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", columns)
    small = CURVED._replace(coefficients=-1.2345e-5 * (1 + CURVED.coefficients))
    name = "decoder/model/layers/self_attn/q_proj/kernel"
    save(tmp_path, {name: small, name.replace("q", "up"): small}, Config(rank=3))
    run_adapter(AdapterArguments("inspect", tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "decoder.model.layers.*.self_attn.up_proj: 4 → 5, rank 3" in lines
    numbers = "1 -1.85e-05 -2.47e-05 -9.26e-06 -1.23e-05 3 0.25 2.16e-05".split()
    assert [line.split() for line in lines].count(numbers) == 2


def test_a_family_has_one_size_and_one_rank(tmp_path, capsys):
    wide = CURVED._replace(b=jnp.ones((2, 3, 6)))
    save(tmp_path, {"a/0/q/kernel": CURVED, "a/1/q/kernel": wide}, Config(rank=3))
    run_adapter(AdapterArguments("inspect", tmp_path))
    shown = capsys.readouterr().out
    assert ": 4 → 5, rank 3" in shown and ": 4 → 6, rank 3" in shown


def test_plain_lora_is_said_to_be_plain(tmp_path, capsys):
    plain = {"q_proj/kernel": Adapter(A[0], B[0], None, None)}
    save(tmp_path, plain, Config(rank=3, fourier_placement="none"), dialect="peft")
    run_adapter(AdapterArguments("inspect", tmp_path))
    assert "plain LoRA: there is no nonlinearity" in " ".join(capsys.readouterr().out.split())


def test_an_edited_config_is_shown_with_a_warning(tmp_path, capsys):
    save(tmp_path, {"q/kernel": CURVED}, Config(rank=3))
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_dropout": 0.0', '"lora_dropout": 0.25'))
    run_adapter(AdapterArguments("inspect", tmp_path, json=True))
    shown = capsys.readouterr()
    assert json.loads(shown.out)["config"]["lora_dropout"] == 0.25
    assert shown.err.startswith(f"warning: {file} is damaged, or was edited")
    file.write_text("{")
    with pytest.raises(DamagedFileError):
        run_adapter(AdapterArguments("inspect", tmp_path))


def test_a_folder_without_an_adapter_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no adapter in .*: it has no adapter_config.json"):
        run_adapter(AdapterArguments("inspect", tmp_path))
    with pytest.raises(FileNotFoundError, match="no adapter in .*nope, which does not exist"):
        run_adapter(AdapterArguments("inspect", tmp_path / "nope"))
