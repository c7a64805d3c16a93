"""The runtime type hook of all tests: what it checks, and how often it writes the check."""

import importlib

import jaxtyping
import numpy as np
import pytest

from tests import _typechecker

SOURCE = """
from jaxtyping import Float

def outer(kind):
    def inner(x: Float[kind, "n n"], *, times: int = 1) -> Float[kind, "n"]:
        return x[0] if times else x
    return inner
"""


@pytest.fixture
def outer(tmp_path, monkeypatch):
    (tmp_path / "checked_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("checked_module", "tests._typechecker.checked"):
        return importlib.import_module("checked_module").outer


def test_every_closure_is_checked_and_its_check_is_written_once(outer):
    before = len(_typechecker._written)
    for _ in range(3):
        inner = outer(np.ndarray)
        assert inner(np.eye(2)).shape == (2,)
        for wrong in ({"x": np.ones((2, 3))}, {"x": np.eye(2, dtype=int)}, {"x": 1.0}):
            with pytest.raises(jaxtyping.TypeCheckError, match="inner"):
                inner(**wrong)
        with pytest.raises(jaxtyping.TypeCheckError, match="times"):
            inner(np.eye(2), times="1")
        with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
            inner(np.eye(2), times=0)
    assert len(_typechecker._written) == before + 2  # of its parameters, and of its result


def test_a_closure_over_another_type_has_a_check_of_its_own(outer):
    assert outer(np.ndarray)(np.eye(2)).shape == (2,)
    with pytest.raises(jaxtyping.TypeCheckError):
        outer(list)(np.eye(2))
