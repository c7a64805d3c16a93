"""The allocator's settings: what is written, what torch reads, what is refused."""

import os
import subprocess
import sys

import pytest

from torch_ref.accumulation import configure_allocator

OLDER, NEWER = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
EVERY = {
    "max_split_size_mb": 128,
    "roundup_power2_divisions": {">": 8, 256: 1, 512: 2},
    "garbage_collection_threshold": 0.8,
}


def python(code, **environment):
    """What a new process prints."""
    kept = {name: value for name, value in os.environ.items() if name not in (OLDER, NEWER)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=kept | environment,
    )
    return run.stdout.split()


def configured(settings, **environment):
    """The two variables after the call, in a process without torch."""
    code = (
        "import os, sys\n"
        "from torch_ref.accumulation import accumulated_training, configure_allocator\n"
        "assert 'torch' not in sys.modules\n"
        f"print(configure_allocator(**{settings!r}))\n"
        f"print(os.environ[{OLDER!r}], os.environ.get({NEWER!r}))\n"
    )
    returned, older, newer = python(code, **environment)
    assert returned == older and newer == "None"
    return older


def test_all_four_settings_are_written_before_torch_is_imported():
    assert configured(EVERY) == (
        "expandable_segments:True,max_split_size_mb:128,"
        "roundup_power2_divisions:[256:1,512:2,>:8],garbage_collection_threshold:0.800000"
    )
    assert configured({"roundup_power2_divisions": 4, "expandable_segments": False}) == (
        "expandable_segments:False,roundup_power2_divisions:4"
    )


def test_other_settings_of_both_variables_are_kept_and_the_older_ones_count():
    found = configured(
        {"max_split_size_mb": 128},
        PYTORCH_CUDA_ALLOC_CONF="garbage_collection_threshold:0.8,max_split_size_mb:64",
        PYTORCH_ALLOC_CONF="garbage_collection_threshold:0.5,roundup_power2_divisions:[256:1,>:2]",
    )
    assert set(found.replace("[256:1,>:2]", "list").split(",")) == {
        "garbage_collection_threshold:0.8",
        "roundup_power2_divisions:list",
        "expandable_segments:True",
        "max_split_size_mb:128",
    }


READS = "import torch; print(torch._C._accelerator_getAllocatorSettings())"


@pytest.mark.exhaustive
def test_torch_accepts_what_is_written_and_reads_the_older_name_first():
    code = (
        "from torch_ref.accumulation import configure_allocator\n"
        f"written = configure_allocator(**{EVERY!r})\n"
        "import torch\n"
        "if not hasattr(torch._C, '_accelerator_getAllocatorSettings'):\n"
        "    print('unknown')\n"
        "else:\n"
        "    print(torch._C._accelerator_getAllocatorSettings() == written)\n"
    )
    (same,) = python(code)
    if same == "unknown":
        pytest.skip("this torch does not say which settings it has read")
    assert same == "True"
    both = {OLDER: "max_split_size_mb:64", NEWER: "max_split_size_mb:128"}
    assert python(READS, **both) == ["max_split_size_mb:64"]


def test_settings_after_torch_are_refused():
    with pytest.raises(RuntimeError, match="torch is imported already"):
        configure_allocator()


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("max_split_size_mb", [20, 0, -1]),
        ("roundup_power2_divisions", [0, 3, -4, {}, {300: 2}, {256: 3}, {"<": 2}]),
        ("garbage_collection_threshold", [0.0, 1.0, 80, -0.5]),
    ],
)
def test_values_that_torch_would_refuse_are_refused(setting, values, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv(OLDER, "untouched:1")
    for value in values:
        with pytest.raises(ValueError, match=f"^{setting}"):
            configure_allocator(**{setting: value})
    assert os.environ[OLDER] == "untouched:1"
