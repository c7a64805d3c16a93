"""``examples/atoms.py``: its wave function, its energy, and training on one and two devices."""

import functools
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk

ROOT = Path(__file__).parent.parent
PATH = ROOT / "examples" / "atoms.py"
# python -m benchmarks._kfac_jax_atoms updates benchmarks/results/atoms_updates.json
RECORD = ROOT / "benchmarks" / "results" / "atoms_updates.json"
SMALL: dict[str, Any] = {"widths": (4, 3), "layers": 2, "determinants": 2}
TINY: dict[str, Any] = {"widths": (3, 2), "layers": 1, "determinants": 1}
KEY = 3
# One compilation is slow enough for the slow suite.
OPTIMIZERS = [
    "kfac-adaptive",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("kfac", "kfe_adam", "adam", "spring")
    ),
]


@pytest.fixture
def atoms() -> ModuleType:
    """A module of its own for each test, which may change it."""
    spec = importlib.util.spec_from_file_location("atoms_example", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def still(atoms: ModuleType) -> None:
    """Walkers stay where they are, so that a step depends on no random number."""

    def metropolis(system: Any, params: Any, walkers: Any, width: Any, key: Any, moves: int):
        log_psi = jax.vmap(atoms.wave_function(system), (None, 0))(params, walkers)
        energies = jax.vmap(atoms.local_energy(system), (None, 0))(params, walkers)
        batch = {"walkers": walkers, "log_psi": log_psi, "energies": energies}
        return batch, jnp.ones_like(width), width

    atoms.metropolis = metropolis


def trained(atoms: ModuleType, optimizer: str, number: int, *, change: Any = lambda x: x) -> Any:
    """Training before and after two steps of 512 walkers on so many devices, and the energies."""
    still(atoms)
    devices = jax.devices()[:number]
    start, step = atoms.build(atoms.SYSTEMS["hydrogen"], optimizer, devices=devices)
    before = train = start(jax.random.key(KEY), 512, **TINY)
    energies = []
    for _ in range(2):
        train = train._replace(walkers=change(train.walkers))
        train, (energy, *_) = step(train, jax.random.key(0))
        energies.append(np.asarray(energy))
    return before, train, energies


def test_a_file_gives_back_every_bit_and_refuses_other_options(atoms: ModuleType, tmp_path: Path):
    path, about = tmp_path / "new" / "atoms.npz", {"seed": 0}
    arrays = np.arange(3.0), (np.array([7], np.uint32),), np.float32([[np.pi, np.nan]]), np.ones(2)
    train, curve = atoms.Training(*arrays), [[-1.0, 0.1, 0.5]]
    atoms.save(path, train, curve, about)
    other = atoms.Training(*jax.tree.map(np.zeros_like, arrays))
    again, energies = atoms.restore(path, other, about)
    jax.tree.map(np.testing.assert_array_equal, again, jax.tree.map(jnp.asarray, train))
    assert energies == curve and [x.name for x in path.parent.iterdir()] == ["atoms.npz"]
    with pytest.raises(SystemExit, match="has the options .* give the same options"):
        atoms.restore(path, train, {"seed": 1})


@pytest.mark.slow
def test_two_electrons_of_one_spin_may_change_places_and_never_meet(atoms: ModuleType):
    system = atoms.SYSTEMS["lithium"]
    params = atoms.initial(jax.random.key(0), system, **SMALL)
    x = jax.random.normal(jax.random.key(1), (3, 3))
    places = jnp.stack([x, x[jnp.array([1, 0, 2])], x.at[1].set(x[0] + 1e-5)])
    log_psi = jax.jit(jax.vmap(atoms.wave_function(system), (None, 0)))(params, places)
    np.testing.assert_allclose(log_psi[0], log_psi[1], rtol=1e-5)
    assert log_psi[2] < log_psi[0] - 5


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_local_energy_is_that_of_differences(atoms: ModuleType):
    system, step = atoms.SYSTEMS["hydrogen"], 1e-3
    params = atoms.initial(jax.random.key(0), system, **SMALL)
    x = jax.random.normal(jax.random.key(1), (2, 3))
    psi = jax.jit(jax.vmap(lambda x: jnp.exp(atoms.wave_function(system)(params, x))))
    moves = step * np.eye(6).reshape(6, 2, 3)
    around = psi(jnp.concatenate([x[None], x + moves, x - moves]))
    kinetic = -0.5 * (around[1:].sum() - 12 * around[0]) / step**2 / around[0]
    r = jnp.linalg.norm(x[:, None] - np.asarray(system.atoms), axis=-1)
    potential = 1 / 1.4 + 1 / jnp.linalg.norm(x[0] - x[1]) - (1 / r).sum()
    np.testing.assert_allclose(
        atoms.local_energy(system)(params, x), kinetic + potential, rtol=1e-5
    )


@pytest.mark.slow
def test_the_loss_is_the_energy_of_other_parameters(atoms: ModuleType):
    """As walkers drawn from these parameters give it, and as a plain mean does not; infinite where
    few of the walkers have most of the weight.
    """
    system = atoms.SYSTEMS["hydrogen"]
    params = atoms.initial(jax.random.key(0), system, **SMALL)

    def changed(factor):
        other = jax.tree.map(lambda x: x, params)
        for orbital in other["orbitals"]:
            orbital["sigma"] = factor * orbital["sigma"]
        return other

    @functools.partial(jax.vmap, axis_name=atoms.AXIS, axis_size=1, in_axes=None)
    def estimates(params, other):
        start = jax.random.normal(jax.random.key(1), (4096, 2, 3))
        width = jnp.full((), 0.9)
        moved = [
            atoms.metropolis(system, p, start, width, jax.random.key(2), 50)[0]
            for p in (params, other)
        ]
        loss = atoms.energy_loss(system)
        energies = jax.vmap(atoms.local_energy(system), (None, 0))(other, moved[0]["walkers"])
        return *(loss(other, batch) for batch in moved), energies.mean()

    estimate, fresh, plain = jax.jit(estimates)(params, changed(0.9))
    np.testing.assert_allclose(estimate, fresh, atol=0.01)
    assert abs(plain - fresh) > 0.03
    estimate, fresh, _ = jax.jit(estimates)(params, changed(0.7))
    assert estimate == jnp.inf and jnp.isfinite(fresh)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_rule_is_the_derivative_of_the_loss_on_the_same_walkers(atoms: ModuleType):
    """So adaptation compares a predicted change with the true change of one function."""
    system = atoms.SYSTEMS["hydrogen"]
    params, atoms.mean = atoms.initial(jax.random.key(0), system, **SMALL), jnp.mean
    log_psi, energies_of = (
        jax.vmap(f(system), (None, 0)) for f in (atoms.wave_function, atoms.local_energy)
    )
    x = jax.random.normal(jax.random.key(1), (32, 2, 3))
    batch = {"walkers": x, "log_psi": log_psi(params, x), "energies": energies_of(params, x)}
    loss, h = atoms.energy_loss(system), 1e-4
    along = jax.tree.map(jnp.ones_like, params)
    moved = lambda t: jax.tree.map(lambda p, d: p + t * d, params, along)
    _, slope = jax.jvp(lambda p: loss(p, batch), (params,), (along,))
    difference = (loss(moved(h), batch) - loss(moved(-h), batch)) / (2 * h)
    assert abs(slope) > 1e-2
    np.testing.assert_allclose(slope, difference, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_that_was_saved_goes_on_to_the_same_numbers(
    atoms: ModuleType, optimizer: str, tmp_path: Path
):
    start, step = atoms.build(atoms.SYSTEMS["hydrogen"], optimizer, moves=2)
    begin = lambda: start(jax.random.key(KEY), 16, **TINY)
    train, about = begin(), {"seed": 0}
    for number in range(4):
        if number == 2:
            atoms.save(tmp_path / "atoms.npz", train, [[1.0, 2.0, 3.0]], about)
        train, report = step(train, jax.random.fold_in(jax.random.key(0), number))
    assert np.isfinite(report).all()
    again, curve = atoms.restore(tmp_path / "atoms.npz", begin(), about)
    for number in range(2, 4):
        again, _ = step(again, jax.random.fold_in(jax.random.key(0), number))
    assert curve == [[1.0, 2.0, 3.0]]
    jax.tree.map(np.testing.assert_array_equal, again, train)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_devices_take_the_steps_of_one(atoms: ModuleType, optimizer: str):
    _, one, alone = trained(atoms, optimizer, 1)
    before, two, energies = trained(atoms, optimizer, 2)
    np.testing.assert_allclose(energies, np.repeat(alone, 2, 1), rtol=1e-9)
    moved = []
    for old, new, expected in zip(
        *(jax.tree.leaves(x.params) for x in (before, two, one)), strict=True
    ):
        np.testing.assert_array_equal(new[0], new[1])
        np.testing.assert_allclose(new[0], expected[0], rtol=1e-6, atol=1e-8)
        moved.append(float(np.abs(new - old).max()))
    assert max(moved) > 1e-3, moved


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_energy_that_is_nan_on_one_device_moves_none(atoms: ModuleType, optimizer: str):
    before, after, energies = trained(atoms, optimizer, 2, change=lambda x: x.at[1, 0].set(jnp.nan))
    assert np.isnan(energies).all()
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2])
def test_walkers_that_coincide_are_no_harm(atoms: ModuleType, optimizer: str):
    """All energies are equal, and so is nothing to be gained."""
    _, after, energies = trained(
        atoms, optimizer, 1, change=lambda x: jnp.broadcast_to(x[:, :1], x.shape)
    )
    assert np.isfinite(energies).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))


