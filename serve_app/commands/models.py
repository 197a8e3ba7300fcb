"""`moorage models`: what is known by name, what is here."""

from __future__ import annotations

from rich.table import Table

from serve_app.commands.console import console, fail, fetch_with_bar, say
from serve_app.model_store import KNOWN_MODELS, ModelStoreError, cached_path, home


def show() -> None:
    table = Table(box=None, header_style="bold")
    for column in ("name", "what it is", "license", "download", "on disk"):
        table.add_column(column)
    for model in KNOWN_MODELS.values():
        path = cached_path(model)
        table.add_row(
            model.name,
            model.about,
            model.license,
            f"{model.download_bytes / 1e6:.0f} MB",
            "not yet" if path is None else f"{model.size / 1e6:.0f} MB",
        )
    console.print(table)
    say(f"kept in {home()} ($MOORAGE_HOME moves it); any Hugging Face folder or GGUF file serves by its path as well")


def fetch_by_name(name: str) -> int:
    if name not in KNOWN_MODELS:
        fail(f"no model is known as {name!r}; known: {', '.join(KNOWN_MODELS)}")
        return 2
    try:
        path = fetch_with_bar(name)
    except ModelStoreError as error:
        fail(str(error))
        return 1
    except KeyboardInterrupt:
        fail("interrupted; nothing was kept")
        return 130
    say(str(path))
    return 0
