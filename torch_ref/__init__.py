"""The PyTorch reference: the folder names of jaxkfac, obviously right rather than fast.

It never imports JAX or jaxkfac, and jaxkfac never imports it; only ``parity_tests`` sees both.
The import-linter contracts in ``pyproject.toml`` hold this, and that only benchmarks import
``torch_ref.unfixed``.
"""
