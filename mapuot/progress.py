"""The progress bar of every long call: tqdm's, a widget in notebooks, imported when the first one is shown.

tqdm would add 50 ms to `import mapuot`, and most calls show no bar.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any


def bar(shown: bool, **options: Any) -> Any:
    """A bar with tqdm's ``options``, or one that shows nothing."""
    if not shown:
        return nullcontext(SimpleNamespace(update=lambda count=1: None))
    from tqdm.auto import tqdm  # noqa: PLC0415 - on first use

    return tqdm(disable=False, **options)
