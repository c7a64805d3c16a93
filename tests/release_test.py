"""The release script names what stands against a release, and a dry run changes nothing."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release"))


@pytest.fixture
def tree(tmp_path):
    """A repository with what the script looks at."""
    files = {
        "jaxkfac/__init__.py": '__version__ = "1.2.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2030-01-31)\n",
        "CITATION.cff": "title: x\nversion: 1.2.0\nlicense: y\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    return tmp_path


def git(folder, *words):
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tree, capsys):
    before = git(tree, "log", "--all", "--oneline")
    assert RELEASE["main"](tree, ["--dry-run"]) == 0
    assert "git tag -a v1.2.0" in capsys.readouterr().out
    assert git(tree, "tag") == "" and git(tree, "log", "--all", "--oneline") == before
    assert not (tree / "dist").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("jaxkfac/__init__.py", "1.2.0", "1.2.dev0"), "none that can be released"),
        (("CHANGELOG.md", "2030-01-31", "unreleased"), "not with '## 1.2.0 (YYYY-MM-DD)'"),
        (("CITATION.cff", "1.2.0", "1.1.0"), "does not say 'version: 1.2.0'"),
        (("CITATION.cff", "title", "name"), "not committed"),
    ],
)
def test_what_stands_against_a_release_is_named(tree, change, problem, capsys):
    name, old, new = change
    (tree / name).write_text((tree / name).read_text().replace(old, new))
    assert RELEASE["main"](tree, []) == 1  # it stops before anything is built
    assert problem in capsys.readouterr().err
    assert git(tree, "tag") == ""


def test_a_version_is_released_once(tree, capsys):
    git(tree, "tag", "v1.2.0")
    assert RELEASE["main"](tree, ["--dry-run"]) == 1
    assert "the tag v1.2.0 is there already" in capsys.readouterr().err


def test_nothing_is_uploaded():
    program = (ROOT / ".ci" / "release").read_text()
    commands = re.findall(r"\[\[?\"(.+?)\"", program)
    assert not any("twine" in command or "push" in command for command in commands)


def test_the_citation_has_the_version():
    import jaxkfac

    assert f"version: {jaxkfac.__version__}\n" in (ROOT / "CITATION.cff").read_text()
