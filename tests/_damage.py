"""Files of every format that is read, changed at random, in a process that they may end.

Run: python -m tests._damage FORMAT FOLDER [MUTATIONS], which prints what became of each.
"""

import dataclasses
import faulthandler
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 30  # after which one file counts as a hang

ROWS = [{"text": f"the {i}th row, é", "turns": [{"a": i, "b": None}]} for i in range(40)]
PARAMS = {"up/kernel": np.ones((5, 4), np.float32)}


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        file: Its name, of what is changed.
        write: Writes it into a folder.
        read: Reads the folder, and gives what it holds.
        checked: Whether it has a checksum, so that it reads as it was or not at all.
    """

    file: str
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    checked: bool = False


def _rows(name: str, content: Callable[[], bytes]) -> Format:
    def read(folder: Path) -> Any:
        from jaxkfac.jobs.data.readers import FileRows

        rows = FileRows((folder / name,), lambda row: json.dumps(row, default=str), strict=False)
        rows.count()
        return [row for _, row in rows.read()]

    return Format(name, lambda folder: (folder / name).write_bytes(content()), read)


def _lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def _zstd() -> bytes:
    import pyarrow

    return pyarrow.compress(_lines(), codec="zstd", asbytes=True)


def _parquet() -> bytes:
    import io

    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink, row_group_size=9)
    return sink.getvalue()


def _arrow(kind: str) -> Callable[[], bytes]:
    def content() -> bytes:
        import pyarrow

        sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(ROWS)
        with getattr(pyarrow.ipc, kind)(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
        return sink.getvalue().to_pybytes()

    return content


def _image(name: str) -> Format:
    def write(folder: Path) -> None:
        from PIL import Image

        (folder / "class").mkdir(exist_ok=True)
        pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "class" / name)

    def read(folder: Path) -> Any:
        from jaxkfac.jobs.data.few_shot import read_class_folder

        return read_class_folder(folder, image_size=8).images["class"]

    return Format(f"class/{name}", write, read)


def _write_tensors(folder: Path) -> None:
    import safetensors.numpy

    safetensors.numpy.save_file(PARAMS, folder / "x.safetensors", {"format": "pt"})


def _read_tensors(folder: Path) -> Any:
    import jaxkfac as jk

    return jk.load_safetensors(folder / "x.safetensors")


def _write_tokenizer(folder: Path) -> None:
    import tokenizers

    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}"
    about = {"eos_token": "b", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _read_tokenizer(folder: Path) -> Any:
    from jaxkfac.jobs.models.checkpoint import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    try:
        return tokenizer.encode("a b"), tokenizer.render([{"role": "user", "content": "a"}])
    except ValueError as error:  # of a row, whose file its reader names
        if "chat template" in str(error):
            return str(error)
        raise


def _write_service(folder: Path) -> None:
    import jaxkfac as jk

    objective = jk.Objective(lambda p, x: x @ p["up"], jk.Gaussian())
    params, batch = {"up": np.ones((5, 4), np.float32)}, (np.eye(5, dtype=np.float32), 0)
    batch = (batch[0], np.zeros((5, 4), np.float32))
    with jk.HostCurvature(refresh_every=1, lag=1) as service:
        for step in range(2):
            service.push(jk.value_grad_and_factors(objective)(params, batch)[2], step)
        service.save(folder / "service.npz")


def _read_service(folder: Path) -> Any:
    import jaxkfac as jk

    with jk.HostCurvature.load(folder / "service.npz") as service:
        average = service.average()
        return average.a_sums, average.g_sums, average.terms


def _write_adapter(folder: Path) -> None:
    import jaxkfac as jk

    adapter = jk.lslora.Adapter(
        np.ones((3, 2), np.float32),
        np.ones((2, 3), np.float32),
        np.array([0, 1, 0, 0], np.float32),
        np.array(1, np.float32),
    )
    jk.lslora.save(folder, {"q/kernel": adapter}, jk.lslora.Config(rank=2, target="q/kernel"))


def _read_adapter(folder: Path) -> Any:
    import jaxkfac as jk

    return jk.lslora.load(folder)


def _write_sealed(folder: Path) -> None:
    from jaxkfac.files import write_json

    write_json(folder / "x.json", "test", {"numbers": [0.5, 1e-3], "name": "é"}, "a test")


def _read_sealed(folder: Path) -> Any:
    from jaxkfac.files import read_json

    return read_json(folder / "x.json", "test", "write it again")


FORMATS = {
    "lines": _rows("x.jsonl", _lines),
    "lines, gzip": _rows("x.jsonl.gz", lambda: gzip.compress(_lines(), mtime=0)),
    "lines, zstd": _rows("x.jsonl.zst", _zstd),
    "array": _rows("x.json", lambda: json.dumps(ROWS).encode()),
    "array, gzip": _rows("x.json.gz", lambda: gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
    "parquet": _rows("x.parquet", _parquet),
    "arrow": _rows("x.arrow", _arrow("new_stream")),
    "feather": _rows("x.feather", _arrow("new_file")),
    "png": _image("x.png"),
    "jpeg": _image("x.jpg"),
    "safetensors": Format("x.safetensors", _write_tensors, _read_tensors),
    "tokenizer": Format("tokenizer.json", _write_tokenizer, _read_tokenizer),
    "chat template": Format("tokenizer_config.json", _write_tokenizer, _read_tokenizer),
    "service": Format("service.npz", _write_service, _read_service, checked=True),
    "adapter": Format("adapter_model.safetensors", _write_adapter, _read_adapter, checked=True),
    "adapter config": Format("adapter_config.json", _write_adapter, _read_adapter, checked=True),
    "record": Format("x.json", _write_sealed, _read_sealed, checked=True),
}


def mutations(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Files that differ from ``data``: a bit, a run of bytes, a piece lost, doubled or cut off."""
    rng = np.random.default_rng(seed)
    while count:
        at, length = int(rng.integers(len(data))), int(rng.integers(1, 40))
        noise, piece = rng.bytes(length), data[at : at + length]
        match int(rng.integers(6)):
            case 0 | 1:
                changed = data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :]
            case 2:
                changed = data[:at] + noise + data[at + length :]
            case 3:
                changed = data[:at] + data[at + length :]
            case 4:
                changed = data[:at] + piece + data[at:]
            case _:
                changed = data[:at]
        if changed != data:
            yield changed
            count -= 1


