"""The command ``jaxkfac finetune``: a decoder or an encoder-decoder, taught by records of text."""
