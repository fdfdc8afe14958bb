"""Chat templates that come with the engine, by name: for models whose own template knows no tools."""

from importlib.resources import files

SHIPPED = ("hermes",)


def shipped_template(name: str) -> str | None:
    """The text of a template; None when none is called so."""
    if name not in SHIPPED:
        return None
    return (files("trimtab_engine.text") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
