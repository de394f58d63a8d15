"""Kernels built in parallel, by processes that run `assemble.py`.

Enters: recipes.  Leaves: for each a Binary, or None where no worker could build it; the launcher then builds it in
this process, where the error is raised that the user sees.  Invariants: nothing waits for ever, a worker that is
killed, hangs or cannot start costs time alone, and a kernel that brings the compiler down twice is not tried where
it would bring down the user's process.
"""

from __future__ import annotations

import atexit
import base64
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Sequence

from fxfuser.config import worker_environment
from fxfuser.runtime import assemble
from fxfuser.runtime.assemble import Recipe
from fxfuser.runtime.binary import Binary

log = logging.getLogger("fxfuser")

START_LIMIT = 60.0  # seconds until a worker has imported Triton
BUILD_LIMIT = 600.0  # seconds for one kernel
MOST_WORKERS = 16
IDLE_LIMIT = 60.0  # seconds after which a worker without work ends: each holds some 200 MB
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL}  # faults of the compiler, not kills


class CompilerCrash(Exception):
    """A kernel on which the compiler itself died."""


class WorkerDied(Exception):
    """A worker ended, or was ended because it took too long; `code` is its exit code."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"a compile worker ended with code {code}")


class Worker:
    """One process.  Used by one thread at a time."""

    def __init__(self) -> None:
        # -P: the script's own folder is no place to import from; a session of its own: Ctrl-C is for the starter, whose
        # end the worker notices by itself
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(assemble.__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=worker_environment(), start_new_session=True)
        self._text = b""
        self.ready = False
        self._say([p or os.getcwd() for p in sys.path])

    def build(self, recipe: Recipe) -> Binary | None:
        """The kernel, or None where Triton refuses it; raises WorkerDied."""
        if not self.ready:
            self._hear(START_LIMIT)
            self.ready = True
        self._say(recipe)
        answer = self._hear(BUILD_LIMIT)
        if "error" in answer:
            log.info("kernel %s: %s", recipe["name"], answer["error"])
            return None
        return Binary(answer["metadata"], base64.b64decode(answer["cubin"]))

    def close(self) -> None:
        """Ends the process: at once if it is idle, else when its build is done."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def _say(self, value: object) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self._died() from None

    def _hear(self, seconds: float) -> dict[str, str]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._text:
                part = os.read(self.process.stdout.fileno(), 1 << 16) if selector.select(seconds) else b""
                if not part:
                    raise self._died()
                self._text += part
        line, _, self._text = self._text.partition(b"\n")
        answer: dict[str, str] = json.loads(line)
        return answer

    def _died(self) -> WorkerDied:
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = -signal.SIGALRM
        return WorkerDied(code)


class Pool:
    """Threads that hand recipes to workers; they start with the first recipes and stay for a while."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.broken = False  # a worker could not start: no other is tried
        self._jobs: SimpleQueue[tuple[Recipe, Future[Binary | None]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._unanswered = 0
        self._workers: list[Worker] = []

    def submit(self, recipes: Sequence[Recipe]) -> list[Future[Binary | None]]:
        """One future per recipe: Binary, None, or CompilerCrash raised."""
        futures: list[Future[Binary | None]] = [Future() for _ in recipes]
        with self._lock:
            for job in zip(recipes, futures):
                self._jobs.put(job)
            self._unanswered += len(recipes)
            new = min(self.most, self._unanswered) - self._threads
            self._threads += max(new, 0)
        for _ in range(new):
            threading.Thread(target=self._run, name="fxfuser-compile", daemon=True).start()
        return futures

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _run(self) -> None:
        worker: Worker | None = None
        while True:
            try:
                recipe, future = self._jobs.get(timeout=IDLE_LIMIT)
            except Empty:
                if self._leave(worker):
                    return
                continue
            worker = self._answer(worker, recipe, future)
            with self._lock:
                self._unanswered -= 1

    def _answer(self, worker: Worker | None, recipe: Recipe, future: Future[Binary | None]) -> Worker | None:
        """Builds one kernel; the worker that is still alive."""
        try:
            worker, made = self._build(worker, recipe)
            future.set_result(made)
            return worker
        except CompilerCrash as error:
            future.set_exception(error)
        except Exception as error:  # a thread that ends would leave its futures unanswered
            self.broken = True
            log.info("compile workers are given up: %s", error)
            future.set_result(None)
        return None

    def _leave(self, worker: Worker | None) -> bool:
        """Whether an idle thread may end: nobody has put a job that counts on it."""
        with self._lock:
            if not self._jobs.empty():
                return False
            self._threads -= 1
            if worker is not None:
                self._forget(worker)
        return True

    def _build(self, worker: Worker | None, recipe: Recipe) -> tuple[Worker | None, Binary | None]:
        """(the worker that is still alive, what it made); raises CompilerCrash."""
        for _ in range(2):
            if self.broken:
                return None, None
            worker = worker or self._start()
            try:
                return worker, worker.build(recipe)
            except WorkerDied as error:
                log.info("kernel %s: %s", recipe["name"], error)
                self._forget(worker)
                self.broken = self.broken or not worker.ready
                worker = None
                if error.code not in CRASHES:
                    return None, None
        raise CompilerCrash(f"Triton's compiler died twice on kernel {recipe['name']}")

    def _start(self) -> Worker:
        worker = Worker()
        self._workers.append(worker)
        return worker

    def _forget(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.close()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def worth_it(builds: int) -> bool:
    """Whether workers beat this process: each takes a second or two to start."""
    started = _pool is not None
    return bool(sys.executable) and cores() > 1 and builds >= (2 if started else 3)


def pool() -> Pool:
    """The process's pool."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = Pool(min(cores(), MOST_WORKERS))
            atexit.register(_pool.close)
        return _pool


def _after_fork() -> None:
    """A forked child has the pool's pipes, but not its threads."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


_pool: Pool | None = None
_pool_lock = threading.Lock()
os.register_at_fork(after_in_child=_after_fork)
