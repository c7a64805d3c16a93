"""Four equations by a small network: relative error over CPU seconds, `jk.spring` beside others.

    OPENBLAS_NUM_THREADS=1 taskset -c 0 python -m benchmarks.equations
    python -m benchmarks.equations --figure

The command makes the runs that the record lacks, each once, and saves after each of them: kill and
repeat it as you like. All optimizers see the same loss. SOAP's setting is the best of its grid on
seed 1; L-BFGS has a memory of 100; `jk.spring` and `jk.kfac` have one setting everywhere. On
"burgers_fixed" and the first three equations points are fixed, and `jk.spring` draws its rows from
them. On "burgers" every optimizer sees new points, in the way that its name says.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from benchmarks._record import stamp
from benchmarks.optimizers._pinn import value
from benchmarks.optimizers._problem import dense_layers
from benchmarks.optimizers._soap import soap
from benchmarks.optimizers.problems import burgers
from jaxkfac.plot import FIGURE_STYLE

RESULTS = Path(__file__).parent / "results"
RECORD, FIGURE = RESULTS / "equations-cpu.json", RESULTS / "equations.svg"
SEEDS = (1, 2, 3, 4, 5)
POINTS = 24  # evaluations of a run, closer together at its beginning

# ---------------- equations


class Term(NamedTuple):
    """Residuals of one kind.

    Attributes:
        residuals: ``residuals(params, rows)``.
        rows: ``rows(key, number)``, a tree of arrays.
        weight: The loss holds half of it times the mean square.
    """

    residuals: Callable[[Any, Any], jax.Array]
    rows: Callable[[Any, int], Any]
    weight: float


class Equation(NamedTuple):
    """An equation, its points and its true solution.

    Attributes:
        title: On the figure.
        sizes: Of the network's layers.
        terms: Of the loss.
        points: Number of points of each term.
        true: The solution at rows of coordinates.
        low: Least coordinates.
        high: Greatest coordinates.
        seconds: CPU seconds of a run.
        drawn: Rows of each term that `jk.spring` draws.
        uniform: Share of them that is drawn uniformly.
        fresh: Whether points are drawn anew during the training.
    """

    title: str
    sizes: tuple[int, ...]
    terms: tuple[Term, ...]
    points: int
    true: Callable[[Any], Any]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seconds: float
    drawn: int = 100
    uniform: float = 1.0
    fresh: bool = False


def second(params: Any, x: jax.Array) -> jax.Array:
    """Second derivatives by each coordinate, ``(rows, coordinates)``."""

    def along(unit: jax.Array) -> jax.Array:
        slope = lambda x: jax.jvp(lambda x: value(params, x), (x,), (unit,))[1]
        return jax.jvp(slope, (x,), (unit,))[1]

    units = jnp.eye(x.shape[1], dtype=x.dtype)
    return jnp.stack([along(jnp.broadcast_to(unit, x.shape)) for unit in units], 1)


def first(params: Any, x: jax.Array) -> jax.Array:
    """First derivatives by each coordinate, ``(rows, coordinates)``."""
    return jax.grad(lambda x: value(params, x).sum())(x)


def waves(x: Any, *numbers: float) -> Any:
    """The product of sines of the coordinates."""
    return jnp.prod(jnp.sin(jnp.pi * jnp.asarray(numbers, x.dtype) * x[:, : len(numbers)]), -1)


def box(low: Sequence[float], high: Sequence[float]) -> Callable[[Any, int], jax.Array]:
    """Points inside."""
    least, scale = jnp.asarray(low), jnp.asarray(high) - jnp.asarray(low)
    return lambda key, number: least + scale * jax.random.uniform(key, (number, len(scale)))


def sides(low: Sequence[float], high: Sequence[float], axes: int) -> Callable[[Any, int], Any]:
    """Points on the sides of the first coordinates, as many on each."""
    inside = box(low, high)

    def rows(key: Any, number: int) -> jax.Array:
        points, k = inside(key, number), jnp.arange(number)
        axis, end = k % axes, k // axes % 2
        at = jnp.where(end, jnp.asarray(high)[axis], jnp.asarray(low)[axis])
        return points.at[k, axis].set(at)

    return rows


def dirichlet(rows: Callable[[Any, int], Any], true: Callable[[Any], Any]) -> Term:
    """The solution is known at some points."""

    def both(key: Any, number: int) -> Any:
        points = rows(key, number)
        return points, true(points)

    return Term(lambda params, rows: value(params, rows[0]) - rows[1], both, 10.0)


def poisson() -> Equation:
    low, high = (0.0, 0.0), (1.0, 1.0)
    true = lambda x: waves(x, 1, 1)
    residuals = lambda p, x: second(p, x).sum(1) + 2 * jnp.pi**2 * true(x)
    terms = Term(residuals, box(low, high), 1.0), dirichlet(sides(low, high, 2), true)
    title = "Poisson's equation"
    return Equation(title, (2, 64, 64, 1), terms, 900, true, low, high, 6.0, uniform=0.1)


def heat() -> Equation:
    low, high, speed = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 0.1
    true = lambda x: jnp.exp(-2 * jnp.pi**2 * speed * x[:, 2]) * waves(x, 1, 1)

    def residuals(params: Any, x: jax.Array) -> jax.Array:
        return first(params, x)[:, 2] - speed * second(params, x)[:, :2].sum(1)

    def begin_and_sides(key: Any, number: int) -> jax.Array:
        points = sides(low, high, 2)(key, number)
        begins = (jnp.arange(number) < number // 2)[:, None]
        inside = box(low, high)(jax.random.fold_in(key, 1), number).at[:, 2].set(0.0)
        return jnp.where(begins, inside, points)

    terms = Term(residuals, box(low, high), 1.0), dirichlet(begin_and_sides, true)
    title = "heat in a square"
    return Equation(title, (3, 64, 64, 1), terms, 900, true, low, high, 8.0)


def helmholtz() -> Equation:
    low, high = (-1.0, -1.0), (1.0, 1.0)
    true = lambda x: waves(x, 1, 4)
    source = lambda x: (1 - 17 * jnp.pi**2) * true(x)
    residuals = lambda p, x: second(p, x).sum(1) + value(p, x) - source(x)
    terms = Term(residuals, box(low, high), 1.0), dirichlet(sides(low, high, 2), true)
    title = "Helmholtz's equation (1, 4)"
    return Equation(title, (2, 64, 64, 1), terms, 900, true, low, high, 8.0)


def burgers_equation(*, fresh: bool) -> Equation:
    low, high = (-1.0, 0.0), (1.0, 1.0)

    def residuals(params: Any, x: jax.Array) -> jax.Array:
        u, slope = value(params, x), first(params, x)
        return slope[:, 1] + u * slope[:, 0] - burgers.VISCOSITY * second(params, x)[:, 0]

    def begin_and_sides(key: Any, number: int) -> jax.Array:
        points = sides(low, high, 1)(key, number)
        begins = (jnp.arange(number) < number // 2)[:, None]
        inside = box(low, high)(jax.random.fold_in(key, 1), number).at[:, 1].set(0.0)
        return jnp.where(begins, inside, points)

    edge = dirichlet(
        begin_and_sides, lambda x: jnp.where(x[:, 1] == 0, -jnp.sin(jnp.pi * x[:, 0]), 0.0)
    )
    return Equation(
        "Burgers' equation, " + ("new points" if fresh else "fixed points"),
        (2, 32, 32, 32, 1),
        (Term(residuals, box(low, high), 1.0), edge),
        2000,
        lambda x: burgers.solution(*np.asarray(x, np.float64).T),
        low,
        high,
        8.0 if fresh else 12.0,
        drawn=100 if fresh else 300,
        uniform=0.1,
        fresh=fresh,
    )


EQUATIONS: dict[str, Callable[[], Equation]] = {
    "poisson": poisson,
    "heat": heat,
    "helmholtz": helmholtz,
    "burgers": lambda: burgers_equation(fresh=True),
    "burgers_fixed": lambda: burgers_equation(fresh=False),
}


def loss(equation: Equation, params: Any, batch: Sequence[tuple[Any, Any]]) -> jax.Array:
    """Half the weighted mean squares of all terms; rows that were drawn have weights."""
    total = jnp.zeros(())
    for term, (rows, weights) in zip(equation.terms, batch, strict=True):
        r = term.residuals(params, rows)
        r = r if weights is None else jnp.sqrt(weights) * r
        r = jk.mark_outputs(r, jk.Gaussian(), weight=term.weight)
        total = total + 0.5 * term.weight * jnp.square(r).mean()
    return total


# ---------------- optimizers: ``(init(params), step(carry, key, progress))``


Steps = tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]


def _whole(equation: Equation, key: Any) -> list[tuple[Any, Any]]:
    keys = jax.random.split(key, len(equation.terms))
    terms = zip(equation.terms, keys, strict=True)
    return [(term.rows(k, equation.points), None) for term, k in terms]


def _batches(equation: Equation, every: int) -> Callable[[Any], Any]:
    """The points of a step: all fixed ones, or new ones ``every`` so many steps."""
    if not equation.fresh:
        fixed = _whole(equation, jax.random.key(0))
        return lambda number: fixed
    return lambda number: _whole(equation, jax.random.fold_in(jax.random.key(1), number // every))


def _draws(equation: Equation, number: int, uniform: float) -> list[Any]:
    draws, fixed = [], _whole(equation, jax.random.key(0))
    for term, (points, _) in zip(equation.terms, fixed, strict=True):
        pool = points
        if equation.fresh:
            pool = lambda key, term=term: term.rows(key, equation.points)
        draws.append(jk.draw_rows(pool, term.residuals, number, uniform=uniform))
    return draws


def _drawn(draws: Sequence[Any], states: Any, params: Any, key: Any) -> tuple[Any, Any]:
    batch, new = [], []
    keys = jax.random.split(key, len(draws))
    for draw, state, k in zip(draws, states, keys, strict=True):
        found, state = draw.draw(state, params, k)
        batch.append((found.rows, found.weights))
        new.append(state)
    return batch, new


def _shortened(old: Any, new: Any, factor: Any) -> Any:
    return jax.tree.map(lambda x, y: x + factor * (y - x), old, new)


def spring(equation: Equation, setting: dict[str, Any]) -> Steps:
    """`jk.spring` without a number; progress is that of the clock, so it shortens steps here."""
    objective = lambda params, batch: loss(equation, params, batch)
    opt, draws = (
        jk.Optimizer(objective, jk.spring()),
        _draws(equation, equation.drawn, equation.uniform),
    )

    def init(params: Any) -> Any:
        states = [draw.init(params, jax.random.key(2)) for draw in draws]
        batch, _ = _drawn(draws, states, params, jax.random.key(2))
        return params, opt.init(params, batch), states

    def step(carry: Any, key: Any, progress: Any) -> Any:
        params, state, states = carry
        batch, states = _drawn(draws, states, params, key)
        new, state, _ = opt.step(params, state, batch)
        factor = jnp.minimum(1.0, (1 - progress) / 0.3)
        return _shortened(params, new, factor), state, states

    return init, step


def kfac(equation: Equation, setting: dict[str, Any]) -> Steps:
    """`jk.kfac` without a number, on all points."""
    objective = lambda params, batch: loss(equation, params, batch)
    opt, batches = jk.Optimizer(objective, fisher="exact"), _batches(equation, 1)

    def step(carry: Any, key: Any, progress: Any) -> Any:
        params, state = carry
        return opt.step(params, state, batches(state.step))[:2]

    return lambda params: (params, opt.init(params, batches(jnp.int32(0)))), step


def first_order(equation: Equation, setting: dict[str, Any], drawn: int = 0) -> Steps:
    """SOAP on all points, or on drawn rows."""
    tx, batches = soap(setting["rate"], weight_decay=0.0), _batches(equation, 1)
    draws = _draws(equation, drawn, 0.1) if drawn else []

    def init(params: Any) -> Any:
        states = [draw.init(params, jax.random.key(2)) for draw in draws]
        return params, tx.init(params), states, jnp.int32(0)

    def step(carry: Any, key: Any, progress: Any) -> Any:
        params, state, states, number = carry
        batch = batches(number)
        if draws:
            batch, states = _drawn(draws, states, params, key)
        grads = jax.grad(lambda p: loss(equation, p, batch))(params)
        updates, state = tx.update(grads, state, params)
        scale = jnp.minimum(1.0, 2 * (1 - progress)) if setting["annealed"] else 1.0
        updates = jax.tree.map(lambda u: scale * u, updates)
        return optax.apply_updates(params, updates), state, states, number + 1

    return init, step


def lbfgs(equation: Equation, setting: dict[str, Any]) -> Steps:
    """L-BFGS with optax's line search, on points that stay for a while."""
    tx, batches = optax.lbfgs(memory_size=100), _batches(equation, 100)

    def step(carry: Any, key: Any, progress: Any) -> Any:
        params, state, number = carry
        batch = batches(number)
        value_fn = lambda params: loss(equation, params, batch)
        # Points may be new, so the value of the last line search does not serve.
        found, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=found, grad=grads, value_fn=value_fn)
        return optax.apply_updates(params, updates), state, number + 1

    return lambda params: (params, tx.init(params), jnp.int32(0)), step


