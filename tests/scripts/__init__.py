"""Ten training scripts as other people write them, each trained by one object at its defaults."""
