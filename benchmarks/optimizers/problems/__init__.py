"""The problems; a new one is a file here and a line below."""

from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers.problems.autoencoder import AUTOENCODER
from benchmarks.optimizers.problems.burgers import BURGERS
from benchmarks.optimizers.problems.decoder import DECODER
from benchmarks.optimizers.problems.poisson import POISSON
from benchmarks.optimizers.problems.resnet import RESNET

PROBLEMS: dict[str, Problem] = {
    problem.name: problem for problem in (AUTOENCODER, POISSON, BURGERS, DECODER, RESNET)
}
