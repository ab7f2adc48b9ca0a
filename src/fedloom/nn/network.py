"""A `torch.nn.Module` as pure functions of parameters and buffers, split into body and head.

Side effects of a module are made explicit: BatchNorm reads the padding mask and returns its new running statistics, and
dropout draws from a key. The head is a named submodule that comes last, so that `module(x) == head(body(x))`, which is
checked. Convolutions and recurrent layers are replaced by ones that can be stacked.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.algorithm import Output
from fedloom.core.errors import UserError, unknown
from fedloom.core.keys import fold, uniform
from fedloom.core.tree import Params
from fedloom.nn.kernels.convolution import Convolution
from fedloom.nn.kernels.cross_entropy import mean_cross_entropy
from fedloom.nn.kernels.dispatch import has_cuda_kernels, use_custom_kernel
from fedloom.nn.kernels.dropout import dropout_factors
from fedloom.nn.recurrent import Recurrent


@dataclass
class _Pass:
    """What the layers of one forward pass need to know besides their input."""

    train: bool
    mask: Tensor | None = None
    key: Tensor | None = None
    values: Params = field(default_factory=dict)  # parameters and running statistics by name
    updates: Params = field(default_factory=dict)  # new running statistics
    draws: int = 0  # dropout layers that have drawn so far


class _Current(threading.local):
    forward_pass = _Pass(train=False)


_current = _Current()
_global_generator = threading.Lock()  # torch's global generator is shared by all threads


@contextmanager
def _forward(this: _Pass) -> Iterator[_Pass]:
    outer, _current.forward_pass = _current.forward_pass, this
    try:
        yield this
    finally:
        _current.forward_pass = outer


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the batch's noise key and of the position of this call."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        now = _current.forward_pass
        if not now.train or now.key is None or self.p == 0:
            return x
        now.draws += 1
        exact = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        if exact == torch.float32 and has_cuda_kernels(now.key) and use_custom_kernel("dropout"):
            return (x * dropout_factors(now.key, now.draws, list(x.shape), self.p)).to(x.dtype)
        kept = uniform(fold(now.key, now.draws), tuple(x.shape), exact) >= self.p
        return x * kept / ((1 - self.p) or 1)  # p = 1 keeps nothing


class MaskedBatchNorm(nn.Module):
    """BatchNorm over the samples of a padded batch. New statistics are returned, not written in place."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, like: nn.modules.batchnorm._BatchNorm, name: str) -> None:
        super().__init__()
        self.name, self.eps, self.momentum = name, like.eps, like.momentum or 0.0
        self.weight, self.bias = like.weight, like.bias
        shape = like.num_features
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        now, x = _current.forward_pass, x.float() if x.dtype == torch.bfloat16 else x
        channel = (1, -1, *[1] * (x.dim() - 2))
        if now.train:
            dims = [0, *range(2, x.dim())]
            mask = torch.ones(len(x), dtype=x.dtype, device=x.device) if now.mask is None else now.mask
            weight = mask.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
            count = mask.sum() * (x[0, 0].numel())
            mean = (x * weight).sum(dims) / count
            var = (((x - mean.view(channel)) ** 2) * weight).sum(dims) / count
            unbiased = var * count / (count - 1)
            m = self.momentum
            now.updates[f"{self.name}.running_mean"] = (1 - m) * self.running_mean + m * mean
            now.updates[f"{self.name}.running_var"] = (1 - m) * self.running_var + m * unbiased
        else:
            mean, var = self.running_mean, self.running_var
        y = (x - mean.view(channel)) * torch.rsqrt(var + self.eps).view(channel)
        if self.weight is not None:
            y = y * self.weight.view(channel) + self.bias.view(channel)
        return y


def _replace_layers(module: nn.Module, prefix: str = "") -> None:
    for name, child in list(module.named_children()):
        path = f"{prefix}{name}"
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            if not child.track_running_stats or child.momentum is None:
                raise UserError(f"BatchNorm '{path}' must have track_running_stats=True and a number as momentum.")
            setattr(module, name, MaskedBatchNorm(child, path))
        elif isinstance(child, nn.modules.dropout._DropoutNd):
            if not isinstance(child, nn.Dropout):
                raise UserError(f"The model's '{path}' is a {type(child).__name__}; only nn.Dropout is supported.")
            setattr(module, name, KeyedDropout(child.p))
        elif isinstance(child, nn.Conv2d):
            setattr(module, name, Convolution(child))
        elif isinstance(child, nn.RNNBase):
            setattr(module, name, Recurrent(child, path, KeyedDropout(child.dropout)))
        else:
            _replace_layers(child, f"{path}.")


