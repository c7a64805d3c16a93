"""Names of layers where there is little room."""

import pytest
from rich.console import Console

from jaxkfac.jobs.report._layer_table import TableOfLayers, broken_name, distinct_names

DIGITS = (
    *("patch/kernel", "positions", "blocks/attention_norm/scale", "blocks/attention_norm/bias"),
    *(f"blocks/attention/{x}/kernel" for x in ("query", "key", "value", "out")),
    *("blocks/dense_norm/scale", "blocks/dense_norm/bias", "blocks/up/kernel", "norm/scale"),
)
NUMBERED = [f"model/layers/{i}/self_attn/{x}_proj/kernel" for i in (3, 12) for x in ("q", "k", "v")]


@pytest.mark.parametrize("names", [DIGITS, NUMBERED, ["a/w", "a/w/kernel", "b/w/kernel"], ["a"]])
@pytest.mark.parametrize("width", [0, 9, 16, 24, 99])
def test_names_stay_distinct_and_lose_whole_parts_alone(names, width):
    shown = distinct_names(names, width)
    assert list(shown) == [*names] and len({*shown.values()}) == len(names)
    for name, text in shown.items():
        parts = text.replace("\n", "").split("/")
        gap = parts.index("…") if "…" in parts else len(parts)
        whole = name.split("/")
        assert parts[:gap] == whole[:gap]
        if parts[gap + 1 :]:
            ends = (whole, whole[:-1]) if whole[-1] == "kernel" else (whole,)
            assert parts[gap + 1 :] in [end[-len(parts[gap + 1 :]) :] for end in ends]
        assert len(name) > width or text == name


def test_what_all_names_share_is_folded():
    assert distinct_names(NUMBERED, 28)[NUMBERED[0]] == "…/3/self_attn/q_proj/kernel"
    assert distinct_names(NUMBERED, 21)[NUMBERED[5]] == "…/12/self_attn/v_proj"
    assert broken_name("blocks/attention_norm/scale", 16) == "blocks/\nattention_norm/\nscale"


@pytest.mark.parametrize("names", [DIGITS, NUMBERED])
def test_a_table_of_80_columns_breaks_no_word(names):
    head = ["layer", "factor", "size", "top", "condition", "clipped", "raised", "entropy rank"]
    cells = ["diag.", "128", "1.23e-05", "1.23e+06", "1.23e+06", "128", "123.4"]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(TableOfLayers("Spectra", head, [[x, *cells] for x in names], (0, 1)))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80
    words = {*" ".join(head).split(), *cells, "Spectra", "…"}
    words |= {part for name in names for part in name.split("/")}
    assert {*text.replace("/", " ").split()} <= words
    assert text.count("1.23e-05") == len(names)
