"""The state of a run as flat arrays: copies, and refused where it is of another run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.jobs.cli._checkpoint import Checkpoint, flatten_state, restore_state
from jaxkfac.optim import kfac

PARAMS = {"kernel": jnp.arange(6.0).reshape(2, 3)}


def test_a_flat_state_does_not_change_when_its_arrays_are_donated():
    state = {name: jnp.arange(100, dtype=name) for name in ("float32", "bfloat16")}
    expected = {name: np.array(leaf.tolist()) for name, leaf in state.items()}
    flat = flatten_state(state, ())
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    after = step(state)
    assert state["float32"].is_deleted() and after["float32"][0] == 1
    for name, values in expected.items():
        np.testing.assert_array_equal(flat[f"params/{name}"].astype(float), values)


def test_a_checkpoint_of_another_optimizer_is_refused():
    held = optax.sgd(0.1, momentum=0.9).init(PARAMS)
    leaves = flatten_state(PARAMS, held)
    stored = Checkpoint(leaves, {"optimizer": "adamw"}, "adamw", {}, 3)
    wanted = optax.scale_by_adam().init(PARAMS)
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_state(stored, PARAMS, wanted, {"optimizer": "kfac"})
    message = str(caught.value)
    assert "option optimizer: adamw in the checkpoint, kfac requested" in message
    assert "trace/kernel: (2, 3) in the checkpoint, not expected" in message
    assert "nu/kernel: not in the checkpoint, expected (2, 3)" in message


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("packed", [False, True])
def test_a_checkpoint_of_kfac_on_another_kind_of_device_says_why_it_does_not_fit(packed):
    """K-FAC packs its state except on CPUs."""
    params = {"kernel": jnp.ones((64, 65))}
    stats = value_grad_and_factors(Objective(lambda p, x: x @ p["kernel"], Gaussian()))
    like = stats.factor_shapes(params, (jnp.ones((2, 64)), jnp.ones((2, 65))))
    states = {x: kfac(0.1, like=like, packed=x).init(params) for x in (False, True)}
    stored = Checkpoint(flatten_state(params, states[packed]), {}, "kfac", {}, 3)
    with pytest.raises(CheckpointMismatchError, match="kind of device that wrote it") as caught:
        restore_state(stored, params, states[not packed], {})
    shapes = "[65, 32]", "[64, 64]"
    was, expected = shapes if packed else reversed(shapes)
    message = f"a_sums/kernel: float32{was} in the checkpoint, expected float32{expected}"
    assert message in str(caught.value)
    restored = restore_state(stored, params, states[packed], {})[1]
    jax.tree.map(np.testing.assert_array_equal, restored, states[packed])
