"""Influence with kronfluence: another environment, so no import of ours.

``python kronfluence_influence.py PROBLEM.npz OUTPUT.npz``: covariance, eigendecomposition, lambda,
pairwise and self scores; times of each stage go to standard output as one line of JSON.
"""

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import kronfluence
import numpy as np
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import nn
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention
from torch.utils.data import TensorDataset

SIDES = ("activation", "gradient")


class Perceptron(nn.Module):
    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(weights, f"layers.{i}") for i in range(3))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Block(nn.Module):
    def __init__(self, weights: dict[str, Any], name: str, heads: int) -> None:
        super().__init__()
        for part in ("qkv", "out", "up", "down"):
            setattr(self, part, linear(weights, f"{name}.{part}"))
        self.heads = heads

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(normed(x)).reshape(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(normed(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, weights: dict[str, Any], heads: int) -> None:
        super().__init__()
        self.register_buffer("table", tensor(weights["table"]))
        self.register_buffer("places", tensor(weights["places"]))
        depth = sum(name.endswith("qkv.w") for name in weights)
        self.blocks = nn.ModuleList(Block(weights, f"blocks.{i}", heads) for i in range(depth))
        self.head = linear(weights, "head")

    def forward(self, ids):
        x = self.table[ids] + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(normed(x))


def normed(x):
    return layer_norm(x, x.shape[-1:])


def tensor(x):
    return torch.tensor(np.asarray(x))


def linear(weights: dict[str, Any], name: str) -> nn.Linear:
    kernel, bias = weights[f"{name}.w"], weights.get(f"{name}.b")
    layer = nn.Linear(*kernel.shape, bias=bias is not None, dtype=tensor(kernel).dtype)
    with torch.no_grad():
        layer.weight.copy_(tensor(kernel).T)
        if bias is not None:
            layer.bias.copy_(tensor(bias))
    return layer


class Likelihood(Task):
    """The sum of all terms' cross entropy, as kronfluence's examples have it."""

    def compute_train_loss(self, batch, model, sample=False):
        inputs, targets = batch
        logits = model(inputs)
        return cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")

    def compute_measurement(self, batch, model):
        return self.compute_train_loss(batch, model)


def main() -> None:
    warnings.filterwarnings("ignore")
    problem = dict(np.load(sys.argv[1]))
    settings = json.loads(str(problem.pop("settings")))
    data = {k: tensor(problem.pop(k)) for k in ("inputs", "targets", "q_inputs", "q_targets")}
    kinds = {"perceptron": Perceptron, "transformer": Transformer}
    heads = (settings["heads"],) if settings["kind"] == "transformer" else ()
    model = kinds[settings["kind"]](problem, *heads)
    dtype = next(model.parameters()).dtype
    train = TensorDataset(data["inputs"], data["targets"])
    queries = TensorDataset(data["q_inputs"], data["q_targets"])
    task, size = Likelihood(), settings["batch_size"]
    seconds = {}

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter(), time.process_time()

        def stage(name: str) -> None:
            nonlocal start
            now = time.perf_counter(), time.process_time()
            seconds[name] = [b - a for a, b in zip(start, now, strict=True)]
            start = now

        analyzer = Analyzer(
            "a", prepare_model(model, task), task, cpu=True, output_dir=folder,
            disable_tqdm=True, disable_model_save=True,
        )  # fmt: skip
        names = ("activation_covariance", "gradient_covariance", "per_sample_gradient", "lambda")
        factor_args = FactorArguments(
            strategy="ekfac",
            use_empirical_fisher=True,
            **{f"{name}_dtype": dtype for name in names},
        )
        names = ("per_sample_gradient", "precondition", "score", "query_gradient_svd")
        score_args = ScoreArguments(
            damping_factor=None, **{f"{name}_dtype": dtype for name in names}
        )
        given = {"per_device_batch_size": size, "factor_args": factor_args}
        analyzer.fit_covariance_matrices("f", train, **given)
        stage("covariance")
        analyzer.perform_eigendecomposition("f", factor_args=factor_args)
        stage("decomposition")
        analyzer.fit_lambda_matrices("f", train, **given)
        stage("lambda")
        analyzer.compute_pairwise_scores(
            "p", "f", queries, train, per_device_query_batch_size=len(queries),
            per_device_train_batch_size=size, score_args=score_args,
        )  # fmt: skip
        pairwise = analyzer.load_pairwise_scores("p")["all_modules"]
        stage("pairwise")
        analyzer.compute_self_scores(
            "s", "f", train, per_device_train_batch_size=size, score_args=score_args
        )
        own = analyzer.load_self_scores("s")["all_modules"]
        stage("self")
        found = {"pairwise": pairwise, "self": own}
        if settings["keep"]:
            covariances = analyzer.load_covariance_matrices("f")
            for side in SIDES:
                counts = covariances[f"num_{side}_covariance_processed"]
                for name, total in covariances[f"{side}_covariance"].items():
                    found[f"{side}/{name}"] = total / counts[name]
            kept = analyzer.load_lambda_matrices("f")
            for name, total in kept["lambda_matrix"].items():
                found[f"lambda/{name}"] = total / kept["num_lambda_processed"][name]
            for part in Path(folder).rglob("*.safetensors"):
                if settings.get("files") and part.parent.name == "factors_f":
                    target = Path(settings["files"])
                    target.mkdir(parents=True, exist_ok=True)
                    (target / part.name).write_bytes(part.read_bytes())
        np.savez(sys.argv[2], **{k: v.numpy() for k, v in found.items()})
    versions = {"torch": torch.__version__, "kronfluence": kronfluence.__version__}
    print(json.dumps({"seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main()
