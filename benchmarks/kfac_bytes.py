"""Bytes of K-FAC trainings of 1B and 7B parameters, by what is kept of the curvature.

Run: python -m benchmarks.kfac_bytes [--json F]
     python -m benchmarks.kfac_bytes --peer ENV/bin/python [--json F]

Every row is a plan from shapes alone, as `jaxkfac plan` prints it: float32, one text of 2,048
tokens, blocks recomputed, no momentum counted apart from `jk.kfac`'s. Nothing is compiled, so the
column of temporaries is an estimate; the others are bytes of arrays.

``--peer`` measures something else: the curvature state of ``benchmarks.optimizer_steps``'
autoencoder beside that of kfac-jax, in its environment, which are averages of the factors and the
inverses of the damped ones. Each command keeps the other's part of the record.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._record import shown, stamp, write
from benchmarks.optimizer_steps import Ours, Peer, problem
from jaxkfac.factors import value_grad_and_factors
from jaxkfac.optim import kfac
from jaxkfac.planning import plan_memory, preset

GIB, MIB = 2**30, 2**20
AUTOENCODER = "autoencoder, beside kfac-jax"
LAYOUTS = ("llama-1b", "llama-7b")
# Words of `jaxkfac plan`: what is kept, and whether on the host.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "exact damping": {},
    "exact damping, packed": {"packed": True},
    '"pi"': {"damping_mode": "pi"},
    '"pi", packed': {"damping_mode": "pi", "packed": True},
    '"pi", packed, `max_dense=4096`': {"damping_mode": "pi", "packed": True, "max_dense": 4096},
    "averages and decompositions on the host": {"host": True},
}


def planned(
    layout: str,
    *,
    damping_mode: Any = "exact",
    packed: bool = False,
    max_dense: int = 16384,
    host: bool = False,
) -> dict[str, float]:
    """GiB of the rows of one training."""
    training = preset(layout, examples=1, tokens=2048, remat=True)
    collection: dict[str, Any] = {"max_dense": max_dense, "packed": packed}
    like = value_grad_and_factors(training.objective, **collection).factor_shapes(
        training.params, training.batch
    )
    tx = kfac(1e-3, like=like, damping_mode=damping_mode, packed=packed)
    options = ("host",) if host else ()
    plan = plan_memory(
        *training, optimizer=tx, device_bytes="1PB", options=options, compiled="none", **collection
    )
    estimate = plan.alone["host"] if host else plan.now
    rows = estimate.device
    state = {"factors": rows["factors"], "bases": rows["bases"]}
    fixed = sum(rows[name] for name in ("parameters", "gradients", "optimizer", "batch"))
    total = estimate.device_total - estimate.scratch
    return {
        "parameters_gradients_momentum": fixed / GIB,
        **{name: size / GIB for name, size in state.items()},
        "temporaries": (total - fixed - sum(state.values())) / GIB,
        "total": total / GIB,
    }


def beside_peer(python: Path) -> dict[str, Any]:
    """MiB of curvature state of both, ours in full and packed."""
    data = problem()
    peer = Peer(python, data, "fixed")
    peer.close()
    dense, packed = (Ours(data, "fixed", packed=packed).curvature_bytes for packed in (False, True))
    return {
        "versions": peer.versions,
        "dense_mib": dense / MIB,
        "packed_mib": packed / MIB,
        "peer_mib": peer.curvature_bytes / MIB,
        "packed_over_peer": packed / peer.curvature_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, help="the Python of an environment with kfac-jax")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    if args.peer is not None:
        section = beside_peer(args.peer)
        shown(AUTOENCODER, section)
        write(before | {AUTOENCODER: section}, args.json)
        return
    record: dict[str, Any] = stamp() | {k: x for k, x in before.items() if k == AUTOENCODER}
    for layout in LAYOUTS:
        record[layout] = {}
        for name, options in OPTIONS.items():
            record[layout][name] = planned(layout, **options)
            shown(f"{layout} {name}", record[layout][name])
    write(record, args.json)


if __name__ == "__main__":
    main()
