"""The table of properties is that of the tests."""

from tests import properties


def test_the_table_names_tests_of_the_default_suite():
    """Otherwise ``python -m tests.properties --write``; the difference shows what has gone."""
    assert properties.PAGE.read_text() == properties.page()


def test_tests_that_others_leave_out_are_left_out(tmp_path):
    file = tmp_path / "some_test.py"
    file.write_text(
        "@pytest.mark.slow\ndef test_slow(): ...\n"
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.slow), 2])\n"
        "def test_some(x): ...\ndef test_default(): ...\ndef helper(): ...\n"
    )
    assert properties.default_tests(file) == ["test_some", "test_default"]
    file.write_text("pytestmark = pytest.mark.exhaustive\ndef test_default(): ...\n")
    assert properties.default_tests(file) == []
