"""Count the bytes of storages as they are made and freed, without a clock and without a heap."""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class track_storages(TorchDispatchMode):
    """Count the storages that the operations inside the block make, and the operations.

    Each storage is counted once, with all its bytes, from the operation that made it until the
    last tensor, view, saved activation or gradient that uses it is gone. An output that shares an
    input's storage adds nothing, and a storage made before the block never counts. The backward
    pass counts too. The same program gives the same numbers on every machine.

    Example:
        >>> x, w = torch.ones(2, 5), torch.ones(5, 3)
        >>> with track_storages() as made:
        ...     y = (x @ w).tanh()
        >>> made.peak_bytes, made.live_bytes, made.calls["mm"]
        (48, 24, 1)

    Args:
        device: Only storages on devices of this type count, ``"cuda"`` say; with ``None`` those of
            all types but ``"meta"``, which has no memory. ``calls`` holds every operation.

    Attributes:
        peak_bytes: The most bytes that were alive at once.
        live_bytes: Bytes alive now. It goes on falling after the block, as they are freed. What a
            reference cycle holds is alive until the garbage collector has run.
        calls: How often each ATen operation ran, by its name without overload: ``"mm"``,
            ``"_to_copy"`` (a conversion or a transfer), ``"clone"``, ``"_local_scalar_dense"``
            (``.item()``, which waits for the device).
        host_tensors: Tensors made from Python numbers, by ``torch.tensor`` and its like.

    Memory:
        Scratch that one operation frees before it ends is not seen: LAPACK's workspace, say.
    """

    def __init__(self, device: str | None = None):
        super().__init__()
        self.device = device
        self.peak_bytes = 0
        self.calls: Counter[str] = Counter()
        self._bytes: dict[int, int] = {}
        self._freed: deque[int] = deque()
        self._live = 0
        self._lock = threading.RLock()  # CUDA's backward pass has a thread of its own

    @property
    def live_bytes(self) -> int:
        with self._lock:
            self._subtract_freed()
            return self._live

    @property
    def host_tensors(self) -> int:
        return self.calls["lift_fresh"]

    def reset_peak(self) -> None:
        """Let ``peak_bytes`` begin anew from the bytes that are alive now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        # torch.tensor makes its tensor out of sight and shows it here first, as an input.
        given = () if name == "lift_fresh" else _storages((args, kwargs))
        known = {id(storage) for storage in given}
        with self._lock:
            self.calls[name] += 1
            self._subtract_freed()  # after this no id below can be one of a dead storage
            for storage in _storages(outputs):
                self._count(storage, made=id(storage) not in known)
            self.peak_bytes = max(self.peak_bytes, self._live)
        return outputs

    def _count(self, storage: torch.UntypedStorage, *, made: bool) -> None:
        key = id(storage)
        if key not in self._bytes:
            if not made or self.device not in (None, storage.device.type):
                return
            weakref.finalize(storage, self._freed.append, key).atexit = False
        self._live += storage.nbytes() - self._bytes.get(key, 0)  # resize_ changes what is known
        self._bytes[key] = storage.nbytes()

    def _subtract_freed(self) -> None:
        # A finalizer may run in the middle of any line, so it only notes what is gone.
        while self._freed:
            self._live -= self._bytes.pop(self._freed.popleft())


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(tree, torch.Tensor):
        if tree.layout == torch.strided and tree.device.type != "meta":
            yield tree.untyped_storage()
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _storages(part)
    elif isinstance(tree, dict):
        yield from _storages(list(tree.values()))
