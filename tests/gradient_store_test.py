"""Scores from a store of gradients are those of the streamed training set; what it refuses."""

import dataclasses
import errno
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.uses import scores_of_batches
from jaxkfac.uses._damped_gradients import owned_blocks
from jaxkfac.uses._store_rows import nearest_of_rank
from tests._cases import CASES, case
from tests._checks import objective_of
from tests.influence_test import PROGRAMS, assert_close, bases_of, first


def problem(likelihood=None, examples=24, sides=(7, 6, 4)):
    """A perceptron with biases, and bases of it in the dtype that is on."""
    inputs, hidden, outputs = sides
    keys = iter(jax.random.split(jax.random.key(0), 9))
    params = {
        "up": {"kernel": jax.random.normal(next(keys), (inputs, hidden))},
        "down": {"kernel": jax.random.normal(next(keys), (hidden, outputs))},
    }
    params["up"]["bias"] = jax.random.normal(next(keys), (hidden,))
    params["down"]["bias"] = jax.random.normal(next(keys), (outputs,))
    objective = jk.Objective(network, likelihood or jk.Categorical())
    x = jax.random.normal(next(keys), (examples, inputs))
    y = jax.random.randint(next(keys), (examples,), 0, outputs)
    return objective, params, (x, y)


def network(params, x):
    x = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return x @ params["down"]["kernel"] + params["down"]["bias"]


def cut(batch, size):
    """A batch as a list of batches."""
    return [
        jax.tree.map(lambda x, i=i: x[i : i + size], batch) for i in range(0, len(batch[1]), size)
    ]


def check_equal(objective, params, batch, bases):
    """Pairwise scores, self-influence and measured eigenvalues beside the streamed ones."""
    store = jk.gradient_store(objective, params, bases, batch, dtype="float64")
    queries = first(batch)
    for some in (bases, store.bases):
        streamed = jk.influence(objective, params, some, queries, batch, damping=0.1)
        assert_close(jk.influence(objective, params, some, queries, store, damping=0.1), streamed)
        own = jk.self_influence(objective, params, some, batch)
        assert_close(jk.self_influence(objective, params, some, store), own)
    if bases.corrections is None and objective.num_outputs == 1:
        measured = jk.correct_eigenvalues(objective, bases, fisher="empirical")(params, batch)
        owned = {x.layer.name for x in owned_blocks(bases)}
        for name in owned:
            pairs = zip(store.bases[name], measured[name], strict=True)
            for found, expected in pairs:
                if expected is not None and not isinstance(expected, tuple):
                    assert_close(found, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("corrected", [False, True], ids=["factors", "measured"])
@pytest.mark.parametrize("name", CASES)
def test_scores_from_a_store_are_the_streamed_ones(x64, name, corrected):
    model, _, params, batch = case(name)
    objective = objective_of(model)
    check_equal(objective, params, batch, bases_of(objective, params, batch, corrected=corrected))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_scores_of_programs_that_are_no_matrix_product_of_rows(x64, name):
    model, params, batch = PROGRAMS[name]
    objective = jk.Objective(model, jk.Categorical(ignore_index=-100))
    check_equal(objective, params, batch, bases_of(objective, params, batch))


# ------------------------------------------------------------ precision


@pytest.fixture(scope="module")
def trained():
    """Objective, parameters, bases, queries and training set, in float32."""
    objective, params, batch = problem(examples=120)
    factors = jk.value_grad_and_factors(objective, fisher="exact")(params, batch).factors
    return objective, params, jk.eigendecompose(factors), first(batch, 5), batch


def stored(trained, **options):
    objective, params, bases, _, batch = trained
    return jk.gradient_store(objective, params, bases, batch, **options)


@pytest.fixture(scope="module")
def in_float32(trained):
    return stored(trained, dtype="float32")


@pytest.mark.exhaustive
def test_float32_loses_nothing(trained, in_float32):
    objective, params, bases, queries, batch = trained
    args = objective, params, bases
    expected = jk.influence(*args, queries, batch)
    assert_close(jk.influence(*args, queries, in_float32), expected, 1e-5)
    own = jk.self_influence(*args, batch)
    assert_close(jk.self_influence(*args, in_float32), own, 1e-5)
    # in the measured eigenvalues, which the store's bases have
    args = objective, params, in_float32.bases
    expected = jk.influence(*args, queries, batch)
    assert_close(jk.influence(*args, queries, in_float32), expected, 1e-5)


@pytest.mark.exhaustive
def test_bfloat16_is_the_default_and_correlates(trained):
    objective, params, bases, queries, batch = trained
    store = stored(trained)
    assert store.dtype.name == "bfloat16"
    assert store.nbytes == 2 * len(store) * sum(x.size for x in jax.tree.leaves(params))
    expected = np.asarray(jk.influence(objective, params, bases, queries, batch))
    found = np.asarray(jk.influence(objective, params, bases, queries, store))
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] >= 0.99999
    assert np.abs(found - expected).max() > 0  # it was rounded
    own = np.asarray(jk.self_influence(objective, params, bases, batch))
    found = np.asarray(jk.self_influence(objective, params, bases, store))
    assert np.corrcoef(found, own)[0, 1] >= 0.99999


