"""Whole analyses under a budget, each in a process of its own, beside their resident memory."""

import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from jaxkfac.jobs.cli.analysis.conftest import CONFIG, write_model, write_texts
from jaxkfac.memory import parse_bytes

# Wide enough that one pass over all factors takes tens of MiB more than the smallest one.
WIDE = CONFIG | {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


class Run(NamedTuple):
    """One command that has ended."""

    code: int
    peak: int  # resident bytes, as the kernel counted them
    text: str


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``run(budget)``: an analysis of a wide decoder under that budget."""
    folder = tmp_path_factory.mktemp("budget")
    # As for a user whose programs are not compiled yet, which takes most.
    own = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR")
    env = {k: v for k, v in os.environ.items() if k not in own}
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    model = write_model(folder / "model", config=WIDE)
    texts = write_texts(folder / "texts.jsonl", 8)

    def call(budget):
        output = folder / str(budget)
        fixed = ["--data", str(texts), "--max-length", "16", "--batch-size", "4"]
        # Gathering is then the stage that needs most, and its passes follow the budget.
        fixed += ["--lanczos", "0", "--decompose", r"model/layers/mlp/down_proj/kernel\[0\]"]
        command = [sys.executable, "-m", "jaxkfac", "analyze", str(model), *fixed]
        command += ["--output", str(output), "--device-bytes", str(budget), "--overwrite"]
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
            _, status, usage = os.wait4(process.pid, 0)
            log.seek(0)
            text = log.read()
        process.returncode = os.waitstatus_to_exitcode(status)
        return Run(process.returncode, 1024 * usage.ru_maxrss, text)

    call.folder = folder
    return call


@pytest.fixture(scope="module")
def smallest(run):
    """The smallest budget, as a refusal names it."""
    refused = run("10MB")
    assert refused.code == 2, refused.text
    named = re.search(r"this analysis needs at least (\d+ MiB)", " ".join(refused.text.split()))
    assert named and "loading" not in refused.text
    return parse_bytes(named[1])


AMPLE = 240 << 20  # bytes beyond the smallest with which one pass gathers every factor


def passes(run, budget):
    """The passes of a run that keeps to its budget."""
    found = run(budget)
    assert found.code == 0, found.text
    assert found.peak <= budget, f"{found.peak / 2**20:.0f} of {budget / 2**20:.0f} MiB"
    return json.loads((run.folder / str(budget) / "metrics.json").read_text())["passes"]


@pytest.mark.exhaustive
def test_the_smallest_budget_that_a_refusal_names_and_an_ample_one_hold(run, smallest):
    assert passes(run, smallest) > 1 == passes(run, smallest + AMPLE)


@pytest.mark.exhaustive
def test_every_budget_from_the_smallest_to_ample_holds(run, smallest):
    counts = [passes(run, smallest + i * AMPLE // 5) for i in range(6)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 1
    assert run(smallest - (64 << 20)).code == 2
