"""Calibration on the digits, rotated and shifted: a network before and after a Laplace posterior.

Run: python -m benchmarks.calibration [--seeds 3] [--json FILE] [--markdown FILE] [--figure FILE]

A perceptron is trained with a penalty, the prior's, whose precision is what the evidence favours:
training and tuning take turns, so that it ends at the posterior's mode. Factors are exact and of
all that it was trained on. 288 training images are held out, and moved by up to a pixel, for the
prior that validation favours. Nothing of the test set is read before it is scored. ECE is over 15
bins of equal width; NLL is in nats an example.
"""

import argparse
import io
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from jaxkfac.data import load_digits, shift_batch
from jaxkfac.models import MLP

STEPS, ROUNDS, WIDTH, HELD_OUT, BINS = 200, 4, 128, 288, 15
ANGLES, SHIFTS = (0, 10, 20, 30, 40, 50, 60), (0, 1, 2, 3)
METHODS = {
    "before": "the network alone",
    "last layer": "Laplace, last layer, by evidence",
    "all layers": "Laplace, all layers, by evidence",
    "validation": "Laplace, all layers, by validation (shifts of a pixel)",
}
COLORS = dict(zip(METHODS, ("#c8752d", "#6b7885", "#1f5a92", "#8a3b52"), strict=True))


def rotated(images: jax.Array, degrees: float) -> jax.Array:
    """Images turned about their middle, by bilinear interpolation, with zeros outside."""
    angle, middle = np.deg2rad(degrees), (images.shape[-1] - 1) / 2
    y, x = np.mgrid[: images.shape[1], : images.shape[2]] - middle
    turned = [
        middle + np.cos(angle) * y - np.sin(angle) * x,
        middle + np.sin(angle) * y + np.cos(angle) * x,
    ]
    places = [jnp.asarray(v, images.dtype) for v in turned]
    return jax.vmap(lambda one: jax.scipy.ndimage.map_coordinates(one, places, order=1))(images)


def shifted(images: jax.Array, pixels: int) -> jax.Array:
    """Images moved to the right by whole pixels, with zeros behind them."""
    return jnp.pad(images, ((0, 0), (0, 0), (pixels, 0)))[:, :, : images.shape[2]]


def scores(probabilities: jax.Array, labels: jax.Array) -> dict[str, float]:
    """Accuracy, mean negative log probability, and expected calibration error."""
    p, y = np.asarray(probabilities, np.float64), np.asarray(labels)
    confidence, right = p.max(-1), p.argmax(-1) == y
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(right[bins == b].sum() - confidence[bins == b].sum()) for b in range(BINS)]
    likelihood = np.maximum(p[np.arange(len(y)), y], np.finfo(np.float32).tiny)
    return {
        "accuracy": float(right.mean()),
        "nll": float(-np.log(likelihood).mean()),
        "ece": float(sum(gaps) / len(y)),
    }


def trained(seed: int, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, Any, Any]:
    """Objective, parameters and eigenbases; training and tuning of its penalty take turns."""
    apply_fn, params = jk.from_nnx(MLP((64, WIDTH, 10), rngs=nnx.Rngs(seed)))
    objective, number = jk.Objective(apply_fn, jk.Categorical()), len(batch[1])
    stats = jax.jit(jk.value_grad_and_factors(objective, fisher="exact"))
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))

    def loss(params: Any, prior: jax.Array) -> jax.Array:
        squares = [jnp.square(x).sum() for x in jax.tree.leaves(params)]
        return objective(params, batch) + prior * sum(squares) / (2 * number)

    def step(carry: Any, _: Any) -> tuple[Any, None]:
        params, state, prior = carry
        updates, state = tx.update(jax.grad(loss)(params, prior), state, params)
        return (optax.apply_updates(params, updates), state, prior), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=STEPS)[0])
    prior = jnp.asarray(1.0)
    for _ in range(ROUNDS):
        params = run((params, tx.init(params), prior))[0]
        bases = jk.eigendecompose(stats(params, batch)[2])
        posterior = jk.laplace(objective, params, bases, num_examples=number)
        prior = posterior.tune_prior().prior_precision
    return objective, params, bases


def predictives(
    seed: int, batch: tuple[jax.Array, jax.Array], held_out: tuple[jax.Array, jax.Array]
) -> tuple[dict[str, Any], dict[str, float]]:
    """From inputs to probabilities by each method, and the priors that were fitted."""
    objective, params, bases = trained(seed, batch)
    number, last = len(batch[1]), list(bases)[-1]
    every = jk.laplace(objective, params, bases, num_examples=number)
    final = jk.laplace(objective, params, bases, num_examples=number, layers=last)
    tuned = {
        "last layer": final.tune_prior(),
        "all layers": every.tune_prior(),
        "validation": every.tune_prior(validation=held_out),
    }
    by_method = {"before": lambda x: jax.nn.softmax(objective.apply_fn(params, x))}
    by_method |= {name: posterior.predict for name, posterior in tuned.items()}
    return by_method, {name: float(x.prior_precision) for name, x in tuned.items()}


