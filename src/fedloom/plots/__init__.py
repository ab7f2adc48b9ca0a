"""Figures of the papers from finished runs. Most functions draw into axes of matplotlib and return them; `figure` makes
a whole figure, as `fedloom plot` does, and `save` writes it to a file.

>>> import fedloom
>>> from fedloom import plots
>>> result = fedloom.run("fedrep", rounds=3, clients=5)
>>> with plots.style():
...     figure, [[axes]] = plots.panels(1, 1)
...     axes = plots.convergence(axes, result, smooth=1)
>>> axes.get_xlabel()
'round'
"""

from fedloom.analysis.bounds import Terms
from fedloom.analysis.diagnosis import Diagnosis, diagnose
from fedloom.analysis.features import Features, features
from fedloom.analysis.landscape import Landscape, sharpness
from fedloom.analysis.landscape import landscape as loss_landscape
from fedloom.plots.client_scores import clients, distribution
from fedloom.plots.curves import convergence, hypernetwork_costs, rewards, sweep
from fedloom.plots.drawing import panels, save, style
from fedloom.plots.figures import figure
from fedloom.plots.sources import results
from fedloom.plots.trained import landscape, loss_levels, tsne

__all__ = [
    "Diagnosis", "Features", "Landscape", "Terms", "clients", "convergence", "diagnose", "distribution", "features",
    "figure", "hypernetwork_costs", "landscape", "loss_landscape", "loss_levels", "panels", "results", "rewards",
    "save", "sharpness", "style", "sweep", "tsne",
]  # fmt: skip
