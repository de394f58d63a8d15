"""Calls of a plan as replays of CUDA graphs: what `mode="reduce-overhead"` is.

Enters: a plan's function and the Facts of its graph.  Leaves: a function that does the same.  The first call of a
shape runs as it is (kernels are loaded, libraries take their workspaces), the second is captured, later ones copy
their inputs to where the capture reads them and replay.  The rules:

- An input stays in place where its address is stable: parameters, buffers, and what a captured forward saved.  Its
  address is compared at each call; a call with another one runs plainly, and if that goes on the graph is captured
  anew with the input copied.
- Results are copied out: a later call never changes what an earlier one returned.
- What a forward saves for its backward is not copied: it stays in the capture's memory.  Until its backward has run
  (and does not retain the graph) or autograd has dropped it, the next call runs plainly.
- A capture that saves has a memory pool of its own, in which only its backward joins it; all others of a device share
  one pool.  So no replay overwrites anything that is still needed, in whatever order graphs run.  A pool is held by an
  empty graph of its own: the allocator refuses a pool whose graphs have all died while a tensor in it lives on.
- Where a capture fails the plan runs plainly from then on, and the reason is told.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Callable, Protocol, Sequence

import torch
from torch import fx
from torch.autograd.graph import increment_version

from fxfuser import observe
from fxfuser.runtime.capturable import Boundary, Facts, NotCapturable, facts
from fxfuser.runtime.plan import BoxedCallable

log = logging.getLogger("fxfuser")

MOST_SHAPES = 16  # captures of one plan, each of which holds memory
MOST_COPIED = 1 << 24  # bytes that a backward whose forward is not captured may copy
PATIENCE = 3  # plain calls because of a moved input before the graph is captured anew

Maker = Callable[[Sequence[Any]], Any]  # a call's arguments -> one of its outputs


@dataclass(frozen=True, eq=False)
class Pool:
    """A memory pool of captures, which lives as long as this does; `holder` is the graph that holds it."""

    id: Any
    holder: Any = None


class Device(Protocol):
    """What captures need of CUDA."""

    def pool(self) -> Pool:
        """A new memory pool."""

    def capturing(self) -> bool:
        """Whether somebody captures the current stream already."""

    def capture(self, pool: Pool, random: bool, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(replay, what `run` returned): `run` is recorded, not executed.  Raises what CUDA raises."""

    def stream(self) -> Any:
        """The current stream; comparable."""

    def wait(self, stream: Any) -> None:
        """The current stream waits for what is in `stream` by now."""


