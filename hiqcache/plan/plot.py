"""A plan as a picture: hit rate against host gigabytes, one curve for each representation."""

from pathlib import Path

from hiqcache.plan.replay import Plan
from hiqcache.plotting import require_plotting, save


def draw(plan: Plan, title: str, file: Path) -> None:
    """Write the curves of `plan` to `file`, whose name ends in one of `plotting.FORMATS`.

    Raises:
        CannotPlot: matplotlib is not installed, or the file cannot be written.
    """
    require_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, estimates in plan.estimates.items():
        budgets = [estimate.gigabytes for estimate in estimates]
        axes.plot(budgets, [100 * estimate.totals.hit_rate for estimate in estimates], marker="o", label=name)
    axes.axhline(100 * plan.without_l2.hit_rate, linestyle=":", color="gray", label="no L2")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="host memory for L2, each rank (GB)", ylabel="hit rate (% of prompt tokens)")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, file)
