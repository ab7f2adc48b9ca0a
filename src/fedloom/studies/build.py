"""From a configuration to a task: data, model, and a check that everything fits together."""

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.cluster.run import check as check_engine
from fedloom.config.resolve import Config
from fedloom.config.settings import Settings
from fedloom.config.sizes import parse_bytes
from fedloom.core.algorithm import Algorithm
from fedloom.core.authors import is_own
from fedloom.core.errors import UserError, plural, shown
from fedloom.core.federation import Federation
from fedloom.core.keys import rng
from fedloom.core.optimizers import Optimizer, Schedule
from fedloom.core.privacy import UploadPrivacy
from fedloom.core.server_optimizer import ServerOptimizer
from fedloom.core.settings import fields
from fedloom.core.targets import Number
from fedloom.core.task import Task
from fedloom.data.dataset import Dataset
from fedloom.data.divide import divide, hold_out, hold_out_server, validated
from fedloom.data.limits import memory_limit
from fedloom.data.sets.own import OwnData
from fedloom.device.memory import available_memory, memory_of_process
from fedloom.engine.contract_check import check_contract
from fedloom.metrics.registry import find_metric
from fedloom.models.zoo import Model, Shape
from fedloom.nn.network import Network

log = logging.getLogger("fedloom")

NO_VALIDATION = "Early stopping needs validation data, but no client has any; set split=0.7/0.1/0.2."
RARE = 5  # a class is rare if it has less than a fifth of an even share of the samples
LEAST_MEMORY = 100 << 20  # bytes that even the smallest run needs beside the program
COPIES = 4  # of a model in memory: the global one, a client's, its gradient, and one to check it


def find_device(name: str) -> torch.device:
    """The device of a name; `auto` is a CUDA GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device cannot be '{name}'; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device cannot be '{name}'; use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise UserError(f"device '{name}' is not there: this machine has {count} CUDA devices; use device=cpu.")
    return device


def memory_of_run(config: Config) -> tuple[torch.device, int | None]:
    """The device of a run, and how many bytes of its memory the run may take, or None."""
    s = config.settings
    device = find_device(s.device)
    if s.memory is None:
        return device, None
    limit = parse_bytes("memory", s.memory)
    if s.engine == "ray":
        raise UserError("memory limits a run in one process; leave it out with engine=ray, or use fewer actors.")
    taken = memory_of_process()
    if device.type == "cpu" and limit < taken + LEAST_MEMORY:
        raise UserError(
            f"memory={s.memory} is too little: the program takes {taken / 1e6:.0f} MB before it has any data; "
            f"give it {(taken + LEAST_MEMORY) / 1e6:.0f} MB or more."
        )
    return device, limit


def make_data(config: Config) -> Federation:
    """Load the data and divide them among clients, on the device of the run."""
    s = config.settings
    device, dtype = find_device(s.device), torch.float64 if s.dtype == "float64" else torch.float32
    if s.dtype == "tf32" and device.type != "cuda":
        raise UserError("dtype=tf32 is a format of NVIDIA GPUs, but this run is on the CPU; use dtype=float32.")
    notes: tuple[str, ...] = ()
    if isinstance(config.dataset, Federation):
        data = config.dataset
    else:
        raw = config.dataset.load(config.data_dir, s.clients, s.partition_seed)
        raw = replace(raw, class_names=raw.class_names or config.dataset.class_names)
        data = divide(
            raw, config.partition, s.clients,
            split=s.split, source=s.pool, subset=s.subset, server_share=s.server_share, seed=s.partition_seed,
            stratify=s.stratify,
        )  # fmt: skip
        if s.holdout_clients and raw.server is not None:
            notes = ("The data set gives samples of all clients to the server, also of those who are held out",)
    if s.holdout_clients:
        data = hold_out(data, s.holdout_clients, s.partition_seed)
    data = hold_out_server(validated(data), s.dcs_holdout)
    for note in (*data.notes, *notes, *_rare_classes(config, data)):
        log.warning("%s.", note)
    return data.to(device, dtype)


def _rare_classes(config: Config, data: Federation) -> list[str]:
    """A note on classes of a user's data that are so rare that accuracy hides how well they are served."""
    s = config.settings
    named = isinstance(config.dataset, Dataset) and not isinstance(config.dataset, OwnData)
    if named or data.kind != "classes" or data.sequences or s.metric != "accuracy" or s.class_weight != "none":
        return []
    counts = data.labels().sum(0)
    rare = [c for c in np.flatnonzero(counts) if counts[c] * RARE * (counts > 0).sum() < counts.sum()]
    if not rare:
        return []
    names = data.class_names or tuple(map(str, range(data.classes)))
    some = ", ".join(f"{shown(names[c])} ({counts[c]} of {counts.sum()} samples)" for c in rare[:3])
    return [
        f"Rare classes, of which accuracy tells little: {some}{', ...' * (len(rare) > 3)}; rank by metric=auprc or "
        "balanced_accuracy, and try class_weight=balanced"
    ]