def outcome(kind: Format, folder: Path, expected: str) -> str:
    """``"same"``, ``"other"``, ``"refused"``, or what is wrong with how it was refused."""
    try:
        found = described(kind.read(folder))
    except (ValueError, OSError, RuntimeError) as error:
        words, name = str(error), Path(kind.file).name
        bare = type(error) in (UnicodeDecodeError, UnicodeEncodeError, json.JSONDecodeError)
        if bare or name not in words or "\n" in words or isinstance(error, RecursionError):
            return f"no sentence with the file: {type(error).__name__}: {words[:300]}"
        return "refused"
    if found == expected:
        return "same"
    return "silently different" if kind.checked else "other"


def described(found: Any) -> str:
    import jax

    leaves, form = jax.tree.flatten(found)
    arrays = (np.asarray(x) if hasattr(x, "shape") else x for x in leaves)
    return f"{form}" + repr([x.tobytes() if isinstance(x, np.ndarray) else x for x in arrays])


def main(name: str, folder: Path, count: int) -> None:
    """Print a line for each mutation: its number, then what became of it."""
    kind = FORMATS[name]
    kind.write(folder)
    data = (folder / kind.file).read_bytes()
    expected = described(kind.read(folder))
    assert outcome(kind, folder, expected) == "same"
    for number, changed in enumerate(mutations(data, count)):
        print(number, end=" ", flush=True)
        (folder / kind.file).write_bytes(changed)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(outcome(kind, folder, expected), flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 200)
