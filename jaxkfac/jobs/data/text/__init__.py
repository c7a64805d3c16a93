"""Text for training: records, tokens with loss masks, and batches."""

from jaxkfac.jobs.data.text._batches import (
    Batching,
    TokenBatches,
    read_folder,
    read_records,
    record_files,
    token_stream,
)
from jaxkfac.jobs.data.text._encode import (
    Chat,
    Completion,
    Encoded,
    EncodedRecord,
    EndToken,
    Example,
    LossOn,
    MarksAnswers,
    Message,
    Record,
    TokenizerLike,
    encode_records,
    encode_with_ending,
)
from jaxkfac.jobs.data.text._formats import parse_record, record_format
from jaxkfac.jobs.data.text._rows import TokenBatch, bucket_lengths, pack, token_batch

Tokenizer = TokenizerLike  # its name in version 0.1

__all__ = [
    "Batching",
    "Chat",
    "Completion",
    "Encoded",
    "EncodedRecord",
    "EndToken",
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
    "encode_records",
    "encode_with_ending",
    "pack",
    "parse_record",
    "read_folder",
    "read_records",
    "record_files",
    "record_format",
    "token_batch",
    "token_stream",
]
