"""A full posterior with laplax: another environment, so no import of ours.

``python laplax_posterior.py PROBLEM.npz OUTPUT.npz``: the dense matrix of all parameters, its
inverse, and the covariances of outputs; times of each stage go to standard output as one line.
"""

import importlib.metadata
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

DATA = ("inputs", "targets", "q_inputs", "q_targets")


def linear(input, params):
    return input @ params["head.w"] + params["head.b"]


def perceptron(input, params):
    for i in range(2):
        input = jnp.tanh(input @ params[f"layers.{i}.w"] + params[f"layers.{i}.b"])
    return input @ params["layers.2.w"] + params["layers.2.b"]


def half_squares(outputs, targets):
    return jnp.square(outputs - targets).sum() / 2


MODELS = {"linear": (linear, half_squares), "perceptron": (perceptron, "cross_entropy")}


def main() -> None:
    problem = dict(np.load(sys.argv[1]))
    settings = json.loads(str(problem.pop("settings")))
    if settings["dtype"] == "float64":
        jax.config.update("jax_enable_x64", True)
    from laplax.curv.cov import create_posterior_fn
    from laplax.curv.ggn import create_ggn_mv
    from laplax.eval.pushforward import lin_pred_cov, lin_pred_mean, lin_setup, set_lin_pushforward

    data = {k: jnp.asarray(problem.pop(k)) for k in DATA}
    params = {k: jnp.asarray(v) for k, v in problem.items()}
    model, loss = MODELS[settings["kind"]]
    seconds, start = {}, (time.perf_counter(), time.process_time())

    def stage(name: str, done: object) -> None:
        nonlocal start
        jax.block_until_ready(done)
        now = time.perf_counter(), time.process_time()
        seconds[name] = [b - a for a, b in zip(start, now, strict=True)]
        start = now

    train = {"input": data["inputs"], "target": data["targets"]}
    product = create_ggn_mv(model, params, train, loss_fn=loss)
    posterior = create_posterior_fn("full", mv=product, layout=params)
    predict = set_lin_pushforward(
        model_fn=model, mean_params=params, posterior_fn=posterior,
        prior_arguments={"prior_prec": settings["prior_precision"]},
        pushforward_fns=[lin_setup, lin_pred_mean, lin_pred_cov],
    )  # fmt: skip
    stage("fit", None)
    variance = jax.jit(jax.vmap(lambda x: predict(x)["pred_cov"]))(data["q_inputs"])
    stage("variance", variance)
    np.savez(sys.argv[2], variance=np.asarray(variance))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "laplax")}
    print(json.dumps({"seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main()
