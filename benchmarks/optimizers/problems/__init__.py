"""The problems; a new one is a file here and a line below."""

from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers.problems.autoencoder import AUTOENCODER
from benchmarks.optimizers.problems.burgers import BURGERS
from benchmarks.optimizers.problems.convolution import CONVOLUTION
from benchmarks.optimizers.problems.decoder import DECODER
from benchmarks.optimizers.problems.diffusion import DIFFUSION
from benchmarks.optimizers.problems.gaussian_autoencoder import GAUSSIAN_AUTOENCODER
from benchmarks.optimizers.problems.gru import GRU
from benchmarks.optimizers.problems.perceptron import PERCEPTRON
from benchmarks.optimizers.problems.poisson import POISSON
from benchmarks.optimizers.problems.resnet import RESNET
from benchmarks.optimizers.problems.scaled_regression import SCALED_REGRESSION
from benchmarks.optimizers.problems.vit import VIT

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        PERCEPTRON,
        GAUSSIAN_AUTOENCODER,
        CONVOLUTION,
        GRU,
        VIT,
        SCALED_REGRESSION,
        DIFFUSION,
        POISSON,
        BURGERS,
        DECODER,
        AUTOENCODER,
        RESNET,
    )
}
