from jaxkfac._text import aligned, ruled, shortened

ROWS = [["layer", "size"], ["blocks/0/mlp/kernel", "1,024"], ["total"]]


def test_the_first_column_is_to_the_left_and_the_others_to_the_right():
    assert aligned(ROWS) == [
        "layer                 size",
        "blocks/0/mlp/kernel  1,024",
        "total",
    ]


def test_a_name_that_is_too_long_for_the_line_keeps_its_end():
    lines = aligned(ROWS, width=20)
    assert lines == ["layer           size", "…0/mlp/kernel  1,024", "total"]
    assert max(map(len, aligned(ROWS, width=1))) == 12 + 2 + 5  # never to nothing


def test_a_name_that_fits_stays():
    assert shortened("kernel", 6) == "kernel" and shortened("kernel", 5) == "…rnel"


def test_headings_stand_on_a_rule_and_a_total_below_one():
    lines = ruled(["layer", "eff.\ndim.", "kind"], [*ROWS[1:]], total=True, words=(0, 2))
    assert lines == [
        "                      eff.",
        "layer                 dim.  kind",
        "--------------------------------",
        "blocks/0/mlp/kernel  1,024",
        "--------------------------------",
        "total",
    ]
