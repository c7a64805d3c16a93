"""Text to learn from: records, tokens with loss masks, and batches."""

from jaxkfac.data.text._batches import TokenBatches
from jaxkfac.data.text._encode import (
    Encoded,
    Example,
    LossOn,
    encode_record,
    encode_records,
)
from jaxkfac.data.text._read import read_folder, read_records, record_files
from jaxkfac.data.text._records import Chat, Completion, Message, Record
from jaxkfac.data.text._rows import TokenBatch, bucket_lengths, pack, token_batch
from jaxkfac.data.text._stream import Batching, token_stream
from jaxkfac.data.text._tokenizer import MarksAnswers, TokenizerLike
from jaxkfac.data.text.formats import parse_record, record_format

Tokenizer = TokenizerLike  # its name in version 0.1

__all__ = [
    "Batching",
    "Chat",
    "Completion",
    "Encoded",
    "Example",
    "LossOn",
    "MarksAnswers",
    "Message",
    "Record",
    "TokenBatch",
    "TokenBatches",
    "Tokenizer",
    "TokenizerLike",
    "bucket_lengths",
    "encode_record",
    "encode_records",
    "pack",
    "parse_record",
    "read_folder",
    "read_records",
    "record_files",
    "record_format",
    "token_batch",
    "token_stream",
]
