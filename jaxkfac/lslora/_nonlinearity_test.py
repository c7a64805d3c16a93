"""A second nonlinearity, registered from outside, goes through everything that an adapter does."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.lslora import (
    Adapter,
    Config,
    Nonlinearity,
    RmsSigma,
    _nonlinearity,
    attach,
    diagnose,
    find_nonlinearity,
    fourier_loss,
    fuse,
    init,
    load,
    read_modules,
    register,
    regulariser,
    split,
    stack,
)
from jaxkfac.lslora import save as save_adapters
from jaxkfac.lslora._nonlinearity import activation


class Cubic(Nonlinearity):
    """Linear in three coefficients, with nothing that is bounded."""

    name = "cubic"
    initial = (1.0, 0.0, 0.0)
    formula = "φ = c0 u + c1 u² + c2 u³ with u = z / σ"
    strength_formula = "|c1| + |c2|"

    def apply(self, x, c):
        return c[0] * x + c[1] * x**2 + c[2] * x**3

    def derivative(self, x, c, cotangent):
        slope = c[0] + 2 * c[1] * x + 3 * c[2] * x**2
        return cotangent * slope, [cotangent * x**power for power in (1, 2, 3)]

    def strength(self, coefficients):
        return jnp.abs(coefficients[..., 1:]).sum(-1)


CUBIC = Cubic()
register(CUBIC)
KEY = jax.random.key(0)
CONFIG = Config(rank=2, alpha=3, target=".*kernel", nonlinearity="cubic", init_sigma=0.7)
PLAIN = Config(rank=2, alpha=5, target=".*kernel", fourier_placement="none")


def phi(z, adapter):
    u = z / (jnp.abs(adapter.sigma) + 1e-6)
    c = adapter.coefficients
    return c[0] * u + c[1] * u**2 + c[2] * u**3


def scanned(p, x):
    """The model; in its place ``by_the_formula`` writes the branch out."""
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"]["kernel"])[0]
    return x @ p["head"]["kernel"]


def by_the_formula(config, p, adapters, x):
    def product(x, kernel, adapter, name):
        s, inner = config.scaling(name), x @ adapter.a
        if config.fourier_placement == "output":
            return x @ kernel + phi(s * inner @ adapter.b, adapter)
        return x @ kernel + s * phi(inner, adapter) @ adapter.b

    for i in range(2):
        own = jax.tree.map(lambda leaf: leaf[i], adapters["layers/kernel"])  # noqa: B023
        x = jnp.tanh(product(x, p["layers"]["kernel"][i], own, "layers/kernel"))
    return product(x, p["head"]["kernel"], adapters["head/kernel"], "head/kernel")


def model(dtype=jnp.float32):
    keys = jax.random.split(KEY, 3)
    params = {
        "layers": {"kernel": jax.random.normal(keys[0], (2, 4, 4), dtype) / 2},
        "head": {"kernel": jax.random.normal(keys[1], (4, 6), dtype)},
    }
    return params, jax.random.normal(keys[2], (5, 4), dtype)


def moved(tree, seed=0):
    """Leaves away from their first values."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)]
    return jax.tree.unflatten(structure, moved)


def made(config=CONFIG, dtype=jnp.float32, seed=0):
    params, x = model(dtype)
    return params, moved(init(scanned, config, params, x, key=KEY), seed), x


def close(got, want, tolerance=1e-10):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), got, want
    )


@pytest.mark.exhaustive
def test_a_fresh_adapter_starts_at_its_own_coefficients_and_changes_nothing(x64):
    params, x = model(jnp.float64)
    fresh = init(scanned, CONFIG, params, x, key=KEY)
    np.testing.assert_array_equal(fresh["layers/kernel"].coefficients, [[1, 0, 0]] * 2)
    np.testing.assert_array_equal(fresh["head/kernel"].coefficients, [1, 0, 0])
    assert fresh["layers/kernel"].sigma.shape == (2,)
    found = attach(scanned, CONFIG)(params, fresh, x)
    close(found, scanned(params, x), 1e-14)
    measured = dataclasses.replace(CONFIG, init_sigma=RmsSigma(2.0))
    assert (init(scanned, measured, params, x, key=KEY)["head/kernel"].sigma > 0).all()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_outputs_and_gradients_are_those_of_the_plain_formula(placement, forward_mode, x64):
    config = dataclasses.replace(CONFIG, fourier_placement=placement)
    params, adapters, x = made(config, jnp.float64)
    adapted = attach(scanned, config, forward_mode=forward_mode)

    def both(fn):
        def total(adapters, x):
            return jnp.sin(fn(params, adapters, x)).sum()

        return fn(params, adapters, x), jax.grad(total, (0, 1))(adapters, x)

    close(both(jax.jit(adapted)), both(lambda *a: by_the_formula(config, *a)))


