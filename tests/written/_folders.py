"""Files of the host service, of gradient stores and of adapters."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from tests.written._kind import Kind
from tests.written._net import (
    OBJECTIVE,
    Readings,
    apply_fn,
    batch,
    of_bases,
    of_factors,
    of_tree,
    params,
    statistics,
    under,
)

# ---------------- the host service


def _factors(number: int, packed: bool) -> jk.Factors:
    factors = statistics(number)[2]
    return factors.packed() if packed else factors


def _service(folder: Path, *, packed: bool, steps: int, **options: Any) -> jk.HostCurvature:
    service = jk.HostCurvature(decay=0.9, max_condition=1e4, placement="host", **options)
    for step in range(steps):
        service.push(_factors(step, packed), step)
        service.bases(step)
    service.push(_factors(steps, packed), steps)
    service.save(folder / "service.npz")
    return service


def _of_service(service: jk.HostCurvature, *, step: int) -> Readings:
    found = of_factors(service.average()) | under("bases", of_bases(service.bases(step)))
    found |= {f"rank error/{k}": np.asarray(v) for k, v in service.rank_errors.items()}
    counts = {"kept": service.kept, "left out": service.left_out}
    return found | {
        f"{what}/{k}": np.asarray(v) for what, table in counts.items() for k, v in table.items()
    }


def _pushed(service: jk.HostCurvature, *, step: int, packed: bool) -> Readings:
    """Two more steps, which hand a new refresh over."""
    for number in (step + 1, step + 2):
        service.push(_factors(3, packed), number)
        bases = service.bases(number)
    numbers = {k: v for k, v in of_bases(bases).items() if "vectors" not in k}
    return of_factors(service.average()) | under("bases", numbers)


def _kind_of_service(*, packed: bool, steps: int, **options: Any) -> Kind:
    return Kind(
        functools.partial(_service, packed=packed, steps=steps, **options),
        lambda folder: jk.HostCurvature.load(folder / "service.npz"),
        functools.partial(_of_service, step=steps),
        functools.partial(_pushed, step=steps, packed=packed),
    )


# ---------------- gradient stores


# Without the wide layer, whose packed factor a store does not hold.
_NARROW: Any = jk.value_grad_and_factors(
    OBJECTIVE, fisher="exact", layers="(table|left|right|blocks|head).*", uncovered="ignore"
)


def _bases() -> jk.Eigenbases:
    return jk.eigendecompose(_NARROW(params(), batch(0))[2], placement="host")


def _kind_of_store(**options: Any) -> Kind:
    """A store, and beside it the bases that it was made with, which opening it needs."""

    def write(folder: Path) -> jk.GradientStore:
        bases = _bases()
        leaves = {f"{i:03d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(bases))}
        np.savez(folder / "bases.npz", **leaves)
        train = [batch(0), batch(1)]
        return jk.gradient_store(
            OBJECTIVE, params(), bases, train, folder / "store", num_examples=12, **options
        )

    def read(folder: Path) -> jk.GradientStore:
        structure = jax.tree.structure(_bases())
        with np.load(folder / "bases.npz") as saved:
            leaves = [jnp.asarray(saved[name]) for name in sorted(saved.files)]
        bases = jax.tree.unflatten(structure, leaves)
        return jk.gradient_store(OBJECTIVE, params(), bases, None, folder / "store", **options)

    def readings(store: jk.GradientStore) -> Readings:
        own = jk.self_influence(OBJECTIVE, params(), store.bases, store, damping=0.1)
        found = under("bases", of_bases(store.bases)) | {"number": np.asarray(len(store))}
        found |= {f"error/{k}": np.asarray(v) for k, v in store.errors.items()}
        return found | {"own scores": np.asarray(own), "bytes": np.asarray(store.nbytes)}

    def go_on(store: jk.GradientStore) -> Readings:
        scores = jk.influence(OBJECTIVE, params(), store.bases, batch(2), store, damping=0.1)
        return {"scores": np.asarray(scores)}

    return Kind(write, read, readings, go_on)


# ---------------- adapters


def _kind_of_adapter(config: jk.lslora.Config, *, of_bank: bool = False, **options: Any) -> Kind:
    def write(folder: Path) -> Any:
        made = []
        for number in range(2):
            key = jax.random.key(number)
            adapters = jk.lslora.init(apply_fn, config, params(), batch(0)[0], key=key)
            leaves, tree = jax.tree.flatten(adapters)
            noise = np.random.default_rng(number)
            moved = [x + jnp.asarray(0.1 * noise.random(x.shape), x.dtype) for x in leaves]
            made.append(jax.tree.unflatten(tree, moved))
        adapters = made[0]
        if of_bank:  # a bank has no file of its own: each of its adapters is saved
            bank = jk.lslora.stack({"one": made[0], "two": made[1]}, config)
            adapters = bank.get("two", config)
        jk.lslora.save(folder, adapters, config, **options)
        return adapters, config

    def readings(saved: Any) -> Readings:
        adapters, config = saved
        numbers = {"rank": config.rank, "scaling": config.scaling("left/kernel")}
        return of_tree(adapters, "adapter") | {k: np.asarray(v) for k, v in numbers.items()}

    def go_on(saved: Any) -> Readings:
        adapters, config = saved
        adapted = jk.lslora.attach(apply_fn, config)
        return {"outputs": np.asarray(adapted(params(), adapters, batch(1)[0]))}

    return Kind(write, jk.lslora.load, readings, go_on)


TARGET = r"(wide|left|blocks|head)/kernel|table/embedding"

FOLDERS = {
    "service": _kind_of_service(packed=False, steps=2, refresh_every=2, lag=1),
    # Saved with a refresh in work, from packed factors, with all that has another form.
    "service-packed": _kind_of_service(
        packed=True,
        steps=2,
        refresh_every=2,
        lag=1,
        stagger=2,
        storage="bfloat16",
        vectors_dtype="bfloat16",
        bases_in="host",
        rank=3,
    ),
    "store": _kind_of_store(dtype="float32"),
    "store-of-rank": _kind_of_store(dtype="bfloat16", rank=1),
    "adapter": _kind_of_adapter(jk.lslora.Config(rank=2, target=TARGET)),
    "adapter-of-bank": _kind_of_adapter(
        jk.lslora.Config(rank=2, target=r"(wide|blocks)/kernel"), of_bank=True
    ),
    "adapter-for-peft": _kind_of_adapter(
        jk.lslora.Config(rank=2, target=r"left/kernel", fourier_placement="none"), dialect="peft"
    ),
}
