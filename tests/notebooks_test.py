"""Every notebook asks, runs from top to bottom, draws its answer, and is what its script says."""

from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# All but one, of half a minute and more. What they call runs in slow tests too, in examples or
# blocks of the docs.
LONG = (
    "01_factors_in_one_backward_pass",
    "02_clipping_and_conditioning",
    "04_accumulation",
    "05_what_the_nonlinearity_learns",
    "06_capacity_through_depth",
    "07_the_documents_measured",
    "08_any_loss",
    "09_influence",
    "10_laplace",
    "11_forgetting",
)


def _by_length(path: Path) -> Any:
    mark = pytest.mark.exhaustive if path.stem in LONG else pytest.mark.slow
    return pytest.param(path, id=path.stem, marks=mark)


def _cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(c.cell_type, c.source.strip()) for c in notebook.cells if c.source.strip()]


def _ends_with_a_figure(notebook: nbformat.NotebookNode) -> bool:
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    return any("image/svg+xml" in output.get("data", {}) for output in last.outputs)


@pytest.mark.usefixtures("users_kernels")
@pytest.mark.parametrize("path", [_by_length(path) for path in NOTEBOOKS])
def test_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)  # a reader has one device
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel chooses its own
    notebook = nbformat.read(path, as_version=4)
    if any("smollm2()" in cell.source for cell in notebook.cells):
        request.getfixturevalue("smollm2_file")  # downloaded; skipped where there is no network
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    assert _ends_with_a_figure(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_begins_with_a_question_and_the_stored_figure_answers(path: Path):
    notebook = nbformat.read(path, as_version=4)
    question = notebook.cells[0]
    assert question.cell_type == "markdown" and question.source.startswith("# ")
    assert "?" in question.source
    assert _ends_with_a_figure(notebook), f"{path.name}: the last cell draws nothing"
    assert path.stat().st_size < 400_000
    style = "plt.rcParams.update(jk.plot.FIGURE_STYLE)"
    assert any(style in cell.source for cell in notebook.cells), f"{path.name} lacks {style}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_and_script_are_the_same(path: Path):
    script = path.with_suffix(".py")
    assert script.exists(), f"{path.name} has no paired script; run: jupytext --sync {path.name}"
    text = script.read_text()
    assert "# %%" in text, f"{script.name} is not in the py:percent format"
    paired = jupytext.reads(text, fmt="py:percent")
    assert _cells(paired) == _cells(nbformat.read(path, as_version=4)), (
        f"{path.name} and {script.name} differ; run: jupytext --sync {path.name}"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_are_clean(path: Path):
    """A warning or an error in a stored output shows the author's machine to every reader."""
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", f"a cell of {path.name} failed when saved"
            assert output.get("name") != "stderr", f"{path.name} stores stderr: {output.text}"


def test_every_script_has_its_notebook():
    scripts = {p.stem for p in FOLDER.glob("*.py")}
    assert scripts == {p.stem for p in NOTEBOOKS}