def test_the_backward_pass_keeps_one_array():
    u = jnp.ones((64, 32), jnp.bfloat16)
    _, vjp = jax.vjp(lambda *a: activation(CUBIC, *a), u, jnp.ones(3))
    large = [x for x in jax.tree.leaves(vjp) if x.size >= 32]
    assert [(x.shape, x.dtype) for x in large] == [((64, 32), jnp.bfloat16)]


@pytest.mark.exhaustive
def test_a_bank_mixes_it_with_plain_lora_by_row(x64):
    configs = {"cubic": CONFIG, "plain": PLAIN}
    params, x = model(jnp.float64)
    each = {n: made(c, jnp.float64, seed=i)[1] for i, (n, c) in enumerate(configs.items())}
    alone = [attach(scanned, c)(params, each[n], x) for n, c in configs.items()]
    adapted, bank = attach(scanned, CONFIG), stack(each, configs, slots=3)
    rows = jnp.array([0, 1, -1, 1, 0])
    want = jnp.stack([*alone, scanned(params, x)])[rows, jnp.arange(5)]
    close(jax.jit(lambda b: adapted(params, b, x, adapter=rows))(bank), want)
    close(bank.get("cubic", CONFIG), each["cubic"])
    assert bank.get("plain", PLAIN)["head/kernel"].is_linear
    close(regulariser(bank, "cubic"), regulariser(each["cubic"], "cubic"))
    again = bank.set("other", each["cubic"], CONFIG)
    close(adapted(params, again, x, adapter=2), alone[0])


@pytest.mark.slow
def test_a_bank_of_one_nonlinearity_refuses_another():
    params, cubic, x = made()
    fourier = dataclasses.replace(CONFIG, nonlinearity="fourier")
    other = made(fourier)[1]
    with pytest.raises(ValueError, match=r"one nonlinearity, got \['cubic', 'fourier'\]"):
        stack({"a": cubic, "b": other}, {"a": CONFIG, "b": fourier})
    with pytest.raises(ValueError, match="'a': nonlinearity 'fourier' has 4 coefficients, got 3"):
        stack({"a": cubic})
    bank = stack({"a": cubic}, CONFIG, slots=2)
    with pytest.raises(ValueError, match="nonlinearity='fourier', and the bank was .* 'cubic'"):
        bank.set("b", other, fourier)
    with pytest.raises(ValueError, match="nonlinearity='fourier', and the bank was .* 'cubic'"):
        attach(scanned, fourier)(params, bank, x, adapter=0)
    with pytest.raises(ValueError, match="nonlinearity='fourier', and the bank was .* 'cubic'"):
        fourier_loss(jax.tree.map(lambda x: x, bank))  # a transformation keeps it


