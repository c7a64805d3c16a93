"""What the options of a run are made into."""

import sys
import types

import jax.numpy as jnp
import pytest

from jaxkfac.jobs.cli.finetune._decoder import DecoderFamily
from jaxkfac.jobs.cli.finetune._encoder_decoder import EncoderDecoderFamily
from jaxkfac.jobs.cli.finetune._options import AdapterOptions, Finetuning
from jaxkfac.jobs.cli.finetune._problem import adapter_config
from jaxkfac.lslora import Nonlinearity, find_nonlinearity


class Quadratic(Nonlinearity):
    name, initial = "cli_quadratic", (1.0, 0.0)
    formula, strength_formula = "φ = c0 u + c1 u² with u = z / σ", "|c1|"

    def apply(self, x, c):
        return c[0] * x + c[1] * x**2

    def derivative(self, x, c, cotangent):
        return cotangent * (c[0] + 2 * c[1] * x), (cotangent * x, cotangent * x**2)

    def strength(self, coefficients):
        return jnp.abs(coefficients[..., 1])


def config_of(nonlinearity):
    experiment = Finetuning(adapter=AdapterOptions(nonlinearity=nonlinearity))
    return adapter_config(experiment, DecoderFamily())


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = types.ModuleType("curves_of_a_test")
    module.QUADRATIC, module.NUMBER = QUADRATIC, 3
    monkeypatch.setitem(sys.modules, "curves_of_a_test", module)


QUADRATIC = Quadratic()


def test_a_nonlinearity_is_named_or_imported_and_registered():
    assert config_of("fourier").nonlinearity == "fourier"
    for _ in range(2):  # as when a run is resumed in one process
        assert config_of("curves_of_a_test:QUADRATIC").phi is QUADRATIC
    assert find_nonlinearity("cli_quadratic") is QUADRATIC


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("unknown", "nonlinearity='unknown': expected one of .*'fourier'"),
        ("no_such_module:X", "no_such_module:X: No module named"),
        ("curves_of_a_test:X", "curves_of_a_test:X: module .* has no attribute 'X'"),
        ("curves_of_a_test:NUMBER", "expected an object of a subclass .* got int"),
    ],
)
def test_a_nonlinearity_that_is_none_is_named(word, message):
    with pytest.raises(ValueError, match=message):
        config_of(word)


def test_each_kind_of_model_has_its_own_layers_adapted_unless_others_are_named():
    experiment = Finetuning()
    assert adapter_config(experiment, DecoderFamily()).target == r".*_proj/kernel"
    assert adapter_config(experiment, EncoderDecoderFamily()).target == r".*Attention/[qv]/kernel"
    named = Finetuning(adapter=AdapterOptions(target="all-linear"))
    assert adapter_config(named, EncoderDecoderFamily()).target == "all-linear"
