"""Configurations as YAML files, and presets.

A *config dict* is a plain mapping, as in a YAML file: the settings of a run by name, and for `algorithm`, `dataset`,
`partition` and `model` a name or a mapping of a name and settings.
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from fedloom import __version__
from fedloom.core.errors import UserError, nearest, unknown

ConfigDict = dict[str, Any]
SECTIONS = ("algorithm", "dataset", "partition", "model")
FORMAT = 2  # of run directories and their config.yaml; since 2 they have a manifest


def read_config(path: Path) -> ConfigDict:
    """A config dict from a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file; a configuration is YAML such as 'lr: 0.1'.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}).") from None
    return {key: value for key, value in parse_config(text, str(path)).items() if key != "about"}


class _Loader(yaml.SafeLoader):
    """Rejects a key that occurs twice, which YAML allows but is always a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"'{key}' occurs twice")
        return super().construct_mapping(node, deep)


def parse_config(text: str, source: str) -> ConfigDict:
    """A config dict from YAML text; `source` names it in messages."""
    try:
        found = yaml.load(text, _Loader)
    except UserError as error:
        raise UserError(f"{source} is not valid: {error}.") from None
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
    """Refuse a file of a newer format; `header` is what FedLoom writes at the top of its files."""
    written = header.get("format") if isinstance(header, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise UserError(
            f"{source} was written by a newer FedLoom (format {written}, this one reads {FORMAT}); update FedLoom."
        )


def written_format(path: Path) -> int:
    """The format that a file of FedLoom was written in; the present one if the file cannot be read."""
    try:
        return int(yaml.load(path.read_text(encoding="utf-8"), _Loader)["fedloom"]["format"])
    except (OSError, UserError, yaml.YAMLError, ValueError, TypeError, KeyError, RecursionError):
        return FORMAT


def to_yaml(config: Mapping[str, Any]) -> str:
    """A config dict as YAML text."""
    header = {"fedloom": {"version": __version__, "format": FORMAT}}
    return yaml.safe_dump({**header, **config}, sort_keys=False, allow_unicode=True)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a word", bool: "true or false", type(None): "nothing"}.get(type(value), f"'{value}'")


def presets() -> dict[str, ConfigDict]:
    """All presets by name: settings that belong together, with a description under `about`."""
    found: dict[str, ConfigDict] = {}
    for folder in sorted(resources.files("fedloom.presets").iterdir(), key=lambda f: f.name):
        if folder.is_dir():
            for file in sorted(folder.iterdir(), key=lambda f: f.name):
                if file.name.endswith(".yaml"):
                    name = f"{folder.name}/{file.name.removesuffix('.yaml')}"
                    found[name] = parse_config(file.read_text(encoding="utf-8"), f"preset {name}")
    return found


def preset(name: str) -> ConfigDict:
    """The settings of a preset."""
    known = presets()
    if name not in known:
        raise unknown("preset", name, known)
    return {k: v for k, v in known[name].items() if k != "about"}
