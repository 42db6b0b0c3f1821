"""threadpoolctl's controller, which sets the default number of threads.

``with threadpoolctl.threadpool_limits(2):`` then limits calls without ``threads``, as it limits BLAS; joblib and
scikit-learn use it, too.
"""

import threadpoolctl

from .processor import set_thread_limit, thread_count


class ThreadLimit(threadpoolctl.LibController):  # type: ignore[misc]
    """Controller of the threads of this package; its limit holds for the process."""

    user_api = "mapuot"
    internal_api = "mapuot"
    filename_prefixes = ("_core",)
    check_symbols = ("mapuot_pool_threads",)

    def get_num_threads(self) -> int:
        return thread_count()

    def set_num_threads(self, num_threads: int) -> None:
        set_thread_limit(num_threads)

    def get_version(self) -> None:
        """Return None: the library has no version of its own."""
