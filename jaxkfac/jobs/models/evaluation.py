"""Requests of lm-eval: likelihoods of continuations and of texts, and answers."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxkfac._errors import installed_by
from jaxkfac._text import prompt_ids
from jaxkfac.jobs.models.checkpoint import Pretrained
from jaxkfac.jobs.models.decoder import Tokens, generate

__all__ = ["Requests", "lm_eval_model"]

Row = tuple[list[int], list[int]]  # the context, and the scored tokens


def lm_eval_model(
    pretrained: Pretrained, *, adapted: Any = None, adapters: PyTree = None, batch_size: int = 8
) -> Any:
    """A decoder as lm-eval's ``LM``: ``lm_eval.simple_evaluate(model=lm_eval_model(...), ...)``.

    Args:
        pretrained: From ``load_decoder``, with a tokenizer.
        adapted: ``jk.lslora.attach(pretrained.apply_fn, config)``: evaluate this function.
        adapters: Adapters for ``adapted``.
        batch_size: Number of rows at once; rows of similar length are batched together.

    Raises:
        ModuleNotFoundError, ValueError: the extra ``eval`` is not installed; there is no tokenizer.
    """
    with installed_by("eval"):
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    return type("JaxkfacLM", (Requests, LM), {})(pretrained, adapted, adapters, batch_size)


class Requests:
    """The three kinds of request, answered as lm-eval's model for Hugging Face answers them."""

    def __init__(self, pretrained: Pretrained, adapted: Any, adapters: PyTree, batch_size: int):
        super().__init__()
        if pretrained.tokenizer is None:
            raise ValueError("there is no tokenizer: put its tokenizer.json beside the weights")
        self.pretrained, self.tokenizer = pretrained, pretrained.tokenizer
        self.batch_size, self.max_length = batch_size, pretrained.config.longest
        self._generate_options = (
            {} if adapted is None else {"adapted": adapted, "adapters": adapters}
        )
        self._operands = (pretrained.params, *(() if adapted is None else (adapters,)))
        self._read = jax.jit(functools.partial(_scores, adapted or pretrained.apply_fn))
        start_ids = (self.tokenizer.bos_id, self.tokenizer.eos_id, *pretrained.config.eos_ids)
        self.prefix_id = next((i for i in start_ids if i is not None), 0)

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """For each ``(context, continuation)``: nats, and whether it is the greedy answer."""
        rows = [self._pair(*request.args) for request in requests]
        for request, row in zip(requests, rows, strict=True):
            if not 0 < (length := len(row[1])) <= self.max_length:
                raise ValueError(
                    f"the continuation {request.args[1][:40]!r} has {length} tokens: expected 1 to "
                    f"{self.max_length}"
                )
        return self._scored(rows)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Nats of each text, each token given earlier ones, in windows of the context."""
        texts = [self._windows(self._prompt(request.args[0])) for request in requests]
        scores = iter(self._scored([row for rows in texts for row in rows]))
        return [sum(next(scores)[0] for _ in rows) for rows in texts]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """The answer to each context, before the first of the strings ``until``."""
        answers = [""] * len(requests)
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(repr(request.args[1]), []).append(number)
        for numbers in kinds.values():
            options = requests[numbers[0]].args[1]
            ends, steps = options.get("until") or [], options.get("max_gen_toks", 256)
            room = self.max_length - steps
            is_greedy = options.get("num_beams", 1) == 1 and not options.get("temperature")
            if options.get("do_sample") or not is_greedy or room < 1:
                raise ValueError(f"{options}: expected greedy answers within {self.max_length}")
            texts = {n: requests[n].args[0] for n in numbers}
            prompts = {n: (self._prompt(x) or [self.prefix_id])[-room:] for n, x in texts.items()}
            for batch in self._batches(prompts, lambda n, prompts=prompts: len(prompts[n])):
                batch_prompts = [prompts[n] for n in batch]
                generated = generate(
                    self.pretrained, batch_prompts, max_new_tokens=steps, **self._generate_options
                )
                for number, ids in zip(batch, generated, strict=True):
                    answers[number] = self.tokenizer.decode(ids)
                    for end in filter(None, [ends] if isinstance(ends, str) else ends):
                        answers[number] = answers[number].split(end)[0]
        return answers

    def _scored(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        out: list[Any] = [None] * len(rows)
        length = lambda n: len(rows[n][0]) + len(rows[n][1])
        for batch in self._batches(range(len(rows)), length):
            longest = min(max(map(length, batch)), self.max_length + 1) - 1
            size = max(16, 1 << (longest - 1).bit_length())  # few programs for all lengths
            ids, targets, marks = np.zeros((3, self.batch_size, size), np.int32)
            for row, number in enumerate(batch):
                tokens = [*rows[number][0], *rows[number][1]][-(self.max_length + 1) :]
                ids[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = (
                    tokens[:-1],
                    tokens[1:],
                )
                marks[row, : len(tokens) - 1] = 1
            outputs = self._read(*map(jnp.asarray, (ids, targets, marks)), self._operands)
            logs, greedy = map(np.asarray, outputs)
            for row, number in enumerate(batch):
                stop = marks[row].sum()
                continuation = slice(max(0, stop - len(rows[number][1])), stop)
                total = float(logs[row, continuation].sum(dtype=np.float64))
                out[number] = total, bool(greedy[row, continuation].all())
        return out

    def _batches(self, numbers: Any, length: Callable[[int], int]) -> Iterator[list[int]]:
        ordered = sorted(numbers, key=length, reverse=True)  # out of memory fails at once
        for start in range(0, len(ordered), self.batch_size):
            yield ordered[start : start + self.batch_size]

    def _pair(self, context: str, continuation: str) -> Row:
        if not context:
            ids = self.tokenizer.encode(continuation, add_special_tokens=False)
            has_prefix = ids[:1] == [self.prefix_id]
            return (ids[:1], ids[1:]) if has_prefix else ([self.prefix_id], ids)
        bare = context.rstrip()  # trailing spaces belong to the next word
        context_ids, all_ids = self._prompt(bare), self._prompt(context + continuation)
        return context_ids or [self.prefix_id], all_ids[len(context_ids) :]

    def _windows(self, ids: list[int]) -> list[Row]:
        most, rows = self.max_length, list[Row]()
        for start in range(0, len(ids), most):
            stop = min(start + most, len(ids))
            first = max(0, stop - most)
            before = [self.prefix_id] if first == 0 else [ids[first - 1]]
            rows.append(([*before, *ids[first:start]], ids[start:stop]))
        return rows

    def _prompt(self, text: str) -> list[int]:
        return prompt_ids(self.tokenizer, text)


def _scores(model: Any, ids: Any, targets: Any, marks: Any, operands: Any) -> Any:
    """Log-likelihood of each target, and whether it is the most likely token."""
    logits = model(*operands, Tokens(ids, None, marks)).astype(jnp.float32)
    logs = jax.nn.log_softmax(logits, -1)
    picked = jnp.take_along_axis(logs, targets[..., None], -1)[..., 0]
    return picked, logits.argmax(-1) == targets
