"""The progress bar of every long call: tqdm's, a widget in notebooks, imported when the first one is shown.

tqdm would add 50 ms to `import mapuot`, and most calls show no bar. `Hidden` takes the same calls as a bar.
"""

from typing import Any


class Hidden:
    """Stand-in for a bar that nobody asked for."""

    def __enter__(self) -> "Hidden":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        pass


def bar(shown: bool, **options: Any) -> Any:
    """A bar with tqdm's ``options``, or one that shows nothing."""
    if not shown:
        return Hidden()
    from tqdm.auto import tqdm  # noqa: PLC0415 - on first use

    return tqdm(disable=False, **options)
