"""The table of what was tried in docs/repository.md is that of the tests."""

from tests import tried


def test_the_page_has_the_table_of_the_tests():
    """Otherwise: ``python -m tests.tried --write``."""
    page = tried.PAGE.read_text()
    assert page == tried.with_table(page)


def test_every_row_is_of_a_test_and_counts_its_parameters():
    assert all(test.__name__.startswith("test_") for _, test, _ in tried.ROWS)
    damaged = {test.__name__: tried.number(test, each) for _, test, each in tried.ROWS}
    found = damaged["test_a_damaged_file_is_refused_in_a_sentence_or_read"]
    assert found == 200 * len(tried.damaged_files_test.FORMATS)
