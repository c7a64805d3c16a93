"""Situations that people reported, one test each."""
