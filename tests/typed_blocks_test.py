"""What `make lint` gives to pyright: the blocks of every page, at their own lines."""

import runpy
from pathlib import Path

LINT = runpy.run_path(str(Path(__file__).parent.parent / ".ci" / "typed_blocks.py"))


def test_a_block_binds_names_and_needs_others():
    code = """
import jax.numpy as jnp
w = jnp.ones(3) + start
@jit
def f(x): return g(x, w, late)
late = [i * w for i in range(3)]
w = w + step(w)
"""
    binds, needs = LINT["names"](code)
    assert binds == {"jnp", "w", "f", "late"}
    assert needs == {"start", "jit", "g", "step"}


def test_a_page_is_one_file_and_a_page_of_variants_one_for_each_block(tmp_path):
    (tmp_path / "docs").mkdir()
    page = "# Title\n\n```python\na = 1\n```\n\nText.\n\n```python\nb = a + c\n```\n"
    for name in ("README.md", "docs/loops.md"):
        (tmp_path / name).write_text(page)
    pages = LINT["write"](tmp_path / "blocks", tmp_path)
    assert pages == {"README.py": "README.md", "loops_10.py": "docs/loops.md"}
    expected = [*[""] * 3, "a = 1", *[""] * 5, "b = a + c"]
    assert (tmp_path / "blocks" / "README.py").read_text().splitlines() == expected
    loops = (tmp_path / "blocks" / "loops_10.py").read_text().splitlines()
    assert loops[0] == "from typing import Any; c: Any = ..." and loops[1:] == expected[1:]
