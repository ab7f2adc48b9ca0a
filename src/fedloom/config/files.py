"""Configurations as YAML files, and presets.

A *config dict* is a plain mapping, as in a YAML file: the settings of a run by name, and for `algorithm`, `dataset`,
`partition` and `model` a name or a mapping of a name and settings.
"""

import os
import re
from collections.abc import Hashable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from fedloom import __version__
from fedloom.core.errors import UserError, check_path, is_plain_text, nearest, shown, unknown

ConfigDict = dict[str, Any]
SECTIONS = ("algorithm", "dataset", "partition", "model")
LARGEST = 1 << 20  # bytes of a file; parsing takes seconds then
DEEPEST = 10  # levels of lists and mappings
LONGEST_INTEGER = 40  # characters, more than any 64-bit number needs
# of run directories and their config.yaml; since 2 they have a manifest, and `clients` is true; since 3, models; since
# 5, checkpoints have the participations of some clients only
FORMAT = 5
FIXED_CLIENTS = ("amazon", "Federation", "femnist", "har", "mnist-by-writer", "own")  # data sets
NATURAL = {"name": "natural"}
PIPES = ("/dev/stdin", "/dev/fd/")  # which a shell has opened: `... | fedloom run --config /dev/stdin`, or <(...)


def read_config(path: Path) -> ConfigDict:
    """A config dict from a YAML file."""
    return {key: value for key, value in parse_config(_read(path), str(path)).items() if key != "about"}


def _read(path: Path) -> str:
    check_path(path)
    if os.path.exists(path) and not os.path.isfile(path) and not str(path).startswith(PIPES):
        raise UserError(f"{path} is not a file; a configuration is a file of YAML such as 'lr: 0.1'.")
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(f"{path} is too large for a configuration: it has more than {LARGEST >> 20} MiB.")
        return content.decode()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file; a configuration is YAML such as 'lr: 0.1'.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}).") from None


class _Loader(yaml.SafeLoader):
    """Reads names, numbers, lists and mappings, and nothing else that YAML allows: tags and aliases, which could make a
    small file huge, a key that occurs twice, and numbers that look like other numbers, such as 010, which is 8."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        line = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{line} has the alias '*{shown(event.anchor)}'; write the value itself")
        if event.tag is not None:
            tag = shown(event.tag.replace("tag:yaml.org,2002:", "!!"))
            raise UserError(f"{line} has the tag '{tag}'; leave it out, as a configuration has plain values only")
        if isinstance(event, yaml.ScalarEvent) and not is_plain_text(event.value):
            raise UserError(f"{line} has a character that is not text")
        self.depth += 1
        if self.depth > DEEPEST:
            raise UserError(f"{line} has more than {DEEPEST} levels, and a configuration has four")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise UserError(f"'{shown(key)}' occurs twice")
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text, line = node.value.replace("_", ""), f"line {node.start_mark.line + 1}"
        if len(text) > LONGEST_INTEGER:
            raise UserError(f"{line} has the number {shown(text)}, which is too large")
        if re.fullmatch(r"[-+]?0\d+", text):
            octal = f", or {int(text, 8)} if it is octal" if not set("89") & set(text) else ""
            raise UserError(f"{line} has {text}, and a leading zero means octal in YAML; write {int(text)}{octal}")
        return int(text, 0)


_NUMBERS = {  # as in YAML, without octal and sexagesimal ones (1:30 is 90), which nobody means
    "int": r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$",
    "float": r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?|\.(inf|Inf|INF))$"
    r"|\.(nan|NaN|NAN)$",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] in ("bool", "null")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind_of_number, _pattern in _NUMBERS.items():
    _tag = f"tag:yaml.org,2002:{_kind_of_number}"
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


class _Dumper(yaml.SafeDumper):
    """Writes a list that occurs twice in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def parse_config(text: str, source: str) -> ConfigDict:
    """A config dict from YAML text; `source` names it in messages."""
    try:
        found = yaml.load(text, _Loader)
    except UserError as error:
        raise UserError(f"{source} is not valid: {error}.") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{source} is not valid YAML{where}; a configuration has lines such as 'lr: 0.1'.") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError(f"{source} must hold settings such as 'lr: 0.1', not {_kind(found)}.")
    header = found.pop("fedloom", None)
    check_format(header, source)
    for key, value in found.items():
        if not isinstance(key, str):
            raise UserError(f"{source} has '{shown(key)}' where the name of a setting should be.")
        if key in SECTIONS:
            _check_section(key, value, source)
        if isinstance(value, dict) and key not in (*SECTIONS, "per_method"):
            raise UserError(f"{source} has settings below '{key}'; {nearest(key, (*SECTIONS, 'per_method'))}")
    check_per_method(found.get("per_method", {}), source)
    if isinstance(header, dict) and header.get("format") == 1:
        _forget_clients(found)
    if isinstance(header, dict) and header.get("format") in (1, 2):
        found.setdefault("stratify", False)  # which they did not know
    if isinstance(header, dict) and header.get("format") in (1, 2, 3):
        _since_format_4(found)
    return found


def _forget_clients(found: ConfigDict) -> None:
    """In format 1, `clients` was recorded as asked for, or as 20, also where the data have a number of their own."""
    dataset = found.get("dataset")
    if isinstance(dataset, dict) and dataset.get("name") in FIXED_CLIENTS and found.get("partition") == NATURAL:
        found.pop("clients", None)


def _since_format_4(found: ConfigDict) -> None:
    """Up to format 3, page had `dcs_holdout` and no fallback, and pfedkt took the paper's single step."""
    method = found.get("algorithm")
    if not isinstance(method, dict):
        return
    if method.get("name") == "page":
        found.setdefault("dcs_holdout", method.pop("dcs_holdout", 0.0))
        method.setdefault("fallback", False)
    if method.get("name") == "pfedkt":
        method.setdefault("hn_init", "default")
        method.setdefault("hn_update", "step")


def _check_section(key: str, value: Any, source: str) -> None:
    if not isinstance(value, str | dict):
        raise UserError(f"{source} must give {key} as a name or with settings below it, not as {_kind(value)}.")


def check_per_method(special: Any, source: str) -> None:
    """Raise UserError unless this is a mapping of methods to settings; `source` names where it is from."""
    if not isinstance(special, dict):
        raise UserError(f"{source} must give per_method as methods with settings below them, not as {_kind(special)}.")
    for method, values in special.items():
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise UserError(f"{source} must give settings below '{method}' in per_method, not {_kind(values)}.")
        for key, value in values.items():
            if key in SECTIONS:
                _check_section(key, value, f"{source}, in per_method,")
        other = values.get("algorithm", values.get("algorithm.name"))
        if isinstance(other, str) or (isinstance(other, dict) and "name" in other):
            raise UserError(f"{source} names an algorithm below '{method}' in per_method; give settings only.")


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
        return int(yaml.load(_read(path), _Loader)["fedloom"]["format"])
    except (UserError, yaml.YAMLError, ValueError, TypeError, KeyError):
        return FORMAT


def to_yaml(config: Mapping[str, Any]) -> str:
    """A config dict as YAML text."""
    header = {"fedloom": {"version": __version__, "format": FORMAT}}
    return yaml.dump({**header, **config}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a word", bool: "true or false", type(None): "nothing"}.get(
        type(value), f"'{shown(value)}'"
    )


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
