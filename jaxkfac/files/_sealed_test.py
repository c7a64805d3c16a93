import json

import pytest

from jaxkfac._errors import DamagedFileError
from jaxkfac.files import ZEROS, read_json, sealed, write_json

PLAIN = {"alphas": [0.5, 12.25], "found": {"steps": 3, "name": "é\n", "none": None}}


def read(path):
    return read_json(path, "jaxkfac-test", "begin again")


@pytest.fixture
def path(tmp_path):
    write_json(tmp_path / "x.json", "jaxkfac-test", PLAIN, "a state")
    return tmp_path / "x.json"


def test_what_was_written_is_read_and_is_plain_json(path):
    assert read(path) == PLAIN
    assert PLAIN.items() <= json.loads(path.read_text()).items()


@pytest.mark.parametrize("change", [1, 0x0C, 0x29, 0x80])
def test_every_byte_is_under_the_checksum(path, change):
    """A digit for a digit and a space for a tab included, and the names of both marks."""
    data = path.read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= change
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"x\.json is damaged \(.*\): begin again"):
            read(path)


def test_one_end_of_a_line_is_not_taken_for_another(path):
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(DamagedFileError, match="its checksum is not"):
        read(path)


def test_a_file_without_a_checksum_is_refused(path):
    path.write_text(json.dumps(PLAIN, indent=1))
    with pytest.raises(DamagedFileError, match="its checksum is not None"):
        read(path)


def test_a_file_of_another_form_is_refused(path):
    with pytest.raises(DamagedFileError, match="it is 'jaxkfac-test', expected 'jaxkfac-other'"):
        read_json(path, "jaxkfac-other", "begin again")


def test_a_sealed_file_without_its_kind_is_damaged(tmp_path):
    path = tmp_path / "a"
    path.write_text(sealed(json.dumps({"crc32": ZEROS}), "crc32"))
    with pytest.raises(DamagedFileError, match="begin again"):
        read(path)
