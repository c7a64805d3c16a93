"""Ground states of the hydrogen molecule, lithium and beryllium by a small wave function.

    python examples/atoms.py --system beryllium

A network in the manner of FermiNet (streams of one and of two electrons, envelopes, determinants)
is trained by variational Monte Carlo: walkers are drawn from psi squared, and the mean of their
local energies is lowered, by the optimizers of docs/atoms.md. All devices share the walkers. With
`--checkpoint DIR`, a later call goes on from the file there, to the same numbers.
"""

import argparse
import json
import time
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxkfac as jk

AXIS = "devices"  # of jax.pmap, which divides the walkers
# Places in bohr, spins up and down, exponents of the first orbitals, energy in hartree.
System = namedtuple("System", "atoms charges spins exponents exact")
SYSTEMS = {
    "hydrogen": System(((0.0, 0.0, -0.7), (0.0, 0.0, 0.7)), (1, 1), (1, 1), (1.2,), -1.17448),
    "lithium": System(((0.0, 0.0, 0.0),), (3,), (2, 1), (2.7, 0.65), -7.47806),
    "beryllium": System(((0.0, 0.0, 0.0),), (4,), (2, 2), (3.7, 0.96), -14.66736),
}
OPTIMIZERS = {
    "spring": lambda: jk.spring(rows="scores"),
    "kfac-adaptive": jk.kfac,
    "kfac": lambda: jk.kfac(
        lambda step: 0.05 / (1 + step / 1e4), damping=1e-3, damping_mode="pi", momentum=0.0,
        norm_constraint=1e-3, refresh_every=1,
    ),
    "kfe_adam": lambda: jk.kfe_adam(1e-2),
    "adam": lambda: optax.apply_if_finite(optax.adam(3e-3), 5),
}  # fmt: skip


def initial(key, system, widths=(32, 8), layers=3, determinants=4):
    """Parameters whose determinants begin near Slater's, so that no pretraining is needed."""
    atoms, number, up = len(system.charges), sum(system.spins), system.spins[0]
    keys = iter(jax.random.split(key, 2 * layers + 4))

    def dense(inputs, outputs, scale=1.0):
        w = scale / np.sqrt(inputs) * jax.random.normal(next(keys), (inputs, outputs))
        return {"w": w, "b": jnp.zeros(outputs, w.dtype)}

    one, two = [4 * atoms, *[widths[0]] * layers], [4, *[widths[1]] * (layers - 1)]
    params = {
        "one": [dense(3 * n + 2 * m, widths[0]) for n, m in zip(one[:-1], two, strict=True)],
        "two": [dense(n, m) for n, m in zip(two[:-1], two[1:], strict=True)],
        "orbitals": [dense(one[-1], determinants * number, 0.1) for _ in system.spins],
    }
    exponents = np.concatenate([system.exponents[:n] for n in system.spins])
    spread = np.exp(0.1 * np.linspace(-1, 1, determinants))[:, None]
    for orbital, is_up in zip(params["orbitals"], (True, False), strict=True):
        # Orbitals of the other spin begin near zero: the matrix has one block for each spin.
        own, like = (np.arange(number) < up) == is_up, orbital["b"]
        sigma = np.tile(exponents * spread, (atoms, 1, 1))
        orbital |= {"b": jnp.asarray(np.tile(own, determinants), like.dtype)}
        orbital |= {"sigma": jnp.asarray(sigma, like.dtype), "pi": jnp.ones(sigma.shape)}
    return params


def wave_function(system):
    """`log_psi(params, x)`: log|psi| of one walker, whose electrons are the rows of x."""
    number, up = sum(system.spins), system.spins[0]
    is_up = np.arange(number) < up
    slope = np.where(is_up[:, None] == is_up, 0.25, 0.5) * (1 - np.eye(number))
    linear = lambda p, x: x @ p["w"] + p["b"]
    residual = lambda old, new: (old + new) / np.sqrt(2.0) if old.shape == new.shape else new

    def features(one, two):
        """Each electron's own beside means over each spin, of electrons and of pairs."""
        means = [h.mean(0, keepdims=True) for h in jnp.split(one, [up])]
        tiled = [jnp.tile(mean, [number, 1]) for mean in means]
        return jnp.concatenate([one, *tiled, *[h.mean(0) for h in jnp.split(two, [up])]], 1)

    def log_psi(params, x):
        from_atoms = x[:, None] - jnp.asarray(system.atoms, x.dtype)
        r = jnp.linalg.norm(from_atoms, axis=-1, keepdims=True)
        # The norm has no derivative at zero, where an electron meets itself.
        apart, eye = x[:, None] - x, jnp.eye(number, dtype=x.dtype)
        pairs = jnp.linalg.norm(apart + eye[..., None], axis=-1) * (1 - eye)
        one = jnp.concatenate([from_atoms, r], -1).reshape(number, -1)
        two = jnp.concatenate([apart, pairs[..., None]], -1)
        for layer, p in enumerate(params["one"]):
            one = residual(one, jnp.tanh(linear(p, features(one, two))))
            if layer < len(params["two"]):
                two = residual(two, jnp.tanh(linear(params["two"][layer], two)))
        rows = []
        for p, h, near in zip(params["orbitals"], *(jnp.split(y, [up]) for y in (one, r))):
            envelope = (jnp.exp(-near[..., None] * p["sigma"]) * p["pi"]).sum(1)
            rows.append((linear(p, h).reshape(envelope.shape) * envelope).transpose(1, 0, 2))
        signs, logs = jnp.linalg.slogdet(jnp.concatenate(rows, 1))
        largest = lax.stop_gradient(logs.max())
        total = jnp.log(jnp.abs(jnp.sum(signs * jnp.exp(logs - largest)))) + largest
        # The cusps where two electrons meet.
        return total - 0.5 * (jnp.asarray(slope, x.dtype) / (1 + pairs)).sum()

    return log_psi