GRID = tuple({"rate": r, "annealed": a} for r in (1e-2, 3e-3) for a in (False, True))


class Method(NamedTuple):
    """An optimizer.

    Attributes:
        title: On the figure.
        build: From an equation and a setting to its steps.
        settings: The grid of seed 1, whose best all seeds get.
        only: Equations it is for; empty for all.
    """

    title: str
    build: Callable[[Equation, dict[str, Any]], Steps]
    settings: tuple[dict[str, Any], ...] = ({},)
    only: tuple[str, ...] = ()


METHODS: dict[str, Method] = {
    "spring": Method("jk.spring", spring),
    "soap": Method("SOAP", first_order, GRID),
    "lbfgs": Method("L-BFGS", lbfgs),
    "kfac": Method("jk.kfac", kfac),
    "soap_drawn": Method(
        "SOAP, rows drawn", lambda e, s: first_order(e, s, drawn=300), GRID, ("burgers",)
    ),
}
COLORS = {
    "spring": "#1f5a92", "soap": "#b59a2a", "lbfgs": "#6b7885", "kfac": "#7ba7d0",
    "soap_drawn": "#8a3b52",
}  # fmt: skip

# ---------------- runs


def initial(equation: Equation, seed: int) -> Any:
    """The network at the start."""
    return jax.tree.map(jnp.asarray, dense_layers(seed, equation.sizes))


