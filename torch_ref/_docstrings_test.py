"""Every example in a docstring of the reference prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import torch_ref

MODULES = [
    module.name
    for module in pkgutil.walk_packages(torch_ref.__path__, "torch_ref.")
    if not module.name.endswith(("_test", "conftest", "peft_plugin"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples():
    modules = map(importlib.import_module, MODULES)
    assert sum(doctest.testmod(module).attempted for module in modules) >= 4
