"""Which passes fit into a budget; programs are not compiled here, their bytes are made up."""

import types

import jax
import pytest

from jaxkfac.jobs.cli._options import AnalyzeArguments, ModelAnalysis
from jaxkfac.jobs.cli.analysis._program import AnalyzedModel, with_sums
from jaxkfac.jobs.cli.analysis._texts import analyzed, batches_of, read_texts
from jaxkfac.jobs.cli.analysis.conftest import CONFIG, write_model

BESIDE = 1000  # bytes of activations
DEEP = CONFIG | {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("deep"), config=DEEP)


@pytest.fixture
def analysis(model, texts, monkeypatch):
    """Of a deep decoder; ``analysis.compiled`` grows by every pass that is compiled."""
    options = ModelAnalysis(data=str(texts), max_length=16, batch_size=4)
    what = analyzed(str(model), options)
    shapes = what.family.shapes(what.experiment)
    found = batches_of(what, shapes, read_texts(what, AnalyzeArguments(model, options)), 4)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (found.batches[0], found.exist[0])
    )
    compiled = []

    def compile_pass(self, one):
        compiled.append(one)
        most = max(self.passes, key=with_sums)
        more = 0 if one == most else int(self.more * one.nbytes)
        memory = types.SimpleNamespace(
            temp_size_in_bytes=BESIDE + more + one.nbytes - one.results,
            output_size_in_bytes=one.results,
        )
        return types.SimpleNamespace(memory_analysis=lambda: memory)

    monkeypatch.setattr(AnalyzedModel, "_compile", compile_pass)
    made = AnalyzedModel(options, shapes.apply_fn, shapes.params, *like)
    made.compiled, made.more = compiled, 0
    return made


def ends(analysis):
    """Bytes with the least budget and with one for a single pass."""
    params, batch, _ = analysis._shapes
    least, whole = analysis.collector.budgets(params, batch)
    found = [analysis.use(budget).total for budget in (least, whole)]
    analysis._compiled = {}
    analysis.compiled.clear()
    return found


@pytest.mark.exhaustive
def test_a_pass_takes_most_of_the_room_and_no_more(analysis):
    smallest, whole = ends(analysis)
    assert whole > 3 * smallest
    for share in (0.3, 0.5, 0.8):
        room = int(smallest + share * (whole - smallest))
        found = analysis.fit(room, held_bytes=0)
        assert 0.7 * room < found.total <= room and len(analysis.passes) > 1
    assert analysis.fit(whole, held_bytes=0).total == whole and len(analysis.passes) == 1
    assert analysis.fit(smallest, held_bytes=0).total <= smallest


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, 1.3])
def test_a_plan_is_that_of_a_run_with_fewer_programs(analysis, share):
    smallest, whole = ends(analysis)
    room = int(smallest + share * (whole - smallest))
    planned = analysis.fit(room, held_bytes=0, every=False)
    assert planned.total <= room and len(analysis.compiled) >= 1
    assert share <= 1 or len(analysis.compiled) == 2  # nothing else can be too large
    analysis.compiled.clear()
    analysis._compiled = {}
    assert analysis.fit(room, held_bytes=0) == planned  # where every pass has been compiled


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_plan_finds_the_passes_of_a_run_near_the_edge_of_a_budget(analysis, share):
    smallest, whole = ends(analysis)
    analysis.more, room = 0.1, int(smallest + share * (whole - smallest))
    planned = analysis.fit(room, held_bytes=0, every=False)
    passes, analysis._compiled = analysis.passes, {}
    found = analysis.fit(room, held_bytes=0)
    assert analysis.passes == passes and planned.total <= found.total <= room


@pytest.mark.exhaustive
def test_passes_that_take_more_than_the_largest_are_made_smaller(analysis):
    smallest, whole = ends(analysis)
    room = (smallest + whole) // 2
    analysis.fit(room, held_bytes=0)
    budget, analysis.more, analysis._compiled = analysis.max_factor_bytes, 2, {}
    assert analysis.use(budget).total > room
    found = analysis.fit(room, held_bytes=0)
    assert found.total <= room and analysis.max_factor_bytes < budget
    analysis.more, analysis._compiled = 100, {}
    with pytest.raises(ValueError, match="this analysis needs at least"):
        analysis.fit(room, held_bytes=0)


def test_a_room_too_small_says_what_would_do(analysis):
    smallest, _ = ends(analysis)
    with pytest.raises(ValueError, match="this analysis needs at least"):
        analysis.fit(smallest - 1, held_bytes=10)
