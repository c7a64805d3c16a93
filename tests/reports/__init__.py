"""Situations that people reported of libraries of this field, one test each."""