# ------------------------------------------------------------ low rank


@pytest.fixture(scope="module")
def read_in_turn():
    """A network over six positions: its gradients have rank six at most, and decay."""
    keys = jax.random.split(jax.random.key(3), 5)
    params = {
        "up": jax.random.normal(keys[0], (10, 24)) / 3,
        "bias": 0.1 * jax.random.normal(keys[1], (24,)),
        "down": jax.random.normal(keys[2], (24, 20)) / 5,
    }
    x = jax.random.normal(keys[3], (60, 6, 10))
    batch = x.at[:, 1:].add(2 * x[:, :1]), jax.random.randint(keys[4], (60, 6), 0, 20)

    def model(p, x):
        return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]

    objective = jk.Objective(model, jk.Categorical())
    factors = jk.value_grad_and_factors(objective)(params, batch).factors
    return objective, params, jk.eigendecompose(factors), first(batch, 5), batch


def of_both_ranks(problem, rank):
    """Scores and self-influence of a store at a rank, beside those of all elements; the store."""
    objective, params, bases, queries, batch = problem
    full, low = (stored(problem, dtype="float32", rank=x) for x in (None, rank))
    found, expected = (
        (
            jk.influence(objective, params, bases, queries, x),
            jk.influence(objective, params, bases, queries, x, query_rank=1).scores,
            jk.self_influence(objective, params, bases, x),
        )
        for x in (low, full)
    )
    return zip(found, expected, strict=True), low, full


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["one position", "six positions", "full side"])
def test_a_rank_that_the_gradients_have_loses_nothing(trained, read_in_turn, what):
    problem = read_in_turn if what == "six positions" else trained
    rank = 1 if what == "one position" else 6
    pairs, low, full = of_both_ranks(problem, rank)
    for found, expected in pairs:
        assert_close(found, expected, 1e-5)
    assert max(low.errors.values()) < 1e-6
    assert (low.nbytes < full.nbytes) == (what != "full side")
    assert max(full.errors.values()) == 0


@pytest.mark.exhaustive
def test_a_lower_rank_correlates_and_says_what_it_loses(read_in_turn):
    pairs, low, full = of_both_ranks(read_in_turn, 2)
    for found, expected in pairs:
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99
    assert low.nbytes < 0.22 * full.nbytes
    assert all(0.2 < x < 0.3 for x in low.errors.values())
    # The eigenvalues are measured on the full gradients.
    for x, y in zip(jax.tree.leaves(low.bases), jax.tree.leaves(full.bases), strict=True):
        assert_close(x, y, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2, 40, 60), (3, 60, 40), (3, 5, 7)])
