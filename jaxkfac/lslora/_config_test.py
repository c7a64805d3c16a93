"""Settings that make no sense are refused when the config is built."""

import math

import pytest

from jaxkfac.lslora import Config, RmsSigma


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: expected at least 1"),
        ({"rank_pattern": {"a": 0}}, "rank=0: expected at least 1"),
        ({"dropout": 1}, r"dropout=1: expected a probability in \[0, 1\)"),
        ({"alpha": math.inf}, "alpha=inf: expected a finite number"),
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


def test_the_first_pattern_that_matches_counts():
    config = Config(rank=8, rank_pattern={".*/q/.*": 2, ".*/kernel": 4})
    ranks = [config.rank_of(name) for name in ("b/q/kernel", "b/v/kernel", "b/v/weight")]
    assert ranks == [2, 4, 8]
