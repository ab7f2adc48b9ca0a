"""What the API reference reads besides docstrings: an extension of Griffe, named in mkdocs.yml."""

import ast
import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
PAGE = re.compile(r"\bdocs/([\w/-]+\.md)")


class FedLoomExtension(griffe.Extension):
    """Documents fields, shows examples as code, and finds the names that `fedloom` imports when they are first used."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Show examples as code, which Markdown would take for quotations, and link pages that are named."""
        if obj.docstring:
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = PAGE.sub(r"[\g<0>](../\1)", text)

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **kwargs: Any
    ) -> None:
        """Document a field by the comment behind it, or by the meaning in `setting(default, "meaning")`."""
        if not isinstance(node, ast.AnnAssign) or not isinstance(attr.parent, griffe.Class):
            return
        if (text := meaning(node.value) or comment(attr)) and not attr.docstring:
            attr.docstring = griffe.Docstring(text[0].upper() + text[1:], parent=attr)
        if isinstance(attr.value, griffe.ExprCall):  # of `setting(default, ...)` the default, of `field(...)` nothing
            attr.value = attr.value.arguments[0] if attr.value.function.canonical_name == "setting" else None

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Let `fedloom.run` be `fedloom.studies.run.run`: `__init__.py` does not import it."""
        homes = pkg.members.get("_HOMES")
        if isinstance(homes, griffe.Attribute):
            for home, names in ast.literal_eval(str(homes.value)).items():
                for name in names:
                    pkg.members[name] = griffe.Alias(name, f"{home}.{name}", parent=pkg)


def meaning(value: ast.expr | None) -> str:
    """The second argument of `setting`, or ""."""
    match value:
        case ast.Call(func=ast.Name(id="setting"), args=[_, ast.Constant(value=str(text))]):
            return text
    return ""


def comment(attr: griffe.Attribute) -> str:
    """The comment behind a field, or ""."""
    assert isinstance(attr.parent, griffe.Class)
    assert attr.lineno
    line = attr.parent.module.lines_collection[attr.filepath][attr.lineno - 1]  # type: ignore[index]
    return line.partition("  # ")[2].strip()
