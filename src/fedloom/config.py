"""What was asked for, checked: from names and values, a file or a preset to the configuration of a run, and back.

A *request* is a plain mapping, as in a YAML file: the settings of a run by name, and for `algorithm`, `dataset`,
`partition` and `model` a name or a mapping of a name and settings. Requests are combined (a preset, a file, options of
the command line), then resolved; `describe` turns a configuration back into a request that resolves to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from torch import nn

from fedloom import __version__
from fedloom.core.contract import ALGORITHMS, Algorithm
from fedloom.core.errors import UserError, nearest, unknown
from fedloom.core.federation import Federation
from fedloom.core.settings import build, fields, setting
from fedloom.data.partitions import PARTITIONS, Partition
from fedloom.data.pool import DATASETS, Dataset
from fedloom.data.sets.own import OwnData, own_path
from fedloom.models.zoo import MODELS, Model

Request = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What every run has, whatever the method, data set, partition and model."""

    clients: int = setting(20, "N, number of clients (where the data set leaves it open)", low=1)
    rounds: int = setting(50, "T, communication rounds", low=1)
    participation: float = setting(1.0, "share of clients in a round, or their number if above 1", above=0)
    lr: float = setting(0.05, "eta, local learning rate", above=0)
    momentum: float = setting(0.0, "momentum of local SGD", low=0, high=0.9999)
    weight_decay: float = setting(0.0, "weight decay of local SGD", low=0)
    clip: float | None = setting(None, "gradient norm is clipped to this", above=0)
    batch_size: int = setting(10, "B, samples in a batch", low=1)
    local_epochs: int = setting(1, "E, passes over a client's data in a round", low=1)
    seed: int = setting(0, "of initial model, client sampling, batches", low=0)
    partition_seed: int = setting(1, "of the partition; the same for all seeds by default", low=0)
    split: tuple[float, float, float] = setting((0.7, 0.1, 0.2), "train/validation/test shares of a client's data")
    pool: Literal["merged", "train", "separate"] = setting("merged", "what is divided among clients")
    subset: int | None = setting(None, "keep so many clients of the partition, drawn at random", low=1)
    server_share: float = setting(0.0, "share of the samples that goes to the server (D_CS)", low=0, high=0.9)
    eval_every: int = setting(1, "rounds between evaluations", low=1)
    eval_clients: int | None = setting(None, "evaluate a fixed random sample of so many clients, not all", low=1)
    holdout_clients: float = setting(0.0, "share (or number, from 1 on) of the clients kept out of training", low=0)
    join_rounds: int = setting(1, "rounds in which a held-out client takes part to be counted as joined", low=1)
    dtype: Literal["float32", "float64", "tf32", "bf16"] = setting(
        "float32", "precision; tf32 and bf16 round inside products, of float32, to be faster on a GPU"
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    deterministic: bool = setting(False, "on a GPU, use only algorithms that give the same bits every time")
    engine: Literal["vectorized", "reference"] = setting("vectorized", "who runs the clients")
    plan: Literal["auto", "stacked", "stacked-eager", "per-client"] = setting(
        "auto", "how the vectorized engine does it (eager: without traces and graphs)"
    )
    store: Literal["auto", "memory", "disk"] = setting("auto", "where the clients' private state is kept")
    checkpoint_every: int | None = setting(None, "rounds between checkpoints [by time: 5 % of it at most]", low=1)


SECTIONS = ("algorithm", "dataset", "partition", "model")
VARIANT = "variant"  # a key that stands for several settings of a method
BESIDE = ("data_dir", "head")  # of a request, neither settings nor sections
FORMAT = 1  # of run directories and their config.yaml


@dataclass(frozen=True)
class Config:
    """Everything that was chosen, checked."""

    settings: Settings
    algorithm: Algorithm
    dataset: Dataset | Federation
    partition: Partition
    model: Model | nn.Module | Callable[[], nn.Module]
    head: str = "head"
    data_dir: Path | None = None

    def with_seed(self, seed: int) -> Config:
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, seed=seed))


