"""Steps of a hypernetwork towards a trained model, for pFedKT. `f` is half the squared distance of the generated model
from the trained one, as a function of the hypernetwork's parameters varphi.
"""

from collections.abc import Callable

from torch import Tensor

from fedloom.algorithms.parts import adam
from fedloom.core.autodiff import grad
from fedloom.core.task import clip_norm
from fedloom.core.tree import Tree, axpy, where

LINE = range(-12, 9)  # powers of two, times the step size, that the line search tries

Gap = Callable[[Tree], Tensor]


def clipped_step(f: Gap, varphi: Tree, lr: float, clip: float) -> Tree:
    """One gradient step, with the gradient clipped to a norm."""
    return axpy(-lr, clip_norm(_gradient(f, varphi), clip), varphi)


def best_step(f: Gap, varphi: Tree, lr: float) -> Tree:
    """Of gradient steps of lr times powers of two, the one that leads nearest, with its `gap`; or none."""
    g, nearest = _gradient(f, varphi), {"varphi": varphi, "gap": f(varphi)}
    for power in LINE:
        tried = axpy(-lr * 2.0**power, g, varphi)
        nearest = _nearer(nearest, {"varphi": tried, "gap": f(tried)})
    return nearest


def begin(f: Gap, varphi: Tree, lr: float, size: Tensor) -> Tree:
    """Before the first of some Adam steps: their moments, their step size, which is lr times the relative distance from
    a model of norm `size`, and the nearest point so far, the best gradient step."""
    nearest = best_step(f, varphi, lr)
    rate = lr * (2 * nearest["gap"]).sqrt() / (size + 1e-12)
    return {"varphi": nearest["varphi"], "nearest": nearest, "lr": rate, "adam": adam.start_tree(varphi)}


def adam_step(f: Gap, state: Tree, k: Tensor, steps: int) -> Tree:
    """Step k of `steps`, with a step size that falls to 0."""
    rate = state["lr"] * (1 - k / steps)
    varphi, moments = adam.step_tree(state["varphi"], _gradient(f, state["varphi"]), state["adam"], k + 1, rate)
    return {
        "varphi": varphi,
        "adam": moments,
        "nearest": _nearer(state["nearest"], {"varphi": varphi, "gap": f(varphi)}),
    }


def _gradient(f: Gap, varphi: Tree) -> Tree:
    return grad(lambda v: (f(v), {}), varphi)[0]


def _nearer(a: Tree, b: Tree) -> Tree:
    """The one with the smaller gap."""
    return where(b["gap"] < a["gap"], b, a)