def local_energy(system):
    """`energy(params, x)`: (H psi) / psi of one walker; the Laplacian is forward over reverse."""
    log_psi, number = wave_function(system), sum(system.spins)
    charges = np.concatenate([system.charges, -np.ones(number)])
    i, j = np.triu_indices(len(charges), 1)

    def energy(params, x):
        gradient = jax.grad(lambda flat: log_psi(params, flat.reshape(x.shape)))
        slope, along = jax.linearize(gradient, x.reshape(-1))
        curved = jnp.trace(jax.vmap(along)(jnp.eye(x.size, dtype=x.dtype)))
        places = jnp.concatenate([jnp.asarray(system.atoms, x.dtype), x])
        apart = jnp.linalg.norm(places[i] - places[j], axis=-1)
        coulomb = (jnp.asarray(charges[i] * charges[j], x.dtype) / apart).sum()
        return coulomb - 0.5 * (curved + slope @ slope)

    return energy


def mean(x):
    """The mean over the walkers of all devices."""
    return lax.pmean(jnp.mean(x), AXIS)


def energy_loss(system):
    """`loss(params, batch)`, the energy, whose derivative is that of the true energy.

    For the parameters that drew the walkers it is the mean of `batch["energies"]`. Adaptation also
    asks for others: psi' = r psi has <psi'|H|psi'> = <psi'|H|psi> + <psi'|H|psi' - psi>, where H
    acts on psi in the first term. The derivative is then exact for these walkers, too.
    """
    log_psi, energies_of = (jax.vmap(f(system), (None, 0)) for f in (wave_function, local_energy))

    def clip(energies, batch):
        """Within five mean deviations: a walker beside a node may have any energy."""
        center = mean(batch["energies"])
        width = 5 * mean(jnp.abs(batch["energies"] - center))
        return jnp.clip(energies, center - width, center + width)

    @jax.custom_jvp
    def loss(params, batch):
        r = jnp.exp(log_psi(params, batch["walkers"]) - batch["log_psi"])
        before = clip(batch["energies"], batch)
        after = clip(energies_of(params, batch["walkers"]), batch)
        energy = mean(r * before + (r * r - r) * after) / mean(r * r)
        # Where few walkers have most of the weight, they say nothing of these parameters.
        return jnp.where(mean(r * r) ** 2 > 0.9 * mean(r**4), energy, jnp.inf)

    @loss.defjvp
    def rule(primals, tangents):
        params, batch = primals
        energies = clip(batch["energies"], batch)
        psi, moved = jax.jvp(lambda p: log_psi(p, batch["walkers"]), (params,), tangents[:1])
        jk.mark_outputs(psi, jk.Gaussian(), weight=2.0)
        return mean(energies), 2 * jnp.mean((energies - mean(energies)) * moved)

    return loss


# Everything that changes; each array has a leading axis of devices.
Training = namedtuple("Training", "params walkers width state")


def metropolis(system, params, walkers, width, key, moves):
    """A batch after moves of all electrons, the accepted part, and the width of further moves."""
    log_psi, energies_of = (jax.vmap(f(system), (None, 0)) for f in (wave_function, local_energy))

    def move(number, carry):
        old, old_log, accepted = carry
        keys = jax.random.split(jax.random.fold_in(key, number))
        new = old + width * jax.random.normal(keys[0], old.shape, old.dtype)
        new_log = log_psi(params, new)
        chance = jnp.log(jax.random.uniform(keys[1], new_log.shape, old.dtype))
        take = chance < 2 * (new_log - old_log)
        walkers = jnp.where(take[:, None, None], new, old)
        return walkers, jnp.where(take, new_log, old_log), accepted + take.mean(dtype=old.dtype)

    start = walkers, log_psi(params, walkers), jnp.zeros_like(width)
    walkers, log, accepted = lax.fori_loop(0, moves, move, start)
    accepted = mean(accepted) / moves
    batch = {"walkers": walkers, "log_psi": log, "energies": energies_of(params, walkers)}
    return batch, accepted, width * jnp.exp(0.2 * (accepted - 0.5))


