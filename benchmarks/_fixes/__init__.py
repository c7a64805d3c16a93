"""The cases of ``benchmarks.fixes``: what they claim, their programs, how they are measured."""
