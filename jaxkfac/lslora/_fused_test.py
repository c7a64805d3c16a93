"""Splitting and fusing projections changes no output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.lslora import Adapter, Config, attach, fuse, init, load, save, split

WIDTHS = {"q": 4, "k": 2, "v": 2}
PARTS = {"qkv": WIDTHS, "gate_up": {"gate": 3, "up": 3}}
KEY = jax.random.key(1)
X = jax.random.normal(KEY, (5, 3))


def fused_fn(p, x):
    def block(c, w):
        return c + (c @ w["qkv"]["kernel"])[:, :3] + (c @ w["gate_up"]["kernel"])[:, 3:], None

    return jax.lax.scan(block, x, p["layers"])[0] @ p["head"]["kernel"]


def apart_fn(p, x):
    def block(c, w):
        qkv = jnp.concatenate([c @ w[n]["kernel"] for n in "qkv"], -1)
        gate_up = jnp.concatenate([c @ w[n]["kernel"] for n in ("gate", "up")], -1)
        return c + qkv[:, :3] + gate_up[:, 3:], None

    return jax.lax.scan(block, x, p["layers"])[0] @ p["head"]["kernel"]


def models():
    k = jax.random.split(KEY, 3)
    qkv = jax.random.normal(k[0], (2, 3, 8)) / 2
    gate_up = jax.random.normal(k[1], (2, 3, 6)) / 2
    head = {"kernel": jax.random.normal(k[2], (3, 2))}
    together = {"layers": {"qkv": {"kernel": qkv}, "gate_up": {"kernel": gate_up}}, "head": head}
    pieces = dict(zip("qkv", jnp.split(qkv, [4, 6], -1), strict=True))
    pieces |= dict(zip(("gate", "up"), jnp.split(gate_up, 2, -1), strict=True))
    return together, {"layers": {n: {"kernel": w} for n, w in pieces.items()}, "head": head}


def moved(adapters):
    leaves, tree = jax.tree.flatten(adapters)
    keys = jax.random.split(KEY, len(leaves))
    return jax.tree.unflatten(
        tree, [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


@pytest.mark.parametrize(
    "placement",
    [
        "bottleneck",
        pytest.param("output", marks=pytest.mark.exhaustive),
        pytest.param("none", marks=pytest.mark.exhaustive),
    ],
)
def test_a_split_adapter_computes_the_same_on_a_split_model_and_fuses_back(placement, tmp_path):
    together, apart = models()
    config = Config(
        rank=2, alpha=3, fourier_placement=placement, rank_pattern={".*qkv.*": 1}, rslora=True
    )
    adapters = moved(init(fused_fn, config, together, X, key=KEY))
    pieces, named = split(adapters, config, PARTS)
    assert len(pieces) == 6 and named.rank_of("layers/k/kernel") == 1
    assert named.targets("head/kernel") and not named.targets("layers/qkv/kernel")
    expected = attach(fused_fn, config)(together, adapters, X)
    found = attach(apart_fn, named)(apart, pieces, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    save(tmp_path, pieces, named, dialect="peft")  # through a file, and back
    again, whole = fuse(*load(tmp_path), PARTS)
    assert again.keys() == adapters.keys()
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    for name in adapters:
        assert whole.scaling(name) == pytest.approx(config.scaling(name), rel=1e-15)


def test_plain_lora_of_some_parts_with_unlike_ranks_and_scalings_fuses_exactly():
    together, apart = models()
    config = Config(
        rank=2,
        alpha=3,
        target=("q", "v", "gate"),
        fourier_placement="none",
        rank_pattern={".*/v/.*": 1},
        alpha_pattern={".*/v/.*": 5},
    )
    pieces = moved(init(apart_fn, config, apart, X, key=KEY))
    adapters, named = fuse(pieces, config, PARTS)
    assert adapters["layers/qkv/kernel"].a.shape == (2, 3, 3)
    assert not adapters["layers/qkv/kernel"].b[..., 4:6].any()
    expected = attach(apart_fn, config)(apart, pieces, X)
    found = attach(fused_fn, named)(together, adapters, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_fused_or_split_is_named():
    one = Adapter(jnp.ones((3, 1)), jnp.ones((1, 2)), jnp.ones(4), jnp.ones(()))
    other = one._replace(sigma=jnp.full((), 2.0))
    config = Config(rank=1)
    with pytest.raises(ValueError, match=r"'qkv': \['k', 'v'\] have nonlinearities of their own"):
        fuse({"k": one, "v": other}, config, PARTS)
    with pytest.raises(ValueError, match="layer 'q': expected 4 outputs of 'q', got 2"):
        fuse({"q": one}, config, PARTS)
    with pytest.raises(ValueError, match="'qkv' is there already"):
        fuse({"k": one, "qkv": one}, config, PARTS)
    with pytest.raises(ValueError, match="layer 'qkv' has 2 outputs, and its parts .* have 8"):
        split({"qkv": one}, config, PARTS)
    wide = one._replace(b=jnp.ones((1, 8)))
    with pytest.raises(ValueError, match="which the adapters have already"):
        split({"k": one, "qkv": wide}, config, PARTS)


def test_ratios_of_scalings_are_not_rounded_to_bfloat16():
    parts = {"qkv": {"q": 4, "k": 2, "v": 2}}
    config = Config(rank=1, alpha_pattern={"k/.*": 7.0}, fourier_placement="none")
    third = jnp.asarray(1 / 3, jnp.bfloat16)
    adapters = {
        f"{n}/kernel": Adapter(
            jnp.ones((3, 1), third.dtype), jnp.broadcast_to(third, (1, width)), None, None
        )
        for n, width in parts["qkv"].items()
    }
    fused, settings = fuse(adapters, config, parts)
    b = fused["qkv/kernel"].b.astype(jnp.float32).sum(0) * settings.scaling("qkv/kernel")
    want = np.repeat([float(third) * config.scaling(f"{n}/kernel") for n in "qkv"], [4, 2, 2])
    np.testing.assert_allclose(b, want, rtol=1e-6)
