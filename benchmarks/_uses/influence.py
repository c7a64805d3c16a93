"""The same with this library: ``python -m benchmarks._uses.influence PROBLEM.npz OUTPUT.npz``.

With the setting ``store``, a dtype, eigenvalues are measured while gradients of the training set
are stored, and all scores are taken from the store; a last stage scores other queries on it.
``part`` takes the covariances from that part of the batches, drawn without replacement; ``margin``
adds scores of the queries' margins.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from benchmarks._uses.models import Given


def main() -> None:
    given = Given()
    settings, params, objective = given.settings, given.params, given.objective
    fisher, key = settings.get("fisher", "empirical"), jax.random.key(0)
    keyed = fisher == "mc"

    def call(function: Any, number: int, batch: Any) -> Any:
        return function(params, batch, *([jax.random.fold_in(key, number)] if keyed else []))

    stats = jk.value_grad_and_factors(objective, fisher=fisher)
    collect = jax.jit(lambda *given: stats(*given).factors)
    add, factors = jax.jit(operator.add, donate_argnums=0), None
    batches = list(given.batches())
    part = max(1, round(settings.get("part", 1.0) * len(batches)))
    chosen = np.sort(np.random.default_rng(0).permutation(len(batches))[:part])
    for number in chosen.tolist():
        batch = batches[number]
        new = call(collect, number, batch)
        factors = new if factors is None else add(factors, new)
    given.stage("covariance", factors)
    assert factors is not None
    bases = jk.eigendecompose(factors, max_condition=float("inf"))
    given.stage("decomposition", bases)
    queries = given.data["q_inputs"], given.data["q_targets"]
    if "store" in settings:
        found = from_store(given, bases, queries)
        given.finish(found)
        return
    measure = jax.jit(jk.correct_eigenvalues(objective, bases, fisher=fisher))
    corrected = None
    for number, batch in enumerate(given.batches(), start=1 << 20):
        new = call(measure, number, batch)
        corrected = new if corrected is None else add(corrected, new)
    given.stage("lambda", corrected)
    assert corrected is not None
    held = jk.prepare_queries(objective, params, corrected, queries)
    pairwise = jk.influence(objective, params, None, held, given.batches())
    given.stage("pairwise", pairwise)
    own = jk.self_influence(objective, params, corrected, given.batches())
    given.stage("self", own)
    targets = given.data["targets"]
    terms = targets.size // len(targets)  # theirs is of sums over an example
    found = {"pairwise": pairwise / terms, "self": own / terms}
    if settings.get("margin"):
        args = objective, params, corrected, queries, given.batches()
        found["margin"] = jk.influence(*args, measurement=margin) / terms
    if settings["keep"]:
        for layer in bases.layers:
            name, factor = layer.weight.path.removesuffix(".w"), factors[layer.name]
            taps = int(np.prod(given.params[layer.weight.path].shape[:-2]))
            places = factors.a_counts[layer.input] / factors.terms
            found |= sides(name, factor, places, taps)
            found[f"lambda/{name}"] = terms * corrected[layer.name].raw_values.T  # type: ignore
    given.finish(found)


def margin(outputs: Any, query: Any) -> Any:
    """The logits of the targets less the log of the sum of the others' exponentials."""
    logits, targets = outputs.reshape(-1, outputs.shape[-1]), query.targets.reshape(-1, 1)
    others = jnp.where(jnp.arange(logits.shape[1]) == targets, -jnp.inf, logits)
    chosen = jnp.take_along_axis(logits, targets, 1)[:, 0]
    return (chosen - jax.nn.logsumexp(others, 1)).sum()


def from_store(given: Given, bases: jk.Eigenbases, queries: Any) -> dict[str, Any]:
    """Scores from stored gradients, and those of other queries in the same process."""
    objective, params, settings = given.objective, given.params, given.settings
    batches, folder = given.batches(), settings.get("folder")
    store = jk.gradient_store(objective, params, bases, batches, folder, settings["store"])
    given.stage("lambda", store.bases)
    args = objective, params, store.bases
    pairwise = jk.influence(*args, queries, store)
    given.stage("pairwise", pairwise)
    own = jk.self_influence(*args, store)
    given.stage("self", own)
    others = queries[0], np.roll(queries[1], 1, 0)
    given.stage("new queries", jk.influence(*args, others, store))
    terms = given.data["targets"][0].size
    return {"pairwise": pairwise / terms, "self": own / terms}


def sides(name: str, factor: Any, places: Any, taps: int) -> dict[str, Any]:
    """A and G as kronfluence has them: a kernel's inputs channels first, G a mean over places."""
    a = np.asarray(factor.a)
    if taps > 1:
        n = len(a) // taps
        a = a.reshape(taps, n, taps, n).transpose(1, 0, 3, 2).reshape(len(a), len(a))
    return {f"activation/{name}": a, f"gradient/{name}": factor.g / places}


if __name__ == "__main__":
    main()
