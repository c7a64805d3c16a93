"""jaxkfac against torch_ref, number by number: the only place that imports both.

A part of the library is one file ``<part>_test.py`` with a table ``CASES``: what is compared (a
function from both sides to pairs of arrays), on which models, which public names that covers,
and a tolerance with its reason. ``tables.py`` finds it, ``completeness_test.py`` counts it, and
``make parity`` writes it into ``parity_report.md`` and ``.html``.

The same NumPy numbers go to both sides (``problem.py``); layouts differ and are told apart in
``layout.py``. Each case runs in its dtypes, on the CPU and on a GPU where there is one; TF32 is
off on both sides but in cases of its own (``precision.py``).
"""
