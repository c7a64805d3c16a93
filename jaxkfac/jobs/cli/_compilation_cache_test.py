"""Programs that are kept are whole, whoever is killed, and nobody's settings are changed."""

import errno
import os
import subprocess
import sys

import jax
import pytest

from jaxkfac.jobs.cli import _compilation_cache as module
from jaxkfac.jobs.cli._compilation_cache import compilation_cache, programs_folder

_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def unset():
    """JAX as it is where nobody has said anything; what the tests keep is as it was, after it."""
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def _own():
    return module.Path(jax.config.jax_compilation_cache_dir)


def test_what_a_process_adds_is_there_for_the_next(unset, tmp_path):
    kept = tmp_path / "kept"
    with compilation_cache(kept):
        (_own() / "a-cache").write_bytes(b"a")
        assert not (kept / "a-cache").exists()  # it may still be written to
    assert [path.name for path in kept.iterdir()] == ["a-cache"]
    jax.config.update("jax_compilation_cache_dir", None)
    with compilation_cache(kept):
        assert (_own() / "a-cache").read_bytes() == b"a"


def test_an_entry_that_was_broken_off_is_not_kept(unset, tmp_path):
    def broken_off():
        with compilation_cache(tmp_path):
            (_own() / "whole-cache").write_bytes(b"whole")
            os.utime(_own() / "whole-cache", (1, 1))
            (_own() / "half-cache").write_bytes(b"ha")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert [path.name for path in tmp_path.iterdir()] == ["whole-cache"]


def test_two_processes_may_compile_the_same(unset, tmp_path):
    with compilation_cache(tmp_path):
        (tmp_path / "a-cache").write_bytes(b"of the other")
        (_own() / "a-cache").write_bytes(b"own")
    assert (tmp_path / "a-cache").read_bytes() == b"of the other"


def test_what_a_killed_process_left_goes_and_that_of_a_running_one_stays(unset, tmp_path):
    for name in ("killed", "running"):
        (tmp_path / f".process-{name}").mkdir()
        (tmp_path / f".process-{name}" / "half-cache").write_bytes(b"h")
    os.utime(tmp_path / ".process-killed", (1, 1))
    with compilation_cache(tmp_path):
        assert not (_own() / "half-cache").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".process-running"]


def test_the_longest_unread_go_where_there_are_too_many_bytes(unset, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 2)
    for day, name in enumerate(("old", "newer", "newest"), 1):
        (tmp_path / f"{name}-cache").write_bytes(b"x")
        os.utime(tmp_path / f"{name}-cache", (day * 86400, day * 86400))
    with compilation_cache(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"newer-cache", "newest-cache"}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK])
def test_a_file_system_without_links_has_copies(unset, tmp_path, monkeypatch, number):
    def link(*_):
        raise OSError(number, "no links")

    monkeypatch.setattr(os, "link", link)
    with compilation_cache(tmp_path):
        (_own() / "a-cache").write_bytes(b"a")
    assert [path.name for path in tmp_path.iterdir()] == ["a-cache"]


def test_a_command_ends_well_where_nothing_can_be_kept(unset, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    (tmp_path / "b-cache").write_bytes(b"b")
    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(module.shutil, "copyfile", full)
    with compilation_cache(tmp_path):
        (_own() / "a-cache").write_bytes(b"a")
    assert [path.name for path in tmp_path.iterdir()] == ["b-cache"]


def test_a_folder_that_cannot_be_is_said_and_nothing_is_kept(unset, tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    with compilation_cache(tmp_path / "file" / "kept"):
        assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs are not kept (Not a directory" in capsys.readouterr().err


def test_the_users_folder_is_left_alone(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    assert before  # that of the tests
    with compilation_cache(tmp_path):
        assert jax.config.jax_compilation_cache_dir == before
    assert not list(tmp_path.iterdir())


def test_a_machine_has_its_own_folder(tmp_path):
    assert programs_folder(tmp_path).parent == tmp_path / "programs"
    assert programs_folder(tmp_path) == programs_folder(tmp_path)


_PROGRAM = """
import sys, jax
from pathlib import Path
from jaxkfac.jobs.cli._compilation_cache import compilation_cache
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event.split("/")[-1]))
with compilation_cache(Path(sys.argv[1])):
    jax.jit(lambda x: x * 2 + 1)(3.0).block_until_ready()
print("hits", found.count("cache_hits"))
"""


@pytest.mark.slow
def test_jax_finds_what_another_process_has_compiled(tmp_path):
    variables = {k: v for k, v in os.environ.items() if "CACHE" not in k}
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    said = [
        subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [int(words.split()[1]) > 0 for words in said] == [False, True]
