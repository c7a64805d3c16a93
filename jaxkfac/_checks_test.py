import numpy as np
import pytest

from jaxkfac._errors import at_least_one, one_of


def test_a_value_that_is_no_choice_is_refused_by_name_with_the_choices():
    one_of("missing", "zero", ("raise", "zero"))
    with pytest.raises(ValueError, match="missing='skip': expected one of 'raise', 'zero'"):
        one_of("missing", "skip", ("raise", "zero"))


@pytest.mark.parametrize("number", [0, -1, 2.5, np.float32(1.5), np.nan])
def test_a_number_that_is_not_whole_or_below_one_is_refused_by_name(number):
    at_least_one(top_k=2, period=np.int64(3), rounds=4.0)
    with pytest.raises(ValueError, match=r"top_k=.*: expected (at least 1|a whole number)"):
        at_least_one(top_k=number)