def configure(
    algorithm: str | Algorithm | type[Algorithm] = "ditto",
    dataset: str | Path | Dataset | Federation = "digits",
    partition: str | Partition | None = None,
    model: str | Model | nn.Module | Callable[[], nn.Module] | None = None,
    head: str = "head",
    data_dir: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> Config:
    """Check names and values. A bare key belongs to the run, the method, the data set, the partition or the model,
    whichever has it; `partition.k` names one where two have the same."""
    values = dict(values or {})
    method = algorithm if isinstance(algorithm, type) else type(algorithm)
    if issubclass(method, Algorithm) and "name" not in vars(method):  # records would call it by another's name
        raise UserError(f"The method {method.__name__} has no name of its own; write name = '...' in its class.")
    if (path := own_path(dataset)) is not None or isinstance(dataset, Path):
        dataset, values = OwnData.name, {"dataset.path": path, **values}
    if isinstance(dataset, Federation):
        data_class: Any = None
        best: tuple[str, str, dict[str, Any]] = ("mlp", "natural", {})
    else:
        data_class = DATASETS[dataset] if isinstance(dataset, str) else type(dataset)
        best = _defaults(data_class, values) if isinstance(dataset, str) else dataset.defaults()
    usual = dict(best[2])
    model = model if model is not None else best[0]
    partition = partition if partition is not None else best[1]
    own = {key: usual.pop(key) for key in list(usual) if "." in key}  # of the data set's own partition
    if partition == best[1]:
        values = {**own, **values}
    owners: dict[str, Any] = {
        "algorithm": ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm,
        "dataset": data_class if isinstance(dataset, str) else dataset,
        "partition": PARTITIONS[partition] if isinstance(partition, str) else partition,
        "model": MODELS[model] if isinstance(model, str) else model,
    }
    configurable = Algorithm | Dataset | Partition | Model
    classes: dict[str, Any] = {"run": Settings}
    classes |= {name: o for name, o in owners.items() if isinstance(o, type) and issubclass(o, configurable)}
    sorted_ = _sort(values, classes)
    if VARIANT in sorted_.get("algorithm", {}):
        sorted_["algorithm"] = _expanded(classes["algorithm"], sorted_["algorithm"])
    settings = build(Settings, {**usual, **sorted_.pop("run")}, "a run")
    made = {name: build(classes[name], found, f"{name} '{classes[name].name}'") for name, found in sorted_.items()}
    folder = None if data_dir is None else Path(data_dir)
    return Config(settings, **{**owners, **made}, head=head, data_dir=folder)


def _defaults(cls: type[Dataset], values: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Model, partition and usual settings of a data set, which may depend on its own settings."""
    if cls.defaults is Dataset.defaults:
        return cls.model, cls.partition, cls.usual
    mine = {key.removeprefix("dataset."): value for key, value in values.items() if key.startswith("dataset.")}
    mine |= {key: value for key, value in values.items() if key in fields(cls)}
    return build(cls, mine, f"dataset '{cls.name}'").defaults()


def _expanded(cls: type[Algorithm], given: dict[str, Any]) -> dict[str, Any]:
    """`variant=code` stands for several settings; those that are given beside it count."""
    wanted, rest = given[VARIANT], {key: value for key, value in given.items() if key != VARIANT}
    if not cls.variants:
        raise UserError(f"algorithm '{cls.name}' has no variants.")
    if wanted not in cls.variants:
        raise UserError(f"variant cannot be '{wanted}'; {nearest(str(wanted), list(cls.variants))}")
    return {**cls.variants[wanted], **rest}


def _sort(values: Mapping[str, Any], classes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sorted_: dict[str, dict[str, Any]] = {name: {} for name in classes}
    for key, value in values.items():  # what comes later counts
        section, dot, bare = key.rpartition(".")
        if dot:
            if section not in classes or section == "run":
                raise UserError(
                    f"'{key}' does not name a section; {nearest(section, [s for s in classes if s != 'run'])}"
                )
            sorted_[section][bare] = value
            continue
        having = [name for name, cls in classes.items() if key in fields(cls) or _varies(key, cls)]
        if not having:
            known = [field for cls in classes.values() for field in fields(cls)]
            raise UserError(f"Unknown setting '{key}'; {nearest(key, known)}")
        if len(having) > 1:
            options = " or ".join(f"{name}.{key}" for name in having)
            raise UserError(f"'{key}' is a setting of both {' and '.join(having)}; write {options}.")
        sorted_[having[0]][key] = value
    return sorted_


def combine(*requests: Mapping[str, Any]) -> Request:
    """One request; what comes later counts. Settings of a method that another name replaces go with it. `per_method`
    has settings for whichever method runs; a later request that gives such a setting overrules it."""
    made: Request = {}
    special: dict[str, dict[str, Any]] = {}
    for request in requests:
        for key, value in request.items():
            if key == "per_method":
                continue
            section, dot, bare = key.partition(".")
            if key not in SECTIONS and not (dot and section in SECTIONS):
                made[key] = value
                _overrule(special, [key])
                continue
            old = made.get(section, {})
            new = {bare: value} if dot else _section(section, value)
            replaced = "name" in new and "name" in old and new["name"] != old["name"]
            made[section] = new if replaced else {**old, **new}
            for name in new:  # what was said before without naming a section is overruled
                made.pop(name, None)
            _overrule(special, new)
        for method, values in request.get("per_method", {}).items():
            special[method] = {**special.get(method, {}), **values}
    return {**made, "per_method": special} if any(special.values()) else made


def _section(section: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        return dict(value)
    path = own_path(value) if section == "dataset" else None
    return {"name": value} if path is None else {"name": OwnData.name, "path": path}


def _overrule(special: Mapping[str, dict[str, Any]], names: Iterable[str]) -> None:
    for values in special.values():
        for name in names:
            values.pop(name, None)


def _varies(key: str, cls: Any) -> bool:
    return key == VARIANT and bool(getattr(cls, "variants", None))


def resolve(request: Mapping[str, Any]) -> Config:
    """The configuration that a request asks for."""
    values: dict[str, Any] = {}
    names: dict[str, Any] = {}
    asked = combine(request)
    method = str(asked.get("algorithm", {}).get("name", "ditto"))
    asked = combine(asked, asked.pop("per_method", {}).get(method, {}))
    for key, value in sorted(asked.items(), key=lambda item: item[0] not in SECTIONS):
        if key in SECTIONS:
            if value.get("own") is True:
                raise UserError(
                    f"The {key} '{value.get('name')}' was made in Python; continue there, with fedloom.run(..., "
                    "out=FOLDER, resume=True)."
                )
            if "name" in value:
                names[key] = value["name"]
            values |= {f"{key}.{bare}": v for bare, v in value.items() if bare != "name"}
        elif key in BESIDE:
            names[key] = value
        else:
            values[key] = value
    for key, name in names.items():
        if not isinstance(name, str) and not (key in BESIDE and name is None):
            raise UserError(f"{key} must be a word, not '{name}'.")
    return configure(**{k: v for k, v in names.items() if v is not None}, values=values)


def describe(config: Config) -> Request:
    """The request that resolves to this configuration, unless data or model were objects."""
    described: Request = {}
    for section in SECTIONS:
        thing = getattr(config, section)
        if isinstance(thing, Algorithm | Dataset | Partition | Model):
            described[section] = {"name": thing.name, **_plain(thing)}
        else:
            described[section] = {"name": getattr(thing, "__name__", type(thing).__name__), "own": True}
    described |= _plain(config.settings)
    described["data_dir"] = None if config.data_dir is None else str(config.data_dir.absolute())
    if "own" in described["model"]:
        described["head"] = config.head
    return described


def _plain(thing: Any) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(thing).items()}


def flat(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request without levels: `algorithm` is a name, `algorithm.lam` a setting."""
    made: dict[str, Any] = {}
    for key, value in request.items():
        if isinstance(value, Mapping):
            made |= {key if bare == "name" else f"{key}.{bare}": v for bare, v in value.items()}
        else:
            made[key] = value
    return made


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first setting in which two described configurations differ (where the data lie does not matter)."""
    usual = _plain(Settings())  # of a setting that was not there when a run was started
    a, b = ({**usual, **flat(request)} for request in (old, new))
    for key in [*flat(old), *flat(new)]:
        if key not in ("data_dir", "dataset.path") and a.get(key) != b.get(key):
            return key, a.get(key), b.get(key)
    return None


def read_request(path: Path) -> Request:
    """A request from a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file; a configuration is YAML such as 'lr: 0.1'.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}).") from None
    return {key: value for key, value in parse_request(text, str(path)).items() if key != "about"}


