"""kfac-jax on the wave function of ``examples/atoms.py``: another environment, without jaxkfac.

Run: ENV/bin/python -m benchmarks._kfac_jax_atoms updates OUT.json
     ENV/bin/python -m benchmarks._kfac_jax_atoms train SEED STEPS WALKERS

ENV is an environment where ``pip install kfac-jax==0.0.8 jax==0.8.1`` has been run. The example is
imported as it is; a module in the place of jaxkfac turns its mark into kfac-jax's registration.
``updates`` writes what ``tests/atoms_updates_test.py`` compares with: a small wave function in
float64, its walkers, kfac-jax's first update and its parameters after ten more, on these walkers.
``train`` takes the example's steps and prints one line of JSON for ``benchmarks.atoms``.
"""

import importlib.util
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

# The products of jaxlib 0.8.1 on the CPU pack a matrix once and know it again by its address. A
# donated parameter is written in place: the next step reads the old one, and training diverges.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_xnnpack=false"

import jax
import jax.numpy as jnp
import kfac_jax  # pyright: ignore[reportMissingImports]
import numpy as np

EXAMPLE = Path(__file__).parent.parent / "examples" / "atoms.py"
NETWORK = {"widths": (6, 4), "layers": 2, "determinants": 2}
SYSTEM, WALKERS, FURTHER = "lithium", 24, 10
RATE, DAMPING, CONSTRAINT, DECAY = 0.05, 1e-3, 1e-3, 0.95


def mark_outputs(x: Any, likelihood: Any, weight: float = 1.0) -> Any:
    """A normal distribution whose variance makes its Fisher ``weight`` times the identity."""
    kfac_jax.register_normal_predictive_distribution(x[:, None], variance=1.0 / weight)
    return x


def example() -> Any:
    """``examples/atoms.py`` on one device, without jaxkfac."""
    stand_in: Any = types.ModuleType("jaxkfac")
    stand_in.mark_outputs, stand_in.Gaussian, stand_in.kfac = mark_outputs, lambda: None, None
    sys.modules["jaxkfac"] = stand_in
    spec = importlib.util.spec_from_file_location("atoms", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.mean = jnp.mean  # pyright: ignore[reportAttributeAccessIssue]
    return module


def optimizer_of(loss: Any, **options: Any) -> Any:
    """kfac-jax as FermiNet sets it, with momentum 0."""
    return kfac_jax.Optimizer(
        jax.value_and_grad(loss),
        l2_reg=0.0,
        norm_constraint=CONSTRAINT,
        curvature_ema=DECAY,
        inverse_update_period=1,
        num_burnin_steps=0,
        estimation_mode="fisher_exact",
        multi_device=False,
        **options,
    )


def numbers() -> dict[str, Any]:
    """The matched settings, in the dtype of the default float."""
    return {
        name: jnp.asarray(x)
        for name, x in (("learning_rate", RATE), ("momentum", 0.0), ("damping", DAMPING))
    }


def updates(path: Path) -> None:
    """Write the record of the first update and of the parameters after ten more."""
    jax.config.update("jax_enable_x64", True)
    atoms = example()
    system = atoms.SYSTEMS[SYSTEM]
    params = atoms.initial(jax.random.key(0), system, **NETWORK)
    walkers = 0.7 * jax.random.normal(jax.random.key(1), (WALKERS, sum(system.spins), 3))
    log_psi, energies_of = (
        jax.jit(jax.vmap(f(system), (None, 0))) for f in (atoms.wave_function, atoms.local_energy)
    )
    batch = {"walkers": walkers, "log_psi": log_psi(params, walkers)}
    batch |= {"energies": energies_of(params, walkers)}
    optimizer = optimizer_of(atoms.energy_loss(system))
    leaves = lambda tree: [np.asarray(x).tolist() for x in jax.tree.leaves(tree)]
    record: dict[str, Any] = {"params": leaves(params), "walkers": walkers.tolist()}
    first = jax.tree.map(np.array, params)  # a copy: a step donates its parameters
    state = optimizer.init(params, jax.random.key(0), batch)
    for step in range(FURTHER + 1):
        key, batch = jax.random.key(step), batch | {"energies": energies_of(params, walkers)}
        params, state, _ = optimizer.step(
            params, state, key, batch=batch, global_step_int=step, **numbers()
        )
        if step == 0:
            record["first_update"] = leaves(jax.tree.map(np.subtract, params, first))
    record["after"] = leaves(params)
    blocks = [str(block).split("(")[0] for block in optimizer._estimator.blocks]
    record["blocks"] = sorted(blocks)
    about = {"system": SYSTEM, "network": {k: np.asarray(v).tolist() for k, v in NETWORK.items()}}
    about |= {"rate": RATE, "damping": DAMPING, "norm_constraint": CONSTRAINT, "decay": DECAY}
    about |= {"further": FURTHER, "jax": jax.__version__, "kfac_jax": kfac_jax.__version__}
    path.write_text(json.dumps({"about": about, **record}) + "\n")


def train(seed: int, steps: int, walkers: int) -> dict[str, Any]:
    """The example's training with kfac-jax, on one device."""
    begun, atoms = time.process_time(), example()
    system, key = atoms.SYSTEMS["beryllium"], jax.random.key(seed)
    keys = jax.random.split(key, 3)  # as the example starts
    params = atoms.initial(keys[1], system)
    x = jax.random.normal(keys[0], (walkers, sum(system.spins), 3))
    moved = lambda moves: jax.jit(
        lambda params, x, width, key: atoms.metropolis(system, params, x, width, key, moves)
    )
    batch, _, width = moved(100)(params, x, jnp.full((), 0.3), keys[2])
    sample, optimizer = moved(10), optimizer_of(atoms.energy_loss(system))
    state = optimizer.init(params, key, batch)
    energies, times = [], []
    for number in range(steps):
        before = time.process_time() if number else begun
        step_key = jax.random.fold_in(key, number)
        batch, _, width = sample(params, batch["walkers"], width, step_key)
        given = numbers() | {"learning_rate": jnp.asarray(RATE / (1 + number / 1e4))}
        params, state, _ = optimizer.step(
            params, state, step_key, batch=batch, global_step_int=number, **given
        )
        energies.append(float(batch["energies"].mean()))
        times.append(time.process_time() - before)
    from benchmarks.atoms import part

    alone = jax.jit(lambda *args: sample(*args)[0]["walkers"])
    return part(energies, times, lambda: alone(params, batch["walkers"], width, key))


if __name__ == "__main__":
    if sys.argv[1] == "updates":
        updates(Path(sys.argv[2]))
    else:
        print(json.dumps(train(*map(int, sys.argv[2:]))))
