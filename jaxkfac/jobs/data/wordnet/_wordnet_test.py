"""The embedded words and glosses, and how they were made."""

import re

import pytest

from jaxkfac.jobs.data.wordnet import KINDS, WordGloss, _make, _wordnet, load_wordnet, wordnet_pairs


@pytest.mark.slow
def test_every_entry_is_a_word_of_a_kind_with_a_gloss_of_its_own():
    entries = load_wordnet()
    assert len(entries) == 48_156
    assert len({entry.gloss for entry in entries}) == len(entries)
    assert {entry.kind for entry in entries} == set(KINDS)
    assert all(re.fullmatch("[a-z]+", entry.word) for entry in entries)
    assert all(12 <= len(entry.gloss) <= 60 for entry in entries)


def test_no_word_and_no_gloss_is_in_both_parts():
    train, validation = wordnet_pairs()
    assert (len(train), len(validation)) == (46_134, 2_022)
    words = [{pair.source.split()[0] for pair in part} for part in (train, validation)]
    assert not words[0] & words[1]
    assert not {pair.target for pair in train} & {pair.target for pair in validation}


def test_a_damaged_file_is_refused(monkeypatch):
    monkeypatch.setattr(_wordnet, "WORDNET_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"wordnet.tsv.xz is damaged: sha256 46aa"):
        load_wordnet()


LICENCE = "  1 This software and database is being provided to you\n"
NOUNS = [
    '00000001 03 n 02 physical_thing 0 object 0 000 | a visible entity; "it was full"',
    "00000002 03 n 01 Paris 0 000 | the capital and largest city of France",
    "00000003 03 n 02 frog 0 toad 1 001 @ 00000001 n 0000 | any of various tailless amphibians",
    "00000004 03 n 01 short 0 000 | brief",
]  # fmt: skip
ADJECTIVES = ["00000009 00 a 01 fast(p) 0 000 | acting or moving quickly"]
SENSES = ["object%1:03:00:: 00000001 1 9", "toad%1:05:00:: 00000003 1 7"]


def test_it_is_made_of_one_word_of_each_synset_and_its_definition(tmp_path):
    for name, lines in (("noun", NOUNS), ("verb", []), ("adj", ADJECTIVES), ("adv", [])):
        (tmp_path / f"data.{name}").write_text(LICENCE + "\n".join(lines))
    (tmp_path / "index.sense").write_text("\n".join(SENSES))
    assert _make.entries(tmp_path) == [
        WordGloss("object", "noun", "a visible entity"),
        WordGloss("toad", "noun", "any of various tailless amphibians"),
        WordGloss("fast", "adj", "acting or moving quickly"),
    ]