def build(system, optimizer, *, moves=10, devices=None):
    """`start(key, walkers) -> Training`, `step(Training, key) -> (Training, report)`."""
    devices = jax.local_devices() if devices is None else devices
    tx, loss = OPTIMIZERS[optimizer](), energy_loss(system)
    opt = jk.Optimizer(loss, tx, fisher="exact", axis_name=AXIS)

    def step(train, key):
        key = jax.random.fold_in(key, lax.axis_index(AXIS))
        batch, accepted, width = metropolis(system, *train[:3], key, moves)
        params, state, _ = opt.step(train.params, train.state, batch)
        energy = mean(batch["energies"])
        report = energy, mean((batch["energies"] - energy) ** 2), accepted
        return Training(params, batch["walkers"], width, state), report

    def begin(params, walkers, key):
        key = jax.random.fold_in(key, lax.axis_index(AXIS))
        batch, _, width = metropolis(system, params, walkers, jnp.full((), 0.3), key, 100)
        return Training(params, batch["walkers"], width, opt.init(params, batch))

    def start(key, walkers, **network):
        keys, places = jax.random.split(key, 3), np.resize(system.atoms, (sum(system.spins), 3))
        shape = len(devices), walkers // len(devices), *places.shape
        walkers = jax.random.normal(keys[0], shape) + places
        mapped = jax.pmap(begin, AXIS, in_axes=(None, 0, None), devices=devices)
        return mapped(initial(keys[1], system, **network), walkers, keys[2])

    return start, jax.pmap(step, AXIS, in_axes=(0, None), devices=devices)


def save(path, train, curve, about):
    """One file, which replaces the last one when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(partial := path.with_suffix(".partial"), "wb") as file:
        np.savez(file, *jax.tree.leaves(train), about=json.dumps(about), curve=np.asarray(curve))
    partial.replace(path)


def restore(path, train, about):
    """The training and the curve of a file, for a training that was begun with its options."""
    with np.load(path) as file:
        if (written := json.loads(str(file["about"]))) != about:
            raise SystemExit(f"{path} has the options {written}, and this call has {about}: give "
                             "the same options, or another --checkpoint")  # fmt: skip
        leaves, form = jax.tree.flatten(train)
        leaves = [jnp.asarray(file[f"arr_{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(form, leaves), file["curve"].tolist()


def draw(curve, exact, title, path):
    """Energies over steps, their running mean, and the exact energy."""
    from matplotlib.figure import Figure

    energies, last = np.asarray(curve)[:, 0], min(20, len(curve))
    running = np.convolve(energies, np.full(last, 1 / last), "valid")
    axes = Figure(figsize=(6.4, 3.6), layout="constrained").subplots()
    axes.plot(energies, lw=0.6, color="0.7", label="of one step's walkers")
    axes.plot(np.arange(last - 1, len(energies)), running, label=f"mean of {last} steps")
    axes.axhline(exact, color="black", lw=1, ls="--", label=f"exact, {exact}")
    limits = exact + max(0.01, np.std(energies[len(energies) // 2 :])) * np.array([-4, 12])
    axes.set(xlabel="step", ylabel="energy, hartree", ylim=limits, title=title)
    axes.legend(frameon=False)
    axes.figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", choices=SYSTEMS, default="beryllium")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="spring")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--walkers", type=int, default=512, help="of all devices together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="folder of a file to write and go on from")
    parser.add_argument("--folder", type=Path, default=Path("runs/atoms"), help="of the figure")
    parser.add_argument("--float64", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", args.float64)
    if args.walkers % jax.local_device_count():
        parser.error(f"--walkers {args.walkers}: no multiple of {jax.local_device_count()} devices")
    system, key, curve = SYSTEMS[args.system], jax.random.key(args.seed), []
    about = {k: v for k, v in vars(args).items() if k not in ("steps", "checkpoint", "folder")}
    about["devices"] = jax.local_device_count()
    start, step = build(system, args.optimizer)
    train, begun = start(key, args.walkers), time.perf_counter()
    if (file := args.checkpoint and args.checkpoint / "atoms.npz") and file.exists():
        train, curve = restore(file, train, about)
        print(f"{file} goes on after step {len(curve)}")
    for number in range(len(curve) + 1, args.steps + 1):
        train, report = step(train, jax.random.fold_in(key, number))
        curve.append([float(x[0]) for x in report])
        if number % 20 == 0 or number == args.steps:
            energies, variance, accepted = np.asarray(curve[-20:]).T
            print(f"step {number:4}  energy {energies.mean():.4f} +- {energies.std() / 20**0.5:.4f}"
                  f"  (exact {system.exact})  deviation {variance.mean() ** 0.5:.3f}"
                  f"  accepted {accepted.mean():.2f}  {time.perf_counter() - begun:.0f} s",
                  flush=True)  # fmt: skip
            jk.check_state(train.state)
        if file and (number % 100 == 0 or number == args.steps):
            save(file, train, curve, about)
    ends = [np.mean(curve[part], 0)[0] - system.exact for part in (slice(1), slice(-50, None))]
    print(f"error {ends[0]:.4f} -> {ends[1]:.4f} hartree, the last a mean of 50 steps")
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{args.system}-{args.optimizer}.svg"
    draw(curve, system.exact, f"{args.system}, {args.optimizer}, {args.walkers} walkers", path)
    print(f"figure: {path.resolve()}")


if __name__ == "__main__":
    main()
