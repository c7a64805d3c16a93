"""Jobs of ``benchmarks.uses``: ours, and one file for each peer."""
