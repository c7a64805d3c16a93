"""Public names without a parity case, and why."""

# A whole package, with what is below it.
PACKAGES = {
    "jaxkfac.cli": "parses, calls and prints; what it prints comes from names that have cases",
    "jaxkfac.data": "data, of which both sides get the same numbers through NumPy",
    "jaxkfac.kinds": "parts of value_grad_and_factors, whose cases go through every kind",
    "jaxkfac.lslora.nf4": "NF4, whose oracle is bitsandbytes itself, in tests/nf4_test.py",
    "jaxkfac.memory": "loads, places and measures arrays whose numbers stay as they are",
    "jaxkfac.models": "models; the paired ones are written here on both sides",
    "jaxkfac.planning": "predicts bytes, of which torch_ref has no table",
    "jaxkfac.report": "shows numbers that others have computed",
}

_ERROR = "an error: raised or not, there is no number"
_TYPE = "a type for annotations"
_CHECK = "refuses arguments; there is no number"
_PIECE = "a piece of apply_power, eigendecompose or reconstruct, whose cases go through it"
_PART = "a part of value_grad_and_factors, whose cases go through it"
_NO_TWIN = "torch_ref has none; tests/ holds it to a dense oracle"
_NO_TWIN_BESIDE = "torch_ref has none; the test beside it solves it in NumPy"
_RANDOM = "an estimate from random vectors, which differ between frameworks; tested beside it"

NAMES = {
    # errors
    "CheckpointMismatchError": _ERROR,
    "JaxkfacError": _ERROR,
    "LostRowsError": _ERROR,
    "NonFiniteFactorError": _ERROR,
    "UncoveredParameterError": _ERROR,
    "UnknownLayerError": _ERROR,
    "MemoryBudgetError": _ERROR,
    # types
    "Damping": _TYPE,
    "DampingMode": _TYPE,
    "FisherType": _TYPE,
    "Likelihood": _TYPE,
    "Missing": _TYPE,
    "Placement": _TYPE,
    "TraceMethod": _TYPE,
    # layers without a counterpart
    "DiagonalFactor": f"scales and lone biases: {_NO_TWIN}",
    "DiagonalEigenbasis": f"scales and lone biases: {_NO_TWIN}",
    # interception
    "Handler": _PART,
    "NnxApply": "what from_nnx returns; the perceptron and the images are such models",
    "ParameterMatrix": _PART,
    "Site": _PART,
    "Traced": _PART,
    "trace": "of interception: a part of find_layers; of operators: a random estimate",
    "Atoms": _TYPE,
    "Axes": _TYPE,
    "AxisTable": _PART,
    "Data": _PART,
    "Entries": _TYPE,
    "Eqn": _TYPE,
    "Kind": _PART,
    "RowMask": _PART,
    "SlotEntry": _PART,
    "Use": _PART,
    "View": _PART,
    "Window": _PART,
    "automatic": _PART,
    "cast_varying": _PART,
    "is_var": _PART,
    "kind_named": _PART,
    "leaves_by_path": _PART,
    "matrix_problem": _CHECK,
    "order_problem": _CHECK,
    "register_kind": _PART,
    "reversal": _PART,
    "walked_by": _PART,
    "whole": _PART,
    "with_leaves": _PART,
    # factors
    "Estimator": _PART,
    "FISHER_TYPES": _PART,
    "Leaves": _PART,
    "Program": _PART,
    "Slot": _TYPE,
    "Statistics": _PART,
    "as_batch": _PART,
    "estimator_of": _PART,
    "gradient_rows": _PART,
    "per_example_diagonals": _PART,
    # curvature
    "covered_indices": "which parameters have factors; there is no number",
    "identity_bases": "identity matrices: preconditioning by them changes nothing",
    # operators
    "Estimate": _RANDOM,
    "SpectralDensity": _RANDOM,
    "log_determinant": _RANDOM,
    "spectral_density": _RANDOM,
    "FunctionOperator": "the user's own product",
    "from_function": "the user's own product",
    # lslora
    "ApproximateMerge": "what approximate_merge returns",
    "approximate_merge": f"least squares of a branch on a batch: {_NO_TWIN_BESIDE}",
    "fuse": "moves columns of B between layers; the test beside it compares outputs",
    "split": "as fuse",
    # linalg
    "PANELS_FROM": _PART,
    "gram": _PART,
    "gram_panels": _PART,
    "map_over_chunks": _PART,
    "panel_shapes": _PART,
    "statistics_dtype": _PART,
    "sum_over_chunks": _PART,
    "unpack_panels": _PART,
    "Spectrum": _PIECE,
    "above_rcond": _PIECE,
    "check_clipping": _CHECK,
    "check_rcond": _CHECK,
    "check_damping": _CHECK,
    "check_square": _CHECK,
    "diagonal_power": _PIECE,
    "eigh_checked": _PIECE,
    "eigh_in_turn": _PIECE,
    "in_sequence": "an order of decompositions; adds zero",
    "into_eigenbasis": _PIECE,
    "kronecker_above_rcond": _PIECE,
    "kronecker_damping": _PIECE,
    "kronecker_power": _PIECE,
    "out_of_eigenbasis": _PIECE,
    "power_or_zero": _PIECE,
    "scale_in_eigenbasis": _PIECE,
}
