"""The Python blocks of the README and of docs under pyright's strict rules.

python .ci/typed_blocks.py

Each page becomes a file in build/typed_blocks, every line at its own number.
"""

import ast
import builtins
import json
import re
import shutil
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "typed_blocks"

_UNTYPED = "JAX, Flax, Optax and the short functions of a page have untyped parameters and results"
# Strict rules that are off, and why.
OFF = {
    "reportUnknownArgumentType": _UNTYPED,
    "reportUnknownLambdaType": _UNTYPED,
    "reportUnknownMemberType": _UNTYPED,
    "reportUnknownParameterType": _UNTYPED,
    "reportUnknownVariableType": _UNTYPED,
    "reportMissingParameterType": _UNTYPED,
    "reportMissingTypeStubs": "Optax and qwix have no stubs",
    "reportDuplicateImport": "a later block of a page may import again what it uses",
    "reportPossiblyUnboundVariable": "a loop of a page runs at least once",
    "reportRedeclaration": "a page shows a function before and after a change under one name",
    "reportUnusedImport": "the first block of a page imports for the differences shown below it",
}
# Errors that stay, by the page and words of the message; each must still occur.
ALLOWED = {
    ("docs/loops.md", "FrozenVariableDict"): "Flax returns a pair from apply only with mutable=",
    ("docs/loops.md", '"__getitem__" method not defined'): "Optax types a state as any tree",
    ("docs/loops.md", 'attribute "hyperparams"'): "Optax types a state as any tree",
}
# Pages that show one loop in many libraries under the same names. Each block is a file with the
# first block of its page; names of other blocks are of type Any there.
BY_BLOCK = ("docs/loops.md",)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        line: Number of its first line in the page, from 0.
        code: The code.
        binds: Names that it binds.
        needs: Names that it uses before it binds them.
    """

    line: int
    code: str
    binds: frozenset[str]
    needs: frozenset[str]


_FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page."""
    return [
        Block(text.count("\n", 0, match.start(1)), match.group(1), *names(match.group(1)))
        for match in _FENCE.finditer(text)
    ]


def names(code: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a block binds, and those that must be bound before it."""
    table = symtable.symtable(code, "block", "exec")
    binds = {x.get_name() for x in table.get_symbols() if x.is_assigned() or x.is_imported()}
    needs = {name for child in table.get_children() for name in _globals(child)} - binds
    bound: set[str] = set()
    for statement in ast.parse(code).body:
        reads, writes = set[str](), set[str]()
        for node in _outer(statement):
            if isinstance(node, ast.Name):
                (reads if isinstance(node.ctx, ast.Load) else writes).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                writes.add(node.name)
            elif isinstance(node, ast.alias):
                writes.add((node.asname or node.name).partition(".")[0])
        needs |= reads - bound - writes | reads & writes - bound
        bound |= writes
    return frozenset(binds), frozenset(needs - set(dir(builtins)))


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Names that a function, a class or a comprehension takes from the module."""
    yield from (x.get_name() for x in table.get_symbols() if x.is_global())
    for child in table.get_children():
        yield from _globals(child)


_INNER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _outer(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement outside of inner scopes."""
    if isinstance(node, _INNER):
        return
    yield node
    if isinstance(node, ast.FunctionDef):
        inside: list[ast.AST] = [*node.decorator_list, *node.args.defaults]
    elif isinstance(node, ast.ClassDef):
        inside = [*node.decorator_list, *node.bases]
    else:
        inside = [*ast.iter_child_nodes(node)]
    for child in inside:
        yield from _outer(child)


def script(parts: list[Block]) -> str:
    """Blocks as one file, each line at its own number."""
    lines: list[str] = []
    for block in parts:
        lines += [""] * (block.line - len(lines))
        lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def write(folder: Path = FOLDER, root: Path = ROOT) -> dict[str, str]:
    """Write the files, with a configuration; return the page of each."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rules: dict[str, object] = dict.fromkeys(OFF, False)
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(root)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config | rules))
    pages: dict[str, str] = {}
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        page, of = blocks(path.read_text()), str(path.relative_to(root))
        files = {path.stem: page} if page else {}
        if of in BY_BLOCK:
            files = {f"{path.stem}_{x.line + 1}": [page[0], x] for x in page[1:]}
        for name, parts in files.items():
            text = script(parts)
            if of in BY_BLOCK:
                missing = sorted(parts[1].needs - parts[0].binds)
                first = "; ".join(["from typing import Any", *(f"{x}: Any = ..." for x in missing)])
                text = first + text  # the first line of a page is its title
            (folder / f"{name}.py").write_text(text)
            pages[f"{name}.py"] = of
    return pages


def main() -> int:
    """Check all blocks; print errors with their lines in the pages."""
    pages = write()
    command = ["pyright", "-p", str(FOLDER), "--pythonpath", sys.executable, "--outputjson"]
    ran = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(ran.stdout)["generalDiagnostics"]
    wrong, unused = set[str](), set(ALLOWED)
    for x in found:
        page, message = pages[Path(x["file"]).name], " ".join(x["message"].split())
        allowed = {key for key in ALLOWED if key[0] == page and key[1] in message}
        unused -= allowed
        if not allowed:
            line = x["range"]["start"]["line"] + 1
            wrong.add(f"{page}:{line}: {message} ({x.get('rule', x['severity'])})")
    wrong |= {f"{page}: no error has {words!r}: take it from ALLOWED" for page, words in unused}
    print(*sorted(wrong), f"blocks of docs: {len(wrong)} errors in {len(pages)} files", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