def test_the_nearest_matrices_of_a_rank_are_those_of_the_decomposition(x64, shape):
    rng, rank = np.random.default_rng(0), 3
    u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = 0.5 ** np.arange(min(shape[-2:]))
    matrices = jnp.asarray(1e-30 * (u * values) @ v)  # squares of float32 would be 0
    (left, right), errors = nearest_of_rank(matrices, rank)
    nearest = 1e-30 * (u[..., :rank] * values[:rank]) @ v[..., :rank, :]
    np.testing.assert_allclose(left @ right, nearest, atol=1e-6 * 1e-30)
    lost, every = (np.sqrt(np.square(x).sum()) for x in (values[rank:], values))
    np.testing.assert_allclose(errors, lost / every, rtol=1e-6)
    (left, right), errors = nearest_of_rank(0 * matrices, rank)
    assert not (left @ right).any() and not errors.any()
    assert jnp.isnan(nearest_of_rank(jnp.nan * matrices, rank)[1]).all()


@pytest.mark.slow
def test_a_store_of_low_rank_is_gone_on_with_and_refused_by_its_rank(trained, tmp_path, capsys):
    objective, params, bases, queries, batch = trained
    batches, path = cut(batch, 60), tmp_path / "store"
    whole = jk.gradient_store(objective, params, bases, batches, tmp_path / "whole", rank=1)
    # in[+1] + out numbers for each layer
    assert "50 B an example in bfloat16 at rank 1, 5.86 KiB for 120" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        jk.gradient_store(objective, params, bases, stopped_after(batches, 1), path, rank=1)
    made = jk.gradient_store(objective, params, bases, batches, path, rank=1)
    files = [sorted(x.name for x in folder.iterdir()) for folder in (path, whole.path)]
    assert files[0] == files[1] and "at rank 1" in repr(made)
    for name in files[0]:
        assert (path / name).read_bytes() == (whole.path / name).read_bytes()
    opened = jk.gradient_store(objective, params, bases, None, path, rank=1)
    assert opened.errors == whole.errors
    best = jk.influence(objective, params, bases, queries, opened, top_k=3)
    expected = jk.influence(objective, params, bases, queries, stored(trained), top_k=3)
    assert_close(best.scores, expected.scores, 0.02)
    for rank, expected in ((None, "None"), (2, "2")):
        with pytest.raises(ValueError, match=f"rank is 1, expected {expected}"):
            jk.gradient_store(objective, params, bases, None, path, rank=rank)
    (path / "000001.rows").write_bytes((path / "000001.rows").read_bytes()[:-2])
    with pytest.raises(jk.DamagedFileError, match=r"000001\.rows has 2998 bytes, expected 3000"):
        jk.gradient_store(objective, params, bases, None, path, rank=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, "rank=0: expected at least 1"), (8, r"rank=8 is above .* 'up/kernel', 8 × 6: .* below 6")],
)
def test_a_rank_that_no_layer_has_is_refused(trained, rank, message):
    with pytest.raises(ValueError, match=message):
        stored(trained, rank=rank)


# ------------------------------------------------------------ options of influence


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("options", [{"query_rank": 1}, {"per": "layer"}, {"layers": "up/.*"}])
def test_options_mean_the_same_of_a_store(trained, bias, options):
    objective, params, _, queries, batch = trained
    stats = jk.value_grad_and_factors(objective, fisher="exact", bias=bias)
    bases = jk.eigendecompose(stats(params, batch).factors)
    store = jk.gradient_store(objective, params, bases, batch, dtype="float32")
    found, expected = (
        jax.tree.leaves(jk.influence(objective, params, bases, queries, train, **options))
        for train in (store, batch)
    )
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, 1e-5)


