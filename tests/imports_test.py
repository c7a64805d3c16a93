"""What ``import jaxkfac`` costs a user's process, and what it must not bring along."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"

PROBE = """
import json, sys, time
import jaxkfac
lazy = "jax" not in sys.modules
start = time.process_time()
import jax, flax.nnx, flax.linen, optax
base = time.process_time() - start
before = set(sys.modules)
start = time.process_time()
jaxkfac.kfac  # the first name brings all of them
own = time.process_time() - start
import jaxkfac.data, jaxkfac.models, jaxkfac.plot, jaxkfac.planning
new = sorted(set(sys.modules) - before)
print(json.dumps({"jax": base, "own": own, "lazy": lazy, "new": new}))
"""

UNWANTED = {
    "torch": "the library never imports PyTorch",
    "torch_ref": "the reference imports nothing of the library, and the other way round",
    "beartype": "runtime types are for the tests",
    "matplotlib": "extra: report",
    "tyro": "extra: cli",
    "safetensors": "extra: pretrained",
    "tokenizers": "extra: pretrained",
    "jinja2": "extra: pretrained",
    "gguf": "extra: pretrained",
    "grain": "extra: data",
    "pyarrow": "extra: data",
    "ijson": "extra: data",
    "PIL": "extra: images",
    "matfree": "extra: operators",
    "lineax": "extra: operators",
    "sklearn": "the digits are embedded",
    "haiku": "models of others are the tests' business",
    "equinox": "models of others are the tests' business",
}


@pytest.fixture(scope="module")
def probe() -> dict:
    run = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(run.stdout)
    print(f"jax, flax, optax {found['jax']:.2f} CPU s; jaxkfac after them {found['own']:.2f} s")
    return found


@pytest.mark.default(1, slow=5)
@pytest.mark.parametrize(("module", "reason"), UNWANTED.items())
def test_import_does_not_bring(probe: dict, module: str, reason: str):
    brought = {name.partition(".")[0] for name in probe["new"]}
    assert "jaxkfac" in brought and "jaxkfac.curvature" in probe["new"]
    assert module not in brought, f"import jaxkfac imports {module}: {reason}"


def test_the_command_line_does_not_wait_for_jax(probe: dict):
    assert probe["lazy"]


def test_the_index_is_what_the_package_says_it_is():
    import jaxkfac
    from jaxkfac import _index

    assert jaxkfac.__all__ == _index.__all__ == sorted(set(_index.__all__))
    assert set(jaxkfac.__all__) <= set(dir(jaxkfac))
    assert jaxkfac.kfac is _index.kfac and jaxkfac.plot is _index.plot
    with pytest.raises(AttributeError, match="module 'jaxkfac' has no attribute 'nowhere'"):
        _ = jaxkfac.nowhere


def test_changelog_has_the_version():
    import jaxkfac

    newest = next(line for line in CHANGELOG.read_text().splitlines() if line.startswith("## "))
    assert newest.removeprefix("## ").startswith(jaxkfac.__version__)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["planning", "uses"])
def test_a_room_can_be_the_first_that_is_imported(room):
    """``from jaxkfac import lslora`` inside it asks for that room, and not for every name."""
    subprocess.run([sys.executable, "-c", f"import jaxkfac.{room}"], check=True)
