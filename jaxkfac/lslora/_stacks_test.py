"""A file with other ranks and scalings for every slice, or without some slices, as one stack."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.lslora import Config, attach, fourier, init, load

KERNELS = jax.random.normal(jax.random.key(0), (3, 4, 4)) / 2
PARAMS = {"model": {"layers": {"q": {"kernel": KERNELS}}}}
X = jax.random.normal(jax.random.key(1), (5, 4))
RANKS, ALPHAS = [2, 3, 1], [5.0, 2.0, 7.0]


def fn(p, x):
    return jax.lax.scan(
        lambda c, w: (jnp.tanh(c @ w), None), x, p["model"]["layers"]["q"]["kernel"]
    )[0]


def folder_with(path, placement="none", present=(0, 1, 2), **settings):
    """As PEFT writes it, with a rank and an alpha for each slice."""
    generator, tensors = np.random.default_rng(2), {}
    for i in present:
        where = f"base_model.model.model.layers.{i}.q."
        tensors[where + "lora_A.weight"] = generator.normal(size=(RANKS[i], 4))
        tensors[where + "lora_B.weight"] = generator.normal(size=(4, RANKS[i]))
        if placement != "none":
            tensors[where + "fourier_params.weight"] = generator.normal(size=4)
            tensors[where + "fourier_params.sigma"] = np.array(0.7)
    tensors = {key: np.asarray(x, np.float32) for key, x in tensors.items()}
    record = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 5.0,
        "lora_dropout": 0.0,
        "target_modules": ["q"],
        "rank_pattern": {"layers.1.q": 3, "^model.layers.2": 9, "2.q": 1},
        "alpha_pattern": {"layers.1.q": 2.0, "^model.layers.2.q": 7.0, "q": 5.0},
    }
    if placement != "none":
        record |= {"fourier_placement": placement, "init_sigma": 1.0, "fourier_reg_weight": 0.0}
    path.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(record | settings))
    return tensors


def by_slices(tensors, placement, *, rslora=False):
    """The outputs, slice by slice with its own rank and scaling."""
    x = X
    for i, kernel in enumerate(KERNELS):
        y, where = x @ kernel, f"base_model.model.model.layers.{i}.q."
        if where + "lora_A.weight" in tensors:
            a, b = (jnp.asarray(tensors[f"{where}lora_{c}.weight"]).T for c in "AB")
            s = ALPHAS[i] / (math.sqrt(RANKS[i]) if rslora else RANKS[i])
            own = [tensors.get(f"{where}fourier_params.{k}") for k in ("weight", "sigma")]
            phi = (
                (lambda z, own=own: fourier(z, *map(jnp.asarray, own)))
                if own[0] is not None
                else None
            )
            if phi is None:
                y = y + s * (x @ a @ b)
            else:
                y = y + (phi(s * x @ a @ b) if placement == "output" else s * phi(x @ a) @ b)
        x = jnp.tanh(y)
    return x


def like(rank=3):
    config = Config(rank=rank, target=".*kernel", fourier_placement="none")
    return init(fn, config, PARAMS, X, key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("placement", ["none", "output", "bottleneck"])
def test_ranks_and_scalings_by_slice_compute_what_the_slices_compute(placement, rslora, tmp_path):
    tensors = folder_with(tmp_path, placement, use_rslora=rslora)
    adapters, config = load(tmp_path, scanned="layers")
    assert adapters["model/layers/q/kernel"].a.shape == (3, 4, 3)
    assert config.rank_of("model/layers/q/kernel") == 3
    found = attach(fn, config)(PARAMS, adapters, X)
    np.testing.assert_allclose(found, by_slices(tensors, placement, rslora=rslora), atol=1e-5)
    np.testing.assert_array_equal(
        load(tmp_path, like=like())[0]["model/layers/q/kernel"].a,
        adapters["model/layers/q/kernel"].a,
    )
    with pytest.raises(CheckpointMismatchError, match="kernel has rank 3, expected 4"):
        load(tmp_path, like=like(4))


@pytest.mark.default(2, slow=0)
@pytest.mark.parametrize("placement", ["none", "output", "bottleneck"])
def test_slices_that_the_settings_leave_out_are_left_alone(placement, tmp_path):
    tensors = folder_with(tmp_path, placement, present=(1,), layers_to_transform=[1])
    adapters, config = load(tmp_path, like=like())
    found = attach(fn, config)(PARAMS, adapters, X)
    np.testing.assert_allclose(found, by_slices(tensors, placement), atol=1e-5)
    assert float(jnp.abs(found - fn(PARAMS, X)).max()) > 0.05
    with pytest.raises(CheckpointMismatchError, match=r"slices \[1\] only.*pass model="):
        load(tmp_path, scanned="layers")


@pytest.mark.slow
def test_a_slice_without_an_adapter_gets_no_gradient_from_plain_lora(tmp_path):
    folder_with(tmp_path, present=(1,), layers_to_transform=1)
    adapters, config = load(tmp_path, like=like())
    adapted = attach(fn, config)
    gradient = jax.grad(lambda a: jnp.square(adapted(PARAMS, a, X)).sum())(adapters)
    for part in ("a", "b"):
        size = np.abs(np.asarray(getattr(gradient["model/layers/q/kernel"], part))).max((-2, -1))
        assert size[1] > 1e-3 and size[0] == size[2] == 0


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, [0, 2]),
        ({"layers_to_transform": [0, 1]}, [0]),
        ({"layers_to_transform": [1, 2], "layers_pattern": "layers"}, [2]),
        ({"exclude_modules": ["layers.0.q"]}, [2]),
        ({"exclude_modules": r".*\.2\.q"}, [0]),
        ({"target_modules": r".*layers\.[01]\.q"}, [0]),
        ({"target_modules": ["layers.1.q", "2.q"]}, [2]),
    ],
)
def test_slices_that_the_settings_name_must_be_in_the_file(settings, missing, tmp_path):
    folder_with(tmp_path, present=(1,), **settings)
    with pytest.raises(CheckpointMismatchError) as error:
        load(tmp_path, like=like())
    keys = [f"base_model.model.model.layers.{i}.q.lora_{c}.weight" for i in missing for c in "AB"]
    assert f"it lacks {keys}" in str(error.value)


@pytest.mark.parametrize(
    "settings", [{"layers_to_transform": 0}, {"layers_pattern": "h", "layers_to_transform": 1}]
)
def test_modules_that_the_settings_do_not_name_are_not_loaded_in_silence(settings, tmp_path):
    folder_with(tmp_path, present=(0, 1, 2), **settings)
    with pytest.raises(CheckpointMismatchError, match=r"does not name \[.*'model\.layers\.2\.q'\]"):
        load(tmp_path, scanned="layers")


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 2.5},
        {"rank_pattern": {"q": "3"}},
        {"rank_pattern": ["q"]},
        {"alpha_pattern": {"(": 3}},
        {"target_modules": "(", "rank_pattern": {}},
        {"lora_alpha": "much"},
        {"layers_to_transform": {"a": 1}},
    ],
)
def test_settings_that_are_none_are_named_with_their_file(settings, tmp_path):
    folder_with(tmp_path, **settings)
    with pytest.raises(ValueError, match="adapter_config.json"):
        load(tmp_path, scanned="layers")