@pytest.mark.slow
def test_the_best_examples_are_those_of_the_stream(trained):
    objective, params, bases, queries, (x, y) = trained
    mask = jnp.arange(len(x)) % 7 > 0  # examples without a term are not among the best
    batches = cut((x, y, mask), 50)
    store = jk.gradient_store(objective, params, bases, batches, dtype="float32")
    assert len(store) == len(x)
    found, expected = (
        jk.influence(objective, params, bases, queries, train, top_k=9)
        for train in (store, batches)
    )
    np.testing.assert_array_equal(found.indices, expected.indices)
    assert_close(found.scores, expected.scores, 1e-5)


@pytest.mark.slow
def test_prepared_queries_are_scored_without_bases(trained, in_float32):
    objective, params, bases, queries, batch = trained
    held = jk.prepare_queries(objective, params, bases, queries)
    found = jk.influence(objective, params, None, held, in_float32)
    assert_close(found, jk.influence(objective, params, None, held, batch), 1e-5)
    (scores, exist) = next(iter(scores_of_batches(objective, params, held, in_float32)))
    assert_close(scores, found) and exist.all()


@pytest.mark.slow
def test_no_backward_pass_is_taken_over_the_training_set(trained, in_float32, monkeypatch):
    objective, params, bases, queries, _ = trained
    held = jk.prepare_queries(objective, params, bases, queries)

    def never(*args, **options):
        raise AssertionError("the model is not run")

    monkeypatch.setattr(jk.Objective, "outputs", never)
    jk.influence(objective, params, None, held, in_float32, top_k=3)
    jk.self_influence(objective, params, bases, in_float32)


# ------------------------------------------------------------ files


@pytest.mark.slow
def test_a_store_is_opened_again_with_and_without_its_data(trained, tmp_path, capsys):
    objective, params, bases, queries, batch = trained
    batches, path = cut(batch, 50), tmp_path / "store"
    made = jk.gradient_store(objective, params, bases, batches, path)
    said = "152 B an example in bfloat16, 17.8 KiB for 120 examples"
    assert said in capsys.readouterr().err
    for train in (None, batches):
        opened = jk.gradient_store(objective, params, bases, train, path)
        args = objective, params, opened.bases, queries
        np.testing.assert_array_equal(jk.influence(*args, opened), jk.influence(*args, made))
    assert [x.name for x in tmp_path.iterdir()] == ["store"]


def stopped_after(batches, number):
    """A training set that ends in an error."""
    yield from batches[:number]
    raise KeyboardInterrupt


@pytest.mark.slow
def test_what_was_stopped_is_gone_on_with_to_the_same_bits(trained, tmp_path, monkeypatch):
    objective, params, bases, queries, batch = trained
    batches, path = cut(batch, 30), tmp_path / "store"
    whole = jk.gradient_store(objective, params, bases, batches)
    with pytest.raises(KeyboardInterrupt):
        jk.gradient_store(objective, params, bases, stopped_after(batches, 2), path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match="no whole store"):
        jk.gradient_store(objective, params, bases, None, path)
    made = jk.gradient_store(objective, params, bases, batches, path)
    args = objective, params, made.bases, queries
    np.testing.assert_array_equal(jk.influence(*args, made), jk.influence(*args, whole))
    for x, y in zip(jax.tree.leaves(made.bases), jax.tree.leaves(whole.bases), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_batches_that_are_there_take_no_backward_pass(trained, tmp_path, monkeypatch):
    objective, params, bases, _, batch = trained
    batches, path = cut(batch, 40), tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        jk.gradient_store(objective, params, bases, stopped_after(batches, 3), path)

    def never(*args, **options):
        raise AssertionError("the model is not run")

    monkeypatch.setattr(jk.Objective, "outputs", never)
    assert len(jk.gradient_store(objective, params, bases, batches, path)) == 120


def full_disk(monkeypatch, parts):
    """The disk is full once so many files of rows are written."""
    from jaxkfac.uses import _store_files

    plain, written = _store_files.whole_file, []

    def whole_file(path, *args, **options):
        if path.suffix == ".rows":
            written.append(path)
            if len(written) > parts:
                raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, *args, **options)

    monkeypatch.setattr(_store_files, "whole_file", whole_file)