def compiled(equation: Equation, method: Method, setting: dict[str, Any]) -> Any:
    """``init``, the compiled step, and CPU seconds of tracing and compiling it."""
    init, step = method.build(equation, setting)
    init = jax.jit(init)
    carry = init(initial(equation, 0))
    begun = time.process_time()
    run = jax.jit(step, donate_argnums=0).lower(carry, jax.random.key(0), jnp.float32(0)).compile()
    return init, run, time.process_time() - begun


def train(equation: Equation, program: Any, seed: int, seconds: float) -> dict[str, Any]:
    """Errors over CPU seconds, without those of compiling and comparing."""
    init, run, spent_compiling = program
    points = np.random.default_rng(0).uniform(
        equation.low, equation.high, (2500, len(equation.low))
    )
    points = jnp.asarray(points, jnp.float32)
    true = jnp.asarray(equation.true(points), jnp.float32)
    error = jax.jit(lambda p: jnp.linalg.norm(value(p, points) - true) / jnp.linalg.norm(true))
    carry = jax.tree.map(jnp.copy, init(initial(equation, seed)))
    times, errors, spent, number = [0.0], [float(error(carry[0]))], 0.0, 0
    key = jax.random.key(seed)
    for due in seconds * (np.arange(1, POINTS + 1) / POINTS) ** 2:
        while spent < due:
            begun = time.process_time()
            progress = jnp.float32(min(1.0, spent / seconds))
            carry = jax.block_until_ready(run(carry, jax.random.fold_in(key, number), progress))
            spent += time.process_time() - begun
            number += 1
        times.append(round(spent, 4))
        errors.append(float(f"{float(error(carry[0])):.4g}"))
    return {
        "steps": number,
        "compile_cpu_s": round(spent_compiling, 2),
        "cpu_s": times,
        "errors": errors,
    }