class Cuda:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pool(self) -> Pool:
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            holder = torch.cuda.CUDAGraph()
            holder.capture_begin(capture_error_mode="thread_local")
            holder.capture_end()
        return Pool(holder.pool(), holder)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def capture(self, pool: Pool, random: bool, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            before = generator.clone_state()
            if random:  # a replay continues the stream of random numbers where a plain call would
                graph.register_generator_state(generator)
            try:
                # thread_local: what other threads do meanwhile (a data loader that pins memory) is not in the capture
                with torch.cuda.graph(graph, pool=pool.id, capture_error_mode="thread_local"):
                    outputs = run()
            except Exception:
                # a capture that ends early leaves the generator in its capturing state (seen with 2.11: "Offset
                # increment outside graph capture"), and no random number could be drawn in this process again
                generator.graphsafe_set_state(before)
                raise
        return graph.replay, outputs

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def wait(self, stream: torch.cuda.Stream) -> None:
        self.stream().wait_stream(stream)


@dataclass
class Kept:
    """What a captured forward saved: the pool that it lies in, and the tensors by which autograd holds it now."""

    pool: Pool
    held: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


@dataclass
class Shared:
    """What all captures on a device share; used under its lock.

    `kept`: by address, what captured forwards saved; `stable`: other addresses known to stay.
    """

    device: Device
    pool: Pool
    lock: threading.RLock = field(default_factory=threading.RLock)
    kept: dict[int, Kept] = field(default_factory=dict)
    stable: set[int] = field(default_factory=set)
    stream: Any = None

    def follow(self) -> None:
        """Orders the current stream after the last replay: graphs that share memory may not overlap."""
        current = self.device.stream()
        if self.stream is not None and self.stream != current:
            self.device.wait(self.stream)
        self.stream = current


@dataclass
class Capture:
    """One captured call.

    `copied`: (position, buffer that the graph reads); `expanded`: those of them with a stride of 0, where a part stands
    for the whole, and the strides; `placed`: (position, address) of inputs read in place; `outputs`: makes each
    returned value of (arguments); `moved`: plain calls in a row because of a placed input that had moved.
    """

    replay: Callable[[], None]
    copied: tuple[tuple[int, torch.Tensor], ...]
    expanded: tuple[tuple[int, tuple[int, ...]], ...]
    placed: tuple[tuple[int, int], ...]
    kept: Kept
    outputs: tuple[Maker, ...] = ()
    moved: int = 0


class Graphed:
    """A plan's function behind captures."""

    def __init__(self, name: str, call: BoxedCallable, facts: Facts, shared: Shared) -> None:
        self.name, self.call, self.facts, self.shared = name, call, facts, shared
        self._captures: dict[Any, Capture | None] = {}  # None: called once
        self._copied: set[int] = set()  # inputs that were static and moved
        self._told: set[str] = set()
        self._refused = False
        self._boxed_call = True  # AOTAutograd's mark of functions of one list

    def __call__(self, args: list[Any]) -> Any:
        if self._refused or self.shared.device.capturing():
            return self.call(args)
        retained, used = self.facts.boundary.retained, self._kept_inputs(args)
        result = self._run(args)
        if retained is not None and used and not retained():
            for kept in used:
                kept.held.clear()
        return result

    def _kept_inputs(self, args: list[Any]) -> list[Kept]:
        """What of captured forwards a backward reads."""
        if self.facts.boundary.retained is None:
            return []
        found = (self.shared.kept.get(a.data_ptr()) for a in args if isinstance(a, torch.Tensor))
        return [kept for kept in found if kept is not None]

    def _run(self, args: list[Any]) -> Any:
        key = self.facts.key(args)
        with self.shared.lock:
            if key in self._captures:
                capture = self._captures[key] or self._record(key, args)
                if capture is not None and self._fits(key, capture, args):
                    return self._replay(capture, args)
            elif len(self._captures) < MOST_SHAPES:
                self._captures[key] = None
            else:
                self._tell(f"{MOST_SHAPES} shapes are captured, others are not")
        return self.call(args)

    # one capture

    def _record(self, key: Any, args: list[Any]) -> Capture | None:
        if self._copies_much(args):
            self._tell("its forward is not captured, and what it saved would have to be copied")
            return None
        try:
            with ExitStack() as stack:  # buffers outlive the user's modes
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
                self._captures[key] = self._captured(args)
        except Exception as error:  # whatever CUDA refuses: the call itself has not run yet
            self._refused = True
            self._captures.clear()
            self._tell(f"the capture failed: {type(error).__name__}: {error}")
            return None
        return self._captures[key]

    def _copies_much(self, args: list[Any]) -> bool:
        """Whether a backward reads nothing of a captured forward, and much that is not in place."""
        tensors = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in self.facts.unread}
        if self.facts.boundary.retained is None or self._kept_inputs(args):
            return False
        return sum(a.nbytes for i, a in tensors.items() if not self._stays(i, a.data_ptr())) > MOST_COPIED

    def _captured(self, args: list[Any]) -> Capture:
        shared, tensors = self.shared, {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        if strange := [a.device for a in tensors.values() if a.device != self.facts.device]:
            raise NotCapturable(f"an input is on {strange[0]}")
        addresses = {i: a.data_ptr() for i, a in tensors.items() if i not in self.facts.unread}
        placed = {i: address for i, address in addresses.items() if self._stays(i, address)}
        copied = {i: buffer_for(args[i]) for i in addresses if i not in placed}
        inputs = [copied.get(i, a) for i, a in enumerate(args)]
        saves = self.facts.boundary.results is not None
        near = [shared.kept[p].pool for p in placed.values() if p in shared.kept]
        pool = shared.device.pool() if saves else near[0] if near else shared.pool
        replay, outputs = shared.device.capture(pool, self.facts.random, lambda: self.call(list(inputs)))
        shared.stable.update(placed.values())
        expanded = tuple((i, b.stride()) for i, b in copied.items() if 0 in b.stride())
        capture = Capture(replay, tuple(copied.items()), expanded, tuple(placed.items()), Kept(pool))
        own = {storage_of(args[i]) for i in placed}
        capture.outputs = tuple(self._maker(i, v, inputs, own, capture.kept) for i, v in enumerate(outputs))
        return capture

    def _maker(self, position: int, value: Any, inputs: list[Any], placed: set[int], kept: Kept) -> Maker:
        """How a replay gives the output that the capture returned as `value`; `placed` are storages of inputs."""
        if not isinstance(value, torch.Tensor):
            return lambda args: value
        same = next((j for j, a in enumerate(inputs) if a is value), None)
        if same is not None:
            return lambda args: args[same]
        results = self.facts.boundary.results
        if results is None or position < results:
            return _copy(value)
        if value.numel() == 0 or storage_of(value) in placed:  # nothing, or a view of a parameter: no replay writes it
            return lambda args: value.detach()
        self.shared.kept[value.data_ptr()] = kept
        return _lent(value, kept.held)

    def _stays(self, position: int, address: int) -> bool:
        if position in self._copied:
            return False
        return position in self.facts.boundary.static or address in self.shared.kept or address in self.shared.stable

    def _fits(self, key: Any, capture: Capture, args: list[Any]) -> bool:
        """Whether this call may be a replay; else it is to run plainly."""
        moved = [(i, address) for i, address in capture.placed if args[i].data_ptr() != address]
        other = [i for i, stride in capture.expanded if args[i].stride() != stride]
        if moved or other:
            # what a forward saved is elsewhere because that forward ran plainly: the next may be a replay again
            other += [i for i, address in moved if address not in self.shared.kept]
            capture.moved += bool(other)
            if capture.moved > PATIENCE:
                self._give_up(key, other)
            return False
        capture.moved = 0
        if any(ref() is not None for ref in capture.kept.held):
            self._tell("what an earlier call saved for its backward is still needed at the next call")
            return False
        return True

    def _give_up(self, key: Any, moved: list[int]) -> None:
        self._copied.update(moved)
        self._captures[key] = None  # the next call captures

    def _replay(self, capture: Capture, args: list[Any]) -> tuple[Any, ...]:
        self.shared.follow()
        with torch.no_grad():
            for i, buffer in capture.copied:
                fill(buffer, args[i])
            capture.replay()
            capture.kept.held.clear()
            for i, buffer in capture.copied:
                if i in self.facts.mutated:
                    args[i].copy_(buffer)
            if self.facts.boundary.retained is not None:  # of a forward's writes AOTAutograd tells autograd
                increment_version(args[i] for i, _ in capture.placed if i in self.facts.mutated)
            found = tuple(make(args) for make in capture.outputs)
        args.clear()
        return found

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("%s runs without a CUDA graph: %s", self.name, reason)


# ---------------------------------------------------------------- values


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def buffer_for(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes and strides with the same values."""
    buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    fill(buffer, tensor)
    return buffer


def fill(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies `tensor` to `buffer`.  Where a stride of the buffer is 0 one element stands for all, in both."""
    if 0 in buffer.stride():
        narrow = tuple(slice(0, 1) if s == 0 else slice(None) for s in buffer.stride())
        buffer, tensor = buffer[narrow], tensor[narrow]
    buffer.copy_(tensor)


def _copy(value: torch.Tensor) -> Maker:
    if torch.empty_like(value, device="meta").stride() == value.stride():
        return lambda args: value.clone()
    return lambda args: buffer_for(value)


def _lent(value: torch.Tensor, held: list[weakref.ref[torch.Tensor]]) -> Maker:
    def make(args: Sequence[Any]) -> torch.Tensor:
        alias = value.detach()  # a tensor object of this call, whose end shows that autograd has let go of it
        held.append(weakref.ref(alias))
        return alias

    return make


# ---------------------------------------------------------------- entry


@cache
def shared_on(device: torch.device) -> Shared:
    """The process's captures on one device."""
    cuda = Cuda(device)
    return Shared(cuda, cuda.pool())


def graphed(call: BoxedCallable, module: fx.GraphModule, boundary: Boundary, name: str) -> BoxedCallable:
    """`call` behind CUDA graphs, or `call` itself where the graph cannot be captured; the reason is recorded."""
    try:
        found = facts(module, boundary)
    except NotCapturable as error:
        log.warning("%s runs without a CUDA graph: %s", name, error)
        observe.record(observe.CudaGraphRecord(name, str(error)))
        return call
    observe.record(observe.CudaGraphRecord(name))
    return Graphed(name, call, found, shared_on(found.device))
