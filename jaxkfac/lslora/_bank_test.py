"""Several adapters in one tree: chosen, replaced and switched off as data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.lslora import Config, attach, fourier_loss, init, stack

KEY = jax.random.key(0)
PARAMS = {"s": jax.random.normal(KEY, (2, 4, 4)), "w": jax.random.normal(KEY, (4, 3))}
X = jax.random.normal(jax.random.key(1), (3, 5, 4))
CONFIGS = {
    "first": Config(rank=2, alpha=3),
    "second": Config(rank=1, alpha=5, rslora=True),
    "plain": Config(rank=3, alpha=2, fourier_placement="none"),
}


def fn(p, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["s"])[0] @ p["w"]


def moved(tree, seed):
    """Leaves away from their first values."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, moved)


ADAPTERS = {
    name: moved(init(fn, config, PARAMS, X, key=KEY), seed)
    for seed, (name, config) in enumerate(CONFIGS.items())
}


@pytest.fixture(scope="module")
def bank():
    return stack(ADAPTERS, CONFIGS, slots=4)


@pytest.fixture(scope="module")
def outputs():
    """Of every adapter by itself, and of the base model."""
    each = {n: attach(fn, c)(PARAMS, ADAPTERS[n], X) for n, c in CONFIGS.items()}
    return each | {"base": fn(PARAMS, X)}


@pytest.fixture(scope="module")
def serve():
    """The adapted model, jitted once, and the number of its traces."""
    adapted, traces = attach(fn, CONFIGS["first"]), []

    @jax.jit
    def run(bank, adapter):
        traces.append(jnp.ndim(adapter))
        return adapted(PARAMS, bank, X, adapter=adapter)

    return run, traces


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_adapters_of_other_ranks_scalings_and_kinds_are_swapped_without_a_second_trace(
    bank, outputs, serve
):
    run, traces = serve
    for name in CONFIGS:
        close(run(bank, jnp.array(bank.index(name))), outputs[name])
    close(run(bank, jnp.array(-1)), outputs["base"])
    second = bank.index("second")
    close(run(bank.disable("second"), jnp.array(second)), outputs["base"])
    close(run(bank.disable("second").enable("second"), jnp.array(second)), outputs["second"])
    close(run(bank.delete("second"), jnp.array(second)), outputs["base"])
    other = bank.delete("second").set("third", ADAPTERS["first"], CONFIGS["first"])
    assert other.index("third") == second and "second" not in other.names
    close(run(other, jnp.array(second)), outputs["first"])
    replaced = bank.set("first", ADAPTERS["second"], CONFIGS["second"])
    close(run(replaced, jnp.array(bank.index("first"))), outputs["second"])
    rows = jnp.array([2, -1, 0])
    want = [outputs[n][i] for i, n in enumerate(("plain", "base", "first"))]
    close(run(bank, rows), jnp.stack(want))
    close(run(bank.disable("plain"), rows)[0], outputs["base"][0])
    run(bank, rows[::-1])
    assert traces == [0, 1]


def test_an_index_beyond_the_bank_gives_nan_where_it_is_traced(bank, serve):
    run, _ = serve
    assert np.isnan(run(bank, jnp.array(7))).all()
    mixed = run(bank, jnp.array([0, 9, -1]))
    assert np.isfinite(mixed[0]).all() and np.isnan(mixed[1]).all() and np.isfinite(mixed[2]).all()


@pytest.mark.slow
def test_gradients_reach_only_the_adapters_that_rows_use(bank, serve):
    run, _ = serve
    grads = jax.grad(lambda b: jnp.sin(run(b, jnp.array([0, 0, 1]))).sum())(bank)
    for leaf in jax.tree.leaves(grads.adapters["w"]):
        slots = np.abs(np.moveaxis(leaf, 0, 0)).reshape(4, -1).sum(1)
        assert (slots[:2] > 0).all() and (slots[2:] == 0).all()
    assert not np.any(grads.enabled)


@pytest.mark.slow
def test_an_adapter_comes_out_as_it_went_in(bank):
    for name, config in CONFIGS.items():
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
            bank.get(name, config),
            ADAPTERS[name],
        )


def test_the_regulariser_counts_enabled_adapters_with_a_nonlinearity(bank):
    first, second = (fourier_loss(ADAPTERS[n]) for n in ("first", "second"))
    np.testing.assert_allclose(fourier_loss(bank), (first + second) / 2, rtol=1e-6)
    for alone in (bank.disable("second"), bank.delete("second")):
        np.testing.assert_allclose(fourier_loss(alone), first, rtol=1e-6)


def test_a_deleted_adapter_leaves_its_slot_to_another(bank):
    without = bank.delete("second")
    assert "second" in bank.names and "second" not in without.names
    third = without.set("third", ADAPTERS["first"], CONFIGS["first"])
    assert third.index("third") == bank.index("second")


def test_names_are_lost_in_a_transformation_and_given_back(bank):
    through = jax.tree.map(lambda x: x, bank)
    with pytest.raises(ValueError, match="has no names"):
        through.index("first")
    assert through.named(bank.names).index("second") == 1


