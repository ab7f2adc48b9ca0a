"""What generalization bounds are made of and can be measured: spectral norms, margins, sizes.

The bounds are those of PLGU (Theorems 1 to 3) and pFedKT (Theorem 5.1). They hold up to constants that nobody knows
(Lipschitz constants of the loss, the factor that O(.) hides), and for fully connected networks. So the terms compare
models of one architecture on one task; they are no bounds of an error.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from fedloom.algorithms.pfedhn import PFedHN
from fedloom.algorithms.pfedkt import PFedKT
from fedloom.algorithms.plgu_grep import PLGUGRep
from fedloom.algorithms.plgu_lf import PLGULF
from fedloom.analysis.landscape import networks
from fedloom.analysis.trained import TrainedModel, TrainedRun
from fedloom.core.federation import Federation
from fedloom.core.task import Network
from fedloom.core.tree import Params, Tree, leaves
from fedloom.engine.executors.scoring import eval_batch, logits_of_rows


class Terms(NamedTuple):
    """The terms of a bound for one model, without constants that cannot be measured (beta, gamma)."""

    depth: int  # L, number of weight matrices
    width: int  # d, the most rows of one of them
    product: float  # of their spectral norms, M_1 M_2 ...
    largest_input: float  # B, the largest norm of a training sample; NaN for tokens
    samples: int  # m, training samples of the model
    margin: float  # see `margin_term`
    perturbation: float  # see `perturbation_term`


class GeneratorTerms(NamedTuple):
    """The terms of a bound for a hypernetwork (PLGU's Theorem 3, pFedKT's Theorem 5.1). Of several hypernetworks the
    product is a mean, and radius and largest embedding are those of the largest."""

    hypernetworks: int  # one at the server, or one per client
    embedding: int  # length of what it is given, emb_dim
    parameters: int  # of one, HN_size
    depth: int  # L_h
    width: int  # d_h
    radius: float  # r, the norm of all parameters
    product: float  # of spectral norms, M_1^h M_2^h ...
    largest_embedding: float  # R; NaN where embeddings are drawn from the seed and not stored
    margin: float  # R sqrt(L_h) product / sqrt(N), of Theorem 3; NaN for a hypernetwork per client
    perturbation: float  # (R + rho) d_h sqrt(L_h log L_h) product / sqrt(N), of Theorem 3; 0 without a perturbation


def terms(run: TrainedRun, model: TrainedModel) -> Terms:
    """The terms for a model of a run."""
    norms = spectral_norms(model.tree, run.task.network)
    shapes = [matrix(w).shape for w in weight_matrices(model.tree, run.task.network).values()]
    found = Terms(
        depth=len(norms),
        width=max((rows for rows, _ in shapes), default=0),
        product=math.prod(norms.values()),
        largest_input=largest_norm(run.task.data, model.train),
        samples=len(model.train),
        margin=math.nan,
        perturbation=math.nan,
    )
    if not found.samples:
        return found
    perturbation = perturbation_term(run, model, norms, found)
    return found._replace(margin=margin_term(run, model, found), perturbation=perturbation)


def margin_term(run: TrainedRun, model: TrainedModel, of: Terms) -> float:
    """B sqrt(L) product / sqrt(m) for a global model, the first term of PLGU's Theorem 1. For a personal one, as in the
    third term and in Theorem 3, N sqrt(m^) takes the place of sqrt(m): m^ are the samples of the smallest client."""
    share = math.sqrt(of.samples) if model.client is None else _personal_share(run)
    return of.largest_input * math.sqrt(of.depth) * of.product / share


def perturbation_term(run: TrainedRun, model: TrainedModel, norms: dict[str, float], of: Terms) -> float:
    """What perturbations of radius rho add to a bound; 0 for models that the theorems have no such term for.

    - A global model (Theorem 1, second term): (B + rho) d sqrt(L log L) product / sqrt(m).
    - A personal model of PLGU-LF (fourth term), with D personal layers, and S = N sqrt(m^) as in `margin_term`:
      d D (L - D) sqrt(log D) sqrt(log(L - D)) B^D (B + rho)^(L - D) product / S.
    - A personal model of PLGU-GRep (Theorem 2, first term), of its body, with the samples of all clients:
      (B + rho) d sqrt((L - 1) log(L - 1)) product / sqrt(m).
    """
    rho, B, d = float(getattr(run.algorithm, "rho", 0.0)), of.largest_input, of.width
    if not rho:
        return 0.0
    if model.client is None:
        return (B + rho) * d * _entropy(of.depth) * of.product / math.sqrt(of.samples)
    if isinstance(run.algorithm, PLGULF):
        D = len(personal_layers(run, model) & norms.keys())
        universal = of.depth - D
        logarithms = math.sqrt(math.log(max(D, 1)) * math.log(max(universal, 1)))
        inputs = B**D * (B + rho) ** universal
        return d * D * universal * logarithms * inputs * of.product / _personal_share(run)
    if isinstance(run.algorithm, PLGUGRep):
        body = [norm for name, norm in norms.items() if name in run.task.network.body]
        m = int(run.task.data.splits["train"].sizes[: run.task.data.clients].sum())
        return (B + rho) * d * _entropy(len(body)) * math.prod(body) / math.sqrt(m)
    return 0.0


def _entropy(depth: int) -> float:
    """sqrt(L log L)"""
    return math.sqrt(depth * math.log(max(depth, 1)))


def _personal_share(run: TrainedRun) -> float:
    """N sqrt(m^), where m^ are the samples of the client with the fewest (but at least one)."""
    sizes = run.task.data.splits["train"].sizes[: run.task.data.clients]
    return run.task.data.clients * math.sqrt(int(sizes[sizes > 0].min()))


def personal_layers(run: TrainedRun, model: TrainedModel) -> set[str]:
    """Names of the parameters in the layers that stayed personal when PLGU-LF last trained this model."""
    layers, reports = run.task.layers, run.result.reports
    mine = reports.filter((pc.field("client") == model.client) & (pc.field("round") <= model.round))
    if not len(mine):
        return set()  # it never trained, so its model is the global one
    assert isinstance(run.algorithm, PLGULF)
    stays = run.algorithm.personal_layers(torch.tensor(mine["xi"][-1].as_py()))
    return {name for layer, personal in zip(layers, stays.tolist(), strict=True) if personal for name in layer}


# -- spectral norms


def spectral_norms(model: Tree, network: Network) -> dict[str, float]:
    """The largest singular value of every weight matrix of a model, by the name of the parameter; of a convolution, of
    its kernel as a matrix with one row per output channel. If a model has a parameter twice, its second name ends in a
    quote (head.weight')."""
    return {name: spectral_norm(matrix(w)) for name, w in weight_matrices(model, network).items()}


def weight_matrices(model: Tree, network: Network) -> dict[str, Tensor]:
    """The parameters of a model that are matrices or kernels, without those of normalisation layers."""
    found: dict[str, Tensor] = {}
    for params in networks(model, network):
        for name, w in params.items():
            if w.dim() > 1 and name not in network.norms:
                found[name + "'" * (name in found)] = w
    return found


def matrix(w: Tensor) -> Tensor:
    """A parameter as a matrix with one row per output."""
    return w.detach().flatten(1).double()


def spectral_norm(w: Tensor) -> float:
    """The largest singular value of a matrix, from the eigenvalues of the smaller of its Gram matrices, because a
    hypernetwork's last layer has millions of rows."""
    gram = w.T @ w if w.shape[0] > w.shape[1] else w @ w.T
    if not bool(torch.isfinite(gram).all()):
        return math.nan
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0))


