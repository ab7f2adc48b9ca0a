"""The entries that `fedloom list` prints, as plain data."""

from collections.abc import Callable
from typing import Any

from fedloom.config.files import preset, presets
from fedloom.config.resolve import VARIANT, flat
from fedloom.config.settings import Settings
from fedloom.core.algorithm import ALGORITHMS, Algorithm
from fedloom.core.kinds import KINDS as TARGETS
from fedloom.core.registry import Registry
from fedloom.core.settings import fields
from fedloom.data.dataset import DATASETS, Dataset
from fedloom.data.partitions import PARTITIONS
from fedloom.models.zoo import MODELS, Model


def catalog(kind: str, name: str | None = None) -> list[dict[str, Any]]:
    """All entries of a kind ("algorithms", "datasets", "models", "partitions" or "presets"), or the one with a name."""
    if kind == "presets":
        return _presets(name)
    registry, describe = KINDS[kind]
    return [{"name": n, **describe(registry[n])} for n in ([name] if name is not None else registry.names())]


def _settings(cls: type) -> dict[str, dict[str, Any]]:
    """Default and meaning of every setting of a class."""
    return {name: {"default": f.default, "about": f.metadata.get("about", "")} for name, f in fields(cls).items()}


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
