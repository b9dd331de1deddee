"""Docstrings, which are written for `help`, as the site's Markdown; see mkdocs.yml."""

import re

import griffe


class AsMarkdown(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function_instance(self, *, func: griffe.Function, **kwargs: object) -> None:
        """Takes out what a signature has in order to refuse it: see python/flashtile/_misnamed.py."""
        for name in [parameter.name for parameter in func.parameters if parameter.default == "..."]:
            del func.parameters[name]


def as_markdown(text: str) -> str:
    text = re.sub(r":(?:func|class|meth|mod):`([^`]+)`", r"`\1`", text)
    text = re.sub(r"^>>> .+(?:\n.+)*", _fenced, text, flags=re.MULTILINE)  # an example that stands in no section
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)  # what is indented below is a block of code here too
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


def _fenced(example: re.Match[str]) -> str:
    return f"```pycon\n{example[0].replace('  # doctest: +SKIP', '')}\n```"
