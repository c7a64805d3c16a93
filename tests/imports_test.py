"""What ``import jaxkfac`` costs a user's process, and what it must not bring along."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"

PROBE = """
import json, sys, time
start = time.perf_counter()
import jax
base = time.perf_counter() - start
before = set(sys.modules)
start = time.perf_counter()
import jaxkfac
own = time.perf_counter() - start
print(json.dumps({"jax": base, "own": own, "new": sorted(set(sys.modules) - before)}))
"""

UNWANTED = {
    "torch": "the library never imports PyTorch",
    "torch_ref": "the reference imports nothing of the library, and the other way round",
    "beartype": "runtime types are for the tests",
    "matplotlib": "extra: report",
    "tyro": "extra: cli",
    "orbax": "extra: cli",
    "safetensors": "extra: pretrained",
    "grain": "extra: data",
    "pyarrow": "extra: data",
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
    print(f"import jax {found['jax']:.2f} s; import jaxkfac after it {found['own']:.2f} s")
    return found


@pytest.mark.parametrize(("module", "reason"), UNWANTED.items())
def test_import_does_not_bring(probe: dict, module: str, reason: str):
    brought = {name.partition(".")[0] for name in probe["new"]}
    assert "jaxkfac" in brought
    assert module not in brought, f"import jaxkfac imports {module}: {reason}"


def test_changelog_has_the_version():
    import jaxkfac

    newest = next(line for line in CHANGELOG.read_text().splitlines() if line.startswith("## "))
    assert newest.removeprefix("## ").startswith(jaxkfac.__version__)