def measure(seeds: int) -> dict[str, Any]:
    """Means over the seeds, for each change of the test images and each method."""
    train, test = load_digits("train", seed=0), load_digits("test", seed=0)
    images = jnp.asarray(test.images)
    sets = {f"rotated by {a}": rotated(images, a) for a in ANGLES}
    sets |= {f"shifted by {s}": shifted(images, s) for s in SHIFTS}
    order = np.random.default_rng(0).permutation(len(train.labels))
    pixels, labels = jnp.asarray(train.images)[order], jnp.asarray(train.labels)[order]
    moved = shift_batch(jax.random.key(0), pixels[-HELD_OUT:], max_shift=1)
    batch = pixels[:-HELD_OUT].reshape(-1, 64), labels[:-HELD_OUT]
    held_out = moved.reshape(-1, 64), labels[-HELD_OUT:]
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    priors: dict[str, list[float]] = {}
    for seed in range(seeds):
        by_method, fitted = predictives(seed, batch, held_out)
        for name, prior in fitted.items():
            priors.setdefault(name, []).append(prior)
        for change, x in sets.items():
            for method, predict in by_method.items():
                one = scores(predict(x.reshape(-1, 64)), test.labels)
                found.setdefault(change, {}).setdefault(method, []).append(one)
    means = {
        change: {
            method: {key: float(np.mean([one[key] for one in each])) for key in each[0]}
            for method, each in methods.items()
        }
        for change, methods in found.items()
    }
    return {"prior_precision": priors, "scores": means}


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    names = list(METHODS)
    head = "| Test images | " + " | ".join(f"ECE, {name}" for name in names)
    head += " | " + " | ".join(f"NLL, {name}" for name in names) + " | accuracy |"
    lines = [head, "|---|" + "---|" * (2 * len(names) + 1)]
    for change, methods in record["scores"].items():
        cells = [f"{methods[name]['ece']:.3f}" for name in names]
        cells += [f"{methods[name]['nll']:.3f}" for name in names]
        cells.append(f"{methods['before']['accuracy']:.3f}")
        lines.append(f"| {change} | " + " | ".join(cells) + " |")
    words = [f"- {name}: {what}" for name, what in METHODS.items()]
    fitted = [
        f"{name} {', '.join(f'{x:.3g}' for x in each)}"
        for name, each in record["prior_precision"].items()
    ]
    return "\n".join(
        [
            "# Calibration on the digits, rotated and shifted",
            "",
            f"`python -m benchmarks.calibration --seeds {record['seeds']}`, {record['date']}, "
            f"{record['cpu_seconds']:.0f} s of CPU: means over {record['seeds']} networks "
            f"(64-{WIDTH}-10, {ROUNDS} times {STEPS} steps of Adam), {record['test_examples']} "
            "test images. Rotations in degrees, shifts in pixels of 8; NLL in nats.",
            "",
            *lines,
            "",
            *words,
            "",
            "Prior precisions: " + "; ".join(fitted) + ".",
            "",
        ]
    )


def figure(record: dict[str, Any]) -> bytes:
    """ECE and NLL against the angle and the shift, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"axes.grid": True, "grid.color": "#d9dee3", "font.size": 9, "svg.hashsalt": "jaxkfac"}
    with mpl.rc_context(style):
        drawn = Figure(figsize=(7.6, 5.0), layout="constrained")
        axes = drawn.subplots(2, 2, sharey="row")
        for row, (score, label) in enumerate({"ece": "ECE", "nll": "NLL (nats)"}.items()):
            for column, (kind, places) in enumerate({"rotated": ANGLES, "shifted": SHIFTS}.items()):
                axis = axes[row, column]
                for name, what in METHODS.items():
                    values = [record["scores"][f"{kind} by {x}"][name][score] for x in places]
                    axis.plot(places, values, color=COLORS[name], label=what, marker="o", ms=3)
                axis.set_xticks(places)
            axes[row, 0].set_ylabel(label)
        axes[1, 0].set_xlabel("rotation (degrees)")
        axes[1, 1].set_xlabel("shift (pixels)")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=2)
        buffer = io.BytesIO()
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="networks (default 3)")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--figure", type=Path, help="write the figure here")
    args = parser.parse_args()
    record = stamp(
        command=" ".join(["python -m benchmarks.calibration", *sys.argv[1:]]),
        seeds=args.seeds,
        test_examples=len(load_digits("test", seed=0).labels),
    )
    record |= measure(args.seeds)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    record["cpu_seconds"] = usage.ru_utime + usage.ru_stime
    for change, methods in record["scores"].items():
        shown(change, {name: one["ece"] for name, one in methods.items()})
    write(record, args.json)
    if args.markdown is not None:
        args.markdown.write_text(table(record))
    if args.figure is not None:
        args.figure.write_bytes(figure(record))


if __name__ == "__main__":
    main()
