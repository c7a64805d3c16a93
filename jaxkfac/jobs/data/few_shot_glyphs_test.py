import io
import string
from importlib import resources

import numpy as np
import pytest

from jaxkfac.jobs.data import few_shot
from jaxkfac.jobs.data.few_shot import load_glyphs


def archive():
    packed = resources.files("jaxkfac.jobs.data").joinpath("glyphs.npz").read_bytes()
    return np.load(io.BytesIO(packed), allow_pickle=False)


def test_no_character_is_in_two_splits_and_all_are_in_one():
    names = [name for split in load_glyphs() for name in split.images]
    assert sorted(names) == sorted(string.digits + string.ascii_letters)


@pytest.mark.slow
def test_every_class_has_thirty_images_and_no_two_alike():
    for split in load_glyphs():
        for name, images in split.images.items():
            assert len(images) >= 30 and images.dtype == np.uint8, name
            assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images), name
            drawn = images.reshape(len(images), -1).max(1)
            assert drawn.min() > 60 and images.max() == 255, name


def test_faces_count_within_their_split_alone():
    """The table of faces in glyphs.txt has a family in one split."""
    text = resources.files("jaxkfac.jobs.data").joinpath("glyphs.txt").read_text()
    splits = ("train", "validation", "novel")
    rows = [r.split() for r in text.splitlines() if r.split()[:1] and r.split()[0] in splits]
    rows = [(split, package) for split, package, *_ in rows if package.startswith("fonts-")]
    assert len({package for _, package in rows}) == len(rows) == 32
    with archive() as stored:
        for split in splits:
            families = sum(s == split for s, _ in rows)
            faces = stored[f"{split}_faces"]
            assert set(faces) == set(range(2 * families))
            assert len(set(np.bincount(faces))) == 1  # each face as often


def test_a_damaged_file_is_refused(monkeypatch):
    monkeypatch.setattr(few_shot, "GLYPHS_SHA256", "another")
    with pytest.raises(ValueError, match="damaged"):
        load_glyphs()