def test_a_disk_that_fills_leaves_what_is_gone_on_with(trained, tmp_path):
    objective, params, bases, _, batch = trained
    batches, path = cut(batch, 40), tmp_path / "store"
    with pytest.MonkeyPatch.context() as monkeypatch:
        full_disk(monkeypatch, 2)
        with pytest.raises(OSError, match="No space left"):
            jk.gradient_store(objective, params, bases, batches, path)
    assert not path.exists()
    assert len(jk.gradient_store(objective, params, bases, batches, path)) == 120
    assert [x.name for x in tmp_path.iterdir()] == ["store"]


def left_by_kills(monkeypatch, written, folder):
    """Copies of ``written`` before each rename and removal, as a kill then leaves them.

    A file that is about to be renamed was written before: a second copy has half of it.
    """
    copies = []

    def copied():
        copies.append(folder / str(len(copies)))
        return shutil.copytree(written, copies[-1])

    def before(call):
        def recorded(path, *args, **options):
            copied()
            half = copied() / path.relative_to(written)
            if half.is_file():
                half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
            return call(path, *args, **options)

        return recorded

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, before(getattr(os, name)))
    return copies


@pytest.mark.slow
def test_a_writer_that_is_killed_at_any_moment_leaves_what_is_gone_on_with(trained, tmp_path):
    objective, params, bases, queries, batch = trained
    batches, written = cut(batch, 60), tmp_path / "written"
    written.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        copies = left_by_kills(monkeypatch, written, tmp_path / "killed")
        jk.gradient_store(objective, params, bases, batches, written / "store")
    files = {x.name: x.read_bytes() for x in (written / "store").iterdir()}
    assert len(copies) > 8 * len(batches)
    for folder in copies:
        assert not (folder / "store").exists()
        jk.gradient_store(objective, params, bases, batches, folder / "store")
        assert {x.name: x.read_bytes() for x in (folder / "store").iterdir()} == files
        assert [x.name for x in folder.iterdir()] == ["store"]


def test_a_plan_that_the_disk_has_no_room_for_is_refused(trained, tmp_path, monkeypatch):
    objective, params, bases, _, batch = trained
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="needs 17.8 KiB more, and the disk of .* has 0.977 KiB free"):
        jk.gradient_store(objective, params, bases, batch, tmp_path / "store")


# ------------------------------------------------------------ what is refused


@pytest.fixture
def on_disk(trained, tmp_path):
    path = tmp_path / "store"
    stored(trained, path=path)
    return path


CHANGES = {
    "parameters": lambda o, p, b, t: (o, jax.tree.map(lambda x: x + 1, p), b, t, {}),
    "eigenvectors": lambda o, p, b, t: (o, p, rotated_bases(b), t, {}),
    "layers": lambda o, p, b, t: (o, p, b, t, {"layers": "up/.*"}),
    "dtype": lambda o, p, b, t: (o, p, b, t, {"dtype": "float32"}),
    "likelihood": lambda o, p, b, t: (
        jk.Objective(network, jk.Categorical(ignore_index=-1)),
        p,
        b,
        t,
        {},
    ),
    "train: batch 0 is not": lambda o, p, b, t: (o, p, b, (t[0] + 1, t[1]), {}),
    "train: batch 0 is not the one": lambda o, p, b, t: (o, p, b, cut(t, 60), {}),
    "more than the 1 batches": lambda o, p, b, t: (o, p, b, [t, t], {}),
}


def rotated_bases(bases):
    """Other eigenvectors of the same shapes."""
    g = {k: x._replace(vectors=x.vectors[:, ::-1]) for k, x in bases.g.items()}
    return dataclasses.replace(bases, g=g)


@pytest.mark.default(4, slow=1)
@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_of_something_else_is_refused(trained, on_disk, what):
    objective, params, bases, _, batch = trained
    *args, options = CHANGES[what](objective, params, bases, batch)
    with pytest.raises(ValueError, match=what):
        jk.gradient_store(*args, on_disk, **options)


