"""One function on several threads at once.

Enters: a function of a thread's number.  Leaves: what it returned on each, in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any


def in_threads(count: int, body: Callable[[int], Any]) -> Iterator[Any]:
    """body(0..count-1), each on a thread of its own, all at once; raises the first error."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def target(i: int) -> None:
        barrier.wait()
        try:
            results[i] = body(i)
        except Exception as error:  # handed to the caller's thread
            results[i] = error

    threads = [threading.Thread(target=target, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
        yield result