def largest_norm(data: Federation, rows: Tensor) -> float:
    """The largest norm of a sample as the model receives it; NaN for tokens, which have none."""
    if data.token_ids() is not None or not len(rows):
        return math.nan
    batches = torch.split(rows, 1 << 12)
    return max(float(data.prepare(data.x[some]).flatten(1).double().norm(dim=1).max()) for some in batches)


# -- margins


@torch.no_grad()
def margins(run: TrainedRun, model: TrainedModel, rows: Tensor | None = None) -> np.ndarray:
    """By how much the output of the right class exceeds the largest other one, for every training sample (or for the
    given rows): negative where the prediction is wrong. For labels, by how much each is on the right side of 0. Numbers
    have no margins."""
    data, rows = run.task.data, model.train if rows is None else rows
    if data.kind == "number":
        return np.zeros(0)
    parts = torch.split(rows, eval_batch(run.task))
    found = [
        margins_of(logits_of_rows(run.task, lambda x: model.predict(model.tree, x), some), data.y[some])
        for some in parts
    ]
    return torch.cat(found).double().cpu().numpy() if found else np.zeros(0)


def margins_of(logits: Tensor, y: Tensor) -> Tensor:
    """Margins of outputs; see `margins`. Padding (-1) has none."""
    if y.is_floating_point():
        return (logits * (2 * y - 1)).flatten()
    logits, y = logits.reshape(-1, logits.shape[-1]), y.flatten()
    logits, y = logits[y >= 0], y[y >= 0]
    if logits.shape[-1] < 2:
        return logits.new_zeros(0)
    right = logits.gather(1, y[:, None])[:, 0]
    return right - logits.scatter(1, y[:, None], -torch.inf).amax(1)


