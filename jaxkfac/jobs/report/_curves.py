"""Loss and accuracy against examples and against time."""

from collections.abc import Mapping

from jaxkfac.jobs.report._page import FIGURE_STYLE, INK, OPTIMIZERS, RULE, svg_bytes
from jaxkfac.jobs.report._race import RunRecords


def curves_figure(runs: Mapping[str, RunRecords]) -> bytes:
    """Training loss and test error of each run, by examples seen and by training time.

    Args:
        runs: ``{"kfac" or "adamw": records}``.

    Returns:
        The figure as SVG.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(9.2, 5.4), layout="constrained")
        axes = figure.subplots(2, 2, sharex="col", sharey="row")
        for name, run in runs.items():
            label, color = OPTIMIZERS[name]
            examples = [epoch.examples / 1000 for epoch in run.epochs]
            seconds = [epoch.seconds for epoch in run.epochs]
            if run.losses and run.epochs:
                each = run.epochs[-1].examples / len(run.losses) / 1000
                steps = [(i + 0.5) * each for i in range(len(run.losses))]
                axes[0, 0].plot(steps, run.losses, color=color, alpha=0.22, linewidth=0.5)
            for column, x in enumerate((examples, seconds)):
                axes[0, column].plot(x, [e.train_loss for e in run.epochs], color=color)
                errors = [100 * (1 - e.test_accuracy) for e in run.epochs]
                axes[1, column].plot(x, errors, color=color, label=label)
        axes[0, 0].set(yscale="log", ylabel="training loss (nats)")
        axes[1, 0].set(yscale="log", ylabel="test error (%)", xlabel="examples seen (thousands)")
        axes[1, 1].set(xlabel="time in training steps (s)")
        axes[0, 0].set_title("Whole training set; faint: each update's own examples")
        axes[0, 1].set_title("Whole training set")
        for axis in axes[1]:
            axis.axhline(3.0, color=INK, linewidth=0.6, linestyle=(0, (4, 3)))
            axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_yticks([1, 2, 3, 5, 10, 20, 50, 90])
            axis.minorticks_off()
        axes[1, 0].set_title("Held-out examples; dashed: 3 % error")
        axes[1, 1].set_title("Held-out examples")
        for axis in axes.flat:
            axis.set_axisbelow(True)
            axis.grid(color=RULE)
        axes[1, 1].legend(loc="upper right")
        return svg_bytes(figure)