@pytest.mark.slow
def test_the_regulariser_and_the_diagnosis_are_its_own():
    adapter = Adapter(
        jnp.ones((2, 4, 1)), jnp.ones((2, 1, 4)), jnp.array([[1.0, 0, 0], [2, -1, 2]]), jnp.ones(2)
    )
    adapters = {"kernel": adapter}
    np.testing.assert_allclose(regulariser(adapters, "cubic"), 6 / 3 / 2)
    found = diagnose(adapters, nonlinearity="cubic")["kernel"]
    np.testing.assert_allclose(found.deviation, [0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(found.nonlinearity, [0, 3])
    params, x = {"kernel": jnp.ones((2, 4, 4))}, jnp.ones((5, 4))
    fn = lambda p, x: jax.lax.scan(lambda c, w: (c @ w, None), x, p["kernel"])[0]
    adapted = attach(fn, dataclasses.replace(CONFIG, rank=1, target="kernel"))
    found = diagnose(adapters, adapted, params, x)["kernel"]  # the name comes with the model
    np.testing.assert_array_equal(found.saturated, [0, 0])
    for wrong in (fourier_loss, diagnose):
        with pytest.raises(ValueError, match="'kernel': .*'fourier' has 4 coefficients, got 3"):
            wrong(adapters)


@pytest.mark.parametrize("dialect", ["lslora", "peft"])
def test_files_carry_its_name_and_come_back(dialect, tmp_path):
    config = dataclasses.replace(CONFIG, fourier_placement="bottleneck", reg_weight=0.25)
    _, adapters, _ = made(config)
    save_adapters(tmp_path, adapters, config, dialect=dialect)
    keys = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert keys["base_model.model.layers.1.cubic_params.weight"].shape == (3,)
    assert "base_model.model.head.cubic_params.sigma" in keys
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (record["cubic_placement"], record["cubic_reg_weight"]) == ("bottleneck", 0.25)
    assert not any("fourier" in key for key in (*record, *keys))
    again, settings = load(tmp_path)
    assert settings == config
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    saved = read_modules(tmp_path)
    assert saved.nonlinearity is CUBIC and sorted(saved.modules) == ["head", "layers.0", "layers.1"]
    plain = dataclasses.replace(PLAIN, nonlinearity="cubic")
    save_adapters(tmp_path / "plain", made(plain)[1], plain, dialect="peft")
    assert load(tmp_path / "plain")[1] == plain
    with pytest.raises(ValueError, match="'head/kernel': .*'fourier' has 4 coefficients, got 3"):
        save_adapters(tmp_path, adapters, dataclasses.replace(config, nonlinearity="fourier"))


def test_one_without_a_hash_is_refused():
    mutable = dataclasses.dataclass(type("Mutable", (Cubic,), {"name": "mutable"}))
    frozen = dataclasses.make_dataclass("Frozen", ["k"], bases=(Cubic,), frozen=True)
    for one in (mutable(), frozen(jnp.ones(2))):
        with pytest.raises(TypeError, match="if it is frozen, and if all its"):
            register(one)


def test_a_name_that_nobody_registered_is_refused_with_the_known_ones(tmp_path, monkeypatch):
    save_adapters(tmp_path, made()[1], CONFIG)
    for name in _nonlinearity._KNOWN.keys() - {"fourier"}:  # other tests register some, too
        monkeypatch.delitem(_nonlinearity._KNOWN, name)
    for read in (load, read_modules):
        with pytest.raises(ValueError, match="adapter_config.*'cubic': expected one of 'fourier'"):
            read(tmp_path)
    with pytest.raises(ValueError, match="nonlinearity='cubic': expected one of 'fourier', or"):
        Config(nonlinearity="cubic")
    with pytest.raises(ValueError, match="'fourier' is registered already"):
        register(type("Other", (Cubic,), {"name": "fourier"})())
    with pytest.raises(ValueError, match="'a.b': expected an identifier"):
        register(type("Other", (Cubic,), {"name": "a.b"})())
    with pytest.raises(ValueError, match="'other' has no initial coefficients"):
        register(type("Other", (Cubic,), {"name": "other", "initial": ()})())
    register(find_nonlinearity("fourier"))  # once more is no other


@pytest.mark.slow
def test_a_split_adapter_computes_the_same_and_fuses_back():
    params, adapters, x = made()
    parts = {"head": {"left": 2, "right": 4}}
    pieces, named = split(adapters, CONFIG, parts)

    def apart(p, x):
        x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"]["kernel"])[0]
        return jnp.concatenate([x @ p["left"]["kernel"], x @ p["right"]["kernel"]], -1)

    left, right = jnp.split(params["head"]["kernel"], [2], -1)
    split_params = params | {"left": {"kernel": left}, "right": {"kernel": right}}
    found = attach(apart, named)(split_params, pieces, x)
    close(found, attach(scanned, CONFIG)(params, adapters, x), 1e-5)
    again, whole = fuse(pieces, named, parts)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    assert whole.nonlinearity == "cubic"


@pytest.mark.exhaustive
def test_curvature_of_a_and_b_is_that_of_the_plain_formula(x64):
    config = dataclasses.replace(CONFIG, fourier_placement="bottleneck")
    params, adapters, x = made(config, jnp.float64)
    batch = (x, jnp.zeros((5, 6)))

    def head(fn):
        objective = Objective(lambda a, x: fn(params, a, x), Gaussian())
        collect = value_grad_and_factors(objective, uncovered="ignore")
        return collect(adapters, batch)[2]["head/kernel/b"]

    found, want = (head(fn) for fn in (attach(scanned, config), _formula(config)))
    close((found.a, found.g), (want.a, want.g))


def _formula(config):
    return lambda *a: by_the_formula(config, *a)
