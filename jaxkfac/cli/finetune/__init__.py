"""The command ``jaxkfac finetune``: a pretrained decoder, an LS-LoRA adapter, records of text."""
