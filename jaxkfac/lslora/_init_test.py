"""Which layers get an adapter, and which are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import UnknownLayerError
from jaxkfac.lslora import Config, RmsSigma, attach, calibrate, init


def fn(p, x):
    ids = p["embed"]["table"][x[:, 0].astype(int)]
    signal = jax.lax.conv_general_dilated(
        x[:, None], p["conv"]["kernel"], (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH")
    )
    h = x @ p["block"]["q_proj"]["kernel"] + p["block"]["q_proj"]["bias"]
    return (h * p["norm"]["scale"]) @ p["block"]["v_proj"]["kernel"] + ids + signal[:, 0]


PARAMS = {
    "embed": {"table": jnp.ones((7, 4))},
    "conv": {"kernel": jnp.ones((1, 1, 3))},
    "norm": {"scale": jnp.ones(3)},
    "block": {
        "q_proj": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)},
        "v_proj": {"kernel": jnp.ones((3, 4), jnp.bfloat16).astype(jnp.float32)},
    },
}
X, KEY = jnp.linspace(0, 1, 20).reshape(5, 4), jax.random.key(0)


def adapters_of(config, **options):
    return init(fn, config, PARAMS, X, key=KEY, **options)


@pytest.mark.parametrize(
    ("target", "exclude", "names"),
    [
        ("block/.*", None, {"block/q_proj/kernel", "block/v_proj/kernel"}),
        ("block/.*", ".*v_proj.*", {"block/q_proj/kernel"}),
        (("q_proj",), None, {"block/q_proj/kernel"}),
        (("v_proj/kernel", "q_proj"), None, {"block/q_proj/kernel", "block/v_proj/kernel"}),
        ("all-linear", None, {"block/q_proj/kernel", "block/v_proj/kernel"}),
    ],
)
def test_targets_are_patterns_suffixes_or_every_dense_layer(target, exclude, names):
    assert set(adapters_of(Config(rank=2, target=target, exclude=exclude))) == names


def test_a_target_that_matches_nothing_names_the_nearest_layers():
    with pytest.raises(UnknownLayerError, match=r"q_prj.*nearest names are 'block/q_proj/kernel'"):
        adapters_of(Config(target=r"block/q_prj/kernel"))
    with pytest.raises(UnknownLayerError, match=r"proj.*matches no layer"):
        adapters_of(Config(target=("proj",)))  # the suffix of a name, not of a component


def test_what_cannot_be_adapted_is_refused_by_name_unless_it_is_excluded():
    with pytest.raises(ValueError) as error:
        adapters_of(Config(rank=2, target=r".*"))
    for name, kind in {
        "conv/kernel": "conv",
        "norm/scale": "scale",
    }.items():
        assert f"{name} is of kind '{kind}'" in str(error.value)
    assert "q_proj" not in str(error.value)
    assert len(adapters_of(Config(rank=2, target=r".*", exclude="embed.*|conv.*|norm.*"))) == 2


def test_a_parameter_that_no_rule_covers_is_refused_with_the_reason():
    params = {"w": jnp.ones((3, 3)), "v": jnp.ones((3, 3))}
    with pytest.raises(ValueError, match="v .*`atan2`"):
        init(
            lambda p, x: jnp.arctan2(x @ p["w"], p["v"].sum(0)),
            Config(rank=1, target="w|v"),
            params,
            jnp.ones((2, 3)),
            key=KEY,
        )


def test_a_rank_larger_than_the_layer_is_refused():
    with pytest.raises(ValueError, match=r"q_proj/kernel': rank 4 is larger.*4 inputs, 3 outputs"):
        adapters_of(Config(rank=4, target="block/q_proj/kernel"))


def test_ranks_and_scalings_follow_their_patterns():
    config = Config(
        rank=1,
        alpha=4,
        rslora=True,
        target="block/.*",
        rank_pattern={".*v_proj.*": 3},
        alpha_pattern={".*q_proj.*": 8},
    )
    shapes = {n: x.a.shape for n, x in adapters_of(config).items()}
    assert shapes == {"block/q_proj/kernel": (4, 1), "block/v_proj/kernel": (3, 3)}
    assert config.scaling("block/q_proj/kernel") == 8
    assert config.scaling("block/v_proj/kernel") == pytest.approx(4 / np.sqrt(3))


def test_first_values_are_those_of_peft_in_the_dtype_of_the_kernel():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS["block"]["q_proj"])

    def dense(p, x):
        return x.astype(jnp.bfloat16) @ p["kernel"]

    adapter = init(dense, Config(rank=3, init_sigma=-0.5), params, X, key=KEY)["kernel"]
    assert adapter.a.dtype == adapter.b.dtype == jnp.bfloat16
    assert adapter.sigma.dtype == adapter.coefficients.dtype == jnp.float32
    assert not np.any(adapter.b) and 0.2 < np.abs(adapter.a).max() <= 0.5  # 1 / sqrt(4)
    np.testing.assert_array_equal(adapter.coefficients, [0, 1, 0, 0])
    assert adapter.sigma == -0.5


def test_shapes_suffice():
    shapes = jax.eval_shape(lambda: (PARAMS, X))
    made = jax.eval_shape(lambda: init(fn, Config(rank=2, target=("q_proj",)), *shapes, key=KEY))
    assert made["block/q_proj/kernel"].a.shape == (4, 2)


@pytest.mark.slow
def test_measured_sigma_is_the_root_mean_square_of_z():
    def scanned(p, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["kernel"])[0]

    params = {"kernel": jax.random.normal(KEY, (2, 4, 4)) / 2}
    config = Config(
        rank=2, alpha=6, fourier_placement="bottleneck", init_sigma=RmsSigma(0.5), target="kernel"
    )
    adapter = init(scanned, config, params, X, key=KEY)["kernel"]
    second = jnp.tanh(X @ params["kernel"][0])
    want = [jnp.sqrt(jnp.square(h @ adapter.a[i]).mean()) for i, h in enumerate((X, second))]
    np.testing.assert_allclose(adapter.sigma, 0.5 * np.array(want), rtol=1e-5)
    outside = Config(rank=2, alpha=6, init_sigma=RmsSigma(), target="kernel")
    adapters = init(scanned, outside, params, X, key=KEY)
    # With B = 0 there is no z: s x A stands in for it.
    np.testing.assert_allclose(adapters["kernel"].sigma, 3 * np.array(want), rtol=1e-5)
    with pytest.raises(ValueError, match="'kernel': z is zero on this batch"):
        calibrate(attach(scanned, outside), params, adapters, X)
    adapters["kernel"] = adapters["kernel"]._replace(b=jnp.ones((2, 2, 4)))
    again = calibrate(attach(scanned, outside), params, adapters, X, factor=2.0)["kernel"]
    z = 3 * X @ again.a[0] @ jnp.ones((2, 4))
    np.testing.assert_allclose(again.sigma[0], 2 * jnp.sqrt(jnp.square(z).mean()), rtol=1e-5)


def test_a_sigma_that_cannot_be_measured_is_refused_with_the_reason():
    def dense(p, x):
        return x @ p["kernel"]

    params, config = {"kernel": jnp.eye(4)}, Config(rank=2)
    adapters = init(dense, config, params, X, key=KEY)
    adapters["kernel"] = adapters["kernel"]._replace(b=jnp.ones((2, 4)))
    adapted = attach(dense, config)
    for inputs in (X * 1e25, X.at[0].set(jnp.nan)):  # the first has finite z, but not its square
        with pytest.raises(ValueError, match=r"'kernel': z, or its mean square, is not finite"):
            calibrate(adapted, params, adapters, inputs)
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="factor=.*above 0"):
            calibrate(adapted, params, adapters, X, factor=factor)
