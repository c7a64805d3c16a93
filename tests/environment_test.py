"""What tests import is what ``make test`` installs, in whatever environment they run.

Read are the test files and all that they import from this repository, the programs that they start
with ``-c``, the files that they load by path, the examples, the notebooks and the blocks of pages.
"""

import ast
import contextlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.readme_test import script

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxkfac", "torch_ref", "parity_tests", "tests", "benchmarks")
SKIPS = (ROOT / ".ci" / "skips.txt").read_text().splitlines()
KNOWN = frozenset(PACKAGES) | sys.stdlib_module_names


class Import(NamedTuple):
    """A line that needs a module, and where it is."""

    file: str
    line: int
    module: str


# ---------------- what make test installs


def installed(makefile: str, extras: dict[str, list[str]], core: list[str]) -> set[str]:
    """Distributions of the rule's extras, and all that these require here."""
    rule = re.search(r'/\.stamp-test:.*\n(?:\t.*\n)*?\t.* -e "\.\[([\w,]+)\]"', makefile)
    assert rule, "the Makefile has no rule that installs what the tests need"
    waiting = [Requirement(f"jaxkfac[{rule[1]}]")]
    seen: dict[str, set[str]] = {}
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        new = {"", *wanted.extras} - seen.get(name, set())
        if not new:
            continue
        seen.setdefault(name, set()).update(new)
        if name == "jaxkfac":
            waiting += [Requirement(x) for x in core if "" in new]
            waiting += [Requirement(x) for extra in new - {""} for x in extras[extra]]
            continue
        try:
            lines = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in map(Requirement, lines):
            marker = line.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in new):
                waiting.append(line)
    return set(seen)


# ---------------- what a file imports


class Scope(NamedTuple):
    """The modules that a file or function needs, and the nodes in which it may spell a path.

    Attributes:
        imports: Lines and modules.
        asked: Modules without which the test is skipped, for a reason in ``.ci/skips.txt``.
        nodes: All nodes outside of inner functions.
    """

    imports: list[tuple[int, str]]
    asked: set[str]
    nodes: list[ast.AST]


def scopes(tree: ast.AST, asked: frozenset[str] = frozenset()) -> Iterator[Scope]:
    """A tree and its functions, the outermost first; an inner scope is asked what its outer is.

    Imports for type checkers, and those that may fail, are no needs.
    """
    scope, inner = Scope([], set(asked), []), list[ast.AST]()
    waiting = [*ast.iter_child_nodes(tree)]
    while waiting:
        node = waiting.pop()
        scope.nodes.append(node)
        if isinstance(node, ast.Import):
            scope.imports.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module, *(f"{node.module}.{x.name}" for x in node.names)]
            scope.imports.extend((node.lineno, name) for name in names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.append(node)
            waiting += node.decorator_list
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not (isinstance(node, ast.Try) and any(_may_fail(x) for x in node.handlers)):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call):
            scope.asked.update(asks(node))
    yield scope
    for function in inner:
        body = ast.Module(function.body, [])  # pyright: ignore[reportAttributeAccessIssue]
        yield from scopes(body, frozenset(scope.asked))


def _may_fail(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and any(
        name in ast.unparse(handler.type) for name in ("ImportError", "ModuleNotFoundError")
    )


def asks(call: ast.Call) -> Iterator[str]:
    """What a call asks for: a skip that CI allows, or a row of the zoo with ``needs=``."""
    for value in (x.value for x in call.keywords if x.arg == "needs"):
        yield from (_top(x.value) for x in ast.walk(value) if isinstance(x, ast.Constant))
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name == "importorskip" and isinstance(call.args[0], ast.Constant):
        reasons = [x.value for x in call.keywords if x.arg == "reason"]
        reason = ast.literal_eval(reasons[0]) if reasons else ""
        if any(re.fullmatch(line, reason) for line in SKIPS if line[:1] != "#"):
            yield _top(call.args[0].value)


def _top(module: str) -> str:
    return module.partition(".")[0]


# ---------------- what a test starts


def programs(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, ast.Module]]:
    """Strings that are Python programs with imports."""
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.search(r"^\s*(import|from) \w+.*\n", text, re.M):
            with contextlib.suppress(SyntaxError, ValueError):
                yield node.lineno, ast.parse(text)


def loaded(nodes: Iterable[ast.AST], root: Path) -> Iterator[Path]:
    """Python files outside of packages whose paths are spelled: ``ROOT / "a" / f"{name}.py"``."""
    for node in nodes:
        parts = list[str]()
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts.append(_pattern(node.right))
            node = node.left
        if parts and ((start := ast.unparse(node)) == "ROOT" or "__file__" in start):
            for path in root.glob("/".join(reversed(parts))):
                if path.relative_to(root).parts[0] not in PACKAGES and _is_python(path):
                    yield path


def _pattern(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(x) if isinstance(x, ast.Constant) else "*" for x in node.values)
    return "*"


def _is_python(path: Path) -> bool:
    if not path.is_file():
        return False
    return path.suffix == ".py" or (
        not path.suffix and path.read_bytes()[:64].splitlines()[:1] == [b"#!/usr/bin/env python3"]
    )


# ---------------- all needs


def module_file(module: str, root: Path) -> Path | None:
    """The file of a module of this repository."""
    path = root.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((x for x in files if _top(module) in PACKAGES and x.is_file()), None)


