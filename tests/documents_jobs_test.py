"""What the authors of the five documents asked of their jobs, and the test that shows each demand.

Each job runs on the smallest honest input: a tiny decoder or encoder-decoder in a folder, a handful
of texts, six episodes. Eigenvalue clipping is a stage of the analysis, and has no job of its own.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEMANDS = ("time left", "host memory", "resume", "report", "no out-of-memory")
CLI = "jaxkfac/jobs/cli"
ANALYSIS, FINETUNE = f"{CLI}/analysis", f"{CLI}/finetune"
PASSES = f"{ANALYSIS}/_run_test.py::test_passes_over_batches_find_what_one_batch_of_all_texts_does"
STEADY = f"{FINETUNE}/_memory_test.py::test_two_thousand_updates_hold_no_more_than_two_hundred"
ANSWER = f"{CLI}/_out_of_memory_test.py::test_finetune_in_too_little_memory_names_what_fits"

JOBS: dict[str, tuple[str, ...]] = {  # a test for each of DEMANDS
    "kfac-7b: jaxkfac analyze": (
        PASSES,
        f"{ANALYSIS}/_budget_test.py::"
        "test_the_smallest_budget_that_a_refusal_names_and_an_ample_one_hold",
        f"{ANALYSIS}/_run_test.py::test_a_killed_analysis_ends_with_the_bits_of_one_that_was_not",
        PASSES,
        f"{ANALYSIS}/_bad_input_test.py::test_a_budget_too_small_says_the_smallest",
    ),
    "clipping: the decompositions of jaxkfac analyze": (
        PASSES,
        "tests/host_memory_test.py::test_the_resident_peak_stays_within_the_stated_bound",
        f"{ANALYSIS}/_run_test.py::test_a_resumed_analysis_is_the_one_that_was_begun",
        f"{ANALYSIS}/_run_test.py::test_two_models_are_compared_and_one_block_is_a_layer_of_its_own",
        f"{ANALYSIS}/_run_test.py::test_an_analysis_does_not_go_on_with_less_than_its_passes_need",
    ),
    "flan-t5-xl: jaxkfac finetune of an encoder-decoder": (
        f"{FINETUNE}/_pairs_run_test.py::"
        "test_all_parameters_are_trained_and_the_model_is_read_again",
        STEADY,
        f"{FINETUNE}/_pairs_run_test.py::"
        "test_a_run_resumed_after_ctrl_c_gives_the_bits_of_an_uninterrupted_one",
        f"{FINETUNE}/_pairs_run_test.py::test_the_report_has_curvature_scores_and_wanted_targets",
        f"{FINETUNE}/_plan_test.py::test_what_does_not_fit_is_said_with_options_by_which_it_does",
    ),
    "few-shot: examples/fewshot.py": (
        "tests/fewshot_job_test.py::test_the_time_left_is_said_within_the_first_epoch",
        "tests/fewshot_job_test.py::test_an_epoch_holds_no_more_memory_than_the_one_before_it",
        "tests/fewshot_job_test.py::test_a_run_that_was_killed_ends_as_one_that_was_not",
        "tests/fewshot_job_test.py::test_the_time_left_is_said_within_the_first_epoch",
        "tests/fewshot_job_test.py::test_the_plan_is_printed_before_anything_is_loaded",
    ),
    "phi3-lora: jaxkfac finetune of a decoder": (
        f"{FINETUNE}/_run_test.py::test_a_run_writes_report_metrics_adapter_events_and_checkpoints",
        STEADY,
        f"{FINETUNE}/_run_test.py::"
        "test_a_run_resumed_after_ctrl_c_gives_the_bits_of_an_uninterrupted_one",
        f"{FINETUNE}/_run_test.py::test_a_run_writes_report_metrics_adapter_events_and_checkpoints",
        ANSWER,
    ),
}


@cache
def _functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("job", JOBS)
def test_each_demand_has_a_test_that_exists(job):
    assert len(JOBS[job]) == len(DEMANDS)
    for demand, test in zip(DEMANDS, JOBS[job], strict=True):
        path, name = test.split("::")
        assert name in _functions(path), f"{demand} of {job}: no {test}"