def make_task(config: Config, data: Federation | None = None, complete: bool = True) -> Task:
    """The task of a configuration. `data` may be given if they were already divided; if they are not `complete`,
    because those of other clients are elsewhere, sizes are not checked."""
    s = config.settings
    data = data if data is not None else make_data(config)
    _check_targets(config.algorithm, s, data)
    if isinstance(data.targets, Number):
        data = replace(data, targets=replace(data.targets, huber=s.huber))
    task = Task(
        data, _network(config, data), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, clip=s.clip,
        batch_size=min(s.batch_size, _most_samples(data)), epochs=s.local_epochs, rounds=s.rounds,
        participation=s.participation, participation_low=s.participation_low, trim=_trim(config.algorithm, s),
        class_weights=s.class_weight == "balanced", privacy=upload_privacy(s),
        **optimization(s),
    )  # fmt: skip
    if task.privacy is not None and config.algorithm.no_privacy:
        why = config.algorithm.no_privacy
        raise UserError(f"{config.algorithm.name} cannot have dp_clip, because {why}; leave out one of them.")
    if data.sequences and (s.class_weight != "none" or s.metric != "accuracy"):
        raise UserError("class_weight and metric are for samples with one class, but these have one at every position.")
    find_metric(s.metric, data.kind)  # raises UserError for an unknown one
    if s.early_stopping is None and s.min_delta:
        raise UserError(f"min_delta={s.min_delta:g} belongs to early stopping; set early_stopping=20, for example.")
    if s.early_stopping is not None and not data.splits["val"].sizes[: data.clients].any():
        raise UserError(NO_VALIDATION)
    if complete:
        check_engine(s, task.clients)
        check(config.algorithm, task)
    if s.eval_clients is not None and s.eval_clients > task.clients:
        raise UserError(f"eval_clients asks for {s.eval_clients} clients, but there are {task.clients}.")
    return task


def upload_privacy(s: Settings) -> UploadPrivacy | None:
    """Differential privacy of uploads, if it is asked for."""
    if s.dp_clip is None:
        for name in ("dp_noise", "dp_delta"):
            if getattr(s, name) is not None:
                raise UserError(f"{name}={getattr(s, name):g} belongs to dp_clip, the norm of updates; set it, too.")
        return None
    given = {"noise": s.dp_noise, "delta": s.dp_delta}
    return UploadPrivacy(s.dp_clip, **{name: value for name, value in given.items() if value is not None})


def optimization(s: Settings) -> dict[str, Any]:
    """The optimisers of a task, of its clients and its server, and the schedule of the clients' learning rate."""
    if s.nesterov and (s.optimizer != "sgd" or not s.momentum):
        raise UserError("nesterov=true is a kind of momentum of optimizer=sgd; set momentum=0.9, for example.")
    if s.optimizer != "sgd" and s.momentum:
        raise UserError(f"momentum is for optimizer=sgd; {s.optimizer} has adam_betas instead, so set momentum=0.")
    if s.lr_warmup >= s.rounds > 1 or (s.lr_warmup > 1 and s.rounds == 1):
        raise UserError(f"lr_warmup={s.lr_warmup} must be less than the {plural(s.rounds, 'round')} of the run.")
    server = None
    if s.server_optimizer != "none":
        usual = 1.0 if s.server_optimizer == "momentum" else 0.01
        lr = usual if s.server_lr is None else s.server_lr
        server = ServerOptimizer(s.server_optimizer, lr, s.server_betas, s.server_tau)
    elif s.server_lr is not None:
        raise UserError(
            f"server_lr={s.server_lr:g} belongs to a server optimizer; set server_optimizer=momentum or adam."
        )
    return {
        "server_optimizer": server,
        "optimizer": Optimizer(s.optimizer, s.nesterov, s.adam_betas, s.adam_eps),
        "schedule": Schedule(s.lr_schedule, s.rounds, s.lr_warmup, s.lr_step, s.lr_gamma),
    }


