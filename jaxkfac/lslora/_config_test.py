"""Settings that make no sense are refused when the config is built."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.lslora import Config, RmsSigma


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: expected at least 1"),
        ({"rank_pattern": {"a": 0}}, "rank=0: expected at least 1"),
        ({"dropout": 1}, r"dropout=1: expected a probability in \[0, 1\)"),
        ({"alpha": math.inf}, "alpha=inf: expected a finite number"),
        ({"alpha": 0}, "alpha=0: expected a finite number other than 0"),
        ({"alpha_pattern": {".*": math.nan}}, "alpha=nan: expected a finite number"),
        ({"alpha_pattern": {".*": 0.0}}, "alpha=0.0: expected a finite number other than 0"),
        ({"reg_weight": math.nan}, "reg_weight=nan: expected a finite number"),
        ({"init_sigma": 0}, "init_sigma=0: expected a finite number other than 0"),
        ({"init_sigma": RmsSigma(-1)}, "positive factor"),
        ({"target": "("}, r"'\(' is not a regular expression"),
        ({"exclude": "["}, "is not a regular expression"),
        ({"alpha_pattern": {"*": 1}}, "is not a regular expression"),
        ({"target": ()}, "target is empty"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_an_unknown_placement_is_refused():
    with pytest.raises(Exception, match="fourier_placement"):  # the type hook comes first here
        Config(fourier_placement="input")


def unhooked(**settings):
    """The config of a process without the type hook, which comes first here."""
    config = Config()
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    config.__post_init__()
    return config


@pytest.mark.parametrize("settings", [{"rank": 4.0}, {"rank_pattern": {"a": np.float32(4)}}])
def test_a_rank_that_is_no_whole_number_is_refused(settings):
    with pytest.raises(ValueError, match="rank=4.0: expected at least 1, a whole number"):
        unhooked(**settings)


def test_numbers_of_numpy_and_jax_become_pythons():
    config = unhooked(
        rank=np.int64(4),
        alpha=np.float32(8),
        init_sigma=RmsSigma(jnp.float32(0.5)),
        reg_weight=jnp.asarray(0.25),
        rslora=np.bool_(True),
        dropout=np.float64(0.5),
        rank_pattern={"a": jnp.asarray(2)},
        alpha_pattern={"a": np.float16(3)},
    )
    expected = Config(
        rank=4,
        alpha=8.0,
        init_sigma=RmsSigma(0.5),
        reg_weight=0.25,
        rslora=True,
        dropout=0.5,
        rank_pattern={"a": 2},
        alpha_pattern={"a": 3.0},
    )
    assert config == expected
    assert json.dumps(vars(config)) == json.dumps(vars(expected))
    assert json.dumps(vars(unhooked(init_sigma=jnp.asarray(2.0)))) == json.dumps(
        vars(Config(init_sigma=2.0))
    )


def test_the_first_pattern_that_matches_counts():
    config = Config(rank=8, rank_pattern={".*/q/.*": 2, ".*/kernel": 4})
    ranks = [config.rank_of(name) for name in ("b/q/kernel", "b/v/kernel", "b/v/weight")]
    assert ranks == [2, 4, 8]


def test_the_default_has_rank_8_and_twice_the_branch():
    config = Config()
    assert config.rank_of("layer") == 8 and config.scaling("layer") == 2
