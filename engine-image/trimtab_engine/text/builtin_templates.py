"""Chat templates included with the engine, by name: for models whose own template does not support tools."""

from importlib.resources import files

BUILTIN_TEMPLATES = ("hermes",)


def builtin_template(name: str) -> str | None:
    """Return the text of a template, or None if the name is unknown."""
    if name not in BUILTIN_TEMPLATES:
        return None
    return (files("trimtab_engine.text") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
