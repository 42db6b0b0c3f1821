"""`Settings`: numbers that decide, in one object for each concern, which a test may set for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Settings:
    """Numbers that decide: thresholds, sizes and limits, each an attribute with its unit and the reason for it.

    A program never changes them. `using` is for tests and for measurements that look for better ones.
    """

    @contextmanager
    def using(self, **numbers: Any) -> Iterator[None]:
        """Set some numbers within a ``with`` block, for all threads; an unknown name raises AttributeError."""
        before = {name: getattr(self, name) for name in numbers}
        vars(self).update(numbers)
        try:
            yield
        finally:
            vars(self).update(before)
