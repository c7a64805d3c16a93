"""Situations that people reported of libraries of this field, one test each.

A file is a subject: labels, weights, checkpoints, adapters, texts, GGUF files, rows. A new situation
is
a test of about ten lines in one of them, named by what the person did, with the right value from
NumPy, PyTorch or the library that it was reported of.
"""
