"""The entries that `fedloom list` prints, as plain data."""

import typing
from collections.abc import Callable
from typing import Any, Literal

from fedloom.config.files import preset, presets
from fedloom.config.methods import find_method
from fedloom.config.resolve import VARIANT, flat
from fedloom.config.settings import Settings
from fedloom.core.algorithm import ALGORITHMS, Algorithm
from fedloom.core.errors import unknown
from fedloom.core.kinds import KINDS as TARGETS
from fedloom.core.registry import Registry
from fedloom.core.settings import fields
from fedloom.data.dataset import DATASETS, Dataset
from fedloom.data.partitions import PARTITIONS
from fedloom.models.zoo import MODELS, Model


def catalog(kind: str, name: str | None = None) -> list[dict[str, Any]]:
    """All entries of a kind ("algorithms", "datasets", "models", "partitions", "presets" or "settings"), or the one
    with a name; a method may also be given as a file."""
    if kind == "presets":
        return _presets(name)
    if kind == "settings":
        known = _settings(Settings)
        if name is not None and name not in known:
            raise unknown("setting", name, known)
        return [{"name": n, **about} for n, about in known.items() if name in (None, n)]
    if kind == "algorithms" and name is not None:
        cls = find_method(name)
        return [{"name": cls.name, **_algorithm(cls)}]
    registry, describe = KINDS[kind]
    return [{"name": n, **describe(registry[n])} for n in ([name] if name is not None else registry.names())]


def _settings(cls: type) -> dict[str, dict[str, Any]]:
    """Default and meaning of every setting of a class, and its choices if it is one of some words."""
    hints, found = typing.get_type_hints(cls), {}
    for name, field in fields(cls).items():
        found[name] = {"default": field.default, "about": field.metadata.get("about", "")}
        if typing.get_origin(hints[name]) is Literal:
            found[name]["choices"] = list(typing.get_args(hints[name]))
    return found


def _algorithm(cls: type[Algorithm]) -> dict[str, Any]:
    return {
        "source": cls.source,
        "year": cls.year or None,
        "shared": cls.shared,
        "private": cls.private,
        "personal_model": not cls.pre_is_global,
        "global_model": cls.global_model is not Algorithm.global_model,
        "targets": "all" if cls.targets == TARGETS else " or ".join(cls.targets),
        "paper": cls.paper,
        "settings": {**_settings(cls), **_variants(cls)},
    }


def _variants(cls: type[Algorithm]) -> dict[str, dict[str, Any]]:
    """The setting `variant` of a method that has variants."""
    variants = [
        f"{name}: {', '.join(f'{k}={v}' for k, v in changes.items())}" for name, changes in cls.variants.items()
    ]
    return {VARIANT: {"default": None, "about": f"for {'; '.join(variants)}"}} if variants else {}


def _dataset(cls: type[Dataset]) -> dict[str, Any]:
    facts = {"about": cls.about, "size": cls.size, "model": cls.model, "partition": cls.partition}
    return {**facts, "licence": cls.licence, "usual": cls.usual, "settings": _settings(cls)}


def _model(cls: type[Model]) -> dict[str, Any]:
    return {"takes": cls.takes, "about": cls.about, "source": cls.source or None, "settings": _settings(cls)}


def _partition(cls: Any) -> dict[str, Any]:
    return {"about": cls.about, "settings": _settings(cls)}


def _presets(name: str | None) -> list[dict[str, Any]]:
    """All presets, or the one with a name, with their settings and what those mean."""
    configs = presets()
    if name is not None:
        configs = {name: {"about": configs.get(name, {}).get("about"), **preset(name)}}
    rows = []
    for preset_name, config in configs.items():
        values = flat({key: value for key, value in config.items() if key not in ("about", "per_method")})
        settings = {key: {"default": value, "about": _meaning(key, values)} for key, value in values.items()}
        for method, changes in config.get("per_method", {}).items():
            text = ", ".join(f"{key}={value}" for key, value in changes.items())
            settings[method] = {"default": text, "about": "settings for this method only"}
        rows.append({"name": preset_name, "about": config.get("about", ""), "settings": settings})
    return rows


def _meaning(key: str, values: dict[str, Any]) -> str:
    """The meaning of a preset's setting, such as `lr` or `partition.beta`."""
    section, dot, bare = key.partition(".")
    registries: dict[str, Registry[Any]] = {
        "algorithm": ALGORITHMS, "dataset": DATASETS, "partition": PARTITIONS, "model": MODELS,
    }  # fmt: skip
    if section in registries and not dot:
        return registries[section].kind
    owner: Any = registries[section][values[section]] if dot else Settings
    return _settings(owner)[bare or key]["about"]


KINDS: dict[str, tuple[Registry[Any], Callable[[Any], dict[str, Any]]]] = {
    "algorithms": (ALGORITHMS, _algorithm),
    "datasets": (DATASETS, _dataset),
    "models": (MODELS, _model),
    "partitions": (PARTITIONS, _partition),
}
