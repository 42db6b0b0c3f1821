"""Programs under ``torch.compile``: our functions break the graph, so that the compiler never looks into them.

Without a break the compiler follows a solve into its threads, its C core and branches for libraries that are absent.
The losses of mapuot.torch are operators instead (compiled.py) and need no break.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def breaks_graph(function: F) -> F:
    """Decorate a function that no compiler should trace, nor anything that it calls.

    A program without a compiler pays .1 us a call, and 1 us once it has imported one.
    """
    outside: Any = None

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        nonlocal outside
        if "torch._dynamo" not in sys.modules:
            return function(*args, **named)
        if outside is None:
            outside = sys.modules["torch"].compiler.disable(function)
        return outside(*args, **named)

    return call  # type: ignore[return-value]