# -- hypernetworks


def generator_terms(run: TrainedRun) -> GeneratorTerms | None:
    """The terms for the hypernetwork of a method that has one, after the last round; None for other methods."""
    algorithm: Any = run.algorithm
    if isinstance(algorithm, PFedHN):
        server = run.result.server
        return _generator_at_server(server["phi"], server["v"], float(getattr(algorithm, "rho", 0.0)))
    if isinstance(algorithm, PFedKT) and algorithm.generates:
        return _generators_of_clients(run.result.store["varphi"], algorithm.emb_dim)
    return None


def _generator_at_server(phi: Params, v: Tensor, rho: float) -> GeneratorTerms:
    """A trunk, and one layer of outputs for every parameter of the model; these layers together are one matrix."""
    trunk = [matrix(w) for name, w in phi.items() if name.startswith("trunk.") and w.dim() > 1]
    outputs = [
        matrix(w) @ matrix(phi[low]) if (low := name.replace("out.", "low.")) in phi else matrix(w)
        for name, w in phi.items()
        if name.startswith("out.") and w.dim() > 1
    ]
    layers = [*trunk, torch.cat(outputs)]
    depth, width = len(layers), max(len(w) for w in layers[:-1])
    R, product = float(v.double().norm(dim=1).max()), math.prod(map(spectral_norm, layers))
    share = product / math.sqrt(len(v))
    return GeneratorTerms(
        hypernetworks=1,
        embedding=v.shape[1],
        parameters=sum(w.numel() for w in leaves(phi)),
        depth=depth,
        width=width,
        radius=math.sqrt(sum(float((w.double() ** 2).sum()) for w in leaves(phi))),
        product=product,
        largest_embedding=R,
        margin=R * math.sqrt(depth) * share,
        perturbation=(R + rho) * width * _entropy(depth) * share if rho else 0.0,
    )


def _generators_of_clients(varphi: Params, embedding: int) -> GeneratorTerms:
    """One fully connected network per client, stacked."""
    weights = [w for name, w in varphi.items() if name.startswith("fc") and w.dim() > 2]
    count = len(weights[0])
    products = [math.prod(spectral_norm(matrix(w[i])) for w in weights) for i in range(count)]
    squares = sum((w.double().flatten(1) ** 2).sum(1) for w in varphi.values())
    trained = varphi.get("E")
    return GeneratorTerms(
        hypernetworks=count,
        embedding=embedding,
        parameters=sum(w[0].numel() for w in varphi.values()),
        depth=len(weights),
        width=max(w.shape[1] for w in weights[:-1]),
        radius=math.sqrt(float(torch.as_tensor(squares).max())),
        product=float(np.mean(products)),
        largest_embedding=math.nan if trained is None else float(trained.double().norm(dim=-1).max()),
        margin=math.nan,
        perturbation=math.nan,
    )
