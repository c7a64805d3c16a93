"""What the tests of whole runs share."""

import jax
import pytest


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """The same program of several runs is compiled by the first of them."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