def test_what_a_bank_cannot_hold_is_refused(bank):
    first = ADAPTERS["first"]
    for name in ("lora", "a/b", "..", "a.b", ""):
        with pytest.raises(ValueError, match=f"adapter name {name!r}"):
            stack({name: first})
    with pytest.raises(ValueError, match=r"different layers: \['s'\]"):
        stack({"a": first, "b": {"w": first["w"]}})
    with pytest.raises(ValueError, match=r"one fourier_placement, got \['bottleneck', 'output'\]"):
        stack(
            {"a": first, "b": first},
            {"a": Config(), "b": Config(fourier_placement="bottleneck")},
        )
    with pytest.raises(ValueError, match="slots=1: there are 3 adapters"):
        stack(ADAPTERS, CONFIGS, slots=1)
    wide = Config(rank=3, rank_pattern={"s": 4})
    given = init(fn, wide, PARAMS, X, key=KEY)
    with pytest.raises(ValueError, match="rank 4 at 's'.*ranks up to 3"):
        bank.set("wide", given, wide)
    with pytest.raises(ValueError, match="with settings: give this adapter's"):
        bank.set("first", first)
    full = stack({"a": first})
    with pytest.raises(ValueError, match="no free slot for 'b'"):
        full.set("b", first)
    with pytest.raises(ValueError, match="no adapter 'c'; the bank holds"):
        full.index("c")


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, -1, np.array([0, -1, 0])])
def test_a_diverged_adapter_that_is_disabled_leaves_the_base_model(bank, outputs, index):
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), ADAPTERS["first"])
    diverged = bank.set("first", nan, CONFIGS["first"]).disable("first")
    adapted = attach(fn, CONFIGS["first"])
    close(adapted(PARAMS, diverged, X, adapter=index), outputs["base"])
    assert np.isfinite(fourier_loss(diverged))


@pytest.mark.slow
def test_an_unsigned_index_reaches_the_base_model_of_a_disabled_slot(bank, outputs):
    adapted = attach(fn, CONFIGS["first"])
    for index in (np.array(0, np.uint8), np.zeros(3, np.uint8)):
        close(adapted(PARAMS, bank.disable("first"), X, adapter=index), outputs["base"])
        close(adapted(PARAMS, bank, X, adapter=index), outputs["first"])
    beyond = jax.jit(lambda i: adapted(PARAMS, bank, X, adapter=i))(jnp.uint32(2**31 + 5))
    assert np.isnan(beyond).all()


def test_settings_of_another_rank_or_kind_are_refused(bank):
    wider = Config(rank=4, alpha=3)
    with pytest.raises(ValueError, match=r"'first' has rank 2 at 's', and its config says 4"):
        stack({"first": ADAPTERS["first"]}, wider)
    with pytest.raises(ValueError, match=r"'first' has rank 2 at 's', and its config says 4"):
        bank.set("first", ADAPTERS["first"], wider)
    with pytest.raises(ValueError, match=r"'first' has coefficients at 's'.*'none'"):
        stack({"first": ADAPTERS["first"]}, Config(rank=2, fourier_placement="none"))
    for config in (Config(rank=1, alpha=3), wider):
        with pytest.raises(ValueError, match=rf"'first': config says rank {config.rank} at 's'"):
            bank.get("first", config)
    with pytest.raises(ValueError, match=r"'first' has a nonlinearity at 's'.*'none'"):
        bank.get("first", Config(rank=2, fourier_placement="none"))
    with pytest.raises(ValueError, match=r"'plain' has plain LoRA at 's'.*'output'"):
        bank.get("plain", Config(rank=3, alpha=2))


@pytest.mark.exhaustive
def test_values_beyond_the_rank_that_training_made_are_not_dropped():
    configs = {n: Config(rank=r, fourier_placement="bottleneck") for n, r in [("a", 1), ("b", 2)]}
    each = {n: moved(init(fn, c, PARAMS, X, key=KEY), 1) for n, c in configs.items()}
    bank, adapted = stack(each, configs), attach(fn, configs["a"])
    grads = jax.grad(lambda b: jnp.square(adapted(PARAMS, b, X, adapter=0)).sum())(bank)
    trained = jax.tree.map(lambda x, g: x - 0.1 * g, bank, grads).named(bank.names)
    with pytest.raises(ValueError, match=r"'a': config says rank 1 .*phi\(0\) is not 0"):
        trained.get("a", configs["a"])


@pytest.mark.slow
def test_plain_lora_beside_nonlinear_adapters_comes_back_without_coefficients():
    plain = Config(rank=3, alpha=3, fourier_placement="none")
    bank = stack({"first": ADAPTERS["first"], "plain": ADAPTERS["plain"]})
    own = bank.get("plain")
    assert all(adapter.is_linear for adapter in own.values())
    want = attach(fn, plain)(PARAMS, ADAPTERS["plain"], X)
    close(attach(fn, plain)(PARAMS, own, X), want)


def test_leaves_that_a_write_would_broadcast_are_refused(bank):
    lone = {
        n: jax.tree.map(lambda x: x[:1], a) if n == "s" else a for n, a in ADAPTERS["first"].items()
    }
    with pytest.raises(ValueError, match=r"expected a of shape \(2, 4, 3\) at 's'.*\(1, 4, 3\)"):
        bank.set("first", lone, CONFIGS["first"])


def test_one_name_means_one_slot(bank):
    with pytest.raises(ValueError, match=r"\['x'\] occur more than once"):
        bank.named(("x", None, "x", None))


def test_a_bank_of_numpy_arrays_is_changed_like_one_of_jax(bank, outputs):
    on_host = jax.device_get(bank).named(bank.names)
    adapted = attach(fn, CONFIGS["first"])
    off = on_host.disable("first").enable("first").delete("second")
    off = off.set("second", ADAPTERS["first"], CONFIGS["first"])
    close(adapted(PARAMS, off, X, adapter=off.index("second")), outputs["first"])