class Network:
    """A model architecture as pure functions of its parameters."""

    mean_cross_entropy = staticmethod(mean_cross_entropy)

    def __init__(
        self,
        make: Callable[[], nn.Module],
        head: str,
        sample: Tensor,
        dtype: torch.dtype | None = None,
        half: bool = False,
    ) -> None:
        """Wrap a module and check it.

        Args:
            make: builds a new module; called once per seed, so that every seed has its own initial values.
            head: name of the last submodule.
            sample: a small batch as the model receives it, on the device where it will run.
            dtype: of the parameters; by default the type of the sample.
            half: compute in bfloat16 what torch's autocast says.
        """
        dtype = dtype or sample.dtype
        self.half = half
        self.make, self.head_name, self._initial = make, head, dict[int, Params]()
        self._device, self._dtype = sample.device, dtype
        with torch.random.fork_rng(devices=[]):  # leave the global generator as it was
            module = make()
        _check(module, head, sample, dtype)
        names = {id(p): name for name, p in module.named_parameters()}  # tied parameters have one name
        self.head = tuple(name for name in names.values() if name.startswith(f"{head}."))
        self.body = tuple(name for name in names.values() if not name.startswith(f"{head}."))
        self.layers = _layers(module, names)
        self.norms = tuple(names[id(p)] for m in module.modules() if isinstance(m, NORMS) for p in m.parameters(False))
        self.structure, self.types = str(module), {type(m) for m in module.modules()}
        _replace_layers(module)
        module.to(self._device, dtype)
        norms = {name: m for name, m in module.named_modules() if isinstance(m, MaskedBatchNorm)}
        self.buffers: Params = {f"{n}.{key}": value for n, m in norms.items() for key, value in m.named_buffers()}
        _bind(module, names)
        self._thread = _ThreadModules(*_split(module, head))
        with torch.no_grad():
            out = self.apply(self.init(0), self.buffers, sample[:1], train=False)
        self.feature_dim: int = out.features.shape[-1]
        self.outputs: int = out.logits.shape[-1]
        self.positions: tuple[int, ...] = tuple(out.logits.shape[1:-1])  # () where a sample has one prediction
        self.logits: int = out.logits[0].numel()  # of a sample

    def init(self, seed: int) -> Params:
        """Initial parameters: the module's own initialisation with this seed, on the CPU. They are cached, so that
        server and clients share the tensors, also under vmap, where a module cannot draw."""
        with _global_generator:
            if seed not in self._initial:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed & ((1 << 63) - 1))
                    drawn = self.make().named_parameters()
                self._initial[seed] = {k: p.detach().to(self._device, self._dtype) for k, p in drawn}
        return dict(self._initial[seed])

    def apply(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        *,
        train: bool,
        mask: Tensor | None = None,
        key: Tensor | None = None,
    ) -> Output:
        """A forward pass; `mask` marks padding and `key` seeds dropout in training mode."""
        with _forward(_Pass(train, mask, key, {**params, **buffers})) as now, self._autocast():
            features = self._thread.body(x)
            logits = self._thread.head(features)
        return Output(logits.to(self._dtype), features.to(self._dtype), {**buffers, **now.updates})

    def apply_head(self, params: Params, buffers: Params, features: Tensor) -> Tensor:
        """The head alone, in evaluation mode, for methods that transform the features first."""
        with _forward(_Pass(train=False, values={**params, **buffers})), self._autocast():
            return self._thread.head(features).to(self._dtype)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self.half else nullcontext()


NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)


def _layers(module: nn.Module, names: dict[int, str]) -> tuple[tuple[str, ...], ...]:
    """Names of parameters by layer. Every module with parameters is a layer, a recurrent one as many as it has layers;
    a normalisation belongs to the layer before it or, if there is none, to the one after it."""
    layers: list[list[str]] = []
    early: list[str] = []
    seen: set[str] = set()
    for m in module.modules():
        for group in _groups(m):
            new = [names[id(p)] for p in group if names[id(p)] not in seen]
            seen.update(new)
            if new and isinstance(m, NORMS):
                (layers[-1] if layers else early).extend(new)
            elif new:
                layers.append([*early, *new])
                early = []
    return tuple(map(tuple, [*layers, early] if early else layers))


