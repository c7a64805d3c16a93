"""Influence with kronfluence: another environment, so no import of ours.

``python kronfluence_influence.py PROBLEM.npz OUTPUT.npz``: covariance, eigendecomposition, lambda,
pairwise and self scores, and with the setting ``margin`` scores of the queries' margins; times of
each stage go to standard output as one line of JSON.
"""

import tempfile
import warnings
from pathlib import Path

import kronfluence
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torch_models import Given

SIDES = ("activation", "gradient")


class Likelihood(Task):
    """The sum of all terms' cross entropy, as kronfluence's examples have it."""

    has_margin = False  # whether margins are measured, in place of the loss

    def compute_train_loss(self, batch, model, sample=False):
        inputs, targets = batch
        logits = model(inputs).flatten(0, -2)
        if sample:
            with torch.no_grad():
                targets = torch.multinomial(logits.softmax(-1), 1)
        return cross_entropy(logits, targets.flatten(), reduction="sum")

    def compute_measurement(self, batch, model):
        if not self.has_margin:
            return self.compute_train_loss(batch, model)
        logits, targets = model(batch[0]).flatten(0, -2), batch[1].flatten()[:, None]
        others = logits.scatter(1, targets, -torch.inf).logsumexp(1)
        return (logits.gather(1, targets)[:, 0] - others).sum()


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    given = Given()
    settings, data, model = given.settings, given.data, given.model
    dtype = next(model.parameters()).dtype
    train = TensorDataset(data["inputs"], data["targets"])
    queries = TensorDataset(data["q_inputs"], data["q_targets"])
    task, size, stage = Likelihood(), settings["batch_size"], given.stage

    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "a", prepare_model(model, task), task, cpu=True, output_dir=folder,
            disable_tqdm=True, disable_model_save=True,
        )  # fmt: skip
        names = ("activation_covariance", "gradient_covariance", "per_sample_gradient", "lambda")
        factor_args = FactorArguments(
            strategy="ekfac",
            use_empirical_fisher=settings.get("fisher", "empirical") == "empirical",
            **{f"{name}_dtype": dtype for name in names},
        )
        names = ("per_sample_gradient", "precondition", "score", "query_gradient_svd")
        score_args = ScoreArguments(
            damping_factor=None, **{f"{name}_dtype": dtype for name in names}
        )
        options = {"per_device_batch_size": size, "factor_args": factor_args}
        analyzer.fit_covariance_matrices("f", train, **options)
        stage("covariance")
        analyzer.perform_eigendecomposition("f", factor_args=factor_args)
        stage("decomposition")
        analyzer.fit_lambda_matrices("f", train, **options)
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
        if settings.get("margin"):
            task.has_margin = True
            analyzer.compute_pairwise_scores(
                "m", "f", queries, train, per_device_query_batch_size=len(queries),
                per_device_train_batch_size=size, score_args=score_args,
            )  # fmt: skip
            found["margin"] = analyzer.load_pairwise_scores("m")["all_modules"]
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
        versions = {"torch": torch.__version__, "kronfluence": kronfluence.__version__}
        given.finish(found, versions)


if __name__ == "__main__":
    main()