def test_scores_of_something_else_are_refused(trained, in_float32):
    objective, params, bases, queries, batch = trained
    other = jk.Objective(lambda p, x: network(p, x) ** 3, jk.Categorical())
    with pytest.raises(ValueError, match="another objective"):
        jk.influence(other, params, bases, queries, in_float32)
    moved = jax.tree.map(lambda x: x + 1, params)
    for use in (
        lambda p, b: jk.influence(objective, p, b, queries, in_float32),
        lambda p, b: jk.self_influence(objective, p, b, in_float32),
    ):
        use(params, bases)
        with pytest.raises(ValueError, match="other parameters, with digest"):
            use(moved, bases)
        with pytest.raises(ValueError, match="other eigenbases"):
            use(params, rotated_bases(bases))
    with pytest.raises(ValueError, match="per='token'"):
        jk.influence(objective, params, bases, queries, in_float32, per="token")
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        jax.jit(lambda p: jk.self_influence(objective, p, bases, in_float32))(params)


@pytest.mark.slow
def test_layers_that_are_not_stored_are_named(trained):
    objective, params, bases, queries, _ = trained
    store = stored(trained, layers="up/.*", dtype="float32")
    with pytest.raises(ValueError, match="'down/kernel'"):
        jk.influence(objective, params, bases, queries, store)
    found = jk.influence(objective, params, bases, queries, store, layers="up/.*")
    assert found.shape == (5, 120)


@pytest.mark.slow
def test_layers_of_one_parameter_are_not_told_apart(x64):
    model, params, batch = PROGRAMS["tied, some targets left out"]
    objective = jk.Objective(model, jk.Categorical(ignore_index=-100))
    bases = bases_of(objective, params, batch)
    store = jk.gradient_store(objective, params, bases, batch)
    with pytest.raises(ValueError, match="stored as their sum"):
        jk.influence(objective, params, bases, batch, store, per="layer")


def test_a_store_that_is_cut_short_or_damaged_is_named(trained, on_disk):
    objective, params, bases, queries, _ = trained
    (rows,) = on_disk.glob("*.rows")
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-2])
    with pytest.raises(jk.DamagedFileError, match=r"000000\.rows has .* bytes, expected"):
        jk.gradient_store(objective, params, bases, None, on_disk)
    rows.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    store = jk.gradient_store(objective, params, bases, None, on_disk)
    with pytest.raises(jk.DamagedFileError, match="checksum"):
        jk.influence(objective, params, bases, queries, store)
    rows.unlink()
    with pytest.raises(jk.DamagedFileError, match="is not there"):
        jk.gradient_store(objective, params, bases, None, on_disk)
    journal = on_disk / "store.json"
    journal.write_text(journal.read_text().replace("bfloat16", "bfloat61"))
    with pytest.raises(jk.DamagedFileError, match="checksum"):
        jk.gradient_store(objective, params, bases, None, on_disk)


def test_bases_that_are_unfinite_or_of_zeros_are_refused(trained):
    objective, params, bases, _, batch = trained
    for number, error in ((jnp.nan, jk.NonFiniteFactorError), (0.0, ValueError)):
        bad = jax.tree.map(lambda x, number=number: number * x, bases)
        with pytest.raises(error, match="not finite|every eigenvalue is zero"):
            jk.gradient_store(objective, params, bad, batch)


@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_other_dtypes_are_refused(trained, dtype):
    with pytest.raises(ValueError, match="expected one of bfloat16, float32, float64"):
        stored(trained, dtype=dtype)


def test_bases_without_all_vectors_are_refused(trained):
    objective, params, bases, _, batch = trained
    g = {k: x._replace(vectors=x.vectors[:, 1:], values=x.values[1:]) for k, x in bases.g.items()}
    with pytest.raises(ValueError, match="need all of them"):
        jk.gradient_store(objective, params, dataclasses.replace(bases, g=g), batch)
