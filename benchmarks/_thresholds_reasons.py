# ruff: noqa: E501 (a key is a condition in one piece)
"""Why a condition needs no parity or oracle case on some side: ``{its key: the reason}``."""

_KEYS_BY_REASON = {
    "It chooses the words of an error message or of a printed plan.": (
        "jaxkfac/blocks/_average.py:_cut: len(text) <= _MAX_SHOWN",
        "jaxkfac/factors/_passes.py:PassPlan.__str__: count > 1",
        "jaxkfac/curvature/host/_push.py:Push._load: len(names) == 1",
        "jaxkfac/curvature/host/_store.py:Store.require: self.disk or fixed > self._limit",
        "jaxkfac/lslora/_folder.py:check_tensors: len(wrong) == len(tensors)",
        "jaxkfac/lslora/_pretrained.py:stacks_of: len(unknown) > 1",
        "jaxkfac/lslora/_attach.py:Adapted._trace: traced is None or n not in traced.table",
    ),
    "Its true side only ends in an error.": (
        "jaxkfac/curvature/host/_store.py:Store.require: needed > self._limit",
        "jaxkfac/lslora/_pretrained.py:stacks_of: m not in all_modules",
        "jaxkfac/uses/_damped_gradients.py:check_disjoint: sum((matrix.size for _, matrix in owned)) > covered",
    ),
    "It finds a layer or refuses a parameter by name, before any number.": (
        "jaxkfac/kinds/_experts.py:Gathered.find: atoms & picked != (atoms if is_row[d] else set())",
        "jaxkfac/kinds/_experts.py:Gathered.find: any((every.count(a) != 1 for axis in view.picked.rows for a in table.atoms(axis)))",
        "jaxkfac/kinds/_experts.py:Ragged.find: at.operand != 1 or not (plain and of_rows and (len(numbers.rhs_group_dimensions) == 1))",
        "jaxkfac/kinds/_embedding.py:Embedding.find: any((view.axes[axis] == j.array_axis for j in view.joins))",
    ),
    "It decides when or where work is done; jaxkfac/curvature/host/_schedule_test.py and _service_test.py compare its steps.": (
        "jaxkfac/curvature/host/_decompose.py:Decomposer._where: device is None or device.platform == 'cpu'",
    ),
    "It decides which process holds a slice; tests/several_processes_test.py compares the results.": (
        "jaxkfac/curvature/host/_decompose.py:Shares.of_this_process: self._owners[block.place, index] == group.rank",
        "jaxkfac/curvature/_placement.py:_shared: j == i and owners[j, at] == group.rank",
    ),
    "It only counts or takes memory.": (
        "jaxkfac/curvature/host/_options.py:layout_bytes: options.vectors_dtype == 'bfloat16'",
    ),
    "It decides what is copied or written to a file; jaxkfac/curvature/host/_state_test.py compares a resumed run bit for bit.": (
        "jaxkfac/curvature/host/_state.py:State.about: k not in MACHINE",
        "jaxkfac/curvature/host/_state.py:save_state: k not in MACHINE",
        "jaxkfac/curvature/host/_refresh.py:Decompositions._count: block.place in self._failed",
        "jaxkfac/curvature/host/_state.py:_on_device: array.dtype != host.dtype",
    ),
    "It maps names between files and layers; jaxkfac/lslora/_files_test.py, parity_tests/adapters_peft_test.py and adapters_files_test.py compare what is read.": (
        "jaxkfac/lslora/_modules.py:module_name: len(components) > 1 and components[0] == _COLLECTION",
        "jaxkfac/lslora/_pretrained.py:stacks_of: any((m in present or is_target(record, m) for m in stack.modules))",
        "jaxkfac/lslora/_pretrained.py:stacks_of: (unknown := [m for m in lookups if m not in all_modules])",
        "jaxkfac/lslora/_pretrained.py:whole_parameters: model_slice.shape != value.shape",
    ),
    "It decides how long a compiled program is kept.": (
        "jaxkfac/factors/_objective.py:KeptPrograms.get: len(self._programs) > MOST",
    ),
    "It only warns.": (
        "jaxkfac/factors/_scalar_loss.py:_may_be_equal: jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)",
    ),
    "No platform but a CPU is here: `make accelerators` compiles the other side, and `make gpu-check` runs it.": (
        "jaxkfac/curvature/_eigendecompose.py:_of_one_size: device_of(matrices[0].sharding).platform == 'cpu'",
    ),
    "Its false side only ends in an error.": (
        "jaxkfac/factors/_model_call.py:_pair: isinstance(out, tuple) and len(out) == 2",
        "jaxkfac/factors/_objective.py:_joined: mask.shape != by_targets.shape",
    ),
    "It leaves out what is no floating number; jaxkfac/factors/_collect_test.py and jaxkfac/lslora/_diagnose_test.py compare the rest.": (
        "jaxkfac/factors/_gather.py:gradient_tree: jnp.issubdtype(x.dtype, jnp.number)",
        "jaxkfac/lslora/_diagnose.py:measure.total: jnp.issubdtype(x.dtype, jnp.floating)",
    ),
    "It decides where results lie; jaxkfac/curvature/_sharding_test.py compares the places, and _divided_test.py the bits.": (
        "jaxkfac/curvature/_placement.py:_mesh_of: not isinstance(x, Tracer) and isinstance(x.sharding, NamedSharding)",
    ),
    "It decides which values a table holds; jaxkfac/curvature/capacity/_metrics_test.py reads the tables.": (
        "jaxkfac/curvature/capacity/_comparison.py:_intervals: all((name in batch for batch in batches))",
    ),
    "It decides how long old bases stay; jaxkfac/curvature/host/_failures_test.py compares them with those of a service that did not fail.": (
        "jaxkfac/curvature/host/_refresh.py:ActiveBases.hand_over: place not in self.tables or count > self.options.keep_previous",
    ),
    "It counts the axes of one element, which hold no values of their own.": (
        "jaxkfac/kinds/_patches.py:axis_of_devices: size > 1",
        "jaxkfac/lslora/nf4/_quantize.py:_from_layer: size > 1",
    ),
    "jk.mark_outputs refuses a scalar, so that the true side is not taken.": (
        "jaxkfac/factors/_diagonal_pass.py:_row_alone: not x.ndim",
    ),
}
REASONS = {key: reason for reason, keys in _KEYS_BY_REASON.items() for key in keys}
