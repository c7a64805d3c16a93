"""Situations that people reported of libraries of this field, one test each.

A file is a subject: labels, weights, checkpoints, adapters, texts, GGUF files, rows. Add a new
situation there as a test of about ten lines. Name it by what the person did, and take the right
value from NumPy, PyTorch or the library that it was reported of.
"""
