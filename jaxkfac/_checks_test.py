import pytest

from jaxkfac._errors import one_of


def test_a_value_that_is_no_choice_is_refused_by_name_with_the_choices():
    one_of("missing", "zero", ("raise", "zero"))
    with pytest.raises(ValueError, match="missing='skip': expected one of 'raise', 'zero'"):
        one_of("missing", "skip", ("raise", "zero"))
