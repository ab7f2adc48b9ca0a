"""Whole figures, as `fedloom plot` makes them: which there are, and how panels are put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.algorithms.pfedkt import PFedKT
from fedloom.analysis.features import GROUPS, features
from fedloom.analysis.landscape import landscape as loss_landscape
from fedloom.analysis.trained import has_global_model, load_all
from fedloom.core.errors import UserError, plural, unknown
from fedloom.plots import client_scores, curves, trained
from fedloom.plots.drawing import COLUMN, HEIGHT, panels, style
from fedloom.plots.sources import metric_label, metric_of, results, with_view
from fedloom.studies.load import load
from fedloom.studies.models import When
from fedloom.studies.result import Result
from fedloom.studies.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PANELS = 24
ACROSS = 3  # panels of a figure with one per method
TALL = 0.22  # inches, of a strip


@dataclass(frozen=True)
class Options:
    """What can be asked of a figure; None stands for its default."""

    view: str | None = None  # pre, post or global
    smooth: int | None = None  # rounds of the trailing mean
    below: Sequence[float] | None = None  # thresholds of scores
    method: Sequence[str] | None = None  # labels of the methods to draw
    client: int | str | None = None  # whose personal model
    when: When | None = None
    samples: int | None = None
    setting: str | None = None  # of a sweep

    def given(self) -> dict[str, Any]:
        """The options that were asked for."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class Kind:
    """A figure that can be asked for by its name."""

    about: str
    draw: Callable[[Sequence[Any], Options], Figure]
    takes: tuple[str, ...]  # the options that it has


def figure(name: str, *sources: Any, **options: Any) -> Figure:
    """A whole figure, as `fedloom plot NAME` makes it.

    Args:
        name: convergence, distribution, clients, tsne, landscape, sweep, rewards or hypernetwork.
        *sources: folders of runs, comparisons or sweeps, or results, see `results`; for a sweep, the sweep.
        **options: what the command has as options, such as `view="global"` or `below=[80, 90]`.

    >>> import fedloom
    >>> from fedloom import plots
    >>> found = plots.figure("convergence", fedloom.run("fedrep", rounds=3, clients=5), smooth=1)
    >>> found.axes[0].get_ylabel()
    'accuracy of personal models (%)'
    """
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    kind, known = FIGURES[name], {f.name for f in fields(Options)}
    for option, value in options.items():
        if option not in known:
            raise unknown("option of a figure", option, kind.takes)
        if value is not None and option not in kind.takes:
            others = [f"'{other}'" for other in FIGURES if option in FIGURES[other].takes]
            raise UserError(f"The figure '{name}' has no option '{option}'; it is for {' and '.join(others)}.")
    with style():
        return kind.draw(sources, Options(**options))


def _runs(sources: Sequence[Any], options: Options) -> dict[str, list[Result]]:
    """The runs to draw: those of all methods, or of those that are asked for."""
    found = results(*sources)
    for label in options.method or ():
        if label not in found:
            raise unknown("method of these runs", label, found)
    return {label: of for label, of in found.items() if not options.method or label in options.method}


def _check_count(count: int, what: str) -> None:
    if count > MOST_PANELS:
        raise UserError(f"{plural(count, what)} are too many for one figure; choose some with the option method.")


def _draw_convergence(sources: Sequence[Any], options: Options) -> Figure:
    runs = _runs(sources, options)
    made, [[axes]] = panels(1, 1, width=1.5 * COLUMN if len(runs) > 6 else COLUMN)
    smooth = curves.SMOOTH if options.smooth is None else options.smooth
    curves.convergence(axes, runs, view=options.view or "pre", smooth=smooth)
    return made


def _draw_distribution(sources: Sequence[Any], options: Options) -> Figure:
    view = options.view or "pre"
    runs = with_view(_runs(sources, options), view)
    _check_count(len(runs), "method")
    across = 2 if len(runs) == 4 else min(len(runs), ACROSS)
    shape = math.ceil(len(runs) / across), across
    made, grid = panels(*shape, width=COLUMN if across == 1 else 0.75 * COLUMN, height=1.9, sharex=True, sharey=True)
    places = [axes for row in grid for axes in row]
    for place, (axes, (label, of_seeds)) in enumerate(zip(places, runs.items(), strict=False)):
        client_scores.distribution(axes, {label: of_seeds}, view=view, below=options.below)
        axes.set(title=label, xlabel="")
        axes.label_outer()
        axes.tick_params(labelbottom=place + across >= len(runs))  # the lowest in its column
    for axes in places[len(runs) :]:
        axes.remove()
    made.supxlabel(metric_label(metric_of(runs), view), fontsize="medium")
    return made


def _draw_clients(sources: Sequence[Any], options: Options) -> Figure:
    view = options.view or "pre"
    runs = with_view(_runs(sources, options), view)
    made, [[axes]] = panels(1, 1, width=1.5 * COLUMN, height=1.2 + TALL * len(runs))
    client_scores.clients(axes, runs, view=view)
    return made