def _check_targets(alg: Algorithm, s: Settings, data: Federation) -> None:
    """Raise UserError if a method or a setting does not fit what is predicted."""
    what = {"classes": "one of several classes", "labels": "several labels", "number": "a number"}
    if data.kind not in alg.targets:
        fits = " or ".join(what[kind] for kind in alg.targets)
        raise UserError(
            f"{alg.name} predicts {fits}, but the target of these data is {what[data.kind]}; 'fedloom list algorithms' "
            "says what each method predicts."
        )
    if data.kind == "number" and s.class_weight != "none":
        raise UserError("class_weight is for classes and labels, but the target of these data is a number.")
    if data.kind != "number" and s.huber is not None:
        raise UserError(f"huber is a loss for numbers, but the target of these data is {what[data.kind]}.")


def _trim(alg: Algorithm, s: Settings) -> float:
    """The share of values that the server's averages leave out at either end."""
    if s.trim is not None and s.aggregation != "trimmed_mean":
        raise UserError(f"trim={s.trim:g} belongs to aggregation=trimmed_mean, but aggregation is {s.aggregation}.")
    if s.aggregation != "mean" and not alg.averages and not _has_no_server(alg):
        raise UserError(
            f"The server of {alg.name} does not average uploads, so aggregation cannot be {s.aggregation}; use mean, "
            "and clip_updates=1 against large updates."
        )
    return {"mean": 0.0, "median": 0.5, "trimmed_mean": 0.2 if s.trim is None else s.trim}[s.aggregation]


def _most_samples(data: Federation) -> int:
    """Samples of the largest split of a client, or of the server: no batch is larger, whatever was asked for."""
    sizes = [int(rows.sizes.max(initial=1)) for rows in data.splits.values()]
    return max(*sizes, 0 if data.server is None else len(data.server))


def eval_client_ids(s: Settings, data: Federation) -> np.ndarray | None:
    """Ids of the clients to evaluate, or None for all."""
    if s.eval_clients is None or s.eval_clients > data.clients:
        return None
    return rng("eval", s.partition_seed).choice(data.clients, s.eval_clients, replace=False)


def eval_unseen_ids(s: Settings, data: Federation) -> np.ndarray | None:
    """Ids of the held-out clients to evaluate, or None for all."""
    if s.eval_clients is None or s.eval_clients >= data.held_out:
        return None
    return data.clients + rng("eval", s.partition_seed, 1).choice(data.held_out, s.eval_clients, replace=False)


def _network(config: Config, data: Federation) -> Network:
    rows = data.splits["train"].flat[:2]
    sample = data.prepare(data.x[rows])
    if len(sample) == 1:
        sample = torch.cat([sample, sample])
    shape, classes, vocab = tuple(sample.shape[1:]), data.classes, data.token_ids()
    model, half = config.model, config.settings.dtype == "bf16"
    if isinstance(model, Model):
        _check_size(model, shape, classes, vocab, data)
    make, head = module_maker(model, config.head, shape, classes, vocab)
    return Network(make, head, sample, data.dtype, half)


def module_maker(
    model: Model | nn.Module | Callable[[], nn.Module], head: str, shape: Shape, classes: int, vocab: int | None
) -> tuple[Callable[[], nn.Module], str]:
    """A function that builds the architecture, and the name of its head."""
    if isinstance(model, nn.Module):  # its parameters are everybody's initial ones, whatever the seed
        return lambda: copy.deepcopy(model), head
    if isinstance(model, Model):
        return lambda: model.build(shape, classes, vocab), "head"
    return model, head


def _check_size(model: Model, shape: Shape, classes: int, vocab: int | None, data: Federation) -> None:
    """Raise UserError if a model is too large for memory: a run needs it at least COPIES times."""
    try:
        with torch.device("meta"):  # on which tensors take no memory
            count = sum(p.numel() for p in model.build(shape, classes, vocab).parameters())
    except (RuntimeError, TypeError, ValueError) as error:
        if "overflow" not in str(error):  # of the number of bytes
            return  # another package's model, which needs values to be built
        raise UserError(
            f"Model '{model.name}' is too large for any memory; make it smaller, see {_settings(model)}."
        ) from None
    size = COPIES * count * data.dtype.itemsize
    free = 2 * memory_limit() if data.device.type == "cpu" else available_memory(data.device)
    if size > free:
        raise UserError(
            f"Model '{model.name}' with {count} parameters needs {size / 2**30:.1f} GiB in all, but {free / 2**30:.1f} "
            f"GiB are free; make it smaller, see {_settings(model)}."
        )


def _settings(model: Model) -> str:
    return ", ".join(fields(type(model))) or f"fedloom list models {model.name}"


def _check_server_optimizer(alg: Algorithm, task: Task) -> None:
    if task.server_optimizer is None or _has_no_server(alg) or (alg.averages and not alg.server_step):
        return
    why = alg.server_step or "it does not average uploads"
    raise UserError(
        f"The server of {alg.name} cannot step by {task.server_optimizer.kind}, because {why}; set "
        "server_optimizer=none."
    )


