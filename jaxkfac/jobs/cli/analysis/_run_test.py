"""Whole analyses of a tiny decoder: what they find, how they stop and go on."""

import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.jobs.cli import _options
from jaxkfac.jobs.cli.analysis import _files, _stages
from jaxkfac.jobs.cli.analysis._program import AnalyzedModel
from jaxkfac.jobs.cli.analysis._texts import analyzed, batches_of, on_device, read_texts
from jaxkfac.jobs.cli.analysis.conftest import write_model
from jaxkfac.jobs.models import load_decoder
from jaxkfac.jobs.report import spectrum_records

DOWN = "model/layers/mlp/down_proj/kernel"


@pytest.fixture
def small_passes(monkeypatch):
    """As many passes as there can be, with the sums of each saved after every batch."""

    def fit(self, room, *, held_bytes, other_stages=0, every=True):
        params, batch, _ = self._shapes
        return self.use(self.collector.budgets(params, batch).least)

    monkeypatch.setattr(AnalyzedModel, "fit", fit)


def found(output):
    """What is the same in every run: no times, no bytes."""
    record = json.loads((output / "metrics.json").read_text())
    kept = ("texts", "spectra", "capacity", "capacity_comparison", "exact")
    return {name: record[name] for name in kept if name in record}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_passes_over_batches_find_what_one_batch_of_all_texts_does(
    analyze, small_passes, model, texts, tmp_path, capsys
):
    output = tmp_path / "out"
    assert analyze("--lanczos", "1", "--lanczos-steps", "6", "--keep-factors", "--tables") == 0
    record = json.loads((output / "metrics.json").read_text())
    assert record["passes"] > 1  # and the second batch has two texts
    pretrained = load_decoder(model, dtype=jnp.float32)
    arguments = _options.AnalyzeArguments(
        model, _options.ModelAnalysis(data=str(texts), max_length=16, batch_size=6)
    )
    what = analyzed(str(model), arguments.model)
    (batch,), (exist,), *_ = batches_of(what, pretrained, read_texts(what, arguments), 6)
    batch, exist = on_device((batch, exist))
    objective = jk.Objective(pretrained.apply_fn, jk.Categorical())
    stats = jk.value_grad_and_factors(objective)
    loss, _, factors = stats(pretrained.params, batch, positions=exist)
    assert record["texts"]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert record["texts"]["tokens"] == float(factors.terms)
    bases = jk.eigendecompose(factors, vectors=False, placement="host")
    expected = spectrum_records(bases)
    known = {(x["layer"], x["side"], tuple(x["slice"])): x for x in record["spectra"]}
    assert len(expected) == len(known)
    for other in expected:
        one = known[other[:3]]
        np.testing.assert_allclose(one["raw"], other.raw, rtol=1e-4, atol=1e-6 * other.top)
    page = (output / "report.html").read_text()
    for word in ("Plan and peaks", "Depth: model/layers", "Exact Fisher", "Coverage"):
        assert word in page
    said = capsys.readouterr()
    shown = said.out
    assert shown.index("Memory of the analysis") < shown.index("Capacity")
    assert "peak" in shown and list((output / "factors").glob("*kernel*"))
    for stage, noun in (("decompose", "block"), ("Lanczos", "product")):  # 4 batches are too few
        assert re.search(rf"^{stage}: about .* left \(.* s a {noun}, \d+ {noun}", said.err, re.M)
    few = jax.tree.map(lambda x: x[:4], batch)
    exact = jk.operators.fisher(objective, pretrained.params, few)
    top = float(jk.spectrum(exact, 1, key=jax.random.key(0), num_steps=12).eigenvalues[0])
    assert 0.5 * top < record["exact"]["eigenvalues"][0] < 1.01 * top


class Killed(BaseException):
    """In place of SIGKILL: nothing of this library handles it."""


def killed(*_, **__):
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [45, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 4, 9, 17, 30))]
)
def test_a_killed_analysis_ends_with_the_bits_of_one_that_was_not(
    analyze, small_passes, whole, monkeypatch, tmp_path, number
):
    writes = []
    write = _files.Folder._write

    def failing(self, *args):
        writes.append(args[0])
        if len(writes) == number:
            raise Killed
        return write(self, *args)

    words = ("--checkpoint-every", "1", "--lanczos", "1", "--lanczos-steps", "3")
    with monkeypatch.context() as patch:
        patch.setattr(_files.Folder, "_write", failing)
        with pytest.raises(Killed):
            analyze(*words)
    assert not (tmp_path / "out" / "metrics.json").exists()
    assert analyze(*words, "--resume") == 0
    assert found(tmp_path / "out") == whole