def _read() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"runs": []}


def _found(record: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [r for r in record["runs"] if all(r[k] == v for k, v in wanted.items())]


def chosen(record: dict[str, Any], equation: str, name: str) -> dict[str, Any] | None:
    """The setting that is best on seed 1; ``None`` before all of them have run."""
    runs = _found(record, equation=equation, method=name, seed=SEEDS[0])
    if len(runs) < len(METHODS[name].settings):
        return None
    last = lambda run: run["errors"][-1] if np.isfinite(run["errors"][-1]) else np.inf
    return min(runs, key=last)["setting"]


def measure(equations: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Make the runs that are not there."""
    record = _read()
    for name in equations:
        for method in methods:
            only = METHODS[method].only
            if only and name not in only:
                continue
            jax.clear_caches()
            equation, programs = EQUATIONS[name](), {}
            for seed in seeds:
                settings = METHODS[method].settings
                if seed != SEEDS[0]:
                    best = chosen(record, name, method)
                    settings = () if best is None else (best,)
                for setting in settings:
                    where = {"equation": name, "method": method, "seed": seed, "setting": setting}
                    if _found(record, **where):
                        continue
                    which = json.dumps(setting)
                    if which not in programs:
                        programs[which] = compiled(equation, METHODS[method], setting)
                    run = train(equation, programs[which], seed, equation.seconds)
                    made = {**where, **stamp(command="python -m benchmarks.equations"), **run}
                    record["runs"].append(made)
                    RECORD.write_text(json.dumps(record) + "\n")
                    print(
                        f"{name} {method} {setting} seed {seed}: {run['steps']} steps, error "
                        f"{run['errors'][-1]:.2e}, compiled in {run['compile_cpu_s']} s",
                        flush=True,
                    )


# ---------------- the table and the figure


def seed_runs(record: dict[str, Any], equation: str, method: str) -> list[dict[str, Any]]:
    """The runs of all seeds with the chosen setting."""
    setting = chosen(record, equation, method)
    return (
        [] if setting is None else _found(record, equation=equation, method=method, setting=setting)
    )


def table(record: dict[str, Any]) -> str:
    """Last errors as Markdown: the median, and the range over seeds."""
    lines = ["| equation | " + " | ".join(m.title for m in METHODS.values()) + " |"]
    lines.append("|---" * (len(METHODS) + 1) + "|")
    for name, make in EQUATIONS.items():
        cells = []
        for method in METHODS:
            last = [run["errors"][-1] for run in seed_runs(record, name, method)]
            text = (
                f"{statistics.median(last):.1e} ({min(last):.1e}–{max(last):.1e})" if last else ""
            )
            cells.append(text)
        equation = make()
        lines.append(f"| {equation.title}, {equation.seconds:g} s | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    """Errors over CPU seconds: medians over the seeds, and their range."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(7.6, 5.4), layout="constrained")
        names = ("poisson", "heat", "helmholtz", "burgers")
        for axis, name in zip(figure.subplots(2, 2).flat, names, strict=True):
            for method, entry in METHODS.items():
                runs = seed_runs(record, name, method)
                if not runs:
                    continue
                x = np.median([run["cpu_s"] for run in runs], 0)[1:]
                y = np.array([run["errors"] for run in runs])[:, 1:]
                axis.plot(x, np.median(y, 0), color=COLORS[method], label=entry.title)
                axis.fill_between(x, y.min(0), y.max(0), color=COLORS[method], alpha=0.15, lw=0)
            axis.set(xscale="log", yscale="log", title=EQUATIONS[name]().title)
            axis.set(xlabel="CPU seconds", ylabel="relative error")
        figure.axes[-1].legend()
        # Without a date, the same numbers give the same bytes.
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--equations", nargs="*", default=list(EQUATIONS), choices=EQUATIONS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--figure", action="store_true", help="draw the record, without runs")
    args = parser.parse_args()
    if not args.figure:
        measure(args.equations, args.methods, args.seeds)
    print(table(_read()))
    draw(_read(), FIGURE)


if __name__ == "__main__":
    main()
