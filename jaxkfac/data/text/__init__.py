"""Text to learn from: records, tokens with loss masks, and batches."""

from jaxkfac.data.text._batches import TokenBatches
from jaxkfac.data.text._encode import Encoded, Example, LossOn, encode_records
from jaxkfac.data.text._read import (
    read_folder,
    read_lines,
    read_records,
    train_and_validation,
)
from jaxkfac.data.text._records import Chat, Completion, Message, Record, parse_record
from jaxkfac.data.text._rows import TokenBatch, bucket_lengths, pack, token_batch
from jaxkfac.data.text._tokenizer import TokenizerLike

Tokenizer = TokenizerLike  # its name in version 0.1

__all__ = [
    "Chat",
    "Completion",
    "Encoded",
    "Example",
    "LossOn",
    "Message",
    "Record",
    "TokenBatch",
    "TokenBatches",
    "Tokenizer",
    "TokenizerLike",
    "bucket_lengths",
    "encode_records",
    "pack",
    "parse_record",
    "read_folder",
    "read_lines",
    "read_records",
    "token_batch",
    "train_and_validation",
]
