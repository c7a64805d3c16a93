import errno
import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys

import pytest

from jaxkfac.files import (
    PARTIAL,
    check_sha256,
    checksum,
    checksum_of,
    probe_folder,
    whole_file,
    write_text,
    write_together,
)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_file_has_the_mode_that_the_umask_leaves(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "x", "text", "a text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_the_older_file_and_nothing_else(tmp_path, kind):
    path = tmp_path / "x"
    write_text(path, "older", "a text")

    def broken_off():
        with whole_file(path, "a text") as file:
            file.write(b"half of")
            raise kind

    with pytest.raises(kind):
        broken_off()
    assert path.read_text() == "older" and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_the_older_file(tmp_path):
    path = tmp_path / "x"
    write_text(path, "older", "a text")
    code = (
        "import os, pathlib, signal, sys\n"
        "from jaxkfac.files import whole_file\n"
        "with whole_file(pathlib.Path(sys.argv[1]), 'a text') as file:\n"
        "    file.write(b'half of'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "older"
    (partial,) = set(tmp_path.iterdir()) - {path}
    assert partial.name.startswith(".x.") and partial.name.endswith(PARTIAL)


def test_a_full_disk_is_said_with_the_room_that_is_needed_and_what_remains(tmp_path):
    """The limit of file sizes is the kernel's own refusal to write on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "x"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        with pytest.raises(OSError) as caught:
            write_text(path, "x" * (3 << 20), "the report", remains="a promise")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    message = caught.value.strerror
    assert message.startswith(f"the report could not be saved to {path} (File too large: it needs")
    assert "3 MiB" in message and "free" in message and message.endswith("; a promise")
    assert not list(tmp_path.iterdir())


def test_the_kind_of_an_error_of_the_system_is_kept(tmp_path):
    with pytest.raises(FileNotFoundError, match="the report could not be saved to .*an older file"):
        write_text(tmp_path / "no" / "folder", "x", "the report")
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError, match="the report could not be saved to .*taken"):
        write_text(tmp_path / "taken", "x", "the report")


def test_files_that_belong_together_say_which_of_them_is_new(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError, match="the pair could not be saved.*; x is new already"):
        write_together({tmp_path / "x": b"new", tmp_path / "taken": b"new"}, "the pair")
    assert {path.name for path in tmp_path.iterdir()} == {"x", "taken"}


def test_every_byte_is_on_the_disk_before_the_name_is_new(tmp_path, monkeypatch):
    path, sizes, fsync = tmp_path / "x", [], os.fsync

    def synced(descriptor):
        assert not path.exists()
        sizes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    write_text(path, "text", "a text")
    assert sizes == [4] and path.read_text() == "text"


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path):
    probe_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    probe_folder(tmp_path / "a")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"no file can be written to .*/file/x \(Not a directory\)"):
        probe_folder(tmp_path / "file" / "x")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device.*choose another folder"):
        probe_folder(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_checksum_of_parts_is_that_of_their_concatenation():
    parts = [b"curvature", b"", bytes(range(256))]
    assert checksum_of(iter(parts)) == checksum(b"".join(parts)) != checksum(b"")


def test_other_data_than_the_packaged_is_named_with_both_digests():
    digest = hashlib.sha256(b"iron").hexdigest()
    check_sha256(b"iron", digest, "jaxkfac/jobs/data/elements.csv")
    with pytest.raises(ValueError, match=rf"damaged: sha256 \w+, expected {digest}"):
        check_sha256(b"gold", digest, "jaxkfac/jobs/data/elements.csv")
