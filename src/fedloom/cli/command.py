"""The classes of all commands: help with options in groups and with examples, and one sentence for a mistake."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fedloom.cli.options import OPTIONS
from fedloom.config.settings import SYNONYMS, Settings
from fedloom.core.errors import UserError, shown, unknown
from fedloom.core.settings import fields

if TYPE_CHECKING:
    from click import Command as Base
else:
    Base = object

GROUPS = ("Sites", "Dry run", "Task", "Training", "Evaluation", "Execution", "Results", "Settings", "Other", "Options")
COLUMN = 26  # characters of an option and its value; the help of a longer one begins in the next line
NEAR = 0.75  # similarity from which a name is suggested in place of another
# what other programs call options that are not settings of a run
OPTION_SYNONYMS = {
    "output": "out", "output_dir": "out", "save_dir": "out", "gpu": "device", "data": "dataset", "cfg": "config",
}  # fmt: skip
DEFAULTS = {"--equal-budget": "fedavg"}  # values of options that may be given without one
METHOD_OPTIONS = ("algorithm", "algo", "method", "methods", "strategy")  # of other programs; here it is an argument
HELP = {  # of options that typer adds
    "help": "print this help",
    "install_completion": "let Tab complete commands, options and names in this shell",
    "show_completion": "print what that adds to the configuration of the shell",
}
UsageError: Any = typer.BadParameter.__base__  # typer exports its subclasses only


def examples(*lines: str, docs: str) -> str:
    """The end of a command's help: commands to try, and the page of the documentation about them."""
    return "\n".join(["Examples:", *(f"  {line}" for line in lines), "", f"Documentation: {docs}"])


class _Readable(Base):
    """Help and errors. The group of an option is its `rich_help_panel`, one of GROUPS."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Raises a UserError for those that are wrong."""
        given = _with_defaults(args)
        try:
            return super().parse_args(ctx, list(given))
        except UsageError as error:
            raise _user_error(error, ctx, given) from None

    def get_params(self, ctx: Any) -> Any:
        """All arguments and options."""
        params: list[Any] = super().get_params(ctx)
        for param in params:
            param.help = HELP.get(param.name, param.help)
        return params

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by group."""
        sections: dict[str, list[tuple[str, str]]] = {}
        params = self.get_params(ctx)
        rest = "Other" if any(getattr(param, "rich_help_panel", None) for param in params) else "Options"
        for param in params:
            if param.param_type_name == "argument":
                sections.setdefault("Arguments", []).append((param.make_metavar(ctx=ctx), param.help or ""))
            elif record := param.get_help_record(ctx):
                sections.setdefault(getattr(param, "rich_help_panel", None) or rest, []).append(record)
        width = min(COLUMN, max(len(name) for records in sections.values() for name, _ in records))
        for group in ("Arguments", *GROUPS):
            if group in sections:
                with formatter.section(group):
                    formatter.write_dl([(f"{name:<{width}}", about) for name, about in sections[group]], COLUMN)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are."""
        formatter.write(f"\n{self.epilog}\n" if self.epilog else "")


class Command(_Readable, TyperCommand):
    """A command of the command line."""

    allow_extra_args = True  # so that `parse_args` gets them

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Raises a UserError for those that are wrong."""
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            raise UserError(f"Unexpected argument '{shown(rest[0])}'; {_usage(ctx)}")
        return rest


class Group(_Readable, TyperGroup):
    """A command with others below it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments begin with. Raises a UserError if there is none."""
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


def _with_defaults(args: list[str]) -> list[str]:
    """The arguments, with the values of options of DEFAULTS that have none."""
    found: list[str] = []
    for i, word in enumerate(args):
        alone = i + 1 == len(args) or args[i + 1].startswith("-")
        found += [word, DEFAULTS[word]] if word in DEFAULTS and alone else [word]
    return found


def _usage(ctx: Any) -> str:
    return f"usage: {' '.join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])}."


def _user_error(error: Any, ctx: Any, args: list[str]) -> UserError:
    """What is wrong with the arguments of a command, in one sentence."""
    kind, name = type(error).__name__, getattr(error, "option_name", "")
    if kind == "NoSuchOption":
        return _unknown_option(ctx, name, args)
    if kind == "BadOptionUsage" and (option := next((p for p in ctx.command.params if name in p.opts), None)):
        what = "takes no value" if option.is_flag else f"needs a value: {name} {option.make_metavar(ctx=ctx)}"
        return UserError(f"Option '{name}' {what}.")
    if kind == "MissingParameter" and error.param is not None:
        about = f" ({error.param.help})" if error.param.help else ""
        return UserError(f"Missing argument {error.param.make_metavar(ctx=ctx)}{about}; {_usage(ctx)}")
    return UserError(error.format_message())


def _unknown_option(ctx: Any, option: str, args: list[str]) -> UserError:
    """The error for an option that a command does not have: it says how the value is given, or names a near option."""
    word, value = map(shown, _as_given(option, args))
    name = word.lstrip("-").replace("-", "_").lower()
    known = {o.lstrip("-").replace("-", "_"): o for param in ctx.command.get_params(ctx) for o in param.opts}
    known = {key: o for key, o in known.items() if o.startswith("--")}
    problem = f"No such option '{word}'"
    if name in METHOD_OPTIONS and any(param.name in ("algorithm", "methods", "method") for param in ctx.command.params):
        return UserError(f"{problem}: the method is an argument, as in '{ctx.command_path} {value or 'ditto'}'.")
    if "set" in known and (how := _as_setting(name, value or "VALUE", ctx.command_path)):
        return UserError(f"{problem}; {how}.")
    if "config" in known:
        settings = [name for name in fields(Settings) if name not in OPTIONS and name not in known]
        known |= {name: f"--set {name}={value or 'VALUE'}" for name in settings}
    known |= {other: known[usual] for other, usual in (SYNONYMS | OPTION_SYNONYMS).items() if usual in known}
    if near := difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
        return UserError(f"{problem}; did you mean '{known[near[0]]}'?")
    return UserError(f"{problem}; '{ctx.command_path} --help' lists those that there are.")


def _as_given(option: str, args: list[str]) -> tuple[str, str]:
    """An option and its value as a user wrote them; of `-lr 0.1`, the parser reports only `-l`."""
    for i, arg in enumerate(args):
        word, equals, value = arg.partition("=")
        if word == option or (len(option) == 2 and option != "--" and word.startswith(option)):
            following = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else ""
            return word, value if equals else following
    return option, ""


def _as_setting(name: str, value: str, command: str) -> str | None:
    """How a setting is given that has no option of its own; None if there is no such setting, or it has one."""
    from fedloom.config.resolve import NOUNS, REGISTRIES

    if name in OPTIONS:
        return None
    sections = {"fedloom check": ("algorithm",), "fedloom data check": ("dataset",)}.get(command)
    if sections is None and name in fields(Settings):
        return f"this setting is given as '--set {name}={value}'"
    owners = {
        section: [other for other in REGISTRIES[section].names() if name in fields(REGISTRIES[section][other])]
        for section in sections or REGISTRIES
    }
    if command in ("fedloom compare", "fedloom costs") and owners["algorithm"]:
        return f"settings of a method are given with it, as in '{owners['algorithm'][0]}:{name}={value}'"
    found = " or ".join(f"a {NOUNS[section]}" for section, having in owners.items() if having)
    return f"settings of {found} are given as '--set {name}={value}'" if found else None