def needs(tests: Iterable[Path], others: dict[str, str], root: Path) -> Iterator[Import]:
    """What test files and texts import, with the modules and files that they bring along."""
    waiting: list[tuple[str, str | ast.AST, bool]] = []
    seen = set[Path]()

    def add(path: Path) -> None:
        if path not in seen:
            seen.add(path)
            in_tests = path.relative_to(root).parts[0].endswith("tests")
            whole = in_tests or path.name.endswith(("_test.py", "conftest.py"))
            waiting.append((str(path.relative_to(root)), path.read_text(), whole))

    for path in tests:
        add(path)
    waiting += [(name, text, True) for name, text in others.items()]
    while waiting:
        name, text, whole = waiting.pop()
        tree = ast.parse(text) if isinstance(text, str) else text
        for number, scope in enumerate(scopes(tree)):
            # A function of the library is not called because it is there.
            if number and not whole:
                break
            for line, module in scope.imports:
                if (path := module_file(module, root)) is not None:
                    add(path)
                elif _top(module) not in scope.asked | KNOWN:
                    yield Import(name, line, _top(module))
            if not whole:
                continue
            waiting += [(f"{name}:{line}", code, True) for line, code in programs(scope.nodes)]
            for path in loaded(scope.nodes, root):
                code = next(scopes(ast.parse(path.read_text())))
                where = f"{path.relative_to(root)}, which {name} loads"
                for line, module in code.imports:
                    if _top(module) not in scope.asked | KNOWN:
                        yield Import(where, line, _top(module))


def missing(found: Iterable[Import], distributions: set[str]) -> list[str]:
    """Needs that no installed distribution of the set has."""
    having = importlib.metadata.packages_distributions()
    return sorted(
        {
            f"{x.file}:{x.line} imports {x.module}, which make test does not install"
            for x in found
            if not {canonicalize_name(name) for name in having.get(x.module, [])} & distributions
        }
    )


def project() -> set[str]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = table["optional-dependencies"]
    return installed((ROOT / "Makefile").read_text(), extras, table["dependencies"])


# ---------------- tests


def test_tests_import_only_what_make_test_installs():
    files = [
        path
        for folder in ("jaxkfac", "torch_ref", "parity_tests", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path.name.endswith(("_test.py", "conftest.py")) or folder.endswith("tests")
    ]
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("examples", "notebooks")
        for path in (ROOT / folder).glob("*.py")
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts |= {str(page.relative_to(ROOT)): script(page.read_text()) for page in pages}
    found = list(needs([ROOT / "conftest.py", *files], texts, ROOT))
    assert {"jax", "numpy", "torch", "equinox"} <= {x.module for x in found}
    assert missing(found, project()) == []


GONE = "sphinx"  # put in here, so that these programs are not those of this file
SKIP = f'pytest.importorskip("{GONE}", reason="allowed")'
PLANTED = {
    "an import": f"import {GONE}",
    "one inside a test": f"def test():\n    from {GONE} import application",
    "a program": f"CODE = '''\nimport {GONE}\n'''",
    "a helper": "from tests import _planted",
    "a file by its path": 'FILE = ROOT / "docs" / "planted.py"',
    "a file by a pattern": 'def test(name):\n    load(ROOT / "docs" / f"{name}.py")',
    "a skip in another test": (
        f'def test():\n    {SKIP}\ndef other(name):\n    load(ROOT / "docs" / f"{{name}}.py")'
    ),
    "a skip for another reason": SKIP.replace("allowed", "no") + f"\nimport {GONE}",
}
ALLOWED = {
    "a skip": f"def test():\n    {SKIP}\n    import {GONE}",
    "a skip of a file": f"{SKIP}\ndef test():\n    import {GONE}",
    "a failure": f"try:\n    import {GONE}\nexcept ImportError:\n    pass",
    "a type": f"if TYPE_CHECKING:\n    import {GONE}",
    "a function of the library": "from jaxkfac.planted import late",
}


@pytest.mark.parametrize("name", [*PLANTED, *ALLOWED])
def test_a_planted_import_is_found(name, tmp_path, monkeypatch):
    for path, text in {
        "tests/some_test.py": {**PLANTED, **ALLOWED}[name],
        "tests/_planted.py": f"def late():\n    import {GONE}",
        "docs/planted.py": f"import {GONE}",
        "jaxkfac/planted.py": f"def late():\n    import {GONE}",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setitem(globals(), "SKIPS", ["allowed"])
    found = needs([tmp_path / "tests" / "some_test.py"], {}, tmp_path)
    assert {x.module for x in found} - {"pytest"} == ({GONE} if name in PLANTED else set())


def test_what_make_test_installs_is_read_from_its_rule():
    makefile = '$(VENV)/.stamp-test: pyproject.toml\n\tpython $(PIP) -e ".[one]"\n\t@touch $@\n'
    extras = {"one": ["jaxkfac[two]", "hypothesis"], "two": ["pytest"], "three": ["numpy"]}
    distributions = installed(makefile, extras, ["packaging"])
    assert {"jaxkfac", "hypothesis", "pytest", "packaging", "pluggy"} <= distributions
    assert not {"numpy", "sphinx"} & distributions
    needed = [Import("a_test.py", 3, "sphinx"), Import("a_test.py", 4, "pytest")]
    assert missing(needed, distributions) == [
        "a_test.py:3 imports sphinx, which make test does not install"
    ]
