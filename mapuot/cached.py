"""`cached_property` as Python 3.12 has it, without a lock.

Python 3.10 and 3.11 hold one lock for all objects of a class while a property is computed: a plan that one thread forms
would stop every thread that asks another result for its plan, and a child forked meanwhile would wait for ever. Without
a lock two threads that ask one result at once may both form its plan; one of the two is kept.
"""

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    cached_property = functools.cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801 - the word of functools
        def __init__(self, func: Any) -> None:
            super().__init__(func)
            self.lock = nullcontext()