@pytest.mark.slow
def test_a_loss_without_its_mark_is_refused(atoms: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jk, "mark_outputs", lambda x, *_, **__: x)
    with pytest.raises(ValueError, match="mark_outputs"):
        trained(atoms, "kfac", 1)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.sampled(1)
def test_hydrogen_reaches_its_energy(atoms: ModuleType):
    system = atoms.SYSTEMS["hydrogen"]
    start, step = atoms.build(system, "kfac-adaptive")
    train, energies = start(jax.random.key(0), 128, **SMALL), []
    for number in range(60):
        train, (energy, *_) = step(train, jax.random.fold_in(jax.random.key(1), number))
        energies.append(float(energy[0]))
    assert abs(np.mean(energies[-20:]) - system.exact) < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_updates_are_those_of_kfac_jax(atoms: ModuleType):
    """The first one of every parameter, and the parameters after ten more on the same walkers."""
    record = json.loads(RECORD.read_text())
    about = record["about"]
    system, atoms.mean = atoms.SYSTEMS[about["system"]], jnp.mean
    form = jax.tree.structure(atoms.initial(jax.random.key(0), system, **about["network"]))
    leaves = lambda name: [jnp.asarray(x) for x in record[name]]
    params = first = jax.tree.unflatten(form, leaves("params"))
    walkers = jnp.asarray(record["walkers"])
    log_psi, energies_of = (
        jax.vmap(f(system), (None, 0)) for f in (atoms.wave_function, atoms.local_energy)
    )
    tx = jk.kfac(
        about["rate"],
        damping=about["damping"],
        damping_mode="pi",
        momentum=0.0,
        norm_constraint=about["norm_constraint"],
        decay=about["decay"],
        refresh_every=1,
        max_condition=1e12,
    )
    opt = jk.Optimizer(atoms.energy_loss(system), tx, fisher="exact")
    batch = {"walkers": walkers, "log_psi": log_psi(params, walkers)}
    state = opt.init(params, batch | {"energies": energies_of(params, walkers)})

    @jax.jit
    def step(params, state, batch):
        return opt.step(params, state, batch | {"energies": energies_of(params, walkers)})

    def assert_equal(params: Any, expected: list[Any], tolerance: float) -> None:
        for (path, new), old, so in zip(
            jax.tree.leaves_with_path(params), jax.tree.leaves(first), expected, strict=True
        ):
            error = np.linalg.norm(new - old - so) / np.linalg.norm(so)
            assert error < tolerance, jax.tree_util.keystr(path)

    params, state, _ = step(params, state, batch)
    assert_equal(params, leaves("first_update"), 1e-9)
    for _ in range(about["further"]):
        params, state, _ = step(params, state, batch)
    after = zip(leaves("after"), leaves("params"), strict=True)
    assert_equal(params, [x - y for x, y in after], 1e-8)
