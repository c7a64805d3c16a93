"""A posterior with this library: ``benchmarks._uses.posterior PROBLEM.npz OUTPUT.npz``."""

import operator

import jax
import jax.numpy as jnp

import jaxkfac as jk
from benchmarks._uses.models import Given


def main() -> None:
    given = Given()
    settings, params, objective = given.settings, given.params, given.objective
    number, size = settings["examples"], settings["batch_size"]
    stats = jk.value_grad_and_factors(objective, fisher="exact", bias=settings["bias"])
    collect = jax.jit(lambda *given: stats(*given).factors)
    add, factors = jax.jit(operator.add, donate_argnums=0), None
    for batch in given.batches():
        new = collect(params, batch)
        factors = new if factors is None else add(factors, new)
    assert factors is not None
    posterior = jk.laplace(
        objective, params, jk.eigendecompose(factors), num_examples=number,
        prior_precision=settings["prior_precision"],
    )  # fmt: skip
    given.stage("fit", posterior)
    inputs = given.data["q_inputs"]
    parts, found = [inputs[i : i + size] for i in range(0, len(inputs), size)], {}
    if "probit" in settings["wanted"]:
        found["evidence"] = posterior.log_marginal_likelihood(given.batches())
        given.stage("evidence", found["evidence"])
        found["probit"] = jnp.concatenate([posterior.predict(x) for x in parts])
        given.stage("predictive", found["probit"])
    if "variance" in settings["wanted"]:
        found["variance"] = jnp.concatenate([posterior.variance(x) for x in parts])
        given.stage("variance", found["variance"])
    if "bridge" in settings["wanted"]:
        found["bridge"] = posterior.predict(inputs, "bridge")
    given.finish(found)


if __name__ == "__main__":
    main()