def _groups(m: nn.Module) -> Iterable[list[nn.Parameter]]:
    """The direct parameters of a module, by layer for recurrent ones (torch calls them weight_ih_l0, weight_ih_l1,
    ...)."""
    if not isinstance(m, nn.RNNBase):
        return [list(m.parameters(recurse=False))]
    layers: dict[str, list[nn.Parameter]] = {}
    for name, p in m.named_parameters(recurse=False):
        layers.setdefault(name.removesuffix("_reverse").rpartition("_l")[2], []).append(p)
    return layers.values()


class _PassValues(dict[str, Any]):
    """Stands in for a module's `_parameters`: returns the values of the forward pass that this thread is in.

    `torch.func.functional_call` writes them into the module, which then serves one thread at a time, and its search for
    names costs more than a small layer.
    """

    def __init__(self, values: dict[str, Any], names: dict[str, str]) -> None:
        super().__init__(values)
        self.names = names

    def __getitem__(self, key: str) -> Any:
        return _current.forward_pass.values[self.names[key]] if key in self.names else super().__getitem__(key)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_PassValues":
        return _PassValues(self, self.names)


def _bind(module: nn.Module, names: dict[int, str]) -> None:
    """Let the module compute with the parameters and running statistics of the current forward pass."""
    for m in module.modules():
        by_key = {key: names[id(p)] for key, p in m._parameters.items() if p is not None}
        m._parameters = _PassValues(m._parameters, by_key)
        if isinstance(m, MaskedBatchNorm):
            m._buffers = _PassValues(m._buffers, {key: f"{m.name}.{key}" for key in m._buffers})


class _ThreadModules(threading.local):
    """A copy of the modules for every thread, because a module may store things in itself during a pass."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        self.body, self.head = copy.deepcopy((body, head))


def _split(module: nn.Module, head: str) -> tuple[nn.Module, nn.Module]:
    """The body (the module with its head replaced by the identity), and the head."""
    parent, _, name = head.rpartition(".")
    cut = module.get_submodule(head)
    setattr(module.get_submodule(parent), name, nn.Identity())
    return module, cut


def _check(module: nn.Module, head: str, sample: Tensor, dtype: torch.dtype) -> None:
    """The head exists, the model takes the data, nothing is random but nn.Dropout, and the head comes last."""
    names = [name for name, _ in module.named_modules() if name]
    if head not in names:
        raise unknown("head module", head, names)
    sample = sample.cpu()  # draws there show in the state of the CPU generator
    whole = copy.deepcopy(module).to("cpu", dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _check_fit(whole, sample)
        _check_draws(whole, sample)
        _check_head(whole, head, sample)


def _check_fit(whole: nn.Module, sample: Tensor) -> None:
    try:
        whole.train()(sample)
    except Exception as error:  # a module may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"The model does not take samples of shape {tuple(sample.shape[1:])}: {reason}.") from error


def _check_draws(whole: nn.Module, sample: Tensor) -> None:
    keyed, before = copy.deepcopy(whole), torch.random.get_rng_state()
    _replace_layers(keyed)
    with _forward(_Pass(train=True)):
        keyed(sample)
    if not torch.equal(before, torch.random.get_rng_state()):
        raise UserError("The model draws random numbers in its forward pass; use nn.Dropout, which FedLoom can key.")


def _check_head(whole: nn.Module, head: str, sample: Tensor) -> None:
    for p in whole.eval().get_submodule(head).parameters():
        p.normal_()  # the outputs of a head of zeros would hide what follows it
    logits = whole(sample)
    body, last = _split(copy.deepcopy(whole), head)
    try:
        found = last(body(sample))
        same = found.shape == logits.shape and torch.allclose(found, logits, rtol=1e-4, atol=1e-6)
    except Exception:  # operations behind the head may not accept the features
        same = False
    if not same:
        raise UserError(f"The model does something after its head '{head}' (a log-softmax?); the head must come last.")