@pytest.fixture(scope="module")
def whole(model, texts, tmp_path_factory):
    """What an analysis finds that nobody stops, in as few passes as there can be."""
    from jaxkfac.jobs.cli import main

    output = tmp_path_factory.mktemp("whole")
    fixed = ("--data", str(texts), "--max-length", "16", "--batch-size", "4")
    words = ("--lanczos", "1", "--lanczos-steps", "3", "--output", str(output))
    with pytest.MonkeyPatch.context() as patch:

        def fit(self, room, *, held_bytes, other_stages=0, every=True):
            params, batch, _ = self._shapes
            return self.use(self.collector.budgets(params, batch).least)

        patch.setattr(AnalyzedModel, "fit", fit)
        assert main(["analyze", str(model), *fixed, *words]) == 0
    assert not (output / "factors").exists() and not (output / "lanczos").exists()
    return found(output)


@pytest.mark.exhaustive
def test_a_resumed_analysis_is_the_one_that_was_begun(analyze, tmp_path, capsys):
    words = ("--lanczos", "0", "--decompose", f"{DOWN}.*")
    assert analyze(*words) == 0
    assert analyze(*words) == 2
    assert "already holds an analysis: continue it with --resume" in capsys.readouterr().err
    assert analyze(*words, "--resume", "--fisher", "mc") == 2
    assert "give the same options, or --overwrite" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_an_analysis_does_not_go_on_with_other_weights_of_the_same_sizes(
    analyze, model, tmp_path, capsys
):
    folder = shutil.copytree(model, tmp_path / "model")
    words = ("--lanczos", "0", "--decompose", f"{DOWN}.*")
    assert analyze(*words, folder=folder) == 0
    write_model(folder, scale=2.0)
    assert analyze(*words, "--resume", folder=folder) == 2
    assert (
        "holds another analysis:\n  the files of the model have changed" in capsys.readouterr().err
    )


