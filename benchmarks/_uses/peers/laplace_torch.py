"""A posterior with laplace-torch: another environment, so no import of ours.

``python laplace_torch.py PROBLEM.npz OUTPUT.npz``: fit, evidence and predictive of Kronecker
factors; times of each stage go to standard output as one line of JSON.
"""

import importlib.metadata
import warnings

import torch
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset
from torch_models import Given


def main() -> None:
    warnings.filterwarnings("ignore")
    given = Given()
    settings, data = given.settings, given.data
    size = settings["batch_size"]
    train = DataLoader(TensorDataset(data["inputs"], data["targets"]), batch_size=size)
    posterior = Laplace(
        given.model, "classification", subset_of_weights="all", hessian_structure="kron",
        prior_precision=settings["prior_precision"],
    )  # fmt: skip
    posterior.fit(train)
    given.stage("fit")
    evidence = posterior.log_marginal_likelihood()
    given.stage("evidence")
    parts = data["q_inputs"].split(size)
    probit = torch.cat([posterior(x, link_approx="probit") for x in parts])
    given.stage("predictive")
    found = {"evidence": evidence, "probit": probit}
    if "variance" in settings["wanted"]:
        jacobians = [posterior.backend.jacobians(x)[0] for x in parts]
        found["variance"] = torch.cat([posterior.functional_variance(x) for x in jacobians])
        given.stage("variance")
        found["bridge"] = torch.cat([posterior(x, link_approx="bridge") for x in parts])
    versions = {name: importlib.metadata.version(name) for name in ("torch", "laplace-torch")}
    given.finish({k: v.detach() for k, v in found.items()}, versions)


if __name__ == "__main__":
    main()
