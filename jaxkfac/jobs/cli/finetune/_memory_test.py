"""A long run in a fresh process: what it holds does not grow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxkfac.memory import resident_bytes

PROBE = """
import ctypes, gc, json, sys
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli.finetune import _run, _train
from jaxkfac.jobs.data.text._encode_test import Letters
from jaxkfac.memory import resident_bytes
from jaxkfac.jobs.models import Decoder, DecoderConfig, Pretrained

CONFIG = DecoderConfig(
    vocabulary=128, width=16, hidden=24, depth=2, num_heads=2, num_kv_heads=1, head_size=8,
    context=128, tied_head=True, eos_ids=(2,),
)
output, updates, *words = sys.argv[1:]
found = {}

class Marks:
    def numbers(self, step, values):
        if step in (200, int(updates)) and step not in found:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later is not held
            found[step] = resident_bytes()

    def close(self):
        pass

def load_model(experiment):
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    return Pretrained(CONFIG, apply_fn, params, Letters())

_run.load_model, _train.open_loggers = load_model, lambda *_, **__: Marks()
words = ["--steps", updates, "--output", output, "--batch-size", "4", "--adapter.rank", "2",
         "--questions", "0", "--samples", "0", "--curvature", "None", "--diagnose-every", "100",
         "--checkpoint-every", "100", *words]
assert main(["finetune", *words]) == 0
print(json.dumps(found))
"""


@pytest.mark.skipif(resident_bytes() is None, reason="resident memory is read from /proc")
@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "kfac"])
def test_two_thousand_updates_hold_no_more_than_two_hundred(optimizer, tmp_path):
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROBE, str(tmp_path), "2000", "--optimizer", optimizer]
    out = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[4],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(out.stdout.splitlines()[-1])
    assert found["2000"] <= 1.01 * found["200"], found
