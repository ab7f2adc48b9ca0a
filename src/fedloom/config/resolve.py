"""From names and values to the checked configuration of a run, and back.

Config dicts (see `config.files`) from a preset, a file and the command line are combined, then resolved; `describe`
turns a configuration back into a config dict that resolves to it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.config.files import SECTIONS, ConfigDict, check_per_method
from fedloom.config.methods import FROM, find_method, is_place, load_method, load_recorded, place_of
from fedloom.config.settings import SYNONYMS, Settings
from fedloom.core.algorithm import ALGORITHMS, Algorithm
from fedloom.core.errors import UserError, check_path, is_plain_text, nearest, shown
from fedloom.core.federation import Federation
from fedloom.core.registry import Registry
from fedloom.core.settings import build, fields
from fedloom.data.dataset import DATASETS, Dataset
from fedloom.data.partitions import PARTITIONS, Natural, Partition
from fedloom.data.sets.own import Given, ObjectData, OwnData, user_data_path
from fedloom.metrics.registry import usual_metric
from fedloom.models.zoo import MODELS, Model

log = logging.getLogger("fedloom")

AlgorithmLike = str | Algorithm | type[Algorithm]
DatasetLike = Any  # a name, a path, a Dataset, a Federation, or what `ObjectData` takes
ModelLike = str | Model | nn.Module | Callable[[], nn.Module]
SERVER_SHARE = 0.1  # of the samples, for methods that need some at the server
VARIANT = "variant"  # a key that stands for several settings of a method
NOT_SETTINGS = ("data_dir", "head")  # keys of a config dict that are neither settings nor sections
NOUNS = {"algorithm": "method", "dataset": "data set", "partition": "partition", "model": "model"}
REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm": ALGORITHMS, "dataset": DATASETS, "partition": PARTITIONS, "model": MODELS,
}  # fmt: skip
LOCATIONS = ("data_dir", "dataset.path", f"algorithm.{FROM}", "method_files")
MAY_CHANGE = (*LOCATIONS, "actors", "memory")  # when a run is continued


@dataclass(frozen=True)
class Config:
    """The checked configuration of a run."""

    settings: Settings
    algorithm: Algorithm
    dataset: Dataset | Federation
    partition: Partition
    model: Model | nn.Module | Callable[[], nn.Module]
    head: str = "head"
    data_dir: Path | None = None

    def with_seed(self, seed: int) -> Config:
        """The same configuration with another seed."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, seed=seed))