def _has_no_server(alg: Algorithm) -> bool:
    """True for Local, which is part of every comparison: settings of the server do not matter to it."""
    return type(alg).aggregate is Algorithm.aggregate


def check(alg: Algorithm, task: Task) -> None:
    """Raise UserError for everything about a method and a task that can be wrong and is known before training."""
    n, ratio = task.clients, task.participation
    tests = task.data.splits["test"].sizes
    if not tests[:n].sum():
        raise UserError("No client has test samples, so nothing could be evaluated.")
    if task.data.held_out and not tests[n:].sum():
        raise UserError("No client that is held out has test samples; hold out others, or set holdout_clients=0.")
    if task.network.outputs < task.classes:
        raise UserError(f"The model has {task.network.outputs} outputs, but the data has {task.classes} classes.")
    if task.data.kind != "classes" and task.network.outputs != task.classes:
        raise UserError(f"The model has {task.network.outputs} outputs, but it needs {task.classes}, one per target.")
    made, wanted = task.network.positions, tuple(task.data.y.shape[1:]) if task.data.sequences else ()
    if made != wanted:
        say = [f"a label at each of {shape[0]} positions" if shape else "one label" for shape in (made, wanted)]
        other = "lstm_so" if wanted else "lstm_shakes" if task.data.x.dtype == torch.int64 else "mlp"
        raise UserError(f"The model predicts {say[0]} of a sample, but the data has {say[1]}; use one such as {other}.")
    if ratio > 1 and ratio != int(ratio):
        raise UserError(f"participation must be a share up to 1 or a whole number of clients, not {ratio:g}.")
    if ratio > n:
        raise UserError(f"participation asks for {ratio:g} clients, but there are {n}; use a share such as 0.5.")
    if task.participation_low is not None and task.participation_low > ratio:
        raise UserError(f"participation_low={task.participation_low:g} is above participation={ratio:g}; set either.")
    if task.participation_low is not None and ratio > 1:
        raise UserError(f"participation_low is a share, so participation must be one, too, not {ratio:g} clients.")
    everyone = math.floor(ratio * n + 1e-9) == n if ratio <= 1 else ratio == n
    if not alg.partial and not (everyone and task.participation_low is None):
        raise UserError(f"{alg.name} needs all clients in every round; set participation=1.")
    if alg.needs_server_data and task.data.server is None:
        raise UserError(f"{alg.name} needs data at the server; set server_share=0.1 or pool=train.")
    if alg.needs_split and not task.network.body and not getattr(alg, "allow_degenerate", False):
        local = ", or set allow_degenerate=true to run it as Local" if hasattr(alg, "allow_degenerate") else ""
        why = f"{alg.name} shares the body of the model, but this model is a single layer"
        raise UserError(f"{why}; use another model{local}.")
    small = int(task.data.splits["train"].sizes.min())
    need = alg.min_samples(task)
    if small < need:
        raise UserError(f"{alg.name} needs {need} training samples per client, but one has {small}; use fewer clients.")
    _check_server_optimizer(alg, task)
    alg.check(task)
    if is_own(type(alg)):  # it may have mistakes that FedLoom's tests would have found
        check_contract(alg, task)
    _check_batch_norm(alg, task)


def _check_batch_norm(alg: Algorithm, task: Task) -> None:
    """BatchNorm has no variance of a single sample, so batches of one are skipped in training."""
    if not task.network.buffers:
        return
    for phase in (*alg.phases(task), *alg.adapt(task)):
        if phase.train and (phase.batch or task.batch_size) == 1:
            raise UserError("BatchNorm cannot train on batches of one sample; use a batch_size of 2 or more.")
    small = np.flatnonzero(task.data.splits["train"].sizes == 1).tolist()
    if small:
        names = [task.data.client_names[i] if task.data.client_names else str(i) for i in small[:10]]
        listed = ", ".join(names) + ", ..." * (len(small) > 10)
        log.warning("BatchNorm cannot train on one sample, so these clients do not train: %s.", listed)


def check_more_rounds(alg: Algorithm, task: Task, before: int | None, path: Path) -> None:
    """Raise UserError if the run at a path is to be given more rounds than it had before, but its method depends on
    their number."""
    if before is None or before == task.rounds:
        return
    why = "the cosine schedule of the learning rate" if task.schedule.kind == "cosine" else ""
    if why := why or alg.depends_on_rounds(replace(task, rounds=before)):
        raise UserError(
            f"{alg.name} cannot be given more than the {plural(before, 'round')} that {path} started with, because "
            f"{why} depends on their number; start a new run with rounds={task.rounds}."
        )
