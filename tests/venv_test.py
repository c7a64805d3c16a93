"""The environments of `make`: each is made once, whole, and what prevents it is a sentence."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a stand-in answers to the questions of .ci/venv, and what it does when it is to make one.
PYTHON = """#!/bin/bash
if [[ $1 == -m ]]; then
  {make}
fi
case $2 in
  *"print(*(name"*) echo "{missing}" ;;
  *version_info\\[:2\\]*) echo "{version}" ;;
  *"version_info <"*) [[ {version} != 3.[0-9] && {version} != 3.10 ]] ;;
esac
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a space in its name, and a path on which there is no Python."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "ls", "realpath", "mkdir", "touch", "chmod"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "a folder").mkdir()
    return tmp_path / "a folder"


def stand_in(folder, name, version="3.12", missing="", make="exit 1"):
    """An interpreter on the path."""
    file = folder.parent / "bin" / name
    file.write_text(PYTHON.format(version=version, missing=missing, make=make))
    file.chmod(0o755)


def made(folder, *python):
    return subprocess.run(
        [ROOT / ".ci" / "venv", folder / "env", *python],
        env={"PATH": str(folder.parent / "bin")},
        capture_output=True,
        text=True,
    )


# An environment whose Python answers everything, so that pip is there.
MAKES = """
  mkdir -p "$3/bin"; printf '#!/bin/bash\\n' > "$3/bin/python"; chmod +x "$3/bin/python"; exit
"""


def test_the_first_python_that_is_new_enough_makes_it_once(folder):
    stand_in(folder, "python3", "3.9")
    stand_in(folder, "python3.12", make=MAKES)
    first = made(folder)
    assert first.returncode == 0, first.stderr
    stand_in(folder, "python3.12", make="echo again; exit 1")
    again = made(folder)
    assert (again.returncode, again.stdout) == (0, "")


def test_what_a_broken_run_has_left_is_made_anew(folder):
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "pyvenv.cfg").touch()
    broken = folder / "env" / "bin" / "python"
    broken.write_text("#!/bin/bash\nexit 1\n")  # it has no pip
    broken.chmod(0o755)
    stand_in(folder, "python3", make=MAKES)
    assert made(folder).returncode == 0
    assert "exit 1" not in broken.read_text()


def test_a_folder_that_is_no_environment_is_left_alone(folder):
    stand_in(folder, "python3", make=MAKES)
    (folder / "env").mkdir()
    (folder / "env" / "thesis.tex").touch()
    answer = made(folder)
    assert answer.returncode == 1 and "something else than an environment" in answer.stderr
    assert [x.name for x in (folder / "env").iterdir()] == ["thesis.tex"]


PREVENTED = {
    "no Python": ({}, ["needs Python 3.11, 3.12 or 3.13", "PYTHON=/path/to/python3.12 make"]),
    "an old one": ({"version": "3.9"}, ["python3 is 3.9", "PYTHON="]),
    "without venv": ({"missing": "venv ensurepip"}, ["without venv and ensurepip", "-venv"]),
    "a full disk": ({"make": "echo no space left >&2; exit 1"}, ["no space left", "could not"]),
}


@pytest.mark.parametrize("name", PREVENTED)
def test_what_prevents_it_is_a_sentence(name, folder):
    options, words = PREVENTED[name]
    if options:
        stand_in(folder, "python3", **options)
    answer = made(folder)
    assert answer.returncode == 1
    assert all(word in answer.stderr for word in words), answer.stderr


def test_a_place_that_cannot_be_written_is_named_with_the_way_around(folder, tmp_path):
    stand_in(folder, "python3", make=MAKES)
    answer = subprocess.run(
        [ROOT / ".ci" / "venv", "/proc/env"],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    assert "VENV=/path/to/environment make" in answer.stderr


def test_a_rule_that_failed_is_tried_again(folder):
    """A stamp is made by pip's success alone, and several jobs of make share one environment."""
    stand_in(folder, "python3", make=MAKES)
    for name in ("make", "python3"):
        if not (path := folder.parent / "bin" / name).exists():
            path.symlink_to(str(shutil.which(name)))
    for file in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/venv"):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, folder / file)

    def make():
        return subprocess.run(
            ["make", "-j2", "run", "test"],
            cwd=folder,
            env={"PATH": str(folder.parent / "bin")},
            capture_output=True,
            text=True,
        )

    assert (answer := make()).returncode == 0, answer.stderr
    stamps = {x.name for x in (folder / ".venv").glob(".stamp*")}
    assert stamps == {".stamp-run", ".stamp-test"}
    for stamp in stamps:
        (folder / ".venv" / stamp).unlink()
    failing = "#!/bin/bash\n[[ $2 != pip ]] || { echo no index >&2; exit 1; }\n"
    (folder / ".venv" / "bin" / "python").write_text(failing)
    answer = make()
    assert answer.returncode and "no index" in answer.stderr
    assert not list((folder / ".venv").glob(".stamp*"))