class _Loader(yaml.SafeLoader):
    """YAML lets a key stand twice; the one that does not count is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"'{key}' stands twice")
        return super().construct_mapping(node, deep)


def parse_request(text: str, source: str) -> Request:
    try:
        found = yaml.load(text, _Loader)
    except UserError as error:
        raise UserError(f"{source} is not clear: {error}.") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{source} is not valid YAML{where}; a configuration has lines such as 'lr: 0.1'.") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError(f"{source} must hold settings such as 'lr: 0.1', not {_kind(found)}.")
    check_format(found.pop("fedloom", None), source)
    for key, value in found.items():
        if not isinstance(key, str):
            raise UserError(f"{source} has '{key}' where the name of a setting should be.")
        if key in SECTIONS and not isinstance(value, str | dict):
            raise UserError(f"{source} must give {key} as a name or with settings below it, not as {_kind(value)}.")
        if isinstance(value, dict) and key not in (*SECTIONS, "per_method"):
            raise UserError(f"{source} has settings below '{key}'; {nearest(key, (*SECTIONS, 'per_method'))}")
    _check_per_method(found.get("per_method", {}), source)
    return found


def _check_per_method(special: Any, source: str) -> None:
    if not isinstance(special, dict):
        raise UserError(f"{source} must give per_method as methods with settings below them, not as {_kind(special)}.")
    for method, values in special.items():
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise UserError(f"{source} must give settings below '{method}' in per_method, not {_kind(values)}.")


def check_format(header: Any, source: str) -> None:
    """`header` says which FedLoom wrote a file, if one did."""
    written = header.get("format") if isinstance(header, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise UserError(
            f"{source} was written by a newer FedLoom (format {written}, this one reads {FORMAT}); update FedLoom."
        )


def to_yaml(config: Mapping[str, Any]) -> str:
    """A described configuration as the text of a file."""
    header = {"fedloom": {"version": __version__, "format": FORMAT}}
    return yaml.safe_dump({**header, **config}, sort_keys=False, allow_unicode=True)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a word", bool: "true or false", type(None): "nothing"}.get(type(value), f"'{value}'")


def presets() -> dict[str, Request]:
    """Settings that belong together, by name; each says in `about` what it is."""
    found: dict[str, Request] = {}
    for folder in sorted(resources.files("fedloom.presets").iterdir(), key=lambda f: f.name):
        if folder.is_dir():
            for file in sorted(folder.iterdir(), key=lambda f: f.name):
                if file.name.endswith(".yaml"):
                    name = f"{folder.name}/{file.name.removesuffix('.yaml')}"
                    found[name] = parse_request(file.read_text(encoding="utf-8"), f"preset {name}")
    return found


def preset(name: str) -> Request:
    known = presets()
    if name not in known:
        raise unknown("preset", name, known)
    return {k: v for k, v in known[name].items() if k != "about"}