def _draw_tsne(sources: Sequence[Any], options: Options) -> Figure:
    runs = _runs(sources, options)
    _check_count(len(runs), "method")
    loaded = load_all({label: of_seeds[:1] for label, of_seeds in runs.items()})
    made, grid = panels(len(loaded), len(GROUPS), width=0.9 * COLUMN, height=0.9 * COLUMN)
    for row, (label, [run]) in zip(grid, loaded.items(), strict=True):
        found = features(run, when=options.when or "best", samples=options.samples)
        points = found.embed()
        for axes, by in zip(row, GROUPS, strict=True):
            trained.tsne(axes, found, by=by, points=points)
            axes.set_title(f"{label}, {axes.get_title()}")
    return made


def _draw_landscape(sources: Sequence[Any], options: Options) -> Figure:
    runs = _runs(sources, options)
    _check_count(len(runs), "method")
    client: int | str = 0 if options.client is None else options.client
    found = {}
    for label, [run] in load_all({label: of_seeds[:1] for label, of_seeds in runs.items()}).items():
        whose: list[int | str | None] = [*([None] if has_global_model(run.result) else []), client]
        for who in whose:
            found[label, who] = loss_landscape(run, who, when=options.when or "best", samples=options.samples)
    levels = trained.loss_levels(list(found.values()))
    columns: list[int | str | None] = [who for who in (None, client) if any(key[1] == who for key in found)]
    made, grid = panels(len(runs), len(columns), width=0.8 * COLUMN, height=0.9 * COLUMN)
    for row, label in zip(grid, runs, strict=True):
        for axes, who in zip(row, columns, strict=True):
            if (label, who) in found:
                trained.landscape(axes, found[label, who], levels=levels)
                axes.set_title(f"{label}, {axes.get_title()}")
            else:
                axes.remove()
    return made


def _draw_sweep(sources: Sequence[Any], options: Options) -> Figure:
    if len(sources) != 1:
        raise UserError("The figure 'sweep' is of one sweep; give one folder.")
    found = load(sources[0]) if isinstance(sources[0], str | Path) else sources[0]
    if not isinstance(found, Sweep):
        raise UserError(f"{sources[0]} is not the folder of a sweep; make one with 'fedloom sweep'.")
    made, [[axes]] = panels(1, 1)
    curves.sweep(axes, found, setting=options.setting)
    return made


def _draw_rewards(sources: Sequence[Any], options: Options) -> Figure:
    runs = {label: of for label, of in _runs(sources, options).items() if "reward_CS" in of[0].reports.column_names}
    if not runs:
        raise UserError("None of these runs has rewards; give a run of page.")
    _check_count(len(runs), "method")
    made, grid = panels(len(runs), 2)
    for row, (label, of_seeds) in zip(grid, runs.items(), strict=True):
        for axes, side in zip(row, ("server", "clients"), strict=True):
            curves.rewards(axes, of_seeds[0], side=side)  # type: ignore[arg-type]
            axes.set_title(f"{label}, seed {of_seeds[0].config['seed']}")
    return made


def _draw_hypernetwork(sources: Sequence[Any], options: Options) -> Figure:
    runs = {
        label: of
        for label, of in _runs(sources, options).items()
        if isinstance(algorithm := of[0].models.architecture().algorithm, PFedKT) and algorithm.generates
    }
    if not runs:
        raise UserError("None of these runs has a hypernetwork at its clients; give runs of pfedkt.")
    first = next(iter(runs.values()))[0].models.architecture()
    assert isinstance(first.algorithm, PFedKT)
    parameters = sum(p.numel() for p in first.make().parameters())
    made, [[left, right]] = panels(1, 2, height=HEIGHT)
    outputs = [n for n in curves.OUTPUTS if n <= parameters] or [parameters]
    curves.hypernetwork_costs(left, parameters, algorithm=first.algorithm, outputs=outputs)
    left.set_title(f"generating {parameters:,} parameters")
    smooth = curves.SMOOTH if options.smooth is None else options.smooth
    curves.convergence(right, runs, view=options.view or "post", smooth=smooth)
    return made


FIGURES: dict[str, Kind] = {
    "convergence": Kind("scores by round", _draw_convergence, ("view", "smooth", "method")),
    "distribution": Kind("histograms of clients' scores", _draw_distribution, ("view", "below", "method")),
    "clients": Kind("a strip per method with the score of each client", _draw_clients, ("view", "method")),
    "tsne": Kind("features of test samples", _draw_tsne, ("when", "samples", "method")),
    "landscape": Kind("the loss around models", _draw_landscape, ("client", "when", "samples", "method")),
    "sweep": Kind("scores by the value of a setting", _draw_sweep, ("setting",)),
    "rewards": Kind("PAGE's rewards and accuracy", _draw_rewards, ("method",)),
    "hypernetwork": Kind("pFedKT's hypernetworks: cost and accuracy", _draw_hypernetwork, ("view", "smooth", "method")),
}