def configure(
    algorithm: AlgorithmLike = "ditto",
    dataset: DatasetLike = "digits",
    partition: str | Partition | None = None,
    model: ModelLike | None = None,
    head: str = "head",
    data_dir: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> Config:
    """Check names and values. A bare key belongs to the run, the method, the data set, the partition or the model,
    whichever has it; `partition.k` names one where two have the same."""
    values = dict(values or {})
    algorithm = find_method(algorithm) if isinstance(algorithm, str) else algorithm
    method = algorithm if isinstance(algorithm, type) else type(algorithm)
    if issubclass(method, Algorithm) and "name" not in vars(method):  # records would call it by another's name
        raise UserError(f"The method {method.__name__} has no name of its own; write name = '...' in its class.")
    if (path := user_data_path(dataset)) is not None or isinstance(dataset, Path):
        dataset, values = OwnData.name, {"dataset.path": path, **values}
    elif not isinstance(dataset, str | Dataset | Federation):
        given = dataset if isinstance(dataset, Given) else Given(dataset)
        dataset, values = ObjectData, {"dataset.given": given, **values}
    if isinstance(dataset, Federation):
        data_class: Any = None
        best: tuple[str, str, dict[str, Any]] = ("mlp", "natural", {"metric": usual_metric(dataset.kind)})
    else:
        data_class = DATASETS[dataset] if isinstance(dataset, str) else dataset
        best = dataset.defaults() if isinstance(dataset, Dataset) else _defaults(data_class, values)
    defaults = dict(best[2])
    model = model if model is not None else best[0]
    partition = partition if partition is not None else best[1]
    of_partition = {key: defaults.pop(key) for key in list(defaults) if "." in key}
    if partition == best[1]:
        values = {**of_partition, **values}
    owners: dict[str, Any] = {
        "algorithm": algorithm,
        "dataset": data_class if isinstance(dataset, str) else dataset,
        "partition": PARTITIONS[partition] if isinstance(partition, str) else partition,
        "model": MODELS[model] if isinstance(model, str) else model,
    }
    configurable = Algorithm | Dataset | Partition | Model
    classes: dict[str, Any] = {"run": Settings}
    classes |= {name: o for name, o in owners.items() if isinstance(o, type) and issubclass(o, configurable)}
    by_section = _by_section(values, classes, owners)
    if VARIANT in by_section.get("algorithm", {}):
        by_section["algorithm"] = _expanded(classes["algorithm"], by_section["algorithm"])
    of_run = by_section.pop("run")
    if _lacks_server_data(algorithm, data_class, {**defaults, **of_run}):
        defaults["server_share"] = SERVER_SHARE
        share = f"a tenth of all samples (server_share={SERVER_SHARE})"
        _say_once(f"{algorithm.name} needs data at the server, so it gets {share}")
    settings = build(Settings, {**defaults, **of_run}, "a run")
    made = {name: build(classes[name], found, f"{name} '{classes[name].name}'") for name, found in by_section.items()}
    folder = None if data_dir is None else Path(data_dir)
    if folder is not None:
        check_path(folder)
    config = Config(settings, **{**owners, **made}, head=head, data_dir=folder)
    return _with_natural_clients(config, asked="clients" in of_run)


def _lacks_server_data(method: Any, dataset: Any, settings: Mapping[str, Any]) -> bool:
    """True if a method needs samples at the server, and neither data nor settings give it any."""
    if not method.needs_server_data or dataset is None or dataset.has_server_data:
        return False
    return "server_share" not in settings and settings.get("pool") != "train"


@functools.cache
def _say_once(text: str) -> None:
    log.warning("%s.", text)


def _with_natural_clients(config: Config, asked: bool) -> Config:
    """The configuration with the number of clients that the data have, if they fix it. Raises a UserError if a user has
    `asked` for another number."""
    data, clients = config.dataset, config.settings.clients
    if isinstance(data, Federation):
        found: int | None = data.clients + data.held_out
    else:
        found = data.natural_clients() if isinstance(config.partition, Natural) else None
    if found is None or found == clients:
        return config
    if asked:
        raise _wrong_clients(data, found, clients)
    return dataclasses.replace(config, settings=dataclasses.replace(config.settings, clients=found))


def _wrong_clients(data: Dataset | Federation, found: int, asked: int) -> UserError:
    name, remedy = "The federation", f"set clients={found}"
    if isinstance(data, Dataset):
        name = (Path(data.path).name or "The data set") if isinstance(data, OwnData) else f"Data set '{data.name}'"
        more = f"{remedy} and subset={asked} to keep {asked} of them"
        remedy = more if asked < found else f"{remedy}, or another partition such as iid"
        remedy = f"set {setting}={asked}, too" if (setting := data.clients_setting) else remedy
    return UserError(f"{name} has {found} clients, not {asked}; {remedy}.")


def _defaults(cls: type[Dataset], values: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Default model, partition and settings of a data set, which may depend on the data set's settings."""
    if cls.defaults is Dataset.defaults:
        return cls.model, cls.partition, cls.usual
    given = {key.removeprefix("dataset."): value for key, value in values.items() if key.startswith("dataset.")}
    given |= {key: value for key, value in values.items() if key in fields(cls)}
    return build(cls, given, f"dataset '{cls.name}'").defaults()


def _expanded(cls: type[Algorithm], given: dict[str, Any]) -> dict[str, Any]:
    """The settings that `variant=...` stands for; settings that are given explicitly take precedence."""
    wanted, rest = given[VARIANT], {key: value for key, value in given.items() if key != VARIANT}
    if not cls.variants:
        raise UserError(f"algorithm '{cls.name}' has no variants.")
    if not isinstance(wanted, str) or wanted not in cls.variants:
        raise UserError(f"variant cannot be '{shown(wanted)}'; {nearest(str(wanted), list(cls.variants))}")
    return {**cls.variants[wanted], **rest}


def _by_section(
    values: Mapping[str, Any], classes: Mapping[str, Any], owners: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The values by section; `classes` are those whose settings can be given, `owners` what is in use, by section."""
    by_section: dict[str, dict[str, Any]] = {name: {} for name in classes}
    for key, value in values.items():  # a later value overrides an earlier one
        section, dot, bare = key.rpartition(".")
        if dot:
            if section not in classes or section == "run":
                raise UserError(
                    f"'{shown(key)}' does not name a section; {nearest(section, [s for s in classes if s != 'run'])}"
                )
            if bare not in fields(classes[section]) and (reason := _whose(bare, {section: owners[section]})):
                raise UserError(f"Unknown setting '{shown(key)}': {reason}")
            by_section[section][bare] = value
            continue
        having = [name for name, cls in classes.items() if key in fields(cls) or _has_variants(key, cls)]
        if not having:
            raise _unknown_setting(key, classes, owners)
        if len(having) > 1:
            options = " or ".join(f"{name}.{key}" for name in having)
            raise UserError(f"'{key}' is a setting of both {' and '.join(having)}; write {options}.")
        by_section[having[0]][key] = value
    return by_section


def _unknown_setting(key: str, classes: Mapping[str, Any], owners: Mapping[str, Any]) -> UserError:
    """The error for a setting that nothing in use has: it names the usual word, who has it, or the nearest one."""
    known = [field for cls in classes.values() for field in fields(cls)]
    if usual := SYNONYMS.get(key.lower()):
        return UserError(f"Unknown setting '{shown(key)}'; did you mean '{usual}'?")
    if reason := _whose(key, owners):
        return UserError(f"Unknown setting '{shown(key)}': {reason}")
    hint = nearest(key, known)
    if hint.startswith("known"):
        hint = "see 'fedloom list settings' and, for those of a method, 'fedloom list algorithms NAME'."
    return UserError(f"Unknown setting '{shown(key)}'; {hint}")


def _whose(key: str, owners: Mapping[str, Any]) -> str | None:
    """To which methods, data sets, ... a setting belongs that none of `owners` has; None if to none at all."""
    having, without, example = [], [], ""
    for section, owner in owners.items():
        registry, noun, name = REGISTRIES[section], NOUNS[section], getattr(owner, "name", "of your own")
        if not isinstance(owner, type) and key in getattr(owner, "__dataclass_fields__", {}):
            return f"the {noun} {name} is given as an object, so set it there, in {type(owner).__name__}(...)."
        if names := [other for other in registry.names() if key in fields(registry[other])]:
            having.append(f"the {noun}{'s' * (len(names) > 1)} {_listed(names, 'and')}")
            without.append(f"the {noun} {name}")
            example = example or (f" (in a comparison as {names[0]}:{key}=VALUE)" if section == "algorithm" else "")
    if not having:
        return None
    belongs = f"it belongs to {_listed(having, 'and')}, not to {_listed(without, 'or')}"
    return f"{belongs}; leave it out, or choose one that has it{example}."


def _listed(words: Sequence[str], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]


def combine(*configs: Mapping[str, Any]) -> ConfigDict:
    """Merge config dicts; later ones take precedence. When another method (data set, ...) is named, the settings of the
    earlier one are dropped. `per_method` has settings by method; a later value of such a setting overrides it."""
    made: ConfigDict = {}
    special: dict[str, dict[str, Any]] = {}
    for config in configs:
        for key, value in config.items():
            if key == "per_method":
                continue
            section, dot, bare = key.partition(".")
            if key not in SECTIONS and not (dot and section in SECTIONS):
                made[key] = value
                _override(special, [key])
                continue
            old = made.get(section, {})
            new = {bare: value} if dot else _section(section, value)
            replaced = "name" in new and "name" in old and new["name"] != old["name"]
            made[section] = new if replaced else {**old, **new}
            for name in new:  # overrides the same key without a section
                made.pop(name, None)
            _override(special, new)
        check_per_method(config.get("per_method", {}), "The configuration")
        for method, values in config.get("per_method", {}).items():
            special[method] = {**special.get(method, {}), **values}
    return {**made, "per_method": special} if any(special.values()) else made


def _section(section: str, value: Any) -> dict[str, Any]:
    if section == "algorithm":
        return _method_section(value)
    if not isinstance(value, str):
        return dict(value)
    path = user_data_path(value) if section == "dataset" else None
    return {"name": value} if path is None else {"name": OwnData.name, "path": path}


def _method_section(value: Any) -> dict[str, Any]:
    """A method that is given by its place has its name in the section, too."""
    section = {"name": value} if isinstance(value, str) else dict(value)
    name = section.get("name")
    if not isinstance(name, str) or not is_place(name):
        return section
    cls = load_method(name)
    place = place_of(cls)
    return {**section, "name": cls.name, **({} if place is None else {FROM: place})}


def _override(special: Mapping[str, dict[str, Any]], names: Iterable[str]) -> None:
    for values in special.values():
        for name in names:
            values.pop(name, None)


def _has_variants(key: str, cls: Any) -> bool:
    return key == VARIANT and bool(getattr(cls, "variants", None))


def resolve(config: Mapping[str, Any]) -> Config:
    """The configuration that a config dict describes."""
    values: dict[str, Any] = {}
    names: dict[str, Any] = {}
    asked = combine(config)
    method = str(asked.get("algorithm", {}).get("name", "ditto"))
    if FROM in asked.get("algorithm", {}):
        load_recorded(method, asked["algorithm"].pop(FROM))  # from now on it is registered
    special = asked.pop("per_method", {})
    for name in special:
        ALGORITHMS[str(name)]  # raises UserError for an unknown one
    asked = combine(asked, special.get(method, {}))
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
        elif key in NOT_SETTINGS:
            names[key] = value
        else:
            values[key] = value
    for key, name in names.items():
        if key in NOT_SETTINGS and name is None:
            continue
        if not isinstance(name, str) or not is_plain_text(name):
            raise UserError(f"{key} must be a word, not {shown(name)!a}.")
    return configure(**{k: v for k, v in names.items() if v is not None}, values=values)


def describe(config: Config) -> ConfigDict:
    """The config dict that resolves to this configuration, unless data or model were Python objects."""
    described: ConfigDict = {}
    for section in SECTIONS:
        thing = getattr(config, section)
        if isinstance(thing, ObjectData):
            described[section] = thing.described()
        elif isinstance(thing, Algorithm | Dataset | Partition | Model):
            described[section] = {"name": thing.name, **_plain(thing)}
            if isinstance(thing, Algorithm) and (place := place_of(type(thing))) is not None:
                described[section][FROM] = place
        else:
            described[section] = {"name": getattr(thing, "__name__", type(thing).__name__), "own": True}
    described |= _plain(config.settings)
    described["data_dir"] = None if config.data_dir is None else str(config.data_dir.absolute())
    if "own" in described["model"]:
        described["head"] = config.head
    return described


def described(section: str, config: Mapping[str, Any]) -> Algorithm | Model:
    """The method or the model of a config dict of `describe`. Other than `resolve`, this needs no data."""
    about = config[section]
    if about.get("own") is True:
        name = about.get("name")
        raise UserError(f"The {section} '{name}' was made in Python; give it to fedloom.load(FOLDER, {section}=...).")
    if FROM in about:
        load_recorded(about["name"], about[FROM])
    known: Any = {"algorithm": ALGORITHMS, "model": MODELS}[section]
    values = {key: value for key, value in about.items() if key not in ("name", FROM)}
    return build(known[about["name"]], values, f"{section} '{about['name']}'")


def _plain(thing: Any) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(thing).items()}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config dict without nesting: `algorithm` is a name, `algorithm.lam` a setting."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            made |= {key if bare == "name" else f"{key}.{bare}": v for bare, v in value.items()}
        else:
            made[key] = value
    return made


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first setting in which two config dicts differ, with both values; the location of data and methods does not
    count, nor does the number of actors."""
    default = _plain(Settings())  # for settings that did not exist when a run was started
    default["clients"] = new.get("clients")  # of a run whose data fix them, see `parse_config`
    a, b = ({**default, **flat(config)} for config in (old, new))
    for key in [*flat(old), *flat(new)]:
        if key not in MAY_CHANGE and a.get(key) != b.get(key):
            return key, a.get(key), b.get(key)
    return None