@pytest.mark.exhaustive
def test_overwrite_deletes_nothing_before_all_is_checked(analyze, tmp_path):
    output = tmp_path / "out"

    def held():
        return {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    words = ("--lanczos", "0", "--decompose", f"{DOWN}.*")
    assert analyze(*words) == 0
    before = held()
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for wrong in (
        ("--data", str(empty)),
        ("--decompose", "nothing"),
        ("--device-bytes", "10MB"),
    ):
        assert analyze(*words, "--overwrite", *wrong) == 2
        assert held() == before
    assert analyze(*words, "--overwrite", "--texts", "3") == 0
    assert found(output)["texts"]["texts"] == 3


@pytest.mark.exhaustive
def test_an_analysis_does_not_go_on_with_less_than_its_passes_need(
    analyze, monkeypatch, tmp_path, capsys
):
    with monkeypatch.context() as patch:
        patch.setattr(_stages, "gather", killed)
        with pytest.raises(Killed):
            analyze("--lanczos", "0")
    assert analyze("--lanczos", "0", "--resume", "--device-bytes", "10MB") == 2
    said = capsys.readouterr().err
    assert "--device-bytes 9.54 MiB: the stage 'gather' of this analysis needs at least" in said
    assert "an analysis that has begun change with --overwrite" in said


@pytest.mark.exhaustive
def test_bad_rows_before_the_last_text_are_counted(analyze, texts, tmp_path):
    bad = tmp_path / "bad.jsonl"
    lines = texts.read_text().splitlines()
    bad.write_text("\n".join([lines[0], "no JSON", lines[1], '{"words": 1}', *lines[2:], "end"]))
    words = ("--data", str(bad), "--texts", "3", "--lanczos", "0", "--decompose", f"{DOWN}.*")
    assert analyze(*words) == 0
    counts = found(tmp_path / "out")["texts"]
    assert (counts["texts"], counts["left out"]) == (3, 2)


@pytest.mark.exhaustive
def test_two_models_are_compared_and_one_block_is_a_layer_of_its_own(analyze, tmp_path):
    louder = write_model(tmp_path / "other", scale=2.0)
    chosen = f"{DOWN}\\[1\\]"
    words = ("--compare", str(louder), "--lanczos", "0", "--decompose", chosen)
    assert analyze(*words) == 0
    record = found(tmp_path / "out")
    layers = record["capacity_comparison"]["layers"]
    assert list(layers) == [f"{DOWN}[1]"]
    trace = layers[f"{DOWN}[1]"]["trace"]
    assert trace["before"] != trace["after"] > 0
    assert {x["layer"] for x in record["spectra"]} == {f"{DOWN}[1]"}
    whole = json.loads((tmp_path / "out" / "metrics.json").read_text())
    other = whole["compared"]
    assert other["model"] == str(louder)
    outer = {stage["name"]: stage for stage in whole["memory"]["stages"]}
    inner = {stage["name"]: stage for stage in outer["compared"]["stages"]}
    for stage in ("gather", "decompose"):  # each the peak of its own model's stage
        assert whole["peaks"][stage] == outer[stage]["resident_peak"]["nbytes"]
        assert other["peaks"][stage] == inner[stage]["resident_peak"]["nbytes"]


@pytest.mark.slow
def test_a_plan_loads_nothing(analyze, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_stages, "run_stages", None)
    assert analyze("--plan") == 0
    shown = capsys.readouterr().out
    assert "gather, sum" in shown and "Lanczos, sum" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_of_a_compared_model_no_lanczos_is_planned(analyze, monkeypatch, tmp_path, capsys):
    other = write_model(tmp_path / "other")
    memory = types.SimpleNamespace(temp_size_in_bytes=1, output_size_in_bytes=1)
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory)
    monkeypatch.setattr(AnalyzedModel, "_compile", lambda *_: compiled)
    monkeypatch.setattr(AnalyzedModel, "product", compiled)
    assert analyze("--plan", "--compare", str(other)) == 0
    first, second = capsys.readouterr().out.split("Memory of the analysis")[1:]
    assert "Lanczos, sum" in first and "Lanczos" not in second
    disks = [re.findall(r"disk.*?([\d.]+ \w+)", table)[-1] for table in (first, second)]
    assert disks[0] != disks[1]


@pytest.mark.slow
def test_a_folder_of_finetune_is_its_base_model_with_the_adapter_in_place(
    analyze, model, texts, tmp_path
):
    pretrained = load_decoder(model, dtype=jnp.float32)
    config = jk.lslora.Config(rank=2, target=r".*/(q|down)_proj/kernel", fourier_placement="none")
    inputs = jnp.zeros((1, 4), jnp.int32)
    of_model = pretrained.apply_fn, config, pretrained.params, inputs
    adapters = jk.lslora.init(*of_model, key=jax.random.key(0))
    adapters = {
        name: x._replace(b=jax.random.normal(jax.random.key(1), x.b.shape))
        for name, x in adapters.items()
    }
    run = tmp_path / "run"
    jk.lslora.save(run / "adapter", adapters, config, dialect="peft", base_model=model)
    assert analyze(folder=run) == 0
    record = json.loads((tmp_path / "out" / "metrics.json").read_text())
    adapted = jk.lslora.attach(pretrained.apply_fn, config)
    merged = jk.lslora.merge(adapted, pretrained.params, adapters, inputs)
    options = _options.ModelAnalysis(data=str(texts), max_length=16, batch_size=6)
    what = analyzed(str(model), options)
    arguments = _options.AnalyzeArguments(model, options)
    (batch,), (exist,), *_ = batches_of(what, pretrained, read_texts(what, arguments), 6)
    batch, exist = on_device((batch, exist))
    stats = jk.value_grad_and_factors(jk.Objective(pretrained.apply_fn, jk.Categorical()))
    loss, _, factors = stats(merged, batch, positions=exist)
    assert record["texts"]["loss"] == pytest.approx(float(loss), rel=1e-5)
    expected = spectrum_records(jk.eigendecompose(factors, vectors=False, placement="host"))
    known = {(x["layer"], x["side"], tuple(x["slice"])): x["raw"] for x in record["spectra"]}
    assert len(expected) == len(known)
    for other in expected:
        np.testing.assert_allclose(known[other[:3]], other.raw, rtol=1e-3, atol=1e-5 * other.top)
